"""Keeping on: repeat passes over the spool, back off where one fails, stop cleanly when asked, end when wedged.

The steps are handed in as functions; this module knows nothing of latents.
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from h3spool.errors import H3SpoolError, Interrupted, NotPermitted, NotUsable, batch_exit_code

INTERVAL_S = 1.0
FIRST_DELAY_S, LONGEST_DELAY_S = 2.0, 300.0
HEARTBEAT_S = 60.0


class Result(Protocol):
    """What a pass yields: a job's name, the state it is in, and the error that kept it from going on."""

    job: str
    state: str
    error: Exception | None
    exit_code: int


class Stop:
    """SIGTERM and SIGINT: at once while idle; while busy the job at hand is finished, at most `grace_s` long.

    A second signal does not wait. Interruption is the exception `Interrupted`, so that every `finally` runs.
    """

    def __init__(self, grace_s: float, waiting: Callable[[], None] = lambda: None):
        """`waiting` is called when a stop has to wait for the job at hand."""
        self.grace_s, self.signum, self._busy, self._waiting = grace_s, 0, False, waiting
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._asked)
        signal.signal(signal.SIGALRM, self._expired)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around work that should be finished."""
        self.check()
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def check(self) -> None:
        """Raise Interrupted where a stop was asked for."""
        if self.signum:
            raise Interrupted(self.signum)

    def _asked(self, signum: int, _frame: object) -> None:
        again, self.signum = bool(self.signum), signum
        if again or not self._busy or self.grace_s <= 0:
            raise Interrupted(signum)
        signal.setitimer(signal.ITIMER_REAL, self.grace_s)
        self._waiting()

    def _expired(self, *_: object) -> None:
        raise Interrupted(self.signum)


@dataclass
class Pass:
    """One step of a loop: `work` yields an outcome a job; each failure of the step itself makes it wait longer.

    Of a `vital` step any failure ends the loop.
    """

    name: str
    work: Callable[[], Iterable[Result]]
    vital: bool = False
    delay_s: float = 0.0
    not_before: float = field(default=0.0)

    def failed(self) -> float:
        """Back off exponentially with jitter; returns the seconds until the next attempt."""
        self.delay_s = min(LONGEST_DELAY_S, max(FIRST_DELAY_S, 2 * self.delay_s))
        wait = self.delay_s * random.uniform(0.5, 1.0)
        self.not_before = time.monotonic() + wait
        return wait

    def succeeded(self) -> None:
        """Forget earlier failures."""
        self.delay_s = self.not_before = 0.0


@dataclass
class Reporter:
    """What a loop tells: each outcome, each failure of a step with the seconds until it is tried again, a heartbeat."""

    outcome: Callable[[Result], None]
    failure: Callable[[str, H3SpoolError, float], None]
    heartbeat: Callable[[], None]


class Doorbell:
    """Ends a pause early when something is renamed into one of some folders.

    Only a hint: inotify loses events when it is flooded, so the scan that follows each pause stays the truth. Where the
    kernel refuses it, a pause is a pause.
    """

    _MOVED_TO, _CREATE = 0x80, 0x100

    def __init__(self, folders: Iterable[Path]):
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        for folder in folders if self._fd >= 0 else ():
            libc.inotify_add_watch(self._fd, os.fsencode(folder), self._MOVED_TO | self._CREATE)

    def wait(self, timeout_s: float) -> None:
        """Pause at most so long."""
        if self._fd < 0:
            time.sleep(timeout_s)
        elif select.select([self._fd], [], [], timeout_s)[0]:
            os.read(self._fd, 1 << 16)


def run(
    passes: list[Pass],
    stop: Stop,
    reporter: Reporter,
    *,
    once: bool,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Repeat the passes until stopped, or with `once` until a round brings nothing new.

    Args:
        pause: waits so many seconds, or less where there is a reason to look again.

    Returns:
        the exit code of the batch (`once`).

    Raises:
        Interrupted: stopped; no job is left claimed.
        NotUsable, NotPermitted, what a vital step raises: a person has to help; all jobs are back in their places.
    """
    codes: set[int] = set()
    beat = time.monotonic()
    while True:
        moved = _round(passes, stop, reporter, codes)
        if once and not moved:
            return batch_exit_code(codes)
        stop.check()
        if not moved:
            pause(INTERVAL_S)
        if time.monotonic() - beat > HEARTBEAT_S:
            beat = time.monotonic()
            reporter.heartbeat()


def _round(passes: list[Pass], stop: Stop, reporter: Reporter, codes: set[int]) -> bool:
    """One turn of every pass that is due; whether any job moved."""
    moved = False
    for step in passes:
        if time.monotonic() < step.not_before:
            continue
        stuck = None
        try:
            with stop.busy():
                for outcome in step.work():
                    reporter.outcome(outcome)
                    codes.add(outcome.exit_code)
                    moved = moved or outcome.error is None or outcome.state == "failed"
                    stuck = outcome.error if outcome.error and outcome.state != "failed" else stuck
                    stop.check()
        except (NotUsable, NotPermitted):
            raise
        except H3SpoolError as error:
            if step.vital:
                raise
            codes.add(error.exit_code)
            reporter.failure(step.name, error, step.failed())
        else:
            step.failed() if stuck is not None else step.succeeded()
    return moved


class Watchdog:
    """Ends the process when nothing was finished for max(10 min, 20 times the last interval): a device that is wedged
    cannot be waited for. Children die with the process; the job is put back by whoever looks next, its attempt counts.
    """

    SHORTEST_S, FACTOR = 600.0, 20.0

    def __init__(self, expired: Callable[[float], None], *, shortest_s: float = SHORTEST_S):
        """`expired` is called with the seconds waited, right before the process ends with 75."""
        self._expired, self._shortest_s = expired, shortest_s
        self._fed, self._limit_s, self._on = time.monotonic(), shortest_s, threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def feed(self) -> None:
        """Something was finished."""
        now = time.monotonic()
        self._limit_s = max(self._shortest_s, self.FACTOR * (now - self._fed))
        self._fed = now

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs."""
        self._fed = time.monotonic()
        self._on.set()
        try:
            yield
        finally:
            self._on.clear()

    def _watch(self) -> None:
        while True:
            self._on.wait()
            time.sleep(min(1.0, self._shortest_s / 4))
            waited = time.monotonic() - self._fed
            if self._on.is_set() and waited > self._limit_s:
                self._expired(waited)
                os._exit(75)
