"""One decoding process per device."""

import fcntl
import os
import signal
import subprocess
import time

from conftest import PROGRAM, clean_environment, make_clip, wait_for

from h3spool import export, ffmpeg


def test_a_second_decoder_on_the_same_device_ends_quietly_with_75(decoder, vaes, program):
    argv = [PROGRAM, "decode", "--watch", "-s", str(decoder.root), *vaes, "--min-free", "0"]
    first = subprocess.Popen(argv, env=clean_environment(), stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while "device-cpu" not in os.listdir(decoder.root / "locks"):
            assert time.monotonic() < end and first.poll() is None
            time.sleep(0.05)
        time.sleep(0.2)
        second = program("decode", "--watch", "-s", decoder.root, *vaes)
        assert second.code == 75 and len(second.err.splitlines()) == 1 and "one at a time" in second.err
    finally:
        first.send_signal(signal.SIGTERM)
        assert first.wait(30) == 143


def test_a_job_is_claimed_by_nobody_while_the_device_is_taken(decoder, vaes, program):
    export(*make_clip(), spool=decoder, min_free_bytes=0)
    assert program("verify", "-s", decoder.root).code == 0
    with open(decoder.root / "locks" / "device-cpu", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert program("decode", "--mux", "-s", decoder.root, *vaes, "--min-free", "0").code == 75
    assert len(decoder.names("verified")) == 1
    assert "attempts" not in decoder.job("verified", decoder.names("verified")[0]).state()


def started(decoder, *options):
    argv = [PROGRAM, "loop", "-s", str(decoder.root), *map(str, options), "--min-free", "0"]
    return subprocess.Popen(argv, env=clean_environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def test_a_loop_verifies_while_it_loads(decoder, vaes, tmp_path):
    """ffmpeg, which loading asks for its version, does not answer for now; the job is verified all the same."""
    export(*make_clip(), spool=decoder, min_free_bytes=0)
    slow, go = tmp_path / "ffmpeg", tmp_path / "go"
    slow.write_text(f'#!/bin/sh\nwhile [ ! -e {go} ]; do sleep 0.05; done\nexec {ffmpeg.find()} "$@"\n')
    slow.chmod(0o755)
    running = started(decoder, *vaes, "--ffmpeg", slow)
    try:
        wait_for(lambda: decoder.names("verified") or running.poll() is not None)
        go.touch()
        wait_for(lambda: decoder.names("done") or running.poll() is not None)
    finally:
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 143


def test_a_loop_that_cannot_load_ends_with_the_reason(decoder, vaes, tmp_path):
    missing = started(decoder, "--video-vae", tmp_path / "nothing")
    assert "there is no checkpoint" in missing.communicate(timeout=60)[1] and missing.returncode == 66
    with open(decoder.root / "locks" / "device-cpu", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = started(decoder, *vaes)
        assert "one at a time" in second.communicate(timeout=60)[1] and second.returncode == 75
