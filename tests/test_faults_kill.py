"""kill -9 before every state-changing system call of every transition, then the ordinary commands: nothing is lost."""

from pathlib import Path

import pytest
from faultlib import FULL, KILL, Done, World, at, memory_folder, need_tracing, picks, points_of, say
from faultworlds import DECODING, TRANSITIONS, Transition, make_checkpoint, with_torch_apart

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def worlds():
    need_tracing()
    with memory_folder() as folder:
        World(folder / "empty").create()
        make_checkpoint(folder)
        yield folder


def killed(base: World, step: Transition, index: int, trial: Path) -> tuple[World, Done]:
    """The transition on a copy of its world, killed at a point."""
    world = base.copy(trial)
    done = world.run(
        *step.argv(world), stdin=step.stdin(world), decide=at(index, KILL), clock_s=step.clock_s, fresh=is_fresh(step)
    )
    return world, done


def is_fresh(step: Transition) -> bool:
    """The full suite starts the real program for each trial where it may (a shifted clock needs a fork)."""
    return FULL and not step.clock_s and not step.engine


@pytest.mark.parametrize("step", [*TRANSITIONS, *(DECODING if FULL else DECODING[-1:])], ids=lambda step: step.name)
def test_nothing_is_lost_wherever_it_is_killed(worlds, step):
    with_torch_apart(step, lambda: kill_everywhere(worlds, step))


def kill_everywhere(worlds: Path, step: Transition) -> None:
    base = World(worlds / "empty").copy(worlds / step.name)
    step.prepare(base)
    whole_run = base.copy(worlds / "trial")
    argv = step.argv(whole_run)
    undisturbed = points_of(whole_run, *argv, stdin=step.stdin(whole_run), clock_s=step.clock_s, fresh=is_fresh(step))
    step.recover(whole_run, undisturbed)
    total = len(undisturbed.points)
    chosen = picks(total, 3)[:: 3 if step.name == "loop" else 1]  # its parts are killed at every point
    for index in chosen:
        world, done = killed(base, step, index, worlds / "trial")
        assert done.code == -9, f"not killed at {index}: {done}"
        try:
            step.recover(world, done)
        except AssertionError as error:
            raise AssertionError(f"{step.name} killed before {index}: {done.points[index]}\n{error}") from error
    say(f"kill -9: {step.name}: {len(chosen)} of {total} points")
    if FULL:  # growing N until nothing fires: the run with the most points had no more
        world, done = killed(base, step, total + 20, worlds / "trial")
        assert done.code in (0, 65), done
        step.recover(world, done)
