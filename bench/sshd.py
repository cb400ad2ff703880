"""A real sshd on 127.0.0.1 with keys of its own, and an `ssh` (first in PATH) that reaches it as the host `peer`."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {home}/host
AuthorizedKeysFile {home}/authorized
PidFile none
StrictModes no
PasswordAuthentication no
UsePAM no
MaxStartups 100
"""
CLIENT = """\
Host peer
  HostName 127.0.0.1
  Port {port}
  IdentityFile {home}/user
  IdentitiesOnly yes
  UserKnownHostsFile {home}/known
  GlobalKnownHostsFile /dev/null
"""


class Sshd:
    """Runs while the `with` block does. `bin` holds the `ssh` to put first in PATH; `home` its keys and settings."""

    def __init__(self, root: Path):
        self.home, self.bin = root / "sshd", root / "sshd" / "bin"
        self.bin.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        for key in ("host", "user"):
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.home / key]
            subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
        self.authorize()
        self.trust((self.home / "host.pub").read_text())
        (self.home / "sshd_config").write_text(CONFIG.format(port=self.port, home=self.home))
        (self.home / "ssh_config").write_text(CLIENT.format(port=self.port, home=self.home))
        ssh = self.bin / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.home}/ssh_config "$@"\n')
        ssh.chmod(0o755)

    def authorize(self, options: str = "") -> None:
        """Accept the user's key, with `options` of authorized_keys."""
        (self.home / "authorized").write_text(f"{options} {(self.home / 'user.pub').read_text()}".lstrip())

    def trust(self, key: str) -> None:
        """Make `key` the one that is known of the host."""
        (self.home / "known").write_text(f"[127.0.0.1]:{self.port} {' '.join(key.split()[:2])}\n")

    @property
    def env(self) -> dict[str, str]:
        """The environment in which `ssh peer` reaches it."""
        return os.environ | {"PATH": f"{self.bin}:{os.environ['PATH']}"}

    def __enter__(self) -> "Sshd":
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        argv = [shutil.which("sshd") or "/usr/sbin/sshd", "-D", "-e", "-f", self.home / "sshd_config"]
        self._log = open(self.home / "log", "wb")
        self._server = subprocess.Popen(argv, stderr=self._log)
        for _ in range(500):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", self.port)) == 0:
                    return self
            time.sleep(0.01)
        raise RuntimeError(f"sshd did not start: {(self.home / 'log').read_text()}")

    def __exit__(self, *_: object) -> None:
        self._server.terminate()
        self._server.wait(10)
        self._log.close()
