"""The command line: what it prints where, the exit code of every call, signals, and the whole way of a clip."""

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import (
    PROGRAM,
    census,
    clean_environment,
    clip_bytes,
    fake_ffmpeg,
    make_clip,
    places_of,
    put,
    receipt_of,
    wait_for,
)

from h3spool import ffmpeg, media
from h3spool.spool import Spool

FFMPEG = ffmpeg.find()
FREE = ["--min-free", "0"]


@pytest.fixture
def clip(tmp_path) -> Path:
    path = tmp_path / "clip.h3latent"
    path.write_bytes(clip_bytes(*make_clip()))
    return path


def names(out: str) -> list[str]:
    return [line.split()[0] for line in out.splitlines()]


def everything(root: Path) -> dict[str, bytes]:
    """Every file of a spool but its locks."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else b""
        for path in root.rglob("*")
        if "locks" not in path.parts and "active" not in path.parts
    }


# ---------------------------------------------------------------- the whole way


def test_a_clip_travels_from_a_file_to_an_mp4(cli, clip, tmp_path, vaes):
    sampler, decoder = tmp_path / "s", tmp_path / "d"
    made = cli("init", sampler, "--role", "sampler", "--node", "samp")
    assert (made.code, made.out) == (0, f"{sampler}\n")
    assert f"export H3SPOOL_SPOOL={sampler}" in made.err
    assert "h3spool loop --to" in made.err
    assert "h3spool loop --video-vae" in cli("init", decoder, "--role", "decoder", "--node", "deco").err

    done = cli("export", "-s", sampler, clip, "--name", "猫 ../x", "--meta", "seed=7", *FREE)
    assert done.code == 0
    (name,) = names(done.out)
    assert done.out == f"{name}  incoming\n"
    for argv, place in (
        (["verify", "-s", sampler], "verified"),
        (["push", "-s", sampler, "--to", decoder, *FREE], "done"),
        (["verify", "-s", decoder], "verified"),
        (["decode", "-s", decoder, *vaes, *FREE], "decoded"),
        (["mux", "-s", decoder, "--deliver", tmp_path / "out", *FREE], "done"),
    ):
        done = cli(*argv)
        assert (done.code, done.out) == (0, f"{name}  {place}\n"), done.err
        again = cli(*argv, name)  # a finished step again is no error
        assert again.code == 0, again.err
    assert os.listdir(tmp_path / "out") == ["猫 ..-x.mp4"]

    (story,) = [json.loads(line) for line in cli("status", "-s", decoder, "猫 ../x", "--json").out.splitlines()]
    assert (story["job"], story["state"], story["receipt"]["producer"]["seed"]) == (name, "done", "7")
    events = [json.loads(line) for line in cli("report", sampler, decoder, "--json").out.splitlines()]
    story = "export samp, verify samp, push samp, verify deco, decode deco, mux deco"
    assert ", ".join(f"{event['step']} {event['node']}" for event in events) == story


def test_two_loops_do_it_all(cli, clip, sampler, decoder, vaes):
    assert cli("export", "-s", sampler.root, clip, "--name", "Cat", *FREE).code == 0
    there = cli("loop", "--once", "-s", sampler.root, "--to", decoder.root, *FREE)
    assert (there.code, [line.split()[1] for line in there.out.splitlines()]) == (0, ["verified", "done"])
    here = cli("loop", "--once", "-s", decoder.root, *vaes, *FREE, "--json")
    assert here.code == 0
    assert [json.loads(line)["state"] for line in here.out.splitlines()] == ["verified", "done"]
    assert (census(sampler), census(decoder)) == ({"done": 1}, {"done": 1})
    assert cli("loop", "--once", "-s", decoder.root, *FREE).out == ""  # nothing to do needs no checkpoint


def test_a_file_is_decoded_without_a_spool(cli, clip, tmp_path, vaes):
    done = cli("decode", clip, "-o", tmp_path / "out.mp4", *vaes)
    assert (done.code, done.out) == (0, f"{tmp_path}/out.mp4\n")
    assert "decoded 1 of 1 parts" in done.err
    assert media.probe(FFMPEG, tmp_path / "out.mp4")["frames"] == 5
    steps = [event["step"] for event in json.loads((tmp_path / "out.pipeline.json").read_text())["events"]]
    assert steps == ["decode", "mux"]


# ---------------------------------------------------------------- exit codes: usage, spools, roles, names


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["dance"], "No such command"),
        (["verify"], "which spool? give --spool DIR or set H3SPOOL_SPOOL"),
        (["status"], "which spool?"),
        (["decode"], "which spool?"),
        (["init", "x"], "--role"),
        (["init", "x", "--role", "cook"], "--role"),
        (["verify", "--no-such-option"], "No such option"),
        (["export", "-s", "SPOOL"], "give latent files"),
        (["export", "-s", "SPOOL", "--audio", "a"], "--video FILE with --audio FILE"),
        (["export", "-s", "SPOOL", "x", "--meta", "seed"], "--meta takes KEY=VALUE"),
        (["push", "-s", "SPOOL"], "--to"),
        (["loop", "-s", "SPOOL", "--once"], "where to? give --to"),
        (["decode", "a", "b", "-o", "c.mp4"], "decodes one latent"),
        (["decode", "a", "-o", "c.avi"], "must end in .mp4"),
        (["decode", "CLIP", "-o", "c.mp4"], "which checkpoint? give --video-vae"),
        (["verify", "-s", "SPOOL", "--grace", "soon"], "--grace"),
    ],
)
def test_wrong_usage_is_2(cli, argv, words, sampler, clip, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = cli(*(str(sampler.root) if word == "SPOOL" else str(clip) if word == "CLIP" else word for word in argv))
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert "Traceback" not in done.err
    assert {path.name for path in tmp_path.iterdir()} <= {"sampler", "decoder", "clip.h3latent"}


def test_what_is_asked_for_is_shown(cli):
    shown = cli("--help")
    assert shown.code == 0
    commands = re.findall(r"^  (\w+) ", shown.out.partition("Commands:")[2], re.MULTILINE)
    assert {"init", "export", "verify", "push", "decode", "mux", "loop", "status"} <= set(commands)
    for command in {"init", "export", "verify", "push", "decode", "mux", "loop", "status", "requeue", "gc", "fsck"}:
        text = cli(command, "-h")
        assert text.code == 0
        assert "Example: h3spool" in text.out
    assert cli("--version").out.startswith("h3spool 0.")


COMMANDS = {
    "verify": ["verify"],
    "push": ["push", "--to", "PEER", *FREE],
    "decode": ["decode", "--video-vae", "nothing", *FREE],
    "mux": ["mux", *FREE],
    "status": ["status"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["nothing", "..", "../verified", "/etc", "猫", "x" * 300, "a\nb"])
def test_what_is_no_job_is_66_and_changes_nothing(cli, sampler, decoder, command, name):
    spool, peer = (sampler, decoder) if command == "push" else (decoder, sampler)
    for state in ("incoming", "verified", "decoded", "done", "failed"):
        put(spool, state)
    before = everything(spool.root)
    argv = [str(peer.root) if word == "PEER" else word for word in COMMANDS[command]]
    done = cli(*argv, "-s", spool.root, "--", name)
    assert done.code == 66
    assert "Traceback" not in done.err
    assert everything(spool.root) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_where_there_is_no_spool_is_66(cli, tmp_path, command):
    done = cli(*(word if word != "PEER" else tmp_path for word in COMMANDS[command]), "-s", tmp_path / "nothing")
    assert done.code == 66
    assert done.err.count("\n") == 1
    assert "not a spool" in done.err


def test_each_role_does_its_own_steps(cli, sampler, decoder, clip):
    for argv in (
        ["push", "-s", decoder.root, "--to", sampler.root],
        ["push", "-s", sampler.root, "--to", sampler.root],
        ["decode", "-s", sampler.root, "--video-vae", clip],
        ["mux", "-s", sampler.root],
    ):
        put(sampler, "verified")
        done = cli(*argv, *FREE)
        assert (done.code, done.out) == (78, ""), argv
    for spool in (sampler, decoder):
        assert cli("export", "-s", spool.root, clip, *FREE).code == 0
        assert cli("verify", "-s", spool.root).code == 0


def test_unsafe_spools_are_77_and_unknown_ones_78(cli, sampler, decoder):
    sampler.root.joinpath("tmp").chmod(0o777)
    assert cli("status", "-s", sampler.root).code == 77
    (decoder.root / "spool.json").write_text('{"h3spool": 2, "uuid": "u", "node": "n", "role": "decoder"}')
    done = cli("status", "-s", decoder.root)
    assert done.code == 78
    assert "this h3spool knows 1" in done.err


def test_init_refuses_what_it_would_spoil(cli, tmp_path):
    (tmp_path / "Videos").mkdir(mode=0o700)
    (tmp_path / "Videos" / "a.mp4").write_bytes(b"")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    (tmp_path / "file").write_text("")
    Spool.create(tmp_path / "sampler", "sampler")
    before = everything(tmp_path)
    for root, code, words in (
        ("Videos", 77, "give a new or an empty directory"),
        ("shared", 77, "chmod 700"),
        ("file", 74, "File exists"),
        ("sampler", 78, "is a sampler spool already"),
    ):
        done = cli("init", tmp_path / root, "--role", "decoder")
        assert (done.code, done.out) == (code, "")
        assert words in done.err
    assert cli("init", tmp_path / "new", "--role", "decoder", "--node", "a/b").code == 65
    assert everything(tmp_path) == before
    assert cli("init", tmp_path / "sampler", "--role", "sampler").code == 0


def test_the_environment_names_spool_and_peer(cli, sampler, decoder, clip, monkeypatch):
    monkeypatch.setenv("H3SPOOL_SPOOL", str(sampler.root))
    monkeypatch.setenv("H3SPOOL_TO", str(decoder.root))
    assert cli("export", clip, *FREE).code == 0
    assert cli("loop", "--once", *FREE).code == 0
    assert census(decoder) == {"incoming": 1}


def test_a_held_lock_is_75_for_a_command_and_nothing_to_a_loop(cli, decoder):
    put(decoder, "incoming")
    with decoder.lock("verify"):
        done = cli("verify", "-s", decoder.root)
        assert done.code == 75
        assert "another h3spool holds it" in done.err
        assert cli("loop", "--once", "-s", decoder.root).code == 0
    assert cli("verify", "-s", decoder.root).code == 0


def test_no_room_is_74(cli, sampler, decoder, clip, vaes):
    full = ["--min-free", "1e9"]
    done = cli("export", "-s", sampler.root, clip, *full)
    assert done.code == 74
    assert "`h3spool gc` makes room" in done.err
    put(decoder, "verified")
    assert cli("decode", "-s", decoder.root, *vaes, *full).code == 74
    put(sampler, "verified")
    assert cli("push", "-s", sampler.root, "--to", decoder.root, *full).code == 75
    assert (census(sampler), census(decoder)) == ({"verified": 1}, {"verified": 1})


# ---------------------------------------------------------------- export


def broken_files(folder: Path) -> dict[str, tuple[Path, int, str]]:
    video, audio = make_clip()
    nan = video.copy()
    nan[0, 0, 0, 0, 0] = np.nan
    raw = clip_bytes(video, audio)
    content = {
        "nan": (clip_bytes(nan, audio), 65, "1 of 192 values of `video` are NaN, the first at [0, 0, 0, 0, 0]"),
        "off-grid": (clip_bytes(*make_clip(3)), 65, "the nearest valid lengths are 2 (5 frames) and 7 (22 frames)"),
        "silent": (clip_bytes(video, np.zeros_like(audio)), 65, "every value of `audio` is 0"),
        "large": (clip_bytes(video * 1e4, audio), 65, "a latent stays within 1000"),
        "cut": (raw[:-1], 65, "truncated"),
        "padded": (raw + b"\0", 65, "padded"),
        "lying": ((1 << 62).to_bytes(8, "little") + raw[8:], 65, "header claims"),
        "text": (b"hello world", 65, "header claims"),
        "empty": (b"", 65, "truncated: 0 bytes"),
    }
    found = {}
    for name, (data, code, words) in content.items():
        (folder / name).write_bytes(data)
        found[name] = (folder / name, code, words)
    (folder / "link").symlink_to("nan")
    (folder / "folder").mkdir()
    return found | {
        "link": (folder / "link", 77, "symbolic link"),
        "folder": (folder / "folder", 65, "not a regular file"),
        "missing": (folder / "missing", 66, "no such file"),
    }


def test_each_bad_file_is_refused_by_name_and_the_good_ones_go(cli, sampler, clip, tmp_path):
    (tmp_path / "bad").mkdir()
    files = broken_files(tmp_path / "bad")
    before = everything(sampler.root)
    for path, code, words in files.values():
        done = cli("export", "-s", sampler.root, path, *FREE)
        assert (done.code, done.out) == (code, f"{path}  refused\n"), path
        assert words in done.err
        assert done.err.startswith(f"h3spool: {path}: ")
        assert done.err.count(str(path)) == 1
        assert everything(sampler.root) == before
    done = cli("export", "-s", sampler.root, *(path for path, *_ in files.values()), clip, "--json", *FREE)
    assert done.code == 77
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [line.get("exit", 0) for line in lines] == [code for _, code, _ in files.values()] + [0]
    assert census(sampler) == {"incoming": 1}


@pytest.mark.parametrize("title", ["../x", "-rf", "/etc/passwd", "猫" * 90, "x" * 300, "*", "a\nb", "$(reboot)"])
def test_any_title_is_only_a_title(cli, sampler, clip, title):
    done = cli("export", "-s", sampler.root, clip, "--name", title, *FREE)
    assert done.code == 0
    (name,) = names(done.out)
    assert receipt_of(sampler, name)["title"] == title
    assert re.fullmatch(r"[0-9TZ]+-samp-[0-9a-f]{8}", name)
    assert cli("verify", "-s", sampler.root).code == 0
    assert f'"title": {json.dumps(title, ensure_ascii=False)}' in cli("status", "-s", sampler.root, "--json").out


def test_a_path_that_is_no_unicode_is_taken_and_told(sampler, clip, tmp_path):
    for path in (tmp_path / os.fsdecode(b"\xff.h3latent"), tmp_path / os.fsdecode(b"missing-\xff")):
        if "missing" not in path.name:
            shutil.copy(clip, path)
        argv = [PROGRAM, "export", "-s", sampler.root, path, *FREE]
        done = subprocess.run(argv, capture_output=True, env=clean_environment(), check=False)
        assert b"Traceback" not in done.stderr
        assert done.returncode == (66 if "missing" in path.name else 0)


@pytest.mark.parametrize("word", ["everything", "black,everything", "image no-audio"])
def test_an_unknown_allowance_is_65(cli, sampler, clip, word):
    done = cli("export", "-s", sampler.root, clip, "--allow", word, *FREE)
    assert done.code == 65
    assert "there are image, no-audio, silent, black, off-grid" in done.err


def test_allowances_and_facts_go_along(cli, sampler, tmp_path):
    (tmp_path / "odd").write_bytes(clip_bytes(make_clip(3)[0], None))
    argv = [
        "export",
        "-s",
        sampler.root,
        tmp_path / "odd",
        *FREE,
        "--meta",
        "steps=8",
        "--meta",
        "note=a=b",
        "--meta",
        "frames=99",
    ]
    assert cli(*argv).code == 65
    done = cli(*argv, "--allow", "off-grid,no-audio")
    assert done.code == 0
    producer = receipt_of(sampler, names(done.out)[0])["producer"]
    assert (producer["steps"], producer["note"]) == ("8", "a=b")
    assert cli("verify", "-s", sampler.root).code == 0


# ---------------------------------------------------------------- decode


def test_a_checkpoint_that_is_no_h3_vae_is_78_and_nothing_is_claimed(cli, decoder, checkpoints, clip, tmp_path):
    name = put(decoder, "verified")
    (tmp_path / "cut.safetensors").write_bytes(checkpoints.video.read_bytes()[:5000])
    for video, audio, code, words in (
        (clip, checkpoints.audio, 78, "is not an H3 video VAE"),
        (checkpoints.audio, checkpoints.audio, 78, "give it as --audio-vae"),
        (checkpoints.video, checkpoints.video, 78, "give it as --video-vae"),
        (tmp_path / "cut.safetensors", checkpoints.audio, 78, "is not a whole safetensors file"),
        (tmp_path / "nothing", checkpoints.audio, 66, "there is no checkpoint"),
    ):
        for command in (["decode", "--mux"], ["loop", "--once"]):
            done = cli(
                *command, "-s", decoder.root, "--video-vae", video, "--audio-vae", audio, "--precision", "fp32", *FREE
            )
            assert (done.code, done.out) == (code, ""), done.err
            assert words in done.err
            assert places_of(decoder.root) == {name: ["verified"]}
            assert not (decoder.root / "verified" / name / "state.json").exists()


def test_a_job_with_sound_needs_an_audio_vae(cli, decoder, checkpoints):
    name = put(decoder, "verified")
    done = cli("decode", "-s", decoder.root, "--video-vae", checkpoints.video, *FREE)
    assert done.code == 78
    assert "use --audio-vae" in done.err
    assert places_of(decoder.root) == {name: ["verified"]}
    assert decoder.job("verified", name).state() == {}


@pytest.mark.parametrize("command", [["decode", "--mux"], ["mux"]])
def test_an_ffmpeg_that_is_missing_is_69_and_nothing_is_claimed(cli, decoder, vaes, tmp_path, command):
    put(decoder, "verified")
    put(decoder, "decoded")
    (tmp_path / "text").write_text("#!/bin/sh\necho I am no encoder\n")
    (tmp_path / "text").chmod(0o755)
    more = vaes if command[0] == "decode" else []
    for program, words in (
        (tmp_path / "nothing", "not an executable file"),
        (tmp_path / "text", "does not answer like ffmpeg"),
    ):
        done = cli(*command, "-s", decoder.root, *more, "--ffmpeg", program, *FREE)
        assert (done.code, done.out) == (69, "")
        assert words in done.err
    assert census(decoder) == {"verified": 1, "decoded": 1}


@pytest.fixture
def slow_ffmpeg(tmp_path) -> Path:
    """An ffmpeg that says it has begun, and then takes its time."""
    telling = f"echo $$ > {tmp_path}/pid; mv {tmp_path}/pid {tmp_path}/begun"
    body = f'for last; do :; done; : > "${{last#file:}}"; {telling}; exec sleep 120'
    return fake_ffmpeg(tmp_path / "slow-ffmpeg", body)


def test_an_ffmpeg_that_fails_is_74_with_its_last_lines_and_the_job_is_back(cli, decoder, vaes, tmp_path):
    name = put(decoder, "verified")
    path = fake_ffmpeg(tmp_path / "ffmpeg", 'echo "[fatal] tripped over clip.mp4" >&2; exit 187')
    done = cli("decode", "--mux", "-s", decoder.root, *vaes, "--ffmpeg", path, *FREE, "--json")
    assert done.code == 74
    assert "tripped over clip.mp4" in done.err
    line = json.loads(done.out)
    assert (line["job"], line["state"], line["exit"]) == (name, "verified", 74)
    assert not list(decoder.root.rglob("*.mp4"))
    assert os.listdir(decoder.root / "tmp") == []


def test_stopped_and_killed_decoders_lose_nothing(decoder, vaes, slow_ffmpeg, tmp_path, cli):
    """SIGTERM and SIGINT put the job back as it was; after SIGKILL whoever looks next returns it, and it counts."""
    name = put(decoder, "verified")
    argv = [PROGRAM, "decode", "--mux", "-s", decoder.root, *vaes, "--precision", "fp32", *FREE]
    for number, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        process = subprocess.Popen(
            [*argv, "--ffmpeg", slow_ffmpeg], env=clean_environment(), stderr=subprocess.PIPE, text=True
        )
        wait_for(lambda child=process: (tmp_path / "begun").exists() or child.poll() is not None)
        assert process.poll() is None, process.communicate()[1]
        pid = int((tmp_path / "begun").read_text())
        (tmp_path / "begun").unlink()
        assert places_of(decoder.root) == {name: ["active/decode-0"]}
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == code
        wait_for(lambda pid=pid: gone(pid))  # no ffmpeg goes on alone
        assert [path for path in decoder.root.rglob("*.mp4") if "tmp" not in path.relative_to(decoder.root).parts] == []
        if number == signal.SIGTERM:
            assert "interrupted by signal 15; nothing is lost" in err
            assert places_of(decoder.root) == {name: ["verified"]}
            assert decoder.job("verified", name).state() == {}
            assert os.listdir(decoder.root / "tmp") == []
        else:
            assert places_of(decoder.root) == {name: ["active/decode-0"]}
    assert cli("loop", "--once", "-s", decoder.root, *vaes, *FREE).code == 0
    account = receipt_of(decoder, name)
    assert (account["place"], account["events"][-1]["attempt"]) == ("done", 2)


def test_a_stopped_loop_finishes_the_job_at_hand(decoder, vaes, tmp_path):
    """The first signal lets the job end, the next one is not begun."""
    first, second = sorted(put(decoder, "verified") for _ in range(2))
    body = f'case $* in *rawvideo*) touch {tmp_path}/begun; sleep 0.5;; esac; exec {FFMPEG} "$@"'
    path = fake_ffmpeg(tmp_path / "ffmpeg", body)
    process = subprocess.Popen(
        [PROGRAM, "loop", "-s", decoder.root, *vaes, *FREE, "--precision", "fp32", "--ffmpeg", path],
        env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: (tmp_path / "begun").exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()[1]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == f"{first}  done\n"
    assert places_of(decoder.root) == {first: ["done"], second: ["verified"]}


def gone(pid: int) -> bool:
    """Whether a process has ended; who inherits it may not have reaped it yet."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


# ---------------------------------------------------------------- what is printed


def test_stdout_is_data_and_stderr_is_for_people(cli, sampler, tmp_path):
    good, bad = put(sampler, "incoming"), put(sampler, "incoming", clip_bytes(*make_clip(3)))
    done = cli("verify", "-s", sampler.root)
    assert done.code == 65
    assert sorted(done.out.splitlines()) == sorted([f"{good}  verified", f"{bad}  failed"])
    assert done.err.startswith(f"h3spool: {bad}: ")
    assert "nearest valid lengths" in done.err
    failed = cli("status", "-s", sampler.root, "--failed", "--json")
    (line,) = map(json.loads, failed.out.splitlines())
    assert (line["job"], "nearest valid lengths" in line["error"]) == (bad, True)


def test_status_shows_what_is_there(cli, decoder):
    name = put(decoder, "incoming", clip_bytes(*make_clip(), title="[bold]猫[/bold]"))
    cli("verify", "-s", decoder.root)
    shown = cli("status", "-s", decoder.root)
    assert shown.code == 0
    assert name in shown.out
    assert "[bold]猫[" in shown.out
    assert "verified 1" in shown.out
    facts = json.loads(cli("status", "-s", decoder.root, "--json").out)
    assert (facts["role"], facts["jobs"]["verified"], facts["list"][0]["job"]) == ("decoder", 1, name)
    assert cli("status", "-s", decoder.root, name).code == 0


def test_a_batch_exits_with_the_worst_that_occurred(cli, decoder, vaes, tmp_path):
    """A job that failed, then something that ends the batch: the code is not simply the last one's."""
    first, second = sorted(put(decoder, "verified") for _ in range(2))
    missing = f"[ -e {tmp_path}/once ] && echo \"[error] Unknown encoder 'x'\" >&2"
    path = fake_ffmpeg(tmp_path / "ffmpeg", f"{missing}; touch {tmp_path}/once; exit 1")
    done = cli("decode", "--mux", "-s", decoder.root, *vaes, "--ffmpeg", path, *FREE)
    assert done.out == f"{first}  verified\n"
    assert "choose another with --codec" in done.err
    assert done.code == 74
    assert places_of(decoder.root) == {first: ["verified"], second: ["verified"]}


def test_a_reader_that_goes_away_is_no_error(sampler):
    for _ in range(300):
        put(sampler, "incoming", b"")
    argv = f"{PROGRAM} status -s {sampler.root} --json; echo code $? >&2"
    done = subprocess.run(["bash", "-c", f"({argv}) | true"], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "code 0" in done.stderr


def test_a_bug_is_1_and_shows_its_traceback(cli, sampler, monkeypatch):
    monkeypatch.setattr("h3spool.report.overview", lambda spool: 1 // 0)
    done = cli("status", "-s", sampler.root)
    assert done.code == 1
    assert "this is a bug, please report it" in done.err
    assert "ZeroDivisionError" in done.err


def test_the_program_and_main_are_the_same(program, sampler, decoder):
    assert program("status", "-s", sampler.root).code == 0
    assert program("status", "-s", sampler.root / "nothing").code == 66
    assert program("push", "-s", decoder.root, "--to", sampler.root, *FREE).code == 78
    assert program("dance").code == 2
    assert Spool(sampler.root).names("incoming") == []
