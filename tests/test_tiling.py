"""The temporal and spatial plans, and both compositions of tiles."""

import pytest
import torch

from h3spool.vae import tiling


@pytest.mark.parametrize(("tokens", "frames"), [(1, 1), (2, 5), (5, 17), (6, 18), (7, 22), (9, 30), (37, 124), (60, 204), (107, 362)])  # fmt: skip  # noqa: E501
def test_frames_of_published_lengths(tokens, frames):
    assert tiling.frame_count(tokens) == frames


def test_frames_are_one_for_every_fifth_token_and_four_for_the_others():
    for tokens in range(1, 200):
        assert tiling.frame_count(tokens) == sum(1 if i % 5 == 0 else 4 for i in range(tokens))


def numbered(tokens):
    return torch.arange(tokens, dtype=torch.float32).view(1, tokens, 1, 1)


def test_clips_of_seven_tokens_start_every_five_and_repeat_the_last():
    def plan(tokens):
        return [tiling.clip(numbered(tokens), i).flatten().int().tolist() for i in range(tiling.clip_count(tokens))]

    assert plan(12) == [[0, 1, 2, 3, 4, 5, 6], [5, 6, 7, 8, 9, 10, 11]]
    assert plan(9) == [[0, 1, 2, 3, 4, 5, 6], [5, 6, 7, 8, 8, 8, 8]]
    assert plan(2) == [[0, 1, 1, 1, 1, 1, 1]]
    assert plan(1) == [[0] * 7]


def raw_clips(count):
    """Frame f of clip c is 100 c + f."""
    for clip in range(count):
        yield (100 * clip + torch.arange(28.0)).view(1, 28, 1, 1).repeat(3, 1, 1, 1)


def test_joined_frames_come_from_the_documented_clip_and_fade_over_five():
    pieces = list(tiling.join_clips(raw_clips(3), 56))
    assert [piece.shape[1] for piece in pieces] == [17, 17, 17, 5]
    frames = torch.cat(pieces, dim=1)[0, :, 0, 0]
    for f in range(56):
        clip = min(f // 17, 2)
        at = f - 17 * clip
        value = 100 * clip + (3 + at if at < 17 else 23 + at - 17)
        if clip and at < 5:
            value = (1 - at / 5) * (100 * (clip - 1) + 23 + at) + at / 5 * value
        assert frames[f] == pytest.approx(value)


@pytest.mark.parametrize("frames", [1, 5, 22])
def test_the_join_is_cut_to_the_frames_asked_for(frames):
    assert sum(piece.shape[1] for piece in tiling.join_clips(raw_clips(1), frames)) == frames


def test_a_piece_leaves_before_the_next_clip_is_asked_for():
    asked = []

    def clips():
        for index, clip in enumerate(raw_clips(3)):
            asked.append(index)
            yield clip

    next(tiling.join_clips(clips(), 56))
    assert asked == [0]


@pytest.mark.parametrize(
    ("pixels", "starts", "overlaps"),
    [
        (64, [0], []),
        (256, [0], []),
        (272, [0, 16], [240]),
        (416, [0, 160], [96]),
        (480, [0, 112, 224], [144, 144]),
        (512, [0, 128, 256], [128, 128]),
        (736, [0, 160, 320, 480], [96, 96, 96]),
        (768, [0, 160, 336, 512], [96, 80, 80]),
        (864, [0, 144, 288, 448, 608], [112, 112, 96, 96]),
        (1024, [0, 192, 384, 576, 768], [64, 64, 64, 64]),
        (1344, [0, 176, 352, 528, 704, 896, 1088], [80, 80, 80, 80, 64, 64]),
        (1440, [0, 160, 320, 480, 656, 832, 1008, 1184], [96, 96, 96, 80, 80, 80, 80]),
        (2560, list(range(0, 2305, 192)), [64] * 12),
    ],
)
def test_plan_of_published_lengths(pixels, starts, overlaps):
    planned = tiling.axis_plan(pixels // 16)
    assert planned == ([n // 16 for n in starts], [n // 16 for n in overlaps])


def test_every_plan_covers_its_axis_exactly_with_the_least_overlap_kept():
    triple = []
    for tokens in range(17, 257):
        starts, overlaps = tiling.axis_plan(tokens)
        assert starts[0] == 0
        assert starts[-1] + 16 == tokens
        assert min(overlaps) >= 4
        covered = [sum(s <= t < s + 16 for s in starts) for t in range(tokens)]
        assert min(covered) >= 1
        if max(covered) > 2:
            triple.append(16 * tokens)
    assert triple == [464, 480, 496]


def stitched(seams, height, width, tile):
    """Compose tiles made by tile(row, column) -> value for all pixels."""
    rows, columns = len(tiling.axis_plan(height)[0]), len(tiling.axis_plan(width)[0])
    size = (1, 1, 16 * min(height, 16), 16 * min(width, 16))
    tiles = (torch.full(size, float(tile(r, c))) for r in range(rows) for c in range(columns))
    return tiling.stitch(tiles, height, width, seams)[0, 0]


@pytest.mark.parametrize("seams", ["composited", "official"])
@pytest.mark.parametrize("size", [(4, 6), (16, 16), (26, 46), (30, 18), (31, 29)])
def test_tiles_that_agree_are_put_together_unchanged(seams, size):
    picture = torch.randn(1, 2, 16 * size[0], 16 * size[1])
    rows, columns = tiling.axis_plan(size[0])[0], tiling.axis_plan(size[1])[0]
    tiles = (picture[:, :, 16 * y : 16 * y + 256, 16 * x : 16 * x + 256].clone() for y in rows for x in columns)
    torch.testing.assert_close(tiling.stitch(tiles, *size, seams), picture, rtol=0, atol=1e-6)


@pytest.mark.parametrize("seams", ["composited", "official"])
def test_a_seam_is_a_ramp_that_starts_on_the_left_tile(seams):
    row = stitched(seams, 4, 26, lambda _, column: column)[0]
    assert row[:160].eq(0).all()
    torch.testing.assert_close(row[160:256], torch.arange(96) / 96)
    assert row[256:].eq(1).all()


def test_only_composited_has_no_steps_where_seams_cross():
    values = torch.rand(4, 4, generator=torch.Generator().manual_seed(3))

    def largest_step(seams):
        picture = stitched(seams, 26, 46, lambda r, c: values[r, c])
        return max(picture.diff(dim=0).abs().max(), picture.diff(dim=1).abs().max())

    assert largest_step("composited") < 0.02
    assert largest_step("official") > 0.1


def test_triple_coverage_drops_the_oldest_tile_only_in_official():
    first = [stitched(seams, 30, 4, lambda row, _: float(row == 0))[224:256, 0] for seams in tiling_seams()]
    assert first[0].max() > 0
    assert first[1].eq(0).all()


def tiling_seams():
    return ("composited", "official")


def test_cut_follows_the_plan_in_reading_order():
    z = torch.arange(18 * 20.0).view(1, 1, 18, 20)
    tiles = tiling.cut(z)
    assert tiles.shape == (4, 1, 1, 16, 16)
    assert [tile[0, 0, 0, 0].item() for tile in tiles] == [0, 4, 40, 44]
