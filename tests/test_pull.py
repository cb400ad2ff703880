"""Results back: by hash, once, and a changed one beside the first."""

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
from conftest import PROGRAM, put

from h3spool import pull, receipt
from h3spool.errors import TryLater
from h3spool.link import LocalLink, Peer, SshLink

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.sshd import Sshd


def finish(decoder, name=None, mp4=b"picture and sound"):
    name = name or put(decoder, "done")
    job = decoder.job("done", name)
    job.file(".mp4").write_bytes(mp4)
    facts = {"sha256": hashlib.sha256(mp4).hexdigest(), "ffmpeg": "9", "ffmpeg_args": ["-y"], "encode_s": 1.0}
    probe = {"bytes": len(mp4), "frames": 5, "duration_s": 0.2, "video": None, "audio": None}
    job.record(receipt.event("mux", "deco", receipt.now(), attempt=1, mp4=probe, **facts))
    return name


@pytest.fixture
def link(decoder):
    return LocalLink(Peer.parse(str(decoder.root)), min_free_bytes=0)


def fetch(spool, link, *names):
    return [(outcome.job, outcome.state) for outcome in pull.pull(spool, link, names, min_free_bytes=0)]


def test_mp4_and_receipt_come_back_once(sampler, decoder, link):
    name = finish(decoder)
    assert fetch(sampler, link) == [(name, "results")]
    folder = sampler.root / "results" / name
    assert sorted(os.listdir(folder)) == [f"{name}.mp4", f"{name}.pipeline.json"]
    assert (folder / f"{name}.mp4").read_bytes() == b"picture and sound"
    assert json.loads((folder / f"{name}.pipeline.json").read_text())["events"][-1]["step"] == "pull"
    assert fetch(sampler, link) == []
    assert fetch(sampler, link, name) == [(name, "results")]  # asked for by name: it is here


def test_a_result_that_changed_becomes_a_second_file(sampler, decoder, link):
    name = finish(decoder)
    fetch(sampler, link)
    finish(decoder, name, mp4=b"decoded again")
    assert fetch(sampler, link) == [(name, "results")]
    finish(decoder, name, mp4=b"and again")
    fetch(sampler, link)
    found = {path.read_bytes() for path in (sampler.root / "results" / name).glob("*.mp4")}
    assert found == {b"picture and sound", b"decoded again", b"and again"}
    assert fetch(sampler, link) == []


def test_what_does_not_fit_its_hash_is_not_taken(sampler, decoder, link):
    name = finish(decoder)
    decoder.job("done", name).file(".mp4").write_bytes(b"torn")
    (outcome,) = pull.pull(sampler, link, min_free_bytes=0)
    assert isinstance(outcome.error, TryLater) and not sampler.names("results")
    assert not os.listdir(sampler.root / "tmp")


def test_an_unknown_job_is_missing(sampler, decoder, link):
    (outcome,) = pull.pull(sampler, link, ["nothing"], min_free_bytes=0)
    assert outcome.exit_code == 66


def test_results_come_back_over_ssh_to_a_third_machine_too(sampler, decoder, tmp_path, monkeypatch):
    names = sorted(finish(decoder) for _ in range(3))
    with Sshd(tmp_path) as sshd:
        monkeypatch.setenv("PATH", sshd.env["PATH"])
        link = SshLink(Peer.parse(f"peer:{decoder.root}"), remote_command=str(PROGRAM))
        try:
            assert sorted(fetch(sampler, link)) == [(name, "results") for name in names]
            assert fetch(sampler, link) == []
        finally:
            link.close()
