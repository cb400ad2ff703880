"""Decode and mux: a checked latent through an engine and the quality gate into a master, an MP4 and receipt events.

`decode` and `mux` are the acts of one claimed job (`steps.work` hands it in); `decode_file` does it without a spool.
An engine has `facts`, `frames(video, report)` and `sound(audio, report)`: `decode.Decoder` or `comfyui.ComfyUI`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from h3spool import container, importers, latent, receipt
from h3spool.errors import BadData, explained
from h3spool.job import Job, fsync_path, write_file
from h3spool.steps import checked_latent, latent_facts, sampling_facts

if TYPE_CHECKING:
    from h3spool.latent import Latent


@dataclass(frozen=True)
class Output:
    """How results are written: ffmpeg, the MP4's encoding (codec, quality, preset), what is kept and delivered."""

    ffmpeg: str
    encoding: Mapping[str, object] = field(default_factory=dict)
    mux: bool = True
    keep_master: bool = False
    deliver: Path | None = None


def decode(job: Job, attempt: int, engine: object, output: Output) -> str:
    """Decode a claimed job: to a lossless master (-> decoded), or with `output.mux` to the MP4 in one pass (-> done).

    Args:
        engine: a `decode.Decoder`, or its ComfyUI twin.

    Raises:
        BadData: the latent, or the picture or sound that came out, is broken.
        IOFailed, NotPermitted, Unavailable, TryLater
    """
    start = receipt.now()
    clip, digest, statistics, _ = checked_latent(job)
    folder = job.spool.tmp_dir("decode")
    try:
        master = folder / "master.mkv" if output.keep_master or not output.mux else None
        mp4 = folder / "clip.mp4" if output.mux else None
        facts = render(clip, engine, output, title=_title(job, clip), job_id=job.name, mp4=mp4, master=master)
        if master:
            _adopt_result(master, job.file(".master.mkv"))
        if mp4:
            _adopt_result(mp4, job.file(".mp4"))
    finally:
        job.spool.discard(folder)
    job.record(
        receipt.event("decode", job.spool.node, start, attempt=attempt, **facts["decode"]),
        latent=latent_facts(clip, digest, statistics),
    )
    if not output.mux:
        return "decoded"
    return _finish_mp4(job, attempt, start, facts["mux"], clip, output)


def mux(job: Job, attempt: int, output: Output) -> str:
    """Make the MP4 of a claimed job from its master (-> done).

    Raises:
        BadData: the master is missing.
        IOFailed, NotPermitted, Unavailable
    """
    from h3spool import media

    start = receipt.now()
    clip, _, _, _ = checked_latent(job)
    master = job.file(".master.mkv")
    if not master.exists():
        raise BadData(f"{master}: missing; `h3spool requeue {job.name}` decodes the job again")
    folder = job.spool.tmp_dir("mux")
    try:
        mp4 = folder / "clip.mp4"
        facts = media.mux(
            output.ffmpeg,
            master,
            mp4,
            media.Picture(clip.width, clip.height, clip.frames),
            sound=clip.audio is not None,
            encoding=media.Encoding(**output.encoding),
            tags=_tags(_title(job, clip), job.name),
        )
        _adopt_result(mp4, job.file(".mp4"))
    finally:
        job.spool.discard(folder)
    return _finish_mp4(job, attempt, start, facts, clip, output)


def render(
    clip: Latent,
    engine: object,
    output: Output,
    *,
    title: str,
    job_id: str,
    mp4: Path | None = None,
    master: Path | None = None,
) -> dict[str, dict]:
    """Decode a checked latent through the gate into ffmpeg, to the paths given.

    Returns:
        the facts of the `decode` and the `mux` event.

    Raises:
        BadData: picture or sound are broken; nothing is left at the paths.
        IOFailed, Unavailable, TryLater
    """
    from h3spool import media
    from h3spool.gate import Gate

    gate = Gate(clip.allow)
    picture_report: dict = {}
    sound_report: dict = {}
    sound = None
    if clip.audio is not None:
        sound = gate.watch_sound(engine.sound(clip.audio.array(), sound_report))
    written = media.encode(
        output.ffmpeg,
        gate.watch_frames(engine.frames(clip.video.array(), picture_report)),
        sound,
        media.Picture(clip.width, clip.height, clip.frames),
        mp4=mp4,
        master=master,
        encoding=media.Encoding(**output.encoding),
        tags=_tags(title, job_id),
    )
    prints = {key: written.pop(key) for key in ("frames_xxh3", "sound_xxh3")}
    facts = {**engine.facts, "picture": picture_report, "sound": sound_report, **prints, **gate.verdict()}
    if master:
        facts["master"] = written.pop("master")
    return {"decode": facts, "mux": written}


def _adopt_result(fresh: Path, target: Path) -> None:
    """Take a child's finished file into the claim."""
    with explained("taking in", target):
        os.rename(fresh, target)


def _title(job: Job, clip: Latent) -> str:
    return clip.metadata.get("title") or job.name


def _tags(title: str, job_id: str) -> dict[str, str]:
    return {"title": title, "comment": f"h3spool job {job_id}"}


def _finish_mp4(job: Job, attempt: int, start: str, facts: dict, clip: Latent, output: Output) -> str:
    """Record the MP4 with its hash, and deliver it."""
    from h3spool.deliver import deliver

    mp4 = job.file(".mp4")
    with explained("reading", mp4):
        digest = container.hash_file(mp4)
    job.record(receipt.event("mux", job.spool.node, start, attempt=attempt, sha256=digest, **facts))
    if output.deliver is not None:
        deliver(job, mp4, digest, output.deliver, _title(job, clip))
    return "done"


# ---------------------------------------------------------------- without a spool


@dataclass(frozen=True)
class LoadedFile:
    """A latent file that passed all checks: its path and hash, the clip, statistics and warnings."""

    path: Path
    sha256: str
    clip: Latent
    statistics: dict
    warnings: list[str]


def load_file(path: Path, allow: Iterable[str] = ()) -> LoadedFile:
    """Read and check one latent file of any known tool.

    Raises:
        BadData, NotFound, NotPermitted, IOFailed
    """
    raw = container.read_bytes(path)
    found = importers.load([path], raws=[raw])
    words = latent.parse_allow(str(found.facts.get("allow", ""))) | frozenset(allow)
    try:
        clip = latent.build(found.video, found.audio, {**found.facts, "allow": ",".join(sorted(words))})
        return LoadedFile(path, hashlib.sha256(raw).hexdigest(), clip, *latent.check(clip))
    except BadData as error:
        raise BadData(f"{path}: {error}") from None


def decode_file(source: LoadedFile, target: Path, engine: object, output: Output) -> dict:
    """Decode one latent file to an MP4 with a receipt beside it (`TARGET.pipeline.json`), without a spool.

    The files appear under their names when they are complete.

    Returns:
        the receipt.

    Raises:
        BadData, NotPermitted, IOFailed, Unavailable
    """
    start, clip, node = receipt.now(), source.clip, os.uname().nodename
    title = clip.metadata.get("title") or source.path.stem
    facts_of_latent = latent_facts(clip, source.sha256, source.statistics)
    account = receipt.begin(target.stem, title, facts_of_latent, sampling_facts(clip))
    fresh = target.with_name(f".{target.stem}.{os.getpid()}.part.mp4")
    try:
        facts = render(clip, engine, output, title=title, job_id=target.stem, mp4=fresh)
        digest = container.hash_file(fresh)
        facts["decode"]["warnings"] = source.warnings + facts["decode"]["warnings"]
        account["events"] += [
            receipt.event("decode", node, start, **facts["decode"]),
            receipt.event("mux", node, start, sha256=digest, **facts["mux"]),
        ]
        note = fresh.with_suffix(".json")
        write_file(note, [receipt.dump(account)])
        shutil.copymode(fresh, note)
        fsync_path(fresh)
        with explained("writing", target):
            os.replace(note, target.with_suffix(".pipeline.json"))
            os.replace(fresh, target)
        fsync_path(target.parent)
    finally:
        fresh.unlink(missing_ok=True)
        fresh.with_suffix(".json").unlink(missing_ok=True)
    return account
