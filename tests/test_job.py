"""One job directory: files written whole or not at all, hashes compared, nothing followed, state kept."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
from conftest import clip_bytes, make_clip, put

from h3spool.errors import BadData, IOFailed, NotPermitted
from h3spool.job import Job, fsync_path, fsync_tree, write_file


@pytest.fixture
def job(decoder) -> Job:
    name = put(decoder, "verified")
    return decoder.job("verified", name)


# ---------------------------------------------------------------- writing


def test_a_file_is_written_to_its_end_for_its_owner_alone(tmp_path):
    pieces = [b"a" * 70_000, memoryview(b"bc"), b""]
    digest = write_file(tmp_path / "x", pieces)
    assert (tmp_path / "x").read_bytes() == b"a" * 70_000 + b"bc"
    assert digest == hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest()
    assert os.stat(tmp_path / "x").st_mode & 0o777 == 0o600


def test_a_file_that_is_there_is_never_written_over(tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    (tmp_path / "link").symlink_to("x")
    for name in ("x", "link"):
        with pytest.raises(IOFailed, match="File exists"):
            write_file(tmp_path / name, [b"new"])
    assert (tmp_path / "x").read_bytes() == b"old"


def test_a_short_write_is_carried_on_and_a_full_disk_leaves_nothing(tmp_path):
    """A limit on the file size does what a full disk does: write returns short, then fails."""
    code = (
        "import resource, sys; from pathlib import Path; folder = Path(sys.argv[1])\n"
        "from h3spool.errors import IOFailed; from h3spool.job import write_file\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "write_file(folder / 'fits', [b'x' * 60_000, b'y' * 40_000])\n"
        "try: write_file(folder / 'over', [b'x' * 100_001])\n"
        "except IOFailed as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert "over: writing failed: File too large" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["fits"]
    assert (tmp_path / "fits").stat().st_size == 100_000


def test_an_interrupted_write_leaves_nothing(tmp_path):
    def pieces():
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "x", pieces())
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_a_job_is_replaced_in_one_step(job):
    job.write("note", b"old")
    with open(job.path / "note", "rb") as reader:
        job.write("note", b"new and longer", durable=True)
        assert reader.read() == b"old"
    assert (job.path / "note").read_bytes() == b"new and longer"
    assert list((job.spool.root / "tmp").iterdir()) == []


def test_writing_replaces_a_link_and_not_what_it_leads_to(job, tmp_path):
    (tmp_path / "outside").write_bytes(b"mine")
    (job.path / "note").symlink_to(tmp_path / "outside")
    job.write("note", b"new")
    assert (tmp_path / "outside").read_bytes() == b"mine"
    assert not (job.path / "note").is_symlink()


def test_a_job_that_has_moved_on_is_not_written_to(job):
    os.rename(job.path, job.spool.root / "done" / job.name)
    with pytest.raises(IOFailed, match="note: writing failed: No such file"):
        job.write("note", b"late")
    assert list((job.spool.root / "tmp").iterdir()) == []


def test_fsync_follows_no_link(tmp_path):
    (tmp_path / "x").write_bytes(b"")
    (tmp_path / "link").symlink_to("x")
    fsync_tree(tmp_path)
    with pytest.raises(NotPermitted, match="symbolic link"):
        fsync_path(tmp_path / "link")


# ---------------------------------------------------------------- the latent and its hash


def test_the_latent_is_what_its_sidecar_says(job):
    raw, digest = job.read_latent()
    assert raw == job.latent.read_bytes()
    assert digest == hashlib.sha256(raw).hexdigest() == job.expected_digest()


@pytest.mark.parametrize("damage", ["flip", "truncate", "pad", "replace"])
def test_a_latent_that_changed_is_refused(job, damage):
    raw = bytearray(job.latent.read_bytes())
    if damage == "flip":
        raw[-1] ^= 1
    elif damage == "truncate":
        del raw[-1]
    elif damage == "pad":
        raw += b"\0"
    else:
        raw = clip_bytes(*make_clip(seed=9))
    job.latent.write_bytes(raw)
    with pytest.raises(
        BadData, match=rf"{job.name}\.h3latent: SHA-256 is [0-9a-f]{{64}}, the sidecar says [0-9a-f]{{64}}"
    ):
        job.read_latent()


@pytest.mark.parametrize("suffix", [".h3latent", ".h3latent.sha256"])
def test_a_job_without_latent_or_sidecar_is_incomplete(job, suffix):
    job.file(suffix).unlink()
    with pytest.raises(BadData, match=rf"incomplete job: .*{suffix}: no such file"):
        job.read_latent()


def test_a_sidecar_without_a_hash_is_named(job):
    job.file(".h3latent.sha256").write_text("soon\n")
    with pytest.raises(BadData, match=r"\.h3latent\.sha256: its checksum file holds no SHA-256"):
        job.read_latent()


@pytest.mark.parametrize("suffix", [".h3latent", ".h3latent.sha256"])
def test_a_link_in_a_job_is_not_followed(job, suffix, tmp_path):
    job.file(suffix).rename(tmp_path / "elsewhere")
    job.file(suffix).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotPermitted, match="symbolic link, which a spool never follows"):
        job.read_latent()


# ---------------------------------------------------------------- state.json and the receipt


def test_state_is_kept_changed_and_forgotten(job):
    assert job.state() == {}
    job.set_state(attempts=2)
    job.set_state(durable=True, peer="uuid")
    assert job.state() == {"attempts": 2, "peer": "uuid"}
    job.set_state(attempts=None)
    assert job.state() == {"peer": "uuid"}


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\0", '"x"', "[" * 60_000, " " * 70_000])
def test_an_unreadable_state_reads_as_empty(job, text):
    (job.path / "state.json").write_text(text)
    assert job.state() == {}
    job.set_state(attempts=1)
    assert job.state() == {"attempts": 1}


def test_a_receipt_is_begun_where_there_is_none(job):
    job.file(".pipeline.json").unlink()
    job.record({"step": "verify", "node": "n", "start": "2026-01-01T00:00:00.000Z", "end": "2026-01-01T00:00:00.000Z",
                "outcome": "ok"}, title="T")  # fmt: skip
    account = json.loads(job.file(".pipeline.json").read_text())
    assert (account["job"], account["title"], len(account["events"])) == (job.name, "T", 1)


def test_looking_at_a_receipt_changes_nothing(job, broken_by_hand):
    job.file(".pipeline.json").write_text("{")
    assert job.peek()["events"] == []
    assert job.file(".pipeline.json").read_text() == "{"
