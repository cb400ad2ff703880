"""Handing jobs over: to a plain path, and over real ssh and rsync to an sshd of our own on 127.0.0.1."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import PROGRAM, census, clean_environment, make_clip, places_of, put, receipt_of, wait_for

from bench.sshd import Sshd
from h3spool import push as pushing
from h3spool.errors import BadData, NotFound, NotUsable, TryLater
from h3spool.link import LocalLink, Peer, SshLink
from h3spool.spool import Spool
from h3spool.steps import export, verify

RSYNC = shutil.which("rsync")  # before a test puts another one in its place


# ---------------------------------------------------------------- where to


@pytest.mark.parametrize(
    ("text", "host", "path"),
    [
        ("atelier:spool", "atelier", "spool"),
        ("user@atelier.lan:~/spool", "user@atelier.lan", "~/spool"),
        ("[::1]:/srv/spool", "[::1]", "/srv/spool"),
        ("user@[fe80::1]:/srv/spool", "user@[fe80::1]", "/srv/spool"),
        ("/srv/a:b", None, "/srv/a:b"),
        ("./a:b", None, "./a:b"),
        ("spool", None, "spool"),
    ],
)
def test_peers(text, host, path):
    assert (Peer.parse(text).host, Peer.parse(text).path) == (host, path)
    assert str(Peer.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "-oProxyCommand=x:s",
        "u@-x:s",
        "a b:s",
        "$(x):s",
        ":s",
        "h:",
        "h:-rf",
        "h:a b",
        "h:$(x)",
        "h:a;b",
        "h:a\nb",
        "h:*",
    ],
)
def test_nothing_reaches_a_shell_that_it_could_take_for_something_else(text):
    with pytest.raises(BadData):
        Peer.parse(text)


@pytest.mark.parametrize("command", ["h3spool; x", "$(x)", "a|b", "", "a\nb", "'x'"])
def test_nor_does_the_remote_command(command):
    with pytest.raises(BadData, match="--remote-command"):
        SshLink(Peer.parse("h:s"), remote_command=command)


# ---------------------------------------------------------------- a peer on this machine


@pytest.fixture
def near(decoder) -> LocalLink:
    return LocalLink(Peer.parse(str(decoder.root)), min_free_bytes=0)


def verified(spool: Spool, count: int = 1) -> list[str]:
    return sorted(put(spool, "verified", seed=index) for index in range(count))


def run(spool, link, names=()) -> dict[str, tuple]:
    return {outcome.job: (outcome.state, outcome.exit_code) for outcome in pushing.push(spool, link, names)}


def test_verified_jobs_are_done_here_and_incoming_there(sampler, decoder, near):
    video, audio = make_clip()
    name = export(video, audio, spool=sampler, title="猫", producer={"workflow": {"a": 1}}, min_free_bytes=0)
    list(verify(sampler))
    assert run(sampler, near) == {name: ("done", 0)}
    assert (places_of(sampler.root), places_of(decoder.root)) == ({name: ["done"]}, {name: ["incoming"]})
    sent, got = sampler.root / "done" / name, decoder.root / "incoming" / name
    for suffix in (".h3latent", ".h3latent.sha256", ".producer.json"):
        assert (sent / (name + suffix)).read_bytes() == (got / (name + suffix)).read_bytes()
    assert not (got / "state.json").exists()
    here, there = receipt_of(sampler, name)["events"][-1], receipt_of(decoder, name)["events"][-1]
    assert (here["step"], here["start"], here["outcome"]) == (there["step"], there["start"], there["outcome"])
    assert here["outcome"] == "ok"
    assert (here["peer_uuid"], here["peer_node"], here["run_jobs"]) == (decoder.uuid, "deco", 1)
    assert here["bytes"] == (sent / f"{name}.h3latent").stat().st_size
    assert list((decoder.root / "tmp").iterdir()) == []


def test_pushing_again_is_no_error(sampler, near):
    (name,) = verified(sampler)
    run(sampler, near)
    assert run(sampler, near) == {}
    assert run(sampler, near, [name]) == {name: ("done", 0)}
    assert run(sampler, near, ["nothing"]) == {"nothing": ("missing", 66)}


def test_a_run_takes_32_jobs(sampler, decoder, near):
    names = verified(sampler, 33)
    assert set(run(sampler, near)) == set(names)
    assert (census(sampler), census(decoder)) == ({"done": 33}, {"incoming": 33})
    jobs_a_run = [receipt_of(sampler, name)["events"][-1]["run_jobs"] for name in names]
    assert sorted(jobs_a_run) == [1] + [32] * 32


def test_only_a_sampler_pushes_and_only_to_a_decoder(sampler, decoder, near, tmp_path):
    with pytest.raises(NotUsable, match="is a decoder's spool; push belongs to a sampler's"):
        run(decoder, near)
    names = verified(sampler, 2)
    other = Spool.create(tmp_path / "other", "sampler")
    with pytest.raises(NotUsable, match="is a sampler's spool; push goes to a decoder's"):
        run(sampler, LocalLink(Peer.parse(str(other.root)), min_free_bytes=0))
    assert sampler.names("verified") == names
    with pytest.raises(NotFound, match="not a spool"):
        LocalLink(Peer.parse(str(tmp_path)), min_free_bytes=0)


def test_a_full_peer_is_waited_for_and_the_receipt_tells_it_once(sampler, decoder, near):
    (name,) = verified(sampler)
    full = LocalLink(Peer.parse(str(decoder.root)), min_free_bytes=1 << 60)
    for attempt in (1, 2, 3):
        with pytest.raises(TryLater, match=r"is full, .*jobs stay here until there is room"):
            run(sampler, full)
        events = receipt_of(sampler, name)["events"]
        assert len(events) == 1
        assert (events[0]["outcome"], events[0].get("attempt", 1)) == ("put-back", attempt)
        assert "is full" in events[0]["error"]
    assert sampler.job("verified", name).state().get("attempts") is None
    assert census(decoder) == {}
    assert run(sampler, near) == {name: ("done", 0)}


def test_a_latent_that_was_damaged_here_fails_and_the_others_go(sampler, decoder, near):
    bad, good = verified(sampler, 2)
    path = sampler.job("verified", bad).latent
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    assert run(sampler, near) == {bad: ("failed", 65), good: ("done", 0)}
    assert places_of(decoder.root) == {good: ["incoming"]}
    event = receipt_of(sampler, bad)["events"][-1]
    assert (event["outcome"], "the sidecar says" in event["error"]) == ("failed", True)


@pytest.mark.parametrize("suffix", [".h3latent", ".h3latent.sha256"])
def test_an_incomplete_job_fails_and_the_others_go(sampler, near, suffix):
    bad, good = verified(sampler, 2)
    sampler.job("verified", bad).file(suffix).unlink()
    assert run(sampler, near) == {bad: ("failed", 65), good: ("done", 0)}


def test_what_the_peer_refuses_as_bad_data_fails_here(sampler, decoder, near):
    (name,) = verified(sampler)
    record = {"sha256": "0" * 64, "tmp": "tmp/gone", "at": ""}
    (decoder.root / "seen" / name).write_text(json.dumps(record))
    assert run(sampler, near) == {name: ("failed", 65)}
    assert "refused it: job" in receipt_of(sampler, name)["events"][-1]["error"]


def test_a_job_goes_to_no_other_spool_once_one_has_been_told_of_it(sampler, decoder, near, tmp_path):
    """Hole 7: an acknowledgement that was lost must not let it be decoded twice."""
    bound, free = verified(sampler, 2)
    sampler.job("verified", bound).set_state(durable=True, peer=decoder.uuid)
    second = Spool.create(tmp_path / "second", "decoder")
    other = LocalLink(Peer.parse(str(second.root)), min_free_bytes=0)
    assert run(sampler, other) == {free: ("done", 0)}
    assert run(sampler, other) == {}
    assert receipt_of(sampler, bound)["events"] == []  # not even tried
    (outcome,) = pushing.push(sampler, other, [bound])
    assert outcome.exit_code == 75
    assert decoder.uuid in str(outcome.error)
    assert "requeue --any-peer" in str(outcome.error)
    assert receipt_of(sampler, bound)["events"] == []
    assert places_of(second.root) == {free: ["incoming"]}
    assert run(sampler, near) == {bound: ("done", 0)}
    assert sampler.job("done", free).state()["peer"] == second.uuid


def test_a_peer_under_another_address_is_the_same_peer(sampler, decoder, tmp_path):
    (name,) = verified(sampler)
    sampler.job("verified", name).set_state(durable=True, peer=decoder.uuid)
    decoder.root.rename(tmp_path / "moved")
    assert run(sampler, LocalLink(Peer.parse(str(tmp_path / "moved")), min_free_bytes=0)) == {name: ("done", 0)}


# ---------------------------------------------------------------- a peer over ssh


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    """An sshd of our own, with its own keys, and an `ssh` that knows it as `atelier`."""
    binary = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if not (binary and shutil.which("ssh") and RSYNC) and not os.environ.get("CI"):
        pytest.skip("sshd, ssh or rsync is not installed (make system installs them)")
    folder = tmp_path_factory.mktemp("sshd")
    home = folder / "sshd"
    hosts = {
        "atelier": {},
        "impostor": {"UserKnownHostsFile": home / "wrong"},
        "unknown": {"UserKnownHostsFile": home / "none"},
        "locked": {"IdentityFile": home / "stranger"},
        "away": {"Port": 1},
    }
    with Sshd(folder, f"PATH={PROGRAM.parent}:/usr/bin:/bin", hosts) as server:
        server.trust(server.key("stranger"), "wrong")
        yield home


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def far(sshd, sampler, decoder, cli, tmp_path, monkeypatch):
    """Push from `sampler` over ssh, with the peer's host and the remote command to choose."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{sshd}/bin:{os.environ['PATH']}")

    def arguments(*names, host="atelier", spool=decoder, command=None, more=()):
        to = ["push", "-s", sampler.root, "--to", f"{host}:{spool.root}", "--json", *more]
        return [str(arg) for arg in (*to, *(["--remote-command", command] if command else []), *names)]

    def call(*names, **options):
        done = cli(*arguments(*names, **options))
        done.out = [json.loads(line) for line in done.out.splitlines()]
        return done

    call.arguments = arguments
    call.remote = lambda body: script(tmp_path / "remote-h3spool", body)
    call.replace = lambda name, body: script(tmp_path / "bin" / name, body)
    return call


def test_over_ssh_too(sampler, decoder, far):
    names = verified(sampler, 3)
    done = far()
    assert (done.code, done.err) == (0, "")
    assert [(line["job"], line["state"]) for line in done.out] == [(name, "done") for name in names]
    assert (census(sampler), census(decoder)) == ({"done": 3}, {"incoming": 3})
    for name in names:
        event = receipt_of(decoder, name)["events"][-1]
        assert (event["peer"], event["received_by"]) == (f"atelier:{decoder.root}", "deco")
        for path in (decoder.root / "incoming" / name).iterdir():
            assert path.stat().st_mode & 0o777 == 0o600
    list(verify(decoder))
    assert census(decoder) == {"verified": 3}


def test_a_relative_spool_is_below_the_home_directory_there(sampler, sshd, far, monkeypatch):
    import pwd

    home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    folder = home / f".h3spool-test-{os.getpid()}"
    try:
        spool = Spool.create(folder / "spool", "decoder")
        (name,) = verified(sampler)
        for to in (f"{folder.name}/spool", f"~/{folder.name}/spool"):
            done = far(name, spool=SimpleNamespace(root=to))
            assert done.code == 0, done.err
        assert census(spool) == {"incoming": 1}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_what_would_run_is_shown(sampler, decoder, far):
    (name,) = verified(sampler)
    argv = [PROGRAM, *far.arguments(more=["--dry-run", "--bwlimit", "20m"])]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=clean_environment())
    ssh, rsync = done.stdout.splitlines()
    assert "BatchMode=yes" in ssh
    assert f"-- atelier h3spool admit --spool {decoder.root} -- RUN" in ssh
    assert f"--bwlimit=20m -- {name} atelier:{decoder.root}/tmp/RUN/" in rsync
    for word in ("--partial", "--inplace", "--compress", "StrictHostKeyChecking"):
        assert word not in done.stdout
    assert census(sampler) == {"verified": 1}


def unharmed(sampler, decoder, names) -> bool:
    return (places_of(sampler.root), census(decoder)) == ({name: ["verified"] for name in names}, {})


@pytest.mark.parametrize(
    ("host", "code", "words"),
    [
        ("impostor", 77, "its host key is not the one known here"),
        ("unknown", 77, "its host key is not the one known here"),
        ("locked", 77, "must work without a password"),
        ("away", 75, "Connection refused"),
    ],
)
def test_a_host_that_cannot_be_reached_or_trusted(sampler, decoder, far, host, code, words):
    names = verified(sampler, 2)
    done = far(host=host)
    assert (done.code, done.out) == (code, [])
    assert words in done.err
    assert unharmed(sampler, decoder, names)
    assert receipt_of(sampler, names[0])["events"][-1]["outcome"] == "put-back"


@pytest.mark.parametrize(
    ("remote", "code", "words"),
    [
        ("exec no-such-program", 69, "install h3spool, or say where it is with --remote-command"),
        ("echo '{\"h3spool_wire\": 99}'", 78, "speaks wire version 99, this h3spool 1"),
        ("echo Boom >&2; exit 3", 74, "h3spool admit ended with 3: Boom"),
        ("echo h3spool: full >&2; exit 75", 75, "h3spool: full"),
        ("exit 0", 74, "ended with 0: no message"),
    ],
)
def test_a_remote_side_that_does_not_answer(sampler, decoder, far, remote, code, words):
    names = verified(sampler, 2)
    done = far(command=far.remote(remote))
    assert (done.code, done.out) == (code, [])
    assert words in done.err
    assert unharmed(sampler, decoder, names)


def test_no_spool_there_and_one_of_the_wrong_role(sampler, decoder, far, tmp_path):
    names = verified(sampler)
    for root, code, words in ((tmp_path / "nothing", 66, "not a spool"), (sampler.root, 78, "is a sampler's spool")):
        done = far(spool=SimpleNamespace(root=root))
        assert (done.code, done.out) == (code, [])
        assert words in done.err
    assert unharmed(sampler, decoder, names)


def test_a_login_banner_is_passed_over(sampler, decoder, far):
    (name,) = verified(sampler)
    assert far(command=far.remote(f'echo Welcome; echo "{{}}"; exec {PROGRAM} "$@"')).code == 0
    assert places_of(decoder.root) == {name: ["incoming"]}


def test_an_acknowledgement_that_is_lost_is_asked_for_again(sampler, decoder, far, tmp_path):
    """The peer has the job, we do not know it: it stays, bound to that peer, and the next push settles it."""
    (name,) = verified(sampler)
    done = far(command=far.remote(f'{PROGRAM} "$@" | head -n 1'))
    assert done.code == 75
    assert "the connection broke before it acknowledged" in done.err
    assert places_of(sampler.root) == {name: ["verified"]}
    assert places_of(decoder.root) == {name: ["incoming"]}
    assert sampler.job("verified", name).state() == {"peer": decoder.uuid}
    list(verify(decoder))
    second = Spool.create(tmp_path / "second", "decoder")
    assert far(name, spool=second).code == 75
    assert far().code == 0
    assert (places_of(sampler.root), places_of(decoder.root)) == ({name: ["done"]}, {name: ["verified"]})
    assert census(second) == {}


def greeting_of(spool: Spool) -> str:
    facts = {"uuid": spool.uuid, "node": spool.node, "free_bytes": 1 << 40, "waiting": 0, "min_free_bytes": 0}
    return json.dumps({"h3spool_wire": 1} | facts)


def test_the_peer_is_bound_before_it_is_told_of_the_job(sampler, decoder, far):
    """admit dies at the first name: by then state.json must have its uuid."""
    (name,) = verified(sampler)
    state = sampler.root / "active" / "push-0" / name / "state.json"
    done = far(
        command=far.remote(
            f"echo '{greeting_of(decoder)}'; read line; cp {state} {decoder.root}/tmp/state-then; exit 0"
        )
    )
    assert done.code == 75
    assert json.loads((decoder.root / "tmp" / "state-then").read_text()) == {"peer": decoder.uuid}


def test_only_the_hash_that_was_sent_acknowledges(sampler, decoder, far):
    (name,) = verified(sampler)
    reply = json.dumps({"job": name, "sha256": "0" * 64, "state": "incoming"})
    script = far.remote(f"echo '{greeting_of(decoder)}'; while read line && [ \"$line\" ]; do echo '{reply}'; done")
    done = far(command=script)
    assert done.code == 74
    assert "acknowledged something else than was sent" in done.err
    assert places_of(sampler.root) == {name: ["verified"]}


def test_what_arrived_counts_whatever_rsync_says(sampler, decoder, far):
    names = verified(sampler, 2)
    far.replace("rsync", f'{RSYNC} "$@"; exit 24')
    assert far().code == 0
    assert (census(sampler), census(decoder)) == ({"done": 2}, {"incoming": 2})
    assert names


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(23, 75, "partial transfer"), (1, 74, "rsync ended with 1")],
)
def test_what_did_not_arrive_does_not_count_whatever_rsync_says(sampler, decoder, far, status, code, words):
    names = verified(sampler, 2)
    far.replace("rsync", f"echo rsync: it broke >&2; exit {status}")
    done = far()
    assert done.code == code
    assert [line["exit"] for line in done.out] == [code] * 2
    assert words in done.err
    assert "it broke" in done.err
    assert unharmed(sampler, decoder, names)


def test_a_transfer_that_is_cut_is_sent_whole_the_next_time(sampler, decoder, far):
    first, second = verified(sampler, 2)
    cut = f"--exclude={second}.pipeline.json"
    far.replace("rsync", f'{RSYNC} {cut} "$@"; exit 12')
    done = far()
    assert done.code == 75
    assert (places_of(sampler.root)[first], places_of(sampler.root)[second]) == (["done"], ["verified"])
    assert places_of(decoder.root) == {first: ["incoming"]}
    far.replace("rsync", f'exec {RSYNC} "$@"')
    assert far().code == 0
    assert census(decoder) == {"incoming": 2}
    assert list((decoder.root / "tmp").glob("push-*/*")) == []  # the cut run is cleared away


def test_a_shell_that_talks_on_stdout_is_named(sampler, decoder, far):
    names = verified(sampler)
    far.replace("rsync", "echo 'protocol version mismatch -- is your shell clean?' >&2; exit 2")
    done = far()
    assert done.code == 78
    assert "its login shell prints on stdout" in done.err
    assert unharmed(sampler, decoder, names)


@pytest.mark.parametrize("missing", ["ssh", "rsync"])
def test_without_ssh_or_rsync_here(sampler, decoder, far, tmp_path, monkeypatch, missing):
    names = verified(sampler)
    (tmp_path / "few").mkdir()
    for name in {"setpriv", "ssh", "rsync"} - {missing}:
        (tmp_path / "few" / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tmp_path / "few"))
    done = far()
    assert done.code == 69
    assert f"{missing}: not installed on this node" in done.err
    assert unharmed(sampler, decoder, names)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_an_interrupted_push_puts_back_and_leaves_no_child(sampler, decoder, far, tmp_path, number, code):
    (name,) = verified(sampler)
    argv = far.arguments(command=far.remote(f"touch {tmp_path}/reached; exec cat"))
    process = subprocess.Popen([PROGRAM, *argv], env=clean_environment(), stderr=subprocess.PIPE, text=True)
    wait_for((tmp_path / "reached").exists)
    assert places_of(sampler.root) == {name: ["active/push-0"]}
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    wait_for(lambda: not children_with(str(decoder.root)))
    if number != signal.SIGKILL:
        assert "nothing is lost" in err
        assert places_of(sampler.root) == {name: ["verified"]}
        assert receipt_of(sampler, name)["events"][-1]["outcome"] == "put-back"
    assert far().code == 0
    assert (places_of(sampler.root), places_of(decoder.root)) == ({name: ["done"]}, {name: ["incoming"]})


@pytest.mark.parametrize("command", [["loop"], ["push", "--watch"]])
@pytest.mark.parametrize(
    ("host", "spool", "says"),
    [
        ("atelier", None, "pushing to the node deco, atelier:"),
        ("away", None, "jobs wait here until it is back"),
        ("unknown", None, 77),
        ("locked", None, 77),
        ("atelier", "nothing", 66),
    ],
)
def test_a_loop_tells_at_once_whom_it_pushes_to(sampler, decoder, far, command, host, spool, says):
    first, *more = command
    argv = far.arguments(*more, host=host, spool=SimpleNamespace(root=spool) if spool else decoder)
    argv[0] = first
    loop = subprocess.Popen([PROGRAM, *argv], env=clean_environment(), stderr=subprocess.PIPE, text=True)
    try:
        line = loop.stderr.readline()
        if isinstance(says, int):
            assert loop.wait(30) == says, line
        else:
            assert says in line and loop.poll() is None
            assert os.listdir(decoder.root / "tmp") == []
            if host == "atelier":
                export(*make_clip(), spool=sampler, min_free_bytes=0)
                if first == "push":
                    list(verify(sampler))
                wait_for(lambda: census(decoder) == {"incoming": 1})
    finally:
        loop.terminate()
        loop.communicate(timeout=30)


def children_with(text: str) -> list[str]:
    """Command lines of ssh and rsync clients that name the peer's spool."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if (
            os.path.basename(words[0]) in ("ssh", "rsync")
            and "--server" not in words
            and any(text in word for word in words)
        ):
            found.append(" ".join(words))
    return found


def test_one_connection_serves_every_run_and_ends_with_the_link(sampler, decoder, sshd, far):
    link = SshLink(Peer.parse(f"atelier:{decoder.root}"))
    try:
        before = (sshd / "log").read_text().count("Accepted publickey")
        for _ in range(2):
            (name,) = verified(sampler)
            assert run(sampler, link, [name]) == {name: ("done", 0)}
        assert (sshd / "log").read_text().count("Accepted publickey") == before + 1
        assert link.uuid == decoder.uuid
        folder = link._folder
    finally:
        link.close()
    assert not folder.exists()


def test_the_folders_of_killed_pushers_are_cleared_and_those_of_living_ones_are_not(decoder):
    code = "import sys; from h3spool.link import Peer, SshLink; link = SshLink(Peer.parse(sys.argv[1]));"
    argv = [
        sys.executable,
        "-c",
        f"{code} print(link._folder, flush=True); sys.stdin.read()",
        f"atelier:{decoder.root}",
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(argv, **pipes) as killed, subprocess.Popen(argv, **pipes) as living:
        folders = [Path(child.stdout.readline().strip()) for child in (killed, living)]
        killed.kill()
        killed.wait()
        assert all(folder.is_dir() for folder in folders)
        link = SshLink(Peer.parse(f"atelier:{decoder.root}"))
        try:
            assert [folder.is_dir() for folder in (*folders, link._folder)] == [False, True, True]
        finally:
            link.close()
            living.kill()


def test_a_receiver_that_hangs_is_given_up_and_the_job_is_back(sampler, decoder, far, tmp_path, monkeypatch):
    monkeypatch.setattr("h3spool.link.GREETING_S", 1.0)
    hang = tmp_path / "hang"
    hang.write_text("#!/bin/sh\nsleep 60\n")
    hang.chmod(0o755)
    link = SshLink(Peer.parse(f"atelier:{decoder.root}"), remote_command=str(hang))
    try:
        (name,) = verified(sampler)
        with pytest.raises(TryLater, match="did not answer"):
            list(pushing.push(sampler, link))
    finally:
        link.close()
    assert sampler.names("verified") == [name]
