"""requeue, gc and fsck."""

import json
import os
import shutil
import time

import pytest
from conftest import put, receipt_of

from h3spool import steps, upkeep
from h3spool.errors import BadData, NotFound, TryLater
from h3spool.spool import Spool

DAY = upkeep.DAY_S


def age(path, days):
    """Make a directory and its files look so old."""
    then = time.time() - days * DAY
    for found in (*path.iterdir(), path):
        os.utime(found, (then, then))


def done(spool, days=0.0, mp4=True, master=False):
    name = put(spool, "done")
    folder = spool.root / "done" / name
    if mp4:
        (folder / f"{name}.mp4").write_bytes(b"mp4")
    if master:
        (folder / f"{name}.master.mkv").write_bytes(b"master")
    age(folder, days)
    return name


def files(spool, name, place="done"):
    folder = spool.root / place / name
    return {path.name.removeprefix(name) for path in folder.iterdir()} if folder.is_dir() else None


# ---- requeue ----


def test_a_failed_job_goes_back_and_is_verified_again(decoder):
    name = put(decoder, "failed")
    decoder.job("failed", name).set_state(attempts=5)
    assert upkeep.requeue(decoder, name) == name
    assert [outcome.state for outcome in steps.verify(decoder)] == ["verified"]
    assert "attempts" not in decoder.job("verified", name).state()


def test_a_decoders_done_job_goes_back_with_its_mp4(decoder):
    name = done(decoder)
    assert upkeep.requeue(decoder, name) == name
    assert ".mp4" in files(decoder, name, "incoming")


def test_a_samplers_done_job_becomes_a_new_one(sampler):
    name = put(sampler, "done")
    assert upkeep.requeue(sampler, name) == f"{name}-r1"
    assert upkeep.requeue(sampler, name) == f"{name}-r2"
    assert sampler.names("done") == [name]
    assert [outcome.state for outcome in steps.verify(sampler)] == ["verified"] * 2
    assert receipt_of(sampler, f"{name}-r1")["events"][0]["of"] == name


def test_what_cannot_be_requeued_says_why(sampler, decoder):
    with pytest.raises(NotFound):
        upkeep.requeue(sampler, "nothing")
    waiting = put(sampler, "verified")
    with pytest.raises(TryLater, match="on its way"):
        upkeep.requeue(sampler, waiting)
    empty = done(decoder)
    decoder.job("done", empty).latent.unlink()
    with pytest.raises(BadData, match="gc has taken it"):
        upkeep.requeue(decoder, empty)
    assert decoder.names("done") == [empty]


@pytest.mark.parametrize("state", ["failed", "verified", "incoming"])
def test_any_peer_unbinds(sampler, state):
    name = put(sampler, state)
    sampler.job(state, name).set_state(peer="0b5ae4fc-32ca-4dd9-8f08-6cbd7dd94a4d")
    upkeep.requeue(sampler, name, any_peer=True)
    assert sampler.job("incoming", name).state() == {}


def test_without_any_peer_the_job_stays_bound(sampler):
    name = put(sampler, "failed")
    sampler.job("failed", name).set_state(peer="x")
    upkeep.requeue(sampler, name)
    list(steps.verify(sampler))
    assert sampler.job("verified", name).state() == {"peer": "x"}


def test_the_command_tells_where_the_job_is(cli, decoder):
    name = put(decoder, "failed")
    result = cli("requeue", name, "nothing", "-s", decoder.root)
    assert result.code == 66 and result.out.splitlines()[0] == f"{name}  incoming"


# ---- gc ----


def run(spool, dry_run=False, **limits):
    return {
        os.path.relpath(path, spool.root): size
        for path, size in upkeep.gc(spool, upkeep.Limits(**limits), dry_run=dry_run)
    }


def test_latents_of_old_done_jobs_go_and_their_mp4s_stay(decoder):
    old, young = done(decoder, 8, master=True), done(decoder, 6, master=True)
    gone = run(decoder)
    assert set(gone) == {f"done/{old}/{old}.master.mkv", f"done/{old}/{old}.h3latent"}
    assert files(decoder, old) == {".mp4", ".pipeline.json", ".h3latent.sha256"}
    assert len(files(decoder, young)) == 5


def test_a_samplers_old_done_job_goes_whole(sampler):
    old = done(sampler, 8, mp4=False)
    assert list(run(sampler)) == [f"done/{old}"] and not sampler.names("done")


def test_mp4s_failed_jobs_and_results_go_only_when_asked(decoder):
    name, bad, bad_with_mp4 = done(decoder, 9), put(decoder, "failed"), put(decoder, "failed")
    (decoder.root / "failed" / bad_with_mp4 / f"{bad_with_mp4}.mp4").write_bytes(b"x")
    result = put(decoder, "results")
    for place, job in (("failed", bad), ("failed", bad_with_mp4), ("results", result)):
        age(decoder.root / place / job, 9)
    run(decoder)
    assert files(decoder, name) and files(decoder, bad, "failed") and files(decoder, result, "results")
    assert set(run(decoder, failed=True)) == {f"failed/{bad}"}
    assert set(run(decoder, results=True)) == {f"results/{result}"}
    assert set(run(decoder, failed=True, mp4=True)) == {f"failed/{bad_with_mp4}", f"done/{name}"}


def test_a_dry_run_takes_nothing(decoder):
    name = done(decoder, 9)
    assert run(decoder, dry_run=True) and len(files(decoder, name)) == 4


def test_by_count_the_oldest_go_first(sampler):
    names = [done(sampler, days, mp4=False) for days in (3, 2, 1)]
    assert list(run(sampler, keep=1)) == [f"done/{names[0]}", f"done/{names[1]}"]


def test_by_free_space_age_does_not_matter(sampler):
    name = done(sampler, 0.1, mp4=False)
    assert run(sampler) == {}
    assert list(run(sampler, free_bytes=1 << 60)) == [f"done/{name}"]


def test_stale_work_in_progress_goes_and_fresh_stays(sampler, monkeypatch):
    stale = sampler.tmp_dir("export")
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 1.1 * DAY)
    assert list(run(sampler)) == [f"tmp/{stale.name}"]
    monkeypatch.undo()
    fresh = sampler.tmp_dir("export")
    assert run(sampler) == {} and fresh.exists()


def test_the_command_says_how_much(cli, decoder):
    done(decoder, 9)
    result = cli("gc", "-s", decoder.root, "--json")
    assert result.code == 0 and all(json.loads(line)["bytes"] for line in result.out.splitlines())
    assert "MiB were freed" in result.err


# ---- fsck ----


def findings(spool, repair=False):
    found = upkeep.fsck(Spool(spool.root, broken=True), repair=repair, pause_s=0)
    return [
        f"{os.path.relpath(finding.path, spool.root) if finding.path[0] == '/' else finding.path}" for finding in found
    ]


def test_a_sound_spool_has_no_findings(decoder):
    put(decoder, "verified")
    done(decoder)
    assert findings(decoder) == []


@pytest.mark.usefixtures("broken_by_hand")
@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (lambda root, name: shutil.copytree(root / "verified" / name, root / "failed" / name), "failed/{name}"),
        (lambda root, name: (root / "verified" / name / f"{name}.h3latent").unlink(), "verified/{name}"),
        (lambda root, name: (root / "verified" / "stray.txt").write_text("x"), "verified/stray.txt"),
        (lambda root, name: (root / "seen" / "odd").write_text("{"), "seen/odd"),
        (lambda root, name: os.rename(root / "verified" / name, root / "done" / name), "done/{name}"),
    ],
)
def test_what_only_a_person_can_mend_is_listed(decoder, damage, where):
    name = put(decoder, "verified")
    damage(decoder.root, name)
    assert findings(decoder) == findings(decoder, repair=True) == [where.format(name=name)]


@pytest.mark.usefixtures("broken_by_hand")
def test_repair_mends_what_is_safe(decoder):
    name = put(decoder, "verified")
    slot = decoder.root / "active" / "decode-3"
    slot.mkdir(mode=0o700)
    os.rename(decoder.root / "verified" / name, slot / name)
    (decoder.root / "results").rmdir()
    (decoder.root / "done").chmod(0o777)
    assert {"results", "done"} <= set(findings(decoder))
    assert findings(decoder, repair=True) == []
    assert decoder.names("verified") == [name]


@pytest.mark.usefixtures("broken_by_hand")
def test_the_command_exits_65_and_the_other_commands_say_what_to_do(cli, decoder):
    (decoder.root / "results").rmdir()
    assert cli("status", "-s", decoder.root).code == 78
    assert cli("fsck", "-s", decoder.root).code == 65
    assert cli("fsck", "--repair", "-s", decoder.root).code == 0
    assert cli("status", "-s", decoder.root).code == 0
