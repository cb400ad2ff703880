"""requeue, gc, fsck and doctor: keeping things in order; and the installation of the ComfyUI node."""

from __future__ import annotations

from pathlib import Path

import click

from h3spool.cli.options import GIB, SpoolChoice, json_option, spool_choice, spool_options
from h3spool.cli.output import Batch, note, out
from h3spool.errors import BadData, H3SpoolError, NotUsable


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
@click.option(
    "--days", type=click.FloatRange(0), default=7.0, show_default=True, help="Jobs that were finished longer ago."
)
@click.option("--keep", type=int, help="Also the oldest beyond so many jobs.")
@click.option("--free", type=click.FloatRange(0), default=0.0, help="Go on, oldest first, until so many GiB are free.")
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
    note(f"{total / 2**20:.1f} MiB {'would be' if dry_run else 'were'} freed")


@click.command()
@click.option("--repair", is_flag=True, help="Mend what is safe to mend.")
@json_option
@spool_choice
def fsck(where: SpoolChoice, repair: bool, as_json: bool) -> None:
    """List what breaks an invariant of the spool; exit 65 if anything is left.

    \b
    Example: h3spool fsck --repair
    """
    from h3spool import upkeep

    spool = where.open(broken=True)
    findings = upkeep.fsck(spool, repair=repair)
    for finding in findings:
        facts = {"path": finding.path, "problem": finding.problem, "repairable": finding.repairable}
        out(facts, as_json, "path", "problem")
    if findings:
        hint = "; --repair mends some of it" if any(finding.repairable for finding in findings) else ""
        raise BadData(f"{spool.root}: {len(findings)} finding{'s' * (len(findings) > 1)}{hint}")
    note("nothing is wrong")


@click.command()
@click.option("--comfyui", metavar="PID|URL", required=True, help="Check a ComfyUI that is to decode.")
@click.option("--allow-remote", is_flag=True, help="Look at a ComfyUI on another machine.")
@json_option
def doctor(comfyui: str, allow_remote: bool, as_json: bool) -> None:
    """Check what decoding depends on; exit 78 if something would fail.

    \b
    Example: h3spool doctor --comfyui http://127.0.0.1:8192
    """
    from h3spool.doctor import comfyui_checks

    checks = comfyui_checks(comfyui, allow_remote=allow_remote)
    for check in checks:
        out(check._asdict(), as_json, "verdict", "name", "sentence")
    if failed := [check.name for check in checks if check.verdict == "fail"]:
        raise NotUsable(f"{comfyui}: {', '.join(failed)}: see above")


@click.group()
def comfyui() -> None:
    """The custom node for ComfyUI."""


@comfyui.command()
@click.argument("custom_nodes", type=click.Path(path_type=Path))
def install(custom_nodes: Path) -> None:
    """Install the nodes that save and load H3 latents into ComfyUI's custom_nodes folder.

    \b
    Example: h3spool comfyui install ~/ComfyUI/custom_nodes
    """
    from h3spool import node

    click.echo(str(node.install(custom_nodes)))
    note("restart ComfyUI; the nodes are under h3spool: Save and Load MiniMax H3 AV Latent")


COMMANDS = (requeue, gc, fsck, doctor, comfyui)
