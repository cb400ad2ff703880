"""status and report."""

from __future__ import annotations

import json
from pathlib import Path

import click

from h3spool.cli.options import json_option, spool_options
from h3spool.cli.output import out


@click.command()
@click.argument("job", required=False, metavar="[JOB|TITLE]")
@click.option("--failed", is_flag=True, help="Only failed jobs, each with its reason.")
@json_option
@spool_options
def status(spool: object, job: str | None, failed: bool, as_json: bool) -> None:
    """Show the spool, or one job's story.

    \b
    Example: h3spool status
             h3spool status "Cat on a roof"
    """
    from h3spool import report
    from h3spool.cli import show

    if job is not None:
        for story in report.story(spool, job):
            click.echo(json.dumps(story, ensure_ascii=False)) if as_json else show.story(story)
    elif failed:
        for row in report.rows(spool, failed=True):
            out(row, as_json, "job", "title", "error")
    elif as_json:
        click.echo(json.dumps(report.overview(spool) | {"list": report.rows(spool)}, ensure_ascii=False))
    else:
        show.overview(report.overview(spool), report.rows(spool))


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(exists=True, path_type=Path))
@json_option
def report(paths: tuple[Path, ...], as_json: bool) -> None:
    """Join receipts of both nodes into one timeline; PATHS are spools, result folders or receipts.

    \b
    Example: h3spool report ~/spool ~/Videos/receipts
    """
    from h3spool import report as reporting
    from h3spool.cli import show

    events = reporting.timeline(reporting.read_receipts(list(paths)))
    if as_json:
        for event in events:
            click.echo(json.dumps(event, ensure_ascii=False))
    else:
        show.timeline(events)


COMMANDS = (status, report)
