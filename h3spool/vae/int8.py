"""INT8 ConvRot: linears whose weights are stored rotated and rounded to 8 bits, and how they are multiplied.

A weight W [out, in] is rotated in groups of g input channels by the regular Hadamard matrix H_g (symmetric, its own
inverse, rows sum to 1), then rounded per row: W H ~ codes * scale. Activations are rotated by the same H, rounded per
token, multiplied as integers, and scaled back. H_4 = ones - 2 * antidiagonal, H_4n = H_n (x) H_4, divided by sqrt(g).
The format is ComfyUI's `int8_tensorwise` with `convrot`; the arithmetic is that of comfy-kitchen's eager backend.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from h3spool.errors import NotUsable
from h3spool.vae import cpu

GROUPS = (256, 64, 16, 4)
SMALLEST_SCALE = 1e-30  # the zero token's row is all zero in the first block
ROWS = {"cpu": cpu.STRIP, "cuda": 4096}  # a product at once: its int32 result takes 4 bytes * rows * outputs
MOST_LOST_DB = 0.5  # by a rotation in bfloat16, beside the reference
MARKER = ".comfy_quant"


# ---- the arithmetic ------------------------------------------------------------------------------------------------


@cache
def hadamard(group: int, device: torch.device) -> Tensor:
    """H [g, g], float32; `group` is a power of 4."""
    four = torch.ones(4, 4) - 2 * torch.eye(4).flip(0)
    matrix = torch.ones(1, 1)
    while len(matrix) < group:
        matrix = torch.kron(matrix, four)
    return (matrix / group**0.5).to(device)


def rotate(x: Tensor, group: int) -> Tensor:
    """x: [..., K] -> x H, in consecutive groups of channels, in x's dtype; group 0 is no rotation. Never x itself."""
    if not group:
        return x.clone()
    return (x.reshape(-1, group) @ hadamard(group, x.device).to(x.dtype)).view(x.shape)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [M, K] -> codes int8 [M, K] and scales float32 [M, 1], x ~ codes * scale; half to even.

    A float32 x is used up. The two extrema take a third of the time of the largest magnitude, and dividing in place
    half of that of a new tensor (Zen 3, 1797 rows of 8192: 8.7 ms in all, against 26.6).
    """
    largest = torch.maximum(x.amax(dim=-1, keepdim=True), x.amin(dim=-1, keepdim=True).neg_())
    scale = largest.float().div_(127).clamp_(min=SMALLEST_SCALE)
    return x.float().div_(scale).round_().clamp_(-128, 127).to(torch.int8), scale  # unclamped, 128 would wrap to -128


def quantise(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """weight: [out, in] float32 -> codes int8 [out, in] and scales float32 [out, 1]."""
    return round_rows(rotate(weight.float(), group))


def dequantise(codes: Tensor, scale: Tensor, group: int) -> Tensor:
    """The float32 weight [out, in] that codes and scales stand for."""
    return rotate(codes.float().mul_(scale), group)


def group_for(inputs: int) -> int:
    """The group to quantise with: the largest of 256, 64, 16, 4 that divides the input width, else 0."""
    return next((group for group in GROUPS if inputs % group == 0), 0)


def reference(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor, group: int) -> Tensor:
    """The exact product: x [M, K] float32 -> [M, out] float32. Slow: integers are multiplied in float64."""
    rounded, row_scale = round_rows(rotate(x, group))
    acc = (rounded.double() @ codes.double().T).float()  # |sum| < 2^53: exact; float() rounds as from int32
    return acc * (row_scale * scale.T) + bias


# ---- products on devices -------------------------------------------------------------------------------------------

Product = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""x [M, K], codes, scale, bias, group -> [M, out]; float32 on the CPU, x's dtype on CUDA."""


def integer_product(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor, group: int, turning: torch.dtype = torch.float32
) -> Tensor:
    """torch's own integer product, in strips of rows, with the scales applied in float32 and in place.

    Not torch's quantised linear: with signed activations it falls to a reference, thousands of times slower.
    Rotating in bfloat16 (`turning`) loses 0.2 dB and takes a quarter of the time where it is native (Zen 5: 4.4 against
    20.4 ms for 1797 rows of 2048): H is exact in it, and the result is rounded to eight bits anyway.
    """
    y = torch.empty(len(x), len(codes), dtype=x.dtype, device=x.device)
    most = ROWS[x.device.type]
    acc = torch.empty(max(32, min(most, len(x))), len(codes), dtype=torch.int32, device=x.device)
    for strip, target in zip(x.split(most), y.split(most), strict=True):
        rounded, row_scale = round_rows(rotate(strip.to(turning if group else torch.float32), group))
        if x.is_cuda and len(strip) <= 16:  # cuBLASLt wants more than 16 rows
            rounded = F.pad(rounded, (0, 0, 0, 32 - len(strip)))
        part = torch._int_mm(rounded, codes.t(), out=acc[: len(rounded)])
        wide = target if target.dtype == torch.float32 else torch.empty_like(target, dtype=torch.float32)
        torch.addcmul(bias, wide.copy_(part[: len(strip)]).mul_(row_scale), scale.T, out=wide)
        if wide is not target:
            target.copy_(wide)
    return y


def kitchen_product(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor, group: int) -> Tensor:
    """comfy-kitchen's fused kernels."""
    import comfy_kitchen

    turing = torch.cuda.get_device_capability(x.device) < (8, 0)
    if turing and codes.shape[1] > 4096:  # there its wide rotation runs in x's dtype: a float16 overflows by it
        return integer_product(x, codes, scale, bias, group)
    how = {"convrot": bool(group), "convrot_groupsize": group or 256}
    return comfy_kitchen.int8_linear(x, codes, scale, bias.to(x.dtype), out_dtype=x.dtype, **how)


@dataclass(frozen=True)
class Backend:
    """How int8 products run on a device: `product` is None where de-quantised floats are the better way."""

    name: str
    product: Product | None


@cache
def backend(device: torch.device) -> Backend:
    """Choose for a device, by what it is and by a self-test against `reference`."""
    turning = torch.float32
    if device.type == "cuda":
        candidate = _cuda_candidate(device)
    elif cpu.flags() & {"avx512_vnni", "avx_vnni", "amx_int8"}:
        turning = torch.bfloat16 if cpu.has_bfloat16() else turning
        candidate = Backend("torch integer product", partial(integer_product, turning=turning))
    else:  # torch's product is exact there too, and 35 times slower than float32 (measured on Zen 3)
        candidate = Backend("de-quantised: this processor has no VNNI", None)
    if candidate.product is not None and (fault := self_test(candidate.product, device, turning)):
        return Backend(f"de-quantised: {candidate.name} failed its self-test ({fault})", None)
    return candidate


def _cuda_candidate(device: torch.device) -> Backend:
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) == (9, 0):
        return Backend("de-quantised: int8 is slower than fp16 on sm90", None)
    if (major, minor) < (7, 5):
        return Backend(f"de-quantised: sm{major}{minor} has no int8 tensor cores", None)
    cuda = int((torch.version.cuda or "0").split(".")[0])
    try:
        import comfy_kitchen  # noqa: F401
    except ImportError:
        return Backend("torch integer product (comfy-kitchen is not installed)", integer_product)
    if cuda < 13:  # its CUDA kernels need 13; below it would silently run its eager code
        return Backend("torch integer product (comfy-kitchen needs CUDA 13)", integer_product)
    return Backend("comfy-kitchen", kitchen_product)


def self_test(product: Product, device: torch.device, turning: torch.dtype = torch.float32) -> str:
    """Hold a product to `reference` on a small random layer with a zero row; returns what is wrong, or "".

    Where the rotation rounds to bfloat16, which moves codes by one, it may lose half a decibel of what 8 bits leave.
    """
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(37, 512, generator=draw)
    x[5] = 0
    weight, bias = torch.randn(96, 512, generator=draw), torch.randn(96, generator=draw)
    codes, scale = quantise(weight, 256)
    wanted = reference(x, codes, scale, bias, 256)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    try:
        got = product(x.to(device, dtype), codes.to(device), scale.to(device), bias.to(device), 256).float().cpu()
    except (RuntimeError, TypeError) as error:
        return str(error).splitlines()[0]
    if not torch.isfinite(got).all():
        return "not finite"
    if turning == torch.bfloat16:
        exact = F.linear(x, weight, bias)
        lost = snr_db(exact, wanted) - snr_db(exact, got)
        return f"{lost:.1f} dB worse than the reference" if lost > MOST_LOST_DB else ""
    off = float((got - wanted).norm() / wanted.norm())
    bound = 2e-3 if dtype == torch.float16 else 2e-4
    return f"relative error {off:.1e}" if off > bound else ""


def snr_db(wanted: Tensor, got: Tensor) -> float:
    """Signal to noise in decibels."""
    return float(10 * torch.log10(wanted.square().sum() / (wanted - got).square().sum()))


# ---- the layer -----------------------------------------------------------------------------------------------------


class Int8Linear(nn.Module):
    """A linear stored as codes [out, in], scales [out, 1] and a float32 bias; the twin of `video.Linear`."""

    def __init__(self, inputs: int, outputs: int, group: int):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=torch.int8), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(outputs, 1), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False)

    def at(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """Return the function that multiplies in `dtype`: int8 as stored, a float with a de-quantised copy."""
        return self.parts(dtype, [slice(None)])[0]

    def parts(self, dtype: torch.dtype, rows: Iterable[slice]) -> list[Callable[[Tensor], Tensor]]:
        """Return such functions of some of its rows each."""
        return [self._part(dtype, self.weight[some], self.weight_scale[some], self.bias[some]) for some in rows]

    def _part(self, dtype: torch.dtype, codes: Tensor, scale: Tensor, bias: Tensor) -> Callable[[Tensor], Tensor]:
        if dtype != torch.int8:
            return partial(F.linear, weight=dequantise(codes, scale, self.group).to(dtype), bias=bias.to(dtype))
        product = backend(codes.device).product

        def integer(x: Tensor) -> Tensor:
            return product(x.reshape(-1, x.shape[-1]), codes, scale, bias, self.group).view(*x.shape[:-1], -1)

        return integer


# ---- the format ----------------------------------------------------------------------------------------------------


def group_of(marker: bytes, name: str) -> int:
    """Read a layer's `.comfy_quant` tensor; returns its rotation group, 0 for none.

    Raises:
        NotUsable: it is quantised in another way.
    """
    try:
        facts = json.loads(marker.partition(b"\0")[0])
        facts = {**facts, **facts.get("params", {})}
        kind, rotated, group = facts["format"], bool(facts.get("convrot")), facts.get("convrot_groupsize", 256)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NotUsable(f"{name}{MARKER} is not ComfyUI's description of a quantised layer") from None
    if kind != "int8_tensorwise":
        raise NotUsable(f"{name} is quantised as {kind!r}; h3spool reads int8_tensorwise (int8_convrot) and floats")
    if not rotated:
        return 0
    if not isinstance(group, int) or group not in (4**power for power in range(1, 7)):
        raise NotUsable(f"{name} is rotated in groups of {group!r}; ConvRot's are powers of 4")
    return group


def marker(group: int) -> bytes:
    """What `group_of` reads, byte for byte as ComfyUI writes it."""
    facts = {"format": "int8_tensorwise"} | ({"convrot": True, "convrot_groupsize": group} if group else {})
    return json.dumps(facts).encode()
