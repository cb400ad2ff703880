"""requeue, gc and fsck: keeping a spool in order."""

from __future__ import annotations

import click

from h3spool.cli.options import GIB, json_option, spool_options
from h3spool.cli.output import Batch, note, out
from h3spool.errors import BadData, H3SpoolError


@click.command()
@click.argument("jobs", nargs=-1, required=True)
@click.option("--any-peer", is_flag=True, help="Unbind from the peer it was pushed to; it may be decoded twice.")
@json_option
@spool_options
def requeue(spool: object, jobs: tuple[str, ...], any_peer: bool, as_json: bool) -> None:
    """Put failed or finished jobs back to incoming/, to be worked on again.

    \b
    Example: h3spool requeue 20261130T221500123Z-samp-1a2b3c4d
    """
    from h3spool import upkeep
    from h3spool.job import Outcome

    def one(name: str) -> Outcome:
        try:
            return Outcome(upkeep.requeue(spool, name, any_peer=any_peer), "incoming")
        except H3SpoolError as error:
            return Outcome(name, "unchanged", error)

    Batch(as_json).run(one(name) for name in jobs)


@click.command()
@click.option("--days", default=7.0, show_default=True, help="Jobs that were finished longer ago.")
@click.option("--keep", type=int, help="Also the oldest beyond so many jobs.")
@click.option("--free", default=0.0, help="Go on, oldest first, until so many GiB are free.")
@click.option("--mp4", is_flag=True, help="Also finished MP4s.")
@click.option("--failed", is_flag=True, help="Also failed jobs.")
@click.option("--results", is_flag=True, help="Also what was pulled.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@json_option
@spool_options
def gc(
    spool: object,
    days: float,
    keep: int | None,
    free: float,
    mp4: bool,
    failed: bool,
    results: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Make room: stale work in progress, then masters, then latents of old finished jobs.

    \b
    Example: h3spool gc --days 2 --free 50 --dry-run
    """
    from h3spool import upkeep

    limits = upkeep.Limits(days, keep, int(free * GIB), mp4, failed, results)
    total = 0
    for path, size in upkeep.gc(spool, limits, dry_run=dry_run):
        total += size
        out({"path": str(path), "bytes": size}, as_json, "path", "bytes")
    note(f"{total >> 20} MiB {'would be' if dry_run else 'were'} freed")


@click.command()
@click.option("--repair", is_flag=True, help="Mend what is safe to mend.")
@click.option("--spool", "-s", "root", envvar="H3SPOOL_SPOOL", show_envvar=True, required=True, help="The spool.")
@click.option("--allow-network-fs", is_flag=True, help="Open a spool on NFS or FUSE, at your own risk.")
@json_option
def fsck(root: str, repair: bool, allow_network_fs: bool, as_json: bool) -> None:
    """List what breaks an invariant of the spool; exit 65 if anything is left.

    \b
    Example: h3spool fsck --repair
    """
    from h3spool import upkeep
    from h3spool.spool import Spool

    findings = upkeep.fsck(Spool(root, allow_network_fs=allow_network_fs, broken=True), repair=repair)
    for finding in findings:
        facts = {"path": finding.path, "problem": finding.problem, "repairable": finding.repairable}
        out(facts, as_json, "path", "problem")
    if findings:
        hint = "; --repair mends some of it" if any(finding.repairable for finding in findings) else ""
        raise BadData(f"{root}: {len(findings)} findings{hint}")


COMMANDS = (requeue, gc, fsck)
