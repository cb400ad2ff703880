"""What the precisions lose: the demo clip in PSNR, one random full-width block in SNR; both against fp32.

int8 products are computed here on every processor, by the ways that are taken where the processor is fast at them: it
takes minutes where it is not.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bench.block import CPU, WIDTH, blocks, ours, tokens_of
from h3spool import importers
from h3spool.decode import Decoder, difference
from h3spool.vae import cpu, int8, quantize, video

DEMO = Path(__file__).parents[1] / "examples" / "demo"
SIZE = (7, 8, 8)
VNNI, BFLOAT16 = frozenset({"avx512_vnni"}), frozenset({"avx512_vnni", "avx512_bf16"})
WAYS = {"int8 products": VNNI, "int8 products, rotation and attention in bf16": BFLOAT16}


@contextmanager
def processor(flags: frozenset[str]) -> Iterator[None]:
    """Take the ways of a processor with these flags."""
    real, packed, cpu.flags = cpu.flags, video.packed_dtypes, lambda: flags
    video.packed_dtypes = frozenset  # its reordered weights need its instructions
    int8.backend.cache_clear()
    try:
        yield
    finally:
        cpu.flags, video.packed_dtypes = real, packed
        int8.backend.cache_clear()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        demo_clip(Path(folder))
        full_width_block(Path(folder))


def demo_clip(folder: Path) -> None:
    quantised = folder / "demo_int8.safetensors"
    checkpoint = DEMO / "demo_video_vae.safetensors"
    quantize.quantize(checkpoint, quantised, lambda done, total: None)
    clip = importers.load([DEMO / "demo.h3latent"]).video.array()

    def show(name: str, path: Path, precision: str) -> None:
        pair = [
            Decoder(file, None, precision=kind, device="cpu")
            for file, kind in ((checkpoint, "fp32"), (path, precision))
        ]
        found = difference(*pair, clip)
        print(f"  {name:<48} PSNR {found['psnr_db']:.1f} dB, at most {found['max']} of 255", flush=True)

    print("the demo clip against fp32")
    show("fp16", checkpoint, "fp16")
    show("bf16", checkpoint, "bf16")
    show("int8 weights, float products", quantised, "fp32")
    for name, flags in WAYS.items():
        with processor(flags):
            show(name, quantised, "int8")


@torch.inference_mode()
def full_width_block(folder: Path) -> None:
    _, mine, quantised = blocks(folder / "block")
    x = torch.randn(1, tokens_of(SIZE), WIDTH, generator=torch.Generator().manual_seed(0))
    x[:, -1] = 0
    wanted = ours(mine, torch.float32, SIZE)(x) - x
    print(f"one random block, width {WIDTH}, {tokens_of(SIZE)} tokens: what it adds, against fp32 on {CPU}")

    def show(name: str, block: video.Block, dtype: torch.dtype) -> None:
        print(f"  {name:<48} SNR {int8.snr_db(wanted, ours(block, dtype, SIZE)(x) - x):.1f} dB", flush=True)

    show("fp16", mine, torch.float16)
    show("bf16", mine, torch.bfloat16)
    with processor(BFLOAT16):
        show("bf16, its own attention", mine, torch.bfloat16)
    show("int8 weights, float products", quantised, torch.float32)
    for name, flags in WAYS.items():
        with processor(flags):
            show(name, quantised, torch.int8)
