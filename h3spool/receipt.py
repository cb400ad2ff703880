"""The receipt, JOB.pipeline.json: what is known of a job and what happened to it, one event a step.

One JSON object, described by receipt.schema.json beside this file. It is rewritten whole by whoever holds the job; an
unreadable one is set aside and begun anew, because an account of the work must never stop the work.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone

VERSION = 1
OPEN, OK, FAILED, PUT_BACK = "open", "ok", "failed", "put-back"


def now() -> str:
    """The time as the receipt writes it: UTC with milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_between(start: str, end: str) -> float:
    """Seconds between two times of a receipt; negative where a clock was set back."""
    begin, finish = (datetime.fromisoformat(text.replace("Z", "+00:00")) for text in (start, end))
    return round((finish - begin).total_seconds(), 3)


def begin(job: str, title: str = "", latent: dict | None = None, producer: dict | None = None) -> dict:
    """A new receipt without events."""
    return {
        "h3spool_receipt": VERSION,
        "job": job,
        "title": title,
        "latent": latent or {},
        "producer": producer or {},
        "events": [],
    }


def parse(raw: bytes, job: str) -> dict | None:
    """Read a receipt; None when it is unreadable, of another version, or another job's."""
    try:
        receipt = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    whole = (
        isinstance(receipt, dict)
        and receipt.get("h3spool_receipt") == VERSION
        and receipt.get("job") == job
        and all(isinstance(receipt.get(key), kind) for key, kind in _KINDS.items())
        and all(_is_event(event) for event in receipt["events"])
    )
    return receipt if whole else None


_KINDS = {"title": str, "latent": dict, "producer": dict, "events": list}


def _is_event(event: object) -> bool:
    """Whether an event has what everybody who reads receipts relies on."""
    if not isinstance(event, dict) or not all(isinstance(event.get(key), str) for key in ("step", "node", "outcome")):
        return False
    try:
        seconds_between(event["start"], event.get("end", event["start"]))
    except (KeyError, ValueError, TypeError, AttributeError):
        return False
    return True


def dump(receipt: dict) -> bytes:
    """The bytes of the file."""
    return (json.dumps(receipt, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def event(step: str, node: str, start: str, outcome: str = OK, **facts: object) -> dict:
    """One event. Without an `end` fact it ends now; an open one (`outcome=OPEN`) has no end yet."""
    times = {"start": start} if outcome == OPEN else {"start": start, "end": facts.pop("end", None) or now()}
    known = {key: value for key, value in facts.items() if value not in (None, [], {}, "")}
    return {"step": step, "node": node, **times, "outcome": outcome, **known}


def last(receipt: dict, step: str) -> dict | None:
    """The newest event of a step."""
    return next((found for found in reversed(receipt["events"]) if found["step"] == step), None)


def close(receipt: dict, step: str, outcome: str, **facts: object) -> None:
    """End the newest event of a step where it is still open."""
    found = last(receipt, step)
    if found is not None and found.get("outcome") == OPEN:
        found.update({"end": now(), "outcome": outcome}, **facts)
