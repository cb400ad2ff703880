"""Keeping on: rounds, back-off, stopping, the watchdog. The steps are functions, so here they are made up."""

import itertools
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from h3spool import loop
from h3spool.errors import (
    BadData,
    Interrupted,
    IOFailed,
    NotFound,
    NotPermitted,
    NotUsable,
    TryLater,
    Unavailable,
    batch_exit_code,
)
from h3spool.job import Outcome
from h3spool.loop import Pass, Reporter, Stop


@pytest.fixture(autouse=True)
def signals():
    """Tests here send signals to this very process; afterwards they do again what they did before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)}
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def told():
    """What a loop reports."""
    heard = SimpleNamespace(outcomes=[], failures=[], beats=0)

    def beat():
        heard.beats += 1

    heard.reporter = Reporter(
        outcome=lambda outcome: heard.outcomes.append(outcome.job),
        failure=lambda name, error, wait_s: heard.failures.append((name, str(error), wait_s)),
        heartbeat=beat,
    )
    return heard


def once(told, *passes) -> int:
    return loop.run(list(passes), Stop(60), told.reporter, once=True)


def rounds(*results):
    """A step that yields these outcomes, a list a round, then nothing; an exception is raised."""
    left = iter(results)

    def work():
        for outcome in next(left, []):
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome

    return work


# ---------------------------------------------------------------- --once


def test_once_goes_on_until_a_round_brings_nothing_new(told):
    """What verify lets through is decoded in the same run, and what comes meanwhile too."""
    verify = Pass("verify", rounds([Outcome("a", "verified")], [Outcome("b", "verified")]))
    decode = Pass("decode", rounds([], [Outcome("a", "done")], [Outcome("b", "done")]))
    assert once(told, verify, decode) == 0
    assert told.outcomes == ["a", "b", "a", "b"]


def test_once_does_not_wait_for_what_does_not_move(told):
    stuck = Outcome("a", "verified", TryLater("peer full"))
    assert once(told, Pass("push", lambda: iter([stuck]))) == 75
    assert told.outcomes == ["a"]


def test_a_job_that_fails_is_progress_and_stops_nothing(told):
    bad = Outcome("a", "failed", BadData("black"))
    assert once(told, Pass("decode", rounds([bad, Outcome("b", "done")], [Outcome("c", "done")]))) == 65
    assert told.outcomes == ["a", "b", "c"]


def test_a_step_that_fails_is_told_and_the_others_go_on(told):
    push = Pass("push", rounds([TryLater("host unreachable")], [Outcome("never", "done")]))
    verify = Pass("verify", rounds([Outcome("a", "verified")], [Outcome("b", "verified")]))
    assert once(told, push, verify) == 75
    assert told.outcomes == ["a", "b"]
    ((name, text, wait_s),) = told.failures
    assert (name, text) == ("push", "host unreachable")
    assert 0 < wait_s <= 2


@pytest.mark.parametrize("error", [NotUsable("no H3 VAE"), NotPermitted("host key")])
def test_what_only_a_person_can_mend_ends_the_loop(told, error):
    with pytest.raises(type(error)):
        once(told, Pass("decode", rounds([Outcome("a", "done"), error])), Pass("mux", rounds([Outcome("b", "done")])))
    assert told.outcomes == ["a"]


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([], 0),
        ([NotFound("")], 66),
        ([NotFound(""), BadData("")], 65),
        ([BadData(""), TryLater("")], 75),
        ([TryLater(""), Unavailable("")], 69),
        ([Unavailable(""), NotUsable("")], 78),
        ([NotUsable(""), NotPermitted("")], 77),
        ([NotPermitted(""), IOFailed("")], 74),
        ([IOFailed(""), ZeroDivisionError()], 1),
        ([None, TryLater(""), None], 75),
    ],
)
def test_a_batch_exits_with_what_needs_a_person_most(told, errors, code):
    results = [Outcome(str(index), "failed" if error else "done", error) for index, error in enumerate(errors)]
    assert batch_exit_code(outcome.exit_code for outcome in results) == code
    assert batch_exit_code(outcome.exit_code for outcome in reversed(results)) == code
    assert once(told, Pass("x", rounds(results))) == code


# ---------------------------------------------------------------- back-off


def test_waits_double_with_jitter_up_to_five_minutes():
    step = Pass("push", rounds())
    waits = [step.failed() for _ in range(12)]
    expected = [2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300, 300]
    assert all(full / 2 <= wait <= full for wait, full in zip(waits, expected, strict=True))
    assert len(set(waits[-4:])) == 4  # many nodes must not knock at the same moment
    assert step.not_before > time.monotonic() + 140
    step.succeeded()
    assert step.not_before == 0
    assert step.failed() <= 2


def test_a_step_that_waits_is_not_run(told, monkeypatch):
    monkeypatch.setattr(loop, "INTERVAL_S", 0.001)
    monkeypatch.setattr(loop, "FIRST_DELAY_S", 0.2)
    times = []

    def failing():
        times.append(time.monotonic())
        if len(times) == 3:
            raise NotUsable("enough")
        raise TryLater("away")
        yield

    with pytest.raises(NotUsable):
        loop.run([Pass("push", failing)], Stop(0), told.reporter, once=False)
    first, second = (after - before for before, after in itertools.pairwise(times))
    assert first >= 0.1
    assert second >= 0.2


def test_a_loop_shows_that_it_lives(told, monkeypatch):
    monkeypatch.setattr(loop, "INTERVAL_S", 0.001)
    monkeypatch.setattr(loop, "HEARTBEAT_S", 0.01)
    with pytest.raises(NotUsable):
        loop.run([Pass("x", rounds(*[[]] * 50, [NotUsable("enough")]))], Stop(0), told.reporter, once=False)
    assert 2 <= told.beats <= 50


# ---------------------------------------------------------------- stopping


def send(number=signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def interrupted(told, work, grace_s: float) -> int:
    with pytest.raises(Interrupted) as end:
        loop.run([Pass("x", work)], Stop(grace_s), told.reporter, once=False)
    return end.value.exit_code


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_idle_loop_stops_at_once(told, number, code):
    started = time.monotonic()
    child = subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -{number.value} {os.getpid()}"])
    assert interrupted(told, rounds(), 60) == code
    assert time.monotonic() - started < 5
    child.wait()


def test_a_busy_loop_finishes_the_job_at_hand_and_no_other(told):
    closed = []

    def work():
        try:
            send()
            yield Outcome("a", "done")
            yield Outcome("b", "done")
        finally:
            closed.append(True)

    assert interrupted(told, work, 60) == 143
    assert told.outcomes == ["a"]
    assert closed == [True]  # the slot was let go


def test_no_step_begins_after_a_stop(told):
    def first():
        send()
        return iter([])

    with pytest.raises(Interrupted):
        passes = [Pass("verify", first), Pass("decode", rounds([Outcome("b", "done")]))]
        loop.run(passes, Stop(60), told.reporter, once=True)
    assert told.outcomes == []


def endless(told, *signals_to_send):
    def work():
        for number in signals_to_send:
            send(number)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            time.sleep(0.01)
        yield Outcome("too late", "done")

    return work


def test_a_second_signal_does_not_wait(told):
    assert interrupted(told, endless(told, signal.SIGTERM, signal.SIGINT), 60) == 130
    assert told.outcomes == []


def test_patience_ends(told):
    started = time.monotonic()
    assert interrupted(told, endless(told, signal.SIGTERM), 0.3) == 143
    assert 0.3 <= time.monotonic() - started < 5
    assert told.outcomes == []


def test_without_patience_a_busy_loop_stops_at_once(told):
    assert interrupted(told, endless(told, signal.SIGTERM), 0) == 143


def test_the_clock_of_one_stop_does_not_run_on(told):
    """A job that ended within its grace must not be interrupted afterwards, while it is put away."""
    stop = Stop(0.2)
    with stop.busy():
        send()
    time.sleep(0.3)
    with pytest.raises(Interrupted):
        stop.check()


# ---------------------------------------------------------------- the watchdog

WATCH = """
import sys, time
from h3spool.loop import Watchdog
dog = Watchdog(lambda waited_s: print("wedged", flush=True), shortest_s=float(sys.argv[1]))
interval, count, wedged = float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
with dog.watching():
    for _ in range(count):
        time.sleep(interval)
        dog.feed()
    time.sleep(wedged)
time.sleep(0.5)
print("done")
"""


@pytest.mark.parametrize(
    ("shortest", "interval", "count", "wedged", "end"),
    [
        (0.3, 0, 0, 30, (75, "wedged\n")),  # nothing was ever finished
        (0.3, 0.001, 3, 30, (75, "wedged\n")),  # it worked for a while
        (1.0, 0.2, 8, 0, (0, "done\n")),  # it always was alive
        (0.5, 0.3, 1, 1.5, (0, "done\n")),  # 20 times the last interval is 6 s
    ],
)
def test_a_wedged_device_ends_the_process(shortest, interval, count, wedged, end):
    argv = [sys.executable, "-c", WATCH, *map(str, (shortest, interval, count, wedged))]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == end


# ---------------------------------------------------------------- the doorbell


def test_the_doorbell_ends_a_pause_early_and_only_then(tmp_path):
    (tmp_path / "incoming").mkdir()
    (tmp_path / "job").mkdir()
    bell = loop.Doorbell([tmp_path / "incoming", tmp_path / "missing"])
    begin = time.monotonic()
    bell.wait(0.2)
    assert time.monotonic() - begin >= 0.2
    os.rename(tmp_path / "job", tmp_path / "incoming" / "job")
    begin = time.monotonic()
    bell.wait(20)
    assert time.monotonic() - begin < 10
    begin = time.monotonic()
    bell.wait(0.2)  # what rang once rings once
    assert time.monotonic() - begin >= 0.2
