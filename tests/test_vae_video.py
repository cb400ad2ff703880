"""The video decoder: against diffusers on the same weights, against recorded pixels, in every precision."""

from pathlib import Path

import pytest
import torch
from golden.h3_weights import save, to_diffusers, video_weights
from golden.pixels import FRAMES, latent, pixels
from safetensors.torch import load_file

from h3spool.vae import int8, video, weights

CPU = torch.device("cpu")
RECORDED = load_file(Path(__file__).parent / "golden" / "pixels.safetensors")


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    path = save(tmp_path_factory.mktemp("vae") / "video.safetensors", video_weights())
    return weights.load_video(path, torch.float32, CPU)[0]


@pytest.fixture(scope="module")
def theirs():
    """diffusers' decoder with the same weights; its encoder is small and stays as it was drawn."""
    diffusers = pytest.importorskip("diffusers")
    small = {"block_out_channels": (4,) * 6, "norm_num_groups": 2, "layers_per_block": 1}
    vae = diffusers.AutoencoderKLMiniMaxH3(**small, decoder_num_layers=2, decoder_num_attention_heads=2)
    missing, unexpected = vae.load_state_dict(to_diffusers(video_weights()), strict=False)
    assert not unexpected
    assert all(key.startswith(("encoder.", "quant_conv.")) for key in missing)
    return vae.eval()


@pytest.mark.parametrize("size", [(7, 18, 20), (7, 30, 4), (12, 4, 6), (9, 3, 4), (3, 2, 2)])
def test_official_seams_are_what_diffusers_decodes(net, theirs, size):
    z = latent(*size)
    with torch.inference_mode():
        raw = theirs.decode(net.denormalise(z[0])[None]).sample[0]
    torch.testing.assert_close(pixels(net, z, "official"), video.finalise(raw), rtol=0, atol=1e-5)


def test_recorded_pixels_across_a_join(net):
    torch.testing.assert_close(pixels(net, latent(12, 2, 3))[:, FRAMES], RECORDED["joined"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("seams", ["composited", "official"])
def test_recorded_pixels_where_seams_cross(net, seams):
    crossing = pixels(net, latent(2, 18, 17), seams)[:, 4, 192:256:4, 16:256:4]
    torch.testing.assert_close(crossing, RECORDED[seams], rtol=0, atol=1e-5)


def test_seams_differ_only_where_both_axes_have_tiles(net):
    one_axis, crossing = latent(2, 3, 18), latent(2, 18, 17)
    assert torch.equal(pixels(net, one_axis, "official"), pixels(net, one_axis, "composited"))
    assert (pixels(net, crossing, "official") - pixels(net, crossing, "composited")).abs().max() > 1e-3


def test_tiles_per_call_do_not_change_the_picture(net):
    z = latent(2, 3, 30)  # three tiles
    whole = pixels(net, z, batch=4)
    for batch in (1, 2):
        torch.testing.assert_close(pixels(net, z, batch=batch), whole, rtol=0, atol=1e-5)


def test_weights_reordered_beforehand_do_not_change_the_picture(net, monkeypatch):
    z = latent(2, 3, 2)
    plain = pixels(net, z)
    monkeypatch.setattr(video, "packed_dtypes", lambda: {torch.float32})  # the choice on other processors
    torch.testing.assert_close(pixels(net, z), plain, rtol=0, atol=1e-5)


# Only what enters the block products is rounded: to 11 bits in fp16, to 8 in bf16. Measured here: max 1.5e-4 and mean
# 1.6e-5, max 1.7e-3 and mean 2.1e-4; the bounds are about twice that.
@pytest.mark.parametrize(("dtype", "most", "mean"), [(torch.float16, 4e-4, 4e-5), (torch.bfloat16, 4e-3, 5e-4)])
def test_half_precision_stays_near_float32(net, dtype, most, mean):
    z = latent(7, 6, 5)
    error = (pixels(net, z, dtype=dtype) - pixels(net, z)).abs()
    assert 0 < error.max() < most
    assert error.mean() < mean


@pytest.mark.parametrize("tokens", [1, 303, 304, 609])
def test_bounded_attention_is_attention(tokens):
    """q and k have the norm 8 that the network gives them, some are equal and some opposite: logits of 8 and -8."""
    q, k, v = torch.randn(3, 2, 3, tokens, 64, generator=torch.Generator().manual_seed(0))
    q, k = (8 * torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    k[:, 0, :7], k[:, 1, :7] = q[:, 0, :7], -q[:, 1, :7]
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(video.attend_bounded(q, k, v), wanted, rtol=2e-6, atol=2e-6)
    rounded = video.attend_bounded(*(x.bfloat16() for x in (q, k, v)))
    assert rounded.dtype == torch.bfloat16
    assert int8.snr_db(wanted, rounded.float()) > 40


def test_a_gate_closed_by_parts_is_the_gate(tmp_path):
    """1280 channels: a whole part and a smaller one."""
    path = save(tmp_path / "video.safetensors", video_weights(320, 1))
    block = weights.load_video(path, torch.float32, CPU)[0].decoder.transformer_blocks[0]
    x = torch.randn(2, 9, 320)
    gate, value = torch.nn.functional.linear(x, block.ff.w1.weight, block.ff.w1.bias).chunk(2, dim=-1)
    closed = torch.nn.functional.silu(gate) * value
    wanted = torch.nn.functional.linear(closed, block.ff.w2.weight, block.ff.w2.bias)
    torch.testing.assert_close(block.ff.at(torch.float32)(x), wanted, rtol=0, atol=1e-5)


def test_a_narrow_file_is_not_widened_at_load(tmp_path):
    path = save(tmp_path / "f16.safetensors", video_weights(), dtype=torch.float16)
    net, facts = weights.load_video(path, torch.float32, CPU)
    block = net.decoder.transformer_blocks[0]
    assert {block.attn.to_qkv.weight.dtype, block.ff.w1.weight.dtype} == {torch.float16}
    assert block.norm1.weight.dtype == net.decoder.proj_out.weight.dtype == torch.float32
    assert facts["dtype"] == "F16"


def test_suffix_tokens_are_not_rotated_and_positions_span_each_axis():
    cos, sin = video.turns((7, 16, 3), CPU)
    assert cos.shape == (7 * 16 * 3 + 5, 24)
    assert cos[-5:].eq(1).all()
    assert sin[-5:].eq(0).all()
    first, last = torch.atan2(sin, cos)[0], torch.atan2(sin, cos)[-6]
    torch.testing.assert_close(first, -last, rtol=0, atol=1e-5)  # -1 + 1/n and 1 - 1/n
    assert first[15].item() == pytest.approx(-2 * torch.pi * (15 / 16) * 100 ** (-7 / 8), abs=1e-5)


def test_finalise_clamps_to_the_unit_range():
    raw = torch.tensor([-9.0, 0.0, 9.0]).view(1, 3, 1, 1).repeat(3, 1, 1, 1)
    torch.testing.assert_close(
        video.finalise(raw)[:, :, 0, 0], torch.tensor([[0, m, 1] for m in (0.485, 0.456, 0.406)])
    )
