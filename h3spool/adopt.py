"""Adoption: latents that other tools drop loose into incoming/, beside a checksum file that commits them.

`X.h3latent` with `X.sha256` or `X.h3latent.sha256` is copied into tmp/ while it is hashed, published exactly once as
`<stem>-<first 12 of its SHA-256>`, then unlinked, latent first, and only while the names still lead to the files that
were hashed. A pair that does not agree is left alone until it has not changed for `settle_s`, then it goes to failed/.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from h3spool import container, receipt
from h3spool.errors import BadData, H3SpoolError, TryLater, explained
from h3spool.job import Job, Outcome, fsync_path, fsync_tree, write_file
from h3spool.spool import Spool

SETTLE_S = 10.0
_SUFFIX = ".h3latent"

Identity = tuple[int, int, int]


def job_name(stem: str, digest: str) -> str:
    """The name of a job that comes from a file: meeting the same file again is meeting the same job."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip("._-")[:70]
    return f"{safe or 'clip'}-{digest[:12]}"


def loose_files(spool: Spool) -> list[str]:
    """Names of files in incoming/, waiting to be adopted; dot files and `.part` are somebody's work in progress."""
    with explained("listing", spool.root / "incoming"), os.scandir(spool.root / "incoming") as entries:
        names = (entry.name for entry in entries if not entry.is_dir(follow_symlinks=False))
        return sorted(name for name in names if not name.startswith(".") and not name.endswith(".part"))


def adopt(spool: Spool, *, settle_s: float = SETTLE_S) -> Iterator[Outcome]:
    """Adopt every pair that is complete. locks/verify must be held.

    Yields an outcome for each job adopted or quarantined; pairs that must wait are silent.
    """
    _give_back(spool)
    names = set(loose_files(spool))
    for name in sorted(names):
        stem = name.removesuffix(_SUFFIX)
        sidecar = next((side for side in (f"{name}.sha256", f"{stem}.sha256") if side in names), None)
        if name.endswith(_SUFFIX) and sidecar:
            try:
                outcome = _Pair(spool, stem, name, sidecar).adopt(settle_s)
            except H3SpoolError as error:
                outcome = Outcome(name, "incoming", error)
            if outcome:
                yield outcome
        elif name.endswith(".sha256"):
            _drop_finished_sidecar(spool, name, names)


def _give_back(spool: Spool) -> None:
    """Return loose files that were taken into tmp/, which is what a death leaves; meeting one again changes nothing."""
    for folder in sorted((spool.root / "tmp").glob("taken-*")):
        for path in sorted(folder.iterdir()):
            with explained("giving back", path), suppress(FileExistsError):  # replaced meanwhile: that one counts
                os.link(path, spool.root / "incoming" / path.name)
        spool.discard(folder)


def _drop_finished_sidecar(spool: Spool, name: str, names: set[str]) -> None:
    """A death between the two unlinks leaves a sidecar alone; its stem and hash are the job's name."""
    stem = name.removesuffix(".sha256").removesuffix(_SUFFIX)
    if stem + _SUFFIX in names:
        return
    path = spool.root / "incoming" / name
    try:
        digest = container.parse_sidecar(container.read_bytes(path, 65536), stem + _SUFFIX)
    except H3SpoolError:
        return
    record = spool.seen(job_name(stem, digest))
    if record and record["sha256"] == digest and not (spool.root / record["tmp"]).exists():
        with explained("removing", path):
            path.unlink(missing_ok=True)


class _Pair:
    """A loose latent and its checksum file."""

    def __init__(self, spool: Spool, stem: str, latent: str, sidecar: str):
        self.spool, self.stem = spool, stem
        self.latent, self.sidecar = spool.root / "incoming" / latent, spool.root / "incoming" / sidecar

    def adopt(self, settle_s: float) -> Outcome | None:
        """Copy, check, publish, unlink; None when the pair has to wait or is being written."""
        start, before = receipt.now(), self._identities()
        folder = self.spool.tmp_dir("adopt")
        try:
            with explained("creating", folder):
                (folder / "copy").mkdir(mode=0o700)
            digest = write_file(folder / "copy" / "latent", self._chunks())
            try:
                expected = container.parse_sidecar(container.read_bytes(self.sidecar, 65536), self.latent.name)
                reason = f"SHA-256 is {digest}, its checksum file says {expected}" if digest != expected else ""
            except BadData as error:
                reason = str(error)
            if reason and time.time() - self._changed_s() < settle_s:
                return None
            if self._identities() != before:
                return None
            if reason:
                return self._quarantine(folder, digest, start, BadData(f"{self.latent.name}: {reason}"), before)
            return self._publish(folder, digest, start, before)
        finally:
            self.spool.discard_unpublished(folder)

    def _publish(self, folder: Path, digest: str, start: str, before: tuple) -> Outcome | None:
        job = self._job(folder, job_name(self.stem, digest), digest)
        job.record(receipt.event("adopt", self.spool.node, start, file=self.latent.name))
        fsync_tree(job.path)
        fsync_path(folder)
        fsync_path(self.spool.root / "tmp")
        result = self.spool.publish_once({job.name: (job.path, digest)})[job.name]
        if isinstance(result, H3SpoolError):
            return Outcome(job.name, "incoming", result)
        self._unlink(before)
        return Outcome(job.name, "incoming") if result else None

    def _quarantine(self, folder: Path, digest: str, start: str, error: BadData, before: tuple) -> Outcome:
        job = self._job(folder, f"{job_name(self.stem, digest)}-{secrets.token_hex(4)}", digest)
        with explained("keeping", self.sidecar):
            os.link(self.sidecar, job.path / f"{job.name}.sidecar")
        job.record(receipt.event("adopt", self.spool.node, start, receipt.FAILED, error=str(error)))
        self.spool.publish(job, "failed")
        self._unlink(before)
        return Outcome(job.name, "failed", error)

    def _job(self, folder: Path, name: str, digest: str) -> Job:
        """Turn the copy into a job directory."""
        job = Job(self.spool, name, folder / name)
        with explained("creating", job.path):
            os.rename(folder / "copy", job.path)
            os.rename(job.path / "latent", job.latent)
        write_file(job.file(".h3latent.sha256"), [container.sidecar_text(digest, job.latent.name)])
        return job

    def _chunks(self) -> Iterator[bytes]:
        with explained("reading", self.latent):
            fd = os.open(self.latent, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise BadData(f"{self.latent}: not a regular file")
                while block := file.read(1 << 20):
                    yield block

    def _identities(self) -> tuple[Identity | None, Identity | None]:
        return _identity(self.latent), _identity(self.sidecar)

    def _changed_s(self) -> float:
        """When either file last changed; their ctime cannot be set back by a copying tool."""
        try:
            return max(os.lstat(self.latent).st_ctime, os.lstat(self.sidecar).st_ctime)
        except OSError:
            raise TryLater(f"{self.latent}: is being replaced") from None

    def _unlink(self, before: tuple) -> None:
        """Remove the pair, latent first, as long as the names lead to what was hashed.

        Looking and unlinking are two steps, between which another latent may be dropped: so a file is taken into tmp/
        first, looked at there, and given back where it is another one.
        """
        for path, identity in zip((self.latent, self.sidecar), before, strict=True):
            if _identity(path) != identity:
                return
            taken = self.spool.tmp_dir("taken") / path.name
            with explained("removing", path), suppress(FileNotFoundError):
                os.rename(path, taken)
                if _identity(taken) != identity:
                    _give_back(self.spool)
                    return
                taken.unlink()
            self.spool.discard(taken.parent)


def _identity(path: Path) -> Identity | None:
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_ino, info.st_size, info.st_mtime_ns
