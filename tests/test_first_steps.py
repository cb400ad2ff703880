"""What somebody stumbled over on the first day."""

import os
import subprocess
from pathlib import Path

from conftest import clip_bytes, make_clip, put

from h3spool import export
from h3spool.link import Peer, SshLink

ROOT = Path(__file__).parents[1]


def test_quantize_never_writes_over_a_file_that_is_there(cli, checkpoints, tmp_path):
    before = checkpoints.video.read_bytes()
    same = cli("quantize", checkpoints.video, checkpoints.video)
    assert same.code == 2 and "exists" in same.err and checkpoints.video.read_bytes() == before


def test_a_missing_output_folder_is_told_before_anything_is_decoded(cli, tmp_path, vaes):
    (tmp_path / "clip.h3latent").write_bytes(clip_bytes(*make_clip()))
    done = cli("decode", tmp_path / "clip.h3latent", "-o", tmp_path / "no" / "out.mp4", *vaes)
    assert done.code == 2 and "there is no folder" in done.err and "decoded" not in done.err


def test_a_file_without_a_target_is_told_how(cli, tmp_path):
    (tmp_path / "clip.h3latent").write_bytes(clip_bytes(*make_clip()))
    done = cli("decode", tmp_path / "clip.h3latent")
    assert done.code == 2 and "-o OUT.mp4" in done.err


def test_allow_may_be_given_twice(cli, sampler, tmp_path):
    from h3spool import container

    video = container.tensor_of(make_clip(tokens=1)[0])
    (tmp_path / "still.safetensors").write_bytes(b"".join(container.serialize({"video": video}, {})))
    argv = ["export", tmp_path / "still.safetensors", "-s", sampler.root, "--min-free", "0"]
    assert cli(*argv, "--allow", "no-audio").code == 65
    assert cli(*argv, "--allow", "no-audio", "--allow", "image").code == 0


def test_usage_names_the_program(cli):
    assert cli("gc", "--days", "-1", "-s", "x").err.startswith("Usage: h3spool gc")


def test_a_folder_to_watch_must_be_there(cli, sampler, tmp_path):
    assert cli("export", "--watch", tmp_path / "no", "-s", sampler.root).code == 66


def test_status_and_report_are_one_line_a_job_however_long_the_title(cli, sampler):
    title = "Cat on a roof " * 8
    name = export(*make_clip(), spool=sampler, title=title, min_free_bytes=0)
    for done in (cli("status", "-s", sampler.root), cli("report", sampler.root)):
        assert [line for line in done.out.splitlines() if name in line and title.strip() in line]


def test_status_says_how_many_it_does_not_show(cli, sampler):
    for _ in range(12):
        put(sampler, "done")
    assert "2 older done jobs not shown" in cli("status", "-s", sampler.root).out


def test_a_dry_run_of_gc_lists_nothing_twice(cli, decoder):
    name = put(decoder, "done")
    done = cli("gc", "--dry-run", "--days", "0", "--mp4", "-s", decoder.root)
    assert [line.split()[0] for line in done.out.splitlines()] == [str(decoder.root / "done" / name)]


def test_a_host_that_was_never_met_is_not_called_changed():
    link = SshLink(Peer.parse("somewhere:spool"))
    try:
        for said, advice in (
            (
                "No ED25519 host key is known for somewhere and you have requested strict checking.",
                "run `ssh somewhere` once",
            ),
            ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", "ssh-keygen -R"),
        ):
            script = f"echo '{said}' >&2; echo 'Host key verification failed.' >&2; exit 255"
            from h3spool.child import Child

            failure = link.remote_failure(Child(["sh", "-c", script], talk=True))
            assert failure.exit_code == 77 and advice in str(failure)
    finally:
        link.close()


def test_without_its_libraries_the_program_says_what_to_run(tmp_path):
    bare = tmp_path / "python3"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    for path in ("bin", "h3spool"):
        (tmp_path / "checkout" / path).mkdir(parents=True)
    program = tmp_path / "checkout" / "bin" / "h3spool"
    program.write_text((ROOT / "bin" / "h3spool").read_text())
    program.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run([program, "--help"], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 69 and "make setup" in done.stderr
