"""What the vector units of this machine can do at most: `peak.c`, compiled for it and run."""

import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("peak.c")


def operations_per_s(threads: int) -> dict[str, float]:
    """Operations a second of "fp32", "bf16" and "int8", as far as the processor has them; empty without a compiler."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "peak"
        try:
            subprocess.run(["cc", "-O2", "-march=native", "-pthread", "-o", program, SOURCE], check=True)
        except FileNotFoundError:
            return {}
        said = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True).stdout
    return {kind: float(rate) for kind, rate in (line.split() for line in said.splitlines())}
