"""Tables for people: the spool, and one job's story."""

from __future__ import annotations

import click

from h3spool import receipt

DONE_SHOWN = 10


def _console() -> object:
    from rich.console import Console

    return Console(highlight=False)


def _table(*columns: str) -> object:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ("job", "state", "since", "at", "s"))
    return table


def overview(facts: dict, rows: list[dict]) -> None:
    """The spool at a glance: one line a job, so that it can be searched; a failed one has its reason below."""
    click.echo(f"{facts['role']} spool {facts['spool']} of node {facts['node']}")
    click.echo("  ".join(f"{state} {count}" for state, count in facts["jobs"].items() if count) or "no jobs yet")
    for worker in facts["workers"]:
        if worker["jobs"]:
            click.echo(f"{worker['slot']} {'works on' if worker['alive'] else 'died with'} {', '.join(worker['jobs'])}")
    if facts["loose"]:
        click.echo(f"loose files waiting in incoming/: {', '.join(facts['loose'][:10])}")
    done = [row for row in rows if row["state"] == "done"]
    for row in [row for row in rows if row["state"] != "done"] + done[-DONE_SHOWN:]:
        since = row.get("since", "")[:19].replace("T", " ")
        click.echo(f"{row['job']}  {row['state']:<8}  {since}  {row['title']}")
        if "error" in row:
            click.echo(f"    {row['error']}")
    if len(done) > DONE_SHOWN:
        click.echo(f"({len(done) - DONE_SHOWN} older done jobs not shown; --json lists all)")


def story(facts: dict) -> None:
    """One job: where it is, what it is, what happened to it."""
    from rich.markup import escape

    console = _console()
    account = facts["receipt"]
    console.print(f"{facts['job']}  {facts['state']}  {escape(facts['path'])}")
    events(account)


def events(account: dict) -> None:
    """A receipt as a table."""
    from rich.markup import escape

    console, clip = _console(), account["latent"]
    if account["title"]:
        console.print(f"title: {escape(account['title'])}")
    if clip:
        size = f"{clip.get('width')}x{clip.get('height')}, {clip.get('frames')} frames"
        console.print(f"latent: {size}, SHA-256 {clip.get('sha256')}")
    table = _table("step", "node", "at", "s", "outcome", "facts")
    for event in account["events"]:
        took = receipt.seconds_between(event["start"], event["end"]) if "end" in event else ""
        known = _facts(event)
        cells = (event["step"], event["node"], event["start"][11:19], took, event["outcome"], known)
        table.add_row(*(escape(str(cell)) for cell in cells))
    console.print(table)


def timeline(found: list[dict]) -> None:
    """Events of many jobs, in order of time, one a line."""
    for event in found:
        took = f"{receipt.seconds_between(event['start'], event['end']):.1f} s" if "end" in event else ""
        at = event["start"][:19].replace("T", " ")
        what = f"{event['step']:<7} {event['node']:<10} {took:>9}  {event['outcome']:<8}"
        click.echo(f"{at}  {what}  {event['job']}  {event['title']}")


def _facts(event: dict) -> str:
    """The facts of an event worth a person's glance."""
    lines = [str(event[key]) for key in ("error",) if key in event]
    lines += [f"warning: {text}" for text in event.get("warnings", [])]
    for key in ("peer", "engine", "precision", "device", "load_s", "bytes", "audio_peak", "black_share", "sha256"):
        if event.get(key) is not None:
            lines.append(f"{key}: {event[key]}")
    if picture := event.get("picture"):
        lines.append(f"picture: {picture.get('clips')} clips in {picture.get('seconds', 0):.1f} s")
        lines += [f"fallback: {fallback}" for fallback in picture.get("fallbacks", [])]
    if mp4 := event.get("mp4"):
        video = mp4.get("video") or {}
        size = f"{video.get('width')}x{video.get('height')}"
        lines.append(f"mp4: {video.get('codec')} {size}, {mp4['frames']} frames, {mp4['duration_s']:.3f} s")
    return "\n".join(lines)
