"""Running ffmpeg: which one, as a child that is fed and reaped, and as a filter of bytes."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
from collections import deque
from typing import TYPE_CHECKING

from h3spool.child import mortal
from h3spool.errors import IOFailed, Unavailable, explained

if TYPE_CHECKING:
    import numpy as np

STDERR_LINES = 100
QUIET = shlex.split("-nostdin -hide_banner -nostats -y -loglevel level+warning")  # level: each line begins with its own
MISSING_ENCODER = "Unknown encoder|Cannot load lib|No capable devices found|required Nvidia driver|CUDA_ERROR_NO_DEVICE"


def find(override: str | None = None) -> str:
    """Return the ffmpeg to use: `override` (a path or a name in PATH), else the one that imageio-ffmpeg ships.

    Raises:
        Unavailable: there is none, or it does not run.
    """
    exe = override
    if not override:
        try:
            import imageio_ffmpeg

            exe = imageio_ffmpeg.get_ffmpeg_exe()
        except (ImportError, RuntimeError) as err:
            raise Unavailable(f"ffmpeg: none found ({err}); install imageio-ffmpeg or give --ffmpeg") from err
    version(exe)
    return exe


@functools.lru_cache
def version(exe: str) -> str:
    """Return the version of `exe`, such as `9.0.2`.

    Raises:
        Unavailable: it is missing, does not run, or is not ffmpeg.
    """
    try:
        with Ffmpeg([exe, "-version"], stdout=subprocess.PIPE) as child:
            answer = child.process.stdout.read().decode(errors="replace")
    except (IOFailed, OSError) as err:
        raise Unavailable(f"ffmpeg: {exe} does not run ({err}); name a working one with --ffmpeg") from err
    found = re.match(r"ffmpeg version n?(\S+)", answer)
    if not found:
        raise Unavailable(f"{exe} -version does not answer like ffmpeg; name a working one with --ffmpeg")
    return found[1]


def unpack(exe: str, data: bytes, argv: list[str], kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """What ffmpeg makes of `data`, by the options `argv` for an input and an output: an array of this type and shape.

    Raises:
        IOFailed: it makes something else of it, or does not run.
    """
    import numpy as np

    whole = mortal([exe, "-hide_banner", "-nostats", "-loglevel", "error", *argv])
    with explained("running", exe):
        done = subprocess.run(whole, input=data, capture_output=True, check=False)
    need = int(np.prod(shape)) * np.dtype(kind).itemsize
    if done.returncode or len(done.stdout) != need:
        said = done.stderr.decode(errors="replace").strip()[-500:]
        raise IOFailed(f"{len(data)} bytes unpack to {len(done.stdout)} bytes, not to {need}; ffmpeg says: {said}")
    return np.frombuffer(done.stdout, kind).reshape(shape)


class Ffmpeg:
    """A running ffmpeg: frames go to `write`, what it says is kept, leaving the block reaps it.

    Leaving normally waits for it and raises when it failed or complained; an exception kills it. It has its own
    session, so that Ctrl-C reaches h3spool alone, and dies (by setpriv) with the thread that started it.
    """

    def __init__(self, argv: list[str], pass_fds: tuple[int, ...] = (), stdout: int = subprocess.DEVNULL):
        if shutil.which(argv[0]) is None:
            raise Unavailable(f"ffmpeg: {argv[0]} is not an executable file; correct --ffmpeg or H3SPOOL_FFMPEG")
        self.output = argv[-1]
        self.lines: deque[str] = deque(maxlen=STDERR_LINES)
        pipes = {"stdin": subprocess.PIPE, "stdout": stdout, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(mortal(argv), **pipes, pass_fds=pass_fds, start_new_session=True)
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()

    def __enter__(self) -> Ffmpeg:
        return self

    def write(self, data: memoryview) -> None:
        """Send `data` to its standard input; when it has gone, raise why."""
        try:
            self.process.stdin.write(data)
        except BrokenPipeError:
            self._reap()
            raise self._failure() from None

    def __exit__(self, kind, value, trace) -> None:
        try:
            if kind is None:
                self._close_stdin()
                self._reap()
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self._reap()
            self._close_stdin()
        if kind is None and (self.process.returncode or self.errors()):
            raise self._failure()

    def _close_stdin(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # its exit status says why
            self.process.stdin.close()

    def _reap(self) -> None:
        self.process.wait()
        self._reader.join(timeout=5)  # a grandchild may hold the pipe open

    def _drain(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line.decode(errors="replace").rstrip())

    def errors(self) -> list[str]:
        """Return those of its last lines that are errors."""
        return [line for line in self.lines if re.match(r"(\[\w[^]]*\] )*\[(error|fatal)\] ", line)]

    def _failure(self) -> IOFailed | Unavailable:
        said = "\n".join(self.errors() or self.lines)
        status = self.process.returncode
        ended = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        if re.search(MISSING_ENCODER, said):
            return Unavailable(f"ffmpeg cannot use this encoder here; choose another with --codec:\n{said}")
        if "No space left on device" in said:
            return IOFailed(f"no space left on the disk of {self.output}: make room (h3spool gc) and try again")
        return IOFailed(f"ffmpeg {ended} at {self.output}; it said:\n{said or '(nothing)'}")
