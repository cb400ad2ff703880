"""Push over a real sshd: everything that takes part is killed, again and again; each job arrives once and whole."""

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from faultlib import (
    FULL,
    REPO,
    World,
    digest_of,
    memory_folder,
    picks,
    places,
    say,
    where,
    whole,
    write_clip,
)
from faultssh import Far, descendants, far_node, kill
from faultworlds import engine, make_checkpoint

pytestmark = pytest.mark.faults
VICTIMS = ("client", "master", "session", "rsync", "admit")
LATENT_BYTES = 24 * 7 * 48 * 64 * 4


def victims(far: Far, client: subprocess.Popen, kind: str) -> list[int]:
    """The processes of one kind that take part in a push."""
    if kind == "client":
        return [client.pid] if client.poll() is None else []
    if kind == "master":
        return [pid for pid, line in descendants(client.pid).items() if " -N " in line and "ssh" in line]
    below = descendants(far.daemon.pid)
    mark = {"session": r"sshd(-session)?: ", "rsync": r"rsync --server", "admit": r".* admit --spool"}[kind]
    return [pid for pid, line in below.items() if re.match(mark, line)]


@pytest.fixture(scope="module")
def far():
    with far_node() as far:
        yield far


@pytest.fixture
def world(far):
    with memory_folder() as folder:
        yield World(folder / "world").create()


def reach(world: World, client: subprocess.Popen, size: int) -> None:
    """Wait until so many bytes of the latent have arrived, or the client ended."""
    deadline = time.monotonic() + 30
    while arrived_bytes(world) < size and client.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)


def arrived_bytes(world: World) -> int:
    """How much of the latent lies in the peer's tmp/."""
    sizes = [0]
    for folder, _, files in os.walk(world.decoder / "tmp"):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                sizes.append(os.stat(os.path.join(folder, name)).st_size if ".h3latent." in name else 0)
    return max(sizes)


def arrived_once(world: World, names: set[str]) -> None:
    """Each job is done on the sampler and lies once, whole, on the decoder, with the same bytes."""
    sent = {path.name: (state, whole(path)) for state, path in places(world.sampler)}
    got = [(path.name, whole(path)) for _, path in places(world.decoder)]
    assert {name for name in sent if sent[name][0] == "done"} == names == set(sent)
    assert sorted(got) == sorted((name, digest) for name, (_, digest) in sent.items())


# ---------------------------------------------------------------- one kill at a time


def killed_push(far: Far, world: World, latent: Path, victim: str, offset: int) -> tuple[list[int], bool, int]:
    """Kill a victim at an offset, and complete the push: whom it hit, whether the push was cut, and its exit status."""
    name = world.export(latent)
    world.ok("verify", "-s", world.sampler)
    client = far.start(*far.push(world, "--bwlimit", "3m"))
    reach(world, client, 1)
    found = victims(far, client, victim)
    reach(world, client, offset)
    hit = [pid for pid in found if kill(pid)]
    out, _ = client.communicate(timeout=60)
    cut = where(world.sampler, name) != ["done"]
    assert client.returncode in ((-9,) if victim == "client" and hit else (0, 74, 75)), out
    assert client.returncode != 0 or where(world.decoder, name), out
    again = far.start(*far.push(world))
    assert again.wait(60) == 0, again.stdout.read()
    world.ok("verify", "-s", world.decoder)
    arrived_once(world, {name})
    world.fsck()
    for spool, state in ((world.sampler, "done"), (world.decoder, "verified")):
        shutil.rmtree(spool / state / name)
    return hit, cut, client.returncode


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_push_killed_at_any_byte_is_completed_by_the_next(far, world, victim):
    latent = write_clip(world.root / "large.h3latent", tokens=7, height=48, width=64)
    assert latent.stat().st_size > LATENT_BYTES
    trials, cuts, codes = picks(20, 1), 0, Counter()
    for trial in trials:
        offset = LATENT_BYTES * trial // 24
        for _ in range(3):  # on a busy machine a push may be over before we look again
            hit, cut, code = killed_push(far, world, latent, victim, offset)
            if hit:
                break
        assert hit, f"nothing to kill: {victim} at {offset}"
        cuts += cut
        codes[code] += 1
    say(f"push over ssh: {victim} killed at {len(trials)} byte offsets, {cuts} pushes cut, exits {dict(codes)}")
    assert cuts


DUMB = """import os, sys
from h3spool import admit
from h3spool.cli import main
said, say = 0, admit._say
def some(answer, line):
    global said
    os._exit(9) if said == LINES else say(answer, line)
    said += 1
admit._say = some
main()
"""


@pytest.mark.parametrize("lines", [0, 1, 2])
def test_an_acknowledgement_lost_on_purpose_is_asked_for_again(far, world, lines):
    """admit dies after so many lines: none, the greeting (both jobs are published), one of two acknowledgements."""
    names = {world.export(write_clip(world.root / f"{seed}.h3latent", seed)) for seed in (1, 2)}
    world.ok("verify", "-s", world.sampler)
    (far.folder / f"dumb{lines}.py").write_text(DUMB.replace("LINES", str(lines)))
    dumb = far.script(f"dumb{lines}", f'PYTHONPATH={REPO} exec {sys.executable} {far.folder}/dumb{lines}.py "$@"')
    client = far.start(*far.push(world, command=dumb))
    out, _ = client.communicate(timeout=60)
    assert client.returncode in (74, 75), out
    assert len(list(places(world.decoder))) == (2 if lines else 0)
    assert len([1 for state, _ in places(world.sampler) if state == "done"]) == max(0, lines - 1)
    again = far.start(*far.push(world))
    assert again.wait(60) == 0, again.stdout.read()
    world.ok("verify", "-s", world.decoder)
    arrived_once(world, names)
    world.fsck()


# ---------------------------------------------------------------- many at once


def test_eight_pushers_of_one_spool_send_each_job_once(far, world):
    count = 200 if FULL else 12
    latents = [write_clip(world.root / f"{seed}.h3latent", seed) for seed in range(4)]
    names = {world.export(latents[n % 4]) for n in range(count)}
    world.ok("verify", "-s", world.sampler)
    clients = [far.start(*far.push(world)) for _ in range(8)]
    answers = [client.communicate(timeout=120)[0] for client in clients]
    assert {client.returncode for client in clients} == {0}, answers
    told = Counter(line.split()[0] for out in answers for line in out.splitlines() if line.endswith("  done"))
    assert set(told) == names
    assert set(told.values()) == {1}
    world.ok("verify", "-s", world.decoder)
    arrived_once(world, names)
    world.fsck()


def test_eight_spools_with_the_same_jobs_deliver_each_once(far, world):
    """As if a sampler's spool had been copied: every copy is told that its job is safe, the decoder has it once."""
    count = 100 if FULL else 4
    latents = [write_clip(world.root / f"{seed}.h3latent", seed) for seed in range(4)]
    names = {world.export(latents[n % 4]) for n in range(count)}
    world.ok("verify", "-s", world.sampler)
    spools = []
    for number in range(8):
        spool = world.root / f"S{number}"
        shutil.copytree(world.sampler, spool)
        facts = json.loads((spool / "spool.json").read_text())
        (spool / "spool.json").write_text(json.dumps(facts | {"uuid": facts["uuid"][:-1] + str(number)}))
        spools.append(spool)
    clients = [far.start(*far.push(world, spool=spool)) for spool in spools]
    answers = [client.communicate(timeout=180)[0] for client in clients]
    for client, spool in zip(clients, spools, strict=True):
        if client.returncode == 75:  # the others kept it from connecting
            assert far.start(*far.push(world, spool=spool)).wait(60) == 0
        else:
            assert client.returncode == 0, answers
    world.ok("verify", "-s", world.decoder)
    world.sampler = spools[0]
    for world.sampler in spools:
        arrived_once(world, names)
        world.fsck()


# ---------------------------------------------------------------- the soak


class Kept:
    """A command that is started again whenever it ends."""

    def __init__(self, far: Far, *argv: object):
        self.far, self.argv, self.starts, self.codes = far, argv, 0, Counter()
        self.process: subprocess.Popen | None = None

    def keep(self) -> None:
        if self.process is None or self.process.poll() is not None:
            if self.process is not None:
                self.codes[self.process.returncode] += 1
                said = self.process.stdout.read()
                assert self.process.returncode in (0, 74, 75, -9), said
            self.process = self.far.start(*self.argv)
            self.starts += 1

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.communicate(timeout=60)


def disturb(far: Far, kept: list[Kept], killed: Counter, draw: random.Random) -> None:
    """kill -9 one process of a random kind."""
    kind = draw.choice(("client", "master", "rsync here", "session", "rsync", "admit", "verify"))
    if kind in ("session", "rsync", "admit"):
        found = victims(far, kept[0].process, kind)
    elif kind == "verify":
        found = [kept[-1].process.pid]
    elif kind == "rsync here":
        found = [
            pid for keep in kept for pid, line in descendants(keep.process.pid).items() if line.startswith("rsync")
        ]
    else:
        found = [pid for keep in kept[:-1] for pid in victims(far, keep.process, kind)]
    if found and kill(draw.choice(found)):
        killed[kind] += 1


def test_a_thousand_jobs_through_random_kills(far, world):
    """Two pushers and the peer's verify, each started again when it ends; all that takes part is killed at random."""
    count, draw, killed = (1000 if FULL else 24), random.Random(7), Counter()
    latents = [write_clip(world.root / f"{seed}.h3latent", seed) for seed in range(8)]
    names = {world.export(latents[n % 8]) for n in range(count)}
    world.ok("verify", "-s", world.sampler, timeout_s=300)
    kept = [Kept(far, *far.push(world)), Kept(far, *far.push(world)), Kept(far, "verify", "-s", world.decoder)]
    start, deadline, next_kill = time.monotonic(), time.monotonic() + (900 if FULL else 60), 0.0
    while len(os.listdir(world.sampler / "done")) < count:  # a look through all states misses a job that moves
        assert time.monotonic() < deadline, Counter(state for state, _ in places(world.sampler))
        for keep in kept:
            keep.keep()
        if time.monotonic() > next_kill and sum(killed.values()) < (10_000 if FULL else 6):
            disturb(far, kept, killed, draw)
            next_kill = time.monotonic() + draw.uniform(0.02, 1.0)
        time.sleep(0.05)
    took = time.monotonic() - start
    for keep in kept:
        keep.end()
    world.ok("verify", "-s", world.decoder, timeout_s=300)
    arrived_once(world, names)
    world.fsck()
    starts = sum(keep.starts for keep in kept)
    say(f"soak: {count} jobs over ssh in {took:.0f} s, {sum(killed.values())} kills {dict(killed)}, {starts} starts: "
        "0 lost, 0 double")  # fmt: skip
    decode_through_kills(far, world, sorted(names)[: 100 if FULL else 2], draw)


def decode_through_kills(far: Far, world: World, names: list[str], draw: random.Random) -> None:
    """On through decode --mux, killed at most every 10 s, and started again with the same words."""
    make_checkpoint(world.root.parent)
    kept = Kept(far, "decode", "--mux", "--deliver", world.root / "out", *engine(world), *names)
    kills, next_kill, deadline = 0, time.monotonic() + (10 if FULL else 2), time.monotonic() + (900 if FULL else 90)
    while not {path.name for state, path in places(world.decoder) if state == "done"} >= set(names):
        assert time.monotonic() < deadline, Counter(state for state, _ in places(world.decoder))
        kept.keep()
        if time.monotonic() > next_kill and (FULL or not kills):
            kills += kill(kept.process.pid)
            next_kill = time.monotonic() + 10 + draw.uniform(0, 5)
        time.sleep(0.05)
    kept.end()
    done = {path.name: path for state, path in places(world.decoder) if state == "done"}
    assert set(done) == set(names)
    for name, path in done.items():
        events = json.loads((path / f"{name}.pipeline.json").read_text())["events"]
        assert events[-1]["step"] == "mux"
        assert events[-1]["sha256"] == digest_of(path / f"{name}.mp4")
    assert len([path for path in (world.root / "out").glob("*.mp4")]) == len(names)
    world.fsck()
    say(f"soak: {len(names)} jobs on through decode --mux, {kills} kills, {kept.starts} starts: 0 lost, 0 double")
