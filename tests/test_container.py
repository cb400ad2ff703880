"""Safetensors files written here byte by byte: what parses, and each way in which one is refused."""

import hashlib
import json
import os
import struct

import numpy as np
import pytest
import torch

from h3spool import container
from h3spool.errors import BadData, NotFound, NotPermitted


def safetensors(header: object, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(dtype="F32", shape=(2,), begin=0, end=8) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_a_plain_file_gives_its_tensors_and_metadata():
    raw = safetensors({"__metadata__": {"a": "b"}, "x": entry()}, struct.pack("<2f", 1.5, -2))
    tensors, metadata = container.parse(raw)
    assert metadata == {"a": "b"}
    assert tensors["x"].array().tolist() == [1.5, -2.0]


def test_what_is_written_is_read_by_the_safetensors_package(tmp_path):
    from safetensors.numpy import load_file

    values = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    pieces = container.serialize({"x": container.tensor_of(values)}, {"note": "猫"})
    (tmp_path / "x").write_bytes(b"".join(bytes(piece) for piece in pieces))
    assert np.array_equal(load_file(tmp_path / "x")["x"], values)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (torch.tensor([1.0, -2.5]), "F32"),
        (torch.tensor([1.0, -2.5], dtype=torch.float64), "F32"),
        (torch.tensor([1.0, -2.5], dtype=torch.float16), "F16"),
        (torch.tensor([1.0, -2.5], dtype=torch.bfloat16), "BF16"),
        (torch.tensor([1.0, 9.0, -2.5])[::2].requires_grad_(), "F32"),
        (np.array([1.0, -2.5], ">f4"), "F32"),
        (np.array([1.0, -2.5], "f2"), "F16"),
        (np.array([1.0, 9.0, -2.5])[::2], "F32"),
    ],
)
def test_a_tensor_is_taken_as_it_is(value, dtype):
    taken = container.tensor_of(value)
    assert (taken.dtype, taken.shape) == (dtype, (2,))
    assert taken.array().tolist() == [1.0, -2.5]


@pytest.mark.parametrize("value", [np.zeros(2, int), torch.zeros(2, dtype=torch.int8), [1.0, 2.0], None, "x"])
def test_what_is_no_floating_point_tensor_is_refused(value):
    with pytest.raises(BadData, match="floating"):
        container.tensor_of(value)


# ---------------------------------------------------------------- files that do not add up

F32 = struct.pack("<2f", 1, 2)
BROKEN = {
    "empty": (b"", "truncated: 0 bytes are no safetensors file"),
    "seven bytes": (b"\0" * 7, "truncated: 7 bytes"),
    "length beyond the file": (safetensors({}, length=4000), "truncated: its header claims 4000 bytes, the file has 2"),
    "length of 2^63": (safetensors({}, length=1 << 63), "claims 9223372036854775808 bytes, the limit is 65536"),
    "length too short": (safetensors({"x": entry()}, F32, length=20), "its header is not JSON"),
    "length too long": (safetensors({"x": entry()}, F32, length=64), "its header is not JSON"),
    "header too long": (safetensors(b"{}" + b" " * 65536), "claims 65538 bytes, the limit is 65536"),
    "not JSON": (safetensors(b"{'x': 1}"), "its header is not JSON"),
    "not UTF-8": (safetensors(b'{"\xff": 1}'), "its header is not JSON"),
    "nested beyond reason": (safetensors(b"[" * 60000), "its header is not JSON"),
    "a list": (safetensors([1]), "its header is not a JSON object"),
    "a tensor twice": (
        safetensors(b'{"x":%s,"x":%s}' % ((json.dumps(entry()).encode(),) * 2), F32),
        "the header names 'x' twice",
    ),
    "metadata twice": (safetensors(b'{"__metadata__":{"a":"1","a":"2"}}'), "the header names 'a' twice"),
    "metadata of numbers": (safetensors({"__metadata__": {"frames": 5}}), "its metadata is not a table of strings"),
    "metadata a list": (safetensors({"__metadata__": []}), "its metadata is not a table of strings"),
    "entry a number": (safetensors({"x": 3}), "no dtype, shape and data_offsets for tensor 'x'"),
    "entry without shape": (
        safetensors({"x": {"dtype": "F32", "data_offsets": [0, 8]}}, F32),
        "no dtype, shape and data_offsets for tensor 'x'",
    ),
    "unknown dtype": (safetensors({"x": entry("F12")}, F32), "tensor 'x' has the unknown dtype 'F12'"),
    "dtype a list": (safetensors({"x": entry(["F32"])}, F32), r"tensor 'x' has the unknown dtype \['F32'\]"),
    "dtype null": (safetensors({"x": entry(None)}, F32), "tensor 'x' has the unknown dtype None"),
    "negative shape": (safetensors({"x": entry(shape=(-2,))}, F32), r"its header lies: tensor 'x' has shape \[-2\]"),
    "shape of booleans": (safetensors({"x": entry(shape=(True, 2))}, F32), "its header lies: tensor 'x' has shape"),
    "shape of floats": (safetensors({"x": entry(shape=(2.0,))}, F32), "its header lies: tensor 'x' has shape"),
    "shape a number": (safetensors({"x": entry() | {"shape": 2}}, F32), "its header lies: tensor 'x' has shape 2"),
    "three offsets": (safetensors({"x": entry() | {"data_offsets": [0, 8, 8]}}, F32), "its header lies: tensor 'x'"),
    "astronomic shape": (safetensors({"x": entry(shape=(1 << 40, 1 << 40))}, F32), "needs .* bytes, its range has 8"),
    "range too short": (
        safetensors({"x": entry(shape=(3,))}, F32),
        r"its header lies: tensor 'x', F32 \[3\], needs 12 bytes, its range has 8",
    ),
    "backward range": (safetensors({"x": entry(begin=8, end=0)}, F32), "its range has -8"),
    "overlap": (
        safetensors({"x": entry(), "y": entry(begin=4, end=12)}, F32 + F32),
        "its header lies: tensor 'y' begins at byte 4, the one before ends at 8",
    ),
    "the same bytes twice": (
        safetensors({"x": entry(), "y": entry()}, F32),
        "tensor 'y' begins at byte 0, the one before ends at 8",
    ),
    "hole": (
        safetensors({"x": entry(), "y": entry(begin=12, end=20)}, F32 * 3),
        "its header lies: tensor 'y' begins at byte 12, the one before ends at 8",
    ),
    "hole at the start": (safetensors({"x": entry(begin=4, end=12)}, F32 * 2), "'x' begins at byte 4"),
    "truncated by a byte": (safetensors({"x": entry()}, F32[:-1]), "truncated: its tensors need 8 bytes.* has 7"),
    "padded by a byte": (safetensors({"x": entry()}, F32 + b"\0"), "padded: its tensors need 8 bytes.* has 9"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_does_not_add_up_is_refused(case):
    raw, sentence = BROKEN[case]
    with pytest.raises(BadData, match=sentence):
        container.parse(raw)


def test_every_prefix_of_a_file_is_refused():
    raw = safetensors({"__metadata__": {"a": "b"}, "x": entry()}, F32)
    for end in range(len(raw)):
        with pytest.raises(BadData):
            container.parse(raw[:end])


def test_metadata_that_does_not_fit_the_header_is_refused():
    with pytest.raises(BadData, match="shorten prompt or title"):
        container.serialize({"x": container.Tensor("F32", (2,), F32)}, {"prompt": "x" * 65536})


# ---------------------------------------------------------------- reading


def test_reading_follows_no_link(tmp_path):
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(NotPermitted, match="symbolic link"):
        container.read_bytes(tmp_path / "link")


def test_only_plain_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(BadData, match="not a regular file"):
            container.read_bytes(path)
    with pytest.raises(NotFound, match="no such file"):
        container.read_bytes(tmp_path / "nothing")


def test_a_file_beyond_the_limit_is_not_read(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert container.read_bytes(tmp_path / "x", 5) == b"12345"
    with pytest.raises(BadData, match="5 bytes, no such file is larger than 4"):
        container.read_bytes(tmp_path / "x", 4)


# ---------------------------------------------------------------- checksum sidecars

DIGEST = hashlib.sha256(b"latent").hexdigest()


@pytest.mark.parametrize(
    "text",
    [
        f"{DIGEST}  clip.h3latent\n",
        f"{DIGEST} *clip.h3latent\r\n",
        f"{DIGEST}\tdir/clip.h3latent",
        f"\\{DIGEST}  clip.h3latent\n",
        f"{DIGEST.upper()}  C.h3latent\n",
        f"{DIGEST}\n\n",
        f"\ufeff{DIGEST}  clip.h3latent\n",
        f"SHA256 (clip.h3latent) = {DIGEST}\n",
        f"SHA2-256(clip.h3latent)= {DIGEST}\n",
        f"# made by hand\n{'0' * 64}  other.h3latent\n{DIGEST}  clip.h3latent\n",
    ],
)
def test_dialects_of_checksum_files_are_read(text):
    assert container.parse_sidecar(text.encode(), "clip.h3latent") == DIGEST


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\0\xff",
        DIGEST[:-1].encode(),
        f"{DIGEST}0  clip.h3latent".encode(),
        f"{'0' * 64}  a\n{DIGEST}  b\n".encode(),
        f"{'0' * 64}  clip.h3latent\n{DIGEST}  clip.h3latent\n".encode(),
    ],
)
def test_a_checksum_file_that_does_not_say_it_is_refused(text):
    with pytest.raises(BadData, match=r"SHA-256 lines for clip\.h3latent"):
        container.parse_sidecar(text, "clip.h3latent")


def test_our_sidecar_is_what_sha256sum_reads(tmp_path):
    import subprocess

    (tmp_path / "a.h3latent").write_bytes(b"latent")
    (tmp_path / "a.sha256").write_bytes(container.sidecar_text(DIGEST, "a.h3latent"))
    assert subprocess.run(["sha256sum", "-c", "a.sha256"], cwd=tmp_path, check=False).returncode == 0
