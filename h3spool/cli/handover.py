"""verify, push and pull: check, hand over, fetch; admit and results are their other ends."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from h3spool.cli.options import (
    GIB,
    PeerChoice,
    Stopping,
    env_option,
    jobs_argument,
    json_option,
    min_free_option,
    peer_options,
    spool_options,
    watch_options,
)
from h3spool.cli.output import Batch, note, out, run_passes, stoppable
from h3spool.errors import H3SpoolError, IOFailed, TryLater


@click.command()
@jobs_argument
@click.option(
    "--settle", default=10.0, show_default=True, help="Seconds until a loose pair that disagrees is given up."
)
@watch_options
@json_option
@spool_options
def verify(spool: object, jobs: tuple[str, ...], settle: float, stopping: Stopping, as_json: bool) -> None:
    """Check what is in incoming/: to verified/, or to failed/ with the reason.

    \b
    Example: h3spool verify --watch
    """
    from h3spool import steps
    from h3spool.loop import Pass

    if stopping.watch:
        passes = [Pass("verify", lambda: steps.verify_if_idle(spool, settle_s=settle))]
        run_passes(passes, spool, once=False, grace_s=stopping.grace, as_json=as_json)
    with stoppable():
        Batch(as_json).run(steps.verify(spool, jobs, settle_s=settle))


@click.command()
@jobs_argument
@env_option("TO", "--to", "to", required=True, help="The peer: [USER@]HOST:SPOOL, or a path on this machine.")
@peer_options
@click.option("--dry-run", is_flag=True, help="Print the commands that would run.")
@min_free_option
@watch_options
@json_option
@spool_options
def push(
    spool: object,
    jobs: tuple[str, ...],
    to: str,
    peer: PeerChoice,
    dry_run: bool,
    min_free: float,
    stopping: Stopping,
    as_json: bool,
) -> None:
    """Hand verified jobs over to a decoder's spool; a job is let go only when the peer has it safe.

    \b
    Example: h3spool push --to decoder@atelier:spool
    """
    from h3spool import push as sending
    from h3spool.loop import Pass

    with peer_link(to, peer, min_free) as link:
        if dry_run:
            return show_push(spool, link)
        if stopping.watch:
            tell_peer(spool, link)
            passes = [Pass("push", lambda: sending.push(spool, link))]
            run_passes(passes, spool, once=False, grace_s=stopping.grace, as_json=as_json)
        with stoppable():
            Batch(as_json).run(sending.push(spool, link, jobs))


@contextmanager
def peer_link(to: str, choice: PeerChoice, min_free: float) -> Iterator[object]:
    """The way to a peer, closed in the end."""
    from h3spool import link

    peer = link.Peer.parse(to)
    if peer.host is None:
        way = link.LocalLink(peer, min_free_bytes=int(min_free * GIB))
    else:
        way = link.SshLink(peer, remote_command=choice.remote_command, bwlimit=choice.bwlimit)
    try:
        yield way
    finally:
        way.close()


def tell_peer(spool: object, link: object) -> None:
    """Say whom a loop pushes to, or why it cannot yet. What only a person can mend is raised."""
    from h3spool import push as sending

    try:
        facts = sending.greet(spool, link)
    except (TryLater, IOFailed) as error:
        return note(f"h3spool: {error}; jobs wait here until it is back")
    room = f"{facts['free_bytes'] / GIB:.0f} GiB free, {facts['waiting']} jobs waiting there"
    note(f"h3spool: pushing to the node {facts['node']}, {link.peer}: {room}")


def show_push(spool: object, link: object) -> None:
    """Print the argument lists of a push run."""
    from h3spool.link import SshLink

    waiting = spool.names("verified")
    if isinstance(link, SshLink):
        for argv in (
            link.remote("admit", "--spool", link.peer.path, "--", "RUN"),
            link.rsync(waiting or ["JOB"], "RUN"),
        ):
            click.echo(shlex.join(argv))
    else:
        click.echo(f"copy {' '.join(waiting) or 'JOB'} to {link.peer}/tmp/RUN and admit")


@click.command(hidden=True)
@click.argument("run")
@click.option("--spool", "root", required=True)
@min_free_option
def admit(root: str, run: str, min_free: float) -> None:
    """Receive a push; started by the sender over SSH."""
    from h3spool import admit as receiving
    from h3spool.spool import Spool

    try:
        spool = Spool(os.path.expanduser(root))
    except H3SpoolError as error:
        line = {"h3spool_wire": receiving.WIRE, "exit": error.exit_code, "error": str(error)}
        click.echo(json.dumps(line))
        raise
    receiving.serve(spool, run, sys.stdin, sys.stdout, min_free_bytes=int(min_free * GIB))


@click.command(hidden=True)
@json_option
@spool_options
def results(spool: object, as_json: bool) -> None:
    """List finished jobs with hash and size of their MP4; called by pull over SSH."""
    from h3spool import admit as receiving

    for entry in receiving.results(spool):
        out(entry, as_json, "job", "sha256", "size")


@click.command()
@jobs_argument
@click.option("--from", "source", required=True, help="The peer: [USER@]HOST:SPOOL, or a path on this machine.")
@peer_options
@min_free_option
@json_option
@spool_options
def pull(spool: object, jobs: tuple[str, ...], source: str, peer: PeerChoice, min_free: float, as_json: bool) -> None:
    """Fetch finished MP4s and their receipts into results/.

    \b
    Example: h3spool pull --from decoder@atelier:spool
    """
    from h3spool import pull as fetching

    with peer_link(source, peer, min_free) as link, stoppable():
        Batch(as_json).run(fetching.pull(spool, link, jobs, min_free_bytes=int(min_free * GIB)))


COMMANDS = (verify, push, admit, results, pull)
