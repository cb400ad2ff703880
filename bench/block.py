"""One full-width block on one tile-clip of 7x16x16 tokens, the same weights everywhere: ours, diffusers, comfy-kitchen.

int8 products and bf16 are measured where the processor has them. comfy-kitchen's eager code is measured everywhere;
where torch's integer product is slow, on an eighth of the tokens, and scaled.
"""

import copy
import math
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.decode import SMALL_ENCODER, STATS, interleaved, randomise, ratio
from bench.peak import operations_per_s
from h3spool.vae import cpu, int8, quantize, tiling, video, weights

WIDTH, SIZE, EIGHTH = 2048, (7, 16, 16), (7, 8, 4)
ROUNDS = 9
BLOCKS, FRAME_PX, LATENT_FRAMES = 36, (416, 736), 37  # 124 frames
CPU = torch.device("cpu")
Run = Callable[[Tensor], Tensor]
"""x [1, N, 2048] -> the block's result, a new tensor."""


def tokens_of(size: tuple[int, int, int]) -> int:
    return math.prod(size) + video.SUFFIX


def linear_flop(tokens: int) -> float:
    return 2 * tokens * WIDTH * WIDTH * 16  # qkv 3, out 1, w1 8, w2 4 of [D, D]


def attention_flop(tokens: int) -> float:
    return 4 * tokens * tokens * WIDTH


def block_runs() -> int:
    """Blocks times tile-clips of a 416x736 clip of 124 frames."""
    rows, columns = (len(tiling.axis_plan(size // tiling.TOKEN_PX)[0]) for size in FRAME_PX)
    return BLOCKS * rows * columns * tiling.clip_count(LATENT_FRAMES)


class KitchenLinear(torch.nn.Module):
    """An int8 linear as comfy-kitchen's eager code computes it, always whole."""

    def __init__(self, layer: int8.Int8Linear):
        super().__init__()
        self.layer = layer

    def at(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        import comfy_kitchen

        layer = self.layer
        how = {"out_dtype": dtype, "convrot": True, "convrot_groupsize": layer.group}
        bias = layer.bias.to(dtype)
        return lambda x: comfy_kitchen.int8_linear(x, layer.weight, layer.weight_scale.flatten(), bias, **how)


def kitchens(block: video.Block) -> video.Block:
    twin = copy.copy(block)
    twin._modules = dict(block._modules)
    for part in ("attn", "ff"):
        old = block.get_submodule(part)
        twin._modules[part] = new = copy.copy(old)
        new._modules = {name: KitchenLinear(layer) for name, layer in old._modules.items()}
    twin.ff.at = partial(gated, twin.ff)
    return twin


def gated(ff: video.FeedForward, dtype: torch.dtype) -> Run:
    w1, w2 = ff.w1.at(dtype), ff.w2.at(dtype)

    def run(x: Tensor) -> Tensor:
        gate, value = w1(x).chunk(2, dim=-1)
        return w2(torch.nn.functional.silu(gate) * value)

    return run


def ours(block: video.Block, dtype: torch.dtype, size: tuple[int, int, int] = SIZE) -> Run:
    turn = video.turns(size, CPU)

    def run(x: Tensor) -> Tensor:
        stream = x.clone()
        block(stream, turn, dtype, 1)
        return stream

    return run


def theirs(block: torch.nn.Module, dtype: torch.dtype) -> Run:
    rotary = [part.tile(2)[None, :, None] for part in video.turns(SIZE, CPU)]
    twin = copy.deepcopy(block)
    for name, weight in twin.named_parameters():
        if weight.ndim == 2 or name.endswith("bias"):
            weight.data = weight.data.to(dtype)
    return lambda x: twin(x, rotary)


def blocks(folder: Path) -> tuple[torch.nn.Module, video.Block, video.Block]:
    """One random block as diffusers has it, as we have it, and in int8."""
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    vae = diffusers.AutoencoderKLMiniMaxH3(**SMALL_ENCODER, **STATS, decoder_num_layers=1)
    randomise(vae)
    for norm in (vae.decoder.transformer_blocks[0].norm1, vae.decoder.transformer_blocks[0].norm2):
        norm.weight.data += 1
    vae.save_pretrained(folder)
    quantize.quantize(folder, folder / "int8", lambda done, total: None)
    nets = [weights.load_video(path, torch.float32, CPU)[0] for path in (folder, folder / "int8")]
    return vae.decoder.transformer_blocks[0], *(net.decoder.transformer_blocks[0] for net in nets)


def runs(folder: Path) -> dict[str, Run]:
    """Everything that is measured on whole tile-clips."""
    other, mine, quantised = blocks(folder)
    found = {"diffusers fp32": theirs(other, torch.float32), "ours fp32": ours(mine, torch.float32)}
    if cpu.has_bfloat16():
        found |= {"diffusers bf16": theirs(other, torch.bfloat16), "ours bf16": ours(mine, torch.bfloat16)}
    if int8.backend(CPU).product:
        around = torch.bfloat16 if cpu.has_bfloat16() else torch.float32
        found["comfy-kitchen eager int8"] = ours(kitchens(quantised), around)
        found["ours int8"] = ours(quantised, torch.int8)
    else:
        found["ours int8 file, products fp32"] = ours(quantised, torch.float32)
    return found


def limit_s(name: str, peak: dict[str, float]) -> float:
    """Seconds that the products and the attention of a block take at the machine's measured peak."""
    kind = "int8" if name.endswith("int8") else "bf16" if name.endswith("bf16") else "fp32"
    around = "bf16" if kind != "fp32" and "bf16" in peak else "fp32"
    tokens = tokens_of(SIZE)
    return linear_flop(tokens) / peak[kind] + attention_flop(tokens) / peak[around]


@torch.inference_mode()
def main() -> None:
    peak = operations_per_s(torch.get_num_threads())
    rates = ", ".join(f"{kind} {rate / 1e9:.0f}" for kind, rate in peak.items()) or "not measured, there is no compiler"
    print(f"one block, {tokens_of(SIZE)} tokens, width {WIDTH}, {torch.get_num_threads()} threads")
    print(f"  peak of the vector units, measured, in GFLOP/s or GOP/s: {rates}")
    x = torch.randn(1, tokens_of(SIZE), WIDTH)
    x[:, -1] = 0
    with tempfile.TemporaryDirectory() as folder:
        found = runs(Path(folder))
        taken = interleaved(*(partial(run, x) for run in found.values()), rounds=ROUNDS)
        seconds = dict(zip(found, taken, strict=True))
        wanted = found["diffusers fp32"](x) - x
        for name, run in found.items():
            note = f"SNR {int8.snr_db(wanted, run(x) - x):5.1f} dB"
            show(name, seconds[name], ratio(seconds["diffusers fp32"], seconds[name]), note, peak)
        _, mine, quantised = blocks(Path(folder) / "eager")
        split(mine, torch.float32, seconds["ours fp32"])
        if "ours bf16" in seconds:
            split(mine, torch.bfloat16, seconds["ours bf16"])
        if "ours int8" in seconds:
            split(quantised, torch.int8, seconds["ours int8"])
        else:
            print("  int8 products: not measured; " + int8.backend(CPU).name)
            eighth(quantised, x, min(seconds["ours int8 file, products fp32"]))
    print("  bf16: measured" if cpu.has_bfloat16() else "  bf16: not measured, this processor does not have it")


def show(name: str, seconds: list[float], gain: float, note: str, peak: dict[str, float]) -> None:
    best = min(seconds)
    share = f"{limit_s(name, peak) / best:4.0%} of peak" if peak else ""
    whole = statistics.median(seconds) * block_runs() / 60
    print(f"  {name:<32} {1000 * best:7.0f} ms {gain:6.2f} x  {note}  {share}  416x736x124: {whole:6.1f} min")


def eighth(quantised: video.Block, x: Tensor, ours_s: float) -> None:
    """comfy-kitchen's eager code on an eighth of the tokens, because it takes minutes."""
    part = x[:, : tokens_of(EIGHTH)]
    ((taken,),) = interleaved(partial(ours(kitchens(quantised), torch.float32, EIGHTH), part), rounds=1)
    scaled = taken * tokens_of(SIZE) / tokens_of(EIGHTH)
    print(f"  comfy-kitchen eager int8: {taken:.1f} s for {part.shape[1]} tokens,", end=" ")
    print(f"that is {scaled:.0f} s for all of them, {scaled / ours_s:.0f} x ours")


def split(block: video.Block, dtype: torch.dtype, whole: list[float]) -> None:
    """Linears, attention, and the rest."""
    tokens, around = tokens_of(SIZE), video.activations(dtype, CPU)
    inputs = {width: torch.randn(1, tokens, width).to(around) for width in (WIDTH, 4 * WIDTH)}
    layers = (block.attn.to_qkv, block.attn.to_out, block.ff.w1, block.ff.w2)
    products = [(layer.at(dtype), inputs[layer.weight.shape[1]]) for layer in layers]
    qkv, turn = torch.randn(1, tokens, 3 * WIDTH).to(around), video.turns(SIZE, CPU)
    kind = torch.bfloat16 if dtype == torch.int8 and cpu.has_bfloat16() else around
    linears, attention = map(
        min,
        interleaved(
            lambda: [product(given) for product, given in products],
            lambda: video.attend(qkv, turn, kind),
            rounds=ROUNDS,
        ),
    )
    rest = max(0.0, min(whole) - linears - attention)
    print(f"    of ours {str(dtype).removeprefix('torch.')}: linears {1000 * linears:.0f} ms", end=" ")
    print(f"({linear_flop(tokens) / linears / 1e9:.0f} GFLOP/s), attention {1000 * attention:.0f} ms", end=" ")
    print(f"({attention_flop(tokens) / attention / 1e9:.0f} GFLOP/s), rest {1000 * rest:.0f} ms", flush=True)
