"""Preflight: is everything that h3spool needs here, and is it set up so that nothing disturbs a decode?

`comfyui_checks` looks at a ComfyUI instance that is to decode: the process (its GPU, its address, its custom nodes),
what the server offers, its memory, and who else is on the same GPU. Checks change nothing.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from h3spool.comfyui import NODES
from h3spool.comfyui_server import Server, choose_vae
from h3spool.errors import H3SpoolError, NotFound

# The longest usual clip, and what ComfyUI holds of it: float32 frames in RAM; on the GPU the weights of the video VAE
# and about 1.2 GB of activations, whatever the length.
LONG_CLIP = (362, 768, 1344)  # frames, height, width
WEIGHTS_BYTES = {"int8": 2_811_065_184, "fp16": 5_207_808_496}
ACTIVATIONS_BYTES = 1_200_000_000
TRIED_VERSION = (0, 33)


class Check(NamedTuple):
    """One finding: `verdict` is "ok", "warn" or "fail", the sentence says what was seen and what to do."""

    name: str
    verdict: str
    sentence: str


def comfyui_checks(target: str, *, allow_remote: bool = False) -> list[Check]:
    """Check a ComfyUI that is to decode.

    Args:
        target: the PID of the process, or the URL of the server.
        allow_remote: look at a URL that is not on this machine.

    Raises:
        NotFound: there is no such process.
        NotUsable, NotPermitted: the URL is none, or not loopback.
    """
    if target.isdigit():
        argv = _argv(int(target))
        if not argv:
            raise NotFound(f"there is no process {target}")
        url, pid = f"http://127.0.0.1:{_options(argv).get('--port') or 8188}", int(target)
    else:
        url, pid = target, _listener(urlsplit(target).port or 80)
    server = Server(url, allow_remote=allow_remote)
    checks = []
    try:
        stats = server.json("GET", "/system_stats")
    except H3SpoolError as error:
        stats, offered = {}, [Check("server", "fail", str(error))]
    else:
        offered = _server_checks(server, stats)
        if pid is None or not _is_comfyui(_argv(pid)):  # an ssh tunnel, a container, another user
            pid = None
    options = _options(stats.get("system", {}).get("argv") or (_argv(pid) if pid else []))
    checks += [_gpu(pid, options), _address(options), _custom_nodes(options)] if options else []
    return [*checks, *offered, *_company(pid, stats)]


# ---------------------------------------------------------------- the process


def _argv(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def _is_comfyui(argv: list[str]) -> bool:
    return any(Path(word).name == "main.py" for word in argv)


def _options(argv: list[str]) -> dict[str, str]:
    """ComfyUI's options with their (last) values, "" for those without; "main.py" itself is one of them."""
    options: dict[str, str] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            options[name] = value
        elif name:
            options[name] = f"{options[name]} {word}".strip()
        elif Path(word).name == "main.py":
            options["main.py"] = ""
    return options


def _listener(port: int) -> int | None:
    """The process that listens on a TCP port here, where it can be seen."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
        except OSError:
            continue
        inodes |= {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    wanted = {f"socket:[{inode}]" for inode in inodes}
    return next((pid for pid, link in _open_files() if link in wanted), None)


def _open_files() -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            for entry in os.scandir(folder):
                yield int(folder.parent.name), os.readlink(entry.path)
        except OSError:  # it ended, or belongs to another user
            continue


def _gpu(pid: int | None, options: dict[str, str]) -> Check:
    """Whether the process can use one GPU and no other."""
    name = "gpu"
    if "--cpu" in options:
        return Check(name, "warn", "runs on the CPU (--cpu): right for a test, hours for a clip")
    if "--cuda-device" in options:
        shown = options["--cuda-device"]
    elif pid is None:
        return Check(name, "warn", "its process cannot be seen from here; run this on its machine with its PID")
    else:
        try:
            environment = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
        except OSError as error:
            return Check(name, "warn", f"process {pid}: its environment cannot be read ({error.strerror})")
        shown = next((line.partition("=")[2] for line in environment if line.startswith("CUDA_VISIBLE_DEVICES=")), None)
    if shown is None:
        return Check(
            name, "warn", "CUDA_VISIBLE_DEVICES is not set: it sees every GPU; start it with the one it may use"
        )
    devices = [device for device in shown.split(",") if device.strip()]
    if not devices or devices[0].strip() == "-1":
        return Check(name, "fail", f"CUDA_VISIBLE_DEVICES={shown!r}: it sees no GPU")
    if len(devices) > 1:
        return Check(name, "warn", f"sees {len(devices)} GPUs ({shown}); give it one, so that the others stay free")
    return Check(name, "ok", f"sees GPU {shown} and no other")


def _address(options: dict[str, str]) -> Check:
    listen = options.get("--listen", "127.0.0.1") or "0.0.0.0,::"
    if all(_loopback(host) for host in listen.split(",")):
        return Check("address", "ok", f"listens on {listen} alone")
    return Check(
        "address", "fail", f"listens on {listen} without any authentication; use --listen 127.0.0.1 and ssh -L"
    )


def _loopback(host: str) -> bool:
    try:
        return ip_address(host.strip()).is_loopback
    except ValueError:
        return host.strip() == "localhost"


def _custom_nodes(options: dict[str, str]) -> Check:
    allowed = options.get("--whitelist-custom-nodes", "")
    if "--disable-all-custom-nodes" not in options:
        return Check("custom nodes", "warn", "loads every custom node; start it with --disable-all-custom-nodes")
    if others := [name for name in allowed.split() if name != "h3_latent_handoff"]:
        return Check("custom nodes", "warn", f"loads {', '.join(others)}, which a decode does not need")
    return Check("custom nodes", "ok", f"loads {allowed or 'none'}")


# ---------------------------------------------------------------- the server


def _server_checks(server: Server, stats: dict) -> list[Check]:
    system = stats.get("system", {})
    version = str(system.get("comfyui_version"))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    told = f"ComfyUI {version} with torch {system.get('pytorch_version')} answers at {server.url}"
    if numbers < TRIED_VERSION:
        checks = [Check("server", "warn", f"{told}; h3spool was tried with 0.33 and newer")]
    else:
        checks = [Check("server", "ok", told)]
    try:
        missing = [name for name in NODES if server.node(name) is None]
        names = server.vae_names()
    except H3SpoolError as error:
        return [*checks, Check("nodes", "fail", str(error))]
    if missing:
        checks.append(Check("nodes", "fail", f"lacks {', '.join(missing)}; update ComfyUI"))
    else:
        checks.append(Check("nodes", "ok", "has all core nodes of the decode"))
    video, audio = (choose_vae(names, stream, server.url) for stream in ("video", "audio"))
    return [*checks, _models(names, video, audio), _ram(system), *_vram(stats, video)]


def _models(names: list[str], video: str | None, audio: str | None) -> Check:
    if video is None:
        return Check(
            "models", "fail", f"has no minimax_h3_video_vae in models/vae; it offers {', '.join(names) or 'none'}"
        )
    if audio is None:
        return Check("models", "warn", f"has {video}, but no minimax_h3_audio_vae: clips with sound cannot be decoded")
    return Check("models", "ok", f"has {video} and {audio}")


def _ram(system: dict) -> Check:
    frames, height, width = LONG_CLIP
    free = int(system.get("ram_free") or 0)
    fit = free // (height * width * 3 * 4)
    told = f"{free / 1e9:.1f} GB of RAM free: room for {fit} frames of {width}x{height} (ComfyUI holds them as float32)"
    return Check("ram", "ok" if fit >= frames else "warn", told)


def _vram(stats: dict, video: str | None) -> list[Check]:
    need = WEIGHTS_BYTES["int8" if "int8" in (video or "") else "fp16"] + ACTIVATIONS_BYTES
    checks = []
    for device in stats.get("devices", []):
        if device.get("type") == "cpu":
            continue
        free, total = int(device.get("vram_free") or 0), int(device.get("vram_total") or 0)
        told = f"{device.get('name')}: {free / 1e9:.1f} of {total / 1e9:.1f} GB free, a decode needs {need / 1e9:.1f}"
        if free >= need:
            checks.append(Check("vram", "ok", told))
        else:
            checks.append(Check("vram", "warn", f"{told} (less where the VAE is loaded already)"))
    return checks


# ---------------------------------------------------------------- who else


def _company(pid: int | None, stats: dict) -> list[Check]:
    """Other processes on the GPU that `pid` uses."""
    name = "other processes"
    if all(device.get("type") == "cpu" for device in stats.get("devices", [])) or pid is None:
        return []
    program = shutil.which("nvidia-smi")
    if program is None:
        return [Check(name, "warn", "nvidia-smi is not here, so what else runs on the GPU cannot be told")]
    argv = [program, "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        return [Check(name, "warn", f"nvidia-smi failed, so what else runs on the GPU cannot be told: {error}")]
    rows = [[field.strip() for field in row] for row in csv.reader(done.stdout.splitlines()) if len(row) == 4]
    mine = {gpu for gpu, owner, _, _ in rows if owner == str(pid)}
    others = [
        f"{program} ({owner}, {used} MiB)" for gpu, owner, program, used in rows if gpu in mine and owner != str(pid)
    ]
    if others:
        return [Check(name, "warn", f"share its GPU: {', '.join(others)}; a decode can run out of memory through them")]
    if not mine:
        return [Check(name, "ok", "it holds no GPU memory yet; look again after its first decode")]
    return [Check(name, "ok", "it is alone on its GPU")]
