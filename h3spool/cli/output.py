"""How commands speak: data lines, batches, progress."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import click

from h3spool.errors import H3SpoolError, batch_exit_code

PROGRESS_S = 30.0


def note(text: str) -> None:
    """Say something to people."""
    click.echo(text, err=True)


def out(data: dict, as_json: bool, *columns: str) -> None:
    """One line of data."""
    click.echo(
        json.dumps(data, ensure_ascii=False) if as_json else "  ".join(str(data[c]) for c in columns if c in data)
    )


class Batch:
    """Prints each outcome as it comes, and knows the exit code in the end."""

    def __init__(self, as_json: bool):
        self._as_json, self._codes = as_json, set()
        self.finished = 0

    def show(self, outcome: object) -> None:
        """One outcome: data on stdout, the reason of a failure on stderr."""
        self._codes.add(outcome.exit_code)
        self.finished += outcome.error is None
        facts = {"job": outcome.job, "state": outcome.state}
        if outcome.error is not None:
            facts |= {"exit": outcome.exit_code, "error": str(outcome.error)}
            text = str(outcome.error)
            note(f"h3spool: {text if text.startswith(outcome.job) else f'{outcome.job}: {text}'}")
            if outcome.exit_code == 1:
                note("".join(traceback.format_exception(outcome.error)))
        out(facts, self._as_json, "job", "state")

    def run(self, outcomes: Iterable[object]) -> None:
        """Show all outcomes, then exit with the batch's code."""
        try:
            for outcome in outcomes:
                self.show(outcome)
        except H3SpoolError as error:  # it concerns every job; what befell the ones before counts too
            note(f"h3spool: {error}")
            self._codes.add(error.exit_code)
        click.get_current_context().exit(batch_exit_code(self._codes))


@contextmanager
def stoppable(grace_s: float = 0.0) -> Iterator[object]:
    """Turn SIGTERM and SIGINT into a clean put-back."""
    from h3spool.loop import Stop

    yield Stop(grace_s)


def run_passes(passes: list, spool: object, *, once: bool, grace_s: float, as_json: bool) -> None:
    """Run steps on a spool in a loop, and tell about it."""
    from h3spool import loop

    batch = Batch(as_json)
    reporter = loop.Reporter(
        outcome=batch.show,
        failure=lambda name, error, wait_s: note(
            f"h3spool: {name}: {error}" + ("" if once else f"; next try in {wait_s:.0f} s")
        ),
        heartbeat=lambda: note(f"h3spool: alive, {batch.finished} steps finished since the start"),
    )
    stop = loop.Stop(
        grace_s, lambda: note(f"h3spool: stopping after this job, at most {grace_s:.0f} s; once more puts it back now")
    )
    bell = loop.Doorbell(spool.root / state for state in ("incoming", "verified", "decoded"))
    code = loop.run(passes, stop, reporter, once=once, pause=bell.wait)
    click.get_current_context().exit(code)


class Progress:
    """A bar on a terminal; elsewhere a line now and then, so that a log shows life."""

    def __init__(self, verb: str, things: str):
        self._verb, self._things, self._bar, self._told_s = verb, things, None, 0.0

    def update(self, done: int, total: int) -> None:
        """So many of all are done."""
        if sys.stderr.isatty():
            self._draw(done, total)
        elif done == total or time.monotonic() - self._told_s > PROGRESS_S:
            self._told_s = time.monotonic()
            note(f"h3spool: {self._verb} {done} of {total} {self._things}")

    def _draw(self, done: int, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bar

        if self._bar is None:
            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._verb, total=total)
        self._bar.update(self._task, completed=done, total=total)
        if done == total:
            self._bar.stop()
            self._bar = None
