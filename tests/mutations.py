"""`make test-mutations`: take one safeguard out of a copy of the package at a time; the fault suite must go red.

A mutation is a replacement of text that must occur exactly once. It is survived when the named tests still pass.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).parent.parent


class Mutation(NamedTuple):
    """What is taken out, where (below h3spool/), the text before and after, and the tests that must go red."""

    safeguard: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def power(step: str, cut: str = "") -> tuple[str, ...]:
    return ("tests/test_faults_power.py", "-k", f"{step} and {cut or step}")


def holes(words: str) -> tuple[str, ...]:
    return ("tests/test_faults_holes.py", "-k", words)


def corrupt(words: str) -> tuple[str, ...]:
    return ("tests/test_faults_corrupt.py", "-k", words)


MUTATIONS = [
    Mutation(
        "fsync of a job's files",
        "job.py",
        "    for file in files:\n        fsync_path(file)\n",
        "",
        power("export", "unrelated"),
    ),
    Mutation(
        "fsync of a fresh file (seen/'s record)",
        "job.py",
        "            if durable:\n                os.fsync(fd)\n",
        "",
        power("push", "unrelated"),
    ),
    Mutation(
        "fsync of the state's directory",
        "spool.py",
        "        fsync_path(self.root / state)\n        fsync_path(job.path.parent)\n",
        "",
        power("export", "alone"),
    ),
    Mutation(
        "fsync of done/ after a push",
        "spool.py",
        "        for folder in {self.root / state, *(job.path.parent for job in jobs)}:\n"
        "            fsync_path(folder)\n",
        "",
        power("push", "alone"),
    ),
    Mutation(
        "fsync of incoming/ after a requeue",
        "upkeep.py",
        '            fsync_path(spool.root / "incoming")\n            fsync_path(job.path.parent)\n',
        "",
        power("requeue", "alone"),
    ),
    Mutation("fsync of a pulled result", "pull.py", "    fsync_tree(job.path)\n", "", power("pull", "unrelated")),
    Mutation("fsync of seen/", "spool.py", '        fsync_path(self.root / "seen")\n', "", holes("test_2")),
    Mutation(
        "fsync of the run and of tmp/ above it",
        "admit.py",
        '    fsync_path(run)\n    fsync_path(spool.root / "tmp")\n',
        "",
        holes("test_2"),
    ),
    Mutation(
        "fsync of the peer in state.json",
        "job.py",
        'durable=durable or "peer" in state',
        "durable=False",
        holes("test_7"),
    ),
    Mutation(
        "hash check of verify",
        "job.py",
        "        if digest != expected:\n",
        "        if False:\n",
        corrupt("reaches_verified"),
    ),
    Mutation(
        "hash check of admit",
        "admit.py",
        ' or container.hash_file(path) != file.get("sha256")',
        "",
        corrupt("transfers"),
    ),
    Mutation(
        "hash check of adoption", "adopt.py", "if digest != expected else", "if False else", corrupt("loose_pairs")
    ),
    Mutation(
        "the sidecar names its latent", "container.py", " if not (strict and path)", "", corrupt("reaches_verified")
    ),
    Mutation(
        "O_NOFOLLOW of a loose latent",
        "adopt.py",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_RDONLY | os.O_NONBLOCK",
        corrupt("loose_link"),
    ),
    Mutation(
        "O_NOFOLLOW of files that are read",
        "container.py",
        "fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW",
        "fd = os.open(path, os.O_RDONLY",
        corrupt("link"),
    ),
    Mutation(
        "the link to seen/",
        "spool.py",
        '                os.link(folder / name, self.root / "seen" / name)\n',
        "                pass\n",
        holes("test_5 or test_15"),
    ),
    Mutation(
        "seen/ appears whole",
        "spool.py",
        '                os.link(folder / name, self.root / "seen" / name)\n',
        '                write_file(self.root / "seen" / name, [(folder / name).read_bytes()])\n',
        holes("test_3"),
    ),
    Mutation(
        "a repeated acknowledgement finishes the rename",
        "spool.py",
        "self._finish(known | fresh)",
        "self._finish(fresh)",
        holes("test_4"),
    ),
    Mutation("verify finishes the rename", "steps.py", "        spool.finish_published()\n", "", holes("test_4")),
    Mutation(
        "a clean-up spares what seen/ names",
        "spool.py",
        "                if not self.named_by_seen(path.name):\n",
        "                if True:\n",
        holes("test_1"),
    ),
    Mutation("gc spares what seen/ names", "upkeep.py", " or spool.named_by_seen(entry)", "", holes("test_1")),
    Mutation(
        "a new run spares what seen/ names", "admit.py", " and not spool.named_by_seen(entry)", "", holes("test_1")
    ),
    Mutation(
        "whole is exactly the manifest's files",
        "admit.py",
        'if {item.name for item in os.scandir(held)} != {file["name"] for file in entry["files"]}:',
        "if False:",
        holes("test_6"),
    ),
    Mutation(
        "a short write is continued",
        "job.py",
        "rest = rest[os.write(fd, rest) :]",
        'os.write(fd, rest)\n                    rest = b""',
        ("tests/test_faults_errors.py", "-k", "export"),
    ),
    Mutation(
        "every free slot is emptied",
        "spool.py",
        "if kind == step and self.names",
        "if False and self.names",
        holes("test_8"),
    ),
    Mutation(
        "verify sets attempts to zero",
        "steps.py",
        "            job.set_state(attempts=None)\n",
        "            pass\n",
        holes("test_10"),
    ),
    Mutation(
        "a replaced file is given back",
        "adopt.py",
        "                    _give_back(self.spool)\n",
        "                    taken.unlink()\n",
        holes("test_14"),
    ),
    Mutation(
        "a death in between does not keep it",
        "adopt.py",
        "    _give_back(spool)\n    names",
        "    names",
        holes("test_14"),
    ),
    Mutation(
        "a remote path has harmless characters",
        "link.py",
        '_REMOTE_PATH = re.compile(r"',
        '_REMOTE_PATH = re.compile(r"(?s).*|',
        ("tests/test_faults_races.py", "-k", "executed"),
    ),
    Mutation(
        "a remote command has harmless characters",
        "link.py",
        '_REMOTE_COMMAND = re.compile(r"',
        '_REMOTE_COMMAND = re.compile(r"(?s).*|',
        ("tests/test_faults_races.py", "-k", "executed"),
    ),
]


def survives(mutation: Mutation, folder: Path) -> str:
    """Run the tests against the mutated copy; returns "" when they go red, else what happened instead."""
    for name in ("h3spool", "tests", "bench"):
        shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "setup.cfg", folder)
    target = folder / "h3spool" / mutation.file
    text = target.read_text()
    if text.count(mutation.old) != 1:
        return f"does not apply: its text occurs {text.count(mutation.old)} times in {mutation.file}"
    target.write_text(text.replace(mutation.old, mutation.new))
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "faults", *mutation.tests]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    summary = (done.stdout.strip().splitlines() or ["no output"])[-1]
    if done.returncode == 1 and "failed" in summary and "error" not in summary:
        return ""
    return f"SURVIVED: {summary}" if done.returncode == 0 else f"pytest exit {done.returncode}: {summary}"


def main() -> int:
    wanted = sys.argv[1:]
    chosen = [m for m in MUTATIONS if not wanted or any(word in m.safeguard for word in wanted)]
    alive = 0
    for mutation in chosen:
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="h3spool-mutation-") as folder:
            why = survives(mutation, Path(folder))
        alive += bool(why)
        print(f"{'red' if not why else 'NOT RED':8} {time.monotonic() - start:5.1f} s  {mutation.safeguard:52} {why}")
        sys.stdout.flush()
    print(f"{len(chosen) - alive} of {len(chosen)} safeguards are guarded by a test")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
