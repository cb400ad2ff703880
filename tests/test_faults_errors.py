"""Every state-changing call fails, once or from then on, or writes short; a full disk: a clear exit, nothing lost."""

import errno
import shutil
from pathlib import Path

import pytest
from faultlib import (
    FULL,
    SHORT,
    WRITES,
    World,
    drop_pair,
    memory_folder,
    mounted,
    need_tracing,
    own_mounts,
    picks,
    points_of,
    say,
)
from faultworlds import DECODING, PUSH, TRANSITIONS, Transition, clip, make_checkpoint, settled, with_torch_apart

pytestmark = pytest.mark.faults

CLEAR = {0, 69, 74, 75, 77}
MODES = [
    ("ENOSPC", errno.ENOSPC, False),
    ("EIO", errno.EIO, False),
    ("EACCES", errno.EACCES, False),
    ("EROFS from then on", errno.EROFS, True),
    ("ENOSPC from then on", errno.ENOSPC, True),
    ("EIO from then on", errno.EIO, True),
]
NEEDS_ROOM = {"open", "openat", "creat", "mkdir", "mkdirat", "link", "linkat", "symlink", "symlinkat", *WRITES}


@pytest.fixture(scope="module")
def worlds():
    need_tracing()
    with memory_folder() as folder:
        World(folder / "empty").create()
        make_checkpoint(folder)
        yield folder


def failing(index: int, number: int, stays: bool):
    """The call at `index` fails; where it stays, so do all after it (a full disk still renames and unlinks)."""

    def decide(n, point):
        if n < index or point.paths == ("stdout",) or (n > index and not stays):
            return None
        return number if number != errno.ENOSPC or n == index or point.call in NEEDS_ROOM else None

    return decide


def chosen_modes(turn: int) -> list:
    """Two of the modes for each point, in turn, so that each point meets another pair than its neighbours."""
    return [MODES[(turn * 2) % 6], MODES[(turn * 2 + 3) % 6]] if FULL else [MODES[turn % 6]]


@pytest.mark.parametrize("step", [*TRANSITIONS, *(DECODING if FULL else DECODING[-1:])], ids=lambda step: step.name)
def test_an_error_of_the_system_is_told_and_loses_nothing(worlds, step):
    with_torch_apart(step, lambda: fail_everywhere(worlds, step))


def fail_everywhere(worlds: Path, step: Transition) -> None:
    base = World(worlds / "empty").copy(worlds / step.name)
    step.prepare(base)
    world = base.copy(worlds / "trial")
    options = {"clock_s": step.clock_s}
    points = points_of(world, *step.argv(world), stdin=step.stdin(world), **options).points
    able = [n for n, point in enumerate(points) if point.paths != ("stdout",) and point.own]
    trials = []
    for turn, place in enumerate(picks(len(able), 2 if step.engine else 3)):
        trials += [(able[place], name, failing(able[place], *how)) for name, *how in chosen_modes(turn)]
    shorts = [n for n in able if points[n].call in WRITES]
    for place in picks(len(shorts), 1):
        trials.append(
            (
                shorts[place],
                "short write",
                lambda n, p, at=shorts[place]: SHORT if n == at and p.call in WRITES else None,
            )
        )
    for index, name, decide in trials:
        world = base.copy(worlds / "trial")
        done = world.run(*step.argv(world), stdin=step.stdin(world), decide=decide, **options)
        try:
            assert done.code in CLEAR | ({65} if step.name in ("quarantine", "repair") else set()), done
            assert "this is a bug" not in done.err
            assert name != "short write" or done.code in (0, 65), "a short write is no error"
            step.recover(world, done)
        except (AssertionError, ValueError) as error:
            raise AssertionError(
                f"{step.name}: {name} at {index}: {points[index]}; exit {done.code}\n{done.err}\n{done.out}\n{error}"
            ) from error
    say(f"errors: {step.name}: {len(trials)} trials at {len(able)} points")


# ---------------------------------------------------------------- a disk that is really full


@pytest.fixture
def small_disk(tmp_path):
    """A folder in which 1 MiB and 400 files have room, mounted for this process alone."""
    own_mounts()
    with mounted("-t", "tmpfs", "-o", "size=1m,mode=700,nr_inodes=400", "none", tmp_path / "small") as folder:
        yield folder


def fill(folder) -> None:
    """Leave no byte."""
    with open(folder / "filler", "wb", 0) as file:
        for size in (65536, 4096, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue


def take_inodes(folder) -> None:
    """Leave no inode."""
    (folder / "many").mkdir()
    try:
        for number in range(1000):
            (folder / "many" / str(number)).touch()
    except OSError:
        return


@pytest.mark.parametrize("exhaust", [fill, take_inodes])
@pytest.mark.parametrize("step", ["export", "verify", "adopt", "push"])
def test_a_full_disk_stops_the_step_and_loses_nothing(tmp_path, small_disk, exhaust, step):
    world = World(tmp_path / "world").create()
    latent = clip(world)
    spool = world.root / ("D" if step == "push" else "S")  # for a push the peer is the full one
    if step == "adopt":
        drop_pair(world.sampler / "incoming", "pair", latent.read_bytes())
    elif step != "export":
        world.export(latent)
    if step == "push":
        world.ok("verify", "-s", world.sampler)
    shutil.copytree(spool, small_disk / spool.name)
    shutil.rmtree(spool)
    spool.symlink_to(small_disk / spool.name)
    world.sampler, world.decoder = (path.resolve() for path in (world.sampler, world.decoder))
    argv = {
        "export": ("export", latent, "--min-free", "0", "-s", world.sampler),
        "verify": ("verify", "-s", world.sampler),
        "adopt": ("verify", "-s", world.sampler),
        "push": (*PUSH, world.decoder, "-s", world.sampler),
    }[step]
    exhaust(small_disk)
    done = world.run(*argv)
    assert done.code == (75 if step == "push" and exhaust is fill else 74), done
    assert "full" in done.err
    (small_disk / "filler").unlink(missing_ok=True)
    shutil.rmtree(small_disk / "many", ignore_errors=True)
    world.ok(*argv)
    settled(world, 1)
