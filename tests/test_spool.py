"""The spool: who may open it, jobs in one place each, one winner a claim, slots that outlive their worker, seen/."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import census, places_of, put

from h3spool.errors import BadData, IOFailed, NotFound, NotPermitted, NotUsable, TryLater
from h3spool.job import Job, fsync_tree
from h3spool.spool import DIRECTORIES, Spool, valid_job

ROOT = os.geteuid() == 0


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["a", "A9._-", "20261130T221500123Z-samp-1a2b3c4d", "x" * 96, "clip.v2", "a.partial"])
def test_names_of_jobs(name):
    assert valid_job(name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "/x", "a/b", "-rf", "_a", ".hidden", "x" * 97, "猫", "a b", "a\n", "a\0", "a.part",
     "a.h3latent", "a.h3latent.sha256", "a.sha256", "~", "$(x)", "*"],
)  # fmt: skip
def test_what_is_no_name_of_a_job(name):
    assert not valid_job(name)


def test_new_names_are_valid_unique_and_in_order_of_time(sampler):
    names = [sampler.new_job_name() for _ in range(50)]
    assert len(set(names)) == 50
    assert all(valid_job(name) and re.fullmatch(r"\d{8}T\d{9}Z-samp-[0-9a-f]{8}", name) for name in names)
    assert sorted(name[:19] for name in names) == [name[:19] for name in names]


def test_the_longest_node_name_still_makes_a_job_name(tmp_path):
    assert valid_job(Spool.create(tmp_path / "s", "decoder", "n" * 32).new_job_name())


# ---------------------------------------------------------------- making and opening


def test_a_new_spool_is_private_and_opens(tmp_path):
    spool = Spool.create(tmp_path / "deep" / "spool", "decoder", "atelier")
    assert {path.name for path in spool.root.iterdir()} == {"spool.json", *DIRECTORIES}
    for path in (spool.root, *(spool.root / name for name in DIRECTORIES)):
        assert path.stat().st_mode & 0o777 == 0o700
    again = Spool(spool.root)
    assert (again.uuid, again.node, again.role) == (spool.uuid, "atelier", "decoder")


def test_making_it_again_changes_nothing(decoder):
    assert Spool.create(decoder.root, "decoder", "other").uuid == decoder.uuid
    with pytest.raises(NotUsable, match="is a decoder spool already; one spool has one role"):
        Spool.create(decoder.root, "sampler")


def test_a_half_made_spool_is_finished(tmp_path):
    (tmp_path / "s" / "tmp").mkdir(parents=True, mode=0o700)
    (tmp_path / "s" / "tmp" / "spool-00").write_text("{")
    (tmp_path / "s").chmod(0o700)
    assert Spool.create(tmp_path / "s", "sampler").role == "sampler"


def test_a_directory_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "Videos").mkdir()
    (tmp_path / "Videos" / "a.mp4").write_bytes(b"")
    with pytest.raises(NotPermitted, match=r"holds a\.mp4 already; give a new or an empty directory"):
        Spool.create(tmp_path / "Videos", "decoder")
    assert [path.name for path in (tmp_path / "Videos").iterdir()] == ["a.mp4"]


def test_an_unsafe_directory_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o775)
    with pytest.raises(NotPermitted, match="writable by group or others; chmod 700"):
        Spool.create(tmp_path / "shared", "decoder")
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.parametrize("node", ["", "-x", "a b", "a/b", "n" * 33, "ü"])
def test_a_node_name_that_would_not_fit_into_a_job_name_is_refused(tmp_path, node):
    if node:
        with pytest.raises(BadData, match="use 1 to 32 letters, digits and dashes"):
            Spool.create(tmp_path / "s", "decoder", node)
        assert not (tmp_path / "s").exists()
    else:
        assert Spool.create(tmp_path / "s", "decoder", node).node


def test_where_there_is_none(tmp_path):
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(NotFound, match=r"not a spool \(no spool.json\); `h3spool init` makes one"):
            Spool(path)


GOOD = {"h3spool": 1, "uuid": "u", "node": "n", "role": "decoder"}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", json.dumps(GOOD | {"h3spool": 2}), json.dumps(GOOD | {"h3spool": "1"}),
     json.dumps(GOOD | {"role": "cook"}), json.dumps(GOOD | {"role": []}), json.dumps(GOOD | {"uuid": None}),
     json.dumps({key: value for key, value in GOOD.items() if key != "node"}), "x" * 70_000],
)  # fmt: skip
def test_an_unknown_format_is_refused(decoder, text):
    (decoder.root / "spool.json").write_text(text)
    with pytest.raises(NotUsable, match=r"spool\.json: (spool format .*this h3spool knows 1|unreadable)"):
        Spool(decoder.root)


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702])
@pytest.mark.parametrize("name", ["", "incoming", "seen"])
def test_a_spool_that_others_can_write_is_refused(decoder, mode, name):
    (decoder.root / name).chmod(mode)
    with pytest.raises(NotPermitted, match=rf"{name}: is writable by group or others; chmod 700"):
        Spool(decoder.root)


@pytest.mark.skipif(not ROOT, reason="only root can give files away")
@pytest.mark.parametrize("name", ["", "tmp"])
def test_a_spool_of_somebody_else_is_refused(decoder, name):
    os.chown(decoder.root / name, 12345, -1)
    with pytest.raises(NotPermitted, match=rf"{name}: belongs to uid 12345, this process is uid 0"):
        Spool(decoder.root)


@pytest.mark.parametrize("name", ["", "verified", "spool.json"])
def test_a_link_is_refused(decoder, tmp_path, name):
    (decoder.root / name).rename(tmp_path / "elsewhere")
    (decoder.root / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotPermitted, match="link"):
        Spool(decoder.root)


def test_a_missing_directory_is_named(decoder):
    (decoder.root / "seen").rmdir()
    with pytest.raises(NotUsable, match=r"seen: missing; `h3spool fsck --repair`"):
        Spool(decoder.root)


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs"])
def test_a_network_filesystem_is_refused(tmp_path, program, kind):
    """The kernel's table of mounts is replaced for one process; nothing else can be had without such a mount."""
    device = os.stat(tmp_path).st_dev
    line = f"1 0 {os.major(device)}:{os.minor(device)} / / rw - {kind} server:/x rw\n"
    (tmp_path / "mountinfo").write_text(line)
    cover = 'mount --bind "$1" /proc/$$/mountinfo && shift && exec "$@"'
    isolated = ["unshare", "-m", "sh", "-c", cover, "sh", str(tmp_path / "mountinfo")]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")

    def run(*args):
        argv = [*isolated, str(Path(sys.executable).with_name("h3spool")), *map(str, args)]
        return subprocess.run(argv, capture_output=True, text=True, check=False)

    refused = run("init", tmp_path / "s", "--role", "decoder")
    assert refused.returncode == 78
    assert f"lies on a {kind} filesystem" in refused.stderr
    assert "--allow-network-fs" in refused.stderr
    assert not (tmp_path / "s" / "spool.json").exists()
    assert run("init", tmp_path / "s", "--role", "decoder", "--allow-network-fs").returncode == 0
    assert run("status", "-s", tmp_path / "s").returncode == 78
    assert run("status", "-s", tmp_path / "s", "--allow-network-fs").returncode == 0


# ---------------------------------------------------------------- where jobs are


def test_a_job_is_found_wherever_it_is(decoder):
    name = put(decoder, "incoming")
    assert decoder.find(name)[0] == "incoming"
    decoder.promote(decoder.job("incoming", name), "verified")
    slot = decoder.take_slot("decode")
    job = slot.claim(name)
    assert decoder.find(name)[0] == "active/decode-0"
    decoder.publish(job, "done")
    slot.release()
    assert decoder.find(name)[0] == "done"
    assert decoder.find("nothing") is None


@pytest.mark.parametrize("name", ["..", ".", "", "../verified", "/etc", "../../sampler"])
def test_what_is_typed_as_a_job_never_leads_out_of_a_state(decoder, name):
    assert decoder.find(name) is None
    assert not decoder.holds("incoming", name)
    slot = decoder.take_slot("decode")
    assert slot.claim(name) is None
    slot.release()


def test_strangers_in_a_state_are_no_jobs(decoder, tmp_path):
    (decoder.root / "verified" / "file").write_text("")
    (decoder.root / "verified" / ".hidden").mkdir()
    (decoder.root / "verified" / "x.part").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (decoder.root / "verified" / "link").symlink_to(tmp_path / "elsewhere")
    name = put(decoder, "verified")
    assert decoder.names("verified") == [name]
    assert not decoder.holds("verified", "link")
    (decoder.root / "verified" / "link").unlink()


def test_space_is_asked_for_before_it_is_needed(decoder):
    decoder.require_space(0, 0)
    with pytest.raises(IOFailed, match=r"MiB free, this needs 0 MiB and leaves --min-free .*`h3spool gc` makes room"):
        decoder.require_space(0, 1 << 60)
    with pytest.raises(IOFailed):
        decoder.require_space(decoder.free_bytes() + (1 << 30), 0)


# ---------------------------------------------------------------- claims and slots


def claim_all(root: str, start, results) -> None:
    spool = Spool(root)
    slot = spool.take_slot("decode")
    names = spool.names("verified")
    start.wait()
    results.put((slot.number, [name for name in names if slot.claim(name)]))
    results.close()
    results.join_thread()
    os.kill(os.getpid(), signal.SIGKILL)  # no clean end: what it claimed stays claimed


def test_of_eight_processes_one_wins_each_claim(decoder):
    names = {put(decoder, "verified", raw=b"") for _ in range(40)}
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(8), context.Queue()
    workers = [context.Process(target=claim_all, args=(str(decoder.root), start, results)) for _ in range(8)]
    for worker in workers:
        worker.start()
    won = [results.get(timeout=30) for _ in workers]
    for worker in workers:
        worker.join()
    assert sorted(number for number, _ in won) == list(range(8))
    claimed = [name for _, mine in won for name in mine]
    assert sorted(claimed) == sorted(names)  # each exactly once
    assert sum(census(decoder).values()) == 40
    decoder.empty_slots("decode")
    assert census(decoder) == {"verified": 40}


HOLD = """
import sys, time
from h3spool.spool import Spool
spool = Spool(sys.argv[1])
slot = spool.take_slot(sys.argv[2])
for name in sys.argv[3:]:
    assert slot.claim(name)
print(slot.number, flush=True)
time.sleep(600)
"""


@pytest.fixture
def worker(decoder):
    """Start a process that claims jobs and lives until it is killed; returns it once it has them."""
    started = []

    def start(step: str, *names: str, spool: Spool = decoder) -> subprocess.Popen:
        argv = [sys.executable, "-c", HOLD, str(spool.root), step, *names]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        started.append(process)
        process.number = int(process.stdout.readline())
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_killed_workers_jobs_come_back_by_any_starting_worker(decoder, worker):
    first, second = put(decoder, "verified"), put(decoder, "verified")
    one, two = worker("decode", first), worker("decode", second)
    assert (one.number, two.number) == (0, 1)
    two.kill()
    two.wait()
    slot = decoder.take_slot("decode")  # takes the lowest free slot, empties all
    assert slot.number == 1
    assert places_of(decoder.root) == {first: ["active/decode-0"], second: ["verified"]}
    one.kill()
    one.wait()
    decoder.empty_slots("decode")  # at each scan, by a worker that lives in another slot
    assert census(decoder) == {"verified": 2}
    slot.release()


def test_a_living_worker_keeps_its_jobs(decoder, worker):
    name = put(decoder, "verified")
    worker("decode", name)
    decoder.empty_slots("decode")
    decoder.take_slot("decode").release()
    assert places_of(decoder.root)[name] == ["active/decode-0"]


def test_each_step_returns_jobs_to_where_it_claims_from(sampler, decoder, worker):
    pushed = put(sampler, "verified")
    muxed, decoded = put(decoder, "decoded"), put(decoder, "verified")
    dead = [worker("push", pushed, spool=sampler), worker("mux", muxed), worker("decode", decoded)]
    for process in dead:
        process.kill()
        process.wait()
    sampler.empty_slots("push")
    decoder.empty_slots("mux")
    assert places_of(decoder.root) == {muxed: ["decoded"], decoded: ["active/decode-0"]}
    decoder.empty_slots("decode")
    assert places_of(decoder.root)[decoded] == ["verified"]
    assert places_of(sampler.root) == {pushed: ["verified"]}


def test_a_slot_is_kept_for_life_and_its_lock_for_ever(decoder):
    slots = [decoder.take_slot("decode") for _ in range(3)]
    assert [slot.number for slot in slots] == [0, 1, 2]
    slots[1].release()
    assert decoder.slot_is_free("decode-1")
    assert not decoder.slot_is_free("decode-0")
    again = decoder.take_slot("decode")
    assert again.number == 1
    for slot in (slots[0], slots[2], again):
        slot.release()
    assert {path.name for path in (decoder.root / "locks").iterdir()} == {"decode-0", "decode-1", "decode-2"}


def test_letting_a_slot_go_returns_what_is_left_in_it(decoder):
    name = put(decoder, "verified")
    slot = decoder.take_slot("decode")
    assert slot.claim(name)
    slot.release()
    assert decoder.find(name)[0] == "verified"


def test_a_lock_has_one_holder(decoder):
    another = r"locks/verify: another h3spool holds it; try again later"
    with decoder.lock("verify", wait=False), pytest.raises(TryLater, match=another):
        decoder.lock("verify", wait=False).__enter__()
    with decoder.lock("verify", wait=False):
        pass


# ---------------------------------------------------------------- seen/: exactly once


def arrived(spool: Spool, name: str = "job-1", text: bytes = b"latent") -> tuple[Path, str]:
    """A checked job in a run's directory in tmp/, as admit and adoption have it; returns it with its digest."""
    import hashlib

    held = spool.tmp_dir("push-run") / name
    held.mkdir()
    (held / f"{name}.h3latent").write_bytes(text)
    fsync_tree(held)
    return held, hashlib.sha256(text).hexdigest()


def test_a_job_is_published_once_and_then_acknowledged_again(decoder):
    held, digest = arrived(decoder)
    assert decoder.publish_once({"job-1": (held, digest)}) == {"job-1": True}
    assert census(decoder) == {"incoming": 1}
    again, _ = arrived(decoder)
    assert decoder.publish_once({"job-1": (again, digest)}) == {"job-1": False}
    assert again.is_dir()
    assert census(decoder) == {"incoming": 1}
    decoder.promote(decoder.job("incoming", "job-1"), "done")
    assert decoder.publish_once({"job-1": (again, digest)}) == {"job-1": False}
    assert census(decoder) == {"done": 1}


def test_the_record_names_hash_and_place(decoder):
    held, digest = arrived(decoder)
    decoder.publish_once({"job-1": (held, digest)})
    record = decoder.seen("job-1")
    assert record["sha256"] == digest
    assert record["tmp"] == f"tmp/{held.parent.name}/job-1"
    assert decoder.seen("job-2") is None


def test_other_content_under_a_known_name_is_refused(decoder):
    decoder.publish_once({"job-1": arrived(decoder)})
    result = decoder.publish_once({"job-1": arrived(decoder, text=b"another")})["job-1"]
    assert isinstance(result, BadData)
    assert "was received before with SHA-256" in str(result)
    assert "export it again, as a new job" in str(result)
    assert (decoder.root / "incoming/job-1/job-1.h3latent").read_bytes() == b"latent"


def test_what_is_gone_before_it_is_published_is_sent_again(decoder):
    held, digest = arrived(decoder)
    decoder.discard(held.parent)
    result = decoder.publish_once({"job-1": (held, digest)})["job-1"]
    assert isinstance(result, TryLater)
    assert decoder.seen("job-1") is None


def test_one_bad_job_does_not_keep_the_others(decoder):
    decoder.publish_once({"a": arrived(decoder, "a")})
    batch = {"a": arrived(decoder, "a", b"x"), "b": arrived(decoder, "b"), "c": (decoder.root / "tmp/no/c", "0")}
    results = decoder.publish_once(batch)
    assert isinstance(results["a"], BadData)
    assert results["b"] is True
    assert isinstance(results["c"], TryLater)


DIE = """
import os, sys
from pathlib import Path
from h3spool.spool import Spool
spool, held, digest, death = Spool(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
die = lambda *_: os.kill(os.getpid(), 9)
real_link, real_rename = os.link, os.rename
if death == "before seen":
    os.link = die
elif death == "after seen":
    os.link = lambda *args: (real_link(*args), die())
elif death == "before rename":
    os.rename = die
elif death == "after rename":
    os.rename = lambda *args: (real_rename(*args), die())
spool.publish_once({held.name: (held, digest)})
"""


@pytest.mark.parametrize(
    ("death", "remembered", "place"),
    [
        ("before seen", False, None),
        ("after seen", True, None),
        ("before rename", True, None),
        ("after rename", True, "incoming"),
    ],
)
@pytest.mark.parametrize("rescuer", ["asked again", "verify looks"])
def test_a_death_at_any_step_of_publishing_loses_and_doubles_nothing(decoder, death, remembered, place, rescuer):
    """Holes 1 to 5 of the protocol: seen/JOB is whole or not there, and whoever meets it finishes it."""
    held, digest = arrived(decoder)
    argv = [sys.executable, "-c", DIE, str(decoder.root), str(held), digest, death]
    assert subprocess.run(argv, check=False).returncode == -signal.SIGKILL
    assert (decoder.seen("job-1") is not None) == remembered
    assert (decoder.find("job-1") or [None])[0] == place
    if rescuer == "asked again":
        fresh = arrived(decoder)  # the sender sends again, in a new run
        assert decoder.publish_once({"job-1": fresh}) == {"job-1": not remembered}
        assert places_of(decoder.root) == {"job-1": ["incoming"]}
        assert (decoder.root / "incoming/job-1/job-1.h3latent").read_bytes() == b"latent"
    else:
        finished = decoder.finish_published()
        assert finished == (["job-1"] if remembered and not place else [])
        assert places_of(decoder.root) == ({"job-1": ["incoming"]} if remembered else {})
    assert decoder.finish_published() == []


def test_a_run_directory_that_is_used_again_does_not_double(decoder):
    """Hole 5: were a name in tmp/ used twice, "its tmp path still there" would be read as unfinished."""
    held, digest = arrived(decoder)
    decoder.publish_once({"job-1": (held, digest)})
    decoder.promote(decoder.job("incoming", "job-1"), "done")
    assert len({decoder.tmp_path("push-run") for _ in range(1000)}) == 1000
    assert decoder.publish_once({"job-1": arrived(decoder)}) == {"job-1": False}
    assert places_of(decoder.root) == {"job-1": ["done"]}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"sha256": "0"}'])
def test_a_damaged_memory_is_no_reason_to_guess(decoder, text):
    (decoder.root / "seen" / "job-1").write_text(text)
    with pytest.raises(IOFailed, match="seen/job-1: unreadable; `h3spool fsck`"):
        decoder.publish_once({"job-1": arrived(decoder)})
    assert census(decoder) == {}


def publish_from_a_fork(root: str, held: str, digest: str, start, results) -> None:
    spool = Spool(root)
    start.wait()
    results.put(spool.publish_once({"job-1": (Path(held), digest)})["job-1"])


def test_of_eight_publishers_one_publishes(decoder):
    """The same job arrives in eight runs at once, as after a connection that broke seven times."""
    runs = [arrived(decoder) for _ in range(8)]
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(8), context.Queue()
    arguments = [(str(decoder.root), str(held), digest, start, results) for held, digest in runs]
    workers = [context.Process(target=publish_from_a_fork, args=args) for args in arguments]
    for worker in workers:
        worker.start()
    assert sorted(results.get(timeout=30) for _ in workers) == [False] * 7 + [True]
    for worker in workers:
        worker.join()
    assert places_of(decoder.root) == {"job-1": ["incoming"]}


def test_only_tmp_is_ever_discarded(decoder):
    name = put(decoder, "verified")
    decoder.discard(decoder.root / "verified" / name)
    decoder.discard(decoder.root / "tmp")
    decoder.discard(decoder.root / "tmp" / "nothing")
    assert census(decoder) == {"verified": 1}
    assert (decoder.root / "tmp").is_dir()


# ---------------------------------------------------------------- moving


def test_publishing_takes_every_file_along(decoder):
    name = put(decoder, "verified")
    slot = decoder.take_slot("decode")
    job = slot.claim(name)
    job.write("state.json", b"{}")
    files = sorted(os.listdir(job.path))
    decoder.publish(job, "done")
    slot.release()
    assert sorted(os.listdir(decoder.root / "done" / name)) == files


def test_many_jobs_are_published_together(decoder):
    names = [put(decoder, "verified") for _ in range(5)]
    decoder.publish_all([decoder.job("verified", name) for name in names], "done")
    assert decoder.names("done") == sorted(names)


def test_a_publish_that_comes_too_late_says_so(decoder):
    job = Job(decoder, "job-1", decoder.root / "verified" / "job-1")
    with pytest.raises(IOFailed, match="job-1"):
        decoder.publish(job, "done")
