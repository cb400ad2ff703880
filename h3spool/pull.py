"""Bringing finished MP4s and their receipts back into results/: checked by hash, one rename, safe to repeat."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from h3spool import container, receipt
from h3spool.errors import BadData, H3SpoolError, NotFound, TryLater, explained
from h3spool.job import Job, Outcome, fsync_path, fsync_tree
from h3spool.link import LocalLink, SshLink
from h3spool.spool import Spool

MAX_JOBS = 32


def pull(
    spool: Spool, link: LocalLink | SshLink, names: Iterable[str] = (), *, min_free_bytes: int
) -> Iterator[Outcome]:
    """Fetch what the peer has finished and results/ does not hold yet, or the jobs named.

    A result that changed on the peer (requeued, decoded again) becomes a second file beside the first.

    Raises:
        TryLater, Unavailable, NotPermitted, NotUsable, IOFailed: the peer cannot be reached or used.
    """
    offered = {entry["job"]: entry for entry in link.results()}
    asked = list(names)
    for name in asked:
        if name not in offered:
            yield Outcome(name, "missing", NotFound(f"{link.peer}: has no finished job {name}"))
    wanted = [offered[name] for name in (asked or offered) if name in offered]
    have = {entry["job"] for entry in wanted if entry["sha256"] in _hashes(spool.root / "results" / entry["job"])}
    yield from (Outcome(name, "results") for name in asked if name in have)
    missing = [entry for entry in wanted if entry["job"] not in have]
    for index in range(0, len(missing), MAX_JOBS):
        batch = missing[index : index + MAX_JOBS]
        spool.require_space(sum(entry["size"] for entry in batch), min_free_bytes)
        yield from _fetch(spool, link, batch)


def _fetch(spool: Spool, link: LocalLink | SshLink, batch: list[dict]) -> list[Outcome]:
    start, failure = receipt.now(), None
    folder = spool.tmp_dir("pull")
    try:
        try:
            link.fetch([entry["job"] for entry in batch], folder)
        except H3SpoolError as error:
            failure = error  # what arrived whole is taken all the same
        outcomes = []
        for entry in batch:
            try:
                _take(spool, Job(spool, entry["job"], folder / entry["job"]), entry, start, str(link.peer))
                outcomes.append(Outcome(entry["job"], "results"))
            except TryLater as error:
                outcomes.append(Outcome(entry["job"], "remote", failure or error))
        return outcomes
    finally:
        spool.discard(folder)


def _take(spool: Spool, job: Job, entry: dict, start: str, peer: str) -> None:
    """Check one fetched result and put it into results/, durably.

    Raises:
        TryLater: it is not whole, or changed while it was fetched.
        IOFailed, NotPermitted
    """
    mp4 = job.file(".mp4")
    try:
        digest = container.hash_file(mp4)
    except OSError as error:
        raise TryLater(f"{mp4.name}: did not arrive ({error.strerror})") from None
    if digest != entry["sha256"]:
        raise TryLater(f"{mp4.name}: arrived with SHA-256 {digest}, the peer said {entry['sha256']}")
    job.record(receipt.event("pull", spool.node, start, peer=peer, sha256=digest, bytes=entry["size"]))
    fsync_tree(job.path)
    target = spool.root / "results" / job.name
    with explained("moving", job.path):
        if not _moved(job.path, target) and digest not in _hashes(target):  # another pull may have been faster
            number = 2 + sum(
                re.fullmatch(rf"{re.escape(job.name)}\.\d+\.mp4", name) is not None for name in os.listdir(target)
            )
            for suffix in (".pipeline.json", ".mp4"):
                os.rename(job.file(suffix), target / f"{job.name}.{number}{suffix}")
            fsync_path(target)
    fsync_path(target.parent)


def _moved(source: Path, target: Path) -> bool:
    """Rename a directory, unless there is one of that name."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    return True


def _hashes(folder: Path) -> set[str]:
    """SHA-256 of every result of a job, as its receipts say."""
    found = set()
    for path in folder.glob("*.pipeline.json") if folder.is_dir() else ():
        try:
            account = receipt.parse(container.read_bytes(path, 1 << 24), folder.name) or receipt.begin(folder.name)
        except BadData:
            continue
        pulled = receipt.last(account, "pull")
        if pulled and path.with_name(path.name.replace(".pipeline.json", ".mp4")).exists():
            found.add(pulled.get("sha256"))
    return found
