"""Exporting files: once, or by watching the folder into which another tool writes its latents.

A watched file is taken when two scans in a row saw it unchanged and it is complete; each content becomes one job, also
after a restart (its job's name is made of its hash, and seen/ remembers it). Pickles are never read here.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from h3spool import container, importers, latent, steps
from h3spool.adopt import job_name
from h3spool.errors import BadData, H3SpoolError, explained
from h3spool.job import Outcome
from h3spool.spool import Spool


@dataclass(frozen=True)
class Settings:
    """What every exported file gets: title, allowances, facts of sampling, and the space that must stay free."""

    title: str | None = None
    allow: frozenset[str] = frozenset()
    meta: Mapping[str, str] = field(default_factory=dict)
    min_free_bytes: int = steps.MIN_FREE_BYTES


def export_files(
    spool: Spool, paths: list[Path], settings: Settings, *, allow_pickle: bool = False, once: bool = False
) -> Outcome:
    """Export one latent file, or a pair that holds a stream each.

    Args:
        once: the same content becomes the same job, however often it is met.
    """
    try:
        raws = [container.read_bytes(path) for path in paths]
        source = (_stem(paths), hashlib.sha256(b"".join(raws)).hexdigest()) if once else None
        if source and spool.seen(name := job_name(*source)):
            return Outcome(name, "known")
        found = importers.load(paths, allow_pickle=allow_pickle, raws=raws)
        facts = {**found.facts, **settings.meta}
        allow = settings.allow | latent.parse_allow(str(facts.pop("allow", "")))
        title = settings.title or facts.pop("title", None) or _stem(paths)
        where = {"spool": spool, "source": source, "min_free_bytes": settings.min_free_bytes}
        job = steps.export(
            found.video, found.audio, title=title, allow=allow, meta=facts, producer=found.producer, **where
        )
    except BadData as error:
        text = str(error)
        return Outcome(str(paths[0]), "refused", BadData(text if str(paths[0]) in text else f"{paths[0]}: {text}"))
    except H3SpoolError as error:
        return Outcome(str(paths[0]), "refused", error)
    return Outcome(job, "incoming")


def _stem(paths: list[Path]) -> str:
    return paths[0].name.partition(".")[0] or "clip"


class Watcher:
    """A folder and all below it, scanned again and again."""

    def __init__(self, spool: Spool, folder: Path, settings: Settings):
        self._spool, self._folder, self._settings = spool, folder, settings
        self._before: dict[Path, tuple] = {}
        self._settled: dict[Path, tuple] = {}

    def scan(self) -> Iterator[Outcome]:
        """One scan: an outcome for each new job and, once, for each file that looks like a latent and is refused.

        Raises:
            IOFailed, NotPermitted: the folder cannot be read.
        """
        now = self._candidates()
        stable = {path: identity for path, identity in now.items() if self._before.get(path) == identity}
        self._before = now
        self._settled = {path: identity for path, identity in self._settled.items() if path in now}
        for path, identity in sorted(stable.items()):
            partner = _partner(path, "audio", "video") or _partner(path, "video", "audio")
            if self._settled.get(path) == identity or (partner in now and partner not in stable):
                continue
            self._settled[path] = identity
            paths = [path]
            if partner in now:
                self._settled[partner] = now[partner]
                paths = sorted([path, partner], key=lambda half: "video" not in half.name)
            outcome = export_files(self._spool, paths, self._settings, once=True)
            if outcome.exit_code not in (0, BadData.exit_code):
                del self._settled[path]  # a full disk here is no fault of the file
            if outcome.state != "known":
                yield outcome

    def _candidates(self) -> dict[Path, tuple]:
        """Files that begin like safetensors or a cartridge, with inode, size and mtime."""
        found = {}
        with explained("reading", self._folder):
            os.scandir(self._folder).close()
        for folder, folders, files in os.walk(self._folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in files:
                path = Path(folder, name)
                if not name.startswith(".") and not name.endswith((".part", ".tmp", "~")) and _looks_like_one(path):
                    info = os.lstat(path)
                    found[path] = (info.st_ino, info.st_size, info.st_mtime_ns)
        return found


def _looks_like_one(path: Path) -> bool:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            head = file.read(9)
    except OSError:  # a link, or gone again
        return False
    header = int.from_bytes(head[:8], "little")
    return (len(head) == 9 and head[8:] == b"{" and header <= importers.MAX_FOREIGN_HEADER_BYTES) or head[:2] == b"PK"


def _partner(path: Path, word: str, other: str) -> Path | None:
    """The other half of a pair that ComfyUI's SaveLatent wrote, by the words video and audio in its name."""
    return path.with_name(path.name.replace(word, other)) if word in path.name else None
