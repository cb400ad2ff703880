"""Decoder: clips of frames and sound, precision and its rungs, memory, the thread that decodes ahead."""

import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from golden import h3_weights as h3
from golden.pixels import latent, pixels

from h3spool import errors
from h3spool.decode import Decoder
from h3spool.vae import audio, tiling, weights

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vae")
    return h3.save(folder / "video.safetensors", h3.video_weights()), h3.save(folder / "audio.safetensors", h3.audio_weights())  # fmt: skip  # noqa: E501


@pytest.fixture(scope="module")
def decoder(files):
    return Decoder(*files, precision="fp32", device="cpu")


def sound_latent(length):
    return np.random.default_rng(1).standard_normal((1, 32, 2, length), dtype=np.float32)


@pytest.mark.parametrize(
    ("tokens", "pieces"), [(1, [1]), (2, [5]), (3, [9]), (7, [17, 5]), (9, [17, 13]), (12, [17, 17, 5])]
)
def test_frames_leave_clip_by_clip(decoder, tokens, pieces):
    report = {}
    frames = list(decoder.frames(latent(tokens, 2, 3).numpy(), report))
    assert [len(piece) for piece in frames] == pieces
    assert {(piece.dtype.name, piece.shape[1:]) for piece in frames} == {("uint8", (32, 48, 3))}
    assert report["clips"] == tiling.clip_count(tokens)
    assert report["fallbacks"] == []
    assert report["seconds"] > 0
    assert report["peak_memory_bytes"] > 1 << 20


def test_frames_are_the_pixels_rounded_half_to_even(files, decoder):
    z = latent(9, 3, 2)
    net, _ = weights.load_video(files[0], torch.float32, torch.device("cpu"))
    expected = np.rint(255 * pixels(net, z).permute(1, 2, 3, 0).numpy()).astype(np.uint8)
    assert np.array_equal(np.concatenate(list(decoder.frames(z.numpy(), {}))), expected)


def test_an_image_is_its_token_repeated(decoder):
    z = latent(1, 2, 2)
    (image,) = decoder.frames(z.numpy(), {})
    assert np.array_equal(image, next(decoder.frames(z.expand(1, 24, 7, 2, 2).numpy(), {}))[:1])


def test_seams_are_chosen(files):
    z = latent(2, 18, 17).numpy()
    one, other = (np.concatenate(list(Decoder(*files, precision="fp32", seams=s).frames(z, {}))) for s in ("composited", "official"))  # fmt: skip  # noqa: E501
    assert (one != other).any()


def test_sound_is_800_samples_a_latent(decoder, monkeypatch):
    report = {}
    monkeypatch.setattr(audio, "CHUNK", 8)
    chunks = list(decoder.sound(sound_latent(11), report))
    assert [chunk.shape for chunk in chunks] == [(2, 4800), (2, 4000)]
    assert {chunk.dtype.name for chunk in chunks} == {"float32"}
    assert report["chunks"] == 2
    assert report["seconds"] > 0


def test_facts_are_json_and_name_both_checkpoints(decoder, files):
    facts = json.loads(json.dumps(decoder.facts))
    assert (facts["engine"], facts["precision"], facts["seams"]) == ("native", "fp32", "composited")
    assert facts["device"].startswith("cpu")
    assert [facts[vae]["name"] for vae in ("video_vae", "audio_vae")] == [path.name for path in files]
    assert facts["video_vae"]["fingerprint"] != facts["audio_vae"]["fingerprint"]


def test_progress_counts_clips(files):
    seen = []
    decoder = Decoder(files[0], None, precision="fp32", progress=lambda done, total: seen.append((done, total)))
    list(decoder.frames(latent(12, 2, 2).numpy(), {}))
    assert seen == [(1, 2), (2, 2)]


# ---- what cannot be decoded ----


def test_a_clip_that_is_not_finite_is_named(decoder):
    z = latent(12, 2, 2).numpy()
    z[:, :, 9] = np.nan  # only the second clip sees token 9
    frames = decoder.frames(z, {})
    assert len(next(frames)) == 17
    with pytest.raises(errors.BadData, match=r"clip 1 .* is not finite"):
        next(frames)


def test_sound_that_is_not_finite_is_refused(decoder):
    z = sound_latent(9)
    z[..., 8] = np.inf
    with pytest.raises(errors.BadData, match="not finite in chunk 0"):
        list(decoder.sound(z, {}))


@pytest.mark.parametrize("shape", [(24, 7, 2, 2), (1, 16, 7, 2, 2), (2, 24, 7, 2, 2)])
def test_another_shape_is_refused(decoder, shape):
    with pytest.raises(errors.BadData, match="a video latent is"):
        next(decoder.frames(np.zeros(shape, np.float32), {}))


def test_sound_of_another_shape_is_refused(decoder):
    with pytest.raises(errors.BadData, match="an audio latent is"):
        next(decoder.sound(np.zeros((2, 32, 9), np.float32), {}))


def test_sound_needs_an_audio_vae(files):
    with pytest.raises(errors.NotUsable, match="--audio-vae"):
        next(Decoder(files[0], None, precision="fp32").sound(sound_latent(2), {}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_a_gpu_that_is_not_there_is_unavailable(files, device):
    with pytest.raises(errors.Unavailable, match=f"there is no {device}") as caught:
        Decoder(*files, device=device)
    assert caught.value.exit_code == 69


@pytest.mark.parametrize("device", ["gpu", "meta"])
def test_what_is_no_device_is_unavailable(files, device):
    with pytest.raises(errors.Unavailable, match=device):
        Decoder(*files, device=device)


def test_int8_needs_an_int8_file(files):
    with pytest.raises(errors.NotUsable, match="int8"):
        Decoder(*files, precision="int8")


# ---- rungs ----


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory):
    """A network whose first feed-forward passes 65504, the end of fp16, when a latent is large."""
    state = h3.video_weights()
    state["decoder.transformer_blocks.0.ff.w1.weight"] *= 256
    state["decoder.transformer_blocks.0.scale2"] /= 4096
    return h3.save(tmp_path_factory.mktemp("vae") / "x", state)


def test_a_clip_that_overflows_is_decoded_again_one_rung_up(overflowing):
    z, report = latent(12, 2, 2).numpy(), {}
    frames = np.concatenate(list(Decoder(overflowing, None, precision="fp16", device="cpu").frames(z, report)))
    assert report["fallbacks"] == [{"clip": clip, "from": "fp16", "to": "fp32"} for clip in (0, 1)]
    assert report["clips"] == 2
    exact = np.concatenate(list(Decoder(overflowing, None, precision="fp32", device="cpu").frames(z, {})))
    assert np.abs(frames.astype(int) - exact).max() <= 1  # its weights are those of fp16


def test_precision_is_what_the_receipt_says(files):
    for precision in ("fp16", "bf16", "fp32"):
        assert Decoder(files[0], None, precision=precision, device="cpu").facts["precision"] == precision


def test_auto_is_bf16_only_where_the_processor_has_it(files):
    flags = set(Path("/proc/cpuinfo").read_text().split())
    expected = "bf16" if flags & {"avx512_bf16", "amx_bf16"} else "fp32"
    assert Decoder(files[0], None, device="cpu").facts["precision"] == expected


# ---- memory ----


class Cramped(torch.nn.Module):
    """A real network on a device that has room for `room` tiles."""

    def __init__(self, net, room):
        super().__init__()
        self.net, self.room, self.asked = net, room, []
        self.denormalise = net.denormalise

    def forward(self, z, dtype, batch, alive):
        self.asked.append(batch)
        if batch > self.room:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return self.net(z, dtype, batch, alive)


def test_out_of_memory_halves_the_tiles_per_call(files):
    decoder = Decoder(files[0], None, precision="fp32")
    z = latent(12, 2, 30).numpy()
    whole = np.concatenate(list(decoder.frames(z, {})))
    decoder._video = cramped = Cramped(decoder._video, room=1)
    decoder._most = 4
    assert np.array_equal(np.concatenate(list(decoder.frames(z, {}))), whole)
    assert cramped.asked == [4, 2, 1, 1]  # the second clip starts with what fitted the first


def test_a_device_without_room_for_one_tile_is_unavailable(files):
    decoder = Decoder(files[0], None, precision="fp32")
    decoder._video = Cramped(decoder._video, room=0)
    with pytest.raises(errors.Unavailable, match="not enough memory"):
        next(decoder.frames(latent(2, 2, 2).numpy(), {}))


MEASURE = """
import sys
import numpy as np
from h3spool.decode import Decoder
video, audio, tokens, latents = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
decoder = Decoder(video, audio, precision="fp32", device="cpu")
rng = np.random.default_rng(0)
report = {}
total = sum(len(f) for f in decoder.frames(rng.standard_normal((1, 24, tokens, 20, 20), np.float32), report))
samples = sum(w.shape[1] for w in decoder.sound(rng.standard_normal((1, 32, 2, latents), np.float32), {}))
print(total, samples, report["peak_memory_bytes"])
"""


def test_peak_memory_does_not_grow_with_the_length(tmp_path):
    paths = [h3.save(tmp_path / "video", h3.video_weights(64, 1)), h3.save(tmp_path / "audio", h3.audio_weights())]

    def measure(tokens, latents):
        command = [sys.executable, "-c", MEASURE, *map(str, paths), str(tokens), str(latents)]
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=TESTS.parent, env=one_thread, capture_output=True, text=True, check=True)
        return [int(n) for n in done.stdout.split()]

    short, long = measure(37, 207), measure(107, 603)
    assert (short[:2], long[:2]) == ([124, 165600], [362, 482400])
    assert long[2] - short[2] < 40e6  # the 238 frames between them are 73e6 bytes


# ---- decoding ahead ----


def decoding_threads():
    return [thread for thread in threading.enumerate() if thread.name == "h3spool-decode"]


def test_at_most_two_clips_are_decoded_before_they_are_taken(files):
    seen = []
    decoder = Decoder(files[0], None, precision="fp32", progress=lambda *done: seen.append(done))
    frames = decoder.frames(latent(57, 2, 2).numpy(), {})
    next(frames)
    decoding_threads()[0].join(timeout=1)  # it cannot end: it waits for the caller
    assert 2 <= len(seen) <= 3
    frames.close()


def test_leaving_early_stops_the_thread(decoder):
    for piece in itertools.islice(decoder.frames(latent(57, 2, 2).numpy(), {}), 1):
        assert len(piece) == 17
    assert not decoding_threads()


def test_a_decoder_is_good_for_another_job_after_one_failed(decoder):
    good, bad = latent(2, 2, 2).numpy(), np.full((1, 24, 2, 2, 2), np.nan, np.float32)
    before = list(decoder.frames(good, {}))
    with pytest.raises(errors.BadData):
        list(decoder.frames(bad, {}))
    assert np.array_equal(before[0], next(decoder.frames(good, {})))
