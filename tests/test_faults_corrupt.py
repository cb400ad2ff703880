"""Thousands of damaged files: nothing that differs from what was exported reaches verified/ or a peer."""

import hashlib
import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from faultlib import FULL, World, memory_folder, places, say, where, write_clip
from faultworlds import PUSH, admit_argv

pytestmark = pytest.mark.faults
BATCH = 500
DAMAGES = (10_000 if FULL else 500) // 4  # a quarter for each way in


@pytest.fixture
def world():
    with memory_folder() as folder:
        yield World(folder / "world").create()


class Clips:
    """Good latents, and files damaged in every way a disk, a link or a person has."""

    def __init__(self, folder: Path, seed: int):
        self.draw = random.Random(seed)
        self.raws = [write_clip(folder / f"clip{n}.h3latent", n).read_bytes() for n in range(6)]

    def flip(self, data: bytes) -> bytes:
        at = self.draw.randrange(len(data) * 8)
        return data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :]

    def truncate(self, data: bytes) -> bytes:
        return data[: self.draw.randrange(len(data))]

    def zero_fill(self, data: bytes) -> bytes:
        begin = self.draw.randrange(len(data))
        end = self.draw.randrange(begin, len(data)) + 1
        return data[:begin] + b"\0" * (end - begin) + data[end:]

    def lose_the_tail(self, data: bytes) -> bytes:
        """What a power cut leaves: the length, and zeros from some block on."""
        begin = self.draw.randrange(0, len(data), 512)
        return data[:begin] + b"\0" * (len(data) - begin)

    def pad(self, data: bytes) -> bytes:
        return data + self.draw.randbytes(self.draw.randint(1, 4096))

    def shuffle(self, data: bytes) -> bytes:
        cut = self.draw.randrange(len(data))
        return data[cut:] + data[:cut]

    def empty(self, _data: bytes) -> bytes:
        return b""

    def another(self, data: bytes) -> bytes:
        """A swapped file: a good latent of another job."""
        return self.draw.choice([raw for raw in self.raws if raw != data])

    @property
    def ways(self) -> list:
        return [self.flip, self.flip, self.truncate, self.zero_fill, self.lose_the_tail, self.pad, self.shuffle,
                self.empty, self.another]  # fmt: skip


def damage(clips: Clips, raw: bytes, name: str) -> tuple[bytes, bytes, str]:
    """A latent and its sidecar of which one is damaged, or both were swapped with another job's; and the way."""
    sidecar = f"{hashlib.sha256(raw).hexdigest()}  {name}.h3latent\n".encode()
    way = clips.draw.choice(clips.ways)
    kind = clips.draw.random()
    if kind < 0.7:
        return way(raw), sidecar, f"latent: {way.__name__}"
    if kind < 0.9 and way != clips.another:
        return raw, way(sidecar), f"sidecar: {way.__name__}"
    other = clips.another(raw)
    swapped = f"{hashlib.sha256(other).hexdigest()}  job-of-another.h3latent\n".encode()
    return other, swapped, "both swapped"


def put_job(folder: Path, name: str, raw: bytes, sidecar: bytes) -> None:
    folder.mkdir(mode=0o700, parents=True)
    (folder / f"{name}.h3latent").write_bytes(raw)
    (folder / f"{name}.h3latent.sha256").write_bytes(sidecar)
    account = {"h3spool_receipt": 1, "job": name, "title": "", "latent": {}, "producer": {}, "events": []}
    (folder / f"{name}.pipeline.json").write_text(json.dumps(account))


def judge(spool: Path, states: tuple[str, ...], good: dict[str, bytes], ways: dict[str, str]) -> Counter:
    """Every job in these states holds the bytes of its name; returns how many were there although they were touched."""
    harmless = Counter()
    for state, path in places(spool):
        if state in states:
            assert (path / f"{path.name}.h3latent").read_bytes() == good[path.name], f"{path}: {ways[path.name]}"
            harmless[ways[path.name]] += 1
    return harmless


def clear(spool: Path) -> None:
    for _, path in list(places(spool)):
        shutil.rmtree(path)


def report(what: str, tried: int, harmless: Counter) -> None:
    say(f"corruptions: {tried} {what}: 0 damaged latents got through; {sum(harmless.values())} good ones did, whose "
        f"sidecar was touched where it means nothing {dict(harmless) or ''}")  # fmt: skip
    assert sum(harmless.values()) < tried / 10
    assert all(way.startswith("sidecar") for way in harmless)


def batches() -> list[int]:
    return [min(BATCH, DAMAGES - done) for done in range(0, DAMAGES, BATCH)]


def test_none_of_many_damaged_jobs_reaches_verified(world):
    clips, harmless, number = Clips(world.root, 1), Counter(), 0
    for size in batches():
        good, ways = {}, {}
        for _ in range(size):
            name, number = f"job-{number:05d}", number + 1
            good[name] = clips.draw.choice(clips.raws)
            raw, sidecar, ways[name] = damage(clips, good[name], name)
            put_job(world.decoder / "incoming" / name, name, raw, sidecar)
        world.ok("verify", "-s", world.decoder, codes=(65,), timeout_s=300)
        harmless += judge(world.decoder, ("verified", "done"), good, ways)
        assert Counter(state for state, _ in places(world.decoder)).keys() <= {"verified", "failed"}
        clear(world.decoder)
    report("jobs in incoming/", number, harmless)


def test_none_of_many_damaged_loose_pairs_is_adopted(world):
    clips, harmless, number = Clips(world.root, 2), Counter(), 0
    for size in batches():
        good, ways = {}, {}
        for _ in range(size):
            stem, number = f"pair{number:05d}", number + 1
            raw = clips.draw.choice(clips.raws)
            good[stem] = raw
            changed, sidecar, ways[stem] = damage(clips, raw, stem)
            if ways[stem] == "both swapped":  # a whole pair under another name is a whole pair
                changed, ways[stem] = b"", "latent: empty"
            (world.decoder / "incoming" / f"{stem}.h3latent").write_bytes(changed)
            (world.decoder / "incoming" / f"{stem}.sha256").write_bytes(sidecar)
        world.ok("verify", "-s", world.decoder, codes=(65,), clock_s=3600, timeout_s=300)
        renamed = {path.name: path.name[:9] for _, path in places(world.decoder)}
        harmless += judge(world.decoder, ("verified",), {n: good[stem] for n, stem in renamed.items()},
                          {n: ways[stem] for n, stem in renamed.items()})  # fmt: skip
        assert [name for name in os.listdir(world.decoder / "incoming") if name.startswith("pair")] == []
        clear(world.decoder)
    report("loose pairs", number, harmless)


def test_none_of_many_damaged_transfers_is_admitted(world):
    """The manifest is right, a file that arrived is not."""
    clips, number = Clips(world.root, 3), 0
    run = world.decoder / "tmp" / f"push-{'1' * 8}-{'1' * 4}-{'1' * 4}-{'1' * 4}-{'1' * 12}-0-{'1' * 16}"
    for size in batches():
        lines = []
        for _ in range(size):
            name, number = f"job-{number:05d}", number + 1
            raw = clips.draw.choice(clips.raws)
            put_job(run / name, name, raw, f"{hashlib.sha256(raw).hexdigest()}  {name}.h3latent\n".encode())
            files = [(f, f.read_bytes()) for f in sorted((run / name).iterdir())]
            listed = [{"name": f.name, "size": len(d), "sha256": hashlib.sha256(d).hexdigest()} for f, d in files]
            lines.append(json.dumps({"job": name, "files": listed}))
            file, data = clips.draw.choice(files)
            changed = clips.draw.choice(clips.ways)(data)
            file.write_bytes(changed if changed != data else data + b"x")
        done = world.ok(*admit_argv(world), stdin=("\n".join(lines) + "\n\n").encode(), timeout_s=300)
        answers = [json.loads(line) for line in done.out.splitlines()[1:]]
        assert {answer["exit"] for answer in answers} == {75}
        assert len(answers) == size
        assert list(places(world.decoder)) == []
        shutil.rmtree(run)
    say(f"corruptions: {number} transfers: none admitted")


def test_none_of_many_jobs_damaged_after_verify_leaves_the_sampler(world):
    """The disk rots between verify and push: the peer does not get it, the job fails here with the reason."""
    clips, number = Clips(world.root, 4), 0
    for size in batches():
        good = {}
        for _ in range(size):
            name, number = f"job-{number:05d}", number + 1
            good[name] = clips.draw.choice(clips.raws)
            way = clips.draw.choice(clips.ways)
            raw = way(good[name])
            raw = raw if raw != good[name] else raw + b"x"
            sidecar = f"{hashlib.sha256(good[name]).hexdigest()}  {name}.h3latent\n".encode()
            put_job(world.sampler / "verified" / name, name, raw, sidecar)
        world.ok(*PUSH, world.decoder, "-s", world.sampler, codes=(65,), timeout_s=300)
        assert list(places(world.decoder)) == []
        assert Counter(state for state, _ in places(world.sampler)) == {"failed": size}
        clear(world.sampler)
    say(f"corruptions: {number} jobs that rotted after verify: none pushed")


@pytest.mark.parametrize("place", ["the job", "the latent", "the sidecar", "the receipt"])
def test_a_link_is_followed_nowhere(world, place):
    """A good job of which a part is a symbolic link to something outside."""
    outside = world.root / "outside"
    raw = write_clip(world.root / "clip.h3latent").read_bytes()
    put_job(outside, "job-1", raw, f"{hashlib.sha256(raw).hexdigest()}  job-1.h3latent\n".encode())
    before = {path.name: path.read_bytes() for path in outside.iterdir()}
    job = world.decoder / "incoming" / "job-1"
    if place == "the job":
        job.symlink_to(outside)
    else:
        shutil.copytree(outside, job)
        suffix = {"the latent": ".h3latent", "the sidecar": ".h3latent.sha256", "the receipt": ".pipeline.json"}[place]
        (job / f"job-1{suffix}").unlink()
        (job / f"job-1{suffix}").symlink_to(outside / f"job-1{suffix}")
    world.run("verify", "-s", world.decoder, clock_s=3600)
    assert where(world.decoder, "job-1") in ([], ["incoming"], ["failed"])
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == before


@pytest.mark.parametrize("place", ["the loose latent", "the loose checksum"])
def test_a_loose_link_is_not_adopted(world, place):
    raw = write_clip(world.root / "clip.h3latent").read_bytes()
    (world.root / "secret").write_bytes(raw)
    (world.root / "secret.sha256").write_text(f"{hashlib.sha256(raw).hexdigest()}  pair.h3latent\n")
    incoming = world.decoder / "incoming"
    for name, target, linked in (
        ("pair.h3latent", world.root / "secret", place == "the loose latent"),
        ("pair.sha256", world.root / "secret.sha256", place == "the loose checksum"),
    ):
        (incoming / name).symlink_to(target) if linked else shutil.copy(target, incoming / name)
    world.run("verify", "-s", world.decoder, clock_s=3600)
    assert [state for state, _ in places(world.decoder) if state == "verified"] == []
    assert (world.root / "secret").read_bytes() == raw
