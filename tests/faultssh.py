"""An sshd of our own on 127.0.0.1, and the processes below a process."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faultlib import LAUNCH, REPO, World, memory_folder, need_program, need_root


class Far:
    """An sshd on 127.0.0.1 with its own keys, an `ssh` that knows it as `peer`, and the h3spool that it runs."""

    def __init__(self, folder: Path):
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        port = self._free_port()
        for name in ("host", "client"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        host = (folder / "host.pub").read_text().split()
        (folder / "known").write_text(f"[127.0.0.1]:{port} {host[0]} {host[1]}\n")
        (folder / "authorized").write_text((folder / "client.pub").read_text())
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where sshd separates privileges
        (folder / "sshd_config").write_text(
            f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
            f"PidFile none\nStrictModes no\nUsePAM no\nMaxStartups 200\nMaxSessions 100\nPermitRootLogin yes\n"
        )
        (folder / "ssh_config").write_text(
            f"Host peer\n HostName 127.0.0.1\n Port {port}\n User root\n IdentityFile {folder}/client\n"
            f" IdentitiesOnly yes\n UserKnownHostsFile {folder}/known\n StrictHostKeyChecking yes\n"
        )
        ssh, sshd = shutil.which("ssh"), shutil.which("sshd") or "/usr/sbin/sshd"
        self.script("ssh", f'exec {ssh} -F {folder}/ssh_config "$@"')
        self.h3spool = self.script("h3spool", f'PYTHONPATH={REPO} exec {sys.executable} -c "{LAUNCH}" "$@"')
        self.env = os.environ | {"PATH": f"{self.bin}:{os.environ['PATH']}", "PYTHONPATH": str(REPO)}
        self.daemon = subprocess.Popen([sshd, "-D", "-f", folder / "sshd_config", "-E", folder / "log"])
        deadline = time.monotonic() + 20
        while subprocess.run(["ssh", "peer", "true"], env=self.env, capture_output=True, check=False).returncode:
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)

    @staticmethod
    def _free_port() -> int:
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    def script(self, name: str, line: str) -> Path:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
        return path

    def start(self, *argv: object, **options) -> subprocess.Popen:
        """Start `h3spool ARGV` as a program of its own."""
        words = [sys.executable, "-c", LAUNCH, *map(str, argv)]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(words, env=self.env, text=True, **streams, **options)

    def push(self, world: World, *more: object, command: Path | None = None, spool: Path | None = None) -> tuple:
        """The arguments of a push to the peer."""
        remote = ("--remote-command", command or self.h3spool)
        return ("push", "--to", f"peer:{world.decoder}", *remote, *more, "-s", spool or world.sampler)

    def end(self) -> None:
        for pid in descendants(self.daemon.pid):
            kill(pid)
        self.daemon.kill()
        self.daemon.wait()


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
    with memory_folder() as folder:
        far = Far(folder)
        try:
            yield far
        finally:
            far.end()
