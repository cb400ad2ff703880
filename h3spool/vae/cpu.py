"""What the processor can do."""

from functools import cache
from pathlib import Path

STRIP = 304  # rows to compute at once where more would leave the cache, or cost page faults
CHANNELS = 1024  # of the gated product at once, likewise


@cache
def flags() -> frozenset[str]:
    """Vendor and instruction sets of this processor, as /proc/cpuinfo spells them."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    return frozenset(
        flag for name, _, value in lines if name.strip() in ("flags", "vendor_id") for flag in value.split()
    )


def has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 in hardware."""
    return not flags().isdisjoint(("avx512_bf16", "amx_bf16"))
