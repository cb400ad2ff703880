"""The examples and the shell programs, run as cron, sshd and people run them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import PROGRAM, make_clip, put

from h3spool import export

ROOT = Path(__file__).parents[1]


def run(argv, env=None, **settings):
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=env, timeout=60, **settings)


def test_bin_h3spool_runs_from_a_checkout_through_a_link(tmp_path):
    (tmp_path / "h3spool").symlink_to(ROOT / "bin/h3spool")
    done = run([tmp_path / "h3spool", "--version"], cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("h3spool ")


def test_cron_runs_the_loop_with_the_bare_environment_that_cron_has(tmp_path, sampler, decoder):
    export(*make_clip(), spool=sampler, min_free_bytes=0)
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "SHELL": "/bin/sh", "LOGNAME": "x"}
    bare |= {"H3SPOOL_SPOOL": str(sampler.root), "H3SPOOL_TO": str(decoder.root)}
    done = run(
        ["env", "-i", *(f"{key}={value}" for key, value in bare.items()), ROOT / "bin/h3spool-cron", "loop", "--once"]
    )
    assert done.returncode == 0, done.stderr
    assert len(sampler.names("done")) == len(decoder.names("incoming")) == 1


def test_cron_takes_a_busy_spool_for_no_error_and_a_wrong_one_for_an_error(sampler):
    with sampler.lock("verify"):
        assert run([ROOT / "bin/h3spool-cron", "verify", "-s", sampler.root]).returncode == 0
    assert run([ROOT / "bin/h3spool-cron", "verify", "-s", sampler.root / "no"]).returncode == 66


def test_the_cron_lines_name_programs_and_commands_that_exist():
    lines = (ROOT / "examples/cron/h3spool").read_text().splitlines()
    jobs = [line.lstrip("#") for line in lines if line.lstrip("#").startswith(("*", "17"))]
    assert len(jobs) == 3
    for job in jobs:
        program, command = job.split()[6:8]
        assert (ROOT / "bin" / Path(program).name).exists()
        assert run([PROGRAM, command, "--help"]).returncode == 0


def test_the_night_script_chains_the_steps(tmp_path, sampler, decoder):
    from h3spool.container import serialize, tensor_of

    video, audio = make_clip()
    latent = tmp_path / "clip one.safetensors"
    latent.write_bytes(b"".join(serialize({"video": tensor_of(video), "audio": tensor_of(audio)}, {})))
    env = os.environ | {"H3SPOOL": str(PROGRAM)}
    done = run(["sh", ROOT / "examples/shell/night.sh", sampler.root, decoder.root, latent], env=env)
    assert done.returncode == 0, done.stderr
    assert len(sampler.names("done")) == len(decoder.names("incoming")) == 1


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", ["h3spool-sampler.service", "h3spool-decoder.service"])
def test_systemd_accepts_the_units(tmp_path, unit):
    text = (ROOT / "examples/systemd" / unit).read_text().replace("/opt/h3spool", str(ROOT))
    (tmp_path / unit).write_text(text)
    done = run(["systemd-analyze", "verify", "--man=no", tmp_path / unit])
    complaints = [line for line in done.stderr.splitlines() if unit in line]
    assert done.returncode == 0 and not complaints, done.stderr


# ---------------------------------------------------------------- the forced command


def forced(spool, command):
    return run([ROOT / "bin/h3spool-forced-command", spool.root], env=os.environ | {"SSH_ORIGINAL_COMMAND": command})


RUN = "push-0b5ae4fc-32ca-4dd9-8f08-6cbd7dd94a4d-0-00112233445566ff"


def test_the_forced_command_lets_push_pull_and_status_through(decoder):
    put(decoder, "incoming")
    status = forced(decoder, f"h3spool status --json --spool {decoder.root}")
    assert status.returncode == 0 and '"incoming": 1' in status.stdout
    assert forced(decoder, f"/opt/x/h3spool results --json --spool {decoder.root}").returncode == 0
    admit = forced(decoder, f"h3spool admit --spool {decoder.root} -- {RUN}")
    assert admit.returncode == 0 and "h3spool_wire" in admit.stdout
    rsync = forced(decoder, f"rsync --server -Wtre.iLsfxCIvu --timeout=60 . {decoder.root}/tmp/{RUN}/")
    assert "only" not in rsync.stderr  # rsync itself ended: nobody spoke its protocol


@pytest.mark.parametrize(
    "command",
    [
        "",
        "id",
        "sh -c id",
        "h3spool",
        "h3spool gc --days 0 --spool {spool}",
        "h3spool status --spool /",
        "h3spool admit --spool {spool} -- $(touch {mark})",
        "h3spool admit --spool {spool} -- x;touch {mark}",
        "h3spool admit --spool {spool} -- ../../x",
        "h3spool admit --spool {spool}/../other -- " + RUN,
        "rsync --server --daemon .",
        "rsync --server -Wtre.iLsfxCIvu . {spool}/done/",
        "rsync --server -Wtre.iLsfxCIvu . {spool}/tmp/push-1/../../seen/",
        "rsync --server -Wltre.iLsfxCIvu . {spool}/tmp/" + RUN + "/",
        "rsync --server --remove-source-files -Wtre.iLsfxCIvu . {spool}/tmp/" + RUN + "/",
        "rsync --server --sender -Wtre.iLsfxCIvu . {spool}/spool.json",
        "rsync --server --sender -Wtre.iLsfxCIvu . {spool}/done/../spool.json",
        "rsync --server --sender -Wtre.iLsfxCIvu . {spool}/tmp/" + RUN + "/",
        "rsync -e {mark} x y",
    ],
)
def test_the_forced_command_refuses_everything_else(decoder, tmp_path, command):
    mark = tmp_path / "executed"
    done = forced(decoder, command.format(spool=decoder.root, mark=mark))
    assert done.returncode == 77 and "only" in done.stderr
    assert not mark.exists()
