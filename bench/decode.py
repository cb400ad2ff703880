"""The native decoder beside diffusers at equal precision, and one whole decode from a file of the published size.

Both read the same folder in the same process, in interleaved rounds: seconds are of the fastest, a ratio is the median
of those of the rounds. Ours also rounds to 8 bits and stitches. Random weights: speed does not depend on them.
"""

import json
import math
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from h3spool.decode import DTYPES, Decoder
from h3spool.vae import audio, cpu, video, weights

BLOCKS, BLOCKS_EMULATED = 12, 1  # of 36; bfloat16 without hardware for it takes eight times as long
TILE = (7, 16, 16)
SMALL_ENCODER = {"block_out_channels": (4,) * 6, "norm_num_groups": 2, "layers_per_block": 1}
STATS = {"latents_mean": video.LATENTS_MEAN, "latents_std": video.LATENTS_STD}


def main() -> None:
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    print(f"decode: {torch.get_num_threads()} threads, torch {torch.__version__}, {processor()}")
    for precision in ("fp32", "bf16"):
        with tempfile.TemporaryDirectory() as folder:
            beside_diffusers(diffusers, Path(folder), precision)
    with tempfile.TemporaryDirectory() as folder:
        sound_beside_diffusers(diffusers, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        whole(published_file(Path(folder) / "video_fp16.safetensors"))


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def interleaved(*works: Callable[[], object], rounds: int) -> list[list[float]]:
    """Seconds of each work in each of so many interleaved rounds."""
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, seconds in zip(works, taken, strict=True):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
    return taken


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of the ratios of the rounds: what else a shared machine does changes from minute to minute."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def randomise(module: torch.nn.Module) -> None:
    """Weights that keep the activations at the size they have in a trained network."""
    for parameter in module.parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 100
        parameter.data.uniform_(-1, 1).mul_(math.sqrt(3 / fan_in))


def beside_diffusers(diffusers, folder: Path, precision: str) -> None:
    native = precision != "bf16" or cpu.has_bfloat16()
    blocks = BLOCKS if native else BLOCKS_EMULATED
    theirs = diffusers.AutoencoderKLMiniMaxH3(**SMALL_ENCODER, **STATS, decoder_num_layers=blocks)
    randomise(theirs)
    theirs.save_pretrained(folder)
    for name, parameter in theirs.named_parameters():  # as its from_pretrained does, which needs accelerate for it
        if not set(name.split(".")) & set(theirs._keep_in_fp32_modules):
            parameter.data = parameter.data.to(DTYPES[precision])
    ours = Decoder(folder, None, precision=precision, device="cpu")
    z = np.random.default_rng(0).standard_normal((1, 24, *TILE), dtype=np.float32)
    mean, std = (torch.tensor(STATS[name]).view(1, 24, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    denormalised = torch.from_numpy(z) * std + mean
    pictures = {}

    def decode_ours() -> None:
        pictures["ours"] = torch.from_numpy(np.concatenate(list(ours.frames(z, {}))))

    @torch.inference_mode()
    def decode_theirs() -> None:
        pictures["theirs"] = theirs.decode(denormalised).sample[0].float()

    mine, other = interleaved(decode_ours, decode_theirs, rounds=3)
    eight_bit = (255 * video.finalise(pictures["theirs"])).round().permute(1, 2, 3, 0)
    apart = (eight_bit - pictures["ours"]).abs()
    note = "" if native else " (emulated here)"
    print(f"  one tile-clip 7x16x16, width 2048, {blocks} of 36 blocks, {precision}{note}")
    print(f"    ours {min(mine):.2f} s   diffusers {min(other):.2f} s   ratio {ratio(mine, other):.3f}")
    print(f"    8-bit difference: mean {apart.mean():.4f}, max {apart.max():.0f} of 255", flush=True)


def sound_beside_diffusers(diffusers, folder: Path) -> None:
    theirs = diffusers.AutoencoderKLMiniMaxH3Audio(encoder_dim=4)
    randomise(theirs)
    theirs.save_pretrained(folder)
    ours, _ = weights.load_audio(folder, torch.device("cpu"))
    z = torch.randn(2, audio.CHANNELS, 80)
    scaled = z * ours.latents_std[:, None] + ours.latents_mean[:, None]
    with torch.inference_mode():
        mine, other = interleaved(lambda: list(ours(z)), lambda: theirs.decode(scaled), rounds=5)
    print("  2 s of stereo sound, width 1024, fp32")
    print(f"    ours {min(mine):.2f} s   diffusers {min(other):.2f} s   ratio {ratio(mine, other):.3f}", flush=True)


# ---------------------------------------------------------------- one whole decode

WHOLE = """
import json, sys, threading, time
import numpy as np
from h3spool.decode import Decoder

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watch():
    while True:
        most[0] = max(most[0], anonymous())
        time.sleep(0.02)

start, most = anonymous(), [0]
threading.Thread(target=watch, daemon=True).start()
decoder = Decoder(sys.argv[1], None, precision="fp32", device="cpu")
report = {}
z = np.random.default_rng(0).standard_normal((1, 24, 2, 4, 4), dtype=np.float32)
frames = sum(len(piece) for piece in decoder.frames(z, report))
print(json.dumps({"load_s": decoder.facts["load_s"], "frames": frames, "besides": most[0] - start} | report))
"""


def whole(path: Path) -> None:
    """Decode a small latent with all 36 blocks, in a process of its own."""
    print(f"  whole decode, 36 blocks, F16 file of {path.stat().st_size:,} bytes, latent 2x4x4")
    command = [sys.executable, "-c", WHOLE, str(path)]
    got = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    resident, besides = got["peak_memory_bytes"] / 2**30, got["besides"] / 2**30
    print(f"    fp32: load {got['load_s']:.2f} s, {got['frames']} frames in {got['seconds']:.1f} s")
    print(f"    resident {resident:.2f} GiB at most, of it {besides:.2f} GiB besides the mapped file", flush=True)


def published_file(path: Path) -> Path:
    """Write random weights in the ComfyUI F16 layout, encoder included: the keys and sizes of the published file."""
    shapes = decoder_shapes() | encoder_shapes()
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for key, shape in shapes.items():
        stored = "F32" if key.startswith("latents_") else "F16"
        size = math.prod(shape) * (4 if stored == "F32" else 2)
        header[key] = {"dtype": stored, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pool = torch.randn(1 << 22)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for key, shape in shapes.items():
            if key.startswith("latents_"):
                file.write(np.asarray(STATS[key], np.float32).tobytes())
                continue
            left, gain = math.prod(shape), 1 / math.sqrt(math.prod(shape[1:]) if len(shape) > 1 else 100)
            scaled = (pool * gain).half().numpy()
            while left > 0:
                file.write(scaled[:left].tobytes())
                left -= len(scaled)
    return path


def decoder_shapes() -> dict[str, list[int]]:
    with torch.device("meta"):
        net = video.VideoDecoder(2048, 36)
    return {key: list(value.shape) for key, value in net.state_dict().items()} | {"decoder.mask_token": [1, 1, 2048]}


def encoder_shapes() -> dict[str, list[int]]:
    import diffusers

    with torch.device("meta"):
        vae = diffusers.AutoencoderKLMiniMaxH3(decoder_num_layers=1)
    return {
        key.replace("down_blocks.", "down.")
        .replace("resnets.", "block.")
        .replace("conv_shortcut", "nin_shortcut")
        .replace("downsamplers.0", "downsample"): list(value.shape)
        for key, value in vae.state_dict().items()
        if key.startswith(("encoder.", "quant_conv."))
    }
