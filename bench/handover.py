"""The hand-over beside bare rsync, verify beside sha256sum, claims, idle cost, latency. Everything stays on 127.0.0.1.

Files are of the size of a real latent (124 frames of 416x736 in F32: 4.3 MB). Every case is measured `ROUNDS` times,
the cases interleaved; medians are printed, with their ratio. Our side includes the start-up of the program.
"""

import hashlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.sshd import Sshd
from h3spool import latent
from h3spool.container import sidecar_text
from h3spool.spool import Spool
from h3spool.steps import export

ROUNDS = 5
PROGRAM = Path(sys.executable).with_name("h3spool")
SMALL = (2, 2, 2)  # tokens, height, width
REAL = (37, 26, 46)


def clip(tokens: int, height: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    audio = latent.audio_length(latent.frame_count(tokens))
    video = draw.standard_normal((1, 24, tokens, height, width), dtype=np.float32)
    return video, draw.standard_normal((1, 32, 2, audio), dtype=np.float32)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def run(*argv: object, env: dict | None = None) -> subprocess.CompletedProcess:
    return subprocess.run([str(word) for word in argv], check=True, capture_output=True, env=env)


def show(name: str, seconds: float, *ratios: str) -> None:
    print(f"  {name:<58} {1000 * seconds:9.1f} ms   {'   '.join(ratios)}", flush=True)


# ---------------------------------------------------------------- push beside rsync


def push(root: Path, sshd: Sshd, jobs: int) -> None:
    """`jobs` verified jobs: rsync on a warm and on a fresh connection, one `push`, and a running loop."""
    env = os.environ | {"PATH": f"{sshd.bin}:{os.environ['PATH']}"}
    sampler, decoder = Spool.create(root / f"s{jobs}", "sampler", "s"), Spool.create(root / f"d{jobs}", "decoder", "d")
    remote = ["--to", f"peer:{decoder.root}", "--remote-command", PROGRAM, "--min-free", "0", "-s", sampler.root]
    warm = ["ssh", "-o", f"ControlPath={root}/warm"]
    master = subprocess.Popen([*warm, "-MN", "peer"], env=env)
    times: dict[str, list[float]] = {"warm": [], "fresh": [], "push": [], "loop": []}
    loop = subprocess.Popen(
        [PROGRAM, "loop", *remote],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        time.sleep(2)
        for round_ in range(ROUNDS):
            files = root / f"files-{jobs}-{round_}"
            ready(files, jobs)
            for name, shell in (("warm", " ".join(warm)), ("fresh", "ssh")):
                target = root / f"{name}-{jobs}-{round_}"
                argv = ["rsync", "-a", "--fsync", "-e", shell, f"{files}/", f"peer:{target}/"]
                times[name].append(timed(lambda argv=argv: run(*argv, env=env)))
                shutil.rmtree(target)
            os.kill(loop.pid, signal.SIGSTOP)
            feed(sampler, jobs, "verified")
            times["push"].append(timed(lambda: run(PROGRAM, "push", *remote, env=env)))
            os.kill(loop.pid, signal.SIGCONT)
            before = len(sampler.names("done"))
            feed(sampler, jobs, "verified")
            times["loop"].append(timed(lambda before=before: wait(lambda: len(sampler.names("done")) == before + jobs)))
            for spool in (sampler, decoder):
                for state in ("done", "incoming"):
                    for name in spool.names(state):
                        shutil.rmtree(spool.root / state / name)
            shutil.rmtree(files)
    finally:
        loop.terminate()
        loop.wait(30)
        master.terminate()
        master.wait(30)
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"push of {jobs} x 4.3 MB: hash, durability and acknowledgement, beside bare rsync -a --fsync")
    show("(a) rsync, warm connection", median["warm"])
    show("(b) rsync, fresh connection", median["fresh"])
    ratios = [f"{median['push'] / median[name]:.2f} x ({letter})" for letter, name in (("a", "warm"), ("b", "fresh"))]
    show("h3spool push, one command", median["push"], *ratios)
    ratios = [f"{median['loop'] / median[name]:.2f} x ({letter})" for letter, name in (("a", "warm"), ("b", "fresh"))]
    show("h3spool loop, running; its pause of up to 1 s counted", median["loop"], *ratios)


def ready(folder: Path, jobs: int) -> None:
    """The same files for rsync: a latent, its sidecar and a receipt each."""
    raw = b"".join(bytes(piece) for piece in latent.serialize(latent.build(*clip(*REAL), {})))
    for index in range(jobs):
        job = folder / f"job{index}"
        job.mkdir(parents=True)
        (job / f"job{index}.h3latent").write_bytes(raw)
        (job / f"job{index}.h3latent.sha256").write_bytes(sidecar_text(hashlib.sha256(raw).hexdigest(), "x"))
        (job / f"job{index}.pipeline.json").write_bytes(b"{}" * 400)


def feed(spool: Spool, jobs: int, state: str) -> None:
    """Put exported jobs into a state, all at once."""
    staged = Spool.create(spool.root.with_name(f"{spool.root.name}-staged"), "sampler", "s")
    streams = clip(*REAL)
    names = [export(*streams, spool=staged, min_free_bytes=0) for _ in range(jobs)]
    for name in names:
        os.rename(staged.root / "incoming" / name, spool.root / state / name)


def wait(done: Callable[[], bool], patience_s: float = 120) -> None:
    end = time.monotonic() + patience_s
    while not done():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.002)


# ---------------------------------------------------------------- verify, claims, idling, latency


def verify(root: Path) -> None:
    """MB/s of verify beside hashing alone."""
    spool, jobs = Spool.create(root / "verify", "sampler", "v"), 50
    feed(spool, jobs, "incoming")
    files = sorted((spool.root / "incoming").glob("*/*.h3latent"))
    size = sum(path.stat().st_size for path in files)
    tool = min(timed(lambda: run("sha256sum", *files)) for _ in range(3))
    alone = min(timed(lambda: [hashlib.sha256(path.read_bytes()).digest() for path in files]) for _ in range(3))
    ours = timed(lambda: run(PROGRAM, "verify", "-s", spool.root))
    print(f"verify of {jobs} x 4.3 MB, with all checks, receipts and moves")
    show("sha256sum", tool, f"{size / tool / 1e6:.0f} MB/s")
    show("hashlib alone", alone, f"{size / alone / 1e6:.0f} MB/s")
    show("h3spool verify", ours, f"{size / ours / 1e6:.0f} MB/s", f"{ours / alone:.2f} x hashlib")


def claims(root: Path) -> None:
    """Eight processes claim 1,000 jobs."""
    spool, jobs, workers = Spool.create(root / "claims", "sampler", "c"), 1000, 8
    for index in range(jobs):
        (spool.root / "verified" / f"job{index:04}").mkdir()
    script = (
        "import sys; from h3spool.spool import Spool; spool = Spool(sys.argv[1]); slot = spool.take_slot('push');"
        "sys.stdin.readline(); print(sum(slot.claim(name) is not None for name in spool.names('verified')))"
    )
    argv = [sys.executable, "-c", script, str(spool.root)]
    children = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(workers)]
    wait(lambda: len(spool.slots()) == workers)
    start = time.perf_counter()
    for child in children:
        child.stdin.write(b"\n")
        child.stdin.flush()
    taken = [int(child.communicate()[0]) for child in children]
    seconds = time.perf_counter() - start
    print(f"claims: {workers} processes, {jobs} jobs: {sum(taken)} claimed, {jobs / seconds:.0f} claims/s")


def idle(root: Path) -> None:
    """CPU of a loop that has nothing to do, beside 10,000 done jobs."""
    spool, seconds = Spool.create(root / "idle", "sampler", "i"), 30
    for index in range(10_000):
        (spool.root / "done" / f"job{index:05}").mkdir()
    peer = Spool.create(root / "idle-peer", "decoder", "p")
    loop = subprocess.Popen([PROGRAM, "loop", "-s", spool.root, "--to", peer.root], stderr=subprocess.DEVNULL)
    time.sleep(3)
    at = cpu_s(loop.pid)
    time.sleep(seconds)
    used = cpu_s(loop.pid) - at
    loop.terminate()
    loop.wait()
    print(f"idle loop with 10,000 done jobs: {used / seconds * 3600:.1f} CPU seconds an hour")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def latency(root: Path, sshd: Sshd) -> None:
    """From exported on one spool to verified (ready for decode) on the other, two loops running, over SSH."""
    env = os.environ | {"PATH": f"{sshd.bin}:{os.environ['PATH']}"}
    sampler, decoder = Spool.create(root / "ls", "sampler", "s"), Spool.create(root / "ld", "decoder", "d")
    argv = [PROGRAM, "loop", "-s", sampler.root, "--to", f"peer:{decoder.root}", "--remote-command", PROGRAM]
    loops = [
        subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in ([*argv, "--min-free", "0"], [PROGRAM, "verify", "--watch", "-s", decoder.root])
    ]
    try:
        time.sleep(3)
        times = []
        for seed in range(10):
            streams = clip(*REAL, seed)
            name = export(*streams, spool=sampler, min_free_bytes=0)
            ready_at = decoder.root / "verified" / name
            times.append(timed(lambda path=ready_at: wait(path.is_dir)))
            time.sleep(0.13 * seed)  # not in step with the scans
    finally:
        for child in loops:
            child.terminate()
            child.wait(30)
    middle, worst = statistics.median(times), max(times)
    print(f"latency, exported here -> ready to decode there: median {middle:.2f} s, max {worst:.2f} s")


def main() -> None:
    root = Path(tempfile.mkdtemp(prefix="h3spool-bench-", dir=os.environ.get("TMPDIR", "/var/tmp")))
    try:
        with Sshd(root) as sshd:
            push(root, sshd, 1)
            push(root, sshd, 100)
            latency(root, sshd)
        verify(root)
        claims(root)
        idle(root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
