"""The quality gate: a decode that went wrong looks like a success to every program, so numbers decide here.

A `Gate` sees each clip of frames and each chunk of sound of one job on its way to the encoder, raises `BadData` where
something is broken, and ends in the facts that the receipt keeps. What is broken: NaN or Inf; a video in which no 8-bit
value of any frame is above 16 (black); sound that is constant to 1e-4 in both channels. The last two may be meant: the
`allow` of the latent (`black`, `silent`) says so. One constant channel is a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from h3spool.errors import BadData

if TYPE_CHECKING:
    import numpy as np

BLACK_MAX = 16  # 8-bit; the black of limited range, which a broken decode does not exceed
SILENT_SPREAD = 1e-4  # maximum minus minimum of a channel that counts as constant


def broken_values(values: np.ndarray) -> str | None:
    """Return what is wrong with the floats of one clip or chunk, such as `3 NaN and 0 Inf of 1024`, or None.

    Args:
        values: any shape, float; a decoder calls it on raw pixels or samples before it rounds them.
    """
    import numpy as np

    finite = int(np.isfinite(values).sum())
    if finite == values.size:
        return None
    nan = int(np.isnan(values).sum())
    return f"{nan} NaN and {values.size - finite - nan} Inf of {values.size} values"


class Gate:
    """Watch one job's picture and sound while they stream to the encoder.

    `allow` holds the words of the latent's `allow` (`black` and `silent` matter here). Call `verdict` when both streams
    have ended. Nothing of the clips is kept.
    """

    def __init__(self, allow: Iterable[str] = ()):
        self.allow = frozenset(allow)
        self._clips = 0
        self._frames = 0
        self._black_frames = 0
        self._chunks = 0
        self._samples = 0
        self._low = [float("inf")] * 2
        self._high = [float("-inf")] * 2
        self._squares = [0.0] * 2

    def watch_frames(self, clips: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the clips, uint8 `[n, H, W, 3]`, and count their black frames; raise at the end of a black video.

        Raises:
            BadData: no value above 16 in any frame, and `black` is not allowed.
        """
        for clip in clips:
            self._clips += 1
            self._frames += len(clip)
            self._black_frames += int((clip.reshape(len(clip), -1).max(axis=1) <= BLACK_MAX).sum())
            yield clip
        if self._frames and self._black_frames == self._frames and "black" not in self.allow:
            raise BadData(
                f"the picture is black: none of its {self._frames} frames in {self._clips} clips has an 8-bit value "
                f"above {BLACK_MAX}. A decode that overflowed looks like this: look at the latent's statistics and at "
                "the checkpoint, or decode with --precision fp32. If black is meant, export it with --allow black"
            )

    def watch_sound(self, chunks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the chunks, float32 `[2, n]`, and measure them; raise at a chunk that is not finite or silent sound.

        Raises:
            BadData: a NaN or Inf; or both channels constant to 1e-4, and `silent` is not allowed.
        """
        import numpy as np

        for chunk in chunks:
            if broken := broken_values(chunk):
                raise BadData(
                    f"the sound is broken: {broken} in chunk {self._chunks} (from sample {self._samples} on). Samples "
                    "must be finite: look at the latent's statistics and at the audio checkpoint"
                )
            self._chunks += 1
            self._samples += chunk.shape[1]
            for side, channel in enumerate(chunk if chunk.shape[1] else ()):
                self._low[side] = min(self._low[side], float(channel.min()))
                self._high[side] = max(self._high[side], float(channel.max()))
                self._squares[side] += float(np.square(channel, dtype=np.float64).sum())
            yield chunk
        if self._samples and all(self._constant()) and "silent" not in self.allow:
            raise BadData(
                f"the sound is constant: over {self._samples} samples neither channel moves by more than "
                f"{SILENT_SPREAD:g} (left is {self._low[0]:.4f}, right {self._low[1]:.4f}). A broken or mis-scaled "
                "latent or audio checkpoint sounds like this. If silence is meant, export it with --allow silent"
            )

    def verdict(self) -> dict:
        """Return what the receipt keeps.

        Returns:
            `frames`, `black_share` (of the frames: 0 to 1), `audio_peak` and `audio_rms` (`[left, right]`, full scale
            1; None without sound) and `warnings`, a list of sentences.
        """
        facts: dict = {"frames": self._frames, "audio_peak": None, "audio_rms": None, "warnings": []}
        facts["black_share"] = round(self._black_frames / self._frames, 4) if self._frames else None
        if self._samples:
            facts["audio_peak"] = [round(max(-low, high), 6) for low, high in zip(self._low, self._high, strict=True)]
            facts["audio_rms"] = [round((total / self._samples) ** 0.5, 6) for total in self._squares]
            left, right = self._constant()
            if left != right:
                facts["warnings"].append(f"the {'left' if left else 'right'} channel is constant")
            if left and right:
                facts["warnings"].append("both channels are constant (allowed)")
        if self._frames and self._black_frames == self._frames:
            facts["warnings"].append("every frame is black (allowed)")
        return facts

    def _constant(self) -> list[bool]:
        return [high - low <= SILENT_SPREAD for low, high in zip(self._low, self._high, strict=True)]
