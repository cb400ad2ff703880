"""Every hole that the model of the hand-over found (numbers as in the protocol's list), as a test of the real code."""

import errno
import json
import os
import shutil
import time
from pathlib import Path

import pytest
from faultlib import (
    DAY_S,
    FULL,
    KILL,
    World,
    digest_of,
    drop_pair,
    leftovers,
    memory_folder,
    need_tracing,
    picks,
    places,
    points_of,
    when,
    where,
    whole,
    write_clip,
)
from faultworlds import (
    PUSH,
    admit_argv,
    arrived,
    clip,
    done_on_decoder,
    exported,
    finish_by_hand,
    manifests,
    settled,
    verified,
)

pytestmark = pytest.mark.faults
SEEN_TO_RENAME = ("rename", r"D/tmp/push-[^/]*/[^/]* -> D/incoming/")


@pytest.fixture
def world():
    need_tracing()
    with memory_folder() as folder:
        yield World(folder / "world").create()


def push(world: World, **options) -> object:
    return world.run(*PUSH, world.decoder, "-s", world.sampler, **options)


def seen(spool: Path, name: str) -> dict:
    return json.loads((spool / "seen" / name).read_text())


def only(spool: Path) -> Path:
    ((_, job),) = places(spool)
    return job


# ---------------------------------------------------------------- 1 to 4: seen/ and the rename


def test_1_gc_a_day_later_spares_what_was_accepted_but_not_moved(world):
    verified(world)
    assert push(world, decide=when(*SEEN_TO_RENAME)).code == -9
    ((name, _),) = [(path.name, path) for _, path in places(world.sampler)]
    assert (world.decoder / seen(world.decoder, name)["tmp"]).is_dir()
    world.ok("gc", "-s", world.decoder, clock_s=2 * DAY_S)
    assert (world.decoder / seen(world.decoder, name)["tmp"]).is_dir()
    settled(world, 1)


def test_1_a_later_run_of_the_same_sender_spares_it_too(world):
    verified(world, 2)
    assert push(world, decide=when(*SEEN_TO_RENAME)).code == -9
    kept = leftovers(world.decoder)
    name = max(path.name for _, path in places(world.sampler))
    run = f"push-{json.loads((world.sampler / 'spool.json').read_text())['uuid']}-0-{'0' * 16}"
    world.ok("admit", "--spool", world.decoder, "--min-free", "0", "--", run)
    assert leftovers(world.decoder) == kept
    assert (world.decoder / seen(world.decoder, name)["tmp"]).is_dir()
    settled(world, 2)


@pytest.mark.parametrize(
    ("call", "where_"),
    [("fsync", "D/seen$"), SEEN_TO_RENAME, ("openat", r"D/tmp/seen-[^/]*/"), ("fsync", "D/incoming$")],
)
def test_1_an_error_between_seen_and_the_rename_does_not_discard_the_only_copy(world, call, where_):
    """Found by the error suite: the sender's clean-up deleted a run that seen/ named, and asked again: acknowledged."""
    verified(world, 2)
    done = push(world, decide=when(call, where_, errno.EIO, nth=2 if call == "openat" else 1))
    assert done.code == 74
    assert all(state == "verified" for state, _ in places(world.sampler))
    settled(world, 2)


@pytest.mark.parametrize(
    ("call", "where_"), [("fsync", "S/seen$"), ("rename", r"S/tmp/adopt-[^/]*/[^/]* -> S/incoming/")]
)
def test_1_the_same_for_an_adopted_pair(world, call, where_):
    drop_pair(world.sampler / "incoming", "pair", clip(world).read_bytes())
    assert world.run("verify", "-s", world.sampler, decide=when(call, where_, errno.EIO)).code == 74
    world.ok("verify", "-s", world.sampler)
    assert [path.name for path in (world.sampler / "incoming").iterdir()] == []
    settled(world, 1)


@pytest.mark.parametrize("call", ["rename", "fsync"] if FULL else ["rename"])
def test_1_the_same_for_a_watched_folder(world, call):
    folder = world.root / "watched"
    folder.mkdir()
    write_clip(folder / "clip.h3latent")
    argv = ("export", "--watch", folder, "--min-free", "0", "-s", world.sampler)
    before = {"rename": r"S/tmp/export-[^/]*/[^/]* -> S/incoming/", "fsync": "S/seen$"}[call]
    world.run(*argv, decide=when(call, before, errno.EIO), timeout_s=3)
    world.run(*argv, timeout_s=3)
    settled(world, 1)


def test_2_the_tmp_path_is_durable_before_seen_is(world):
    """In this order: files, job directory, run directory, tmp/, then the link, then seen/. Power cuts: see there."""
    verified(world)
    points = push(world, decide=lambda _n, _p: None).points
    texts = [str(point) for point in points]
    link = next(n for n, text in enumerate(texts) if text.startswith("link D/tmp/seen-"))
    synced = [point.paths[0] for point in points[:link] if point.call == "fsync" and point.paths[0].startswith("D/tmp")]
    name = only(world.sampler).name
    run = next(path for path in synced if path.startswith("D/tmp/push-")).split("/")[2]
    files = {f"D/tmp/{run}/{name}/{name}{suffix}" for suffix in (".h3latent", ".h3latent.sha256", ".pipeline.json")}
    expected = [*files, f"D/tmp/{run}/{name}", f"D/tmp/{run}", "D/tmp"]
    assert set(expected) <= set(synced)
    assert (
        max(synced.index(file) for file in files) < synced.index(f"D/tmp/{run}/{name}") < synced.index(f"D/tmp/{run}")
    )
    rename = next(
        n for n, point in enumerate(points) if point.call == "rename" and point.paths[1] == f"D/incoming/{name}"
    )
    assert "fsync D/seen" in texts[link:rename]


def test_3_seen_appears_whole_or_not_at_all(world):
    """Killed before each call of its making, seen/JOB is absent or readable; never empty."""
    arrived(world)
    for index in range(0, 200, 1 if FULL else 3):
        trial = world.copy(world.root.parent / "trial")
        done = trial.run(
            *admit_argv(trial), stdin=manifests(trial), decide=lambda n, _p, at=index: KILL if n == at else None
        )
        for record in (trial.decoder / "seen").iterdir():
            assert set(json.loads(record.read_text())) >= {"sha256", "tmp"}
        if done.code != -9:
            break
    assert index > 20
    assert done.code == 0


def test_4_a_repeated_acknowledgement_finishes_the_rename(world):
    """Killed before the rename; asked again for the same job, admit acknowledges it and it is in incoming/."""
    verified(world)
    assert push(world, decide=when(*SEEN_TO_RENAME)).code == -9
    done = push(world)
    assert done.code == 0
    assert where(world.decoder, done.jobs[0]) == ["incoming"]
    settled(world, 1)


def test_4_verify_alone_finishes_it(world):
    verified(world)
    assert push(world, decide=when(*SEEN_TO_RENAME)).code == -9
    world.ok("verify", "-s", world.decoder)
    assert [state for state, _ in places(world.decoder)] == ["verified"]
    settled(world, 1)


# ---------------------------------------------------------------- 5 and 6: runs


def test_5_each_run_has_a_name_of_its_own(world):
    verified(world)
    runs = set()
    for _ in range(3):
        done = push(world, decide=when("fsync", "D/tmp/push"))
        runs |= {point.paths[0].split("/")[2] for point in done.points if point.paths[0].startswith("D/tmp/push-")}
    assert len(runs) == 3
    assert all(len(run.rsplit("-", 1)[1]) == 16 for run in runs)
    assert len(leftovers(world.decoder)) == 1  # each new run clears the one before
    settled(world, 1)


def test_5_an_acknowledgement_lost_after_the_rename_does_not_admit_twice(world):
    verified(world)
    assert push(world, decide=when("rename", "S/active/push-0/.* -> S/done/")).code == -9
    assert [state for state, _ in places(world.decoder)] == ["incoming"]
    settled(world, 1)


@pytest.mark.parametrize("missing", [".pipeline.json", ".producer.json", ".h3latent.sha256", ".h3latent"])
def test_6_a_job_without_all_its_files_is_not_whole(world, missing):
    arrived(world)
    run = next((world.decoder / "tmp").glob("push-*"))
    first = min(run.iterdir())
    (first / f"{first.name}.producer.json").write_text("{}")
    lines = manifests(world)
    (first / f"{first.name}{missing}").unlink()
    answers = [json.loads(line) for line in world.ok(*admit_argv(world), stdin=lines).out.splitlines()[1:]]
    assert [answer.get("exit") for answer in answers] == [75, None]
    assert [state for state, _ in places(world.decoder)] == ["incoming"]
    settled(world, 2)


def test_6_a_stranger_among_the_files_is_not_whole_either(world):
    arrived(world)
    lines = manifests(world)
    run = next((world.decoder / "tmp").glob("push-*"))
    first = min(run.iterdir())
    (first / "state.json").write_text('{"peer": "x"}')
    answers = [json.loads(line) for line in world.ok(*admit_argv(world), stdin=lines).out.splitlines()[1:]]
    assert [answer.get("exit") for answer in answers] == [75, None]


# ---------------------------------------------------------------- 7: the peer


def test_7_the_peer_is_durable_before_it_is_told_the_name(world):
    verified(world)
    points = [str(point) for point in push(world, decide=lambda _n, _p: None).points]
    name = only(world.sampler).name
    bound = points.index(next(p for p in points if p.startswith("rename") and p.endswith(f"{name}/state.json")))
    synced = points.index(f"fsync S/active/push-0/{name}", bound)
    told = next(n for n, p in enumerate(points) if p.startswith("link D/tmp/seen-"))
    assert bound < synced < told


def test_7_a_job_told_to_one_peer_goes_to_no_other(world):
    verified(world)
    assert push(world, decide=when("rename", "S/active/push-0/.* -> S/done/")).code == -9
    other = World(world.root / "other").create().decoder
    done = world.run(*PUSH, other, "-s", world.sampler)
    assert list(places(other)) == []
    assert done.code in (0, 75)
    assert [state for state, _ in places(world.sampler)] == ["verified"]
    moved = world.root / "E"
    os.rename(world.decoder, moved)
    os.symlink(moved, world.decoder)  # the same spool under another address is the same peer
    world.ok(*PUSH, moved, "-s", world.sampler)
    assert [state for state, _ in places(world.sampler)] == ["done"]
    assert len(list(places(moved))) == 1


def test_7_the_owner_can_unbind_it(world):
    verified(world)
    assert push(world, decide=when("mkdir", "D/tmp/push")).code == -9
    shutil.rmtree(world.decoder)
    world.ok("fsck", "--repair", "-s", world.sampler)
    other = World(world.root / "other").create()
    world.ok("requeue", "--any-peer", only(world.sampler).name, "-s", world.sampler)
    world.decoder = other.decoder
    settled(world, 1)


# ---------------------------------------------------------------- 8, 12, 13: slots and children


@pytest.mark.parametrize(("step", "state"), [("push", "verified"), ("decode", "verified"), ("mux", "decoded")])
def test_8_a_slot_that_nobody_takes_is_emptied_by_any_worker(world, step, state):
    spool = world.sampler if step == "push" else world.decoder
    name = world.export(clip(world), spool=spool)
    world.ok("verify", "-s", spool)
    (spool / "active" / f"{step}-3").mkdir(mode=0o700)
    os.rename(spool / "verified" / name, spool / "active" / f"{step}-3" / name)
    if step == "push":
        world.ok("push", "--to", world.decoder, "--min-free", "0", "-s", spool)
        assert where(spool, name) == ["done"]
    else:
        world.run(step, "--min-free", "1e9", "-s", spool)  # no room: it starts, scans, and must not work
        assert where(spool, name) == [state]


def test_12_a_decoding_loop_empties_the_slot_of_a_dead_mux(world):
    name = world.export(clip(world), spool=world.decoder)
    world.ok("verify", "-s", world.decoder)
    (world.decoder / "active" / "mux-1").mkdir(mode=0o700)
    os.rename(world.decoder / "verified" / name, world.decoder / "active" / "mux-1" / name)
    argv = ("loop", "--once", "--min-free", "1e9", "--video-vae", "none", "-s", world.decoder)
    world.run(*argv)
    assert where(world.decoder, name) == ["decoded"]


def test_13_no_name_in_tmp_is_ever_used_twice(world):
    from h3spool.spool import Spool

    spool = Spool(world.decoder)
    assert len({spool.tmp_path("decode") for _ in range(10_000)}) == 10_000


# ---------------------------------------------------------------- 10, 16, 17: attempts, requeue, gc


def test_10_verify_sets_attempts_to_zero_and_keeps_the_peer(world):
    exported(world)
    job = only(world.sampler)
    (job / "state.json").write_text('{"attempts": 5, "peer": "0b2c"}')
    world.ok("verify", "-s", world.sampler)
    assert json.loads((only(world.sampler) / "state.json").read_text()) == {"peer": "0b2c"}


def test_10_push_counts_no_attempts(world):
    verified(world)
    for _ in range(6):
        assert push(world, decide=when("mkdir", "D/tmp/push")).code == -9
    state = json.loads((only(world.sampler) / "state.json").read_text())
    assert "attempts" not in state
    settled(world, 1)


@pytest.mark.parametrize("place", ["failed", "done"])
def test_16_requeue_is_durable(world, place):
    done_on_decoder(world)
    name = only(world.decoder).name
    os.rename(world.decoder / "done" / name, world.decoder / place / name)
    points = [str(point) for point in points_of(world, "requeue", name, "-s", world.decoder).points]
    moved = points.index(f"rename D/{place}/{name} -> D/incoming/{name}")
    assert {"fsync D/incoming", f"fsync D/{place}"} <= set(points[moved : points.index("write stdout")])


def test_17_requeue_refuses_what_gc_has_emptied(world):
    done_on_decoder(world)
    name = only(world.decoder).name
    world.ok("gc", "--days", "0", "-s", world.decoder)
    done = world.run("requeue", name, "-s", world.decoder)
    assert done.code == 65
    assert where(world.decoder, name) == ["done"]
    assert (only(world.decoder) / f"{name}.mp4").exists()


def test_17_gc_keeps_a_failed_job_that_holds_an_mp4(world):
    done_on_decoder(world)
    name = only(world.decoder).name
    os.rename(world.decoder / "done" / name, world.decoder / "failed" / name)
    world.ok("gc", "--days", "0", "--failed", "-s", world.decoder)
    assert (world.decoder / "failed" / name / f"{name}.mp4").exists()
    world.ok("gc", "--days", "0", "--failed", "--mp4", "-s", world.decoder)
    assert list(places(world.decoder)) == []


def test_17_gc_beside_a_requeue_takes_nothing_from_incoming(world):
    """Every step of gc with a requeue in between: the job keeps its latent, or the requeue is refused."""
    done_on_decoder(world)
    name = only(world.decoder).name
    trial = world.copy(world.root.parent / "trial")
    for index in range(len(points_of(trial, "gc", "--days", "0", "-s", trial.decoder).points)):
        trial = world.copy(world.root.parent / "trial")
        beside = World(trial.root, trial.root.parent / "beside.log")

        def decide(n, _point, at=index, beside=beside):
            if n == at:
                beside.run("requeue", name, "-s", beside.decoder)

        trial.run("gc", "--days", "0", "-s", trial.decoder, decide=decide)
        ((state, job),) = places(trial.decoder)
        assert (job / f"{name}.mp4").exists()
        assert state == "done" or (job / f"{name}.h3latent").exists()
        assert state in ("done", "incoming")


# ---------------------------------------------------------------- 14, 15: loose pairs


def test_14_a_pair_replaced_while_it_is_adopted_is_two_jobs(world):
    """At every point of the adoption another latent is dropped under the same name."""
    first, second = clip(world, 1).read_bytes(), clip(world, 2).read_bytes()
    base = world.copy(world.root.parent / "base")
    drop_pair(base.sampler / "incoming", "pair", first)
    points = points_of(base.copy(world.root.parent / "trial"), "verify", "-s", world.root.parent / "trial" / "S").points
    hashed = next(n for n, point in enumerate(points) if point.call == "rename")
    for index in picks(len(points), 16):
        trial = base.copy(world.root.parent / "trial")

        def decide(n, _point, at=index, incoming=trial.sampler / "incoming"):
            if n == at:
                drop_pair(incoming.parent.parent, "pair", second)
                for suffix in (".h3latent", ".h3latent.sha256"):  # as rsync and mv do: over the old ones
                    os.rename(incoming.parent.parent / f"pair{suffix}", incoming / f"pair{suffix}")

        trial.run("verify", "-s", trial.sampler, decide=decide)
        trial.ok("verify", "-s", trial.sampler)
        found = sorted(whole(job) for _, job in places(trial.sampler))
        hashes = sorted(digest_of(clip(world, seed)) for seed in (1, 2))
        superseded = index < hashed and found == [digest_of(clip(world, 2))]  # replaced before it was read through
        assert found == hashes or superseded, index
        assert [path for path in (trial.sampler / "incoming").iterdir() if path.is_file()] == []


def test_14_a_death_while_a_replaced_file_is_taken_out_keeps_it(world):
    """Replaced right before it is taken into tmp/, killed before it is given back."""
    drop_pair(world.sampler / "incoming", "pair", clip(world, 1).read_bytes())
    taking, giving = (
        when("rename", "S/incoming/pair.h3latent -> S/tmp/taken"),
        when("link", "S/tmp/taken.* -> S/incoming/pair"),
    )

    def decide(n, point):
        if taking(n, point):
            (world.sampler / "incoming" / "pair.h3latent").unlink()
            (world.sampler / "incoming" / "pair.h3latent").write_bytes(clip(world, 2).read_bytes())
        return giving(n, point)

    assert world.run("verify", "-s", world.sampler, decide=decide).code == -9
    world.ok("verify", "-s", world.sampler)
    raw = clip(world, 2).read_bytes()
    assert (world.sampler / "incoming" / "pair.h3latent").read_bytes() == raw
    drop_pair(world.sampler / "incoming", "pair", raw)  # the tool brings the checksum too
    settled(world, 2)


def test_15_killed_between_the_two_unlinks_the_lone_sidecar_goes(world):
    drop_pair(world.sampler / "incoming", "my pair", clip(world).read_bytes())
    done = world.run(
        "verify", "-s", world.sampler, decide=when("rename", "S/incoming/my pair.h3latent.sha256 -> S/tmp/")
    )
    assert done.code == -9
    left = [path.name for path in (world.sampler / "incoming").iterdir() if path.is_file()]
    assert left == ["my pair.h3latent.sha256"]
    world.ok("verify", "-s", world.sampler)
    settled(world, 1)
    assert list((world.sampler / "incoming").iterdir()) == []


def test_15_dropped_again_it_is_the_same_job(world):
    for _ in range(2):
        drop_pair(world.sampler / "incoming", "pair", clip(world).read_bytes())
        world.ok("verify", "-s", world.sampler)
        assert list((world.sampler / "incoming").iterdir()) == []
    settled(world, 1)
    drop_pair(world.sampler / "incoming", "pair", clip(world).read_bytes())
    settled(world, 1)


# ---------------------------------------------------------------- 18 to 20


def test_18_delivered_twice_is_delivered_once(world):
    """The act of delivering, killed at every point and repeated with other bytes: one file, the last one."""
    from h3spool.deliver import deliver
    from h3spool.job import Job
    from h3spool.spool import Spool

    done_on_decoder(world)
    base = world
    for index in range(60):
        trial = base.copy(base.root.parent / "trial")
        job = only(trial.decoder)
        mp4, folder = job / f"{job.name}.mp4", trial.root / "out"

        def act(mp4=mp4, folder=folder, trial=trial, job=job):
            deliver(Job(Spool(trial.decoder), job.name, job), mp4, digest_of(mp4), folder, "A title")

        from faultlib import Tracer

        def child(act=act):
            act()
            os._exit(0)

        tracer = Tracer(trial.root, lambda n, _p, at=index: KILL if n == at else None)
        code = tracer.run(child)
        mp4.unlink()  # a decode repeated makes a new file, with other bytes
        mp4.write_bytes(b"decoded again")
        act()
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert files == {"A title.mp4": b"decoded again"}, index
        if code == 0:
            break
    assert index > 5
    assert code == 0
    texts = [str(point) for point in tracer.points]
    placed = next(n for n, text in enumerate(texts) if text.endswith("-> out/A title.mp4"))
    assert any(text.startswith("fsync out/") for text in texts[:placed])  # people never see it empty


def test_19_an_admit_that_waits_for_its_sender_blocks_nobody(world):
    """While one admit has greeted and reads, another run is received and a pair adopted."""
    arrived(world)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(reading, 0)
        os.close(writing)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        from faultlib import LAUNCH, REPO, sys

        run = f"push-{'1' * 8}-{'1' * 4}-{'1' * 4}-{'1' * 4}-{'1' * 12}-0-{'1' * 16}"
        argv = ["admit", "--spool", str(world.decoder), "--min-free", "0", "--", run]
        os.execve(sys.executable, [sys.executable, "-c", LAUNCH, *argv], os.environ | {"PYTHONPATH": str(REPO)})
    os.close(reading)
    try:
        time.sleep(0.5)
        drop_pair(world.decoder / "incoming", "pair", clip(world, 9).read_bytes())
        world.ok(*admit_argv(world), stdin=manifests(world), timeout_s=20)
        world.ok("verify", "-s", world.decoder, timeout_s=20)
        assert len(list(places(world.decoder))) == 3
    finally:
        os.close(writing)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_20_seen_outlives_the_job_however_long_it_stays(world):
    verified(world)
    push(world)
    name = only(world.decoder).name
    world.ok("gc", "-s", world.decoder, clock_s=91 * DAY_S)
    assert (world.decoder / "seen" / name).exists()
    world.ok("gc", "-s", world.decoder, clock_s=200 * DAY_S)
    assert (world.decoder / "seen" / name).exists()


def test_20_ninety_days_after_the_job_is_gone_it_is_forgotten(world):
    verified(world)
    push(world)
    job = only(world.decoder)
    finish_by_hand(world, job, b"an MP4")
    world.ok("gc", "--days", "0", "--mp4", "-s", world.decoder)
    assert list(places(world.decoder)) == []
    world.ok("gc", "-s", world.decoder, clock_s=60 * DAY_S)
    assert (world.decoder / "seen" / job.name).exists()
    world.ok("gc", "-s", world.decoder, clock_s=91 * DAY_S)
    assert not (world.decoder / "seen" / job.name).exists()


# ---------------------------------------------------------------- found by these suites


def test_a_lone_file_in_tmp_stops_neither_gc_nor_verify(world):
    verified(world)
    (world.sampler / "tmp" / "file-0123456789abcdef").write_text("half")
    world.ok("verify", "-s", world.sampler)
    world.ok("gc", "-s", world.sampler, clock_s=2 * DAY_S)
    assert leftovers(world.sampler) == []


@pytest.mark.parametrize("call", ["openat", "rename"])
def test_a_full_or_forbidden_disk_does_not_fail_a_healthy_job(world, call):
    exported(world)
    done = world.run("verify", "-s", world.sampler, decide=when(call, "S/tmp/file-", errno.EACCES))
    assert done.code == 77
    assert [state for state, _ in places(world.sampler)] == ["incoming"]
    settled(world, 1)
