"""What the spool knows, as data: counts and jobs for `status`, one job's story, and the joined timeline of `report`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from h3spool import container, receipt
from h3spool.adopt import loose_files
from h3spool.errors import H3SpoolError, NotFound
from h3spool.job import Job
from h3spool.spool import Spool


def overview(spool: Spool) -> dict:
    """Counts per state, loose files that wait, what each worker does, free space."""
    counts = {
        state: len(spool.names(state)) for state in ("incoming", "verified", "decoded", "done", "failed", "results")
    }
    facts = {"spool": str(spool.root), "node": spool.node, "role": spool.role, "uuid": spool.uuid}
    return facts | {
        "jobs": counts,
        "loose": loose_files(spool),
        "workers": [_worker(spool, slot) for slot in spool.slots()],
        "free_bytes": spool.free_bytes(),
    }


def _worker(spool: Spool, slot: str) -> dict:
    """A slot: is somebody alive in it, and what does it hold."""
    return {"slot": slot, "alive": not spool.slot_is_free(slot), "jobs": spool.names(f"active/{slot}")}


def rows(spool: Spool, *, failed: bool = False) -> list[dict]:
    """One line a job: name, state, title, since when, and for a failed one the reason."""
    found = []
    for place in ["failed"] if failed else spool.places():
        for name in spool.names(place):
            found.append(_row(spool.job(place, name), place))
    return found


def _row(job: Job, place: str) -> dict:
    account = job.peek()
    events = account["events"]
    row = {"job": job.name, "state": place, "title": account.get("title", "")}
    if events:
        row["since"] = events[-1].get("end") or events[-1].get("start")
        if events[-1].get("error"):
            row["error"] = events[-1]["error"]
    return row


def story(spool: Spool, key: str) -> list[dict]:
    """Every job with this name or title: its state, place and whole receipt.

    Raises:
        NotFound
    """
    found = spool.find(key)
    if found:
        stories = [_story(*found)]
    else:
        jobs = [(place, spool.job(place, name)) for place in spool.places() for name in spool.names(place)]
        stories = [_story(place, job) for place, job in jobs if job.peek().get("title") == key]
    if not stories and spool.holds("results", key):
        stories = [_story("results", spool.job("results", key))]
    if not stories:
        raise NotFound(f"{spool.root}: no job is called {key!r}, by name or title")
    return stories


def _story(place: str, job: Job) -> dict:
    files = sorted(os.listdir(job.path)) if job.path.is_dir() else []
    return {"job": job.name, "state": place, "path": str(job.path), "files": files, "receipt": job.peek()}


def timeline(receipts: list[dict]) -> list[dict]:
    """Join receipts of one or both nodes by (job, node, step, start): one row an event, in order of time."""
    events: dict[tuple, dict] = {}
    for account in receipts:
        for event in account["events"]:
            key = (account["job"], event.get("node"), event["step"], event.get("start"))
            if key not in events or events[key]["outcome"] == receipt.OPEN:
                events[key] = {"job": account["job"], "title": account.get("title", ""), **event}
    return sorted(events.values(), key=lambda event: (str(event.get("start")), event["job"]))


def read_receipts(paths: list[Path]) -> list[dict]:
    """All receipts in these files or directories (searched through); what is no receipt is left out."""
    found = []
    for path in paths:
        for file in sorted(path.rglob("*.pipeline.json")) if path.is_dir() else [path]:
            try:
                account = receipt.parse(raw := container.read_bytes(file, 1 << 24), json.loads(raw).get("job", ""))
            except (H3SpoolError, ValueError, AttributeError):
                continue
            if account:
                found.append(account)
    return found
