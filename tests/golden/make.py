"""Record pixels.safetensors and waveform.safetensors: run again only when the output is meant to change.

    PYTHONPATH=.:tests python -m golden.make

The weights and latents are drawn from seeds (h3_weights.py, pixels.py); what is recorded is our own float32 output.
"""

import tempfile
from pathlib import Path

import torch
from golden.h3_weights import audio_weights, save, video_weights
from golden.pixels import FRAMES, latent, pixels
from safetensors.torch import save_file

from h3spool.vae import weights


def recorded(folder: Path) -> tuple[dict, dict]:
    """Decode the cases that tests/test_vae_*.py compare with what is stored here."""
    cpu = torch.device("cpu")
    net, _ = weights.load_video(save(folder / "video.safetensors", video_weights()), torch.float32, cpu)
    joined = pixels(net, latent(12, 2, 3))[:, FRAMES]
    crossing = {seams: pixels(net, latent(2, 18, 17), seams)[:, 4, 192:256:4, 16:256:4] for seams in ("composited", "official")}  # fmt: skip  # noqa: E501
    sound, _ = weights.load_audio(save(folder / "audio.safetensors", audio_weights()), cpu)
    z = torch.randn(2, 32, 9, generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        wave = torch.cat(list(sound(z)), dim=1)
    return {"joined": joined, **crossing}, {"wave": wave}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, tensors in zip(("pixels", "waveform"), recorded(Path(folder)), strict=True):
            save_file({k: v.contiguous() for k, v in tensors.items()}, Path(__file__).parent / f"{name}.safetensors")
