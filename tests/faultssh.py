"""An sshd of our own on 127.0.0.1, and the processes below a process."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faultlib import LAUNCH, REPO, World, memory_folder, need_program, need_root

from bench.sshd import Sshd


class Far:
    """An sshd on 127.0.0.1, an `ssh` that knows it as `peer`, and the h3spool that it runs."""

    def __init__(self, server: Sshd):
        self.folder, self.script, self.daemon = server.home, server.script, server.process
        self.h3spool = server.script("h3spool", f'PYTHONPATH={REPO} exec {sys.executable} -c "{LAUNCH}" "$@"')
        self.env = server.env | {"PYTHONPATH": str(REPO)}

    def start(self, *argv: object, **options) -> subprocess.Popen:
        """Start `h3spool ARGV` as a program of its own."""
        words = [sys.executable, "-c", LAUNCH, *map(str, argv)]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(words, env=self.env, text=True, **streams, **options)

    def push(self, world: World, *more: object, command: Path | None = None, spool: Path | None = None) -> tuple:
        """The arguments of a push to the peer."""
        remote = ("--remote-command", command or self.h3spool)
        return ("push", "--to", f"peer:{world.decoder}", *remote, *more, "-s", spool or world.sampler)


def kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def processes() -> dict[int, tuple[int, str]]:
    """pid -> (parent, command line) of every process."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(re.search(r"PPid:\t(\d+)", (folder / "status").read_text())[1])
            found[int(folder.name)] = parent, (folder / "cmdline").read_text().replace("\0", " ").strip()
        except (OSError, TypeError):
            continue
    return found


def descendants(pid: int) -> dict[int, str]:
    """Every process below `pid`, with its command line."""
    everyone, found, fresh = processes(), {}, {pid}
    while fresh:
        fresh = {child for child, (parent, _) in everyone.items() if parent in fresh and child not in found}
        found |= {child: everyone[child][1] for child in fresh}
    return found


@contextmanager
def far_node() -> Iterator[Far]:
    """An sshd for the time of the block."""
    need_root()
    need_program("sshd", "ssh", "ssh-keygen", "rsync")
    with memory_folder() as folder, Sshd(folder) as server:
        try:
            yield Far(server)
        finally:
            for pid in descendants(server.process.pid):
                kill(pid)
