"""Loose pairs that other tools drop into incoming/."""

import hashlib
import os

import pytest
from conftest import clip_bytes, make_clip, receipt_of

from h3spool import adopt, steps
from h3spool.errors import BadData

RAW = clip_bytes(*make_clip())
DIGEST = hashlib.sha256(RAW).hexdigest()


def drop(spool, stem="my clip", raw=RAW, digest=DIGEST, suffix=".sha256", line="{digest}  {stem}.h3latent\n"):
    folder = spool.root / "incoming"
    (folder / f"{stem}.h3latent").write_bytes(raw)
    (folder / f"{stem}{suffix}").write_text(line.format(digest=digest, stem=stem))


def verified(spool, settle_s=0.0):
    return [(outcome.job, outcome.state) for outcome in steps.verify(spool, settle_s=settle_s)]


@pytest.mark.parametrize("suffix", [".sha256", ".h3latent.sha256"])
@pytest.mark.parametrize(
    "line",
    [
        "{digest}  {stem}.h3latent\n",
        "{digest} *{stem}.h3latent\r\n",
        "{digest}",
        "SHA256 ({stem}.h3latent) = {digest}\n",
        "SHA2-256({stem}.h3latent)= {digest}\n",
        "\ufeff{digest}  ./some/where/{stem}.h3latent\n",
    ],
)
def test_a_pair_becomes_a_job_whatever_tool_wrote_the_checksum(sampler, suffix, line):
    drop(sampler, suffix=suffix, line=line)
    name = f"my-clip-{DIGEST[:12]}"
    assert verified(sampler) == [(name, "verified")]
    assert sorted(os.listdir(sampler.root / "incoming")) == []
    assert (sampler.root / "verified" / name / f"{name}.h3latent").read_bytes() == RAW
    steps_done = [event["step"] for event in receipt_of(sampler, name)["events"]]
    assert steps_done == ["adopt", "verify"] and not os.listdir(sampler.root / "tmp")


def test_the_same_pair_again_is_the_same_job(sampler):
    drop(sampler)
    verified(sampler)
    drop(sampler)
    assert verified(sampler) == [] and not os.listdir(sampler.root / "incoming")
    assert len(sampler.names("verified")) == 1


def test_a_pair_that_disagrees_waits_and_then_fails_with_the_reason(sampler):
    drop(sampler, raw=RAW[:-4])
    assert verified(sampler, settle_s=60) == []
    assert len(adopt.loose_files(sampler)) == 2
    ((name, state),) = verified(sampler)
    assert state == "failed" and name.startswith("my-clip-") and not adopt.loose_files(sampler)
    assert "its checksum file says" in receipt_of(sampler, name)["events"][-1]["error"]
    drop(sampler)  # corrected: welcome
    assert verified(sampler) == [(f"my-clip-{DIGEST[:12]}", "verified")]


def test_a_lone_latent_and_work_in_progress_are_left_alone(sampler):
    folder = sampler.root / "incoming"
    for name in ("lone.h3latent", ".x.h3latent.Ab12", "y.h3latent.part", "z.txt"):
        (folder / name).write_bytes(RAW)
    assert verified(sampler) == []
    assert sorted(os.listdir(folder)) == [".x.h3latent.Ab12", "lone.h3latent", "y.h3latent.part", "z.txt"]
    assert adopt.loose_files(sampler) == ["lone.h3latent", "z.txt"]


def test_a_link_is_not_followed(sampler, tmp_path):
    (tmp_path / "elsewhere").write_bytes(RAW)
    drop(sampler)
    latent = sampler.root / "incoming" / "my clip.h3latent"
    latent.unlink()
    latent.symlink_to(tmp_path / "elsewhere")
    (outcome,) = steps.verify(sampler, settle_s=0)
    assert outcome.exit_code == 77 and "symbolic link" in str(outcome.error)
    assert (tmp_path / "elsewhere").read_bytes() == RAW and not sampler.names("verified")


def test_an_adopted_pair_that_is_no_latent_fails_in_verify(sampler):
    raw = b"not a latent at all"
    drop(sampler, raw=raw, digest=hashlib.sha256(raw).hexdigest())
    (outcome,) = steps.verify(sampler, settle_s=0)
    assert outcome.state == "failed" and isinstance(outcome.error, BadData)


@pytest.mark.parametrize(
    ("stem", "start"),
    [
        ("clip", "clip-"),
        ("../../etc", "etc-"),
        ("-rf", "rf-"),
        ("猫", "clip-"),
        ("x" * 200, "x" * 70 + "-"),
        ("...", "clip-"),
    ],
)
def test_any_stem_becomes_a_safe_name(stem, start):
    from h3spool.spool import valid_job

    name = adopt.job_name(stem, DIGEST)
    assert valid_job(name) and name.startswith(start) and name.endswith(DIGEST[:12])
