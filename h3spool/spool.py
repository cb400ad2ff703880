"""The spool: jobs as directories that move between states by one rename, and the locks and memory around them.

    SPOOL/  spool.json  tmp/  incoming/  verified/  decoded/  active/STEP-N/  done/  failed/  results/  seen/  locks/

Rules (ARCHITECTURE.md has their reasons): a process writes only in tmp/, in its own active/STEP-N/, and in incoming/
while it holds locks/verify; every other change is one rename. Durable means: files fsynced, their directory fsynced,
renamed, both parents fsynced. A claim and a put-back are plain renames: losing one repeats idempotent work.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

from h3spool import container, receipt
from h3spool.errors import (
    BadData,
    H3SpoolError,
    IOFailed,
    NotFound,
    NotPermitted,
    NotUsable,
    TryLater,
    explained,
    from_os_error,
)
from h3spool.job import Job, fsync_path, fsync_tree, write_file
from h3spool.safety import refuse_network_fs, refuse_unsafe

VERSION = 1
ROLES = ("sampler", "decoder")
STATES = ("incoming", "verified", "decoded", "done", "failed")
CLAIMED_FROM = {"push": "verified", "decode": "verified", "mux": "decoded"}
MAX_ATTEMPTS = 5
FSYNC_THREADS = 4
DIRECTORIES = ("tmp", *STATES, "active", "results", "seen", "locks")
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,31}")


def valid_job(name: str) -> bool:
    """Whether `name` may be a job's name, and with that a path."""
    return bool(_JOB.fullmatch(name)) and not name.endswith((".part", ".h3latent", ".sha256"))


class LockHeld(TryLater):
    """Another process holds the lock."""


class Slot:
    """Worker slot N of a step, held by flock until `release` or death. Its directory is where claims go."""

    def __init__(self, spool: Spool, step: str, number: int, lock_fd: int):
        self.spool, self.step, self.number, self._lock_fd = spool, step, number, lock_fd
        self.path = spool.root / "active" / f"{step}-{number}"

    def claim(self, name: str) -> Job | None:
        """Take a job out of the state its step claims from; None when it is not there: another worker was faster."""
        if not self.spool.holds(CLAIMED_FROM[self.step], name):
            return None
        source = self.spool.root / CLAIMED_FROM[self.step] / name
        with explained("claiming", source):
            try:
                os.rename(source, self.path / name)
            except FileNotFoundError:
                return None
        return Job(self.spool, name, self.path / name)

    def put_back(self, job: Job) -> None:
        """Return a claimed job to where it came from. Children that work on it must have been waited for."""
        with explained("putting back", job.path):
            os.rename(job.path, self.spool.root / CLAIMED_FROM[self.step] / job.name)

    def release(self) -> None:
        """Return what an interruption left in the slot, and let it go."""
        try:
            for name in self.spool.names(f"active/{self.step}-{self.number}"):
                self.put_back(self.spool.job(f"active/{self.step}-{self.number}", name))
        except H3SpoolError:
            pass  # whoever looks next tries again
        finally:
            os.close(self._lock_fd)


class Spool:
    """An open spool. `create` makes one, the constructor opens one."""

    def __init__(self, root: Path | str, *, allow_network_fs: bool = False, broken: bool = False):
        """Open a spool; `broken` opens one whose directories are missing or unsafe, for fsck.

        Raises:
            NotFound: there is none.
            NotUsable: its format, role or filesystem is not supported.
            NotPermitted: a link, a foreign owner, or writable by group or others.
        """
        self.root = Path(os.path.abspath(root))
        try:
            facts = json.loads(container.read_bytes(self.root / "spool.json", 65536))
        except NotFound:
            raise NotFound(f"{self.root}: not a spool (no spool.json); `h3spool init` makes one") from None
        except (ValueError, BadData) as error:
            raise NotUsable(f"{self.root}/spool.json: unreadable ({error}); restore it or make a new spool") from None
        known = isinstance(facts, dict) and all(isinstance(facts.get(key), str) for key in ("uuid", "node", "role"))
        if not known or facts.get("h3spool") != VERSION or facts["role"] not in ROLES:
            raise NotUsable(f"{self.root}/spool.json: spool format {facts!r:.80}, this h3spool knows {VERSION}")
        self.uuid, self.node, self.role = facts["uuid"], facts["node"], facts["role"]
        for path in () if broken else (self.root, *(self.root / name for name in DIRECTORIES)):
            refuse_unsafe(path)
        if not allow_network_fs:
            refuse_network_fs(self.root)

    @classmethod
    def create(cls, root: Path | str, role: str, node: str | None = None, *, allow_network_fs: bool = False) -> Spool:
        """Make a spool, or open it where one of that role is there already.

        Raises:
            NotUsable: a spool of another role is there.
            NotPermitted, IOFailed
        """
        root = Path(os.path.abspath(root))
        if not (root / "spool.json").exists():
            node = node or re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname()).strip("-")[:32] or "node"
            if not _NODE.fullmatch(node):
                raise BadData(f"node name {node!r}: use 1 to 32 letters, digits and dashes")
            facts = {"h3spool": VERSION, "uuid": str(uuid.uuid4()), "node": node, "role": role}
            with explained("creating a spool", root):
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
                if strange := sorted(set(os.listdir(root)) - {*DIRECTORIES}):
                    raise NotPermitted(f"{root}: holds {strange[0]} already; give a new or an empty directory")
                refuse_unsafe(root)
                if not allow_network_fs:
                    refuse_network_fs(root)
                for name in DIRECTORIES:
                    (root / name).mkdir(mode=0o700, exist_ok=True)
            fresh = root / "tmp" / f"spool-{secrets.token_hex(8)}"
            write_file(fresh, [json.dumps(facts).encode() + b"\n"])
            fsync_path(root)
            with explained("creating a spool", root):
                os.rename(fresh, root / "spool.json")
            fsync_path(root)
            fsync_path(root.parent)
        spool = cls(root, allow_network_fs=allow_network_fs)
        if spool.role != role:
            raise NotUsable(f"{root}: is a {spool.role} spool already; one spool has one role")
        return spool

    # -- names and places

    def new_job_name(self) -> str:
        """A name no job has had: time, node, and eight random hex digits."""
        moment = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S%f")[:18]
        return f"{moment}Z-{self.node}-{secrets.token_hex(4)}"

    def tmp_path(self, kind: str) -> Path:
        """A path in tmp/ that was never used and never will be again."""
        return self.root / "tmp" / f"{kind}-{secrets.token_hex(8)}"

    def tmp_dir(self, kind: str) -> Path:
        """A new directory in tmp/."""
        path = self.tmp_path(kind)
        with explained("creating", path):
            path.mkdir(mode=0o700)
        return path

    def names(self, state: str) -> list[str]:
        """The jobs in a state (or `active/STEP-N`, `results`), sorted."""
        try:
            with os.scandir(self.root / state) as entries:
                return sorted(e.name for e in entries if valid_job(e.name) and e.is_dir(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):  # gone meanwhile, or a lone file in tmp/
            return []
        except OSError as error:
            raise from_os_error(error, "listing", self.root / state) from error

    def slots(self) -> list[str]:
        """The names STEP-N of all slots that ever were."""
        with explained("listing", self.root / "active"):
            return sorted(os.listdir(self.root / "active"))

    def places(self) -> list[str]:
        """Every place a job can be, in the order jobs travel."""
        active = [f"active/{slot}" for slot in self.slots()]
        return ["incoming", "verified", *active, "decoded", "done", "failed"]

    def find(self, name: str) -> tuple[str, Job] | None:
        """Where a job is. A job that moves while we look is looked for again (it can pass us once, hardly thrice)."""
        for _ in range(5):
            for place in self.places():
                if self.holds(place, name):
                    return place, self.job(place, name)
        return None

    def holds(self, state: str, name: str) -> bool:
        """Whether a state holds a job of this name, which may be anything a user has typed."""
        path = self.root / state / name
        return valid_job(name) and path.is_dir() and not path.is_symlink()

    def job(self, state: str, name: str) -> Job:
        """The handle of a job in a known place."""
        return Job(self, name, self.root / state / name)

    def require_space(self, need_bytes: int, min_free_bytes: int) -> None:
        """Refuse to start what would fill the disk.

        Raises:
            IOFailed: less than need + min_free is left.
        """
        free = self.free_bytes()
        if free < need_bytes + min_free_bytes:
            raise IOFailed(
                f"{self.root}: {free >> 20} MiB free, this needs {need_bytes >> 20} MiB and leaves --min-free "
                f"{min_free_bytes >> 20} MiB; `h3spool gc` makes room"
            )

    def free_bytes(self) -> int:
        """Free space for ordinary users on the spool's filesystem."""
        with explained("looking at free space of", self.root):
            room = os.statvfs(self.root)
        return room.f_bavail * room.f_frsize

    # -- locks and slots

    @contextmanager
    def lock(self, name: str, *, wait: bool = True) -> Iterator[None]:
        """Hold locks/NAME.

        Raises:
            LockHeld: another holds it and `wait` is false.
        """
        fd = self._lock_fd(name)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(fd)
            raise LockHeld(f"{self.root}/locks/{name}: another h3spool holds it; try again later") from None
        try:
            yield
        finally:
            os.close(fd)

    def _lock_fd(self, name: str) -> int:
        path = self.root / "locks" / name
        with explained("locking", path):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def _try_slot(self, step: str, number: int) -> Slot | None:
        """Take a slot if it is free, and return the jobs a dead worker left in it."""
        fd = self._lock_fd(f"{step}-{number}")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        slot = Slot(self, step, number, fd)
        try:
            with explained("creating", slot.path):
                slot.path.mkdir(mode=0o700, exist_ok=True)
            for name in self.names(f"active/{step}-{number}"):
                slot.put_back(self.job(f"active/{step}-{number}", name))
        except BaseException:
            os.close(fd)
            raise
        return slot

    def take_slot(self, step: str) -> Slot:
        """The lowest free slot of a step, emptied, after emptying all other slots whose worker is gone."""
        self.empty_slots(step)
        return next(slot for number in range(1 << 16) if (slot := self._try_slot(step, number)))

    def slot_is_free(self, slot: str) -> bool:
        """Whether no living worker holds slot STEP-N."""
        fd = self._lock_fd(slot)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True

    def empty_slots(self, step: str) -> None:
        """Return the jobs of dead workers of a step to where it claims from."""
        for name in self.slots():
            kind, _, number = name.rpartition("-")
            if kind == step and self.names(f"active/{name}") and (slot := self._try_slot(step, int(number))):
                slot.release()

    # -- moving jobs

    def promote(self, job: Job, state: str) -> None:
        """Move a job to a state by a plain rename (incoming -> verified)."""
        with explained("moving", job.path):
            os.rename(job.path, self.root / state / job.name)

    def publish(self, job: Job, state: str) -> None:
        """Move a job to a state so that it survives a power cut there, with every file it has."""
        fsync_tree(job.path)
        with explained("moving", job.path):
            os.rename(job.path, self.root / state / job.name)
        fsync_path(self.root / state)
        fsync_path(job.path.parent)

    def publish_all(self, jobs: list[Job], state: str) -> None:
        """`publish` for many jobs that one worker holds: their fsyncs run side by side, the directories' are shared."""
        with ThreadPoolExecutor(FSYNC_THREADS) as pool:
            list(pool.map(fsync_tree, (job.path for job in jobs)))
        for job in jobs:
            with explained("moving", job.path):
                os.rename(job.path, self.root / state / job.name)
        for folder in {self.root / state, *(job.path.parent for job in jobs)}:
            fsync_path(folder)

    # -- seen/: the memory that makes hand-over exactly-once

    def seen(self, name: str) -> dict | None:
        """The record of a job published under a name that can come again: `sha256`, `tmp` (relative path)."""
        try:
            record = json.loads(container.read_bytes(self.root / "seen" / name, 65536))
        except NotFound:
            return None
        except ValueError:
            record = None
        if not isinstance(record, dict) or not {"sha256", "tmp"} <= set(record):
            raise IOFailed(f"{self.root}/seen/{name}: unreadable; `h3spool fsck` says what to do")
        return record

    def publish_once(self, batch: dict[str, tuple[Path, str]]) -> dict[str, bool | H3SpoolError]:
        """Publish tmp/RUN/JOB directories to incoming/ exactly once each, whatever dies; seen/JOB is the commit point.

        The files, the directories and all directories above them up to tmp/ must have been fsynced.

        Args:
            batch: job name -> (its directory in tmp/, SHA-256 of its latent).

        Returns:
            For each job: True, published now; False, it had been published before (acknowledge it again); BadData, its
            name was published with other content; TryLater, its directory was cleaned away meanwhile.
        """
        results: dict[str, bool | H3SpoolError] = {}
        fresh, known = {}, {}
        with self.lock("admit"):
            for name, (held, digest) in batch.items():
                record = self.seen(name)
                if record is None and held.is_dir():
                    tmp = str(held.relative_to(self.root))
                    fresh[name], results[name] = {"sha256": digest, "tmp": tmp, "at": receipt.now()}, True
                elif record is None:
                    results[name] = TryLater(f"{held}: the directory is gone; send the job again")
                elif record["sha256"] != digest:
                    results[name] = BadData(
                        f"job {name} was received before with SHA-256 {record['sha256']}, now it has {digest}; "
                        "a job's content never changes: export it again, as a new job"
                    )
                else:
                    known[name], results[name] = record, False
            self._remember(fresh)
            self._finish(known | fresh)
        return results

    def _remember(self, records: dict[str, dict]) -> None:
        """Step 2: seen/JOB appears whole, by a link to a finished file, and durably, before any rename."""
        if not records:
            return
        folder = self.tmp_dir("seen")
        with ThreadPoolExecutor(FSYNC_THREADS) as pool:
            list(pool.map(lambda name: write_file(folder / name, [json.dumps(records[name]).encode()]), records))
        for name in records:
            with explained("remembering", self.root / "seen" / name):
                os.link(folder / name, self.root / "seen" / name)
        fsync_path(self.root / "seen")
        self.discard(folder)

    def _finish(self, records: dict[str, dict]) -> list[str]:
        """Step 3: rename to incoming/ what still lies at its tmp path, durably. locks/admit must be held."""
        moved, parents = [], set()
        for name, record in records.items():
            path = self.root / record["tmp"]
            if path.is_dir():
                with explained("publishing", path):
                    os.rename(path, self.root / "incoming" / name)
                moved.append(name)
                parents.add(path.parent)
        if moved:
            for folder in (self.root / "incoming", *parents):
                fsync_path(folder)
        return moved

    def finish_published(self) -> list[str]:
        """Complete every publication that a death interrupted between seen/ and its rename."""
        waiting = {}
        with explained("listing", self.root / "tmp"):
            runs = sorted(entry.name for entry in os.scandir(self.root / "tmp") if entry.is_dir(follow_symlinks=False))
        for run in runs:
            for name in self.names(f"tmp/{run}"):
                record = self.seen(name)
                if record is not None and record["tmp"] == f"tmp/{run}/{name}":
                    waiting[name] = record
        if not waiting:
            return []
        with self.lock("admit"):
            return self._finish(waiting)

    def named_by_seen(self, entry: str) -> bool:
        """Whether tmp/ENTRY holds a job that seen/ names: it has been accepted, and only its rename is missing."""
        records = ((name, self.seen(name)) for name in self.names(f"tmp/{entry}"))
        return any(record and record["tmp"] == f"tmp/{entry}/{name}" for name, record in records)

    def discard_unpublished(self, path: Path) -> None:
        """`discard` a directory of jobs that were to be published once; what seen/ names is finished, not deleted."""
        try:
            with self.lock("admit"):
                if not self.named_by_seen(path.name):
                    self.discard(path)
        except H3SpoolError:
            pass  # seen/ cannot be read now: `verify` or `gc` gets it

    def discard(self, path: Path) -> None:
        """Delete something in tmp/, as far as it can be; `gc` gets the rest."""
        if path.parent == self.root / "tmp":
            shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):
                path.unlink(missing_ok=True) if path.is_file() or path.is_symlink() else None
