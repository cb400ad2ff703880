"""A real sshd on 127.0.0.1 with keys of its own, and an `ssh` (first in PATH) that reaches it by names of its own."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from itertools import starmap
from pathlib import Path

SERVER = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {home}/host
AuthorizedKeysFile {home}/authorized
PidFile none
StrictModes no
PasswordAuthentication no
UsePAM no
MaxStartups 200
MaxSessions 100
PermitRootLogin yes
SetEnv SHLVL=1 {environment}
"""


class Sshd:
    """Runs while the `with` block does. `bin` holds the `ssh` to put first in PATH; `home` its keys, settings and log.

    Its shells count as nested (SHLVL), so that bash does not read .bashrc: what its owner does there is none of our
    business, and it would be killed with -9 in some tests.

    Args:
        root: an existing folder.
        environment: of the commands it runs, as NAME=VALUE.
        hosts: names by which `ssh` knows it, each with what differs from the right settings of ssh_config.
    """

    def __init__(self, root: Path, environment: str = "", hosts: Mapping[str, Mapping[str, object]] | None = None):
        self.home, self.bin = root / "sshd", root / "sshd" / "bin"
        self.bin.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        for name in ("host", "user"):
            self.key(name)
        self.authorize()
        self.trust((self.home / "host.pub").read_text())
        (self.home / "sshd_config").write_text(SERVER.format(port=self.port, home=self.home, environment=environment))
        (self.home / "ssh_config").write_text("".join(starmap(self._host, (hosts or {"peer": {}}).items())))
        self.script("ssh", f'exec {shutil.which("ssh")} -F {self.home}/ssh_config "$@"')

    def _host(self, name: str, differs: Mapping[str, object]) -> str:
        settings = {
            "HostName": "127.0.0.1",
            "Port": self.port,
            "IdentityFile": self.home / "user",
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": self.home / "known",
            "GlobalKnownHostsFile": "/dev/null",
            "LogLevel": "ERROR",
        }
        return f"Host {name}\n" + "".join(f"  {key} {value}\n" for key, value in (settings | dict(differs)).items())

    def key(self, name: str) -> str:
        """Make a pair of keys, `name` and `name`.pub; returns the public one."""
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.home / name]
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
        return (self.home / f"{name}.pub").read_text()

    def script(self, name: str, line: str) -> Path:
        """Put a shell script into `bin`."""
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
        return path

    def authorize(self, options: str = "") -> None:
        """Accept the user's key, with `options` of authorized_keys."""
        (self.home / "authorized").write_text(f"{options} {(self.home / 'user.pub').read_text()}".lstrip())

    def trust(self, key: str, known: str = "known") -> None:
        """Make `key` the one that the file `known` has of the host."""
        (self.home / known).write_text(f"[127.0.0.1]:{self.port} {' '.join(key.split()[:2])}\n")

    @property
    def env(self) -> dict[str, str]:
        """The environment in which `ssh peer` reaches it."""
        return os.environ | {"PATH": f"{self.bin}:{os.environ['PATH']}"}

    def __enter__(self) -> "Sshd":
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where sshd separates privileges
        program = shutil.which("sshd") or "/usr/sbin/sshd"
        argv = [program, "-D", "-E", self.home / "log", "-f", self.home / "sshd_config"]
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        for _ in range(500):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", self.port)) == 0:
                    return self
            time.sleep(0.01)
        raise RuntimeError(f"sshd did not start: {(self.home / 'log').read_text()}")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(10)
