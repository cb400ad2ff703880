"""The steps of the pipeline on one spool: export, verify, and `work`, the claiming and settling around decode and mux.

A step takes what is ready, one job at a time, and yields an `Outcome` a job. A bad job goes to failed/ with the reason
in its receipt and the batch goes on; what concerns every job (a missing program, an unusable checkpoint, a busy peer)
puts the job back and ends the batch. numpy is loaded only where numbers are looked at.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from h3spool import container, latent, receipt
from h3spool.adopt import SETTLE_S, adopt, job_name
from h3spool.errors import BadData, H3SpoolError, IOFailed, NotFound, NotPermitted, TryLater, explained
from h3spool.job import Job, Outcome, fsync_path, fsync_tree, write_file
from h3spool.spool import CLAIMED_FROM, MAX_ATTEMPTS, LockHeld, Slot, Spool

if TYPE_CHECKING:
    from h3spool.latent import Latent

MIN_FREE_BYTES = 2 << 30


# ---------------------------------------------------------------- export


def export(
    video: object,
    audio: object = None,
    *,
    spool: Spool | Path | str,
    title: str | None = None,
    allow: Iterable[str] = (),
    meta: Mapping[str, object] | None = None,
    producer: Mapping[str, object] | None = None,
    source: tuple[str, str] | None = None,
    min_free_bytes: int = MIN_FREE_BYTES,
) -> str:
    """Put a finished latent into a spool as a new job. Everything is checked before anything is written.

    Args:
        video: [1, 24, T, H, W] in the sampler's scale, numpy or torch; or a ComfyUI NestedTensor of both streams.
        audio: [1, 32, 2, Ta]; None where `video` holds both, or with allow "no-audio".
        spool: an open spool or its path.
        title: the user's name for the clip; it never becomes a path in the spool.
        allow: what is unusual but meant: image, no-audio, silent, black, off-grid.
        meta: known facts of sampling (seed, steps, sampler, shift_video, shift_audio, lora, prompt, ...).
        producer: anything else worth keeping (workflows); stored beside the latent.
        source: stem and SHA-256 of a file this comes from, which becomes one job however often it is met.

    Returns:
        The job's name.

    Raises:
        BadData: the latent is refused, with the reason.
        IOFailed, NotFound, NotPermitted, NotUsable
    """
    store = spool if isinstance(spool, Spool) else Spool(spool)
    start = receipt.now()
    if audio is None:
        video, audio = _split_nested(video)
    facts = {"producer": "h3spool", **(meta or {}), "title": title, "allow": ",".join(sorted(set(allow)))}
    clip = latent.build(video, audio, facts)
    statistics, warnings = latent.check(clip)
    pieces = latent.serialize(clip)
    try:
        note = receipt.dump(dict(producer)) if producer else b""
    except (TypeError, ValueError) as error:
        raise BadData(f"producer must be made of what JSON knows: {error}") from None
    store.require_space(sum(map(len, [*pieces, note])), min_free_bytes)

    name = store.new_job_name() if source is None else job_name(*source)
    folder = store.tmp_dir("export")
    job = Job(store, name, folder / name)
    try:
        with explained("creating", job.path):
            job.path.mkdir(mode=0o700)
        digest = write_file(job.latent, pieces)
        write_file(job.file(".h3latent.sha256"), [container.sidecar_text(digest, job.latent.name)])
        if note:
            job.write(f"{name}.producer.json", note)
        account = receipt.begin(name, title or "", latent_facts(clip, digest, statistics), sampling_facts(clip))
        account["events"].append(receipt.event("export", store.node, start, warnings=warnings))
        job.write_receipt(account)
        if source is None:
            store.publish(job, "incoming")
        else:
            _publish_source(job, source[1])
    finally:
        store.discard_unpublished(folder)
    return name


def _publish_source(job: Job, digest: str) -> None:
    """Publish under a name that can come again; the source's hash is what it is known by."""
    fsync_tree(job.path)
    fsync_path(job.path.parent)
    fsync_path(job.path.parent.parent)
    result = job.spool.publish_once({job.name: (job.path, digest)})[job.name]
    if isinstance(result, H3SpoolError):
        raise result


def _split_nested(value: object) -> tuple[object, object]:
    """Take apart a ComfyUI LATENT or NestedTensor of two streams; anything else is the video alone."""
    if isinstance(value, Mapping):
        value = value.get("samples")
    if getattr(value, "is_nested", False):
        streams = list(getattr(value, "tensors", None) or value.unbind())
        if len(streams) != 2:
            raise BadData(f"a nested latent must hold video and audio, this one holds {len(streams)} tensors")
        return streams[0], streams[1]
    return value, None


def latent_facts(clip: Latent, digest: str, statistics: dict) -> dict:
    """What the receipt says of the latent."""
    size = {"frames": clip.frames, "width": clip.width, "height": clip.height, "frame_rate": latent.FRAME_RATE}
    return {"sha256": digest, **size, **statistics}


def sampling_facts(clip: Latent) -> dict:
    """What the latent's metadata says of its making."""
    own = {"format", "version", "frames", "frame_rate", "width", "height", "title", "allow"}
    return {key: value for key, value in clip.metadata.items() if key not in own}


# ---------------------------------------------------------------- verify


def verify_if_idle(spool: Spool, *, settle_s: float = SETTLE_S) -> Iterator[Outcome]:
    """`verify` for loops: nothing happens while another one is at work."""
    try:
        yield from verify(spool, settle_s=settle_s)
    except LockHeld:
        return


def verify(spool: Spool, names: Iterable[str] = (), *, settle_s: float = SETTLE_S) -> Iterator[Outcome]:
    """Check jobs in incoming/ and move them to verified/, or to failed/ with the reason; adopt loose pairs first.

    Args:
        names: only these jobs; empty: all.
        settle_s: how long a loose pair that does not agree must have been left unchanged before it is given up.

    Raises:
        LockHeld: another verify is at work.
    """
    with spool.lock("verify", wait=False):
        spool.finish_published()
        yield from (outcome for outcome in adopt(spool, settle_s=settle_s) if outcome.error)
        for name in list(names) or spool.names("incoming"):
            here = spool.holds("incoming", name)
            yield _verify_one(spool.job("incoming", name)) if here else elsewhere(spool, name, "incoming")


def _verify_one(job: Job) -> Outcome:
    start = receipt.now()
    try:
        _check_files(job)
        clip, digest, statistics, warnings = checked_latent(job)
    except (BadData, NotPermitted) as error:
        return quarantine(job, "verify", start, error)
    except H3SpoolError as error:
        return Outcome(job.name, "incoming", error)
    try:
        facts = {"latent": latent_facts(clip, digest, statistics), "title": clip.metadata.get("title", "")}
        job.record(receipt.event("verify", job.spool.node, start, warnings=warnings), **facts)
        if job.state().get("attempts"):
            job.set_state(attempts=None)
        job.spool.promote(job, "verified")
    except H3SpoolError as error:  # of this machine, not of the job
        return Outcome(job.name, "incoming", error)
    return Outcome(job.name, "verified")


def checked_latent(job: Job) -> tuple[Latent, str, dict, list[str]]:
    """The job's latent after all checks, its SHA-256, its statistics and warnings.

    Raises:
        BadData, NotPermitted, IOFailed
    """
    raw, digest = job.read_latent()
    clip = latent.read(job.latent, raw)
    try:
        return clip, digest, *latent.check(clip)
    except BadData as error:
        raise BadData(f"{job.latent}: {error}") from None


def _check_files(job: Job) -> None:
    """Refuse links and foreign files: a job holds its own files and nothing else."""
    with explained("listing", job.path), os.scandir(job.path) as entries:
        for entry in entries:
            if entry.is_symlink():
                raise NotPermitted(f"{entry.path}: a symbolic link, which a spool never follows")
            if not entry.is_file(follow_symlinks=False):
                raise BadData(f"{entry.path}: not a plain file, a job holds nothing else")
            if (owner := entry.stat(follow_symlinks=False).st_uid) != os.geteuid():
                raise NotPermitted(f"{entry.path}: belongs to uid {owner}, this process is uid {os.geteuid()}")
            if entry.name != "state.json" and not entry.name.startswith(job.name + "."):
                raise BadData(f"{entry.path}: not a file of this job")


def quarantine(job: Job, step: str, start: str, error: Exception, **facts: object) -> Outcome:
    """Move a job to failed/ with the reason in its receipt, even where the receipt cannot be written."""
    try:
        job.record(receipt.event(step, job.spool.node, start, receipt.FAILED, error=str(error), **facts))
    except (IOFailed, NotPermitted):
        pass  # the job is worth more than its account
    job.spool.publish(job, "failed")
    return Outcome(job.name, "failed", error)


def elsewhere(spool: Spool, name: str, wanted: str) -> Outcome:
    """The outcome for a job that was asked for by name and is not where the step takes jobs from."""
    found = spool.find(name)
    if found is None:
        return Outcome(name, "missing", NotFound(f"{spool.root}: has no job {name}"))
    place = found[0]
    order = ["incoming", "verified", "decoded", "done"]
    reached = CLAIMED_FROM.get(place.removeprefix("active/").rpartition("-")[0], place)
    if place == "failed":
        error = BadData(
            f"job {name} is in failed/; `h3spool status {name}` says why, `h3spool requeue {name}` tries again"
        )
        return Outcome(name, place, error)
    if reached in order and order.index(reached) > order.index(wanted):
        return Outcome(name, place)  # done before: exit 0
    return Outcome(name, place, TryLater(f"job {name} is in {place}, this step takes jobs from {wanted}/"))


# ---------------------------------------------------------------- claimed work


def work(
    spool: Spool, step: str, act: Callable[[Job, int], str], names: Iterable[str] = (), *, ready: Callable[[], None]
) -> Iterator[Outcome]:
    """Claim jobs one at a time and let `act(job, attempt)` do the step; it returns the state the job goes to.

    Args:
        ready: called before each claim; raises what would make the work impossible (no space left).

    Raises:
        Unavailable, NotUsable, NotPermitted, TryLater: they concern every job; the one at hand was put back.
    """
    spool.empty_slots(step)
    asked = list(names)
    waiting = asked or spool.names(CLAIMED_FROM[step])
    if not waiting:
        return
    slot = spool.take_slot(step)
    try:
        for name in waiting:
            job = None
            if spool.holds(CLAIMED_FROM[step], name):
                ready()
                job = slot.claim(name)
            if job is not None:
                yield _attempt(slot, job, act)
            elif asked:
                yield elsewhere(spool, name, CLAIMED_FROM[step])
    finally:
        slot.release()


def _attempt(slot: Slot, job: Job, act: Callable[[Job, int], str]) -> Outcome:
    """One attempt at a claimed job. A death counts, a clean put-back and "try later" do not; five are enough."""
    start = receipt.now()
    before = job.state().get("attempts", 0)
    if before >= MAX_ATTEMPTS:
        error = BadData(f"{before} attempts at {slot.step} ended in an error or a death; see its events")
        return quarantine(job, slot.step, start, error)
    try:
        job.set_state(attempts=before + 1)
        state = act(job, before + 1)
        job.set_state(attempts=None)  # the next step counts its own
        slot.spool.publish(job, state)
    except BadData as error:
        return quarantine(job, slot.step, start, error, attempt=before + 1)
    except Exception as error:
        counts = not isinstance(error, H3SpoolError) or isinstance(error, IOFailed)
        _put_back(slot, job, before + counts, start, error if counts else None)
        if not counts:
            raise
        return Outcome(job.name, CLAIMED_FROM[slot.step], error)
    except BaseException:  # interrupted: finish nothing, lose nothing
        _put_back(slot, job, before, start, None)
        raise
    return Outcome(job.name, state)


def _put_back(slot: Slot, job: Job, attempts: int, start: str, error: Exception | None) -> None:
    if not job.path.exists():
        return  # interrupted right after it was published
    try:
        job.set_state(attempts=attempts or None)
        if error is not None:
            facts = {"attempt": attempts, "error": f"{type(error).__name__}: {error}"}
            job.record(receipt.event(slot.step, job.spool.node, start, receipt.PUT_BACK, **facts))
    except (IOFailed, NotPermitted):
        pass  # a full disk must not keep the job in the slot
    slot.put_back(job)
