"""Random H3 VAE weights in every published layout, written to files that look like the real ones.

All values are exact in float16, so that an F16 and an F32 file hold the same network. The keys and the row orders are
written down here a second time, on purpose in another way than in h3spool/vae/weights.py.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

KERNELS = (9, 9, 4, 4, 4, 4, 4)

torch.set_num_threads(1)  # a second thread does not help networks this small, and on a busy machine it waits


class Maker:
    """Draws F16-exact float32 tensors from a seeded generator."""

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=self._generator) * std + mean).half().float()

    def linear(self, state: dict, key: str, *shape: int, bias: int | None = None) -> None:
        state[f"{key}.weight"] = self.normal(*shape, std=1 / math.sqrt(math.prod(shape[1:])))
        state[f"{key}.bias"] = self.normal(bias or shape[0], std=0.1)


def video_weights(width: int = 128, blocks: int = 2, seed: int = 1) -> dict[str, Tensor]:
    """Official layout, decoder half."""
    draw, state = Maker(seed), {}
    draw.linear(state, "post_quant_conv", 24, 24, 1, 1, 1)
    draw.linear(state, "decoder.x_embedder", width, 24)
    state["decoder.register_tokens"] = draw.normal(1, 4, width, std=1)
    state["decoder.mask_token"] = torch.zeros(1, 1, width)
    for block in range(blocks):
        at = f"decoder.transformer_blocks.{block}"
        for name in ("norm1.weight", "norm2.weight"):
            state[f"{at}.{name}"] = draw.normal(width, std=0.1, mean=1)
        for name in ("scale1", "scale2"):
            state[f"{at}.{name}"] = draw.normal(width, std=0.3)
        draw.linear(state, f"{at}.attn.to_qkv", 3 * width, width)
        draw.linear(state, f"{at}.attn.to_out", width, width)
        draw.linear(state, f"{at}.ff.w1", 8 * width, width)
        draw.linear(state, f"{at}.ff.w2", width, 4 * width)
    state["decoder.norm_out.weight"] = draw.normal(width, std=0.1, mean=1)
    state["decoder.norm_out.bias"] = draw.normal(width, std=0.1)
    draw.linear(state, "decoder.proj_out", 3072, width)
    return state


def video_encoder() -> dict[str, Tensor]:
    """A few keys of the half that a decoder must not read."""
    draw, state = Maker(9), {}
    draw.linear(state, "encoder.down.5.block.0.conv1", 8, 8, 3, 3, 3)
    draw.linear(state, "quant_conv", 48, 48, 1, 1, 1)
    return state


def to_diffusers(official: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split qkv row by row of each head, put the value before the gate, rename."""
    state = {}
    for key, value in official.items():
        if ".to_qkv." in key:
            rows = torch.arange(len(value)).reshape(-1, 3, 64)  # head, part, channel
            for part, name in enumerate(("to_q", "to_k", "to_v")):
                state[key.replace("to_qkv", name)] = value[rows[:, part].flatten()].clone()
        elif ".ff.w1." in key:
            half = len(value) // 2
            state[key.replace("w1", "net.0.proj")] = torch.cat([value[half:], value[:half]])
        elif key != "decoder.mask_token":
            renamed = key.replace("ff.w2", "ff.net.2").replace("to_out", "to_out.0").replace("x_embedder", "proj_in")
            state[renamed] = value
    return state


def audio_weights(latent: int = 64, width: int = 128, seed: int = 2) -> dict[str, Tensor]:
    """Official layout (weight_g and weight_v), decoder half."""
    draw, state = Maker(seed), {}
    taps = torch.tensor([0.0020289646927, 0.0093894656748, -0.0255434587598, -0.0576573833823, 0.1285725831985, 0.4432098071337])  # fmt: skip  # noqa: E501

    def conv(key: str, *shape: int, bias: int) -> None:
        draw.linear(state, key, *shape, bias=bias)
        weight = state.pop(f"{key}.weight")
        size = 0.3 if ".resblocks." in key else 1  # residual branches that add up to 1000s make sin() chaotic
        gain = size * weight.flatten(1).norm(dim=1).view(-1, 1, 1) * draw.normal(shape[0], 1, 1, std=0.1, mean=1)
        state[f"{key}.weight_g"], state[f"{key}.weight_v"] = gain.half().float(), weight

    def activation(key: str, channels: int) -> None:
        state[f"{key}.act.alpha"], state[f"{key}.act.beta"] = (draw.normal(channels, std=0.3) for _ in "ab")
        for name in ("upsample.filter", "downsample.lowpass.filter"):
            state[f"{key}.{name}"] = torch.cat([taps, taps.flip(0)]).view(1, 1, 12)

    draw.linear(state, "dec_in_proj", latent, 32, 1)
    conv("decoder.conv_pre", width, latent, 7, bias=width)
    for stage, kernel in enumerate(KERNELS):
        outputs = width >> (stage + 1)
        conv(f"decoder.ups.{stage}.0", 2 * outputs, outputs, kernel, bias=outputs)
        for j, size in enumerate((3, 7, 11)):
            at = f"decoder.resblocks.{3 * stage + j}"
            for p in range(3):
                conv(f"{at}.convs1.{p}", outputs, outputs, size, bias=outputs)
                conv(f"{at}.convs2.{p}", outputs, outputs, size, bias=outputs)
            for q in range(6):
                activation(f"{at}.activations.{q}", outputs)
    activation("decoder.activation_post", outputs)
    conv("decoder.conv_post", 1, outputs, 7, bias=1)
    del state["decoder.conv_post.bias"]
    return state


def to_parametrizations(official: dict[str, Tensor]) -> dict[str, Tensor]:
    """The other spelling of weight norm."""
    spelled = {"weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1"}
    return {
        key.replace(old, new): value
        for key, value in official.items()
        for old, new in [next(((o, n) for o, n in spelled.items() if key.endswith(o)), ("", ""))]
    }


def to_folded(official: dict[str, Tensor]) -> dict[str, Tensor]:
    """ComfyUI's layout: weight norm folded, by torch."""
    state = {key: value for key, value in official.items() if not key.endswith(("weight_g", "weight_v"))}
    for key in official:
        if key.endswith("weight_v"):
            gain = official[key.replace("weight_v", "weight_g")]
            state[key.removesuffix("_v")] = torch._weight_norm(official[key], gain, 0)
    return state


def audio_encoder() -> dict[str, Tensor]:
    """A few keys of the half that a decoder must not read."""
    draw, state = Maker(8), {}
    draw.linear(state, "mean_proj", 32, 32, 1)
    state["pre_block.attn.zero_k_bias"] = torch.zeros(64)
    state["encoder.block.0.weight_g"] = torch.ones(4, 1, 1)
    return state


def save(path: Path, state: dict[str, Tensor], prefix: str = "", dtype: torch.dtype = torch.float32) -> Path:
    """Write a safetensors file; statistics stay F32, as in the published ones."""
    exact = {k: v if k.startswith("latents_") else v.to(dtype) for k, v in state.items()}
    save_file({prefix + key: value.contiguous() for key, value in exact.items()}, path, {"format": "pt"})
    return path


def save_sharded(folder: Path, state: dict[str, Tensor], config: dict, shards: int = 3) -> Path:
    """Write a folder as diffusers does: shards, index, config.json."""
    folder.mkdir()
    keys, index = sorted(state), {}
    for n in range(shards):
        name = f"diffusion_pytorch_model-{n + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: state[key] for key in keys[n::shards]}
        save(folder / name, part)
        index |= dict.fromkeys(part, name)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(text)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
