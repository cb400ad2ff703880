"""Keeping a spool in order: requeue, gc, fsck."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from h3spool import receipt
from h3spool.errors import BadData, H3SpoolError, NotFound, TryLater, explained
from h3spool.job import Job, fsync_path, write_file
from h3spool.safety import refuse_unsafe
from h3spool.spool import DIRECTORIES, Spool, valid_job

DAY_S = 86400.0
TMP_AGE_S = DAY_S
SEEN_AGE_S = 90 * DAY_S


# ---------------------------------------------------------------- requeue


def requeue(spool: Spool, name: str, *, any_peer: bool = False) -> str:
    """Put a job back to incoming/, to be verified and worked on again.

    From failed/ (and with `any_peer` from verified/), on a decoder also from done/: one durable rename; an old MP4
    travels along until a new one replaces it. On a sampler a done job is copied to a new job JOB-rN, because the peer
    remembers JOB.

    Args:
        any_peer: unbind the job from the spool it was pushed to: the owner's decision, it may then be decoded twice.

    Returns:
        the name under which the job is in incoming/ now.

    Raises:
        NotFound, TryLater (it is being worked on), BadData (gc has taken its latent), IOFailed, NotPermitted
    """
    found = spool.find(name)
    if found is None:
        raise NotFound(f"{spool.root}: has no job {name}")
    place, job = found
    if place == "done" and spool.role == "sampler":
        return _copy_as_new(spool, job)
    if place not in ("failed", "done", *(("verified", "incoming") if any_peer else ())):
        raise TryLater(f"job {name} is in {place}: it is on its way, there is nothing to requeue")
    _require_latent(job)
    with spool.lock("verify"):  # only its holder may write in incoming/
        if place != "incoming":
            with explained("moving", job.path):
                os.rename(job.path, spool.root / "incoming" / name)
            fsync_path(spool.root / "incoming")
            fsync_path(job.path.parent)
            if not (spool.root / "incoming" / name / job.latent.name).exists():  # gc was faster
                os.rename(spool.root / "incoming" / name, job.path)
        _require_latent(spool.job("incoming", name))
        if any_peer:
            spool.job("incoming", name).set_state(durable=True, peer=None)
    return name


def _require_latent(job: Job) -> None:
    if not job.latent.exists():
        raise BadData(f"{job.latent}: gc has taken it; the job cannot be worked on again, export the clip anew")


def _copy_as_new(spool: Spool, job: Job) -> str:
    _require_latent(job)
    start = receipt.now()
    stem = job.name[:88]
    name = next(new for n in range(1, 10_000) if spool.find(new := f"{stem}-r{n}") is None and not spool.seen(new))
    raw, digest = job.read_latent()
    copy = Job(spool, name, spool.tmp_dir("requeue"))
    try:
        write_file(copy.latent, [raw])
        write_file(copy.file(".h3latent.sha256"), [f"{digest}  {copy.latent.name}\n".encode()])
        if job.file(".producer.json").exists():
            write_file(copy.file(".producer.json"), [job.file(".producer.json").read_bytes()])
        old = job.peek()
        account = receipt.begin(name, old["title"], old["latent"], old["producer"])
        account["events"].append(receipt.event("requeue", spool.node, start, of=job.name))
        copy.write_receipt(account)
        spool.publish(copy, "incoming")
    except BaseException:
        spool.discard(copy.path)
        raise
    return name


# ---------------------------------------------------------------- gc


@dataclass(frozen=True)
class Limits:
    """What gc may take. Masters go before latents, the oldest jobs first.

    `days`: jobs finished longer ago; `keep`: jobs beyond the newest so many; `free_bytes`: go on, whatever the age,
    until so much is free. `mp4`, `failed`, `results`: also MP4s of done jobs, failed jobs, pulled results.
    """

    days: float = 7.0
    keep: int | None = None
    free_bytes: int = 0
    mp4: bool = False
    failed: bool = False
    results: bool = False


def gc(spool: Spool, limits: Limits, *, dry_run: bool = False) -> Iterator[tuple[Path, int]]:
    """Remove what is no longer needed; yields each path with its size in bytes, after it is gone."""
    if dry_run:  # nothing goes, so a job's directory may follow a file of it
        found = dict(_gc(spool, limits, dry_run=True))
        yield from ((path, size) for path, size in found.items() if not found.keys() & set(path.parents))
    else:
        yield from _gc(spool, limits, dry_run=False)
        _gc_seen(spool)


def _gc(spool: Spool, limits: Limits, *, dry_run: bool) -> Iterator[tuple[Path, int]]:
    yield from _gc_tmp(spool, dry_run)
    for pick in (_masters, _latents, *([_all] if limits.mp4 else [])):
        yield from _gc_pass(spool, limits, "done", pick, dry_run)
    if limits.failed:
        yield from _gc_pass(spool, limits, "failed", _all if limits.mp4 else _failures, dry_run)
    if limits.results:
        yield from _gc_pass(spool, limits, "results", _all, dry_run)


def _gc_tmp(spool: Spool, dry_run: bool) -> Iterator[tuple[Path, int]]:
    """Work in progress that nothing has touched for a day, and that seen/ does not name."""
    for entry in sorted(os.listdir(spool.root / "tmp")):
        path = spool.root / "tmp" / entry
        with spool.lock("admit"):
            if time.time() - _newest_ctime(path) < TMP_AGE_S or spool.named_by_seen(entry):
                continue
            size = _size(path)
            if not dry_run:
                spool.discard(path)
        yield path, size


def _gc_pass(spool: Spool, limits: Limits, place: str, pick: object, dry_run: bool) -> Iterator[tuple[Path, int]]:
    """One kind of file in one place, oldest job first, as far as the limits go."""
    jobs = sorted((spool.job(place, name) for name in spool.names(place)), key=lambda job: _age_key(job.path))
    surplus = len(jobs) - limits.keep if limits.keep is not None else 0
    freed = 0
    for index, job in enumerate(jobs):
        old = time.time() - _age_key(job.path) > limits.days * DAY_S or index < surplus
        if not old and spool.free_bytes() + (freed if dry_run else 0) >= limits.free_bytes:
            continue
        for path in pick(job):
            size = _size(path)
            if size and not dry_run:
                _remove(spool, path)
            freed += size
            if size:
                yield path, size


def _masters(job: Job) -> list[Path]:
    return [job.file(".master.mkv")]


def _latents(job: Job) -> list[Path]:
    """The whole directory where it holds no MP4, else the latent alone."""
    return [job.latent] if any(job.path.glob("*.mp4")) else [job.path]


def _failures(job: Job) -> list[Path]:
    """A failed job that still has its earlier MP4 is kept."""
    return [] if any(job.path.glob("*.mp4")) else [job.path]


def _all(job: Job) -> list[Path]:
    return [job.path]


def _remove(spool: Spool, path: Path) -> None:
    """Rename into tmp/ by path, then delete: nobody ever sees half of it."""
    trash = spool.tmp_path("trash")
    with explained("removing", path):
        try:
            os.rename(path, trash)
        except FileNotFoundError:  # requeued meanwhile
            return
    if path.parent.parent == spool.root:
        _touch_seen(spool, path.name)
    spool.discard(trash)


def _touch_seen(spool: Spool, name: str) -> None:
    path = spool.root / "seen" / name
    if path.exists():  # an exported job has no record
        with explained("touching", path):
            os.utime(path)


def _gc_seen(spool: Spool) -> None:
    """Forget jobs that no state has held for 90 days; the memory of those still here stays young."""
    for entry in list(os.scandir(spool.root / "seen")):
        if time.time() - entry.stat(follow_symlinks=False).st_mtime < SEEN_AGE_S / 3:
            continue
        with spool.lock("admit"):
            if spool.find(entry.name) or ((record := spool.seen(entry.name)) and (spool.root / record["tmp"]).exists()):
                _touch_seen(spool, entry.name)
            elif time.time() - entry.stat(follow_symlinks=False).st_mtime > SEEN_AGE_S:
                with explained("forgetting", entry.path):
                    os.unlink(entry.path)


def _age_key(path: Path) -> float:
    """When a job last changed."""
    try:
        return max(
            (entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(path)), default=path.stat().st_mtime
        )
    except OSError:
        return time.time()


def _newest_ctime(path: Path) -> float:
    newest = 0.0
    for folder, _, files in os.walk(path):
        for found in (folder, *(os.path.join(folder, file) for file in files)):
            try:
                newest = max(newest, os.lstat(found).st_ctime)
            except FileNotFoundError:
                return time.time()  # somebody is at work in it
    try:
        return newest or os.lstat(path).st_ctime
    except FileNotFoundError:
        return time.time()


def _size(path: Path) -> int:
    try:
        if not path.is_dir():
            return os.lstat(path).st_size
        return sum(os.lstat(os.path.join(folder, f)).st_size for folder, _, files in os.walk(path) for f in files) or 1
    except FileNotFoundError:
        return 0


# ---------------------------------------------------------------- fsck


@dataclass(frozen=True)
class Finding:
    """Something that breaks an invariant of the spool, and whether `--repair` mends it."""

    path: str
    problem: str
    repairable: bool = False


def fsck(spool: Spool, *, repair: bool = False, pause_s: float = 0.5) -> list[Finding]:
    """What breaks an invariant. A finding counts only if it holds twice: a working spool is always in motion.

    Args:
        spool: opened with `broken=True`.
        repair: mend what is safe first; the findings that are left are returned.
    """
    first = set(_findings(spool))
    if first:
        time.sleep(pause_s)
    found = sorted((f for f in _findings(spool) if f in first), key=lambda finding: finding.path)
    if repair and any(finding.repairable for finding in found):
        _repair(spool, found)
        return fsck(spool, pause_s=pause_s)
    return found


def _findings(spool: Spool) -> Iterator[Finding]:
    for path in (spool.root, *(spool.root / name for name in DIRECTORIES)):
        try:
            refuse_unsafe(path)
        except H3SpoolError as error:
            yield Finding(str(path), str(error), repairable=not path.exists() or _only_mode(path))
    if not all((spool.root / name).is_dir() for name in DIRECTORIES):
        return
    homes: dict[str, str] = {}
    for place in spool.places():
        for name in spool.names(place):
            if name in homes:
                yield Finding(f"{place}/{name}", f"the same job is in {homes[name]}/ too")
            homes[name] = place
            yield from _job_findings(spool, place, spool.job(place, name))
        yield from _strangers(spool, place)
    yield from _seen_findings(spool)


def _only_mode(path: Path) -> bool:
    info = os.lstat(path)
    return path.is_dir() and not path.is_symlink() and info.st_uid == os.geteuid()


def _job_findings(spool: Spool, place: str, job: Job) -> Iterator[Finding]:
    where = f"{place}/{job.name}"
    if place.startswith("active/"):
        if spool.slot_is_free(place.removeprefix("active/")):
            yield Finding(where, "left behind by a worker that died", repairable=True)
    elif place not in ("done", "failed"):
        for suffix in (".h3latent", ".h3latent.sha256"):
            if not job.file(suffix).exists():
                yield Finding(where, f"has no {job.name}{suffix}")
    if place == "decoded" and not job.file(".master.mkv").exists():
        yield Finding(where, "has no master")
    if place == "done" and spool.role == "decoder" and not job.file(".mp4").exists():
        yield Finding(where, "is done but has no MP4")


def _strangers(spool: Spool, place: str) -> Iterator[Finding]:
    if place == "incoming":  # loose files wait there
        return
    with os.scandir(spool.root / place) as entries:
        for entry in entries:
            if not entry.name.startswith(".") and not (valid_job(entry.name) and entry.is_dir(follow_symlinks=False)):
                yield Finding(f"{place}/{entry.name}", "is not a job")


def _seen_findings(spool: Spool) -> Iterator[Finding]:
    for entry in sorted(os.listdir(spool.root / "seen")):
        try:
            record = spool.seen(entry)
        except H3SpoolError as error:
            yield Finding(f"seen/{entry}", str(error))
            continue
        if record and (spool.root / record["tmp"]).exists():
            yield Finding(f"seen/{entry}", "was accepted, but a death kept it from incoming/", repairable=True)


def _repair(spool: Spool, findings: list[Finding]) -> None:
    """Mend what is safe: directories, modes, what dead workers left, publications that a death interrupted."""
    for name in DIRECTORIES:
        path = spool.root / name
        with explained("repairing", path):
            path.mkdir(mode=0o700, exist_ok=True)
            if _only_mode(path):
                path.chmod(0o700)
    if _only_mode(spool.root):
        with explained("repairing", spool.root):
            spool.root.chmod(spool.root.stat().st_mode & 0o755)
    spool.finish_published()
    for step in ("push", "decode", "mux"):
        spool.empty_slots(step)
