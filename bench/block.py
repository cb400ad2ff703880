"""Where a block's time goes, and what int8 gains: one full-width block, one tile-clip of 7x16x16 tokens.

int8 is measured where the processor has VNNI; elsewhere torch's integer product is far slower than floats, and h3spool
de-quantises.
"""

import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from h3spool.vae import cpu, int8, video

WIDTH, SIZE = 2048, (7, 16, 16)
TOKENS = math.prod(SIZE) + video.SUFFIX
LINEAR_FLOP = 2 * TOKENS * WIDTH * WIDTH * 16  # qkv 3, out 1, w1 8, w2 4 of [D, D]
ATTENTION_FLOP = 4 * TOKENS * TOKENS * WIDTH
ROUNDS = 3
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8"}


def fastest(work: Callable[[], object]) -> float:
    best = math.inf
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def random_block() -> video.Block:
    block = video.Block(WIDTH)
    for name, weight in block.named_parameters():
        if weight.ndim == 2:
            weight.data = torch.randn(weight.shape) / weight.shape[1] ** 0.5
        else:
            weight.data = 0.1 * torch.randn(weight.shape) + ("norm" in name)
    return block


def quantised(block: video.Block) -> video.Block:
    twin = random_block()
    for name, layer in list(block.named_modules()):
        if isinstance(layer, video.Linear):
            outputs, inputs = layer.weight.shape
            ours = int8.Int8Linear(inputs, outputs, 256)
            ours.weight.data, ours.weight_scale.data = int8.quantise(layer.weight, 256)
            ours.bias.data = layer.bias.data
            parent, _, leaf = name.rpartition(".")
            setattr(twin.get_submodule(parent), leaf, ours)
        elif isinstance(layer, video.Norm):
            twin.get_submodule(name).weight.data = layer.weight.data
    twin.scale1.data, twin.scale2.data = block.scale1.data, block.scale2.data
    return twin


def snr_db(wanted: torch.Tensor, got: torch.Tensor) -> float:
    return float(10 * torch.log10(wanted.square().sum() / (wanted - got).square().sum()))


@torch.inference_mode()
def main() -> None:
    print(f"one block, {TOKENS} tokens, width {WIDTH}, {torch.get_num_threads()} threads")
    block, turn = random_block(), video.turns(SIZE, torch.device("cpu"))
    x = torch.randn(1, TOKENS, WIDTH)
    x[:, -1] = 0
    kinds = {torch.float32: block}
    if cpu.has_bfloat16():
        kinds[torch.bfloat16] = block
    if int8.backend(torch.device("cpu")).product:
        kinds[torch.int8] = quantised(block)
    base, wanted = 0.0, None
    for dtype, net in kinds.items():
        stream = x.clone()
        net(stream, turn, dtype, 1)
        wanted = stream - x if wanted is None else wanted
        whole = fastest(lambda net=net, dtype=dtype: net(x.clone(), turn, dtype, 1))
        base = base or whole
        gain, snr = base / whole, snr_db(wanted, stream - x)
        print(f"  {NAMES[dtype]}: {1000 * whole:8.0f} ms   {gain:.2f} x fp32   SNR {snr:.1f} dB")
        split(net, x, turn, dtype, whole)
    for name, missing in (("bf16", torch.bfloat16), ("int8", torch.int8)):
        if missing not in kinds:
            print(f"  {name}: not measured, this processor does not have it ({int8.backend(x.device).name})")


def split(net: video.Block, x: torch.Tensor, turn: tuple, dtype: torch.dtype, whole: float) -> None:
    """Linears, attention, and the rest; linears as a share of the fastest product of that kind that was seen."""
    around = video.activations(dtype, x.device)
    inputs = {WIDTH: x[0].to(around), 4 * WIDTH: torch.randn(TOKENS, 4 * WIDTH).to(around)}
    layers = (net.attn.to_qkv, net.attn.to_out, net.ff.w1, net.ff.w2)
    multiply = [(layer.at(dtype), inputs[layer.weight.shape[1]]) for layer in layers]
    linears = fastest(lambda: [product(given) for product, given in multiply])
    qkv = torch.randn(1, TOKENS, 3 * WIDTH).to(around)
    attention = fastest(lambda: video.attend(qkv, turn, around))
    peak = math.nan
    if dtype != torch.int8:
        a, b = torch.randn(4096, WIDTH).to(around), torch.randn(4 * WIDTH, WIDTH).to(around)
        peak = 2 * 4096 * WIDTH * 4 * WIDTH / fastest(lambda: F.linear(a, b))
    rate, share = LINEAR_FLOP / linears / 1e9, LINEAR_FLOP / linears / peak
    rest = max(0.0, whole - linears - attention)
    print(f"    linears {1000 * linears:.0f} ms ({rate:.0f} GFLOP/s, {share:.0%} of one large product)")
    print(f"    attention {1000 * attention:.0f} ms ({ATTENTION_FLOP / attention / 1e9:.0f} GFLOP/s)")
    print(f"    rest {1000 * rest:.0f} ms")
