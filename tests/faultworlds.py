"""Worlds for the fault suites: what lies where before a transition, the command, and what must hold in the end."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faultlib import (
    DAY_S,
    THEN,
    Done,
    World,
    contents,
    digest_of,
    drop_pair,
    in_a_fork,
    leftovers,
    places,
    where,
    whole,
    write_clip,
)


@dataclass(frozen=True)
class Transition:
    """One transition: how its world is prepared, the command, the ordinary commands after a fault, and the check.

    `argv(world)` is what is disturbed; `recover(world)` are ordinary commands; `check(world, done)` looks at the end.
    """

    name: str
    prepare: Callable[[World], None]
    argv: Callable[[World], tuple]
    recover: Callable[[World, Done], None]
    stdin: Callable[[World], bytes] = lambda world: b""
    clock_s: float = 0.0
    engine: bool = False


def clip(world: World, seed: int = 1) -> Path:
    """A good latent beside the spools."""
    path = world.root / f"clip{seed}.h3latent"
    return path if path.exists() else write_clip(path, seed)


# ---------------------------------------------------------------- what must hold in the end


def settled(world: World, jobs: int | range) -> None:
    """The ordinary commands bring every job to the decoder, whole, once, and leave no rubbish behind."""
    world.hand_over()
    names = [path.name for _, path in places(world.sampler)]
    assert len(names) == len(set(names)), f"a job is in two places: {sorted(names)}"
    assert len(names) in (jobs if isinstance(jobs, range) else (jobs,)), names
    assert {state for state, _ in places(world.sampler)} == {"done"}
    both_hold(world)
    world.fsck()
    tidy(world)
    both_hold(world)


def both_hold(world: World) -> None:
    """What the sampler let go is on the decoder: the same names, the same bytes, each once, verified."""
    sent = {path.name: whole(path) for _, path in places(world.sampler)}
    assert {path.name: whole(path) for _, path in places(world.decoder)} == sent
    assert all(where(world.decoder, name) == ["verified"] for name in sent)


def tidy(world: World) -> None:
    """A day later gc clears every tmp/, and nothing else."""
    spools = (world.sampler, world.decoder)
    before = [sorted(f"{state}/{path.name}" for state, path in places(spool)) for spool in spools]
    world.ok("gc", "-s", spools[0], THEN, "gc", "-s", spools[1], clock_s=1.1 * DAY_S)
    assert [leftovers(spool) for spool in spools] == [[], []]
    assert [sorted(f"{state}/{path.name}" for state, path in places(spool)) for spool in spools] == before


def finished_once(world: World) -> None:
    """On the decoder one job is done, with the MP4 its receipt speaks of, delivered once."""
    assert [state for state, _ in places(world.decoder)] == ["done"]
    ((_, job),) = places(world.decoder)
    whole(job)
    mp4 = digest_of(job / f"{job.name}.mp4")
    events = json.loads((job / f"{job.name}.pipeline.json").read_text())["events"]
    assert [event["sha256"] for event in events if event["step"] == "mux" and event["outcome"] == "ok"][-1] == mp4
    delivered = world.decoder.parent / "out"
    if delivered.exists():
        assert {path.name: digest_of(path) for path in delivered.iterdir() if path.suffix == ".mp4"} == {
            "clip.mp4": mp4
        }
    world.fsck()
    tidy(world)


# ---------------------------------------------------------------- worlds


def exported(world: World, count: int = 1) -> None:
    for seed in range(1, count + 1):
        world.export(clip(world, seed))


def verified(world: World, count: int = 1) -> None:
    exported(world, count)
    world.ok("verify", "-s", world.sampler)


def loose(world: World) -> None:
    drop_pair(world.sampler / "incoming", "my clip", clip(world).read_bytes())


def failed(world: World) -> None:
    verified(world)
    ((_, job),) = places(world.sampler)
    os.rename(job, world.sampler / "failed" / job.name)


def pushed(world: World) -> None:
    verified(world)
    world.ok("push", "--to", world.decoder, "--min-free", "0", "-s", world.sampler)


def arrived(world: World) -> None:
    """A push of two jobs that died when the copies were in the peer's tmp/ and nothing was admitted."""
    from faultlib import when

    verified(world, 2)
    world.run(
        *("push", "--to", world.decoder, "--min-free", "0", "-s", world.sampler), decide=when("fsync", "D/tmp/push")
    )
    (run,) = leftovers(world.decoder)
    assert len(list((world.decoder / "tmp" / run).iterdir())) == 2


def manifests(world: World) -> bytes:
    """What the sender would say of the jobs in the peer's tmp/."""
    (run,) = (world.decoder / "tmp").glob("push-*")
    lines = []
    for job in sorted(run.iterdir()):
        files = [{"name": f.name, "size": f.stat().st_size, "sha256": digest_of(f)} for f in sorted(job.iterdir())]
        lines.append(json.dumps({"job": job.name, "files": files}))
    return ("\n".join(lines) + "\n\n").encode()


def admit_argv(world: World) -> tuple:
    (run,) = (world.decoder / "tmp").glob("push-*")
    return ("admit", "--spool", world.decoder, "--min-free", "0", "--", run.name)


def decodable(world: World) -> None:
    world.export(clip(world), spool=world.decoder)
    world.ok("verify", "-s", world.decoder)


def done_on_decoder(world: World, *, mp4: bytes = b"an MP4", name: str | None = None) -> None:
    """A finished job on the decoder, with MP4, master and receipt, without having decoded."""
    decodable(world)
    ((_, job),) = places(world.decoder)
    finish_by_hand(world, job, mp4)


def finish_by_hand(world: World, job: Path, mp4: bytes) -> None:
    (job / f"{job.name}.mp4").write_bytes(mp4)
    (job / f"{job.name}.master.mkv").write_bytes(b"a master")
    account = json.loads((job / f"{job.name}.pipeline.json").read_text())
    times = {"start": "2026-01-01T00:00:00.000Z", "end": "2026-01-01T00:00:01.000Z", "outcome": "ok"}
    sha256 = digest_of(job / f"{job.name}.mp4")
    account["events"].append({"step": "mux", "node": "deco", **times, "sha256": sha256})
    (job / f"{job.name}.pipeline.json").write_text(json.dumps(account))
    os.rename(job, world.decoder / "done" / job.name)


def old_rubbish(world: World) -> None:
    """Done jobs on both nodes, and work in progress that died."""
    pushed(world)
    world.ok("verify", "-s", world.decoder)
    ((_, job),) = places(world.decoder)
    finish_by_hand(world, job, b"an MP4")
    for spool in (world.sampler, world.decoder):
        shutil.copytree(job.parent.parent / "done" / job.name, spool / "tmp" / "export-0123456789abcdef" / job.name)


def held_by_the_dead(world: World) -> None:
    """A push that died with its jobs claimed, and directories of the spool gone."""
    from faultlib import when

    verified(world, 2)
    argv = ("push", "--to", world.decoder, "--min-free", "0", "-s", world.sampler)
    world.run(*argv, decide=when("mkdir", "D/tmp/push"))
    (world.sampler / "results").rmdir()


def pulled_before(world: World) -> None:
    done_on_decoder(world)
    world.ok("pull", "--from", world.decoder, "--min-free", "0", "-s", world.sampler)
    ((_, job),) = places(world.decoder)
    path = world.decoder / "verified" / job.name
    os.rename(job, path)
    finish_by_hand(world, path, b"another MP4")


# ---------------------------------------------------------------- recoveries


def recover_init(world: World, _done: Done) -> None:
    world.create()
    exported(world)
    settled(world, 1)


def recover_export(world: World, done: Done) -> None:
    acknowledged = [line.split()[0] for line in done.out.splitlines() if line.endswith("  incoming")]
    assert acknowledged == [] or contents(world.sampler), "an acknowledged export is gone"
    name = world.export(clip(world))
    assert where(world.sampler, name) == ["incoming"]
    settled(world, 2 if acknowledged else range(1, 3))


def recover_bad(world: World, _done: Done) -> None:
    world.ok("verify", "-s", world.sampler, codes=(0, 65))
    assert [state for state, _ in places(world.sampler)] == ["failed"]
    world.fsck()
    tidy(world)


def recover_loose(world: World, _done: Done) -> None:
    world.ok("verify", "-s", world.sampler)
    assert [path.name for path in (world.sampler / "incoming").iterdir()] == []
    settled(world, 1)


def recover_requeue(world: World, done: Done) -> None:
    names = [path.name for _, path in places(world.sampler)]
    assert len(names) == 1
    world.ok("requeue", names[0], "-s", world.sampler, codes=(0, 75))
    settled(world, 1)


def recover_copy(world: World, done: Done) -> None:
    world.hand_over()
    first = min((path.name for _, path in places(world.sampler)), key=len)
    world.ok("requeue", first, "-s", world.sampler)
    settled(world, range(2, 4))


def recover_requeue_done(world: World, _done: Done) -> None:
    ((state, job),) = places(world.decoder)
    assert state in ("done", "incoming")
    assert (job / f"{job.name}.mp4").read_bytes() == b"an MP4"
    world.ok("requeue", job.name, "-s", world.decoder, codes=(0, 75))
    world.ok("verify", "-s", world.decoder)
    assert [state for state, _ in places(world.decoder)] == ["verified"]
    whole(world.decoder / "verified" / job.name)
    world.fsck()
    tidy(world)


def recover_gc(world: World, _done: Done) -> None:
    for spool in (world.sampler, world.decoder):
        world.ok("gc", "--days", "0", "-s", spool, clock_s=1.1 * DAY_S)
        assert leftovers(spool) == []
    assert list(places(world.sampler)) == []
    ((state, job),) = places(world.decoder)
    assert state == "done"
    assert sorted(path.suffix for path in job.iterdir()) == [".json", ".mp4", ".sha256"]
    assert (job / f"{job.name}.mp4").read_bytes() == b"an MP4"
    world.fsck()


def recover_pull(world: World, _done: Done) -> None:
    _results(world, {"": b"an MP4"})


def recover_second_pull(world: World, _done: Done) -> None:
    _results(world, {"": b"an MP4", ".2": b"another MP4"})


def _results(world: World, expected: dict[str, bytes]) -> None:
    world.ok("pull", "--from", world.decoder, "--min-free", "0", "-s", world.sampler)
    ((_, job),) = places(world.decoder)
    folder = world.sampler / "results" / job.name
    assert {path.name: path.read_bytes() for path in folder.glob("*.mp4")} == {
        f"{job.name}{number}.mp4": data for number, data in expected.items()
    }
    for number in expected:
        account = json.loads((folder / f"{job.name}{number}.pipeline.json").read_text())
        assert account["events"][-1]["sha256"] == digest_of(folder / f"{job.name}{number}.mp4")
    world.fsck()
    tidy(world)


def settle(jobs: int) -> Callable[[World, Done], None]:
    return lambda world, _done: settled(world, jobs)


def recover_repair(world: World, _done: Done) -> None:
    world.ok("fsck", "--repair", "-s", world.sampler)
    settled(world, 2)


def spoiled(world: World) -> None:
    exported(world)
    ((_, job),) = places(world.sampler)
    raw = bytearray((job / f"{job.name}.h3latent").read_bytes())
    raw[-5] ^= 1
    (job / f"{job.name}.h3latent").write_bytes(raw)


def nothing(_world: World) -> None:
    """Both spools are empty."""


def _name(world: World, spool: Path) -> str:
    ((_, job),) = places(spool)
    return job.name


PUSH = ("push", "--min-free", "0", "--to")
TRANSITIONS = [
    Transition(
        "init",
        lambda w: shutil.rmtree(w.sampler),
        lambda w: ("init", w.sampler, "--role", "sampler", "--node", "samp"),
        recover_init,
    ),
    Transition(
        "export",
        lambda w: clip(w) and None,
        lambda w: ("export", clip(w), "--min-free", "0", "-s", w.sampler),
        recover_export,
    ),
    Transition("verify", lambda w: exported(w, 2), lambda w: ("verify", "-s", w.sampler), settle(2)),
    Transition("quarantine", spoiled, lambda w: ("verify", "-s", w.sampler), recover_bad),
    Transition("adopt", loose, lambda w: ("verify", "-s", w.sampler), recover_loose),
    Transition("push", lambda w: verified(w, 2), lambda w: (*PUSH, w.decoder, "-s", w.sampler), settle(2)),
    Transition("admit", arrived, admit_argv, settle(2), stdin=manifests),
    Transition(
        "loop",
        loose,
        lambda w: ("loop", "--once", "--to", w.decoder, "--min-free", "0", "-s", w.sampler),
        recover_loose,
    ),
    Transition("requeue", failed, lambda w: ("requeue", _name(w, w.sampler), "-s", w.sampler), recover_requeue),
    Transition(
        "requeue-any-peer",
        failed,
        lambda w: ("requeue", "--any-peer", _name(w, w.sampler), "-s", w.sampler),
        recover_requeue,
    ),
    Transition("requeue-copy", pushed, lambda w: ("requeue", _name(w, w.sampler), "-s", w.sampler), recover_copy),
    Transition(
        "requeue-done",
        done_on_decoder,
        lambda w: ("requeue", _name(w, w.decoder), "-s", w.decoder),
        recover_requeue_done,
    ),
    Transition(
        "gc-sampler", old_rubbish, lambda w: ("gc", "--days", "0", "-s", w.sampler), recover_gc, clock_s=1.1 * DAY_S
    ),
    Transition(
        "gc-decoder", old_rubbish, lambda w: ("gc", "--days", "0", "-s", w.decoder), recover_gc, clock_s=1.1 * DAY_S
    ),
    Transition(
        "pull",
        done_on_decoder,
        lambda w: ("pull", "--from", w.decoder, "--min-free", "0", "-s", w.sampler),
        recover_pull,
    ),
    Transition(
        "pull-changed",
        pulled_before,
        lambda w: ("pull", "--from", w.decoder, "--min-free", "0", "-s", w.sampler),
        recover_second_pull,
    ),
    Transition("repair", held_by_the_dead, lambda w: ("fsck", "--repair", "-s", w.sampler), recover_repair),
]


def engine(world: World) -> tuple:
    """The options of a decode with the tiny checkpoint beside the worlds."""
    vae = world.root.parent / "vae"
    options = ("--precision", "fp32", "--device", "cpu", "--min-free", "0", "-s", world.decoder)
    return ("--video-vae", vae / "video.safetensors", "--audio-vae", vae / "audio.safetensors", *options)


def make_checkpoint(folder: Path) -> None:
    """A real checkpoint of one block and width 64."""

    def make() -> None:
        from golden import h3_weights as h3

        (folder / "vae").mkdir(exist_ok=True)
        h3.save(folder / "vae" / "video.safetensors", h3.video_weights(64, 1))
        h3.save(folder / "vae" / "audio.safetensors", h3.audio_weights())

    in_a_fork(make)


def with_torch_apart(step: Transition, work: Callable[[], None]) -> None:
    """Do the work, in a child that has torch where the transition decodes."""

    def decode() -> None:
        import h3spool.decode  # noqa: F401  (so that each fork has it)

        work()

    in_a_fork(decode) if step.engine else work()


def has_master(world: World) -> None:
    decodable(world)
    world.ok("decode", *engine(world))


def recover_decode(world: World, _done: Done) -> None:
    deliver = ("--deliver", world.decoder.parent / "out") if (world.decoder.parent / "out").exists() else ()
    world.ok("loop", "--once", *deliver, *engine(world))
    finished_once(world)


def will_deliver(world: World) -> None:
    decodable(world)
    (world.decoder.parent / "out").mkdir()


DECODING = [
    Transition("decode", decodable, lambda w: ("decode", *engine(w)), recover_decode, engine=True),
    Transition("mux", has_master, lambda w: ("mux", "--min-free", "0", "-s", w.decoder), recover_decode, engine=True),
    Transition(
        "decode-mux",
        will_deliver,
        lambda w: ("decode", "--mux", "--deliver", w.decoder.parent / "out", *engine(w)),
        recover_decode,
        engine=True,
    ),
]
