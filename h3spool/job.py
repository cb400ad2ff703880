"""One job directory: its files, written whole and durably, its receipt, and its node-local state.json.

    JOB/    JOB.h3latent  JOB.h3latent.sha256  JOB.pipeline.json  [JOB.producer.json]  [state.json]
            [JOB.master.mkv]  [JOB.mp4]

A file is written under a new name in the spool's tmp/ and renamed into the job: readers see the old or the new one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from h3spool import container, receipt
from h3spool.errors import BadData, H3SpoolError, NotFound, NotPermitted, explained

if TYPE_CHECKING:
    from h3spool.spool import Spool

STATE_FILE = "state.json"


def fsync_path(path: Path) -> None:
    """fsync a file or a directory, following no link.

    Raises:
        IOFailed: also for a directory that cannot be fsynced; the caller must write again, never fsync again.
    """
    with explained("fsync", path):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def fsync_tree(path: Path) -> None:
    """fsync every file of a job directory, then the directory."""
    with explained("listing", path), os.scandir(path) as entries:
        files = [Path(entry.path) for entry in entries if entry.is_file(follow_symlinks=False)]
    for file in files:
        fsync_path(file)
    fsync_path(path)


def write_file(path: Path, pieces: Iterable[bytes | memoryview], *, durable: bool = True) -> str:
    """Write a new file to its end, fsync it if `durable`, and return its SHA-256. Nothing stays after a failure.

    Raises:
        IOFailed, NotPermitted
    """
    digest = hashlib.sha256()
    with explained("writing", path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            for piece in pieces:
                rest = memoryview(piece).cast("B")
                digest.update(rest)
                while rest:  # a full disk makes write return short, without an error
                    rest = rest[os.write(fd, rest) :]
            if durable:
                os.fsync(fd)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
    return digest.hexdigest()


@dataclass(frozen=True)
class Outcome:
    """What became of a job: the state it is in now, and the error that kept it from going on."""

    job: str
    state: str
    error: Exception | None = None

    @property
    def exit_code(self) -> int:
        """0, or the error's code."""
        return getattr(self.error, "exit_code", 1) if self.error else 0


class Job:
    """A job directory, wherever in the spool it lies. Only its holder may write in it (rule 1)."""

    def __init__(self, spool: Spool, name: str, path: Path):
        self.spool, self.name, self.path = spool, name, path

    def file(self, suffix: str) -> Path:
        """The path of JOB + suffix in this directory."""
        return self.path / (self.name + suffix)

    @property
    def latent(self) -> Path:
        """The path of the latent."""
        return self.file(".h3latent")

    def expected_digest(self) -> str:
        """The SHA-256 in the sidecar.

        Raises:
            NotFound, BadData, NotPermitted, IOFailed
        """
        sidecar = self.file(".h3latent.sha256")
        try:
            return container.parse_sidecar(container.read_bytes(sidecar, 65536), self.latent.name, strict=True)
        except BadData as error:
            raise BadData(f"{sidecar}: {error}") from None

    def read_latent(self) -> tuple[bytes, str]:
        """The latent's bytes and their SHA-256, which is the one in the sidecar.

        Raises:
            BadData: they differ, or a file is missing.
            NotPermitted, IOFailed
        """
        try:
            expected, raw = self.expected_digest(), container.read_bytes(self.latent)
        except NotFound as error:
            raise BadData(f"incomplete job: {error}") from None
        digest = hashlib.sha256(raw).hexdigest()
        if digest != expected:
            raise BadData(
                f"{self.latent}: SHA-256 is {digest}, the sidecar says {expected}: the file was damaged or replaced "
                "after it was written; send it again from where it came"
            )
        return raw, digest

    def write(self, name: str, data: bytes, *, durable: bool = False) -> None:
        """Put a file into the job, atomically replacing an older one; durable: it outlives a power cut.

        Raises:
            IOFailed, NotPermitted
        """
        fresh = self.spool.tmp_path("file")
        write_file(fresh, [data], durable=durable)
        with explained("writing", self.path / name):
            try:
                os.rename(fresh, self.path / name)
            except OSError:
                fresh.unlink(missing_ok=True)
                raise
        if durable:
            fsync_path(self.path)

    def receipt(self) -> dict:
        """The receipt; an unreadable one is set aside beside it and begun anew."""
        path = self.file(".pipeline.json")
        try:
            found = receipt.parse(container.read_bytes(path, 1 << 24), self.name)
        except NotFound:
            return receipt.begin(self.name)
        except (BadData, NotPermitted):
            found = None
        if found is None:
            with explained("setting aside", path):
                os.rename(path, f"{path}.unreadable")
            return receipt.begin(self.name)
        return found

    def peek(self) -> dict:
        """The receipt as it can be read without holding the job; an empty one where it cannot be read."""
        try:
            found = receipt.parse(container.read_bytes(self.file(".pipeline.json"), 1 << 24), self.name)
        except H3SpoolError:  # on its way to the next state
            found = None
        return found or receipt.begin(self.name)

    def record(self, event: dict, **facts: dict | str) -> None:
        """Add an event to the receipt, and replace top-level facts (title, latent, producer) where given."""
        account = self.receipt() | facts
        account["events"].append(event)
        self.write_receipt(account)

    def write_receipt(self, account: dict, *, durable: bool = False) -> None:
        """Replace the receipt."""
        self.write(f"{self.name}.pipeline.json", receipt.dump(account), durable=durable)

    def state(self) -> dict:
        """state.json: `attempts`, and the `peer` (uuid) this job is bound to. Unreadable reads as empty."""
        try:
            found = json.loads(container.read_bytes(self.path / STATE_FILE, 65536))
        except (NotFound, BadData, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def set_state(self, *, durable: bool = False, **changes: object) -> None:
        """Change state.json; a value of None removes the key. One that names a peer outlives a power cut."""
        state = {key: value for key, value in (self.state() | changes).items() if value is not None}
        self.write(STATE_FILE, json.dumps(state).encode(), durable=durable or "peer" in state)
