"""How a sampler reaches a decoder's spool: over SSH with rsync, or as a plain path on the same machine.

`begin` starts a push run: the receiver and the copying of job directories into the run's directory in the peer's tmp/,
side by side. Of the run, `greeting` is the receiver's first line; `sent` waits for the copying; `ask` names the jobs
and returns the receiver's answers; `end` ends it. Two runs may overlap. Every child dies with this process (setpriv
--pdeathsig), has its exit status and stderr read, and gets `--` before names.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from h3spool import admit
from h3spool.child import Child
from h3spool.errors import (
    BY_EXIT_CODE,
    BadData,
    H3SpoolError,
    IOFailed,
    NotPermitted,
    NotUsable,
    TryLater,
    Unavailable,
    explained,
)
from h3spool.job import Job
from h3spool.spool import Spool, valid_job

_HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?(?:[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])")
_REMOTE_PATH = re.compile(r"[A-Za-z0-9._~/+@=,][A-Za-z0-9._~/+@=,-]*")
_REMOTE_COMMAND = re.compile(r"[A-Za-z0-9._~/+@=, -]+")
_SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=15", "ServerAliveCountMax=3")
_TRAVELS = (*admit.REQUIRED, *admit.OPTIONAL)
_COMES_BACK = (".mp4", ".pipeline.json")
_SSH_WAIT_S = 30
GREETING_S, ANSWERS_S = 60.0, 600.0  # how long a receiver may be silent; 512 MiB are hashed and fsynced in seconds
_UUID = re.compile(r"[0-9a-f-]{36}")
_GREETING = {"uuid": str, "node": str, "free_bytes": int, "waiting": int, "min_free_bytes": int}


@dataclass(frozen=True)
class Peer:
    """Where to push: `[USER@]HOST:SPOOL`, or a path on this machine (`host` is None)."""

    host: str | None
    path: str

    @classmethod
    def parse(cls, text: str) -> Peer:
        """Read what stands behind --to.

        Raises:
            BadData: a host or remote path with characters that a remote shell could take for something else.
        """
        bracketed = re.match(r"([^/:]*\[[^]/]*\])(:)(.*)", text, re.DOTALL)
        head, colon, tail = bracketed.groups() if bracketed else text.partition(":")
        if not colon or "/" in head:
            return cls(None, text)
        if not _HOST.fullmatch(head):
            raise BadData(f"{head!r} is not a host name; use [USER@]HOST:SPOOL, or a Host of ~/.ssh/config")
        if not _REMOTE_PATH.fullmatch(tail):
            raise BadData(
                f"{tail!r}: a remote spool's path is made of letters, digits and ._~/+@=,- only; rename it there"
            )
        return cls(head, tail)

    def __str__(self) -> str:
        """As --to takes it."""
        return self.path if self.host is None else f"{self.host}:{self.path}"


def _sound_result(entry: dict) -> bool:
    """Whether a line of the peer's results can be worked with; its job's name becomes a path here."""
    return valid_job(str(entry.get("job"))) and isinstance(entry.get("sha256"), str) and type(entry.get("size")) is int


class LocalRun:
    """One push run to a spool on this machine; see `SshRun`."""

    def __init__(self, spool: Spool, greeting: dict, run: Path, jobs: list[Job]):
        self._spool, self._greeting, self._run, self._jobs = spool, greeting, run, jobs

    def greeting(self) -> dict:
        """What the receiver says of its spool."""
        return self._greeting

    def sent(self) -> None:
        """Copy the jobs into the run's directory."""
        for job in self._jobs:
            held = self._run / job.name
            with explained("copying to", held):
                held.mkdir(mode=0o700, parents=True)
                for suffix in _TRAVELS:
                    if job.file(suffix).exists():
                        shutil.copyfile(job.file(suffix), held / job.file(suffix).name)

    def ask(self, manifests: list[dict]) -> list[dict]:
        """Have the jobs admitted; returns one answer a job."""
        return admit.admit(self._spool, self._run, manifests, min_free_bytes=self._greeting["min_free_bytes"])

    def end(self) -> None:
        """Clear away what was not admitted."""
        self._spool.discard_unpublished(self._run)


class LocalLink:
    """A peer spool on this machine: the same hand-over, by copying. `uuid` is that spool's."""

    def __init__(self, peer: Peer, *, min_free_bytes: int):
        self.peer, self._min_free_bytes = peer, min_free_bytes
        self._spool = Spool(peer.path)
        self.uuid: str | None = self._spool.uuid

    def begin(self, run: str, jobs: list[Job]) -> LocalRun:
        """Begin a run with these jobs."""
        greeting = admit.greeting(self._spool) | {"min_free_bytes": self._min_free_bytes}
        return LocalRun(self._spool, greeting, admit.begin_run(self._spool, run), jobs)

    def results(self) -> list[dict]:
        """What the peer has finished: one {job, sha256, size} a job."""
        return list(admit.results(self._spool))

    def fetch(self, jobs: list[str], folder: Path) -> None:
        """Copy finished MP4s and receipts to folder/JOB/."""
        for name in jobs:
            job = self._spool.job("done", name)
            with explained("copying from", job.path):
                (folder / name).mkdir(mode=0o700)
                for suffix in _COMES_BACK:
                    shutil.copyfile(job.file(suffix), folder / name / job.file(suffix).name)

    def close(self) -> None:
        """Nothing is held between runs."""


class SshLink:
    """A peer spool on another machine, over one multiplexed connection that lives as long as this object.

    Args:
        peer: with a host.
        remote_command: how h3spool is called there.
        bwlimit: rsync's --bwlimit (KiB/s, or with a unit), or None.

    Attributes:
        uuid: the peer's spool, None until it has greeted.

    Raises:
        BadData: `remote_command` has characters that a shell would interpret.
    """

    def __init__(self, peer: Peer, *, remote_command: str = "h3spool", bwlimit: str | None = None):
        if not _REMOTE_COMMAND.fullmatch(remote_command):
            raise BadData(f"--remote-command {remote_command!r}: letters, digits, spaces and ._~/+@=,- only")
        self.peer, self._remote_command, self._bwlimit = peer, remote_command, bwlimit
        self._folder, self._lock = _control_folder()
        self.uuid: str | None = None
        self._master: Child | None = None

    # -- the argument lists, also for --dry-run

    def ssh(self, *options: str) -> list[str]:
        """The ssh command up to, not including, `-- HOST`."""
        argv = ["ssh", "-o", f"ControlPath={self._folder}/ssh"]
        for option in (*_SSH_OPTIONS, *options):
            argv += ["-o", option]
        return argv

    def remote(self, *words: str) -> list[str]:
        """Run h3spool over there; `words` are our own and need no quoting."""
        return [*self.ssh(), "--", self.peer.host, self._remote_command, *words]

    def rsync(self, sources: list[str], run: str) -> list[str]:
        """Send job directories to the run's directory."""
        argv = ["rsync", "-rtW", "--chmod=D700,F600", "--timeout=60", "-e", " ".join(self.ssh())]
        argv += [f"--include=*{suffix}" for suffix in _TRAVELS] + ["--include=*/", "--exclude=*"]
        if self._bwlimit:
            argv.append(f"--bwlimit={self._bwlimit}")
        return [*argv, "--", *sources, f"{self.peer.host}:{self.peer.path}/tmp/{run}/"]

    # -- the connection

    def connect(self) -> None:
        """Open the shared connection, or do nothing where it is up.

        Raises:
            Unavailable, NotPermitted, TryLater
        """
        if self._master is not None and self._master.process.poll() is None:
            return
        socket = self._folder / "ssh"
        socket.unlink(missing_ok=True)
        self._master = Child([*self.ssh("ControlMaster=yes", "ControlPersist=no"), "-N", "--", self.peer.host])
        deadline = time.monotonic() + _SSH_WAIT_S
        while not socket.exists():
            if self._master.process.poll() is not None:
                raise self._ssh_failure(self._master)
            if time.monotonic() > deadline:
                self._master.kill()
                raise TryLater(f"{self.peer.host}: no connection after {_SSH_WAIT_S} s")
            time.sleep(0.005)

    def begin(self, run: str, jobs: list[Job]) -> SshRun:
        """Start the receiver of a run and, beside it, rsync where there are jobs.

        Raises:
            Unavailable, NotPermitted, TryLater
        """
        self.connect()
        receiver = Child(self.remote("admit", "--spool", self.peer.path, "--", run), talk=True)
        return SshRun(self, receiver, Child(self.rsync([str(job.path) for job in jobs], run)) if jobs else None)

    def understood(self, facts: dict) -> dict:
        """A greeting that this h3spool can work with, or the failure that it reports."""
        if facts["h3spool_wire"] != admit.WIRE:
            raise NotUsable(
                f"{self.peer}: speaks wire version {facts['h3spool_wire']}, this h3spool {admit.WIRE}: install the "
                "same h3spool on both nodes"
            )
        if "error" in facts:
            raise BY_EXIT_CODE.get(facts.get("exit"), IOFailed)(f"{self.peer.host}: {facts['error']}")
        sound = all(isinstance(facts.get(key), kind) for key, kind in _GREETING.items())
        if not sound or not _UUID.fullmatch(facts["uuid"]):
            raise NotUsable(f"{self.peer}: its greeting makes no sense; is the same h3spool installed on both nodes?")
        self.uuid = facts["uuid"]
        return facts

    def results(self) -> list[dict]:
        """What the peer has finished: one {job, sha256, size} a job.

        Raises:
            NotUsable, Unavailable, NotPermitted, TryLater, and what the peer reports of its spool.
        """
        self.connect()
        child = Child(self.remote("results", "--json", "--spool", self.peer.path), talk=True)
        lines = []
        while line := child.read_line():
            lines.append(line)
        if child.finish():
            raise self.remote_failure(child)
        try:
            found = [json.loads(line) for line in lines if line.startswith(b"{")]
        except ValueError:
            found = [{}]
        if not all(_sound_result(entry) for entry in found):
            raise NotUsable(f"{self.peer}: its answer makes no sense; is the same h3spool installed on both nodes?")
        return found

    def fetch(self, jobs: list[str], folder: Path) -> None:
        """Copy finished MP4s and receipts to folder/JOB/.

        Raises:
            Unavailable, NotUsable, TryLater, IOFailed: by rsync's exit status; some may have arrived all the same.
        """
        argv = ["rsync", "-rtW", "--chmod=D700,F600", "--timeout=60", "-e", " ".join(self.ssh())]
        argv += [f"--include=*{suffix}" for suffix in _COMES_BACK] + ["--include=*/", "--exclude=*"]
        if self._bwlimit:
            argv.append(f"--bwlimit={self._bwlimit}")
        child = Child([*argv, "--", *(f"{self.peer.host}:{self.peer.path}/done/{name}" for name in jobs), f"{folder}/"])
        if status := child.wait():
            raise _rsync_failure(self.peer, status, child.errors())

    def close(self) -> None:
        """End the connection, and with it what still runs over it, and remove the control socket."""
        if self._master is not None:
            self._master.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    # -- what went wrong

    def remote_failure(self, child: Child) -> H3SpoolError:
        """Why h3spool over there ended."""
        status = child.finish()
        if status == 255:
            return self._ssh_failure(child)
        if status < 0:
            return TryLater(f"{self.peer.host}: h3spool there did not answer and was given up")
        if status in (126, 127):
            return Unavailable(
                f"{self.peer.host}: {self._remote_command} is not to be found there ({child.last_error()}); install "
                "h3spool, or say where it is with --remote-command"
            )
        if status in BY_EXIT_CODE:
            return BY_EXIT_CODE[status](f"{self.peer.host}: {child.last_error()}")
        return IOFailed(f"{self.peer.host}: h3spool admit ended with {status}: {child.last_error()}")

    def _ssh_failure(self, child: Child) -> H3SpoolError:
        child.finish()
        host, lines = self.peer.host, child.errors()
        text = " | ".join(lines[-4:]) or f"ssh ended with {child.process.returncode}"
        if re.search(r"No \S+ host key is known", " ".join(lines)):
            return NotPermitted(f"{host}: its host key is not known yet; run `ssh {host}` once and accept it: {text}")
        if re.search(r"Host key verification failed|IDENTIFICATION HAS CHANGED", " ".join(lines)):
            return NotPermitted(f"{host}: its host key is not the one known here; check it, then ssh-keygen -R: {text}")
        if re.search(r"Permission denied|Too many authentication|no matching host key", text):
            return NotPermitted(f"{host}: {text}; `ssh {host} true` must work without a password")
        return TryLater(f"{host}: {text}")


def _control_folder() -> tuple[Path, int]:
    """A fresh folder for the control socket, whose path may have 100 bytes, with a lock that is held while it is used.

    Those of processes that were killed are removed.
    """
    for lock in Path("/tmp").glob("h3spool-*/lock"):
        with suppress(OSError):  # held, or another user's, or gone meanwhile
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
            finally:
                os.close(fd)
    folder = Path(tempfile.mkdtemp(prefix="h3spool-", dir="/tmp"))
    fd = os.open(folder / "fresh", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.rename(folder / "fresh", folder / "lock")  # nobody finds it unlocked
    return folder, fd


class SshRun:
    """One push run over SSH: the receiver, and rsync beside it."""

    def __init__(self, link: SshLink, receiver: Child, rsync: Child | None):
        self._link, self._receiver, self._rsync = link, receiver, rsync

    def greeting(self) -> dict:
        """The receiver's first line; what a login shell prints before it is passed over.

        Raises:
            NotUsable, Unavailable, NotPermitted, TryLater, and what the receiver reports of its spool.
        """
        with self._receiver.deadline(GREETING_S):
            for _ in range(200):
                line = self._receiver.read_line()
                if not line:
                    break
                try:
                    facts = json.loads(line)
                except ValueError:
                    continue
                if isinstance(facts, dict) and "h3spool_wire" in facts:
                    return self._link.understood(facts)
        raise self._link.remote_failure(self._receiver)

    def sent(self) -> None:
        """Wait for rsync.

        Raises:
            NotUsable, TryLater, IOFailed: by its exit status; some jobs may have arrived all the same.
        """
        if status := self._rsync.wait():
            raise _rsync_failure(self._link.peer, status, self._rsync.errors())

    def ask(self, manifests: list[dict]) -> list[dict]:
        """Give the receiver the jobs of the run; one answer a job, fewer where the connection broke."""
        lines = "".join(json.dumps(entry) + "\n" for entry in manifests) + "\n"
        try:
            self._receiver.process.stdin.write(lines.encode())
            self._receiver.process.stdin.flush()
        except OSError:
            return []
        answers = []
        with self._receiver.deadline(ANSWERS_S):
            for _ in manifests:
                try:
                    answers.append(json.loads(self._receiver.read_line()))
                except ValueError:  # the end, or half a line
                    break
        return [answer for answer in answers if isinstance(answer, dict)]

    def end(self) -> None:
        """Let the receiver end; what was not admitted is cleared away when a later run begins."""
        if self._rsync is not None and self._rsync.process.poll() is None:
            self._rsync.kill()
        self._receiver.finish()


_RSYNC_AGAIN = {10: "socket I/O", 11: "file I/O, disk full there?", 12: "protocol stream, rsync missing there?",
                14: "IPC", 20: "interrupted", 23: "partial transfer", 24: "vanished files", 30: "timeout",
                35: "connection timeout", 255: "ssh"}  # fmt: skip


def _rsync_failure(peer: Peer, status: int, errors: list[str]) -> H3SpoolError:
    text = " | ".join(errors[-3:]) or "no message"
    if "is your shell clean" in " ".join(errors):
        return NotUsable(f"{peer.host}: its login shell prints on stdout, which breaks rsync; make it quiet: {text}")
    if status in _RSYNC_AGAIN or status < 0:
        return TryLater(f"{peer}: rsync ended with {status} ({_RSYNC_AGAIN.get(status, 'killed')}): {text}")
    return IOFailed(f"{peer}: rsync ended with {status}: {text}")
