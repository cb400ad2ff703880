"""What the tests share: spools, clips, tiny checkpoints, the command line, and a look at every spool afterwards."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest

import h3spool
from h3spool import container, ffmpeg, latent
from h3spool.spool import Spool

PROGRAM = Path(sys.executable).with_name("h3spool")
SCHEMA = json.loads((Path(h3spool.__file__).parent / "receipt.schema.json").read_text())
RECEIPTS = jsonschema.Draft202012Validator(SCHEMA)


# ---------------------------------------------------------------- what must hold after every test


@pytest.fixture(autouse=True)
def spools_are_sound(request):
    """Every receipt fits the schema, and every job is in one place; `broken_by_hand` says that a test breaks them."""
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    if folder is None or "broken_by_hand" in request.fixturenames:
        return
    for path in folder.rglob("*.pipeline.json"):
        faults = [f"{error.json_path}: {error.message}" for error in RECEIPTS.iter_errors(json.loads(path.read_text()))]
        assert not faults, f"{path}: {faults}"
    for path in folder.rglob("spool.json"):
        places = places_of(path.parent)
        assert not (twice := {job: held for job, held in places.items() if len(held) > 1}), f"{path.parent}: {twice}"


@pytest.fixture
def broken_by_hand():
    """A test that writes receipts or spools which are meant to be wrong asks for this."""


def places_of(root: Path) -> dict[str, list[str]]:
    """Every job directory below a spool's states: name -> where."""
    found: dict[str, list[str]] = {}
    for state in ("incoming", "verified", "decoded", "done", "failed", "active/*"):
        for folder in root.glob(f"{state}/*/"):
            found.setdefault(folder.name, []).append(str(folder.parent.relative_to(root)))
    return found


def census(spool: Spool) -> dict[str, int]:
    """How many jobs are in each place that holds any."""
    return dict(Counter(place for places in places_of(spool.root).values() for place in places))


# ---------------------------------------------------------------- spools and clips


@pytest.fixture
def sampler(tmp_path) -> Spool:
    return Spool.create(tmp_path / "sampler", "sampler", "samp")


@pytest.fixture
def decoder(tmp_path) -> Spool:
    return Spool.create(tmp_path / "decoder", "decoder", "deco")


def wait_for(condition, seconds: float = 120) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def make_clip(tokens: int = 2, height: int = 2, width: int = 2, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A valid clip: video [1, 24, T, H, W] and audio [1, 32, 2, Ta], float32."""
    draw = np.random.default_rng(seed)
    frames = latent.frame_count(tokens)
    video = draw.standard_normal((1, 24, tokens, height, width), dtype=np.float32)
    return video, draw.standard_normal((1, 32, 2, latent.audio_length(frames)), dtype=np.float32)


def clip_bytes(video, audio, **facts) -> bytes:
    """A `.h3latent` as h3spool writes it; nothing of it is checked."""
    clip = latent.build(video, audio, facts)
    return b"".join(bytes(piece) for piece in latent.serialize(clip))


def put(spool: Spool, state: str, raw: bytes | None = None, name: str | None = None, seed: int = 0) -> str:
    """Place a job directory as another node or an older run would have left it; returns its name."""
    name = name or spool.new_job_name()
    raw = clip_bytes(*make_clip(seed=seed)) if raw is None else raw
    folder = spool.root / state / name
    folder.mkdir(mode=0o700)
    (folder / f"{name}.h3latent").write_bytes(raw)
    digest = hashlib.sha256(raw).hexdigest()
    (folder / f"{name}.h3latent.sha256").write_bytes(container.sidecar_text(digest, f"{name}.h3latent"))
    account = {"h3spool_receipt": 1, "job": name, "title": "", "latent": {}, "producer": {}, "events": []}
    (folder / f"{name}.pipeline.json").write_text(json.dumps(account))
    return name


def receipt_of(spool: Spool, name: str) -> dict:
    """The receipt of a job, wherever it is."""
    place, job = spool.find(name)
    return json.loads(job.file(".pipeline.json").read_text()) | {"place": place}


# ---------------------------------------------------------------- the command line


def run_program(*args, timeout: float = 60, **settings) -> SimpleNamespace:
    """Run the installed `h3spool` as a process."""
    done = subprocess.run(
        [PROGRAM, *map(str, args)],
        capture_output=True,
        check=False,
        text=True,
        timeout=timeout,
        env=clean_environment() | settings.pop("env", {}),
        **settings,
    )
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


def clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("H3SPOOL_")}


@pytest.fixture
def program():
    """The real program in its own process: what `main`'s exit code, signals and imports are tested with."""
    return run_program


def lock_fds() -> set[int]:
    """The lock files that this process has open."""
    paths = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return {int(path.name) for path in paths if os.readlink(path).rpartition("/")[0].endswith("/locks")}


@pytest.fixture
def cli(monkeypatch, capfd):
    """The same `main` in this process: cheap."""
    for key in [key for key in os.environ if key.startswith("H3SPOOL_")]:
        monkeypatch.delenv(key)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)}

    def run(*args) -> SimpleNamespace:
        from h3spool.cli import main

        capfd.readouterr()
        before = lock_fds()
        monkeypatch.setattr(sys, "argv", ["h3spool", *map(str, args)])
        try:
            with pytest.raises(SystemExit) as end:
                main()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for fd in lock_fds() - before:  # the end of a process lets the device's lock go
                os.close(fd)
        out, err = capfd.readouterr()
        return SimpleNamespace(code=end.value.code, out=out, err=err)

    return run


def fake_ffmpeg(path: Path, body: str) -> Path:
    """A shell script in the place of ffmpeg that tells its version and then does `body`."""

    path.write_text(f'#!/bin/sh\n[ "$1" = -version ] && exec {ffmpeg.find()} -version\n{body}\n')
    path.chmod(0o755)
    return path


# ---------------------------------------------------------------- tiny checkpoints


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> SimpleNamespace:
    """A random video VAE (one block, 64 wide) and audio VAE in ComfyUI's layout, as `video` and `audio`."""
    import torch
    from golden import h3_weights as h3

    from h3spool.vae import audio, video

    folder = tmp_path_factory.mktemp("checkpoints")
    statistics = {"latents_mean": torch.tensor(video.LATENTS_MEAN), "latents_std": torch.tensor(video.LATENTS_STD)}
    sound = {"latents_mean": torch.tensor(audio.LATENTS_MEAN), "latents_std": torch.tensor(audio.LATENTS_STD)}
    return SimpleNamespace(
        video=h3.save(folder / "video.safetensors", h3.video_weights(64, 1) | statistics, dtype=torch.float16),
        audio=h3.save(folder / "audio.safetensors", h3.to_folded(h3.audio_weights()) | sound),
    )


@pytest.fixture
def vaes(checkpoints) -> list[str]:
    """The options that name them."""
    return ["--video-vae", str(checkpoints.video), "--audio-vae", str(checkpoints.audio)]
