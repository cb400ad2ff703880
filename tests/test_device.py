"""One decoding process per device."""

import fcntl
import os
import signal
import subprocess
import time

from conftest import PROGRAM, clean_environment, make_clip

from h3spool import export


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
