"""From the start of a process to its first frame, and a decode when all is warm, beside a diffusers script.

Two blocks of full width from one folder (0.7 GB of F32), 22 frames of 128x128, the same latent; fp32. Each side is a
process of its own, run in turn.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.decode import SMALL_ENCODER, STATS, randomise, ratio

ROUNDS = 5
OURS = """
import sys, time, json
import numpy as np
from h3spool.decode import Decoder
z = np.random.default_rng(0).standard_normal((1, 24, 7, 8, 8), dtype=np.float32)
engine = Decoder(sys.argv[1], None, precision="fp32", device="cpu")
next(engine.frames(z, {}))
first = time.time()
warm = []
for _ in range(5):
    start = time.perf_counter()
    for _ in engine.frames(z, {}):
        pass
    warm.append(time.perf_counter() - start)
print(json.dumps([first, min(warm)]))
"""
THEIRS = """
import sys, time, json
import numpy as np
import torch
from diffusers import AutoencoderKLMiniMaxH3
from safetensors.torch import load_file
z = np.random.default_rng(0).standard_normal((1, 24, 7, 8, 8), dtype=np.float32)
vae = AutoencoderKLMiniMaxH3.from_config(AutoencoderKLMiniMaxH3.load_config(sys.argv[1]))  # no accelerate here
vae.load_state_dict(load_file(sys.argv[1] + "/diffusion_pytorch_model.safetensors"), assign=True)
mean, std = (torch.tensor(values).view(1, 24, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std))
def decode():
    with torch.inference_mode():
        return vae.decode(torch.from_numpy(z) * std + mean).sample
decode()
first = time.time()
warm = []
for _ in range(5):
    start = time.perf_counter()
    decode()
    warm.append(time.perf_counter() - start)
print(json.dumps([first, min(warm)]))
"""


def main() -> None:
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    cold: dict[str, list[float]] = {"ours": [], "diffusers": []}
    warm: dict[str, list[float]] = {"ours": [], "diffusers": []}
    with tempfile.TemporaryDirectory() as folder:
        vae = diffusers.AutoencoderKLMiniMaxH3(**SMALL_ENCODER, **STATS, decoder_num_layers=2)
        randomise(vae)
        vae.save_pretrained(folder)
        for _ in range(ROUNDS):
            for name, script in (("ours", OURS), ("diffusers", THEIRS)):
                begin = time.time()
                done = subprocess.run(
                    [sys.executable, "-c", script, folder],
                    capture_output=True,
                    check=True,
                    cwd=Path(__file__).parents[1],
                )
                first, fastest = json.loads(done.stdout.splitlines()[-1])
                cold[name].append(first - begin)
                warm[name].append(fastest)
    print("cold start to the first frame, and a warm decode: 2 full-width blocks, 22 frames of 128x128, fp32")
    for what, taken in (("cold", cold), ("warm", warm)):
        ours, theirs = taken["ours"], taken["diffusers"]
        print(f"  {what}: ours {min(ours):.2f} s   diffusers {min(theirs):.2f} s   ratio {ratio(ours, theirs):.3f}")
