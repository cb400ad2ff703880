"""Power cuts: ext4 on loop devices, copied at every barrier, with and without somebody else's fsync, mounted again.

What was acknowledged is there and whole, and the ordinary commands bring everything else to its end, once.
"""

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from faultlib import (
    FULL,
    Done,
    Point,
    World,
    memory_folder,
    mounted,
    need,
    need_program,
    need_tracing,
    own_mounts,
    picks,
    places,
    say,
    where,
    whole,
)
from faultworlds import (
    DECODING,
    TRANSITIONS,
    Transition,
    finished_once,
    make_checkpoint,
    recover_pull,
    with_torch_apart,
)

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def folder():
    need_tracing()
    own_mounts()
    need_program("mkfs.ext4", "mount")
    need(Path("/dev/loop-control").exists(), "no loop devices on this machine")
    with memory_folder() as folder:
        make_checkpoint(folder)
        for name in ("s", "d"):
            image = folder / f"{name}.empty"
            with open(image, "wb") as file:
                file.truncate(320 << 20)  # decode wants 256 MiB; most of it is a hole
            make = ("mkfs.ext4", "-q", "-F", "-b", "1024", "-J", "size=1", "-m", "0", "-N", "4000", image)
            subprocess.run(make, check=True, capture_output=True)
        yield folder


def copy_image(source: Path, target: Path) -> None:
    subprocess.run(["cp", "--sparse=always", source, target], check=True)


@contextmanager
def disks(folder: Path, images: dict[str, Path]) -> Iterator[World]:
    """A world whose spools lie on these images (s, d), each mounted with its journal replayed; the rest is a folder."""
    folder.mkdir(exist_ok=True)
    world = World(folder)
    with ExitStack() as stack:
        for name, image in images.items():
            if image.is_dir():
                shutil.rmtree(folder / name, ignore_errors=True)
                shutil.copytree(image, folder / name, symlinks=True)
            else:
                options = ("-o", "loop,commit=600", "-t", "ext4")  # nothing reaches the disk unasked
                stack.enter_context(mounted(*options, image, folder / name))
        world.sampler, world.decoder = folder / "s" / "S", folder / "d" / "D"
        yield world


def unrelated_fsync(mount: Path) -> None:
    """Somebody else's file: its fsync commits the journal, and with it every rename so far, but nobody's data."""
    with open(mount / "unrelated", "wb") as file:
        file.write(b"x")
        os.fsync(file.fileno())


# ---------------------------------------------------------------- what an acknowledgement promises


def holds_export(world: World, done: Done) -> None:
    assert where(world.sampler, done.jobs[0]) == ["incoming"]
    whole(world.sampler / "incoming" / done.jobs[0])


def holds_push(world: World, done: Done) -> None:
    for line in done.out.splitlines():
        assert where(world.sampler, line.split()[0]) == ["done"]
        assert where(world.decoder, line.split()[0]) == ["incoming"]
        whole(world.decoder / "incoming" / line.split()[0])


def holds_requeue(world: World, done: Done) -> None:
    spool = world.sampler if where(world.sampler, done.jobs[0]) else world.decoder
    assert where(spool, done.jobs[0]) == ["incoming"]


def holds_nothing_loose(world: World, _done: Done) -> None:
    names = {path.name for _, path in places(world.sampler)}
    assert names or list((world.sampler / "incoming").glob("*.h3latent"))


def holds_pull(world: World, _done: Done) -> None:
    ((_, job),) = places(world.decoder)
    assert (world.sampler / "results" / job.name / f"{job.name}.mp4").read_bytes() == b"an MP4"


def holds_decoded(world: World, _done: Done) -> None:
    ((state, job),) = places(world.decoder)
    assert state == "decoded"
    whole(job)
    assert (job / f"{job.name}.master.mkv").read_bytes()[:4] == bytes.fromhex("1a45dfa3")


def holds_done(world: World, _done: Done) -> None:
    finished_once(world)


def holds_spool(world: World, _done: Done) -> None:
    world.ok("status", "-s", world.sampler)


PROMISES: dict[str, tuple[str, Callable[[World, Done], None]]] = {  # transition -> disks it writes on, its promise
    "init": ("s", holds_spool),
    "export": ("s", holds_export),
    "adopt": ("s", holds_nothing_loose),
    "push": ("sd", holds_push),
    "admit": ("d", holds_nothing_loose),
    "requeue": ("s", holds_requeue),
    "requeue-copy": ("s", holds_requeue),
    "requeue-done": ("d", holds_requeue),
    "pull": ("s", holds_pull),
    "decode": ("d", holds_decoded),
    "mux": ("d", holds_done),
    "decode-mux": ("d", holds_done),
}
SHORT_FORM = ("export", "adopt", "push", "requeue", "pull", "decode")
STEPS = [step for step in (*TRANSITIONS, *DECODING) if step.name in (PROMISES if FULL else SHORT_FORM)]


# ---------------------------------------------------------------- cutting

BARRIERS = ("fsync", "rename", "link", "unlink")  # after which something else may be on the disk


class Cutter:
    """Takes copies of the disks, and of what a surviving node sees, at the chosen points of a run."""

    def __init__(self, folder: Path, world: World, chosen: list[int] | None, unrelated: bool):
        self.folder, self.world, self.chosen, self.unrelated = folder, world, chosen, unrelated
        self.cuts: list[tuple[int, str, Path, str]] = []
        self.before = ""

    def __call__(self, index: int, point: Point | None) -> None:
        before, self.before = self.before, point.call if point else ""
        if index not in self.chosen if self.chosen is not None else point and before not in BARRIERS:
            return
        to = self.folder / f"cut{index}"
        to.mkdir()
        for name in ("s", "d"):
            mount = self.world.root / name
            shutil.copytree(mount, to / f"{name}.live", ignore=shutil.ignore_patterns("lost+found"), symlinks=True)
            if self.unrelated:
                unrelated_fsync(mount)
            copy_image(self.folder / f"{name}.image", to / f"{name}.cut")
        said = Path(f"{self.world.log}.out").read_text() if Path(f"{self.world.log}.out").exists() else ""
        self.cuts.append((index, str(point or "the end"), to, said))


def run_and_cut(folder: Path, step: Transition, unrelated: bool, chosen: list[int] | None) -> tuple[list, Done]:
    """Prepare the world on fresh disks, run the transition, cut the power at the chosen points and after the end."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    (folder / "run").mkdir()
    for name in ("s", "d"):
        copy_image(folder / f"{name}.empty", folder / "run" / f"{name}.image")
    (folder / "run" / "vae").symlink_to(folder / "vae")
    images = {name: folder / "run" / f"{name}.image" for name in ("s", "d")}
    with disks(folder / "run" / "world", images) as world:
        world.create()
        step.prepare(world)
        os.sync()
        cutter = Cutter(folder / "run", world, chosen, unrelated)
        done = world.run(*step.argv(world), stdin=step.stdin(world), decide=cutter)
        assert done.code == 0, done
        cutter.chosen = None
        cutter(len(done.points), None)
    return cutter.cuts, done


def losers(step: Transition, turn: int) -> tuple[str, ...]:
    """Which nodes lose their power: a push in turn the decoder, the sampler, both; else the one that writes."""
    on = PROMISES[step.name][0]
    return tuple(on) if len(on) == 1 else (("d",), ("s",), ("s", "d"))[turn % 3]


@pytest.mark.parametrize("unrelated", [False, True], ids=["alone", "with an unrelated fsync"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_what_was_acknowledged_survives_a_power_cut(folder, step, unrelated):
    with_torch_apart(step, lambda: cut_everywhere(folder, step, unrelated))


def cut_everywhere(folder: Path, step: Transition, unrelated: bool) -> None:
    chosen = None
    if not FULL:
        total = len(dry_run(folder, step))
        chosen = [total - 1 - at for at in picks(total // 2, 1)] + [total - 1]
    cuts, done = run_and_cut(folder, step, unrelated, chosen)
    turns = itertools.count()
    trials = 0
    for index, point, at, said in cuts:
        combinations = [losers(step, n) for n in range(3)] if index == len(done.points) else [losers(step, next(turns))]
        for lost in dict.fromkeys(combinations):
            images = {name: at / f"{name}.{'cut' if name in lost else 'live'}" for name in ("s", "d")}
            trials += 1
            with recovered(folder / "run", at, images) as world:
                try:
                    after_the_cut(world, step, replace(done, out=said))
                except AssertionError as error:
                    raise AssertionError(
                        f"{step.name}: power of {'+'.join(lost)} cut before {index}: {point}; said {said!r}\n{error}"
                    ) from error
        shutil.rmtree(at)
    say(f"power cut: {step.name}{', unrelated fsync' if unrelated else ''}: {len(cuts)} points, {trials} trials")


@contextmanager
def recovered(run: Path, at: Path, images: dict[str, Path]) -> Iterator[World]:
    """The world after the power is back, under the paths it had."""
    for name, image in images.items():
        if not image.is_dir():
            copy_image(image, at / f"{name}.mounted")
            images[name] = at / f"{name}.mounted"
    with disks(run / "world", images) as world:
        yield world


def after_the_cut(world: World, step: Transition, done: Done) -> None:
    """The promise, if it was given; then the ordinary commands, and everything is whole and there once."""
    said = [line for line in done.out.splitlines() if line.strip()]
    if said:
        PROMISES[step.name][1](world, done)
    if step.name == "pull":
        return recover_pull(world, done)
    step.recover(world, done)


def dry_run(folder: Path, step: Transition) -> list[Point]:
    """The points of the transition."""
    _, done = run_and_cut(folder, step, False, [])
    shutil.rmtree(folder / "run")
    return done.points
