"""Many workers on one spool: each job is claimed once; hostile words reach no shell."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from faultlib import (
    DAY_S,
    FULL,
    THEN,
    Done,
    World,
    fork,
    memory_folder,
    need,
    need_tracing,
    picks,
    places,
    points_of,
    preload,
    say,
    where,
    write_clip,
)
from faultssh import far_node
from faultworlds import PUSH, TRANSITIONS, done_on_decoder, verified

pytestmark = pytest.mark.faults
WORKERS = 8


@pytest.fixture
def folder():
    with memory_folder() as folder:
        yield folder


def many(world: World, count: int) -> list[str]:
    """So many verified jobs on the decoder, made by copying one."""
    first = world.export(write_clip(world.root / "clip.h3latent"), spool=world.decoder)
    world.ok("verify", "-s", world.decoder)
    source, names = world.decoder / "verified" / first, [first]
    for number in range(1, count):
        name = f"job-{number:05d}"
        (world.decoder / "verified" / name).mkdir(mode=0o700)
        for file in source.iterdir():
            text = file.read_bytes().replace(first.encode(), name.encode())
            (world.decoder / "verified" / name / file.name.replace(first, name)).write_bytes(text)
        names.append(name)
    return names


def test_eight_workers_claim_a_thousand_jobs_once_each(folder):
    from h3spool.spool import Spool

    preload()
    rounds, claims, seconds = (10 if FULL else 1), 0, 0.0
    world = World(folder / "world").create()
    names = many(world, 1000)
    for _ in range(rounds):
        gate_out, gate_in = os.pipe()

        def worker(number: int, gate_out: int = gate_out, gate_in: int = gate_in) -> None:
            os.close(gate_in)
            spool = Spool(world.decoder)
            slot = spool.take_slot("decode")
            os.read(gate_out, 1)  # all start at once
            got = [name for name in names if slot.claim(name) is not None]
            (folder / f"claims-{number}").write_text("\n".join(got))

        pids = [fork(lambda n=n: worker(n)) for n in range(WORKERS)]
        os.close(gate_out)
        time.sleep(0.3)
        start = time.monotonic()
        os.close(gate_in)
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * WORKERS
        seconds += time.monotonic() - start
        got = Counter(name for n in range(WORKERS) for name in (folder / f"claims-{n}").read_text().split())
        assert set(got) == set(names)
        assert set(got.values()) == {1}
        assert len(os.listdir(world.decoder / "active")) == WORKERS
        claims += len(names)
        Spool(world.decoder).empty_slots("decode")
        assert sorted(os.listdir(world.decoder / "verified")) == sorted(names)
    say(f"claims: {WORKERS} workers, {claims} jobs, 0 double, {claims / seconds:.0f} claims/s")


def test_workers_killed_at_random_leave_no_job_behind(folder):
    """Eight workers claim and finish jobs; they are killed at random, and new ones empty the slots of the dead."""
    from h3spool.spool import Spool

    preload()
    draw = random.Random(3)
    world = World(folder / "world").create()
    names = many(world, 4000 if FULL else 300)

    def worker() -> None:
        spool = Spool(world.decoder)
        slot = spool.take_slot("decode")
        while waiting := spool.names("verified"):
            for name in random.sample(waiting, len(waiting)):
                if (job := slot.claim(name)) is not None:
                    time.sleep(0.01)
                    spool.promote(job, "done")
            spool.empty_slots("decode")

    pids, kills, starts, deadline = [], 0, 0, time.monotonic() + 120
    while len(os.listdir(world.decoder / "done")) < len(names):
        assert time.monotonic() < deadline
        while len(pids) < WORKERS:
            pids.append(fork(worker))
            starts += 1
        time.sleep(draw.uniform(0.005, 0.02))
        victim = pids.pop(draw.randrange(len(pids)))
        kills += 1
        os.kill(victim, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(victim, 0)[1]) in (0, -9)
        if len(os.listdir(world.decoder / "verified")) == 0:
            Spool(world.decoder).empty_slots("decode")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert Counter(state for state, _ in places(world.decoder)) == {"done": len(names)}
    assert sorted(path.name for _, path in places(world.decoder)) == sorted(names)
    say(f"lease soak: {len(names)} jobs, {kills} kills, {starts} workers: 0 lost, 0 double")


def running(pid: int) -> bool:
    """Whether it runs; whoever inherited it may take its time to bury it."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_child_does_not_keep_its_parents_slot(folder):
    """A worker's lock is free when the worker is dead, whatever children it has started."""
    from h3spool.child import Child
    from h3spool.spool import Spool

    world = World(folder / "world").create()

    def worker() -> None:
        slot = Spool(world.decoder).take_slot("mux")
        subprocess.Popen(["sleep", "30"])
        Child(["sleep", "30"])
        (folder / "ready").write_text(str(slot.number))
        time.sleep(30)

    pid = fork(worker)
    deadline = time.monotonic() + 10
    while not (folder / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert Spool(world.decoder).slot_is_free("mux-0")
    deadline = time.monotonic() + 5
    while len(alive := [child for child in children if running(child)]) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    for child in alive:
        os.kill(child, signal.SIGKILL)
    need(shutil.which("setpriv") is not None, "setpriv is not installed")
    assert len(children) == 2
    assert len(alive) <= 1  # the plain one; the product's dies with the worker


# ---------------------------------------------------------------- one command beside another

TWO_DAYS = 2 * DAY_S
OTHERS: dict[str, Callable[[World], Done]] = {
    "gc, two days on": lambda w: w.run(
        "gc", "-s", w.sampler, THEN, "gc", "-s", w.decoder, clock_s=TWO_DAYS, timeout_s=1
    ),
    "push": lambda w: w.run(*PUSH, w.decoder, "-s", w.sampler, timeout_s=1),
    "verify there": lambda w: w.run("verify", "-s", w.decoder, timeout_s=1),
    "verify here": lambda w: w.run("verify", "-s", w.sampler, timeout_s=1),
    "repair": lambda w: w.run("fsck", "--repair", "-s", w.decoder, timeout_s=2),
    "pull": lambda w: w.run("pull", "--from", w.decoder, "--min-free", "0", "-s", w.sampler, timeout_s=1),
}
PAIRS = [
    ("push", "gc, two days on"), ("push", "push"), ("push", "verify there"), ("push", "repair"),
    ("admit", "push"), ("admit", "gc, two days on"), ("admit", "verify there"), ("export", "gc, two days on"),
    ("adopt", "gc, two days on"), ("adopt", "verify here"), ("pull", "gc, two days on"), ("pull", "pull"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_another_command_at_any_moment_loses_and_doubles_nothing(folder, name, other):
    """The first is held before one of its calls, the other runs to its end (or is killed where it waits for a lock)."""
    need_tracing()
    step = next(step for step in TRANSITIONS if step.name == name)
    base = World(folder / "base").create()
    step.prepare(base)
    world = base.copy(folder / "trial")
    total = len(points_of(world, *step.argv(world), stdin=step.stdin(world)).points)
    chosen = picks(total, 3)[:: 2 if FULL else 1]
    for index in chosen:
        world = base.copy(folder / "trial")
        beside = World(world.root, folder / "beside.log")
        stdin, argv = step.stdin(world), step.argv(world)

        def decide(n, _point, at=index, beside=beside):
            if n == at:
                OTHERS[other](beside)

        done = world.run(*argv, stdin=stdin, decide=decide)
        assert "this is a bug" not in done.err, done.err
        try:
            step.recover(world, done)
        except AssertionError as error:
            raise AssertionError(f"{other} beside {name} before {index}: {done.points[index]}\n{error}") from error
    say(f"beside each other: {other} at {len(chosen)} of {total} points of {name}")


# ---------------------------------------------------------------- hostile words


def hostile(marker: Path) -> list[str]:
    """Words that do something when a shell, ssh or rsync takes them for its own; each would make the marker."""
    touch = f"touch {marker}"
    packed = f"touch${{IFS}}{marker}"
    words = [
        f"$({touch})", f";{packed};", f"-oProxyCommand={touch}", f"`{touch}`", f"x\n{touch}\n", f"--rsh={touch}",
        f"| {touch}", f"& {touch} &", f"'; {touch}; '", f'"; {touch}; "', f"a b;{packed}", f"-e {touch}",
        f"--rsync-path={touch}", f"../../{packed}", f"*;{packed}", f"%h;{packed}", f"x}}; {touch}; {{", "-dash",
    ]  # fmt: skip
    return words if FULL else words[:4]


ARGUMENTS: dict[str, Callable] = {
    "--to host": lambda w, word: ("push", "--to", f"{word}:{w.decoder}", "-s", w.sampler),
    "--to user": lambda w, word: ("push", "--to", f"{word}@peer:{w.decoder}", "-s", w.sampler),
    "--to path": lambda w, word: ("push", "--to", f"peer:{word}", "-s", w.sampler),
    "--to tail": lambda w, word: ("push", "--to", f"peer:{w.decoder}{word}", "-s", w.sampler),
    "--to IPv6": lambda w, word: ("push", "--to", f"[{word}]:{w.decoder}", "-s", w.sampler),
    "--to": lambda w, word: ("push", f"--to={word}", "-s", w.sampler),
    "--from host": lambda w, word: ("pull", "--from", f"{word}:{w.decoder}", "-s", w.sampler),
    "--from path": lambda w, word: ("pull", "--from", f"peer:{word}", "-s", w.sampler),
    "--remote-command": lambda w, word: (
        "push",
        "--to",
        f"peer:{w.decoder}",
        f"--remote-command={word}",
        "-s",
        w.sampler,
    ),
    "pull --remote-command": lambda w, word: (
        "pull",
        "--from",
        f"peer:{w.decoder}",
        f"--remote-command={word}",
        "-s",
        w.sampler,
    ),
    "--bwlimit": lambda w, word: ("push", "--to", f"peer:{w.decoder}", f"--bwlimit={word}", "-s", w.sampler),
    "push JOB": lambda w, word: ("push", "--to", f"peer:{w.decoder}", "-s", w.sampler, "--", word),
    "pull JOB": lambda w, word: ("pull", "--from", f"peer:{w.decoder}", "-s", w.sampler, "--", word),
    "requeue JOB": lambda w, word: ("requeue", "-s", w.sampler, "--", word),
    "verify JOB": lambda w, word: ("verify", "-s", w.sampler, "--", word),
    "admit RUN": lambda w, word: ("admit", "--spool", w.decoder, "--", word),
    "init": lambda w, word: ("init", "--role", "sampler", "--node", word, "--", w.root / "new"),
    "title": lambda w, word: (
        "export",
        f"--name={word}",
        "--min-free",
        "0",
        "-s",
        w.sampler,
        w.root / "clip1.h3latent",
    ),
    "--dry-run": lambda w, word: ("push", "--dry-run", "--to", f"peer:{word}", "-s", w.sampler),
}


@pytest.fixture(scope="module")
def far():
    with far_node() as far:
        yield far


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_no_word_is_executed_anywhere(far, folder, argument, monkeypatch):
    world = World(folder / "world").create()
    verified(world)
    (name,) = [path.name for _, path in places(world.sampler)]
    world.env |= {"PATH": far.env["PATH"]}
    (folder / "cwd").mkdir()
    monkeypatch.chdir(folder / "cwd")
    marker = folder / "PWNED"
    for word in hostile(marker):
        done = world.run(*ARGUMENTS[argument](world, word))
        assert not marker.exists(), f"{argument}: {word!r} was executed"
        assert "this is a bug" not in done.err, f"{argument} {word!r}: {done.err}"
        assert done.code in (0, 2, 65, 66, 69, 74, 75, 77, 78), done
        assert done.code or argument in ("title", "--bwlimit", "--dry-run"), f"{argument}: {word!r} was taken"
    assert os.listdir(folder / "cwd") == []
    assert where(world.sampler, name) == ["verified"]
    say(f"hostile words: {argument}: {len(hostile(marker))}, none executed")


@pytest.mark.parametrize("entry", ["results", "greeting", "answer"])
def test_a_hostile_peer_gets_nothing_executed_or_written(far, folder, entry):
    """What the other side says: job names in results, the greeting's uuid, answers for jobs that were not asked."""
    world = World(folder / "world").create()
    done_on_decoder(world)
    world.env |= {"PATH": far.env["PATH"]}
    verified(world)
    marker = folder / "PWNED"
    for number, word in enumerate([*(hostile(marker) if FULL else []), "../../escaped", f"$(touch {marker})"]):
        line = {
            "results": {"job": word, "sha256": "0" * 64, "size": 1},
            "greeting": {"h3spool_wire": 1, "uuid": word, "node": word, "free_bytes": 1 << 40, "waiting": 0, "min_free_bytes": 0},  # noqa: E501
            "answer": {"job": word, "sha256": word, "state": word},
        }  # fmt: skip
        said = [line["results"]] if entry == "results" else [line["greeting"], line["answer"]]
        if entry == "answer":
            said[0] |= {"uuid": "0" * 36, "node": "deco"}
        (far.folder / "said").write_text("".join(json.dumps(each) + "\n" for each in said))
        liar = far.script(f"liar-{entry}-{number}", f"cat {far.folder}/said")
        remote = ("--remote-command", liar, "-s", world.sampler)
        if entry == "results":
            done = world.run("pull", "--from", f"peer:{world.decoder}", "--min-free", "0", *remote)
        else:
            done = world.run("push", "--to", f"peer:{world.decoder}", *remote)
        assert not marker.exists(), word
        assert done.code in (65, 74, 75, 78), done
        assert "this is a bug" not in done.err, done.err
        assert [state for state, _ in places(world.sampler)] == ["verified"]
        assert os.listdir(world.sampler / "results") == []
        assert not (folder / "escaped").exists()
