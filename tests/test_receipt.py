"""The receipt and its schema: what is kept, what is set aside, and what the schema refuses."""

import copy
import json

import pytest
from conftest import RECEIPTS, SCHEMA, put

from h3spool import receipt
from h3spool.job import Job

STARTED = "2026-11-30T22:15:00.123Z"


def filled() -> dict:
    """A receipt with one event of each simple kind."""
    account = receipt.begin("job-1", "猫")
    account["events"] = [
        receipt.event("export", "samp", STARTED, warnings=["it hardly varies"]),
        receipt.event("verify", "samp", STARTED),
        receipt.event("push", "samp", STARTED, receipt.OPEN, peer="atelier:spool"),
    ]
    return account


def faults(account: dict) -> list[str]:
    return [error.message for error in RECEIPTS.iter_errors(account)]


def test_times_are_utc_with_milliseconds():
    moment = receipt.now()
    assert receipt.seconds_between(moment, moment) == 0
    assert receipt.seconds_between(STARTED, "2026-11-30T22:15:01.000Z") == 0.877
    assert faults(receipt.begin("j") | {"events": [receipt.event("verify", "n", moment)]}) == []


def test_what_is_written_is_read_again():
    account = filled()
    assert receipt.parse(receipt.dump(account), "job-1") == account
    assert "猫" in receipt.dump(account).decode()


def test_a_title_that_is_no_unicode_is_written_all_the_same():
    account = receipt.begin("j", "\udcff")
    assert receipt.parse(receipt.dump(account), "j")["title"] == "?"


def test_an_event_has_no_empty_facts_and_an_open_one_no_end():
    event = receipt.event(
        "decode", "n", STARTED, attempt=1, warnings=[], error="", sound={}, master=None, black_share=0.0
    )
    assert set(event) == {"step", "node", "start", "end", "outcome", "attempt", "black_share"}
    assert "end" not in receipt.event("push", "n", STARTED, receipt.OPEN)


def test_closing_ends_the_newest_open_event_once():
    account = filled()
    receipt.close(account, "push", receipt.OK, received_by="deco")
    assert receipt.last(account, "push")["received_by"] == "deco"
    receipt.close(account, "push", receipt.FAILED)
    assert receipt.last(account, "push")["outcome"] == "ok"
    receipt.close(account, "mux", receipt.OK)
    assert faults(account) == []


UNREADABLE = {
    "nothing": b"",
    "half a file": receipt.dump(filled())[:-20],
    "no JSON": b"{'job': 1}",
    "not UTF-8": b'{"job": "\xff"}',
    "nested beyond reason": b"[" * 100_000,
    "a list": b"[]",
    "another version": receipt.dump(filled() | {"h3spool_receipt": 2}),
    "another job": receipt.dump(filled() | {"job": "job-2"}),
    "events no list": receipt.dump(filled() | {"events": {}}),
    "an event no object": receipt.dump(filled() | {"events": [1]}),
    "an event without a step": receipt.dump(filled() | {"events": [{"node": "n", "start": STARTED, "outcome": "ok"}]}),
    "an event without a start": receipt.dump(filled() | {"events": [{"step": "mux", "node": "n", "outcome": "ok"}]}),
    "a start that is no time": receipt.dump(filled() | {"events": [receipt.event("mux", "n", "yesterday")]}),
    "an end that is no time": receipt.dump(filled() | {"events": [receipt.event("mux", "n", STARTED, end="soon")]}),
    "a title that is a number": receipt.dump(filled() | {"title": 7}),
    "a latent that is a list": receipt.dump(filled() | {"latent": []}),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_others_would_stumble_over_is_not_read(case):
    assert receipt.parse(UNREADABLE[case], "job-1") is None


@pytest.mark.parametrize("case", UNREADABLE)
def test_an_unreadable_receipt_is_set_aside_and_begun_anew(decoder, broken_by_hand, case):
    job = Job(decoder, name := put(decoder, "incoming"), decoder.root / "incoming" / name)
    raw = UNREADABLE[case].replace(b"job-1", name.encode())
    job.file(".pipeline.json").write_bytes(raw)
    job.record(receipt.event("verify", "deco", STARTED))
    assert job.file(".pipeline.json.unreadable").read_bytes() == raw
    assert faults(account := json.loads(job.file(".pipeline.json").read_text())) == []
    assert [event["step"] for event in account["events"]] == ["verify"]


def test_a_link_in_place_of_the_receipt_is_set_aside(decoder, tmp_path):
    job = Job(decoder, name := put(decoder, "incoming"), decoder.root / "incoming" / name)
    job.file(".pipeline.json").rename(outside := tmp_path / "outside")
    job.file(".pipeline.json").symlink_to(outside)
    before = outside.read_bytes()
    job.record(receipt.event("verify", "deco", STARTED))
    assert outside.read_bytes() == before
    assert len(json.loads(job.file(".pipeline.json").read_text())["events"]) == 1


# ---------------------------------------------------------------- the schema


def test_the_schema_is_one():
    RECEIPTS.check_schema(SCHEMA)
    assert faults(filled()) == []


def test_every_key_is_described():
    """README's table of keys is made from the descriptions."""

    def undescribed(node, path="", described=False):
        if isinstance(node, dict):
            for name, value in node.get("properties", {}).items():
                known = isinstance(value, dict) and ("description" in value or "$ref" in value)
                if value not in (True, False) and not known and not described and "if" not in path:
                    yield f"{path}.{name}"
            for key, value in node.items():
                yield from undescribed(value, f"{path}/{key}")
        elif isinstance(node, list):
            for index, value in enumerate(node):
                yield from undescribed(value, f"{path}/{index}")

    conditions = ("/if", "/allOf/0/then", "/allOf/1/then")
    assert [p for p in undescribed(SCHEMA) if not any(c in p for c in conditions)] == []


def wrong_receipts():
    def changed(change):
        account = copy.deepcopy(filled())
        change(account)
        return account

    return {
        "an unknown key": changed(lambda a: a.update(colour="red")),
        "no title": changed(lambda a: a.pop("title")),
        "a fact of another step": changed(lambda a: a["events"][1].update(ffmpeg="9")),
        "an unknown step": changed(lambda a: a["events"][1].update(step="dance")),
        "an unknown outcome": changed(lambda a: a["events"][1].update(outcome="maybe")),
        "no end": changed(lambda a: a["events"][1].pop("end")),
        "an end of what is open": changed(lambda a: a["events"][2].update(end=STARTED)),
        "open, but not a push": changed(lambda a: (a["events"][1].pop("end"), a["events"][1].update(outcome="open"))),
        "failed without a reason": changed(lambda a: a["events"][1].update(outcome="failed")),
        "a push to nobody": changed(lambda a: a["events"][2].pop("peer")),
        "local time": changed(lambda a: a["events"][1].update(start="2026-11-30 22:15:00")),
        "a decode that says nothing": changed(lambda a: a["events"].append(receipt.event("decode", "n", STARTED))),
        "a mux without a hash": changed(lambda a: a["events"].append(receipt.event("mux", "n", STARTED, ffmpeg="9"))),
        "a latent without its size": changed(lambda a: a["latent"].update(sha256="0" * 64)),
    }


@pytest.mark.parametrize("case", wrong_receipts())
def test_the_schema_refuses(case):
    assert faults(wrong_receipts()[case])
