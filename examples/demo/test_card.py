"""The demo clip: a moving test card with a rising tone on the left and a falling one on the right, as an H3 latent.

    python examples/demo/test_card.py OUT.h3latent [--frames 124] [--width 736] [--height 416]

The encoder is what the demo decoder was made for: one linear map a token for the picture, 32 bands of an MDCT for the
sound, both stored in the checkpoints under `encoder.`. Any size that H3 knows can be made: frames 17k + 5, width and
height multiples of 16.
"""

import argparse
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from h3spool import latent

HERE = Path(__file__).parent
VIDEO_VAE, AUDIO_VAE = HERE / "demo_video_vae.safetensors", HERE / "demo_audio_vae.safetensors"
LATENT = HERE / "demo.h3latent"

FRAME_RATE, SOUND_HZ, HOP = 24, 32_000, 800  # HOP: samples per audio latent
BARS = ((1, 1, 1), (1, 1, 0), (0, 1, 1), (0, 1, 0), (1, 0, 1), (1, 0, 0), (0, 0, 1), (0.1, 0.1, 0.1))
WHITE, GREEN = (1, 1, 1), (0.2, 0.9, 0.4)
TOKEN, SOFT = 16, 10  # pixels: of a token, of the edge of what moves
GLYPHS = {  # three columns, five rows
    "H": "#.##.#####.##.#", "0": "####.##.##.####", "1": "..#..#..#..#..#", "2": "###..#####..###",
    "3": "###..####..####", "4": "#.##.####..#..#", "5": "####..###..####", "6": "####..####.####",
    "7": "###..#..#..#..#", "8": "####.#####.####", "9": "####.####..####",
}  # fmt: skip
LOW_HZ, HIGH_HZ = 220.0, 587.0
PIXEL_MEAN, PIXEL_STD = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])


def picture(width: int, height: int, frames: int) -> np.ndarray:
    """Draw uint8 `[frames, height, width, 3]`: bars, H3, the second, a ball, a clock hand (4 s a turn), progress."""
    card = Card(width, height)
    return np.stack([card.frame(index, frames) for index in range(frames)])


class Card:
    """Draws in pixels. What stands still has its edges between tokens, so that 24 numbers a token go a long way."""

    def __init__(self, width: int, height: int):
        self.width, self.height = width, height
        self.y, self.x = np.mgrid[0:height, 0:width].astype(np.float32) + 0.5
        self.canvas = np.empty((height, width, 3), np.float32)

    def frame(self, index: int, frames: int) -> np.ndarray:
        seconds, height, width = index / FRAME_RATE, self.height, self.width
        self.background(seconds)
        rows, columns = height // TOKEN, width // TOKEN
        for i, color in enumerate(BARS):
            self.box(TOKEN * (i * columns // len(BARS)), 0, width, TOKEN * max(2, rows // 4), color)
        cell = TOKEN * max(1, rows // 13)
        for place, (glyph, color) in enumerate((("H", WHITE), ("3", WHITE), (str(int(seconds) % 10), GREEN))):
            self.glyph(cell * (1 + 4 * place), TOKEN * (rows // 3), cell, glyph, color)
        self.clock(0.78 * width, 0.57 * height, 0.2 * height, seconds / 4)
        across, up = 0.5 - 0.42 * np.cos(np.pi * seconds / 2), abs(np.sin(np.pi * seconds / 2))
        self.disc(width * across, height * (0.83 - 0.4 * up), 0.08 * height, (1, 0.55, 0.1))
        self.box(0, height - TOKEN, width * (index + 1) / frames, height, GREEN)
        return np.rint(self.canvas * 255).astype(np.uint8)

    def background(self, seconds: float) -> None:
        for channel, (fx, fy, speed) in enumerate(((0.9, 0.4, 0.5), (0.5, 0.8, -0.4), (0.3, 1.0, 0.7))):
            wave = np.sin(2 * (fx * self.x + fy * self.y) / self.height + speed * seconds + channel)
            self.canvas[..., channel] = 0.32 + 0.13 * wave

    def window(self, x0: float, y0: float, x1: float, y1: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return x, y and the canvas of the pixels around a rectangle."""
        rows, columns = (slice(max(int(a) - SOFT, 0), max(int(b) + SOFT, 0)) for a, b in ((y0, y1), (x0, x1)))
        return self.x[rows, columns], self.y[rows, columns], self.canvas[rows, columns]

    def paint(self, pixels: np.ndarray, distance: np.ndarray, color: tuple, soft: float = SOFT) -> None:
        """Cover `pixels` where `distance` to a shape's outline is negative: inside. Its edge is `soft` pixels wide."""
        cover = np.clip(0.5 - distance / soft, 0, 1)[..., None]
        cover = cover * cover * (3 - 2 * cover)
        pixels += cover * (np.array(color, np.float32) - pixels)

    def box(self, x0: float, y0: float, x1: float, y1: float, color: tuple) -> None:
        x, y, pixels = self.window(x0, y0, x1, y1)
        self.paint(pixels, np.maximum(np.maximum(x0 - x, x - x1), np.maximum(y0 - y, y - y1)), color, soft=1)

    def disc(self, cx: float, cy: float, radius: float, color: tuple) -> None:
        x, y, pixels = self.window(cx - radius, cy - radius, cx + radius, cy + radius)
        self.paint(pixels, np.hypot(x - cx, y - cy) - radius, color)

    def clock(self, cx: float, cy: float, radius: float, turns: float) -> None:
        self.disc(cx, cy, 1.1 * radius, WHITE)
        self.disc(cx, cy, 0.9 * radius, (0.08, 0.1, 0.2))
        x, y, pixels = self.window(cx - radius, cy - radius, cx + radius, cy + radius)
        dx, dy = np.sin(2 * np.pi * turns), -np.cos(2 * np.pi * turns)
        along = np.clip((x - cx) * dx + (y - cy) * dy, 0, 0.8 * radius)
        self.paint(pixels, np.hypot(x - cx - along * dx, y - cy - along * dy) - 0.12 * radius, (1, 0.9, 0.2))

    def glyph(self, left: float, top: float, cell: int, name: str, color: tuple) -> None:
        for place, filled in enumerate(GLYPHS[name]):
            x, y = left + cell * (place % 3), top + cell * (place // 3)
            if filled == "#":
                self.box(x, y, x + cell, y + cell, color)


def sound(samples: int) -> np.ndarray:
    """Play float32 `[2, samples]`: 220 Hz rising to 587 Hz on the left, falling from 587 Hz on the right."""
    seconds = np.arange(samples) / SOUND_HZ
    length = samples / SOUND_HZ
    ratio = np.log(HIGH_HZ / LOW_HZ)
    rising = LOW_HZ * length / ratio * np.expm1(ratio * seconds / length)  # turns: the integral of the frequency
    falling = -HIGH_HZ * length / ratio * np.expm1(-ratio * seconds / length)
    fade = np.clip(np.minimum(seconds, length - seconds) / 0.05, 0, 1)
    return (0.5 * fade * np.sin(2 * np.pi * np.stack([rising, falling]))).astype(np.float32)


def pitch(seconds: np.ndarray, length_s: float) -> np.ndarray:
    """Frequencies in Hz `[2, n]` that `sound` plays at these times."""
    ratio = HIGH_HZ / LOW_HZ
    return np.stack([LOW_HZ * ratio ** (seconds / length_s), HIGH_HZ * ratio ** (-seconds / length_s)])


def tokens(frames: np.ndarray) -> np.ndarray:
    """Cut uint8 `[F, H, W, 3]` into what each latent token decodes to: float32 `[T, H/16, W/16, 3072]`.

    A token covers 4 frames of 16x16 pixels, the first of each five one frame, here repeated (its other three are
    dropped). Values are ImageNet-normalised, features in the decoder's order (channel, frame, y, x).
    """
    count = 5 * (len(frames) - 5) // 17 + 2
    starts = [latent.frame_count(token) for token in range(count)]
    index = [start + (0 if token % 5 == 0 else step) for token, start in enumerate(starts) for step in range(4)]
    pixels = (frames / np.float32(255) - PIXEL_MEAN) / PIXEL_STD
    _, height, width, _ = frames.shape
    cells = pixels[index].reshape(count, 4, height // 16, 16, width // 16, 16, 3)
    return cells.transpose(0, 2, 4, 6, 1, 3, 5).reshape(count, height // 16, width // 16, 3072)


def encode_picture(cells: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Encode `[T, H, W, 3072]` to the normalised latent, float32 `[1, 24, T, H, W]`, values within 10."""
    return (cells @ weight.T + bias).transpose(3, 0, 1, 2)[None]


def encode_sound(wave: np.ndarray, analysis: np.ndarray) -> np.ndarray:
    """Encode `[2, 800 n]` to the normalised latent, float32 `[1, 32, 2, n]`. analysis: `[32, 1600]`."""
    padded = np.pad(wave, ((0, 0), (0, HOP)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * HOP, axis=1)[:, ::HOP]
    return (windows @ analysis.T).transpose(2, 0, 1)[None].astype(np.float32)


def demo_latent(width: int, height: int, frames: int) -> latent.Latent:
    """Encode the demo clip of this size, float16."""
    video_vae, audio_vae = load_file(VIDEO_VAE), load_file(AUDIO_VAE)
    weight, bias = (video_vae[f"encoder.{part}"].astype(np.float32) for part in ("weight", "bias"))
    video = encode_picture(tokens(picture(width, height, frames)), weight, bias)
    audio = encode_sound(sound(HOP * latent.audio_length(frames)), audio_vae["encoder.weight"].astype(np.float32))
    return latent.build(video.astype(np.float16), audio.astype(np.float16), {"title": "demo", "producer": "test_card"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--frames", type=int, default=124)
    parser.add_argument("--width", type=int, default=736)
    parser.add_argument("--height", type=int, default=416)
    asked = parser.parse_args()
    if asked.frames % 17 != 5 or asked.width % 16 or asked.height % 16:
        parser.error("frames must be 17k + 5, width and height multiples of 16")
    made = demo_latent(asked.width, asked.height, asked.frames)
    asked.out.write_bytes(b"".join(latent.serialize(made)))


if __name__ == "__main__":
    main()
