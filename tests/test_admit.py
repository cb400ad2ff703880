"""The receiving end of a push: what counts as whole, what is refused, what older runs leave, and what is said."""

import hashlib
import io
import json
import os
import subprocess
import sys
import uuid

import pytest
from conftest import PROGRAM, census, clean_environment, places_of, put, receipt_of

from h3spool import admit, receipt
from h3spool.errors import BadData, NotUsable
from h3spool.job import Job

SENDER = str(uuid.uuid4())


def run_name(slot: int = 0, sender: str = SENDER) -> str:
    return f"push-{sender}-{slot}-{os.urandom(8).hex()}"


class Sent:
    """A job that a sender has put into a run of a decoder's spool."""

    def __init__(self, sampler, decoder, run: str | None = None, name: str | None = None, **kind):
        if name is None:
            name = put(sampler, "verified", **kind)
            job = sampler.job("verified", name)
            account = job.receipt()
            account["events"].append(receipt.event("push", "samp", receipt.now(), receipt.OPEN, peer="deco:spool"))
            job.write_receipt(account)
        self.source = sampler.job("verified", name)
        self.run = admit.begin_run(decoder, run or run_name())
        self.job = Job(decoder, name, self.run / name)
        self.manifest = admit.manifest(self.source)
        self.job.path.mkdir(parents=True)
        for file in self.manifest["files"]:
            (self.job.path / file["name"]).write_bytes((self.source.path / file["name"]).read_bytes())


@pytest.fixture
def sent(sampler, decoder) -> Sent:
    return Sent(sampler, decoder)


def ask(decoder, sent, *entries, **options) -> list[dict]:
    return admit.admit(decoder, sent.run, list(entries or [sent.manifest]), **options)


# ---------------------------------------------------------------- what is whole


def test_a_whole_job_is_published_and_acknowledged(decoder, sent):
    assert ask(decoder, sent) == [
        {"job": sent.job.name, "sha256": sent.source.expected_digest(), "state": "incoming"},
    ]
    assert places_of(decoder.root) == {sent.job.name: ["incoming"]}
    event = receipt_of(decoder, sent.job.name)["events"][-1]
    assert (event["step"], event["outcome"], event["received_by"]) == ("push", "ok", "deco")


def test_the_manifest_names_every_file_that_travels(sampler):
    name = put(sampler, "verified")
    job = sampler.job("verified", name)
    job.set_state(peer="x", attempts=3)
    job.write(f"{name}.producer.json", b"{}")
    job.write(f"{name}.mp4", b"never")
    files = {file["name"]: file for file in admit.manifest(job)["files"]}
    assert set(files) == {
        f"{name}{suffix}" for suffix in (".h3latent", ".h3latent.sha256", ".pipeline.json", ".producer.json")
    }
    for file in files.values():
        raw = (job.path / file["name"]).read_bytes()
        assert (file["size"], file["sha256"]) == (len(raw), hashlib.sha256(raw).hexdigest())


def damage_truncated(sent):
    sent.job.latent.write_bytes(sent.job.latent.read_bytes()[:-1])


def damage_flipped(sent):
    raw = bytearray(sent.job.latent.read_bytes())
    raw[-1] ^= 1
    sent.job.latent.write_bytes(raw)


def damage_missing_latent(sent):
    sent.job.latent.unlink()


def damage_missing_receipt(sent):
    """Hole 6 of the protocol: rsync died after the sidecar; the hash agrees, the receipt never comes."""
    sent.job.file(".pipeline.json").unlink()


def damage_half_receipt(sent):
    sent.job.file(".pipeline.json").write_bytes(sent.job.file(".pipeline.json").read_bytes()[:20])


def damage_nothing_arrived(sent):
    for path in sent.job.path.iterdir():
        path.unlink()
    sent.job.path.rmdir()


def damage_no_run(sent):
    damage_nothing_arrived(sent)
    sent.run.rmdir()


def damage_a_temporary_of_rsync(sent):
    (sent.job.path / f".{sent.job.name}.h3latent.a1B2c3").write_bytes(b"")


def damage_a_state(sent):
    (sent.job.path / "state.json").write_text('{"attempts": 4}')


@pytest.mark.parametrize(
    "damage",
    [damage_truncated, damage_flipped, damage_missing_latent, damage_missing_receipt, damage_half_receipt,
     damage_nothing_arrived, damage_no_run, damage_a_temporary_of_rsync, damage_a_state],
)  # fmt: skip
def test_what_is_not_exactly_the_manifest_is_to_be_sent_again(sampler, decoder, sent, damage, broken_by_hand):
    damage(sent)
    (answer,) = ask(decoder, sent)
    assert answer["exit"] == 75
    assert "state" not in answer
    assert census(decoder) == {}
    assert decoder.seen(sent.job.name) is None
    again = Sent(sampler, decoder, name=sent.job.name)  # in a new run
    assert ask(decoder, again)[0]["state"] == "incoming"


@pytest.mark.parametrize("kind", ["link", "hard link", "directory", "fifo"])
def test_only_plain_files_of_our_own_are_taken(decoder, sent, tmp_path, kind, broken_by_hand):
    latent = sent.job.latent
    latent.rename(tmp_path / "elsewhere")
    if kind == "link":
        latent.symlink_to(tmp_path / "elsewhere")
    elif kind == "hard link":
        os.link(tmp_path / "elsewhere", latent)
    elif kind == "directory":
        latent.mkdir()
    else:
        os.mkfifo(latent)
    (answer,) = ask(decoder, sent)
    assert answer["exit"] == 77
    assert census(decoder) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_not_taken(decoder, sent):
    os.chown(sent.job.latent, 12345, -1)
    assert ask(decoder, sent)[0]["exit"] == 77
    assert census(decoder) == {}


# ---------------------------------------------------------------- manifests that make no sense


def test_a_manifest_is_not_trusted(sampler, decoder, sent):
    name, files = sent.manifest["job"], sent.manifest["files"]
    strange = [
        {},
        {"job": name},
        {"job": name, "files": []},
        {"job": name, "files": [1]},
        {"job": name, "files": files[:1]},
        {"job": name, "files": [*files, files[0]]},
        {"job": name, "files": [*files, {"name": "state.json", "size": 0, "sha256": ""}]},
        {"job": name, "files": [*files, {"name": f"{name}.mp4", "size": 0, "sha256": ""}]},
        {"job": name, "files": [*files, {"name": f"../{name}.h3latent"}]},
        {"job": name, "files": [*files, {"name": [1]}]},
        {"job": "../x", "files": files},
        {"job": "a.part", "files": files},
        {"job": [name], "files": files},
        {"job": None, "files": files},
    ]
    for entry in strange:
        (answer,) = ask(decoder, sent, entry)
        assert answer["exit"] == 65, entry
    assert census(decoder) == {}
    assert ask(decoder, sent)[0]["state"] == "incoming"


def test_a_hash_that_the_sender_makes_up_is_never_acknowledged(decoder, sent):
    sent.manifest["files"][0]["sha256"] = "0" * 64
    assert ask(decoder, sent)[0]["exit"] == 75
    assert census(decoder) == {}


# ---------------------------------------------------------------- again, and other content


def test_a_job_that_was_admitted_before_is_acknowledged_again(sampler, decoder, sent):
    ask(decoder, sent)
    decoder.promote(decoder.job("incoming", sent.job.name), "verified")
    again = Sent(sampler, decoder, name=sent.job.name)
    assert ask(decoder, again)[0]["state"] == "known"
    damage_nothing_arrived(again)  # nothing needs to arrive for that
    assert ask(decoder, again)[0]["state"] == "known"
    assert places_of(decoder.root) == {sent.job.name: ["verified"]}


def test_other_content_under_a_known_name_is_the_senders_error(sampler, decoder, sent):
    ask(decoder, sent)
    put(sampler, "incoming", name=sent.job.name, seed=5)
    os.rename(sent.source.path, sampler.root / "tmp" / "old")
    os.rename(sampler.root / "incoming" / sent.job.name, sent.source.path)
    (answer,) = ask(decoder, other := Sent(sampler, decoder, name=sent.job.name), other.manifest)
    assert answer["exit"] == 65
    assert "was received before with SHA-256" in answer["error"]
    assert places_of(decoder.root) == {sent.job.name: ["incoming"]}


def test_each_job_of_a_run_is_answered_for_itself(sampler, decoder):
    run = run_name()
    good, cut = Sent(sampler, decoder, run), Sent(sampler, decoder, run)
    damage_truncated(cut)
    answers = ask(decoder, good, cut.manifest, {"job": "../x"}, good.manifest)
    assert [answer.get("exit", answer.get("state")) for answer in answers] == [75, 65, "incoming"]
    assert places_of(decoder.root) == {good.job.name: ["incoming"]}


def test_a_full_disk_here_is_a_reason_to_try_later(decoder, sent):
    """To the sender a full peer is 75, never a loss and never its own disk's fault."""
    (answer,) = ask(decoder, sent, min_free_bytes=1 << 60)
    assert answer["exit"] == 75
    assert "MiB free" in answer["error"]
    assert census(decoder) == {}


# ---------------------------------------------------------------- runs


def test_a_starting_run_clears_older_ones_of_the_same_sender_and_slot(decoder):
    older = [run_name(0), run_name(0)]
    others = [run_name(1), run_name(10), run_name(0, str(uuid.uuid4())), "decode-0123", "push-x"]
    for run in (*older, *others):
        (decoder.root / "tmp" / run / "job-1").mkdir(parents=True)
    mine = run_name(0)
    (decoder.root / "tmp" / mine).mkdir()  # rsync was faster
    assert admit.begin_run(decoder, mine) == decoder.root / "tmp" / mine
    assert {path.name for path in (decoder.root / "tmp").iterdir()} == {mine, *others}


def test_a_run_that_seen_names_is_not_cleared(sampler, decoder, sent):
    """seen/ is the commit point: until somebody finishes it, this is the only copy."""
    record = {"sha256": sent.source.expected_digest(), "tmp": f"tmp/{sent.run.name}/{sent.job.name}"}
    (decoder.root / "seen" / sent.job.name).write_text(json.dumps(record))
    again = Sent(sampler, decoder, name=sent.job.name)
    assert sent.job.path.is_dir()
    assert ask(decoder, again)[0]["state"] == "known"
    assert places_of(decoder.root) == {sent.job.name: ["incoming"]}
    assert not sent.job.path.exists()


@pytest.mark.parametrize(
    "run", ["", "x", "../x", f"push-{SENDER}-0-xyz", f"push-{SENDER}-0-{'0' * 16}/..", f"push-{SENDER}-0-{'0' * 16}\n"]
)
def test_a_run_has_no_other_name(decoder, run):
    with pytest.raises(BadData, match="is not the name of a push run"):
        admit.begin_run(decoder, run)


# ---------------------------------------------------------------- the wire


def test_the_greeting_says_who_and_how_full(decoder):
    put(decoder, "incoming")
    put(decoder, "verified")
    greeting = admit.greeting(decoder)
    assert greeting["h3spool_wire"] == admit.WIRE
    assert (greeting["uuid"], greeting["node"], greeting["waiting"]) == (decoder.uuid, "deco", 2)
    assert greeting["free_bytes"] > 0


def test_a_sampler_receives_nothing(sampler):
    with pytest.raises(NotUsable, match="is a sampler's spool; push goes to a decoder's"):
        admit.greeting(sampler)


def talk(decoder, run: str, text: str) -> list[dict]:
    answer = io.StringIO()
    admit.serve(decoder, run, io.StringIO(text), answer, min_free_bytes=0)
    return [json.loads(line) for line in answer.getvalue().splitlines()]


def test_a_conversation(decoder, sent):
    greeting, reply = talk(decoder, sent.run.name, json.dumps(sent.manifest) + "\n\n")
    assert greeting["uuid"] == decoder.uuid
    assert reply["state"] == "incoming"


def test_nothing_is_admitted_before_the_empty_line(decoder, sent):
    """A connection that breaks among the names: nothing was promised, nothing is taken."""
    assert len(talk(decoder, sent.run.name, json.dumps(sent.manifest) + "\n")) == 1
    assert census(decoder) == {}


def test_a_line_that_is_no_json_ends_it(decoder, sent):
    with pytest.raises(BadData, match="not JSON; are both ends the same h3spool"):
        talk(decoder, sent.run.name, "login banner\n\n")
    assert talk(decoder, sent.run.name, "[1]\n\n")[1]["exit"] == 65


def test_the_hidden_command_speaks_it(decoder, sent):
    argv = [PROGRAM, "admit", "--spool", str(decoder.root), "--min-free", "0", "--", sent.run.name]
    done = subprocess.run(
        argv,
        input=json.dumps(sent.manifest) + "\n\n",
        capture_output=True,
        text=True,
        check=True,
        env=clean_environment(),
    )
    greeting, reply = map(json.loads, done.stdout.splitlines())
    assert (greeting["uuid"], reply["state"]) == (decoder.uuid, "incoming")


def test_what_is_wrong_with_the_spool_is_said_on_the_wire_too(cli, sampler, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    for root, code in ((tmp_path / "nothing", 66), (sampler.root, 78)):
        done = cli("admit", "--spool", root, "--", run_name())
        assert done.code == code
        line = json.loads(done.out)
        assert (line["h3spool_wire"], line["exit"]) == (admit.WIRE, code)
        assert line["error"] in done.err
