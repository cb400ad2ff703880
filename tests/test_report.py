"""What status and report say."""

import json
import os

from conftest import make_clip, put

from h3spool import export, receipt, report


def test_the_overview_counts_states_workers_and_loose_files(decoder):
    put(decoder, "verified")
    slot = decoder.take_slot("decode")
    held = slot.claim(decoder.names("verified")[0])
    put(decoder, "failed")
    (decoder.root / "incoming" / "loose.h3latent").write_bytes(b"x")
    facts = report.overview(decoder)
    assert facts["jobs"] | {"failed": 1, "verified": 0} == facts["jobs"]
    assert facts["workers"] == [{"slot": "decode-0", "alive": True, "jobs": [held.name]}]
    assert facts["loose"] == ["loose.h3latent"]
    slot.put_back(held)
    slot.release()
    assert report.overview(decoder)["workers"][0]["alive"] is False


def test_a_story_is_found_by_name_and_by_title(cli, sampler):
    name = export(*make_clip(), spool=sampler, title="猫 on a roof", min_free_bytes=0)
    for key in (name, "猫 on a roof"):
        result = cli("status", key, "-s", sampler.root, "--json")
        story = json.loads(result.out)
        assert result.code == 0 and (story["job"], story["state"]) == (name, "incoming")
    assert "猫 on a roof" in cli("status", name, "-s", sampler.root).out
    assert cli("status", "no such", "-s", sampler.root).code == 66


def test_failed_jobs_are_listed_with_their_sentence(cli, sampler):
    name = put(sampler, "incoming")
    (sampler.root / "incoming" / name / f"{name}.h3latent").write_bytes(b"damaged")
    cli("verify", "-s", sampler.root)
    result = cli("status", "--failed", "-s", sampler.root)
    assert result.code == 0 and name in result.out and "SHA-256" in result.out


def test_receipts_of_both_nodes_join_into_one_timeline(cli, sampler, decoder):
    name = export(*make_clip(), spool=sampler, min_free_bytes=0)
    cli("loop", "--once", "-s", sampler.root, "--to", decoder.root, "--min-free", "0")
    cli("verify", "-s", decoder.root)
    result = cli("report", sampler.root, decoder.root, "--json")
    events = [json.loads(line) for line in result.out.splitlines()]
    assert [(event["step"], event["node"]) for event in events] == [
        ("export", "samp"),
        ("verify", "samp"),
        ("push", "samp"),
        ("verify", "deco"),
    ]
    assert {event["job"] for event in events} == {name} and events[2]["outcome"] == "ok"
    plain = cli("report", sampler.root, decoder.root)
    assert plain.code == 0 and plain.out.count(name) == 4


def test_a_closed_event_replaces_its_open_twin():
    account = receipt.begin("job")
    account["events"].append(receipt.event("push", "samp", "2026-01-01T00:00:00.000Z", receipt.OPEN, peer="x"))
    closed = json.loads(json.dumps(account))
    receipt.close(closed, "push", receipt.OK)
    for order in ([account, closed], [closed, account]):
        (event,) = report.timeline(order)
        assert event["outcome"] == "ok"


def test_what_is_no_receipt_is_left_out(tmp_path, broken_by_hand):
    (tmp_path / "x.pipeline.json").write_text("{")
    (tmp_path / "y.pipeline.json").write_bytes(receipt.dump(receipt.begin("y")))
    os.symlink(tmp_path / "y.pipeline.json", tmp_path / "z.pipeline.json")
    assert [account["job"] for account in report.read_receipts([tmp_path])] == ["y"]
