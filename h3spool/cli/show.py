"""Tables for people: the spool, and one job's story."""

from __future__ import annotations

from h3spool import receipt


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
    """The spool at a glance."""
    from rich.markup import escape

    console = _console()
    console.print(f"{facts['role']} spool {escape(facts['spool'])} of node {facts['node']}")
    console.print("  ".join(f"{state} {count}" for state, count in facts["jobs"].items() if count) or "no jobs yet")
    for worker in facts["workers"]:
        if worker["jobs"]:
            state = "works on" if worker["alive"] else "died with"
            console.print(f"{worker['slot']} {state} {', '.join(worker['jobs'])}")
    if facts["loose"]:
        console.print(f"loose files waiting in incoming/: {', '.join(map(escape, facts['loose'][:10]))}")
    moving = [row for row in rows if row["state"] != "done"] or rows[-10:]
    if moving:
        failed = any("error" in row for row in moving)
        table = _table("job", "state", "since", "title", *(["why"] if failed else []))
        for row in moving:
            since = row.get("since", "")[:19].replace("T", " ")
            cells = (row["job"], row["state"], since, row["title"], *([row.get("error", "")] if failed else []))
            table.add_row(*(escape(str(cell)) for cell in cells))
        console.print(table)


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
    """Events of many jobs, in order of time."""
    from rich.markup import escape

    table = _table("at", "job", "step", "node", "s", "outcome", "title")
    for event in found:
        took = receipt.seconds_between(event["start"], event["end"]) if "end" in event else ""
        at = event["start"][:19].replace("T", " ")
        cells = (at, event["job"], event["step"], event["node"], took, event["outcome"], event["title"])
        table.add_row(*(escape(str(cell)) for cell in cells))
    _console().print(table)


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
