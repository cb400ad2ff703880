"""Make the demo checkpoints and the small demo latent: a tiny VAE pair in ComfyUI's key layout.

    python examples/demo/make_demo.py            (a minute on two cores; rewrites the files beside this script)

Nothing is trained by gradients. The video decoder has the real architecture with 2 blocks of width 128: the latent is
the 24 principal components of a token, the heads look at neighbours in time and space, the rest of the blocks is
random, and the output layer is the least-squares solution over the test card, cut into clips and tiles as the decoder
does. The audio decoder has the real topology at width 128: its residual blocks pass their input on (their convolutions
are zero) and its upsampling convolutions undo a 32-band MDCT.
"""

import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np
import test_card
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from test_card import AUDIO_VAE, HOP, LATENT, VIDEO_VAE
from torch import Tensor, nn

from h3spool import latent
from h3spool.vae import audio, tiling, video

BLOCKS, WIDTH = 2, 128
LARGE, SMALL = (736, 416, 124), (288, 160, 39)  # width, height, frames: what is learnt; SMALL is committed
TILE, CLIP, STEP = 16, 7, 5  # tokens
CARRIERS, CARRIER = 16, 48.0  # the last channels are constants, so large that the norms scale all tokens nearly alike
FEATURES = slice(video.CHANNELS, WIDTH - CARRIERS)  # channels that the blocks write
ATTENTION_GAIN, FEATURE_GAIN = 0.3, 0.02
LOOKS = (
    ((1 / 7, 0, 0), (-1 / 7, 0, 0)),
    ((0, 0, 1 / 16), (0, 1 / 16, 0)),
)  # per block and head: offset of tile (t, y, x)
LATENT_GAIN = 0.55  # times whitened components (1 would be unit variance): keeps all values within 10


def principal_components(cells: Tensor) -> tuple[Tensor, Tensor]:
    """The encoder, weight [24, 3072] and bias [24]: whitened and rotated, so that each channel carries a bit of all."""
    mean = cells.mean(0)
    _, sizes, vectors = torch.svd_lowrank(cells - mean, q=2 * video.CHANNELS, niter=4)
    whitened = (vectors * (len(cells) ** 0.5 / sizes)).T[: video.CHANNELS]
    weight = LATENT_GAIN * torch.linalg.qr(torch.randn(video.CHANNELS, video.CHANNELS))[0] @ whitened
    return weight.half().float(), (-weight @ mean).half().float()  # as they are stored


@torch.no_grad()
def random_decoder() -> video.VideoDecoder:
    """The embedded latent, and beside it what random blocks make of it and of its neighbours."""
    net = video.VideoDecoder(WIDTH, BLOCKS)
    spread = CARRIER * math.sqrt(CARRIERS / WIDTH)  # what the norms divide by
    for name, weight in net.named_parameters():
        if weight.ndim > 1 and not name.endswith("bias"):
            weight.normal_(0, 1 / math.sqrt(min(weight.shape[-1], 48)))
        else:
            weight.fill_(spread if "norm" in name and name.endswith("weight") else 0.0)
    for block, offsets in zip(net.decoder.transformer_blocks, LOOKS, strict=True):
        block.scale1[FEATURES], block.scale2[FEATURES] = ATTENTION_GAIN, FEATURE_GAIN
        look_aside(block.attn.to_qkv, offsets)
        block.norm1.weight[-CARRIERS:] = block.norm2.weight[-CARRIERS:] = 0
    net.decoder.norm_out.weight[-CARRIERS:] = 0
    net.latents_mean, net.latents_std = torch.tensor(video.LATENTS_MEAN), torch.tensor(video.LATENTS_STD)
    undo = 1 / (LATENT_GAIN * net.latents_std)
    net.post_quant_conv.weight.copy_(torch.diag(undo)[:, :, None, None, None])
    net.post_quant_conv.bias.copy_(-net.latents_mean * undo)
    net.decoder.x_embedder.weight.copy_(torch.eye(WIDTH, video.CHANNELS))
    net.decoder.x_embedder.bias[-CARRIERS:] = torch.tensor([CARRIER, -CARRIER]).repeat(CARRIERS // 2)
    return net.half().float()  # as it is stored


@torch.no_grad()
def look_aside(to_qkv: nn.Module, offsets: Iterable[tuple[float, float, float]]) -> None:
    """Make each head attend to the tokens around one at a fixed offset, whatever they hold: queries are turned keys."""
    count = video.ROTATED // 6
    frequency = video.THETA ** (-torch.arange(count) / count)
    weight, bias = (part.unflatten(0, (-1, 3, video.HEAD)) for part in (to_qkv.weight, to_qkv.bias))
    weight[:, :2] = 0
    for head, offset in enumerate(offsets):
        angle = 2 * math.pi * 2 * torch.tensor(offset)[:, None] * frequency
        gain = (frequency > 0.3).expand(3, -1).float()  # the three fastest: the sharpest look
        bias[head, 0, : video.ROTATED] = torch.cat([(gain * angle.cos()).flatten(), (gain * angle.sin()).flatten()])
        bias[head, 1, : video.ROTATED // 2] = gain.flatten()


@torch.no_grad()
def solve_output(net: video.VideoDecoder, encoder: tuple[Tensor, Tensor], pictures: Iterable[Tensor]) -> None:
    """Give `proj_out` the least-squares solution over the tile-clips in which these pictures will be decoded."""
    left = right = 0
    for cells in itertools.chain.from_iterable(map(tile_clips, pictures)):
        known = F.pad(features(net, F.linear(cells, *encoder))[0], (0, 1), value=1.0).double()
        left, right = left + known.T @ known, right + known.T @ cells.flatten(0, 3).double()
    solved = torch.linalg.solve(left + 1e-6 * left.diagonal().mean() * torch.eye(WIDTH + 1), right)
    net.decoder.proj_out.weight.copy_(solved[:-1].T)
    net.decoder.proj_out.bias.copy_(solved[-1])


def tile_clips(cells: Tensor) -> Iterator[Tensor]:
    """Cut a picture [T, H, W, 3072] as the decoder does: [1, 7, h, w, 3072]."""
    (rows, _), (columns, _) = (tiling.axis_plan(n) for n in cells.shape[1:3])
    for start, y, x in itertools.product(range(0, len(cells) - CLIP + 1, STEP), rows, columns):
        yield cells[None, start : start + CLIP, y : y + TILE, x : x + TILE]


def features(net: video.VideoDecoder, z: Tensor) -> Tensor:
    """`VideoDecoder.forward` up to `proj_out`, differentiable. z: normalised [B, T, H, W, 24] -> [B, T*H*W, D]."""
    cos, sin = video.turns(tuple(z.shape[1:4]), z.device)
    z = z.flatten(1, 3) * net.latents_std + net.latents_mean
    z = F.linear(z, net.post_quant_conv.weight.flatten(1), net.post_quant_conv.bias)
    x = apply(net.decoder.x_embedder, z)
    x = torch.cat([x, net.decoder.register_tokens.expand(len(x), -1, -1), x.new_zeros(len(x), 1, WIDTH)], dim=1)
    for block in net.decoder.transformer_blocks:
        qkv = apply(block.attn.to_qkv, block.norm1(x)).unflatten(-1, (-1, 3, video.HEAD)).permute(3, 0, 2, 1, 4)
        a, b, rest = F.rms_norm(qkv[:2], (video.HEAD,), None, video.EPS).split((24, 24, 16), dim=-1)
        q, k = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
        seen = F.scaled_dot_product_attention(q, k, qkv[2]).transpose(1, 2).flatten(2)
        x = x + apply(block.attn.to_out, seen) * block.scale1
        gate, value = apply(block.ff.w1, block.norm2(x)).chunk(2, dim=-1)
        x = x + apply(block.ff.w2, F.silu(gate) * value) * block.scale2
    return net.decoder.norm_out(x[:, : -video.SUFFIX])


def apply(layer: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def save_video() -> None:
    torch.manual_seed(0)
    large, small = (torch.from_numpy(test_card.tokens(test_card.picture(*size))) for size in (LARGE, SMALL))
    every = torch.cat([large.flatten(0, 2), small.flatten(0, 2)])
    encoder = principal_components(every[torch.randperm(len(every))[:12000]])
    net = random_decoder()
    solve_output(net, encoder, [large, small, small, small, small])
    state = {key: weight.half().contiguous() for key, weight in net.state_dict().items()}
    state |= {"latents_mean": torch.tensor(video.LATENTS_MEAN), "latents_std": torch.tensor(video.LATENTS_STD)}
    state["decoder.mask_token"] = torch.zeros(1, 1, WIDTH, dtype=torch.float16)  # in every published file, unused
    state |= {"encoder.weight": encoder[0].half(), "encoder.bias": encoder[1].half()}
    save_file(state, VIDEO_VAE, {"title": "h3spool demo: 2 blocks of width 128, knows one test card"})


def mdct() -> np.ndarray:
    """The 32 lowest bands (0 to 640 Hz) of an orthonormal MDCT with a sine window: [32, 1600]."""
    n, k = np.arange(2 * HOP), np.arange(audio.CHANNELS)[:, None]
    window = np.sin(np.pi * (n + 0.5) / (2 * HOP))
    return np.sqrt(2 / HOP) * window * np.cos(np.pi / HOP * (n + 0.5 + HOP / 2) * (k + 0.5))


def save_audio() -> None:
    """Compute the audio decoder: 40 Hz bands -> blocks of 160 samples in a basis of 64 -> 32 samples -> ... -> 1."""
    generator = np.random.default_rng(0)
    net = audio.AudioDecoder(audio.CHANNELS, WIDTH)
    for name, weight in net.named_parameters():
        weight.data.fill_(30.0 if name.endswith("act.beta") else 0.0)  # e^-30: the activation adds nothing
    mixing = np.linalg.qr(generator.standard_normal((audio.CHANNELS, audio.CHANNELS)))[0]  # every channel varies
    gain = 1 / 1.8  # makes the latent's standard deviation about 1
    bands, (mean, std) = mdct(), (np.array(values) for values in (audio.LATENTS_MEAN, audio.LATENTS_STD))
    undo = mixing.T / gain / std
    put(net.dec_in_proj.weight, undo[:, :, None])
    put(net.dec_in_proj.bias, -undo @ mean)
    pre = np.zeros((WIDTH, audio.CHANNELS, 7))
    pre[:32, :, 3] = pre[32:64, :, 2] = np.eye(audio.CHANNELS)  # this latent, the one before
    put(net.decoder.conv_pre.weight, pre)
    block = HOP // 5
    tones = np.linspace(0, 700, 200)[:, None] * np.arange(block) / audio.SAMPLE_RATE_HZ
    basis = np.linalg.svd(np.concatenate([np.cos(2 * np.pi * tones), np.sin(2 * np.pi * tones)]))[2][:64]
    halves = np.concatenate([bands[:, :HOP], bands[:, HOP:]])  # what this latent and the one before sound here
    first = np.zeros((WIDTH, 64, 9))
    first[:64, :, 2:7] = np.einsum("ljs,cs->lcj", halves.reshape(64, 5, block), basis)
    second = np.zeros((64, 32, 9))
    second[:, :, 2:7] = basis.reshape(64, 5, 32).transpose(0, 2, 1)
    put(net.decoder.ups[0][0].weight, first)
    put(net.decoder.ups[1][0].weight, second)
    for up in net.decoder.ups[2:]:  # samples in time order: the first half of the channels comes before the second
        shuffle = np.zeros(up[0].weight.shape)
        half = shuffle.shape[1]
        shuffle[:half, :, 1] = shuffle[half:, :, 2] = np.eye(half)
        put(up[0].weight, shuffle)
    put(net.decoder.conv_post.weight, np.eye(7)[3][None, None])
    state = {key: weight.detach().half() for key, weight in net.state_dict().items()}
    state |= {"latents_mean": torch.tensor(audio.LATENTS_MEAN), "latents_std": torch.tensor(audio.LATENTS_STD)}
    filters = [f"{key[:-9]}{part}.filter" for key in state if key.endswith("act.alpha") for part in RESAMPLERS]
    state |= {key: audio.resampling_filter().view(1, 1, -1).clone() for key in filters}
    state["encoder.weight"] = torch.from_numpy(gain * mixing @ bands).half()
    save_file(state, AUDIO_VAE, {"title": "h3spool demo: width 128, plays 0 to 640 Hz"})


RESAMPLERS = ("upsample", "downsample.lowpass")


def put(weight: nn.Parameter, values: np.ndarray) -> None:
    weight.data.copy_(torch.from_numpy(values))


def main() -> None:
    save_audio()
    save_video()
    made = test_card.demo_latent(*SMALL)
    LATENT.write_bytes(b"".join(latent.serialize(made)))


if __name__ == "__main__":
    main()
