"""Watching the folder into which another tool writes its latents."""

import os
import signal
import subprocess
import time

import pytest
from conftest import PROGRAM, clean_environment, make_clip

from h3spool import container
from h3spool.watch import Settings, Watcher

SETTINGS = Settings(min_free_bytes=0)


def saved(path, names=("video", "audio"), seed=0, **extra):
    streams = dict(zip(names, map(container.tensor_of, make_clip(seed=seed)), strict=False))
    path.write_bytes(b"".join(container.serialize(streams | extra, {})))
    return path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "output" / "latents").mkdir(parents=True)
    return tmp_path / "output"


def scans(watcher, count=2):
    return [(outcome.job, outcome.state) for _ in range(count) for outcome in watcher.scan()]


def test_a_file_is_taken_when_two_scans_saw_it_unchanged(sampler, folder):
    watcher = Watcher(sampler, folder, SETTINGS)
    path = saved(folder / "latents" / "clip_00001_.safetensors")
    assert scans(watcher, 1) == []
    with open(path, "ab") as file:  # still being written
        file.write(b"")
        os.utime(path)
    assert scans(watcher, 1) == []
    ((name, state),) = scans(watcher, 1)
    assert state == "incoming" and name.startswith("clip_00001_-") and scans(watcher, 3) == []


def test_each_content_is_one_job_also_after_a_restart_and_under_another_time(sampler, folder):
    path = saved(folder / "clip.safetensors")
    assert len(scans(Watcher(sampler, folder, SETTINGS))) == 1
    assert scans(Watcher(sampler, folder, SETTINGS)) == []
    os.utime(path, (1, 1))
    assert scans(Watcher(sampler, folder, SETTINGS)) == []
    saved(path, seed=1)
    assert len(scans(Watcher(sampler, folder, SETTINGS))) == 1


def test_a_truncated_file_is_told_once_and_taken_when_it_is_whole(sampler, folder):
    path = saved(folder / "clip.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    watcher = Watcher(sampler, folder, SETTINGS)
    assert [state for _, state in scans(watcher, 4)] == ["refused"]
    path.write_bytes(whole)
    assert [state for _, state in scans(watcher, 3)] == ["incoming"]


def test_halves_that_comfyui_saved_are_joined(sampler, folder):
    video, audio = map(container.tensor_of, make_clip())
    version = {"latent_format_version_0": container.Tensor("F32", (0,), b"")}
    for name, tensor in (("clip_video_00001_.latent", video), ("clip_audio_00001_.latent", audio)):
        (folder / name).write_bytes(b"".join(container.serialize({"latent_tensor": tensor} | version, {})))
    ((name, state),) = scans(Watcher(sampler, folder, SETTINGS))
    assert state == "incoming" and name.startswith("clip_video_00001_-")


def test_pictures_work_in_progress_links_and_pickles_are_passed_over(sampler, folder, tmp_path):
    (folder / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    for name in (".hidden.safetensors", "x.safetensors.part", "y.tmp"):
        saved(folder / name)
    (folder / "link.safetensors").symlink_to(saved(tmp_path / "elsewhere.safetensors"))
    assert scans(Watcher(sampler, folder, SETTINGS)) == []


def test_the_command_watches_until_it_is_stopped(sampler, folder):
    saved(folder / "clip.safetensors")
    argv = [PROGRAM, "export", "--watch", folder, "-s", sampler.root, "--min-free", "0", "--allow", "black"]
    child = subprocess.Popen(list(map(str, argv)), env=clean_environment(), stdout=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 30
        while not sampler.names("incoming"):
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        child.send_signal(signal.SIGTERM)
        out, _ = child.communicate(timeout=20)
    assert child.returncode == 143 and out.startswith("clip-")
