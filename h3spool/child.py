"""A child process whose stderr is drained, whose exit status is read, and that dies with us."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from h3spool.errors import Unavailable


def mortal(argv: Sequence[str | os.PathLike[str]]) -> list[str | os.PathLike[str]]:
    """A command that is killed when the thread that starts it ends, where setpriv is installed."""
    setpriv = shutil.which("setpriv")
    return [*([setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []), *argv]


class Child:
    """A child process whose stderr is drained, and that dies with us."""

    def __init__(self, argv: list[str], *, talk: bool = False):
        if shutil.which(argv[0]) is None:  # setpriv would report it as an exit status
            raise Unavailable(f"{argv[0]}: not installed on this node")
        pipe = subprocess.PIPE if talk else subprocess.DEVNULL
        self.process = subprocess.Popen(
            mortal(argv),
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.PIPE,
            env=os.environ | {"LC_ALL": "C"},
        )
        self._lines: deque[str] = deque(maxlen=50)
        self._drain = threading.Thread(target=self._read_errors, daemon=True)
        self._drain.start()

    def _read_errors(self) -> None:
        with self.process.stderr as stream:
            for line in stream:
                self._lines.append(line.decode("utf-8", "replace").strip())

    def read_line(self) -> bytes:
        """One line of the child's stdout, empty at its end."""
        return self.process.stdout.readline(1 << 20)

    @contextmanager
    def deadline(self, timeout_s: float) -> Iterator[None]:
        """Kill the child if the block takes longer: what hangs over there must not hang here."""
        timer = threading.Timer(timeout_s, self.process.kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def wait(self) -> int:
        """Wait for the end; returns the exit status."""
        status = self.process.wait()
        self._drain.join(5)
        return status

    def finish(self, timeout_s: float = 10) -> int:
        """Close the child's stdin and wait a while, then kill it; returns the exit status."""
        try:
            if self.process.stdin:
                self.process.stdin.close()
            self.process.wait(timeout_s)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
        if self.process.stdout:
            self.process.stdout.close()
        return self.wait()

    def kill(self) -> None:
        """End the child now."""
        self.process.kill()
        self.finish()

    def errors(self) -> list[str]:
        """The last lines of stderr."""
        return [line for line in self._lines if line]

    def last_error(self) -> str:
        """The last line of stderr."""
        return (self.errors() or ["no message"])[-1]
