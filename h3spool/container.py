"""The safetensors container and its checksum sidecar: bytes to tensors, refusing whatever does not add up.

A safetensors file is an 8-byte little-endian header length, a JSON header, then the tensors without gaps. It is parsed
here and not by the safetensors package because that one accepts duplicate keys and huge headers, and cannot hand
BF16 to numpy. numpy is imported only where numbers are looked at.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from h3spool.errors import BadData, NotFound, explained, from_os_error

if TYPE_CHECKING:
    import numpy as np

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
MAX_HEADER_BYTES = 64 * 1024
MAX_FILE_BYTES = 1 << 30  # 362 frames of 1440x2560 in F32 are 150 MB


@dataclass(frozen=True)
class Tensor:
    """A tensor as it lies in a file: `dtype` is the safetensors name, `data` its little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    def array(self) -> np.ndarray:
        """The values as float32, in `shape`."""
        import numpy as np

        if self.dtype == "BF16":
            wide = np.frombuffer(self.data, "<u2").astype("<u4") << 16
            return wide.view("<f4").reshape(self.shape)
        kind = {"F32": "<f4", "F16": "<f2"}[self.dtype]
        return np.frombuffer(self.data, kind).astype(np.float32).reshape(self.shape)


def tensor_of(value: object) -> Tensor:
    """Take a numpy array or a torch tensor (any device) as it is; float64 becomes F32.

    Raises:
        BadData: it is neither, or not floating point.
    """
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "detach"):
        return _torch_tensor(value)
    import numpy as np

    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        raise BadData(f"a latent must be a floating-point numpy array or torch tensor, this is {_kind(value)}")
    name = "F16" if value.dtype.itemsize == 2 else "F32"
    little = np.ascontiguousarray(value, dtype="<f2" if name == "F16" else "<f4")
    return Tensor(name, value.shape, little.tobytes())


def _torch_tensor(value: object) -> Tensor:
    import torch

    if not torch.is_floating_point(value):
        raise BadData(f"a latent must be floating point, this tensor is {value.dtype}")
    plain = value.detach().to("cpu").contiguous()
    if plain.dtype == torch.bfloat16:
        return Tensor("BF16", tuple(plain.shape), plain.view(torch.int16).numpy().tobytes())
    if plain.dtype != torch.float16:
        plain = plain.float()
    return tensor_of(plain.numpy())


def _kind(value: object) -> str:
    dtype = getattr(value, "dtype", None)
    return f"{type(value).__name__} of {dtype}" if dtype is not None else type(value).__name__


def serialize(tensors: dict[str, Tensor], metadata: dict[str, str]) -> list[bytes | memoryview]:
    """The bytes of a file that holds these tensors, in pieces.

    Raises:
        BadData: the metadata does not fit the header.
    """
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise BadData(
            f"the latent's metadata makes a header of {len(text)} bytes, the limit is {MAX_HEADER_BYTES}; "
            "shorten prompt or title, long workflows belong in the producer file"
        )
    return [struct.pack("<Q", len(text)), text, *(tensor.data for tensor in tensors.values())]


def read_bytes(path: Path | str, limit_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Read a whole regular file, following no link.

    Raises:
        NotFound, NotPermitted, IOFailed: it is not there, is a link or not a plain file, cannot be read.
        BadData: it is larger than `limit_bytes`.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound(f"{path}: no such file") from None
    except OSError as error:
        raise from_os_error(error, "opening", path) from error
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise BadData(f"{path}: not a regular file")
        if info.st_size > limit_bytes:
            raise BadData(f"{path}: {info.st_size} bytes, no such file is larger than {limit_bytes}")
        with explained("reading", path), open(fd, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)


def hash_file(path: Path | str) -> str:
    """SHA-256 of a file as hex, following no link.

    Raises:
        OSError: as `open`; the caller knows what it means.
    """
    digest = hashlib.sha256()
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    seen: dict[str, object] = {}
    for key, value in pairs:
        if key in seen:
            raise BadData(f"the header names {key!r} twice")
        seen[key] = value
    return seen


def parse(raw: bytes, max_header_bytes: int = MAX_HEADER_BYTES) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Split the bytes of a safetensors file into its tensors and its metadata; every byte must be accounted for.

    Tensors of dtypes that no latent has are returned too (with their safetensors dtype name), to be refused by name.

    Raises:
        BadData: a sentence without the path; the caller knows it.
    """
    if len(raw) < 8:
        raise BadData(f"truncated: {len(raw)} bytes are no safetensors file")
    (length,) = struct.unpack_from("<Q", raw)
    if length > max_header_bytes:
        raise BadData(f"its header claims {length} bytes, the limit is {max_header_bytes}: not a latent, or damaged")
    if 8 + length > len(raw):
        raise BadData(f"truncated: its header claims {length} bytes, the file has {len(raw) - 8} after the length")
    try:
        header = json.loads(raw[8 : 8 + length].decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise BadData(f"its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise BadData("its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadData("its metadata is not a table of strings")
    body = memoryview(raw)[8 + length :]
    spans = sorted((_span(name, entry), name) for name, entry in header.items())
    end = 0
    for (begin, stop), name in spans:
        if begin != end:
            raise BadData(f"its header lies: tensor {name!r} begins at byte {begin}, the one before ends at {end}")
        end = stop
    if end > len(body):
        raise BadData(f"truncated: its tensors need {end} bytes, the file has {len(body)}")
    if end < len(body):
        raise BadData(f"padded: its tensors need {end} bytes, the file has {len(body)}")
    return {
        name: Tensor(header[name]["dtype"], tuple(header[name]["shape"]), body[begin:stop])
        for (begin, stop), name in spans
    }, metadata


_ANY_ITEM_BYTES = ITEM_BYTES | {
    "F64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


def _span(name: str, entry: object) -> tuple[int, int]:
    """The byte range of one header entry, once its dtype and shape agree with it."""
    if not isinstance(entry, dict) or {"dtype", "shape", "data_offsets"} - set(entry):
        raise BadData(f"its header has no dtype, shape and data_offsets for tensor {name!r}")
    shape, offsets, dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    if not all(type(number) is int and 0 <= number <= 1 << 48 for number in numbers) or len(offsets) != 2:
        raise BadData(f"its header lies: tensor {name!r} has shape {shape} at bytes {offsets}")
    if not isinstance(dtype, str) or dtype not in _ANY_ITEM_BYTES:
        raise BadData(f"tensor {name!r} has the unknown dtype {dtype!r}")
    need = prod(shape) * _ANY_ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != need:
        raise BadData(
            f"its header lies: tensor {name!r}, {dtype} {shape}, needs {need} bytes, "
            f"its range has {offsets[1] - offsets[0]}"
        )
    return offsets[0], offsets[1]


# ---------------------------------------------------------------- checksum sidecars

_CHECKSUM_LINES = (
    re.compile(r"\\?([0-9a-fA-F]{64})(?:[ \t]+[ *]?(.+))?"),  # sha256sum, shasum, or the bare digest
    re.compile(r"SHA2?-?256 ?\((.+)\) ?= ?([0-9a-fA-F]{64})"),  # BSD, openssl
)


def sidecar_text(sha256: str, name: str) -> bytes:
    """The sidecar in the format that `sha256sum -c` reads."""
    return f"{sha256}  {name}\n".encode()


def parse_sidecar(text: bytes, name: str, *, strict: bool = False) -> str:
    """The digest that a checksum file gives for `name`, in lower case.

    Lines that name another file count where none names this one (a file is often renamed alone), unless `strict`.

    Raises:
        BadData: no line is a SHA-256 of that file.
    """
    found: list[tuple[str | None, str]] = []
    for line in text.decode("utf-8-sig", "replace").splitlines():
        gnu, bsd = (pattern.fullmatch(line.strip()) for pattern in _CHECKSUM_LINES)
        if gnu:
            found.append((gnu[2], gnu[1].lower()))
        elif bsd:
            found.append((bsd[1], bsd[2].lower()))
    named = [digest for path, digest in found if path and os.path.basename(path) == name]
    digests = set(named or (digest for path, digest in found if not (strict and path)))
    if len(digests) != 1:
        raise BadData(f"its checksum file holds {len(digests) or 'no'} SHA-256 lines for {name}")
    return digests.pop()
