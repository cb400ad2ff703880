"""The latent file: geometry of an H3 clip, the `.h3latent` container, and the checks every latent must pass.

A `.h3latent` is safetensors with `video` [1, 24, T, H, W] and `audio` [1, 32, 2, Ta] in the sampler's normalised scale,
F32, F16 or BF16. One video token covers 16x16 px; T tokens are `frame_count(T)` frames at 24 fps; audio runs at 40
tokens a second. numpy is imported only where numbers are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from h3spool import container
from h3spool.container import ITEM_BYTES, Tensor, tensor_of
from h3spool.errors import BadData

if TYPE_CHECKING:
    import numpy as np

FORMAT, VERSION = "h3spool.latent", "1"
FRAME_RATE = "24/1"
FRAMES_PER_S = 24
VIDEO_CHANNELS, AUDIO_CHANNELS = 24, 32
TOKEN_PX = 16
ALLOW = ("image", "no-audio", "silent", "black", "off-grid")
MAX_ABS = 1000.0

# Channels of the video latent whose published standard deviation is largest (about 3) and smallest (about 0.6):
# in the sampler's scale both groups are near 1, so their ratio tells a denormalised latent.
_WIDE_CHANNELS, _NARROW_CHANNELS = (16, 17, 18, 20, 21), (9, 13, 14, 15)


# ---------------------------------------------------------------- geometry


def frame_count(tokens: int) -> int:
    """Frames that T latent tokens decode to: 17 for each five, the first of a five gives 1 and the others 4."""
    fives, rest = divmod(tokens, 5)
    return 17 * fives + (4 * rest - 3 if rest else 0)


def audio_length(frames: int) -> int:
    """Audio tokens (40 a second) that belong to `frames` frames (24 a second); never a tie to round."""
    return (frames * 10 + 3) // 6


def on_grid(tokens: int) -> bool:
    """Whether T is a length the model generates: 5k+2 tokens, 17k+5 frames."""
    return tokens >= 2 and tokens % 5 == 2


@dataclass(frozen=True)
class Latent:
    """One clip in latent space. `audio` is None only where the clip is meant to have none."""

    video: Tensor
    audio: Tensor | None
    metadata: dict[str, str]

    @property
    def frames(self) -> int:
        """Frames of the decoded picture."""
        return frame_count(self.video.shape[2])

    @property
    def width(self) -> int:
        """Width of the picture in px."""
        return TOKEN_PX * self.video.shape[4]

    @property
    def height(self) -> int:
        """Height of the picture in px."""
        return TOKEN_PX * self.video.shape[3]

    @property
    def allow(self) -> frozenset[str]:
        """What this clip is meant to do although it is unusual; see `parse_allow`."""
        return parse_allow(self.metadata.get("allow", ""))


def parse_allow(text: str) -> frozenset[str]:
    """Read a comma-separated list of allowances.

    Raises:
        BadData: an unknown word.
    """
    words = frozenset(word.strip() for word in text.split(",") if word.strip())
    if unknown := sorted(words - set(ALLOW)):
        raise BadData(f"unknown allowance {', '.join(unknown)}; there are {', '.join(ALLOW)}")
    return words


def build(video: object, audio: object | None, facts: dict[str, object]) -> Latent:
    """Make a latent in memory, with the metadata that its shape dictates. It is not checked yet; see `check`.

    Args:
        video: [1, 24, T, H, W], numpy, torch or `Tensor`.
        audio: [1, 32, 2, Ta] or None.
        facts: further metadata (title, producer, seed, allow, ...); None and empty values are left out, and what the
            tensors dictate (frames, width, ...) is not replaced.
    """
    latent = Latent(tensor_of(video), None if audio is None else tensor_of(audio), {})
    _check_shapes(latent)
    dictated = {
        "format": FORMAT,
        "version": VERSION,
        "frames": str(latent.frames),
        "frame_rate": FRAME_RATE,
        "width": str(latent.width),
        "height": str(latent.height),
        "created": datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }
    known = {key: str(value) for key, value in facts.items() if value not in (None, "") and key not in dictated}
    return Latent(latent.video, latent.audio, dictated | known)


# ---------------------------------------------------------------- the container


def serialize(latent: Latent) -> list[bytes | memoryview]:
    """The bytes of the `.h3latent`, in pieces.

    Raises:
        BadData: the metadata does not fit the header.
    """
    tensors = {"video": latent.video} | ({} if latent.audio is None else {"audio": latent.audio})
    return container.serialize(tensors, latent.metadata)


def read(path: Path, raw: bytes | None = None) -> Latent:
    """Read a `.h3latent`. Its container and shapes are checked, its values not yet; see `check`.

    Args:
        path: the file; also what messages name.
        raw: its bytes where they were read already (to hash and parse the same ones).

    Raises:
        BadData, NotFound, NotPermitted, IOFailed
    """
    try:
        tensors, metadata = container.parse(container.read_bytes(path) if raw is None else raw)
        if metadata.get("format") != FORMAT:
            raise BadData(f"its metadata does not say format={FORMAT}; `h3spool export` takes latents of other tools")
        if metadata.get("version") != VERSION:
            raise BadData(f"latent format version {metadata.get('version')!r}, this h3spool reads {VERSION}")
        if set(tensors) - {"video", "audio"} or "video" not in tensors:
            raise BadData(f"it must hold `video` and `audio`, it holds {', '.join(sorted(tensors)) or 'nothing'}")
        latent = Latent(tensors["video"], tensors.get("audio"), metadata)
        _check_shapes(latent)
        _check_metadata(latent)
    except BadData as error:
        raise BadData(f"{path}: {error}") from None
    return latent


# ---------------------------------------------------------------- the checks


def _check_shapes(latent: Latent) -> None:
    video, audio = latent.video, latent.audio
    for name, tensor in (("video", video), ("audio", audio)):
        if tensor is not None and tensor.dtype not in ITEM_BYTES:
            raise BadData(f"`{name}` is {tensor.dtype}, a latent is F32, F16 or BF16")
    if len(video.shape) != 5 or video.shape[:2] != (1, VIDEO_CHANNELS) or 0 in video.shape:
        raise BadData(f"`video` is {list(video.shape)}, it must be [1, {VIDEO_CHANNELS}, T, H, W]")
    if audio is not None and (len(audio.shape) != 4 or audio.shape[:3] != (1, AUDIO_CHANNELS, 2) or 0 in audio.shape):
        raise BadData(f"`audio` is {list(audio.shape)}, it must be [1, {AUDIO_CHANNELS}, 2, Ta]")


def _check_metadata(latent: Latent) -> None:
    """The header's own account of the clip must agree with its tensors."""
    parse_allow(latent.metadata.get("allow", ""))
    true = {"frames": latent.frames, "width": latent.width, "height": latent.height, "frame_rate": FRAME_RATE}
    for key, value in true.items():
        if latent.metadata.get(key, str(value)) != str(value):
            raise BadData(f"its metadata says {key}={latent.metadata[key]}, its tensors make {value}")


def _check_lengths(latent: Latent, allow: frozenset[str]) -> None:
    tokens = latent.video.shape[2]
    if tokens == 1:
        if "image" not in allow:
            raise BadData("`video` has one latent frame, a still image; if that is meant: export --allow image")
    elif not on_grid(tokens) and "off-grid" not in allow:
        below = max(2, (tokens - 2) // 5 * 5 + 2)
        raise BadData(
            f"`video` has {tokens} latent frames ({latent.frames} frames), which the model never makes; the nearest "
            f"valid lengths are {below} ({frame_count(below)} frames) and {below + 5} ({frame_count(below + 5)} "
            "frames); if it is meant: export --allow off-grid"
        )
    if latent.audio is None:
        if "no-audio" not in allow:
            raise BadData("it holds no `audio`; if the clip is meant to be silent: export --allow no-audio")
        return
    length, expected = latent.audio.shape[3], audio_length(latent.frames)
    if length != expected:
        raise BadData(
            f"`audio` has {length} latent frames, {latent.frames} video frames need {expected}: "
            "the two streams belong to different clips, or one was cut"
        )


def check(latent: Latent) -> tuple[dict[str, dict[str, object]], list[str]]:
    """Check lengths and values against everything known of a good latent, less what the latent itself allows.

    Returns:
        statistics per stream (shape, dtype, min, max, mean, std) and warnings, both for the receipt.

    Raises:
        BadData: a sentence without the path.
    """
    _check_lengths(latent, latent.allow)
    facts, warnings = {}, []
    constant_ok = {"video": "black", "audio": "silent"}
    for name, tensor in (("video", latent.video), ("audio", latent.audio)):
        if tensor is None:
            continue
        values = tensor.array()
        facts[name] = stats = _statistics(name, values) | {"shape": list(tensor.shape), "dtype": tensor.dtype}
        if stats["min"] == stats["max"]:
            if constant_ok[name] not in latent.allow:
                raise BadData(
                    f"every value of `{name}` is {stats['min']:g}: the sampler failed, or the stream was never "
                    f"filled; if it is meant: export --allow {constant_ok[name]}"
                )
        elif stats["std"] < 0.05:
            warnings.append(f"`{name}` hardly varies (standard deviation {stats['std']:.3g}, usual is about 1)")
        if max(-stats["min"], stats["max"]) > MAX_ABS:
            raise BadData(f"`{name}` reaches {stats['min']:g} to {stats['max']:g}; a latent stays within {MAX_ABS:g}")
        if _looks_denormalised(name, values, stats["std"]):
            warnings.append(
                f"`{name}` looks denormalised (standard deviation {stats['std']:.2f}): h3spool expects the sampler's "
                "scale, before latents_mean and latents_std are applied"
            )
    return facts, warnings


def _statistics(name: str, values: np.ndarray) -> dict[str, float]:
    import numpy as np

    low, high = float(values.min()), float(values.max())
    if not np.isfinite(low) or not np.isfinite(high):  # min and max pass NaN on
        bad = ~np.isfinite(values)
        first = [int(axis[0]) for axis in np.nonzero(bad)]
        kinds = "NaN" if np.isnan(values[bad]).all() else "NaN or infinite"
        raise BadData(f"{int(bad.sum())} of {values.size} values of `{name}` are {kinds}, the first at {first}")
    flat = values.reshape(-1)
    mean = float(flat.mean(dtype=np.float64))
    with np.errstate(over="ignore"):  # such values are refused by their size
        variance = float(np.dot(flat, flat)) / flat.size - mean * mean
    return {"min": low, "max": high, "mean": round(mean, 6), "std": round(max(variance, 0.0) ** 0.5, 6)}


def _looks_denormalised(name: str, values: np.ndarray, std: float) -> bool:
    if name == "audio":
        return std > 1.6  # published standard deviations are 1.5 to 3.3; a sampler callback's audio carries a factor 4
    if std <= 1.3:
        return False
    spread = values[0].reshape(VIDEO_CHANNELS, -1).std(axis=1)
    return float(spread[list(_WIDE_CHANNELS)].mean()) > 3 * float(spread[list(_NARROW_CHANNELS)].mean())
