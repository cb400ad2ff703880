"""Placing the finished MP4 where people look for it, under its title, atomically and never over anybody else's file."""

from __future__ import annotations

import os
import re
import shutil
import unicodedata
from pathlib import Path

from h3spool import container
from h3spool.errors import IOFailed, explained
from h3spool.job import Job, fsync_path

_MAX_NAME_BYTES = 255


def safe_stem(title: str, fallback: str) -> str:
    """A title as a file name without its extension: no separators, controls or leading dots; other scripts are kept."""
    kept = (" " if unicodedata.category(char)[0] in "CZ" else char for char in unicodedata.normalize("NFC", title))
    stem = re.sub(r'[/\\:*?"<>|]+', "-", "".join(kept))
    return re.sub(r" +", " ", stem).strip(" .-") or fallback


def file_name(stem: str, number: int) -> str:
    """`STEM.mp4`, or `STEM (2).mp4`, cut to 255 bytes of UTF-8 at a character's end."""
    tail = ".mp4" if number == 1 else f" ({number}).mp4"
    room = _MAX_NAME_BYTES - len(tail)
    return stem.encode("utf-8", "replace")[:room].decode("utf-8", "ignore").rstrip(" .") + tail


def deliver(job: Job, mp4: Path, digest: str, folder: Path, title: str) -> Path:
    """Put a hard link to (or a copy of) the MP4 into `folder`.

    The path goes into the receipt before the file is placed: an attempt repeated after a death replaces the file that
    the first one placed there, which it knows by its hash, and no other.

    Args:
        digest: SHA-256 of the MP4.

    Raises:
        IOFailed, NotPermitted
    """
    folder = Path(os.path.abspath(folder))
    with explained("delivering to", folder):
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f".{job.name}.part"
        try:
            fresh.unlink(missing_ok=True)  # of an attempt that died
            _link_or_copy(mp4, fresh)
            fsync_path(fresh)  # before it has a name that people look at
            if (before := _placed_before(job, folder)) is not None:
                target, found = before
                _note(job, target, digest, replaces=found)
                os.rename(fresh, target)
                return target
            stem = safe_stem(title, job.name)
            for number in range(1, 10_000):
                target = folder / file_name(stem, number)
                if target.exists() or target.is_symlink():
                    continue
                _note(job, target, digest)
                try:
                    os.link(fresh, target)
                except FileExistsError:
                    continue
                except PermissionError:  # a filesystem without hard links
                    os.rename(fresh, target)
                return target
        finally:
            fresh.unlink(missing_ok=True)
    raise IOFailed(f"{folder}: holds ten thousand files called {title!r}; tidy up or give another --deliver")


def _note(job: Job, path: Path, digest: str, **facts: str) -> None:
    account = job.receipt() | {"delivered": {"path": str(path), "sha256": digest, **facts}}
    job.write_receipt(account, durable=True)


def _placed_before(job: Job, folder: Path) -> tuple[Path, str] | None:
    """What an earlier attempt placed in this folder, and its hash; a receipt may come from afar, and says no more."""
    placed = job.receipt().get("delivered")
    if not isinstance(placed, dict) or not isinstance(placed.get("path"), str):
        return None
    path = Path(placed["path"])
    try:
        found = container.hash_file(path) if path.parent == folder else None
    except OSError:  # moved away, or another kind of file now
        return None
    return (path, found) if found and found in (placed.get("sha256"), placed.get("replaces")) else None


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another filesystem, or one without hard links
        with open(source, "rb") as reader, open(target, "xb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
            writer.flush()
            os.fsync(writer.fileno())
