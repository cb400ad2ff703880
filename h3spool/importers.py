"""Latent files of other tools, recognised by the names and shapes of their tensors, never by extension.

Safetensors files, zip cartridges (`.lc`) and, only where asked for, torch pickles. A file may hold both streams or one;
two files make a pair. Nothing of a foreign file is trusted: sizes are checked before anything is unpacked, pickles go
through torch's restricted loader and execute nothing. What was recorded about the sampling (seed, steps, sampler,
shifts, LoRA, prompt) is read where the format states it in a known way; the foreign metadata goes along whole as
`producer`.
"""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections import deque
from io import BytesIO
from math import prod
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from h3spool import container, latent
from h3spool.container import Tensor
from h3spool.errors import BadData

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_FOREIGN_HEADER_BYTES = 16 << 20  # ComfyUI workflows with embedded pictures reach megabytes
MAX_UNPACKED_BYTES = 256 << 20  # 362 frames of 1440x2560 in F32 are 150 MB
MAX_FACT_CHARS, MAX_PROMPT_CHARS = 1000, 8000  # facts live in the latent's 64 KiB header

# The names under which a stream is kept, with the tool whose format that is. A name that several share says neither.
STREAM_NAMES = {
    "video": "", "audio": "",  # Easy, AVLatentCache, essential-er, Motion-Context, Context-Loop, LatentDeck, ...
    "latent_0": "h3_latent_io", "latent_1": "h3_latent_io",
    "latent_tensor": "ComfyUI SaveLatent",
    "samples_video": "T8", "samples_audio": "T8",
    "streams.video": "H3-Latent-Relay", "streams.audio": "H3-Latent-Relay",
    "t0": "panghea", "t1": "panghea",
    "latent_video": "musubi-tuner", "latent_audio": "musubi-tuner",
    "latents": "diffusers", "audio_latents": "diffusers",
}  # fmt: skip
CARTRIDGE_MEMBER = "payloads/h3.safetensors"

_DERIVED = {"format", "version", "frames", "frame_rate", "width", "height", "created"}  # latent.build writes them anew


class Imported(NamedTuple):
    """What a foreign file holds.

    `video` is [1, 24, T, H, W] and `audio` [1, 32, 2, Ta] or None, dtypes as stored; `facts` are for `latent.build`;
    `producer` is the foreign metadata whole (None where there is none).
    """

    video: Tensor
    audio: Tensor | None
    facts: dict[str, str]
    producer: dict[str, object] | None


class _File(NamedTuple):
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def load(paths: Sequence[Path], *, allow_pickle: bool = False, raws: Sequence[bytes] | None = None) -> Imported:
    """Read one latent file, or two that hold a stream each (in either order).

    Args:
        paths: the files; also what messages name.
        allow_pickle: read torch pickles, through torch's restricted loader.
        raws: the files' bytes where they were read already (to hash and parse the same ones).

    Raises:
        BadData: not a known latent; the message lists what the file holds and what was expected.
        NotFound, NotPermitted, IOFailed: a file cannot be read.
    """
    raws = raws or [container.read_bytes(path) for path in paths]
    names = " + ".join(str(path) for path in paths)
    streams: dict[str, Tensor] = {}
    facts: dict[str, str] = {}
    accounts = []
    for path, raw in zip(paths, raws, strict=True):
        try:
            file = _parse(raw, allow_pickle)
            found, own_facts, account = _own(path, raw, file) or _foreign(file)
        except BadData as error:
            text = str(error)
            raise BadData(text if text.startswith(str(path)) else f"{path}: {text}") from None
        if again := set(streams) & set(found):
            raise BadData(f"{names}: both files hold a {again.pop()} stream; a pair is one video and one audio file")
        streams |= found
        facts = own_facts | facts
        accounts += [{"file": path.name} | account] if account else []
    if "video" not in streams:
        raise BadData(f"{names}: holds sound only; give the file with the picture too (export --video V --audio A)")
    return Imported(streams["video"], streams.get("audio"), facts, {"files": accounts} if accounts else None)


def _parse(raw: bytes, allow_pickle: bool) -> _File:
    """Open the container: safetensors, a cartridge, or a torch pickle."""
    if raw[:2] == b"PK":
        return _parse_zip(raw, allow_pickle)
    if raw[:1] == b"\x80" and raw[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and raw[8:9] != b"{":
        raise BadData("a bare Python pickle, which can run code and is never read; save it as safetensors")
    return _File(*container.parse(raw, MAX_FOREIGN_HEADER_BYTES))


def _own(path: Path, raw: bytes, file: _File) -> tuple[dict[str, Tensor], dict[str, str], None] | None:
    """The streams of an `.h3latent` of our own, or None where the file is not one."""
    if file.metadata.get("format") != latent.FORMAT:
        return None
    clip = latent.read(path, raw)
    streams = {"video": clip.video} | ({} if clip.audio is None else {"audio": clip.audio})
    return streams, {key: value for key, value in clip.metadata.items() if key not in _DERIVED}, None


def _foreign(file: _File) -> tuple[dict[str, Tensor], dict[str, str], dict[str, object] | None]:
    streams: dict[str, Tensor] = {}
    tool = ""
    for name in sorted(STREAM_NAMES.keys() & file.tensors.keys()):
        role, tensor = _stream(file.tensors[name])
        if role in streams:
            raise BadData(f"it holds more than one {role} stream: {_listing(file.tensors)}")
        if role:
            streams[role] = tensor
            tool = tool or STREAM_NAMES[name]
    if not streams:
        raise BadData(
            f"not a known H3 latent. It holds {_listing(file.tensors)}. Expected: a video [1, 24, T, H, W] and an "
            f"audio [1, 32, 2, Ta] (diffusers: [2, 32, Ta]) named {', '.join(STREAM_NAMES)}"
        )
    if "latent_tensor" in file.tensors and "latent_format_version_0" not in file.tensors:
        raise BadData(
            "a `latent_tensor` without `latent_format_version_0` is of ComfyUI's old format, whose values ComfyUI "
            "scales by 1/0.18215 when it loads them; H3 latents are never written so"
        )
    left_out = {name: tensor for name, tensor in file.tensors.items() if name not in STREAM_NAMES}
    account: dict[str, object] = {}
    if file.metadata:
        account["metadata"] = file.metadata
    if "relay_kit_meta" in left_out and (note := _json(bytes(left_out.pop("relay_kit_meta").data))) is not None:
        account["relay_kit_meta"] = note
    if left_out := {name: tensor for name, tensor in left_out.items() if prod(tensor.shape) > 1}:
        account["left_out"] = _listing(left_out)
    return streams, _facts(file.metadata, tool), account or None


def _stream(tensor: Tensor) -> tuple[str | None, Tensor]:
    """Which stream a tensor is, by its shape, and the tensor in our layout."""
    shape = tensor.shape
    if len(shape) == 5 and shape[1] == latent.VIDEO_CHANNELS:
        return "video", tensor
    if len(shape) == 4 and shape[1:3] == (latent.AUDIO_CHANNELS, 2):
        return "audio", tensor
    if len(shape) == 3 and shape[:2] == (2, latent.AUDIO_CHANNELS) and tensor.dtype in container.ITEM_BYTES:
        return "audio", _batched(tensor)
    return None, tensor


def _batched(tensor: Tensor) -> Tensor:
    """Diffusers keeps the two channels as a batch: [2, 32, Ta] -> [1, 32, 2, Ta]."""
    import numpy as np

    kind = f"<u{container.ITEM_BYTES[tensor.dtype]}"
    swapped = np.frombuffer(tensor.data, kind).reshape(tensor.shape).transpose(1, 0, 2)[None]
    return Tensor(tensor.dtype, swapped.shape, swapped.tobytes())


def _listing(tensors: dict[str, Tensor]) -> str:
    """Names, dtypes and shapes for a message, 20 at most."""
    lines = [f"{name[:80]!r} {tensor.dtype} {list(tensor.shape)}" for name, tensor in sorted(tensors.items())]
    more = f" and {len(lines) - 20} more" if len(lines) > 20 else ""
    return (", ".join(lines[:20]) or "no tensors") + more


# ---------------------------------------------------------------- zip: cartridges and torch pickles


def _parse_zip(raw: bytes, allow_pickle: bool) -> _File:
    try:
        with zipfile.ZipFile(BytesIO(raw)) as archive:
            names = [member.filename for member in archive.infolist()]
            if sum(member.file_size for member in archive.infolist()) > MAX_UNPACKED_BYTES:
                raise BadData(f"it would unpack to more than {MAX_UNPACKED_BYTES} bytes; no latent is so large")
            if any(PurePosixPath(name).name == "data.pkl" for name in names):
                return _parse_pickle(raw, allow_pickle)
            if "manifest.json" not in names or names.count(CARTRIDGE_MEMBER) != 1:
                held = ", ".join(names)[:500] or "nothing"
                raise BadData(f"a zip without manifest.json and one {CARTRIDGE_MEMBER}; it holds {held}")
            inner = archive.read(CARTRIDGE_MEMBER)  # reads no more than the size that was just checked
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise BadData(f"a damaged or encrypted zip ({error})") from None
    return _File(*container.parse(inner, MAX_FOREIGN_HEADER_BYTES))


class _NestedTensor:
    """Stands in for `comfy.nested_tensor.NestedTensor` while unpickling: its state becomes attributes, nothing runs."""


def _parse_pickle(raw: bytes, allow_pickle: bool) -> _File:
    if not allow_pickle:
        raise BadData(
            "a torch pickle, a format that can run code. If you trust where it comes from, `h3spool export "
            "--allow-pickle` reads it through torch's restricted loader, which runs none"
        )
    import torch

    try:
        with torch.serialization.safe_globals([(_NestedTensor, "comfy.nested_tensor.NestedTensor")]):
            content = torch.load(BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a hostile pickle can raise: it is refused all the same
        wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
        why = f"it asks for {wanted[1]}, which no latent needs" if wanted else type(error).__name__
        raise BadData(f"the restricted loader refused this pickle: {why}; nothing of it was run") from None
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for name, value in _leaves(content):
        if isinstance(value, torch.Tensor):
            tensors[name] = _plain(name, value)
        elif isinstance(value, str | int | float):
            metadata[name] = str(value)
    by_role = {_stream(tensor)[0]: tensor for tensor in tensors.values()}
    streams = {role: tensor for role, tensor in by_role.items() if role}
    others = {name: tensor for name, tensor in tensors.items() if not _stream(tensor)[0]}
    if len(streams) + len(others) < len(tensors):
        raise BadData(f"it holds more than one clip: {_listing(tensors)}")
    return _File(others | streams, metadata)


def _leaves(content: object) -> Iterator[tuple[str, object]]:
    """The tensors and plain values of nested dicts, lists and NestedTensors, with dotted names."""
    todo, seen = deque([("", content)]), set()
    while todo:
        name, value = todo.popleft()
        if isinstance(value, _NestedTensor):
            value = vars(value).get("tensors")
        if not isinstance(value, dict | list | tuple):
            yield name, value
        elif id(value) not in seen:  # a pickle can hold itself
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            todo.extend((f"{name}.{key}" if name else str(key), inner) for key, inner in items)


def _plain(name: str, value: object) -> Tensor:
    import torch

    if value.layout != torch.strided or value.device.type != "cpu" or not torch.is_floating_point(value):
        raise BadData(f"its tensor {name!r} is {value.dtype} on {value.device}, {value.layout}: not a latent")
    if value.numel() * value.element_size() > MAX_UNPACKED_BYTES:  # a view with stride 0 takes no room in the file
        raise BadData(f"its tensor {name!r} {list(value.shape)} is larger than any latent")
    return container.tensor_of(value)


# ---------------------------------------------------------------- facts of sampling


def _facts(metadata: dict[str, str], tool: str) -> dict[str, str]:
    """Read what the known formats say about the sampling."""
    facts: dict[str, object] = {}
    graph = _json(metadata.get("prompt", ""))
    if isinstance(graph, dict):
        facts = dict(sampling_facts(graph))
    else:
        facts["prompt"] = metadata.get("prompt") or metadata.get("scene_prompt")
    stated = {
        "seed": metadata.get("seeds") or metadata.get("seed"),
        "steps": metadata.get("steps"),
        "shift_video": metadata.get("h3_shift_video"),
        "shift_audio": metadata.get("h3_shift_audio"),
        "producer": tool or metadata.get("format"),
    }
    return _short(facts | {key: value for key, value in stated.items() if value})


def _short(facts: dict[str, object]) -> dict[str, str]:
    stated = {key: str(value) for key, value in facts.items() if value not in (None, "")}
    return {key: text[: MAX_PROMPT_CHARS if key == "prompt" else MAX_FACT_CHARS] for key, text in stated.items()}


def _json(text: str | bytes) -> object | None:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


_INPUTS = {
    "seed": ("noise_seed", "seed"),
    "steps": ("steps",),
    "sampler": ("sampler_name",),
    "shift_video": ("shift_video",),
    "shift_audio": ("shift_audio",),
    "prompt": ("prompt", "text"),
}
_PRIMITIVES = ("value", "int", "float", "string", "text", "seed", "on_true", "on_false")


def sampling_facts(graph: dict[str, object], node_id: str | None = None) -> dict[str, str]:
    """Read seed, steps, sampler, shifts, LoRA names and prompt from a ComfyUI graph in API format.

    The graph is walked upstream from `node_id` (None: from every node that nothing is connected to); what is nearest
    wins. Not looked at is what feeds an input named `negative`, and the side of a switch that is off. A value that is
    itself connected is followed to the primitive node that holds it.
    """
    nodes = _nodes(graph)
    facts: dict[str, object] = {}
    loras: list[str] = []
    for inputs in _upstream(nodes, node_id):
        for fact, names in _INPUTS.items():
            value = next((_scalar(nodes, inputs[name]) for name in names if name in inputs), None)
            if value not in (None, "") and not (fact == "prompt" and not isinstance(value, str)):
                facts.setdefault(fact, value)
        loras += [lora for lora in _loras(nodes, inputs) if lora not in loras]
    return _short(facts | {"lora": ", ".join(loras)})


def _nodes(graph: dict[str, object]) -> dict[str, dict[str, object]]:
    """The inputs of each node that count."""
    found = {str(key): node.get("inputs") for key, node in graph.items() if isinstance(node, dict)}
    nodes = {key: dict(inputs) for key, inputs in found.items() if isinstance(inputs, dict)}
    for inputs in nodes.values():
        inputs.pop("negative", None)
    for inputs in nodes.values():  # ComfySwitchNode, in the official templates before LoRA and steps
        if "switch" in inputs:
            inputs.pop("on_false" if _scalar(nodes, inputs["switch"]) else "on_true", None)
    return nodes


def _upstream(nodes: dict[str, dict[str, object]], node_id: str | None) -> Iterator[dict[str, object]]:
    """The inputs of every node that has a part in the result of `node_id`, the nearest first."""
    links = {key: [str(value[0]) for value in inputs.values() if _linked(value)] for key, inputs in nodes.items()}
    ends = nodes.keys() - {source for sources in links.values() for source in sources}
    queue = deque([node_id] if node_id in nodes else sorted(ends))
    seen = set(queue)
    while queue:
        key = queue.popleft()
        yield nodes[key]
        fresh = [source for source in dict.fromkeys(links[key]) if source in nodes and source not in seen]
        seen.update(fresh)
        queue.extend(fresh)


def _linked(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str | int)


def _scalar(nodes: dict[str, dict[str, object]], value: object) -> str | int | float | None:
    """A plain value, or the one that the connected primitive node holds."""
    for _ in range(8):  # reroutes and switches in between
        if not _linked(value):
            break
        inputs = nodes.get(str(value[0]), {})
        value = next((inputs[name] for name in _PRIMITIVES if name in inputs), None)
    return value if isinstance(value, str | int | float) else None


def _loras(nodes: dict[str, dict[str, object]], inputs: dict[str, object]) -> Iterator[str]:
    """LoRA names with their strengths: of loader nodes, and of stackers that keep a table for each."""
    name = _scalar(nodes, inputs.get("lora_name"))
    if name:
        strength = _scalar(nodes, inputs.get("strength_model", inputs.get("strength")))
        yield f"{name}:{strength}" if strength is not None else str(name)
    for entry in inputs.values():
        if isinstance(entry, dict) and isinstance(entry.get("lora"), str) and entry.get("on", True):
            yield f"{entry['lora']}:{entry.get('strength', 1)}"
