import numpy as np
import pytest

from h3spool.errors import BadData
from h3spool.gate import Gate, broken_values


def clip(value, n=4):
    return np.full((n, 16, 32, 3), value, np.uint8)


def tone(left=1.0, right=1.0, n=3200):
    wave = np.sin(np.arange(n) * 0.05).astype(np.float32)
    return np.stack([left * wave, right * wave])


def run(gate, clips=(), sound=()):
    return [*gate.watch_frames(clips)], [*gate.watch_sound(sound)], gate.verdict()


def test_a_sound_picture_passes_unchanged_with_its_facts():
    clips, sound = [clip(200), clip(0), clip(16, 8)], [tone(0.5, 0.25), tone(0.5, 0.25)]
    seen, heard, facts = run(Gate(), clips, sound)
    assert all(a is b for a, b in zip(clips + sound, seen + heard, strict=True))
    assert facts["frames"] == 16
    assert facts["black_share"] == 0.75
    assert facts["audio_peak"] == pytest.approx([0.5, 0.25], abs=1e-3)
    assert facts["audio_rms"] == pytest.approx([0.5 / 2**0.5, 0.25 / 2**0.5], abs=1e-2)
    assert facts["warnings"] == []


def test_a_black_video_fails_and_says_what_to_do():
    with pytest.raises(BadData, match=r"none of its 8 frames in 2 clips.*--allow black"):
        run(Gate(), [clip(0), clip(16)])


def test_one_value_above_16_in_one_frame_is_not_black():
    last = clip(16)
    last[3, 15, 31, 2] = 17
    assert run(Gate(), [clip(16), last])[2]["black_share"] == 0.875


def test_black_that_is_meant_passes_with_a_warning():
    facts = run(Gate(["black"]), [clip(0)])[2]
    assert facts["black_share"] == 1.0
    assert "black" in facts["warnings"][0]
    assert facts["audio_peak"] is None


@pytest.mark.parametrize("level", [0.0, -1.0])
def test_sound_constant_in_both_channels_fails(level):
    flat = np.full((2, 800), level, np.float32)
    flat[:, ::2] += 0.9e-4
    with pytest.raises(BadData, match="--allow silent"):
        run(Gate(["black"]), [clip(9)], [flat, flat])


def test_sound_that_moves_only_between_chunks_is_not_constant():
    chunks = [np.full((2, 800), level, np.float32) for level in (0.0, 1.1e-4)]
    assert run(Gate(), [clip(99)], chunks)[2]["warnings"] == []


def test_silence_that_is_meant_passes():
    facts = run(Gate(["silent"]), [clip(99)], [np.zeros((2, 800), np.float32)])[2]
    assert facts["audio_rms"] == [0, 0]
    assert "both channels" in facts["warnings"][0]


@pytest.mark.parametrize(("left", "right", "named"), [(0, 1, "left"), (1, 0, "right")])
def test_one_constant_channel_is_a_warning(left, right, named):
    assert run(Gate(), [clip(99)], [tone(left, right)])[2]["warnings"] == [f"the {named} channel is constant"]


@pytest.mark.parametrize(("value", "said"), [(np.nan, "1 NaN and 0 Inf of 6400"), (np.inf, "0 NaN and 1 Inf")])
def test_a_bad_sample_is_refused_before_it_is_passed_on(value, said):
    bad = tone()
    bad[1, 7] = value
    stream = Gate(["silent"]).watch_sound([tone(), bad])
    next(stream)
    with pytest.raises(BadData, match=rf"{said}.*chunk 1 \(from sample 3200"):
        next(stream)


def test_broken_values_counts_both_kinds():
    values = np.array([1, np.nan, np.inf, -np.inf, 0], np.float16)
    assert broken_values(values) == "1 NaN and 2 Inf of 5 values"
    assert broken_values(np.zeros((2, 3))) is None


def test_a_clip_without_sound_or_an_empty_stream_is_no_error():
    assert run(Gate(), [], [])[2] == {
        "frames": 0,
        "audio_peak": None,
        "audio_rms": None,
        "warnings": [],
        "black_share": None,
    }
