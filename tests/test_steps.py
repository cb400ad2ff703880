"""Export, verify, and claimed work: what is checked before anything is written, and what becomes of each job."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import census, clip_bytes, make_clip, places_of, put, receipt_of

from h3spool import export, latent, steps
from h3spool.errors import (
    BadData,
    Interrupted,
    IOFailed,
    NotFound,
    NotPermitted,
    NotUsable,
    TryLater,
    Unavailable,
)
from h3spool.spool import CLAIMED_FROM, Spool

FREE = {"min_free_bytes": 0}


def everything(spool: Spool) -> set[str]:
    return {str(path.relative_to(spool.root)) for path in spool.root.rglob("*")}


# ---------------------------------------------------------------- export


class Nested:
    """What ComfyUI's NestedTensor looks like to others."""

    is_nested = True

    def __init__(self, *tensors):
        self.tensors = list(tensors)

    def unbind(self):
        return self.tensors


def flavours():
    video, audio = make_clip()
    as_torch = torch.from_numpy(video), torch.from_numpy(audio)
    return {
        "numpy": (video, audio),
        "torch": as_torch,
        "torch bfloat16": (as_torch[0].bfloat16(), as_torch[1].bfloat16()),
        "torch with grad, not contiguous": (as_torch[0].transpose(3, 4).requires_grad_(), as_torch[1]),
        "nested": (Nested(*as_torch), None),
        "ComfyUI LATENT": ({"samples": Nested(*as_torch)}, None),
    }


@pytest.mark.parametrize("flavour", flavours())
def test_a_latent_in_memory_becomes_a_job(sampler, flavour):
    video, audio = flavours()[flavour]
    name = export(video, audio, spool=sampler.root, title="猫", meta={"seed": 7}, producer={"w": [1]}, **FREE)
    job = sampler.job("incoming", name)
    clip = latent.read(job.latent, job.read_latent()[0])
    tolerance = 0.02 if "bfloat16" in flavour else 0
    np.testing.assert_allclose(clip.audio.array(), make_clip()[1], atol=tolerance)
    assert (clip.metadata["title"], clip.metadata["seed"], clip.metadata["producer"]) == ("猫", "7", "h3spool")
    assert json.loads(job.file(".producer.json").read_text()) == {"w": [1]}
    account = receipt_of(sampler, name)
    assert (account["title"], account["producer"]["seed"], account["latent"]["frames"]) == ("猫", "7", 5)
    assert [(event["step"], event["outcome"]) for event in account["events"]] == [("export", "ok")]
    assert os.listdir(sampler.root / "tmp") == []


def test_a_clip_without_sound_or_with_a_third_stream(sampler):
    video, audio = make_clip()
    name = export({"samples": video}, spool=sampler, allow=["no-audio"], **FREE)
    assert receipt_of(sampler, name)["latent"].keys() & {"video", "audio"} == {"video"}
    with pytest.raises(BadData, match="this one holds 3 tensors"):
        export(Nested(video, audio, audio), spool=sampler, **FREE)


def bad_exports():
    video, audio = make_clip()
    nan = video.copy()
    nan[0, 0, 0, 0, 0] = np.nan
    return {
        "NaN": (dict(video=nan, audio=audio), BadData, "1 of 192 values of `video` are NaN"),
        "no audio": (dict(video=video), BadData, "holds no `audio`"),
        "integers": (dict(video=video.astype(int), audio=audio), BadData, "floating"),
        "a list": (dict(video=[1.0], audio=audio), BadData, "floating"),
        "off the grid": (dict(zip(("video", "audio"), make_clip(3), strict=True)), BadData, "nearest valid lengths"),
        "unknown word": (dict(video=video, audio=audio, allow=["everything"]), BadData, "unknown allowance everything"),
        "a title too long": (dict(video=video, audio=audio, title="x" * 70_000), BadData, "shorten prompt or title"),
        "no JSON": (dict(video=video, audio=audio, producer={"x": {1, 2}}), BadData, "producer"),
        "no room": (dict(video=video, audio=audio, min_free_bytes=1 << 60), IOFailed, "leaves --min-free"),
    }


@pytest.mark.parametrize("case", bad_exports())
def test_everything_is_checked_before_anything_is_written(sampler, case, monkeypatch):
    options, error, sentence = bad_exports()[case]
    before = everything(sampler)
    monkeypatch.setattr(os, "mkdir", None)  # a directory that is made and removed again would not show afterwards
    with pytest.raises(error, match=sentence):
        export(**{"spool": sampler, **FREE, **options})
    assert everything(sampler) == before


def test_export_needs_a_spool(tmp_path):
    with pytest.raises(NotFound, match="not a spool"):
        export(*make_clip(), spool=tmp_path)


@pytest.mark.parametrize("title", ["../x", "-rf", "/etc/passwd", "猫" * 100, "a\nb\0c", " ", "x" * 300, "\udcff"])
def test_a_title_is_a_title_and_never_a_path(sampler, title):
    before = everything(sampler)
    name = export(*make_clip(), spool=sampler, title=title, **FREE)
    new = everything(sampler) - before - {"locks/admit"}
    assert all(path.startswith(f"incoming/{name}") for path in new)
    assert receipt_of(sampler, name)["title"] == title.encode("utf-8", "replace").decode()
    (outcome,) = steps.verify(sampler)
    assert outcome.state == "verified"


def test_export_works_where_there_is_no_torch(sampler):
    """Inside ComfyUI's own Python: numpy and the standard library are all it takes."""
    code = (
        "import sys\n"
        "for name in ('torch', 'safetensors', 'click', 'rich', 'xxhash', 'imageio_ffmpeg'): sys.modules[name] = None\n"
        "import numpy as np\n"
        "draw = np.random.default_rng(0)\n"
        "video, audio = draw.standard_normal((1, 24, 2, 2, 2)), draw.standard_normal((1, 32, 2, 8))\n"
        "tops = lambda: {name.split('.')[0] for name, module in sys.modules.items() if module}\n"
        "before = tops(); from h3spool import export\n"
        "print(export(video, audio, spool=sys.argv[1], title='x', min_free_bytes=0))\n"
        "print(*(tops() - before - sys.stdlib_module_names - {'h3spool'}))\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code, sampler.root], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    name, others = done.stdout.split("\n")[:2]
    assert sampler.find(name)
    assert others == ""


def test_warnings_go_into_the_receipt(sampler):
    video, audio = make_clip()
    name = export(video * 0.01, audio, spool=sampler, **FREE)
    list(steps.verify(sampler))
    assert ["hardly varies" in text for event in receipt_of(sampler, name)["events"] for text in event["warnings"]] == [
        True,
        True,
    ]


# ---------------------------------------------------------------- verify


def outcomes(generator) -> dict[str, tuple]:
    return {outcome.job: (outcome.state, outcome.exit_code) for outcome in generator}


def test_good_jobs_are_verified_and_bad_ones_fail_with_the_reason(sampler):
    video, audio = make_clip()
    video[0, 1, 0, 0, 0] = np.inf
    good, bad = put(sampler, "incoming"), put(sampler, "incoming", clip_bytes(video, audio))
    assert outcomes(steps.verify(sampler)) == {good: ("verified", 0), bad: ("failed", 65)}
    assert receipt_of(sampler, good)["latent"]["sha256"] == sampler.job("verified", good).expected_digest()
    event = receipt_of(sampler, bad)["events"][-1]
    assert (event["step"], event["outcome"]) == ("verify", "failed")
    assert f"{bad}.h3latent: 1 of 192 values of `video` are" in event["error"]


@pytest.mark.parametrize(
    ("word", "clip"),
    [
        ("image", make_clip(1)),
        ("off-grid", make_clip(3)),
        ("no-audio", (make_clip()[0], None)),
        ("silent", (make_clip()[0], make_clip()[1] * 0)),
        ("black", (make_clip()[0] * 0, make_clip()[1])),
    ],
)
def test_an_allowance_is_said_once_and_honoured_on_every_node(sampler, decoder, word, clip):
    name = export(*clip, spool=sampler, allow=[word], **FREE)
    assert outcomes(steps.verify(sampler)) == {name: ("verified", 0)}
    raw = sampler.job("verified", name).latent.read_bytes()
    put(decoder, "incoming", raw, name)
    assert outcomes(steps.verify(decoder)) == {name: ("verified", 0)}
    assert latent.read("x", raw).metadata["allow"] == word
    stripped = put(decoder, "incoming", clip_bytes(*clip))
    assert outcomes(steps.verify(decoder)) == {stripped: ("failed", 65)}


def spoil_link(job, outside):
    job.latent.rename(outside)
    job.latent.symlink_to(outside)


def spoil_extra_link(job, outside):
    (job.path / f"{job.name}.note").symlink_to(outside)


def spoil_directory(job, outside):
    (job.path / f"{job.name}.d").mkdir()


def spoil_stranger(job, outside):
    (job.path / "other.h3latent").write_bytes(b"")


def spoil_hash(job, outside):
    job.file(".h3latent.sha256").write_text("0" * 64)


def spoil_missing(job, outside):
    job.latent.unlink()


def spoil_fifo(job, outside):
    job.latent.unlink()
    os.mkfifo(job.latent)


def spoil_owner(job, outside):
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(job.latent, 12345, -1)


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (spoil_link, 77, "a symbolic link, which a spool never follows"),
        (spoil_extra_link, 77, "a symbolic link, which a spool never follows"),
        (spoil_owner, 77, "belongs to uid 12345"),
        (spoil_directory, 65, "not a plain file"),
        (spoil_fifo, 65, "not a plain file"),
        (spoil_stranger, 65, "not a file of this job"),
        (spoil_hash, 65, "the sidecar says 000"),
        (spoil_missing, 65, "incomplete job"),
    ],
)
def test_a_job_with_strange_files_fails(decoder, tmp_path, spoil, code, words):
    name = put(decoder, "incoming")
    spoil(decoder.job("incoming", name), tmp_path / "outside")
    good = put(decoder, "incoming")
    assert outcomes(steps.verify(decoder)) == {name: ("failed", code), good: ("verified", 0)}
    assert words in receipt_of(decoder, name)["events"][-1]["error"]


def test_a_link_in_place_of_a_job_is_not_one(decoder, tmp_path):
    name = put(decoder, "incoming")
    (decoder.root / "incoming" / name).rename(tmp_path / name)
    (decoder.root / "incoming" / name).symlink_to(tmp_path / name)
    assert outcomes(steps.verify(decoder)) == {}
    assert outcomes(steps.verify(decoder, [name])) == {name: ("missing", 66)}
    assert (tmp_path / name / f"{name}.h3latent").exists()
    (decoder.root / "incoming" / name).unlink()


def test_only_one_verifies(decoder):
    put(decoder, "incoming")
    with decoder.lock("verify"), pytest.raises(TryLater, match="another h3spool holds it"):
        list(steps.verify(decoder))
    assert outcomes(steps.verify_if_idle(decoder)) != {}


def test_a_loop_goes_on_where_another_verifies(decoder):
    put(decoder, "incoming")
    with decoder.lock("verify"):
        assert outcomes(steps.verify_if_idle(decoder)) == {}


def test_verify_begins_the_count_of_attempts_anew_and_keeps_the_peer(decoder):
    name = put(decoder, "incoming")
    decoder.job("incoming", name).set_state(attempts=5, peer="uuid")
    list(steps.verify(decoder))
    assert decoder.job("verified", name).state() == {"peer": "uuid"}


def test_verify_finishes_what_a_death_left_between_seen_and_incoming(decoder):
    run = decoder.tmp_dir("push-run")
    name = put(decoder, "incoming")
    os.rename(decoder.root / "incoming" / name, run / name)
    record = {"sha256": "", "tmp": f"tmp/{run.name}/{name}"}
    (decoder.root / "seen" / name).write_text(json.dumps(record))
    assert outcomes(steps.verify(decoder)) == {name: ("verified", 0)}


@pytest.mark.parametrize("name", ["../verified", "..", "/tmp", "nothing", "猫"])
def test_a_name_that_is_no_job_is_missing(decoder, name):
    before = everything(decoder)
    assert outcomes(steps.verify(decoder, [name])) == {name: ("missing", 66)}
    assert outcomes(steps.work(decoder, "decode", forbidden, [name], ready=forbidden)) == {name: ("missing", 66)}
    assert {path for path in everything(decoder) - before if not path.startswith(("locks", "active"))} == set()


def forbidden(*_):
    raise AssertionError("this must not be called")


@pytest.mark.parametrize(
    ("place", "verify", "decode", "mux"),
    [
        ("incoming", None, 75, 75),
        ("verified", 0, None, 75),
        ("decoded", 0, 0, None),
        ("done", 0, 0, 0),
        ("failed", 65, 65, 65),
    ],
)
def test_a_finished_step_is_no_error_and_an_early_one_waits(decoder, place, verify, decode, mux):
    name = put(decoder, place)
    for step, code in (("verify", verify), ("decode", decode), ("mux", mux)):
        if code is not None:
            call = steps.verify(decoder, [name]) if step == "verify" else steps.work(
                decoder, step, forbidden, [name], ready=forbidden
            )  # fmt: skip
            assert outcomes(call) == {name: (place, code)}


def test_what_another_worker_has_is_waited_for(decoder):
    name = put(decoder, "verified")
    slot = decoder.take_slot("decode")
    slot.claim(name)
    call = steps.work(decoder, "decode", forbidden, [name], ready=forbidden)
    assert outcomes(call) == {name: ("active/decode-0", 75)}
    assert outcomes(steps.verify(decoder, [name])) == {name: ("active/decode-0", 0)}
    slot.release()


# ---------------------------------------------------------------- claimed work


def nothing() -> None:
    pass


def work(spool, act, names=(), step="decode", ready=nothing) -> dict[str, tuple]:
    return outcomes(steps.work(spool, step, act, names, ready=ready))


def raising(error):
    def act(job, attempt):
        raise error

    return act


def attempts(spool, name) -> int:
    return spool.find(name)[1].state().get("attempts", 0)


def test_each_job_goes_where_the_act_says(decoder):
    first, second = put(decoder, "verified"), put(decoder, "verified")
    seen = []

    def act(job, attempt):
        seen.append((job.name, attempt, decoder.find(job.name)[0], job.state()))
        return "decoded" if job.name == first else "done"

    assert work(decoder, act) == {first: ("decoded", 0), second: ("done", 0)}
    assert seen == [(name, 1, "active/decode-0", {"attempts": 1}) for name in sorted([first, second])]
    assert work(decoder, forbidden, ready=forbidden) == {}


def test_bad_data_fails_the_job_and_the_batch_goes_on(decoder):
    names = sorted(put(decoder, "verified") for _ in range(3))

    def act(job, attempt):
        if job.name == names[1]:
            raise BadData("the picture is black")
        return "done"

    assert work(decoder, act) == {names[0]: ("done", 0), names[1]: ("failed", 65), names[2]: ("done", 0)}
    event = receipt_of(decoder, names[1])["events"][-1]
    assert (event["step"], event["outcome"], event["attempt"], event["error"]) == (
        "decode", "failed", 1, "the picture is black",
    )  # fmt: skip


@pytest.mark.parametrize(("error", "code"), [(IOFailed("disk"), 74), (ZeroDivisionError("a bug"), 1)])
def test_an_error_that_counts_puts_back_and_the_fifth_is_the_last(decoder, error, code):
    name = put(decoder, "verified")
    for attempt in range(1, 6):
        assert work(decoder, raising(error)) == {name: ("verified", code)}
        assert attempts(decoder, name) == attempt
    assert work(decoder, forbidden) == {name: ("failed", 65)}
    events = receipt_of(decoder, name)["events"]
    assert [event["outcome"] for event in events] == ["put-back"] * 5 + ["failed"]
    assert [event.get("attempt") for event in events] == [1, 2, 3, 4, 5, None]
    assert "5 attempts at decode" in events[-1]["error"]


@pytest.mark.parametrize(
    "error", [Unavailable("no ffmpeg"), TryLater("busy"), NotUsable("no VAE"), NotPermitted("no"), Interrupted(15),
              KeyboardInterrupt()]
)  # fmt: skip
def test_an_error_that_concerns_every_job_puts_back_and_does_not_count(decoder, error):
    names = sorted(put(decoder, "verified") for _ in range(2))
    decoder.job("verified", names[0]).set_state(attempts=3, peer="uuid")
    with pytest.raises(type(error)):
        work(decoder, raising(error))
    assert places_of(decoder.root) == {name: ["verified"] for name in names}
    assert decoder.job("verified", names[0]).state() == {"attempts": 3, "peer": "uuid"}
    assert receipt_of(decoder, names[0])["events"] == []


def test_what_makes_the_work_impossible_is_found_before_a_claim(decoder):
    name = put(decoder, "verified")
    before = everything(decoder)
    with pytest.raises(NotUsable):
        work(decoder, forbidden, ready=lambda: raising(NotUsable("no H3 VAE"))(None, 1))
    assert everything(decoder) - before == {"locks/decode-0", "active/decode-0"}
    assert places_of(decoder.root) == {name: ["verified"]}


def test_a_full_disk_while_claiming_puts_back(decoder, program):
    """A limit on the file size stands in for a full disk: not even state.json can be written."""
    name = put(decoder, "verified")
    code = (
        "import resource, sys; from h3spool import steps; from h3spool.spool import Spool\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "work = steps.work(Spool(sys.argv[1]), 'decode', None, ready=lambda: None)\n"
        "print([(o.state, o.exit_code) for o in work])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, decoder.root], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[('verified', 74)]"
    assert places_of(decoder.root) == {name: ["verified"]}


KILLED = """
import os, sys
from h3spool import steps
from h3spool.spool import Spool
def act(job, attempt):
    print(attempt, flush=True)
    os.kill(os.getpid(), 9)
list(steps.work(Spool(sys.argv[1]), sys.argv[2], act, ready=lambda: None))
"""


@pytest.mark.parametrize("step", ["decode", "mux"])
def test_a_death_counts(decoder, step):
    name = put(decoder, CLAIMED_FROM[step])
    for attempt in range(1, 6):
        done = subprocess.run([sys.executable, "-c", KILLED, decoder.root, step], capture_output=True, check=False)
        assert (done.returncode, done.stdout) == (-9, b"%d\n" % attempt)
        assert places_of(decoder.root) == {name: [f"active/{step}-0"]}
    assert work(decoder, forbidden, step=step) == {name: ("failed", 65)}


def test_a_death_is_forgotten_by_success_after_the_next_verify(decoder):
    name = put(decoder, "verified")
    subprocess.run([sys.executable, "-c", KILLED, decoder.root, "decode"], capture_output=True, check=False)
    assert work(decoder, lambda job, attempt: "decoded" if attempt == 2 else forbidden()) == {name: ("decoded", 0)}


def test_workers_share_the_work(decoder):
    names = sorted(put(decoder, "verified") for _ in range(4))

    def act(job, attempt):
        if job.name == names[0]:  # while one works, another one comes
            assert set(work(decoder, lambda *_: "done")) == set(names[1:])
        return "done"

    assert work(decoder, act) == {names[0]: ("done", 0)}
    assert census(decoder) == {"done": 4}
