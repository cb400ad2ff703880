"""The harness of the fault suites: the product under a tracer that counts what changes the disk, and a look at spools.

`Tracer` starts a process under ptrace with a seccomp filter that stops it at every state-changing system call, in one
order over all its threads and children (strace counts each thread alone, so that it never reaches what a thread of a
pool does). A test decides at each such point: go on, kill, fail the call, write short, or copy the disk first.
The checks read spools with their own eyes and never ask the product.
"""

import contextlib
import ctypes
import errno
import functools
import gc
import hashlib
import importlib
import io
import json
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

FULL = os.environ.get("H3SPOOL_FAULTS") == "full"
REPO = Path(__file__).parent.parent
STATES = ("incoming", "verified", "decoded", "done", "failed")
DAY_S = 86400.0


# ---------------------------------------------------------------- what this machine can do


def need(able: bool, reason: str) -> None:
    """Skip with the reason where the machine is not able; in CI that is a failure."""
    if not able:
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)


def need_tracing() -> None:
    need(platform.machine() == "x86_64", f"the tracer knows x86_64 only, this is {platform.machine()}")
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    need(not scope.exists() or scope.read_text().strip() != "3", "ptrace is switched off on this machine")


def need_root() -> None:
    need(os.geteuid() == 0, "needs root (mounts, sshd)")


def need_program(*names: str) -> None:
    for name in names:
        need(shutil.which(name) is not None or Path("/usr/sbin", name).exists(), f"{name} is not installed")


def picks(points: int, wanted: int) -> list[int]:
    """Which of so many points to try: all in the full suite, else `wanted` of them, spread, with the last."""
    if FULL or points <= wanted:
        return list(range(points))
    if wanted == 1:
        return [points // 2]
    return sorted({round(i * (points - 1) / (wanted - 1)) for i in range(wanted)})


def say(text: str) -> None:
    """A figure for the log: shown by `pytest -s` and kept in the report of a failure."""
    print(f"\n[faults] {text}", file=sys.__stderr__)


# ---------------------------------------------------------------- system calls

_CALLS = {
    1: "write", 18: "pwrite64", 20: "writev", 40: "sendfile", 326: "copy_file_range", 285: "fallocate",
    74: "fsync", 75: "fdatasync", 76: "truncate", 77: "ftruncate",
    2: "open", 85: "creat", 257: "openat", 82: "rename", 264: "renameat", 316: "renameat2",
    83: "mkdir", 258: "mkdirat", 84: "rmdir", 87: "unlink", 263: "unlinkat",
    86: "link", 265: "linkat", 88: "symlink", 266: "symlinkat", 90: "chmod", 91: "fchmod", 280: "utimensat",
}  # fmt: skip
_BY_FD = {"write", "pwrite64", "writev", "fsync", "fdatasync", "ftruncate", "fallocate", "fchmod"}
_BY_FD_SECOND = {"copy_file_range": 2, "sendfile": 0}
_BY_PATH = {"truncate": (0,), "open": (0,), "creat": (0,), "rename": (0, 1), "mkdir": (0,), "rmdir": (0,),
            "unlink": (0,), "link": (0, 1), "symlink": (1,), "chmod": (0,)}  # fmt: skip
_BY_DIR_AND_PATH = {"openat": ((0, 1),), "renameat": ((0, 1), (2, 3)), "renameat2": ((0, 1), (2, 3)),
                    "mkdirat": ((0, 1),), "unlinkat": ((0, 1),), "linkat": ((0, 1), (2, 3)), "symlinkat": ((1, 2),),
                    "utimensat": ((0, 1),)}  # fmt: skip
WRITES = ("write", "pwrite64", "writev", "sendfile", "copy_file_range")


@dataclass(frozen=True)
class Point:
    """A state-changing call that is about to happen: its name, the paths below the world, and who calls."""

    call: str
    paths: tuple[str, ...]
    own: bool  # by the product's process itself, not by a child such as ffmpeg

    def __str__(self) -> str:
        return f"{self.call} {' -> '.join(self.paths)}"


KILL = "kill"
SHORT = "short"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_ulong, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_WALL = 0x40000000
_TRACEME, _CONT, _GETREGS, _SETREGS, _SETOPTIONS, _EVENTMSG, _SYSCALL_INFO = 0, 7, 12, 13, 0x4200, 0x4201, 0x420E
_OPTIONS = 0x2 | 0x4 | 0x8 | 0x10 | 0x80 | 0x100000  # fork, vfork, clone, exec, seccomp, kill when the tracer ends
_EVENT_FORKS, _EVENT_SECCOMP = (1, 2, 3), 7
_ORIG_RAX, _RAX = 15, 10  # places in struct user_regs_struct
_COUNT_AT = {"sendfile": 7, "copy_file_range": 9}  # r10, r8; else rdx


def _ptrace(request: int, pid: int, address: int = 0, data: object = 0) -> int:
    result = _libc.ptrace(request, pid, address, data)
    if result < 0 and request not in (_CONT,):
        raise OSError(ctypes.get_errno(), f"ptrace {request}")
    return result


def _install_filter() -> None:
    """Stop at the calls of the table (for open and openat: only with O_CREAT or O_TRUNC), let everything else run."""

    def op(code: int, k: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, k)

    load, equal, anyset, answer = 0x20, 0x15, 0x45, 0x06
    allow, trace = 0x7FFF0000, 0x7FF00000
    program = [op(load, 0)]
    for number, flags_at in ((2, 24), (257, 32)):  # the low half of args[1], of args[2]
        program += [op(equal, number, 0, 4), op(load, flags_at), op(anyset, os.O_CREAT | os.O_TRUNC, 0, 1)]
        program += [op(answer, trace), op(answer, allow)]
    for number in _CALLS:
        if number not in (2, 257):
            program += [op(equal, number, 0, 1), op(answer, trace)]
    program.append(op(answer, allow))
    code = ctypes.create_string_buffer(b"".join(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    if _libc.prctl(38, 1, 0, 0, 0) or _libc.prctl(22, 2, header, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


class Tracer:
    """Runs a process and asks `decide(index, point)` before each state-changing call below `within` (or on stdout).

    `decide` returns None (go on), KILL, SHORT, or an errno that the call then fails with.
    """

    def __init__(self, within: Path, decide: Callable[[int, Point], object], timeout_s: float = 60):
        self.within, self.decide, self.timeout_s = str(within), decide, timeout_s
        self.points: list[Point] = []

    def run(self, child: Callable[[], None]) -> int:
        """Fork, run `child` in it under the tracer; returns the exit status as subprocess has it."""
        main = os.fork()
        if main == 0:
            try:
                _ptrace(_TRACEME, 0)
                os.kill(os.getpid(), signal.SIGSTOP)
                _install_filter()
                child()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(99)
        os.waitpid(main, _WALL)
        _ptrace(_SETOPTIONS, main, 0, _OPTIONS)
        _ptrace(_CONT, main)
        timer = threading.Timer(self.timeout_s, lambda: os.kill(main, signal.SIGKILL))
        timer.start()
        try:
            return self._loop(main)
        finally:
            timer.cancel()

    def _loop(self, main: int) -> int:
        live, started, gone, result = {main}, {main}, set(), None
        while live:
            pid, status = os.waitpid(-1, _WALL)
            if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                live.discard(pid)
                gone.add(pid)
                if pid == main:
                    result = os.waitstatus_to_exitcode(status)
                    for other in live - {main}:  # pdeathsig has ended them already, or nearly
                        with contextlib.suppress(OSError):
                            os.kill(other, signal.SIGKILL)
                continue
            event, deliver = status >> 16, os.WSTOPSIG(status)
            if event == _EVENT_SECCOMP:
                self._stopped(pid, main)
                deliver = 0
            elif event in _EVENT_FORKS:
                message = ctypes.c_ulong()
                _ptrace(_EVENTMSG, pid, 0, ctypes.addressof(message))
                live |= {message.value} - gone  # a short life may have ended before its birth is told
                deliver = 0
            elif event:
                deliver = 0
            elif pid not in started and deliver == signal.SIGSTOP:
                started.add(pid)
                live.add(pid)
                deliver = 0
            _ptrace(_CONT, pid, 0, deliver)
        return result

    def _stopped(self, tid: int, main: int) -> None:
        buffer = ctypes.create_string_buffer(96)
        try:
            _ptrace(_SYSCALL_INFO, tid, 96, ctypes.addressof(buffer))
            number, *args = struct.unpack_from("7Q", buffer, 24)
            point = self._point(tid, main, _CALLS[number], args)
        except OSError:  # killed meanwhile
            return
        if point is None:
            return
        action = self.decide(len(self.points), point)
        self.points.append(point)
        if action is KILL:
            os.kill(main, signal.SIGKILL)
        elif action is not None:
            registers = (ctypes.c_ulonglong * 27)()
            _ptrace(_GETREGS, tid, 0, ctypes.addressof(registers))
            if action is SHORT:
                place = _COUNT_AT.get(point.call, 12)
                registers[place] = max(1, registers[place] // 2)
            else:
                registers[_ORIG_RAX], registers[_RAX] = (1 << 64) - 1, (1 << 64) - action
            _ptrace(_SETREGS, tid, 0, ctypes.addressof(registers))

    def _point(self, tid: int, main: int, call: str, args: list[int]) -> Point | None:
        if call in _BY_FD or call in _BY_FD_SECOND:
            fd = args[_BY_FD_SECOND.get(call, 0)]
            if fd == 1 and call == "write":
                return Point(call, ("stdout",), self._own(tid, main)) if self._own(tid, main) else None
            found = [self._fd(tid, fd)]
        elif call in _BY_PATH:
            found = [self._path(tid, -100, args[at]) for at in _BY_PATH[call]]
        else:
            found = [self._path(tid, ctypes.c_int(args[d]).value, args[at]) for d, at in _BY_DIR_AND_PATH[call]]
        if not all(path.startswith(self.within + "/") for path in found):
            return None
        return Point(call, tuple(path[len(self.within) + 1 :] for path in found), self._own(tid, main))

    @staticmethod
    def _own(tid: int, main: int) -> bool:
        return tid == main or f"\nTgid:\t{main}\n" in Path(f"/proc/{tid}/status").read_text()

    @staticmethod
    def _fd(tid: int, fd: int) -> str:
        return os.readlink(f"/proc/{tid}/fd/{fd}").removesuffix(" (deleted)")

    def _path(self, tid: int, folder: int, address: int) -> str:
        with open(f"/proc/{tid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            text = memory.read(4096 - address % 4096)
            if b"\0" not in text:
                text += memory.read(4096)
        path = text.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
        base = f"/proc/{tid}/cwd" if folder == -100 else f"/proc/{tid}/fd/{folder}"
        return path if path.startswith("/") else os.path.join(os.readlink(base), path)


# ---------------------------------------------------------------- running the product


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str
    points: list[Point] = field(default_factory=list)
    fired: Point | None = None

    @property
    def jobs(self) -> list[str]:
        """The first word of each line on stdout."""
        return [line.split()[0] for line in self.out.splitlines() if line.strip()]


def _become(argv: list[str], stdin: bytes, log: Path, env: dict, clock_s: float, fresh: bool) -> None:
    """In a forked child: run the command line, with its streams on files; never returns."""
    feed = os.memfd_create("stdin")
    os.write(feed, stdin)
    os.lseek(feed, 0, os.SEEK_SET)
    os.dup2(feed, 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{log}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    os.environ.update(env)
    if fresh:
        os.execve(sys.executable, [sys.executable, "-c", LAUNCH, *argv], os.environ)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # a pool of threads does not live on in a fork
    if clock_s:
        real = time.time
        time.time = lambda: real() + clock_s
    raw = [io.FileIO(fd, mode, closefd=False) for fd, mode in ((0, "rb"), (1, "wb"), (2, "wb"))]
    sys.stdin = io.TextIOWrapper(io.BufferedReader(raw[0]))
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.BufferedWriter(file), line_buffering=True) for file in raw[1:])
    from h3spool.cli import main

    for words in _split(argv):
        sys.argv = ["h3spool", *words]
        try:
            main()
        except SystemExit as end:
            if end.code or words == argv:
                os._exit(end.code if isinstance(end.code, int) else bool(end.code))
    os._exit(0)


THEN = "&&"


def _split(argv: list[str]) -> list[list[str]]:
    """Several command lines, one after the other while they end with 0."""
    lines: list[list[str]] = [[]]
    for word in argv:
        lines.append([]) if word == THEN else lines[-1].append(word)
    return lines


LAUNCH = "import sys; from h3spool.cli import main; sys.argv[0] = 'h3spool'; main()"


@functools.cache
def preload() -> None:
    """Import what commands import inside their bodies, so that a fork has it."""
    import h3spool

    for name in sorted(path.stem for path in Path(h3spool.__file__).parent.glob("*.py")):
        if name not in ("decode", "comfyui", "comfyui_server", "quantize", "compare", "doctor"):  # torch, mostly
            importlib.import_module(f"h3spool.{name}")
    importlib.import_module("h3spool.cli")
    gc.freeze()  # what lives now is not copied by the collector of each fork


class World:
    """A folder with a sampler's spool S, a decoder's spool D, and the commands that work on them."""

    def __init__(self, root: Path, log: Path | None = None):
        self.root, self.log = root, log or root.parent / f"{root.name}.log"
        self.sampler, self.decoder = root / "S", root / "D"
        self.env: dict[str, str] = {"PYTHONDONTWRITEBYTECODE": "1", "H3SPOOL_SPOOL": "", "COLUMNS": "200"}

    def copy(self, to: Path) -> "World":
        """The same world at another place."""
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(self.root, to, symlinks=True)
        return World(to)

    def run(
        self,
        *argv: str | Path,
        stdin: bytes = b"",
        decide: Callable[[int, Point], object] | None = None,
        clock_s: float = 0.0,
        fresh: bool = False,
        timeout_s: float = 60,
        within: Path | None = None,
    ) -> Done:
        """Run `h3spool ARGV`: in a fork of this process (modules are loaded), or `fresh` as a program of its own."""
        preload()
        words = [str(word) for word in argv]
        env = os.environ | self.env | {"PYTHONPATH": str(REPO)}

        def child() -> None:
            _become(words, stdin, self.log, env, clock_s, fresh)

        if decide is None:
            pid = os.fork()
            if pid == 0:
                try:
                    child()
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(99)
            timer = threading.Timer(timeout_s, lambda: os.kill(pid, signal.SIGKILL))
            timer.start()
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            timer.cancel()
            return Done(code, *self._logs())
        tracer = Tracer(within or self.root, decide, timeout_s)
        code = tracer.run(child)
        return Done(code, *self._logs(), tracer.points)

    def _logs(self) -> tuple[str, str]:
        return tuple(Path(f"{self.log}.{name}").read_text(errors="replace") for name in ("out", "err"))

    def ok(self, *argv: str | Path, codes: tuple[int, ...] = (0,), **options: object) -> Done:
        """Run a command that must end with one of these codes."""
        done = self.run(*argv, **options)
        assert done.code in codes, f"h3spool {' '.join(map(str, argv))} ended with {done.code}:\n{done.err}{done.out}"
        return done

    def create(self) -> "World":
        """Make both spools."""
        self.root.mkdir(parents=True, exist_ok=True)
        first, second = ("init", "--role", "sampler", "--node"), ("init", "--role", "decoder", "--node")
        self.ok(*first, "samp", self.sampler, THEN, *second, "deco", self.decoder)
        return self

    def export(self, clip: Path, *, title: str = "clip", spool: Path | None = None) -> str:
        """Export a latent file; returns the job's name."""
        argv = ("export", clip, "--name", title, "--min-free", "0", "-s", spool or self.sampler)
        return self.ok(*argv).jobs[0]

    def hand_over(self) -> None:
        """The ordinary commands, until everything lies verified on the decoder."""
        send = ("push", "--to", self.decoder, "--min-free", "0", "-s", self.sampler)
        self.ok("verify", "-s", self.sampler, THEN, *send, THEN, "verify", "-s", self.decoder)

    def fsck(self) -> None:
        """Both spools are clean."""
        self.ok("fsck", "-s", self.sampler, THEN, "fsck", "-s", self.decoder)


def fork(work: Callable[[], None]) -> int:
    """Start a child that does it; it ends with 0 unless something was raised."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(99)
    return pid


def in_a_fork(work: Callable[[], None]) -> None:
    """Do it in a child, so that what it imports (torch) does not make every later fork of this process dear."""
    assert os.waitstatus_to_exitcode(os.waitpid(fork(work), 0)[1]) == 0, "it failed in a child; see the captured stderr"


# ---------------------------------------------------------------- looking at spools


def places(spool: Path) -> Iterator[tuple[str, Path]]:
    """Every job directory of a spool with the state it lies in; results/, seen/ and tmp/ are not states."""
    for state in (*STATES, *(f"active/{slot}" for slot in sorted(os.listdir(spool / "active")))):
        for name in sorted(os.listdir(spool / state)):
            if (spool / state / name).is_dir():
                yield state, spool / state / name


def where(spool: Path, name: str) -> list[str]:
    """The states in which a job of that name lies."""
    return [state for state, path in places(spool) if path.name == name]


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def whole(job: Path) -> str:
    """The SHA-256 of a job's latent, after its sidecar and its receipt were found to agree."""
    latent, name = job / f"{job.name}.h3latent", job.name
    digest = digest_of(latent)
    assert (job / f"{name}.h3latent.sha256").read_text() == f"{digest}  {latent.name}\n", f"{job}: sidecar"
    account = json.loads((job / f"{name}.pipeline.json").read_text())
    assert account["job"] == name, f"{job}: another job's receipt"
    return digest


def contents(spool: Path) -> dict[str, list[str]]:
    """Hash of the latent -> STATE/JOB of each whole job that holds it."""
    found: dict[str, list[str]] = {}
    for state, path in places(spool):
        found.setdefault(whole(path), []).append(f"{state}/{path.name}")
    return found


def exactly_once(spool: Path, digests: set[str], state: str) -> None:
    """The spool holds just these latents, each once, in that state."""
    found = contents(spool)
    assert set(found) == digests, f"{spool}: {set(found) ^ digests} too many or too few: {found}"
    assert all(len(jobs) == 1 and jobs[0].startswith(f"{state}/") for jobs in found.values()), f"{spool}: {found}"


def leftovers(spool: Path) -> list[str]:
    """What lies in tmp/."""
    return sorted(os.listdir(spool / "tmp"))


def drop_pair(folder: Path, stem: str, raw: bytes, digest: str | None = None) -> None:
    """Drop a loose latent and its checksum file."""
    (folder / f"{stem}.h3latent").write_bytes(raw)
    digest = digest or hashlib.sha256(raw).hexdigest()
    (folder / f"{stem}.h3latent.sha256").write_text(f"{digest}  {stem}.h3latent\n")


def write_clip(path: Path, seed: int = 1, *, tokens: int = 2, height: int = 2, width: int = 2, **facts: object) -> Path:
    """A good latent of random values as an .h3latent file."""
    from h3spool import latent

    draw = np.random.default_rng(seed)
    video = draw.standard_normal((1, 24, tokens, height, width), dtype=np.float32)
    length = latent.audio_length(latent.frame_count(tokens))
    audio = draw.standard_normal((1, 32, 2, length), dtype=np.float32)
    path.write_bytes(b"".join(latent.serialize(latent.build(video, audio, {"seed": seed, **facts}))))
    return path


# ---------------------------------------------------------------- deciding


def at(index: int, action: object) -> Callable[[int, Point], object]:
    """Act at one point."""
    return lambda n, _point: action if n == index else None


def when(call: str, pattern: str, action: object = KILL, *, nth: int = 1) -> Callable[[int, Point], object]:
    """Act before the nth call of that name whose paths (joined by ` -> `) match the pattern."""
    count = 0

    def decide(_index: int, point: Point) -> object:
        nonlocal count
        if point.call != call or not re.search(pattern, " -> ".join(point.paths)):
            return None
        count += 1
        return action if count == nth else None

    return decide


def points_of(world: World, *argv: str | Path, **options: object) -> Done:
    """Run undisturbed under the tracer; `points` of the result are what can be disturbed."""
    return world.run(*argv, decide=lambda _n, _p: None, **options)


# ---------------------------------------------------------------- disks of our own


@contextlib.contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder where fsync costs nothing, where there is one: what a kill leaves behind does not depend on the disk."""
    room = Path("/dev/shm")
    fits = room.is_dir() and os.access(room, os.W_OK) and shutil.disk_usage(room).free > 256 << 20
    with tempfile.TemporaryDirectory(prefix="h3spool-faults-", dir=room if fits else None) as name:
        yield Path(name)


def own_mounts() -> None:
    """Give this process a mount namespace, so that what it mounts ends with it at the latest."""
    need_root()
    if _libc.unshare(0x20000):
        need(False, f"unshare: {os.strerror(ctypes.get_errno())}")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


@contextlib.contextmanager
def mounted(*argv: str | Path) -> Iterator[Path]:
    """`mount ARGV` for the time of the block; the last argument is the folder."""
    folder = Path(argv[-1])
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *map(str, argv)], capture_output=True, text=True, check=False)
    need(done.returncode == 0, f"mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


ERRNO_NAMES = {number: errno.errorcode[number] for number in (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES)}
