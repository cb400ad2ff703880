"""Placing the finished MP4 where people look for it, under its title, atomically and never over anybody else's file."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import unicodedata
from pathlib import Path

from h3spool import container
from h3spool.errors import IOFailed, explained
from h3spool.job import Job

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
    the first one placed, which it knows by its hash, and no other.

    Args:
        digest: SHA-256 of the MP4.

    Raises:
        IOFailed, NotPermitted
    """
    with explained("delivering to", folder):
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f".h3spool-{secrets.token_hex(8)}.part"
        try:
            _link_or_copy(mp4, fresh)
            placed = job.receipt().get("delivered") or {}
            ours = {placed.get("sha256"), placed.get("replaces")} - {None}
            if (found := _digest(placed.get("path"))) in ours:
                _note(job, Path(placed["path"]), digest, replaces=found)
                os.rename(fresh, placed["path"])
                return Path(placed["path"])
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


def _digest(path: str | None) -> str:
    try:
        return container.hash_file(path) if path else ""
    except OSError:
        return ""


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another filesystem, or one without hard links
        with open(source, "rb") as reader, open(target, "xb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
            writer.flush()
            os.fsync(writer.fileno())
