"""Decode and mux of claimed jobs and of single files: what ends where, and that a broken one ends nowhere."""

import hashlib
import json
import os

import numpy as np
import pytest
from conftest import clip_bytes, fake_ffmpeg, make_clip, places_of, put, receipt_of

from h3spool import ffmpeg, render, steps
from h3spool.errors import BadData, IOFailed, NotFound, TryLater, Unavailable

FFMPEG = ffmpeg.find()


class Engine:
    """An engine that is quick, and broken in the ways that a test asks for."""

    def __init__(self, *, level: int = 255, wave: float = 0.5, extra: int = 0, raises: Exception | None = None):
        self.level, self.wave, self.extra, self.raises = level, wave, extra, raises
        self.facts = {"engine": "native", "device": "cpu", "torch": "none", "video_vae": {"name": "x"}}

    def frames(self, video, report):
        height, width = 16 * video.shape[3], 16 * video.shape[4]
        count = 17 * (video.shape[2] // 5) + (5 if video.shape[2] % 5 == 2 else 1)
        report |= {"clips": 1, "seconds": 0.0}
        draw = np.random.default_rng(1)
        yield draw.integers(0, self.level + 1, (count - 1, height, width, 3), np.uint8)
        if self.raises:
            raise self.raises
        if self.extra >= 0:
            yield draw.integers(0, self.level + 1, (1 + self.extra, height, width, 3), np.uint8)

    def sound(self, audio, report):
        report |= {"chunks": 1, "seconds": 0.0}
        turns = np.arange(800 * audio.shape[3], dtype=np.float32)
        yield np.stack([self.wave * np.sin(turns / 9), self.wave * np.sin(turns / 7)]).astype(np.float32)


@pytest.fixture(scope="module")
def native(checkpoints):
    """The real engine on tiny checkpoints."""
    from h3spool.decode import Decoder

    return Decoder(checkpoints.video, checkpoints.audio, precision="fp32", device="cpu")


def decode(spool, engine, names=(), **output) -> dict[str, tuple]:
    settings = render.Output(**({"ffmpeg": FFMPEG} | output))
    work = steps.work(
        spool, "decode", lambda job, attempt: render.decode(job, attempt, engine, settings), names, ready=lambda: None
    )
    return {outcome.job: (outcome.state, outcome.exit_code) for outcome in work}


def mux(spool, **output) -> dict[str, tuple]:
    settings = render.Output(**({"ffmpeg": FFMPEG} | output))
    work = steps.work(spool, "mux", lambda job, attempt: render.mux(job, attempt, settings), ready=lambda: None)
    return {outcome.job: (outcome.state, outcome.exit_code) for outcome in work}


def files(spool, name) -> set[str]:
    return {path.name.removeprefix(name) for path in spool.find(name)[1].path.iterdir()}


def leftovers(spool) -> list[str]:
    return os.listdir(spool.root / "tmp")


ALWAYS = {".h3latent", ".h3latent.sha256", ".pipeline.json", "state.json"}


# ---------------------------------------------------------------- good jobs


@pytest.mark.parametrize("engine", ["quick", "native"])
def test_in_one_pass_and_in_two_the_picture_and_the_sound_are_the_same(decoder, request, engine):
    machine = Engine() if engine == "quick" else request.getfixturevalue("native")
    raw = clip_bytes(*make_clip(7), title="猫")
    once, twice = put(decoder, "verified", raw), put(decoder, "verified", raw)
    assert decode(decoder, machine, [once], keep_master=True) == {once: ("done", 0)}
    assert decode(decoder, machine, [twice], mux=False) == {twice: ("decoded", 0)}
    assert files(decoder, twice) == {*ALWAYS, ".master.mkv"}
    assert mux(decoder) == {twice: ("done", 0)}
    assert files(decoder, once) == files(decoder, twice) == {*ALWAYS, ".master.mkv", ".mp4"}
    first, second = receipt_of(decoder, once), receipt_of(decoder, twice)
    for account in (first, second):
        assert [event["step"] for event in account["events"]] == ["decode", "mux"]
        seen, made = account["events"]
        path = decoder.job("done", account["job"]).file(".mp4")
        assert made["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert (made["mp4"]["frames"], made["mp4"]["video"]["width"]) == (22, 32)
        assert seen["attempt"] == made["attempt"] == 1
        assert abs(made["mp4"]["audio"]["duration_s"] - 22 / 24) < 1024 / 48000
    for fact in ("frames_xxh3", "sound_xxh3", "audio_peak", "audio_rms", "black_share"):
        assert first["events"][0][fact] == second["events"][0][fact]
    assert leftovers(decoder) == []


def test_the_mp4_names_its_title_and_its_job(decoder):
    import re
    import subprocess

    name = put(decoder, "verified", clip_bytes(*make_clip(), title="猫 = cat; ../x"))
    decode(decoder, Engine())
    path = decoder.job("done", name).file(".mp4")
    told = subprocess.run([FFMPEG, "-i", path], capture_output=True, text=True, check=False).stderr
    assert re.search(r"title +: 猫 = cat; \.\./x\n", told)
    assert re.search(rf"comment +: h3spool job {name}\n", told)


def test_a_clip_without_sound_has_no_sound_track(decoder):
    name = put(decoder, "verified", clip_bytes(make_clip()[0], None, allow="no-audio"))
    assert decode(decoder, Engine()) == {name: ("done", 0)}
    seen, made = receipt_of(decoder, name)["events"]
    assert made["mp4"]["audio"] is None
    assert "audio_peak" not in seen


def test_delivery_is_in_the_receipt(decoder, tmp_path):
    name = put(decoder, "verified", clip_bytes(*make_clip(), title="Cat"))
    decode(decoder, Engine(), deliver=tmp_path / "out")
    account = receipt_of(decoder, name)
    assert account["delivered"] == {
        "path": str(tmp_path / "out" / "Cat.mp4"),
        "sha256": account["events"][-1]["sha256"],
    }
    assert (tmp_path / "out" / "Cat.mp4").exists()


# ---------------------------------------------------------------- broken ones


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (Engine(level=16), "the picture is black"),
        (Engine(wave=np.nan), "NaN"),
        (Engine(wave=0), "sound"),
        (Engine(extra=1), "the decoder gave at least 6 frames, not 5"),
        (Engine(extra=-1), "the decoder gave 4 frames, not 5"),
        (Engine(raises=BadData("clip 0 is not finite, not even in fp32")), "not even in fp32"),
    ],
    ids=["black", "NaN", "silent", "too long", "too short", "not finite"],
)
@pytest.mark.parametrize("output", [{}, {"mux": False}, {"keep_master": True}], ids=["mux", "master", "both"])
def test_a_broken_picture_or_sound_never_reaches_done(decoder, engine, words, output):
    name = put(decoder, "verified")
    assert decode(decoder, engine, **output) == {name: ("failed", 65)}
    event = receipt_of(decoder, name)["events"][-1]
    assert (event["step"], event["outcome"]) == ("decode", "failed")
    assert words in event["error"]
    assert files(decoder, name) == ALWAYS
    assert leftovers(decoder) == []


def test_what_is_allowed_is_done_with_a_warning(decoder):
    name = put(decoder, "verified", clip_bytes(*make_clip(), allow="black,silent"))
    assert decode(decoder, Engine(level=0, wave=0)) == {name: ("done", 0)}
    assert "every frame is black (allowed)" in receipt_of(decoder, name)["events"][0]["warnings"]


def test_a_latent_that_was_damaged_after_verify_fails(decoder):
    name = put(decoder, "verified")
    path = decoder.job("verified", name).latent
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert decode(decoder, Engine()) == {name: ("failed", 65)}
    assert "the sidecar says" in receipt_of(decoder, name)["events"][-1]["error"]


def test_a_missing_master_fails_and_says_what_to_do(decoder):
    name = put(decoder, "decoded")
    assert mux(decoder) == {name: ("failed", 65)}
    assert f"`h3spool requeue {name}` decodes the job again" in receipt_of(decoder, name)["events"][-1]["error"]


@pytest.mark.parametrize("damage", [b"", b"no video", None])
def test_a_damaged_master_is_no_mp4(decoder, damage):
    """0 bytes is what a power cut leaves of a file that was not fsynced."""
    name = put(decoder, "verified")
    decode(decoder, Engine(), mux=False)
    path = decoder.job("decoded", name).file(".master.mkv")
    path.write_bytes(path.read_bytes()[:-2000] if damage is None else damage)
    assert mux(decoder) == {name: ("decoded", 74)}
    assert receipt_of(decoder, name)["events"][-1]["outcome"] == "put-back"
    assert ".mp4" not in files(decoder, name)
    assert leftovers(decoder) == []


def test_the_old_mp4_stays_until_a_new_one_replaces_it(decoder):
    name = put(decoder, "verified")
    job = decoder.job("verified", name)
    job.write(f"{name}.mp4", b"old")
    assert decode(decoder, Engine(raises=IOFailed("disk full"))) == {name: ("verified", 74)}
    assert job.file(".mp4").read_bytes() == b"old"
    assert decode(decoder, Engine()) == {name: ("done", 0)}
    assert decoder.job("done", name).file(".mp4").stat().st_size > 100


def test_try_later_puts_back_as_it_was(decoder):
    name = put(decoder, "verified")
    before = files(decoder, name)
    with pytest.raises(TryLater):
        decode(decoder, Engine(raises=TryLater("busy")))
    assert places_of(decoder.root) == {name: ["verified"]}
    assert files(decoder, name) - {"state.json"} == before
    assert leftovers(decoder) == []


# ---------------------------------------------------------------- ffmpeg


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo '[fatal] the muxer tripped' >&2; exit 187", "ffmpeg ended with exit status 187"),
        ("head -c 5000 >/dev/null; echo '[error] No space left on device' >&2; exit 1", "no space left on the disk"),
        ("head -c 5000 >/dev/null; kill -9 $$", "was killed by signal 9"),
    ],
)
def test_an_ffmpeg_that_fails_puts_back_with_its_last_lines(decoder, tmp_path, body, words):
    name = put(decoder, "verified")
    assert decode(decoder, Engine(), ffmpeg=str(fake_ffmpeg(tmp_path / "ffmpeg", body))) == {name: ("verified", 74)}
    event = receipt_of(decoder, name)["events"][-1]
    assert (event["outcome"], event["attempt"]) == ("put-back", 1)
    assert words in event["error"]
    if "tripped" in body:
        assert "the muxer tripped" in event["error"]
    assert files(decoder, name) == ALWAYS
    assert leftovers(decoder) == []


def test_an_encoder_that_is_missing_is_69_and_does_not_count(decoder):
    name = put(decoder, "verified")
    with pytest.raises(Unavailable, match="choose another with --codec"):
        decode(decoder, Engine(), encoding={"codec": "no_such_codec"})
    assert places_of(decoder.root) == {name: ["verified"]}
    assert decoder.job("verified", name).state() == {}


# ---------------------------------------------------------------- one file, no spool


@pytest.fixture
def latent_file(tmp_path):
    path = tmp_path / "clip.h3latent"
    path.write_bytes(clip_bytes(*make_clip(), title="猫", seed=3))
    return path


def test_a_file_becomes_an_mp4_with_its_receipt_beside_it(latent_file, tmp_path):
    source = render.load_file(latent_file)
    account = render.decode_file(source, tmp_path / "out.mp4", Engine(), render.Output(FFMPEG))
    assert json.loads((tmp_path / "out.pipeline.json").read_text()) == account
    assert (account["job"], account["title"], account["producer"]["seed"]) == ("out", "猫", "3")
    assert account["latent"]["sha256"] == hashlib.sha256(latent_file.read_bytes()).hexdigest()
    assert account["events"][-1]["sha256"] == hashlib.sha256((tmp_path / "out.mp4").read_bytes()).hexdigest()
    assert {path.name for path in tmp_path.iterdir()} == {"clip.h3latent", "out.mp4", "out.pipeline.json"}


def test_a_file_that_fails_leaves_the_old_one_alone(latent_file, tmp_path):
    (tmp_path / "out.mp4").write_bytes(b"old")
    with pytest.raises(BadData, match="the picture is black"):
        render.decode_file(render.load_file(latent_file), tmp_path / "out.mp4", Engine(level=0), render.Output(FFMPEG))
    assert {path.name for path in tmp_path.iterdir()} == {"clip.h3latent", "out.mp4"}
    assert (tmp_path / "out.mp4").read_bytes() == b"old"


def test_a_file_is_refused_by_the_same_checks(tmp_path):
    (tmp_path / "odd.h3latent").write_bytes(clip_bytes(*make_clip(3)))
    with pytest.raises(BadData, match=r"odd\.h3latent: .*nearest valid lengths"):
        render.load_file(tmp_path / "odd.h3latent")
    assert render.load_file(tmp_path / "odd.h3latent", ["off-grid"]).clip.frames == 9
    with pytest.raises(NotFound, match="no such file"):
        render.load_file(tmp_path / "nothing.h3latent")
    with pytest.raises(BadData, match="not a regular file"):
        render.load_file(tmp_path)
