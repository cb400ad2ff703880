"""The receiving end of a push: what arrived in tmp/ is checked, made durable, published once, and acknowledged.

The sender puts job directories into tmp/push-<its uuid>-<slot>-<random>/ and then names each with the size and SHA-256
of every file. Whole is exactly those files. Only what `admit` acknowledges may leave the sender's hands.

Wire (JSON lines): the receiver greets first; the sender writes one line a job, then an empty line, and reads one answer
a job; end of input ends it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

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
)
from h3spool.job import Job, fsync_path, fsync_tree
from h3spool.spool import FSYNC_THREADS, Spool, valid_job

WIRE = 1
_RUN = re.compile(r"(push-[0-9a-f-]{36}-[0-9]{1,5}-)[0-9a-f]{16}")
REQUIRED = (".h3latent", ".h3latent.sha256", ".pipeline.json")
OPTIONAL = (".producer.json", ".pipeline.json.unreadable")


def manifest(job: Job) -> dict:
    """What the sender says of a job: every file that travels, with its size and SHA-256.

    The latent's hash is the sidecar's, which `verify` compared with the bytes on this node.

    Raises:
        BadData, NotFound, NotPermitted, IOFailed
    """
    files = []
    for suffix in (*REQUIRED, *OPTIONAL):
        path = job.file(suffix)
        if suffix in REQUIRED and not path.exists():
            raise NotFound(f"incomplete job: {path}: no such file")
        if suffix == ".h3latent":
            with explained("reading", path):
                size, digest = os.lstat(path).st_size, job.expected_digest()
        elif path.exists():
            raw = container.read_bytes(path)
            size, digest = len(raw), hashlib.sha256(raw).hexdigest()
        else:
            continue
        files.append({"name": path.name, "size": size, "sha256": digest})
    return {"job": job.name, "files": files}


def greeting(spool: Spool) -> dict:
    """The receiver's first line.

    Raises:
        NotUsable: this spool is no decoder's.
    """
    if spool.role != "decoder":
        raise NotUsable(f"{spool.root}: is a sampler's spool; push goes to a decoder's")
    waiting = len(spool.names("incoming")) + len(spool.names("verified"))
    facts = {"uuid": spool.uuid, "node": spool.node, "free_bytes": spool.free_bytes(), "waiting": waiting}
    return {"h3spool_wire": WIRE} | facts


def begin_run(spool: Spool, run: str) -> Path:
    """Check a run's name, and clear away what earlier runs of the same sender and slot left half sent.

    Raises:
        BadData: not the name of a run.
    """
    match = _RUN.fullmatch(run)
    if match is None:
        raise BadData(f"{run!r} is not the name of a push run")
    with spool.lock("admit"):
        for entry in sorted(os.listdir(spool.root / "tmp")):
            if entry.startswith(match[1]) and entry != run and not spool.named_by_seen(entry):
                spool.discard(spool.root / "tmp" / entry)
    return spool.root / "tmp" / run


def admit(spool: Spool, run: Path, manifests: list[dict], *, min_free_bytes: int = 0) -> list[dict]:
    """Check, make durable and publish the jobs of a run together; one answer a job.

    An answer is {job, sha256, state} where the job is safe here (`state`: incoming, or known when it was before), else
    {job, exit, error}.
    """
    answers: dict[str, dict] = {}
    whole: dict[str, tuple[Path, str]] = {}
    with ThreadPoolExecutor(FSYNC_THREADS) as pool:  # hashing leaves the interpreter alone
        checked = list(pool.map(lambda entry: _checked(spool, run, entry, min_free_bytes), manifests))
    for entry, result in zip(manifests, checked, strict=True):
        name = str(entry.get("job"))
        if isinstance(result, H3SpoolError):
            answers[name] = _refusal(name, result)
        else:
            whole[name] = (run / name, result)
    try:
        _make_durable(spool, run, [held for held, _ in whole.values() if held.is_dir()])
        published = spool.publish_once(whole)
    except H3SpoolError as error:
        published = dict.fromkeys(whole, error)
    for name, result in published.items():
        if isinstance(result, H3SpoolError):
            answers[name] = _refusal(name, result)
        else:
            answers[name] = {"job": name, "sha256": whole[name][1], "state": "incoming" if result else "known"}
    return [answers[str(entry.get("job"))] for entry in manifests]


def _checked(spool: Spool, run: Path, entry: dict, min_free_bytes: int) -> str | H3SpoolError:
    """The SHA-256 of a job that is whole or was published before, or why it is refused."""
    try:
        digest = _claimed_digest(entry)
        if spool.seen(entry["job"]) is None:
            _require_room(spool, min_free_bytes)
            _check_whole(spool, run / entry["job"], entry)
        return digest
    except H3SpoolError as error:
        return error


def _require_room(spool: Spool, min_free_bytes: int) -> None:
    """A full disk here is the sender's reason to wait, not its failure."""
    try:
        spool.require_space(0, min_free_bytes)
    except IOFailed as error:
        raise TryLater(str(error)) from None


def _refusal(name: str, error: H3SpoolError) -> dict:
    return {"job": name, "exit": error.exit_code, "error": str(error)}


def _claimed_digest(entry: dict) -> str:
    """The latent's SHA-256 as the sender names it, once the manifest itself is sound.

    Raises:
        BadData
    """
    name, files = entry.get("job"), entry.get("files")
    if not isinstance(name, str) or not valid_job(name):
        raise BadData(f"{name!r} is not a job's name")
    allowed = {name + suffix for suffix in (*REQUIRED, *OPTIONAL)}
    if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
        raise BadData(f"job {name}: the manifest lists no files")
    names = [str(file.get("name")) for file in files]
    if len(set(names)) != len(names) or not {name + suffix for suffix in REQUIRED} <= set(names) <= allowed:
        raise BadData(f"job {name}: the manifest names {names}, a job travels as {sorted(allowed)}")
    return next(str(file.get("sha256")) for file in files if file["name"] == f"{name}.h3latent")


def _check_whole(spool: Spool, held: Path, entry: dict) -> None:
    """Whole is exactly the files of the manifest; then the push event in the receipt is closed.

    Raises:
        TryLater: something is missing or differs; the sender sends again.
    """
    try:
        if {item.name for item in os.scandir(held)} != {file["name"] for file in entry["files"]}:
            raise TryLater(f"{held}: not whole, it holds {sorted(os.listdir(held))}")
        for file in entry["files"]:
            path = held / file["name"]
            info = os.lstat(path)
            if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1 or info.st_uid != os.geteuid():
                raise NotPermitted(f"{path}: not a plain file of this user")
            if info.st_size != file.get("size") or container.hash_file(path) != file.get("sha256"):
                raise TryLater(f"{path}: arrived damaged or in part")
    except FileNotFoundError:
        raise TryLater(f"{held}: not whole yet") from None
    except OSError as error:
        raise IOFailed(f"{held}: reading failed: {error.strerror}") from error
    job = Job(spool, entry["job"], held)
    account = job.receipt()
    receipt.close(account, "push", receipt.OK, received_by=spool.node)
    job.write_receipt(account)


def _make_durable(spool: Spool, run: Path, jobs: list[Path]) -> None:
    if not jobs:
        return
    with ThreadPoolExecutor(FSYNC_THREADS) as pool:
        list(pool.map(fsync_tree, jobs))
    fsync_path(run)
    fsync_path(spool.root / "tmp")


def serve(spool: Spool, run: str, source: IO[str], answer: IO[str], *, min_free_bytes: int) -> None:
    """Speak the wire with a sender until it ends.

    Raises:
        NotUsable, BadData, IOFailed: after a line that says so to the sender.
    """
    try:
        folder = begin_run(spool, run)
        _say(answer, greeting(spool) | {"min_free_bytes": min_free_bytes})
    except H3SpoolError as error:
        _say(answer, {"h3spool_wire": WIRE, "exit": error.exit_code, "error": str(error)})
        raise
    batch: list[dict] = []
    for line in source:
        if line.strip():
            try:
                entry = json.loads(line)
            except ValueError:
                raise BadData("the sender's line is not JSON; are both ends the same h3spool?") from None
            batch.append(entry if isinstance(entry, dict) else {})
            continue
        for reply in admit(spool, folder, batch, min_free_bytes=min_free_bytes):
            _say(answer, reply)
        batch = []


def _say(answer: IO[str], line: dict) -> None:
    answer.write(json.dumps(line) + "\n")
    answer.flush()


def results(spool: Spool) -> Iterator[dict]:
    """What `pull` may fetch: each finished job with the size and SHA-256 of its MP4."""
    for name in spool.names("done"):
        job = spool.job("done", name)
        try:
            made = receipt.last(job.peek(), "mux") or {}
            size = os.path.getsize(job.file(".mp4"))
        except OSError:  # requeued while we looked, or a sampler's job
            continue
        if made.get("sha256"):
            yield {"job": name, "sha256": made["sha256"], "size": size}
