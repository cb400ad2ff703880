"""The latent file: geometry, and every refusal and warning of a bad one, with files written here by hand."""

import json
import re
import struct

import numpy as np
import pytest
from conftest import clip_bytes, make_clip

from h3spool import latent
from h3spool.errors import BadData
from h3spool.vae import audio as audio_vae
from h3spool.vae import video as video_vae

SIZES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I32": 4, "F8_E4M3": 1}


def file_of(video=(1, 24, 2, 2, 2), audio=(1, 32, 2, 8), dtype="F32", metadata=None, **tensors) -> bytes:
    """A file with these shapes, filled with bytes that are valid numbers of every kind, by hand."""
    facts = {"format": "h3spool.latent", "version": "1"} | (metadata or {})
    header = {"__metadata__": {key: value for key, value in facts.items() if value is not None}}
    body = b""
    for name, shape in {"video": video, "audio": audio, **tensors}.items():
        if shape is not None:
            size = int(np.prod(shape)) * SIZES[dtype]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(body), len(body) + size]}
            body += (b"\0\x3c\0\x3d\0\x3e\x01\x3f" * (size // 8 + 1))[:size]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def read(raw: bytes):
    return latent.read("X.h3latent", raw)


def check(video, audio, **facts):
    """Write a clip, read it again, check it."""
    return latent.check(read(clip_bytes(video, audio, **facts)))


# ---------------------------------------------------------------- geometry


@pytest.mark.parametrize(("tokens", "frames", "audio"), [(2, 5, 8), (7, 22, 37), (37, 124, 207), (107, 362, 603)])
def test_lengths_on_the_grid(tokens, frames, audio):
    assert latent.on_grid(tokens)
    assert latent.frame_count(tokens) == frames
    assert latent.audio_length(frames) == audio == round(frames / 24 * 40)


def test_frames_follow_the_pattern_of_the_model():
    assert [latent.frame_count(tokens) for tokens in range(1, 13)] == [1, 5, 9, 13, 17, 18, 22, 26, 30, 34, 35, 39]
    assert [tokens for tokens in range(1, 20) if latent.on_grid(tokens)] == [2, 7, 12, 17]


@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_a_good_clip_passes_and_tells_its_facts(dtype):
    video, audio = (stream.astype(dtype) for stream in make_clip(tokens=7, height=2, width=3))
    raw = clip_bytes(video, audio, title="猫 ../x", seed=7)
    clip = read(raw)
    assert (clip.frames, clip.width, clip.height) == (22, 48, 32)
    assert clip.metadata["title"] == "猫 ../x"
    assert clip.metadata["seed"] == "7"
    facts, warnings = latent.check(clip)
    assert warnings == []
    assert facts["video"]["shape"] == [1, 24, 7, 2, 3]
    assert facts["video"]["max"] == pytest.approx(float(video.max()))
    assert facts["audio"]["std"] == pytest.approx(float(audio.astype(float).std()), abs=1e-5)


def test_bf16_is_read(tmp_path):
    import torch

    video, audio = (torch.from_numpy(stream).bfloat16() for stream in make_clip())
    facts, _ = check(video, audio)
    assert facts["video"]["dtype"] == "BF16"
    assert facts["video"]["max"] == float(video.float().max())


def test_facts_never_replace_what_the_tensors_say():
    """`--meta frames=9` would make a file that the next step refuses."""
    clip = read(clip_bytes(*make_clip(), frames=9, width=1, format="x", version="9", frame_rate="30/1"))
    assert clip.metadata["frames"] == "5"
    latent.check(clip)


# ---------------------------------------------------------------- refusals of the file

REFUSED = {
    "another format": (
        file_of(metadata={"format": None}),
        "does not say format=h3spool.latent; `h3spool export` takes latents of other tools",
    ),
    "another version": (file_of(metadata={"version": "2"}), "latent format version '2', this h3spool reads 1"),
    "no tensors": (file_of(video=None, audio=None), "must hold `video` and `audio`, it holds nothing"),
    "no video": (file_of(video=None), "must hold `video` and `audio`, it holds audio"),
    "a third tensor": (file_of(mask=(1,)), "must hold `video` and `audio`, it holds audio, mask, video"),
    "video rank": (file_of(video=(24, 2, 2, 2)), r"`video` is \[24, 2, 2, 2\], it must be \[1, 24, T, H, W\]"),
    "video channels": (file_of(video=(1, 16, 2, 2, 2)), r"`video` is \[1, 16, 2, 2, 2\], it must be"),
    "video batch": (file_of(video=(2, 24, 2, 2, 2)), r"`video` is \[2, 24, 2, 2, 2\], it must be"),
    "video without width": (file_of(video=(1, 24, 2, 2, 0)), r"`video` is \[1, 24, 2, 2, 0\], it must be"),
    "audio rank": (file_of(audio=(1, 32, 8)), r"`audio` is \[1, 32, 8\], it must be \[1, 32, 2, Ta\]"),
    "audio channels": (file_of(audio=(1, 64, 2, 8)), r"`audio` is \[1, 64, 2, 8\], it must be"),
    "audio mono": (file_of(audio=(1, 32, 1, 8)), r"`audio` is \[1, 32, 1, 8\], it must be"),
    "double precision": (file_of(dtype="F64"), "`video` is F64, a latent is F32, F16 or BF16"),
    "integers": (file_of(dtype="I32"), "`video` is I32, a latent is F32, F16 or BF16"),
    "eight-bit floats": (file_of(dtype="F8_E4M3"), "`video` is F8_E4M3, a latent is F32, F16 or BF16"),
    "frames that lie": (file_of(metadata={"frames": "22"}), "its metadata says frames=22, its tensors make 5"),
    "width that lies": (file_of(metadata={"width": "1280"}), "its metadata says width=1280, its tensors make 32"),
    "another rate": (file_of(metadata={"frame_rate": "30/1"}), "says frame_rate=30/1, its tensors make 24/1"),
    "unknown allowance": (
        file_of(metadata={"allow": "black,everything"}),
        "unknown allowance everything; there are image, no-audio, silent, black, off-grid",
    ),
    "truncated": (file_of()[:-1], "truncated: its tensors need"),
    "padded": (file_of() + b"\0", "padded: its tensors need"),
    "header too long": (file_of(metadata={"prompt": "x" * 65536}), "the limit is 65536"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_file_is_refused_by_name(case):
    raw, sentence = REFUSED[case]
    with pytest.raises(BadData, match=rf"^X\.h3latent: .*{sentence}"):
        read(raw)


def test_the_file_of_these_tests_is_otherwise_good():
    latent.check(read(file_of()))


# ---------------------------------------------------------------- refusals of lengths


@pytest.mark.parametrize(
    ("tokens", "nearest"),
    [
        (3, r"2 \(5 frames\) and 7 \(22 frames\)"),
        (6, r"2 \(5 frames\) and 7 \(22 frames\)"),
        (8, r"7 \(22 frames\) and 12 \(39 frames\)"),
        (36, r"32 \(107 frames\) and 37 \(124 frames\)"),
    ],
)
def test_an_off_grid_length_names_the_nearest_valid_ones(tokens, nearest):
    with pytest.raises(
        BadData, match=rf"`video` has {tokens} latent frames .*valid lengths are {nearest}.*--allow off-"
    ):
        check(*make_clip(tokens))
    check(*make_clip(tokens), allow="off-grid")


def test_one_token_is_an_image_only_if_it_is_meant():
    with pytest.raises(BadData, match=r"one latent frame, a still image; .*--allow image"):
        check(*make_clip(1))
    check(*make_clip(1), allow="image")


@pytest.mark.parametrize("change", [-1, 1, 30])
def test_sound_of_another_length_is_refused(change):
    video, _ = make_clip(7)
    _, audio = make_clip(17)
    with pytest.raises(BadData, match=rf"`audio` has {37 + change} latent frames, 22 video frames need 37"):
        check(video, audio[..., : 37 + change])


def test_no_sound_only_if_it_is_meant():
    video, _ = make_clip()
    with pytest.raises(BadData, match=r"holds no `audio`; .*--allow no-audio"):
        check(video, None)
    facts, _ = check(video, None, allow="no-audio")
    assert "audio" not in facts


# ---------------------------------------------------------------- refusals of values


@pytest.mark.parametrize("stream", ["video", "audio"])
def test_nan_and_inf_are_counted_and_the_first_is_named(stream):
    clip = dict(zip(("video", "audio"), make_clip(), strict=True))
    values = clip[stream]
    second = (0, 5, 1, 1, 1)[: values.ndim]
    values[second] = np.nan
    with pytest.raises(BadData, match=rf"1 of {values.size} values of `{stream}` are NaN, the first at \[0, 5, 1, 1"):
        check(**clip)
    values[(0, 3, 1, 0, 1)[: values.ndim]] = -np.inf
    with pytest.raises(BadData, match=rf"2 of {values.size} values of `{stream}` are NaN or infinite.*at \[0, 3, 1, 0"):
        check(**clip)


def test_infinity_alone_is_found():
    video, audio = make_clip()
    video[0, 0, 0, 0, 1] = np.inf
    with pytest.raises(BadData, match=r"1 of 192 values of `video` are .*infinite, the first at \[0, 0, 0, 0, 1\]"):
        check(video, audio)


@pytest.mark.parametrize(("stream", "word"), [("video", "black"), ("audio", "silent")])
@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_constant_stream_is_refused_unless_meant(stream, word, value):
    clip = dict(zip(("video", "audio"), make_clip(), strict=True))
    clip[stream][:] = value
    with pytest.raises(BadData, match=rf"every value of `{stream}` is {value:g}.*--allow {word}"):
        check(**clip)
    other = {"black": "silent", "silent": "black"}[word]
    with pytest.raises(BadData, match="every value"):
        check(**clip, allow=other)
    check(**clip, allow=word)


@pytest.mark.parametrize("value", [1001.0, -1e6])
def test_values_beyond_a_thousand_are_refused(value):
    video, audio = make_clip()
    audio[0, 0, 0, 0] = value
    with pytest.raises(BadData, match=rf"`audio` reaches .*{re.escape(format(value, 'g'))}.*stays within 1000"):
        check(video, audio)
    audio[0, 0, 0, 0] = 1000 if value > 0 else -1000
    check(video, audio)


def test_a_constant_beyond_a_thousand_is_refused_even_where_black_is_meant():
    video, audio = make_clip()
    with pytest.raises(BadData, match="stays within 1000"):
        check(video * 0 + 2000, audio, allow="black")


# ---------------------------------------------------------------- warnings


@pytest.mark.parametrize("stream", [0, 1])
def test_a_stream_that_hardly_varies_is_warned_of(stream):
    clip = list(make_clip())
    clip[stream] = clip[stream] * np.float32(0.01)
    _, warnings = check(*clip)
    assert [f"`{('video', 'audio')[stream]}` hardly varies" in text for text in warnings] == [True]


def denormalised(values, vae):
    shape = (1, -1, *[1] * (values.ndim - 2))
    std, mean = (np.float32(table).reshape(shape) for table in (vae.LATENTS_STD, vae.LATENTS_MEAN))
    return values * std + mean


@pytest.mark.parametrize("seed", range(3))
def test_a_denormalised_stream_is_warned_of(seed):
    video, audio = make_clip(tokens=7, height=4, width=4, seed=seed)
    assert check(video, audio)[1] == []
    for wrong, name in (
        ((denormalised(video, video_vae), audio), "video"),
        ((video, denormalised(audio, audio_vae)), "audio"),
        ((video, 4 * audio), "audio"),
    ):
        _, warnings = check(*wrong)
        assert [f"`{name}` looks denormalised" in text for text in warnings] == [True]


def test_a_lively_clip_is_not_called_denormalised():
    """What is large in all channels alike is large, not denormalised."""
    video, audio = make_clip(tokens=7, height=4, width=4)
    assert check(2 * video, audio)[1] == []
