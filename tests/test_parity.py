"""Against the golden tensors beside the project: what official, diffusers and ComfyUI decode from the same files."""

from pathlib import Path

import pytest
import torch
from golden.pixels import pixels
from safetensors.torch import load_file, save_file

from h3spool.vae import weights

GOLDEN = Path(__file__).parents[2] / "shared" / "golden"
CPU = torch.device("cpu")
CASES = ("grid_T7_4x6", "short_T2_4x4", "long_T12_3x2", "offgrid_T9_3x4", "tiled_T7_18x20", "triple_T2_30x4")

pytestmark = [
    pytest.mark.golden,
    pytest.mark.skipif(not GOLDEN.exists(), reason="the golden tensors are not beside the project"),
]


def load_video(name):
    return weights.load_video(GOLDEN / f"{name}.safetensors", torch.float32, CPU)[0]


def latent(case):
    return load_file(GOLDEN / f"latent_{case}.safetensors")


# image_T1_4x4 is left out: its reference decodes a one-token clip, which the released weights were not trained for.
@pytest.mark.parametrize(("seams", "stored"), [("official", "raw_neighbour"), ("composited", "composited")])
@pytest.mark.parametrize("layout", ["official", "diffusers"])
@pytest.mark.parametrize("case", CASES)
def test_pixels(case, layout, seams, stored):
    golden = load_file(GOLDEN / f"pixels_{case}.safetensors")
    ours = pixels(load_video(f"video_{layout}"), latent(case)["video"], seams)[:, golden["frames"]]
    half = golden[stored].dtype == torch.float16  # storage rounds by up to 2.4e-4
    torch.testing.assert_close(ours, golden[stored][0].float(), rtol=0, atol=3e-4 if half else 1e-5)


@pytest.mark.parametrize("case", CASES[:4])
def test_an_f16_file_is_the_f32_file_with_rounded_weights(tmp_path, case):
    exact = load_file(GOLDEN / "video_official.safetensors")
    save_file({key: value.half().float() for key, value in exact.items()}, tmp_path / "rounded")
    rounded, _ = weights.load_video(tmp_path / "rounded", torch.float32, CPU)
    z = latent(case)["video"]
    torch.testing.assert_close(pixels(load_video("video_comfy"), z), pixels(rounded, z), rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", ["official", "comfy"])
@pytest.mark.parametrize("case", ["grid_T7_4x6", "short_T2_4x4"])
def test_waveform(case, layout):
    net, _ = weights.load_audio(GOLDEN / f"audio_{layout}.safetensors", CPU)
    with torch.inference_mode():
        wave = torch.cat(list(net(latent(case)["audio"][0].transpose(0, 1))), dim=1)
    golden = load_file(GOLDEN / f"waveform_{case}.safetensors")["waveform"][0]
    torch.testing.assert_close(wave, golden, rtol=0, atol=1e-5)
