"""The isolation check of a ComfyUI that is to decode."""

import os
import subprocess
import sys

import pytest
from comfyui_replay import RECORDED, Replay

from h3spool import doctor
from h3spool.errors import NotFound, NotPermitted

ISOLATED = ["--disable-all-custom-nodes", "--whitelist-custom-nodes", "h3_latent_handoff", "--listen", "127.0.0.1"]
GPU = {"name": "cuda:0 RTX", "type": "cuda", "index": 0, "vram_total": 12_000_000_000, "vram_free": 11_000_000_000}


@pytest.fixture
def server(monkeypatch):
    with Replay() as replay:
        replay.stats = {
            "system": RECORDED["system_stats"]["system"] | {"argv": ["main.py", *ISOLATED]},
            "devices": [GPU],
        }
        real = replay.get
        replay.get = lambda path, query: (200, replay.stats) if path == "/system_stats" else real(path, query)
        yield replay


@pytest.fixture
def process(tmp_path):
    """Start a program that looks like ComfyUI to /proc, with the environment and arguments given."""
    started = []

    def start(*arguments, **environment):
        script = tmp_path / "main.py"
        script.write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
        bare = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
        argv = [sys.executable, str(script), *arguments]
        child = subprocess.Popen(argv, env=bare | environment, stdout=subprocess.PIPE)
        started.append(child)
        child.stdout.readline()
        return str(child.pid)

    yield start
    for child in started:
        child.kill()
        child.communicate()


def verdicts(checks):
    return {check.name: check.verdict for check in checks}


def said(checks, name):
    return next(check.sentence for check in checks if check.name == name)


def nvidia_smi(tmp_path, monkeypatch, text):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_an_isolated_instance_passes(server, process, tmp_path, monkeypatch):
    pid = process("--port", server.url.rpartition(":")[2], CUDA_VISIBLE_DEVICES="2")
    nvidia_smi(tmp_path, monkeypatch, f"GPU-a, {pid}, python, 900\nGPU-b, 1, other, 800")
    checks = doctor.comfyui_checks(pid)
    assert set(verdicts(checks).values()) == {"ok"}
    assert said(checks, "gpu") == "sees GPU 2 and no other"
    assert "minimax_h3_video_vae_fp16" in said(checks, "models")
    assert said(checks, "other processes") == "it is alone on its GPU"


@pytest.mark.parametrize(
    ("environment", "verdict", "words"),
    [
        ({}, "warn", "not set"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "warn", "2 GPUs"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "fail", "no GPU"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "fail", "no GPU"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-4a6b"}, "ok", "GPU-4a6b"),
    ],
)
def test_the_gpus_that_the_process_sees(server, process, environment, verdict, words):
    checks = doctor.comfyui_checks(process("--port", server.url.rpartition(":")[2], **environment))
    assert verdicts(checks)["gpu"] == verdict
    assert words in said(checks, "gpu")


def test_cuda_device_on_the_command_line_counts(server, process):
    server.stats["system"]["argv"] += ["--cuda-device", "1"]
    assert verdicts(doctor.comfyui_checks(process("--port", server.url.rpartition(":")[2])))["gpu"] == "ok"


@pytest.mark.parametrize(
    ("argv", "name", "verdict"),
    [
        (["main.py", "--listen"], "address", "fail"),
        (["main.py", "--listen", "192.168.0.4"], "address", "fail"),
        (["main.py"], "address", "ok"),
        (["main.py"], "custom nodes", "warn"),
        (["main.py", "--disable-all-custom-nodes"], "custom nodes", "ok"),
        (["main.py", *ISOLATED[:3], "raylight"], "custom nodes", "warn"),
        (["main.py", "--cpu"], "gpu", "warn"),
    ],
)
def test_arguments(server, argv, name, verdict):
    server.stats["system"]["argv"] = argv
    assert verdicts(doctor.comfyui_checks(server.url))[name] == verdict


def test_a_url_finds_its_process(server):
    assert doctor._listener(int(server.url.rpartition(":")[2])) == os.getpid()
    assert verdicts(doctor.comfyui_checks(server.url))["gpu"] == "warn"  # pytest is no main.py


@pytest.mark.parametrize(
    ("change", "name", "verdict"),
    [
        (lambda s: s.stats["system"].update(comfyui_version="0.30.1"), "server", "warn"),
        (lambda s: s.missing_nodes.add("LTXVAudioVAEDecode"), "nodes", "fail"),
        (lambda s: s.vaes.pop(0), "models", "fail"),
        (lambda s: s.vaes.pop(1), "models", "warn"),
        (lambda s: s.stats["system"].update(ram_free=4_000_000_000), "ram", "warn"),
        (lambda s: s.stats["devices"][0].update(vram_free=6_000_000_000), "vram", "warn"),
    ],
)
def test_what_the_server_offers(server, change, name, verdict):
    assert verdicts(doctor.comfyui_checks(server.url))[name] == "ok"
    change(server)
    assert verdicts(doctor.comfyui_checks(server.url))[name] == verdict


def test_company_on_the_gpu_is_named(server, process, tmp_path, monkeypatch):
    pid = process("--port", server.url.rpartition(":")[2], CUDA_VISIBLE_DEVICES="0")
    nvidia_smi(tmp_path, monkeypatch, f"GPU-a, {pid}, python, 900\nGPU-a, 77, sampler, 22000")
    checks = doctor.comfyui_checks(pid)
    assert verdicts(checks)["other processes"] == "warn"
    assert "sampler (77, 22000 MiB)" in said(checks, "other processes")


def test_a_server_that_is_down_is_a_finding_and_a_missing_process_an_error(process):
    checks = doctor.comfyui_checks(process("--port", "9", *ISOLATED, CUDA_VISIBLE_DEVICES="1"))
    assert verdicts(checks) == {"gpu": "ok", "address": "ok", "custom nodes": "ok", "server": "fail"}
    with pytest.raises(NotFound):
        doctor.comfyui_checks("999999999")
    with pytest.raises(NotPermitted):
        doctor.comfyui_checks("http://192.0.2.1:8192")
