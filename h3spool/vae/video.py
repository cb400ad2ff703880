"""The MiniMax H3 video decoder: latent tokens of one tile-clip -> raw pixels, a 36-block vision transformer.

Shapes: B tiles, T, H, W latent tokens of a tile-clip (at most 7, 16, 16), N = T*H*W + 5 tokens, D width, h = D/64
heads. Raw pixels are ImageNet-normalised; `finalise` makes them [0, 1]. Attribute names are the keys of the official
(and ComfyUI) checkpoint, so that loading is `load_state_dict`. All but the products inside the blocks is float32.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from h3spool.vae import cpu

CHANNELS = 24  # of the latent
PATCH_PX, PATCH_FRAMES = 16, 4  # pixels and raw frames per latent token
HEAD = 64  # channels per attention head
ROTATED = 48  # of HEAD: three axes x eight frequencies x (cos, sin)
THETA = 100.0  # base of the rotary frequencies
SUFFIX = 5  # four register tokens and one token of zeros
EPS = 1e-5
Multiply = Callable[[Tensor], Tensor]

LATENTS_MEAN = (
    0.858090341091156, -0.9606591463088989, 1.0661640167236328, -0.5090325474739075,
    -0.2727581858634949, -1.3675414323806763, -0.2553254961967468, -0.26907554268836975,
    -0.5376840829849243, -0.0464097298681736, 0.6657370328903198, 0.19690127670764923,
    -0.5460608005523682, -0.4035342037677765, -0.23683024942874908, 0.25928452610969543,
    -0.30133944749832153, 0.211341992020607, -1.1206848621368408, 0.3581933379173279,
    -0.04225143790245056, 0.2604829967021942, 0.22864092886447906, 0.7056031823158264,
)  # fmt: skip
LATENTS_STD = (
    1.2223774194717407, 1.2767263650894165, 1.6831774711608887, 1.7549455165863037,
    1.5636216402053833, 2.194143533706665, 0.9653137922286987, 1.0569885969161987,
    0.841948926448822, 0.7729952931404114, 1.8955937623977661, 0.946841835975647,
    0.7996809482574463, 0.44988900423049927, 0.7197399735450745, 0.6936293244361877,
    2.961095094680786, 2.7694199085235596, 3.0496184825897217, 2.1088054180145264,
    3.276226282119751, 3.1627357006073, 2.2816812992095947, 2.6127843856811523,
)  # fmt: skip
PIXEL_MEAN = (0.485, 0.456, 0.406)
PIXEL_STD = (0.229, 0.224, 0.225)


class Linear(nn.Module):
    """A linear layer whose weight keeps the dtype it was loaded in.

    Attributes:
        stored: reads the weight from its file again, where it was narrowed when it was loaded.
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.stored: Callable[[], Tensor] | None = None
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False)

    def at(self, dtype: torch.dtype) -> Multiply:
        """Return the function that multiplies in `dtype`: a cast copy of the weight lives only as long as it."""
        return self.parts(dtype, [slice(None)])[0]

    def parts(self, dtype: torch.dtype, rows: Iterable[slice]) -> list[Multiply]:
        """Return such functions of some of its rows each."""
        dtype = activations(dtype, self.weight.device)  # of a layer that is not quantised between those that are
        narrowed = self.stored and torch.promote_types(self.weight.dtype, dtype) != self.weight.dtype
        source, place = self.stored() if narrowed else self.weight, self.weight.device
        return [_product(source[some].to(place, dtype), self.bias[some].to(dtype)) for some in rows]


def _product(weight: Tensor, bias: Tensor) -> Multiply:
    if weight.device.type == "cpu" and weight.dtype in packed_dtypes():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return partial(F.linear, weight=weight, bias=bias)


@cache
def packed_dtypes() -> frozenset[torch.dtype]:
    """Dtypes in which oneDNN with a weight reordered beforehand beats F.linear on this processor.

    bfloat16 where it is native: F.linear reorders the weight in every call (Zen 5, one core: 108 against 136 ms for a
    qkv product). float32 on AMD with AVX-512, which MKL does not use there (237 against 446 ms). Elsewhere MKL is
    faster (Zen 3: 83 against 61 GFLOP/s).
    """
    flags = cpu.flags()
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    amd = {"AuthenticAMD", "avx512f"} <= flags
    return frozenset([torch.bfloat16] * cpu.has_bfloat16() + [torch.float32] * amd)


def activations(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype around products in `dtype`: itself, and of int8 products float16 on a GPU, float32 on a CPU."""
    return dtype if dtype.is_floating_point else torch.float16 if device.type == "cuda" else torch.float32


class Norm(nn.Module):
    """RMS norm with a gain, float32."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] float32 -> the same shape."""
        return F.rms_norm(x, self.weight.shape, self.weight, EPS)


class Attention(nn.Module):
    """Projections of one block; the rows of `to_qkv` are, per head, 64 of q, 64 of k, 64 of v."""

    def __init__(self, width: int):
        super().__init__()
        self.to_qkv = Linear(width, 3 * width)
        self.to_out = Linear(width, width)


class FeedForward(nn.Module):
    """Gated feed-forward of one block; the first half of `w1`'s rows is the gate."""

    def __init__(self, width: int):
        super().__init__()
        self.w1 = Linear(width, 8 * width)
        self.w2 = Linear(4 * width, width)

    def at(self, dtype: torch.dtype) -> Multiply:
        """Return the function [..., D] -> [..., D] with products in `dtype`."""
        pairs, w2, inner = self._pairs(dtype), self.w2.at(dtype), len(self.w1.bias) // 2

        def gated(x: Tensor) -> Tensor:
            closed = x.new_empty(*x.shape[:-1], inner)
            for some, pair in pairs:
                gate, value = pair(x)
                torch.mul(F.silu(gate, inplace=True), value, out=closed[..., some])
            return w2(closed)

        return gated

    def _pairs(self, dtype: torch.dtype) -> list[tuple[slice, Callable[[Tensor], Sequence[Tensor]]]]:
        """Parts of the channels, each with the function to its gate and value.

        On a CPU the parts are small enough for the cache: a block is 10 % faster by it (Zen 3). For int8 there is one,
        because each would round x again.
        """
        inner = len(self.w1.bias) // 2
        if dtype == torch.int8 or self.w1.bias.is_cuda:
            whole = self.w1.at(dtype)
            return [(slice(inner), lambda x: whole(x).chunk(2, dim=-1))]
        gates = [slice(start, min(inner, start + cpu.CHANNELS)) for start in range(0, inner, cpu.CHANNELS)]
        values = [slice(inner + some.start, inner + some.stop) for some in gates]
        halves = self.w1.parts(dtype, [*gates, *values])
        pairs = zip(gates, halves[: len(gates)], halves[len(gates) :], strict=True)
        return [(some, lambda x, gate=gate, value=value: (gate(x), value(x))) for some, gate, value in pairs]


class Block(nn.Module):
    """One transformer block: pre-norm, bidirectional attention, gated feed-forward, per-channel residual gains."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.attn, self.ff = Attention(width), FeedForward(width)
        self.scale1 = nn.Parameter(torch.empty(width), requires_grad=False)
        self.scale2 = nn.Parameter(torch.empty(width), requires_grad=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], dtype: torch.dtype, batch: int) -> None:
        """Update the residual stream x [B, N, D] (float32) in place, `batch` tiles a call, products in `dtype`.

        int8 products have float32 or float16 around them; attention then runs in bfloat16 where a CPU has it.

        The weights are cast once for all B tiles: a file narrower than `dtype` never needs a second copy.
        """
        qkv, out, feed = self.attn.to_qkv.at(dtype), self.attn.to_out.at(dtype), self.ff.at(dtype)
        around = activations(dtype, x.device)
        kind = torch.bfloat16 if dtype == torch.int8 and not x.is_cuda and cpu.has_bfloat16() else around
        for tiles in x.split(batch):
            tiles.addcmul_(out(attend(qkv(self.norm1(tiles).to(around)), turn, kind)), self.scale1)
            rows = tiles.flatten(0, 1)
            # int8 products go by strips of rows anyway: by the same strips the gate takes 20 ms, not 67 (Zen 3)
            for strip in rows.split(cpu.STRIP if dtype == torch.int8 and not x.is_cuda else len(rows)):
                strip.addcmul_(feed(self.norm2(strip).to(around)), self.scale2)


def attend(qkv: Tensor, turn: tuple[Tensor, Tensor], kind: torch.dtype) -> Tensor:
    """Full attention, computed in `kind`, with normalised, rotated q and k. qkv: [B, N, 3D] -> [B, N, D], its dtype."""
    tiles, tokens, _ = qkv.shape
    parts = qkv.view(tiles, tokens, -1, 3, HEAD).permute(3, 0, 2, 1, 4)  # q, k, v: [3, B, h, N, 64]
    turned = qkv.new_empty(parts[:2].shape, dtype=torch.float32).copy_(parts[:2])
    turned *= torch.linalg.vector_norm(turned, dim=-1, keepdim=True).square_().div_(HEAD).add_(EPS).rsqrt_()
    rotate(turned, turn)
    native = kind == torch.bfloat16 and not qkv.is_cuda and cpu.has_bfloat16()
    mixed = (attend_bounded if native else F.scaled_dot_product_attention)(*turned.to(kind), parts[2].to(kind))
    return mixed.transpose(1, 2).reshape(tiles, tokens, -1).to(qkv.dtype)


def attend_bounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of this network, whose |q k| / 8 is at most 8: exp needs no maximum first. [B, h, N, 64], all three.

    A channel of ones in v gives the sums. Row sums reach 5e6, so never in float16. A few heads and rows at once stay in
    the cache. It is for native bfloat16, from which torch's own attention gains nothing (Zen 5, one core: 310 against
    111 ms); elsewhere torch's is faster.
    """
    shape, heads, scale = q.shape, torch.get_num_threads(), HEAD**-0.5
    q, k, v = (q * scale).flatten(0, 1), k.flatten(0, 1).transpose(1, 2), F.pad(v, (0, 1), value=1).flatten(0, 1)
    out = torch.empty_like(q)
    for some in (slice(head, head + heads) for head in range(0, len(q), heads)):
        for rows, target in zip(q[some].split(cpu.STRIP, dim=1), out[some].split(cpu.STRIP, dim=1), strict=True):
            mixed = torch.bmm(torch.bmm(rows, k[some]).exp_(), v[some])
            torch.div(mixed[..., :-1], mixed[..., -1:], out=target)
    return out.view(shape)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> None:
    """Rotate channels (a, a + 24) of x [..., N, 64] by the angle of frequency a, in place; 48..63 stay as they are."""
    cos, sin = turn
    a, b = x[..., : ROTATED // 2], x[..., ROTATED // 2 : ROTATED]
    crossed = a * sin
    a.mul_(cos).addcmul_(b, sin, value=-1)
    b.mul_(cos).add_(crossed)


def turns(size: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine [N, 24] (float32) of the rotary angles of a tile-clip of `size` (T, H, W) tokens.

    Positions are local to the tile-clip and span -1..1 on each axis; the suffix tokens sit at 0.
    """
    axes = [2 * (torch.arange(n, dtype=torch.float32, device=device) + 0.5) / n - 1 for n in size]
    place = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)
    place = F.pad(place, (0, 0, 0, SUFFIX))  # [N, 3]
    count = ROTATED // 6
    frequency = THETA ** (-torch.arange(count, dtype=torch.float32, device=device) / count)
    angle = (2 * math.pi * place[:, :, None] * frequency).flatten(1)
    return angle.cos(), angle.sin()


class Transformer(nn.Module):
    """Tokens in, patches out: the `decoder.` part of the checkpoint."""

    def __init__(self, width: int, blocks: int):
        super().__init__()
        self.x_embedder = Linear(CHANNELS, width)
        self.register_tokens = nn.Parameter(torch.empty(1, SUFFIX - 1, width), requires_grad=False)
        self.transformer_blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm_out = nn.LayerNorm(width, eps=EPS)
        self.proj_out = Linear(width, 3 * PATCH_FRAMES * PATCH_PX**2)


class VideoDecoder(nn.Module):
    """The decoder half of the H3 video VAE.

    Args:
        width: D, channels of the residual stream, a multiple of 64.
        blocks: number of transformer blocks.
    """

    def __init__(self, width: int, blocks: int):
        super().__init__()
        self.post_quant_conv = nn.Conv3d(CHANNELS, CHANNELS, 1)
        self.decoder = Transformer(width, blocks)
        self.register_buffer("latents_mean", torch.empty(CHANNELS))
        self.register_buffer("latents_std", torch.empty(CHANNELS))

    def denormalise(self, z: Tensor) -> Tensor:
        """z: [24, T, H, W] in the sampler's scale, float32 -> what `forward` takes, the same shape."""
        return z * self.latents_std[:, None, None, None] + self.latents_mean[:, None, None, None]

    def forward(
        self, z: Tensor, dtype: torch.dtype, batch: int, tick: Callable[[], None] = lambda: None
    ) -> Iterator[Tensor]:
        """Decode tiles of equal size and yield their raw pixels one by one, in order.

        Args:
            z: [B, 24, T, H, W] float32, denormalised.
            dtype: of the products inside the blocks.
            batch: tiles per product; it changes time and memory, not the result.
            tick: called after each block.

        Yields:
            [3, 4T, 16H, 16W] float32, ImageNet-normalised.
        """
        net, size = self.decoder, tuple(z.shape[2:])
        kernel, bias = self.post_quant_conv.weight.flatten(1), self.post_quant_conv.bias
        tokens = F.linear(z.flatten(2).transpose(1, 2), kernel, bias)  # [B, T*H*W, 24]
        x = tokens.new_zeros(len(z), tokens.shape[1] + SUFFIX, net.register_tokens.shape[-1])
        x[:, :-SUFFIX] = net.x_embedder.at(torch.float32)(tokens)
        x[:, -SUFFIX:-1] = net.register_tokens
        turn = turns(size, z.device)
        for block in net.transformer_blocks:
            block(x, turn, dtype, batch)
            tick()
        patches = net.proj_out.at(torch.float32)
        for tile in x[:, :-SUFFIX]:
            yield unpatchify(patches(net.norm_out(tile)), size)


def unpatchify(patches: Tensor, size: tuple[int, int, int]) -> Tensor:
    """patches: [T*H*W, 3072], features in order (channel, frame, y, x) -> [3, 4T, 16H, 16W]."""
    t, h, w = size
    patches = patches.view(t, h, w, 3, PATCH_FRAMES, PATCH_PX, PATCH_PX).permute(3, 0, 4, 1, 5, 2, 6)
    return patches.reshape(3, t * PATCH_FRAMES, h * PATCH_PX, w * PATCH_PX)


def finalise(raw: Tensor) -> Tensor:
    """raw: [3, F, H, W] ImageNet-normalised float32 -> [0, 1], the same shape."""
    mean, std = (torch.tensor(c, device=raw.device).view(3, 1, 1, 1) for c in (PIXEL_MEAN, PIXEL_STD))
    return (raw * std).add_(mean).clamp_(0, 1)
