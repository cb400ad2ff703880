"""How a latent is cut into clips and tiles, and how their raw pixels are put together again.

In time a clip is 7 tokens, a new one every 5; it becomes 28 raw frames, of which 17 are shown and 5 cross-fade into
the next clip. In space a tile is 16 x 16 tokens (256 px) with at least 4 tokens of overlap. Neither is an option: the
network's positions are local to the tile-clip, other sizes damage the picture. Nothing here holds more than one clip.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

CLIP, STEP = 7, 5  # tokens of a clip, tokens from one clip to the next
FRAMES, DROPPED, FADE = 17, 3, 5  # frames shown per clip, dropped before them, and of the cross-fade
TILE, OVERLAP, TOKEN_PX = 16, 4, 16  # tokens, tokens, pixels

Axis = tuple[list[int], list[int]]  # starts and overlaps of the tiles along one axis, in tokens


def frame_count(tokens: int) -> int:
    """Frames that `tokens` latent tokens decode to: 1 for every fifth token from the first, 4 for any other."""
    rest = tokens % STEP
    return FRAMES * (tokens // STEP) + (4 * rest - 3 if rest else 0)


def clip_count(tokens: int) -> int:
    """Clips that `tokens` latent tokens are decoded in."""
    return max(1, -(-(tokens - 2) // STEP))


def clip(z: Tensor, index: int) -> Tensor:
    """z: [24, T, H, W] -> clip `index`, [24, 7, H, W]; past the end the last token is repeated."""
    place = torch.arange(STEP * index, STEP * index + CLIP, device=z.device).clamp_(max=z.shape[1] - 1)
    return z[:, place]


def join_clips(clips: Iterable[Tensor], frames: int) -> Iterator[Tensor]:
    """Cross-fade raw clips [3, 28, H, W] and yield [3, n, H, W]: 17 frames each, then the tail; `frames` in all."""
    tail, left = None, frames
    for raw in clips:
        shown = raw[:, DROPPED : DROPPED + FRAMES]
        if tail is not None:
            fade_in(shown[:, :FADE], tail, dim=1)
        tail = raw[:, -FADE:].clone()  # a view would keep the whole clip alive
        yield shown[:, :left]
        left -= FRAMES
    if left > 0:
        yield tail[:, :left]


def fade_in(new: Tensor, old: Tensor, dim: int) -> None:
    """Ramp in place from `old`, which has the shape of `new`, to `new` along `dim`; it starts wholly on `old`."""
    n = new.shape[dim]
    shape = [n if axis == dim % new.ndim else 1 for axis in range(new.ndim)]
    weight = (torch.arange(n, dtype=new.dtype, device=new.device) / n).view(shape)
    new.copy_(torch.lerp(old, new, weight))


def axis_plan(tokens: int) -> Axis:
    """Cover an axis of `tokens` with tiles: the least number of them, spare overlap given to the first ones."""
    if tokens <= TILE:
        return [0], []
    count = -(-tokens // TILE)
    while TILE * count - OVERLAP * (count - 1) < tokens:
        count += 1
    overlaps = [OVERLAP] * (count - 1)
    for spare in range(TILE * count - OVERLAP * (count - 1) - tokens):
        overlaps[spare % (count - 1)] += 1
    starts = [0]
    for overlap in overlaps:
        starts.append(starts[-1] + TILE - overlap)
    return starts, overlaps


def cut(z: Tensor) -> Tensor:
    """z: [24, T, H, W] -> its tiles in rows from the top left, [B, 24, T, min(H, 16), min(W, 16)]."""
    (rows, _), (columns, _) = axis_plan(z.shape[2]), axis_plan(z.shape[3])
    return torch.stack([z[:, :, y : y + TILE, x : x + TILE] for y in rows for x in columns])


def stitch(tiles: Iterator[Tensor], height: int, width: int, seams: str) -> Tensor:
    """Put the raw tiles of one clip together.

    Args:
        tiles: raw pixels [3, 28, h, w] in the order of `cut`; each is read once and may be overwritten.
        height: tokens of the whole picture; `width` likewise.
        seams: "composited" ramps each tile into all that is there already (ComfyUI since its PR 16436): no lattice.
            "official" ramps into the raw neighbours above and to the left (official, diffusers, older ComfyUI).

    Returns:
        [3, 28, 16 * height, 16 * width] float32.
    """
    rows, columns = ([[TOKEN_PX * n for n in part] for part in axis_plan(size)] for size in (height, width))
    put_together = _stitch_composited if seams == "composited" else _stitch_official
    return put_together(tiles, rows, columns, (TOKEN_PX * height, TOKEN_PX * width))


def _stitch_composited(tiles: Iterator[Tensor], rows: Axis, columns: Axis, size: tuple[int, int]) -> Tensor:
    """Fold each row of tiles left to right into a strip, then the strips from top to bottom."""
    canvas = None
    for y, above in zip(rows[0], [0, *rows[1]], strict=True):
        strip = None
        for x, beside in zip(columns[0], [0, *columns[1]], strict=True):
            tile = next(tiles)
            if strip is None:
                strip = tile.new_empty(*tile.shape[:3], size[1])
            if beside:
                fade_in(tile[..., :beside], strip[..., x : x + beside], dim=3)
            strip[..., x : x + tile.shape[3]] = tile
        if canvas is None:
            canvas = strip.new_empty(*strip.shape[:2], *size)
        if above:
            fade_in(strip[:, :, :above], canvas[:, :, y : y + above], dim=2)
        canvas[:, :, y : y + strip.shape[2]] = strip
    return canvas


def _stitch_official(tiles: Iterator[Tensor], rows: Axis, columns: Axis, size: tuple[int, int]) -> Tensor:
    """Ramp into the raw rows above, then into the raw columns to the left; keep what the next tiles do not cover."""
    canvas, bottoms = None, {}
    for y, above, below in zip(rows[0], [0, *rows[1]], [*rows[1], 0], strict=True):
        right = None
        for x, before, after in zip(columns[0], [0, *columns[1]], [*columns[1], 0], strict=True):
            tile = next(tiles)
            canvas = tile.new_empty(*tile.shape[:2], *size) if canvas is None else canvas
            height, width = tile.shape[2:]
            bottom, edge = tile[:, :, height - below :].clone(), tile[..., width - after :].clone()
            if above:
                fade_in(tile[:, :, :above], bottoms[x], dim=2)
            if before:
                fade_in(tile[..., :before], right, dim=3)
            bottoms[x], right = bottom, edge
            shown = tile[:, :, : height - below, : width - after]
            canvas[:, :, y : y + shown.shape[2], x : x + shown.shape[3]] = shown
    return canvas
