"""Published H3 checkpoints -> the two decoders. What a file is, is decided by its keys, never by its name.

Layouts: `official` (fused qkv, weight norm not folded), `diffusers` (split qkv, value before gate; one file or a folder
of shards with index and config.json) and `comfyui` (official plus statistics, audio weight norm folded, linears perhaps
in int8 with ConvRot), each with or without a dotted prefix and the encoder half. Files are memory-mapped; only decoder
tensors are read, and a tensor that already has the dtype and order it is used in stays there. Loading is strict.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from h3spool.errors import IOFailed, NotFound, NotUsable
from h3spool.vae import audio, int8, video

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SAMPLES, SAMPLE_BYTES = 256, 16384  # of a file's content that enter its fingerprint


@dataclass
class Checkpoint:
    """The tensors of one file or folder, mapped but not read.

    Attributes:
        path: the file or folder it was opened from.
        files: its safetensors files.
        source: key in the file -> the open file that holds it.
        prefix: what precedes the H3 keys in the file, e.g. "vae."; the methods take keys without it.
        config: config.json of a folder, else empty.
    """

    path: Path
    files: list[Path]
    source: dict[str, safe_open]
    prefix: str = ""
    config: dict = field(default_factory=dict)

    def __contains__(self, key: str) -> bool:
        """Whether the file has a key, behind the prefix."""
        return self.prefix + key in self.source

    def names(self) -> list[str]:
        """Keys behind the prefix."""
        return [key[len(self.prefix) :] for key in self.source if key.startswith(self.prefix)]

    def shape(self, key: str) -> list[int]:
        """Shape of a tensor, from the header."""
        return self.source[self.prefix + key].get_slice(self.prefix + key).get_shape()

    def dtype(self, key: str) -> str:
        """Dtype of a tensor as safetensors spells it, from the header."""
        return self.source[self.prefix + key].get_slice(self.prefix + key).get_dtype()

    def group(self, layer: str) -> int | None:
        """The rotation group of a layer that is quantised to int8 (0: not rotated), None of one that is not.

        Raises:
            NotUsable: it is quantised in a way that h3spool does not read.
        """
        mark = self.prefix + layer + int8.MARKER
        if mark not in self.source:
            if f"{layer}.weight" in self and self.dtype(f"{layer}.weight") == "I8":
                raise NotUsable(
                    f"{self.path}: {layer}.weight is I8 without {int8.MARKER[1:]}, so how it is rotated is unknown "
                    "(QuaRot files look like this): use a file of ComfyUI's int8_convrot format"
                )
            return None
        return int8.group_of(bytes(self.source[mark].get_tensor(mark).tolist()), f"{self.path}: {layer}")

    def tensor(self, key: str) -> Tensor:
        """A tensor in the mapping.

        Raises:
            NotUsable: it is not F32, F16 or BF16, nor the int8 codes of a layer that says how it is quantised.
        """
        codes = self.dtype(key) == "I8" and self.group(key.removesuffix(".weight")) is not None
        if self.dtype(key) not in DTYPES and not codes:
            raise NotUsable(
                f"{self.path}: tensor {self.prefix}{key} is {self.dtype(key)}, h3spool reads {', '.join(DTYPES)}: "
                "use a published checkpoint in one of these dtypes"
            )
        return self.source[self.prefix + key].get_tensor(self.prefix + key)


def load_video(path: Path, dtype: torch.dtype, device: torch.device) -> tuple[video.VideoDecoder, dict]:
    """Load a video decoder whose block products will run in `dtype`.

    A block weight as wide as `dtype` or wider becomes `dtype` here, and is read again by a rung that is wider; a
    narrower one stays as stored and is cast block by block when it is used. All other tensors are float32.

    Returns:
        The decoder on `device` and its facts for the receipt.

    Raises:
        NotFound: there is nothing at `path`.
        NotUsable: it is not a whole H3 video VAE in a layout and dtype that h3spool reads.
        IOFailed: it cannot be read.
    """
    checkpoint = open_checkpoint(Path(path))
    layout, plan = video_layout(checkpoint)
    marks = [key.split(".") for key in checkpoint.names() if key.startswith("decoder.transformer_blocks.")]
    blocks = max((int(mark[2]) for mark in marks if mark[2].isdecimal()), default=0) + 1
    width = checkpoint.shape("decoder.norm_out.weight")[0] if "decoder.norm_out.weight" in checkpoint else 0
    if width == 0 or width % video.HEAD:
        raise NotUsable(f"{checkpoint.path}: decoder.norm_out.weight of a multiple of 64 channels is missing")
    with torch.device("meta"):
        net = video.VideoDecoder(width, blocks)
        groups = _replace_quantised(net, checkpoint)

    def stored(key: str, weight: Tensor) -> Tensor:
        if weight.dtype == torch.int8:
            return weight.to(device)
        inside = ".transformer_blocks." in key and weight.ndim == 2 and not key.endswith("_scale")
        used = video.activations(dtype, device)
        keep = inside and weight.element_size() < used.itemsize
        return weight.to(device, weight.dtype if keep else used if inside else torch.float32)

    _fill(net, checkpoint, plan, stored, (video.LATENTS_MEAN, video.LATENTS_STD))
    for name, layer in net.decoder.transformer_blocks.named_modules():
        if isinstance(layer, video.Linear):
            key = f"decoder.transformer_blocks.{name}.weight"
            layer.stored = _narrowed(checkpoint, key, *plan(key), layer.weight)
    sample = plan("decoder.transformer_blocks.0.attn.to_out.weight")[0][0]
    facts = {"layout": layout, "blocks": blocks, "width": width, "dtype": checkpoint.dtype(sample)}
    if groups:
        facts["int8"] = {"linears": len(groups), "groups": sorted(set(groups)), "products": int8.backend(device).name}
    return net, _facts(checkpoint, facts)


def _narrowed(
    checkpoint: Checkpoint, key: str, parts: list[str], make: Callable[..., Tensor], weight: Tensor
) -> Callable[[], Tensor] | None:
    """A function that makes the weight as stored, if `weight` has not all its bits (bfloat16 in float16 has not)."""
    kept = all(torch.promote_types(DTYPES[checkpoint.dtype(part)], weight.dtype) == weight.dtype for part in parts)
    return None if kept else partial(_shaped, checkpoint, key, parts, make, weight.shape)


def is_int8(path: Path) -> bool:
    """Whether a video VAE's linears are stored as int8. Raises as `load_video`."""
    return any(key.endswith(int8.MARKER) for key in open_checkpoint(Path(path)).source)


def _replace_quantised(net: video.VideoDecoder, checkpoint: Checkpoint) -> list[int]:
    """Put an Int8Linear where the file has a quantised layer; returns the rotation groups."""
    groups = []
    for name, layer in list(net.decoder.transformer_blocks.named_modules()):
        group = checkpoint.group(f"decoder.transformer_blocks.{name}") if isinstance(layer, video.Linear) else None
        if group is None:
            continue
        outputs, inputs = layer.weight.shape
        if group and inputs % group:
            raise NotUsable(f"{checkpoint.path}: {name} has {inputs} inputs, not a multiple of its group {group}")
        parent, _, leaf = name.rpartition(".")
        setattr(net.decoder.transformer_blocks.get_submodule(parent), leaf, int8.Int8Linear(inputs, outputs, group))
        groups.append(group)
    return groups


def load_audio(path: Path, device: torch.device) -> tuple[audio.AudioDecoder, dict]:
    """Load the audio decoder in float32, weight norm folded.

    Returns and raises: as `load_video`.
    """
    checkpoint = open_checkpoint(Path(path))
    layout, plan = _audio_layout(checkpoint)
    with torch.device("meta"):
        bias = "decoder.conv_pre.bias"
        width = checkpoint.shape(bias)[0] if bias in checkpoint else 1024
        net = audio.AudioDecoder(checkpoint.shape("dec_in_proj.weight")[0], width)

    def stored(key: str, weight: Tensor) -> Tensor:
        return weight.to(device, torch.float32)

    _fill(net, checkpoint, plan, stored, (audio.LATENTS_MEAN, audio.LATENTS_STD))
    return net, _facts(checkpoint, {"layout": layout, "width": width, "dtype": checkpoint.dtype("dec_in_proj.weight")})


# ---- opening -------------------------------------------------------------------------------------------------------


def open_checkpoint(path: Path) -> Checkpoint:
    """Map the file or folder at `path`. Raises as `load_video`."""
    if not path.exists():
        raise NotFound(f"there is no checkpoint {path}")
    try:
        files, config = _folder(path) if path.is_dir() else ([path], {})
        source = {}
        for file in files:
            handle = safe_open(file, framework="pt")
            source |= dict.fromkeys(handle.keys(), handle)
    except SafetensorError as e:
        if _begins(file, b"GGUF"):
            raise NotUsable(f"{file} is a GGUF file, which h3spool does not read: use the safetensors file") from e
        raise NotUsable(
            f"{file} is not a whole safetensors file ({e}): fetch it again and compare its sha256; a .pth or .ckpt "
            "file has to be converted first"
        ) from e
    except OSError as e:
        raise IOFailed(f"cannot read the checkpoint {path}: {e}") from e
    return Checkpoint(path, files, source, config=config)


def _begins(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _folder(path: Path) -> tuple[list[Path], dict]:
    """Find the safetensors files and the config of a folder as diffusers writes it."""
    indexes = sorted(path.glob("*.safetensors.index.json"))
    files = sorted(path.glob("*.safetensors"))
    if len(indexes) > 1 or (not indexes and len(files) != 1):
        held = ", ".join(p.name for p in indexes or files) or "no .safetensors file"
        raise NotUsable(f"the folder {path} holds {held}: give the file that is meant, or the folder of one checkpoint")
    if indexes:
        shards = _json(indexes[0]).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise NotUsable(f"{indexes[0]} has no weight_map of file names: fetch it again")
        files = sorted({path / Path(name).name for name in shards.values()})
        missing = [file.name for file in files if not file.exists()]
        if missing or not files:
            raise NotUsable(
                f"the folder {path} lacks {', '.join(missing) or 'all shards'} that {indexes[0].name} names"
            )
    config = path / "config.json"
    return files, _json(config) if config.exists() else {}


def _json(path: Path) -> dict:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as e:
        raise NotUsable(f"{path} is not JSON ({e}): fetch it again") from e
    if not isinstance(value, dict):
        raise NotUsable(f"{path} is not a JSON object: fetch it again")
    return value


# ---- layouts -------------------------------------------------------------------------------------------------------

Plan = Callable[[str], tuple[list[str], Callable[..., Tensor]]]
"""Key of our network -> the keys of the file it is made of, and how."""


def video_layout(checkpoint: Checkpoint) -> tuple[str, Plan]:
    """Find a video VAE's prefix and layout, and what each tensor of ours is made of. Raises NotUsable."""
    anchor = "decoder.transformer_blocks.0.attn.to_"
    if _anchored(checkpoint, anchor + "qkv.weight"):
        layout = "comfyui" if "latents_mean" in checkpoint else "official"
        return layout, lambda key: ([key], partial(_row_scales, checkpoint, key) if key.endswith("_scale") else _as_is)
    if _anchored(checkpoint, anchor + "q.weight"):
        return "diffusers", _from_diffusers
    raise NotUsable(f"{checkpoint.path} is not an H3 video VAE: {_what_it_is(checkpoint)}")


def _audio_layout(checkpoint: Checkpoint) -> tuple[str, Plan]:
    if _anchored(checkpoint, "dec_in_proj.weight") and "decoder.model.0.weight_g" not in checkpoint:
        for mark, layout in (("weight", "comfyui"), ("weight_v", "official"), (PARAMETRIZED[1], "parametrizations")):
            if f"decoder.conv_pre.{mark}" in checkpoint:
                return layout, lambda key: _unnormed(checkpoint, key)
    raise NotUsable(f"{checkpoint.path} is not an H3 audio VAE: {_what_it_is(checkpoint)}")


def _anchored(checkpoint: Checkpoint, anchor: str) -> bool:
    """Find the one prefix under which the file has the key `anchor`, and set it."""
    found = [k[: -len(anchor)] for k in checkpoint.source if k == anchor or k.endswith("." + anchor)]
    if len(found) > 1:
        raise NotUsable(f"{checkpoint.path} holds more than one such network, under {', '.join(map(repr, found))}")
    checkpoint.prefix = found[0] if found else ""
    return bool(found)


def _what_it_is(checkpoint: Checkpoint) -> str:
    keys = set(checkpoint.source)

    def has(anchor: str) -> bool:
        return any(key == anchor or key.endswith("." + anchor) for key in keys)

    if has("decoder.model.0.weight_g"):
        return "it is the VAE of MiniMax Music3, another network"
    if has("decoder.transformer_blocks.0.norm1.weight"):
        return "it is an H3 video VAE, or a part of one: give it as --video-vae, and a sharded one as its folder"
    if has("dec_in_proj.weight"):
        return "it is an H3 audio VAE, or a part of one: give it as --audio-vae"
    if has("decoder.22.bias") or has("22.bias"):
        return "it is TAEH3, the small preview network: use minimax_h3_video_vae_fp16.safetensors"
    return f"none of its {len(keys)} keys is known; the first are {', '.join(sorted(keys)[:3])}"


def _as_is(weight: Tensor) -> Tensor:
    return weight


def _row_scales(checkpoint: Checkpoint, key: str, scale: Tensor) -> Tensor:
    """Scales of int8 rows, stored as [out, 1], [out] or one number -> [out, 1]."""
    rows = checkpoint.shape(key.replace("weight_scale", "weight"))[0]
    if scale.numel() not in (1, rows) or not bool(torch.isfinite(scale).all()) or float(scale.min()) <= 0:
        raise NotUsable(f"{checkpoint.path}: {key} is not one positive scale for each of {rows} rows: fetch it again")
    return scale.float().reshape(-1, 1).expand(rows, 1).contiguous()


def _from_diffusers(key: str) -> tuple[list[str], Callable[..., Tensor]]:
    """q, k, v are interleaved per head into one linear, and the gate is put before the value."""
    if ".attn.to_qkv." in key:
        return [key.replace("to_qkv", part) for part in ("to_q", "to_k", "to_v")], _interleave
    if ".ff.w1." in key:
        return [key.replace("ff.w1", "ff.net.0.proj")], lambda weight: torch.cat(weight.chunk(2)[::-1])
    for ours, theirs in ((".ff.w2.", ".ff.net.2."), (".to_out.", ".to_out.0."), (".x_embedder.", ".proj_in.")):
        key = key.replace(ours, theirs)
    return [key], _as_is


def _interleave(*parts: Tensor) -> Tensor:
    """q, k, v, each [D, ...] -> [3D, ...], 64 rows of each in turn."""
    return torch.stack([part.unflatten(0, (-1, video.HEAD)) for part in parts], dim=1).flatten(0, 2)


PARAMETRIZED = "parametrizations.weight.original0", "parametrizations.weight.original1"


def _unnormed(checkpoint: Checkpoint, key: str) -> tuple[list[str], Callable[..., Tensor]]:
    """A weight as stored, or folded from one of the two spellings of weight norm."""
    if key.endswith(".weight") and key not in checkpoint:
        module = key.removesuffix("weight")
        for gain, direction in (("weight_g", "weight_v"), PARAMETRIZED):
            if module + direction in checkpoint:
                return [module + gain, module + direction], _fold
    return [key], _as_is


def _fold(gain: Tensor, direction: Tensor) -> Tensor:
    """Weight norm along dim 0, in float32: g * v / ||v||."""
    gain, direction = gain.float(), direction.float()
    return direction * (gain / direction.flatten(1).norm(dim=1).view_as(gain))


# ---- filling -------------------------------------------------------------------------------------------------------

IGNORED = ("mask_token", ".filter", int8.MARKER)  # ends of decoder keys that are unused, computed, or read apart


def _fill(
    net: nn.Module,
    checkpoint: Checkpoint,
    plan: Plan,
    stored: Callable[[str, Tensor], Tensor],
    constants: tuple[tuple[float, ...], tuple[float, ...]],
) -> None:
    """Give a network built on the meta device its tensors; refuse what is missing, left over or of another shape."""
    wanted = {key: t.shape for key, t in net.state_dict().items() if not key.startswith("latents_")}
    plans = {key: plan(key) for key in wanted}
    used = {part for parts, _ in plans.values() for part in parts}
    if missing := sorted(part for part in used if part not in checkpoint):
        raise NotUsable(
            f"{checkpoint.path} lacks {len(missing)} decoder tensors, first {', '.join(missing[:3])}: "
            "fetch it again; a sharded checkpoint is given as its folder"
        )
    tops = tuple({key.split(".")[0] + "." for key in wanted})
    extra = [
        key for key in checkpoint.names() if key.startswith(tops) and key not in used and not key.endswith(IGNORED)
    ]
    if extra:
        raise NotUsable(
            f"{checkpoint.path} has {len(extra)} decoder tensors that the H3 decoder has no place for, "
            f"first {', '.join(sorted(extra)[:3])}: it is of another network or version"
        )
    state = {}
    for key, (parts, make) in plans.items():
        state[key] = _shaped(checkpoint, key, parts, make, wanted[key])
        state[key] = stored(key, state[key])
    device = next(iter(state.values())).device
    for key, constant in zip(("latents_mean", "latents_std"), constants, strict=True):
        state[key] = torch.tensor(statistic(checkpoint, key, constant), device=device)
    net.load_state_dict(state, strict=True, assign=True)


def _shaped(checkpoint: Checkpoint, key: str, parts: list[str], make: Callable, shape: torch.Size) -> Tensor:
    shapes = [checkpoint.shape(part) for part in parts]
    try:
        weight = make(*(checkpoint.tensor(part) for part in parts))
    except RuntimeError as e:
        raise NotUsable(f"{checkpoint.path}: {', '.join(parts)} of shapes {shapes} do not make {key}: {e}") from e
    if weight.shape != shape:
        raise NotUsable(f"{checkpoint.path}: {', '.join(parts)} of shapes {shapes} should make {list(shape)}")
    return weight


def statistic(checkpoint: Checkpoint, key: str, constant: tuple[float, ...]) -> list[float]:
    """Latent statistics of the file or its config, if exact: a half-precision copy is off by up to 8e-4.

    Raises:
        NotUsable
    """
    values = list(constant)
    if key in checkpoint and checkpoint.dtype(key) == "F32":
        values = checkpoint.tensor(key).flatten().tolist()
    elif checkpoint.config.get(key):
        values = checkpoint.config[key]
    good = isinstance(values, list) and len(values) == len(constant) and all(isinstance(v, float | int) for v in values)
    if not good or (key == "latents_std" and min(values) <= 0):
        raise NotUsable(f"{checkpoint.path}: {key} is not {len(constant)} usable numbers: fetch it again")
    return values


# ---- facts ---------------------------------------------------------------------------------------------------------


def _facts(checkpoint: Checkpoint, facts: dict) -> dict:
    return {"name": checkpoint.path.name, **facts, "fingerprint": _fingerprint(checkpoint.files)}


def _fingerprint(files: list[Path]) -> str:
    """Identify a checkpoint without reading it whole: SHA-256 over size, header and 256 samples of 16 KiB per file.

    It tells fine-tunes of one network apart, which have equal headers, and costs 4 MiB of reading instead of 5-10 GB;
    it does not find a flipped bit: that is what the published sha256 is for.
    """
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            size = path.stat().st_size
            header = 8 + int.from_bytes(file.read(8), "little")
            file.seek(0)
            digest.update(size.to_bytes(8, "little") + file.read(header))
            step = max(SAMPLE_BYTES, (size - header) // SAMPLES)
            for place in range(header, size, step):
                file.seek(place)
                digest.update(file.read(SAMPLE_BYTES))
    return f"sha256-sampled:{digest.hexdigest()}"
