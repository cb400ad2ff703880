"""Write an int8_convrot video VAE: the linears of the blocks in int8, the rest as ComfyUI publishes it, one at a time.

Byte layout: safetensors, header first, tensors in order of dtype (F32, F16, I8, U8) and name; of each block's four
linears I8 codes [out, in], F32 scales [out, 1] and a U8 description; encoder kernels F16, all else F32.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from h3spool import __version__
from h3spool.errors import NotUsable, explained
from h3spool.vae import int8, video, weights

LINEARS = ("attn.to_qkv", "attn.to_out", "ff.w1", "ff.w2")
_BYTES = {"F32": 4, "F16": 2, "I8": 1, "U8": 1}  # in the order in which tensors lie in the file
_DTYPES = weights.DTYPES | {"I8": torch.int8, "U8": torch.uint8}


class Entry(NamedTuple):
    """A tensor of the file to be: safetensors dtype and shape."""

    dtype: str
    shape: tuple[int, ...]


def quantize(source: Path, target: Path, progress: Callable[[int, int], None]) -> dict:
    """Quantise a float video VAE of any layout into one file, which appears when it is whole.

    Args:
        progress: called with (linears done, linears in all).

    Returns:
        `bytes`, `linears`, `encoder` (whether that half is in it, without which ComfyUI does not load the file) and
        `snr_db` of the weights per kind of linear.

    Raises:
        NotFound, NotUsable, IOFailed: as `vae.weights.load_video`; NotUsable also for a file that is int8 already.
    """
    if weights.is_int8(source):
        raise NotUsable(f"{source} is quantised already; give the FP16 or FP32 file")
    network = _Network(source)
    entries = network.entries()
    header, offsets = _header(entries)
    noise: dict[str, list[float]] = {}
    fresh = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    with explained("writing", target):
        try:
            with open(fresh, "xb") as file:
                file.write(header)
                for key, tensor in network.tensors(noise, progress):
                    file.seek(offsets[key])
                    wanted = tensor.to(_DTYPES[entries[key].dtype]).contiguous()
                    file.write(wanted.view(torch.uint8).numpy().data if wanted.numel() else b"")
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, target)
        finally:
            fresh.unlink(missing_ok=True)
    snr = {kind: round(10 * math.log10(signal / error), 2) for kind, (signal, error) in noise.items()}
    encoder = "encoder.down.5.block.0.conv1.weight" in entries  # by which ComfyUI knows an H3 video VAE
    return {"bytes": target.stat().st_size, "linears": len(network.linears), "encoder": encoder, "snr_db": snr}


class _Network:
    """The tensors of a checkpoint under ComfyUI's keys, each made when it is asked for."""

    def __init__(self, source: Path):
        net, _ = weights.load_video(source, torch.float32, torch.device("meta"))  # whole and well shaped, or refused
        self._checkpoint = weights.open_checkpoint(source)
        _, self._plan = weights.video_layout(self._checkpoint)
        self._shapes = {key: tuple(tensor.shape) for key, tensor in net.state_dict().items()}
        self.linears = [
            f"decoder.transformer_blocks.{block}.{linear}"
            for block in range(len(net.decoder.transformer_blocks))
            for linear in LINEARS
        ]
        self._statistics = {"latents_mean": video.LATENTS_MEAN, "latents_std": video.LATENTS_STD}
        parts = {part for key in self._shapes for part in self._plan(key)[0]}
        self._others = [  # the encoder, and what a decoder has no use for, where the file has ComfyUI's names
            key
            for key in self._checkpoint.names()
            if key not in parts and key not in self._statistics and not parts.isdisjoint(self._shapes)
        ]

    def entries(self) -> dict[str, Entry]:
        """Every tensor of the file to be."""
        found = {key: Entry("F32", shape) for key, shape in self._shapes.items()}
        for layer in self.linears:
            outputs, inputs = self._shapes[f"{layer}.weight"]
            found[f"{layer}.weight"] = Entry("I8", (outputs, inputs))
            found[f"{layer}.weight_scale"] = Entry("F32", (outputs, 1))
            found[f"{layer}{int8.MARKER}"] = Entry("U8", (len(int8.marker(int8.group_for(inputs))),))
        for key in self._others:
            shape = tuple(self._checkpoint.shape(key))
            found[key] = Entry("F16" if key.startswith("encoder.") and len(shape) > 1 else "F32", shape)
        return found

    def tensors(self, noise: dict[str, list[float]], progress: Callable[[int, int], None]) -> Iterator[tuple]:
        """Every tensor with its key; `noise` collects signal and error power per kind of linear."""
        for done, layer in enumerate(self.linears, 1):
            weight = self._make(f"{layer}.weight")
            group = int8.group_for(weight.shape[1])
            codes, scale = int8.quantise(weight, group)
            error = weight - int8.dequantise(codes, scale, group)
            power = noise.setdefault(layer.split(".", 3)[3], [0.0, 0.0])
            power[0] += float(weight.square().sum(dtype=torch.float64))
            power[1] += float(error.square().sum(dtype=torch.float64))
            yield f"{layer}.weight", codes
            yield f"{layer}.weight_scale", scale
            yield f"{layer}{int8.MARKER}", torch.frombuffer(bytearray(int8.marker(group)), dtype=torch.uint8)
            progress(done, len(self.linears))
        quantised = {f"{layer}.weight" for layer in self.linears}
        for key in self._shapes:
            if key not in quantised:
                yield key, self._make(key)
        for key in self._others:
            yield key, self._checkpoint.tensor(key).float()

    def _make(self, key: str) -> Tensor:
        if key in self._statistics:
            return torch.tensor(weights.statistic(self._checkpoint, key, self._statistics[key]))
        parts, make = self._plan(key)
        return make(*(self._checkpoint.tensor(part).float() for part in parts))


def _header(entries: dict[str, Entry]) -> tuple[bytes, dict[str, int]]:
    """The file's beginning, and where each tensor goes."""
    order = sorted(entries, key=lambda key: (list(_BYTES).index(entries[key].dtype), key))
    table: dict[str, object] = {"__metadata__": {"format": "pt", "h3spool": __version__}}
    place, places = 0, {}
    for key in order:
        size = math.prod(entries[key].shape) * _BYTES[entries[key].dtype]
        places[key] = place
        table[key] = {**entries[key]._asdict(), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {key: begin + offset for key, offset in places.items()}
