"""Placing the MP4 under its title: safe names, whole files, and nobody else's file is ever replaced."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import put

from h3spool.deliver import deliver, file_name, safe_stem
from h3spool.errors import IOFailed, NotPermitted
from h3spool.job import Job

# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("title", "stem"),
    [
        ("Cat on a roof", "Cat on a roof"),
        ("屋根の上の猫, 第1話", "屋根の上の猫, 第1話"),
        ("../../etc/passwd", "etc-passwd"),
        ("-rf *", "rf"),
        ("/", "job-1"),
        ("", "job-1"),
        ("...", "job-1"),
        (".hidden", "hidden"),
        ("a/b\\c:d", "a-b-c-d"),
        ('what? "this" <is> | it', "what- -this- -is- - it"),
        ("two\nlines\tand\0nul", "two lines and nul"),
        ("bidi \u202e trick\u200b", "bidi trick"),
        ("e\u0301", "é"),
        ("\udcff", "job-1"),
        ("trailing. ", "trailing"),
    ],
)
def test_titles_as_file_names(title, stem):
    assert safe_stem(title, "job-1") == stem


@pytest.mark.parametrize("number", [1, 2, 999])
@pytest.mark.parametrize("letter", ["x", "é", "猫", "🐈"])
def test_a_name_has_255_bytes_at_most_and_no_half_character(letter, number):
    name = file_name(letter * 300, number)
    assert 250 <= len(name.encode()) <= 255
    assert set(name.removesuffix(".mp4").removesuffix(f" ({number})")) == {letter}


def test_numbers_come_from_the_second_on():
    assert [file_name("猫", number) for number in (1, 2, 10)] == ["猫.mp4", "猫 (2).mp4", "猫 (10).mp4"]


# ---------------------------------------------------------------- placing


class Made:
    """A claimed job with a finished MP4."""

    def __init__(self, decoder, content: bytes = b"movie"):
        self.job = decoder.job("verified", put(decoder, "verified"))
        self.render(content)

    def render(self, content: bytes) -> None:
        self.job.write(f"{self.job.name}.mp4", content)
        self.digest = hashlib.sha256(content).hexdigest()

    def deliver(self, folder, title="Cat"):
        return deliver(self.job, self.job.file(".mp4"), self.digest, folder, title)


@pytest.fixture
def made(decoder) -> Made:
    return Made(decoder)


def listing(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_mp4_is_placed_as_a_link_and_the_receipt_says_where(made, tmp_path):
    folder = tmp_path / "new" / "Videos"
    path = made.deliver(folder)
    assert path == folder / "Cat.mp4"
    assert os.path.samefile(path, made.job.file(".mp4"))
    assert made.job.receipt()["delivered"] == {"path": str(path), "sha256": made.digest}
    assert listing(folder) == {"Cat.mp4": b"movie"}


def test_to_another_disk_it_is_copied(made):
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        if folder.stat().st_dev == made.job.path.stat().st_dev:
            pytest.skip("/dev/shm is on the same disk here")
        path = made.deliver(folder)
        assert listing(folder) == {"Cat.mp4": b"movie"}
        assert not os.path.samefile(path, made.job.file(".mp4"))
    finally:
        shutil.rmtree(folder)


def test_the_path_in_the_receipt_is_absolute(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made.deliver("out")
    assert made.job.receipt()["delivered"]["path"] == str(tmp_path / "out" / "Cat.mp4")


def test_a_clash_gets_a_number_and_other_files_stay(decoder, made, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "Cat.mp4").write_bytes(b"somebody else's")
    (tmp_path / "out" / "Cat (2).mp4").symlink_to("nowhere")
    assert made.deliver(tmp_path / "out").name == "Cat (3).mp4"
    assert Made(decoder).deliver(tmp_path / "out").name == "Cat (4).mp4"
    assert (tmp_path / "out" / "Cat.mp4").read_bytes() == b"somebody else's"
    assert not (tmp_path / "out" / "nowhere").exists()


def test_the_same_attempt_again_replaces_its_own_file(made, tmp_path):
    for content in (b"movie", b"movie", b"another movie"):
        made.render(content)
        made.deliver(tmp_path / "out")
        assert listing(tmp_path / "out") == {"Cat.mp4": content}
    assert made.job.receipt()["delivered"]["sha256"] == made.digest


def test_a_file_that_was_changed_or_taken_away_is_not_ours_any_more(made, tmp_path):
    made.deliver(tmp_path / "out").unlink()
    (tmp_path / "out" / "Cat.mp4").write_bytes(b"edited")
    made.render(b"second")
    assert made.deliver(tmp_path / "out").name == "Cat (2).mp4"
    (tmp_path / "out" / "Cat (2).mp4").unlink()
    assert made.deliver(tmp_path / "out").name == "Cat (2).mp4"
    assert (tmp_path / "out" / "Cat.mp4").read_bytes() == b"edited"


def test_a_receipt_from_afar_does_not_choose_what_is_replaced(made, tmp_path):
    """Receipts travel with pushed jobs: whoever knows a file's hash must not be able to have it replaced."""
    mine = tmp_path / "home" / "precious"
    mine.parent.mkdir()
    mine.write_bytes(b"precious")
    digest = hashlib.sha256(b"precious").hexdigest()
    made.job.write_receipt(made.job.receipt() | {"delivered": {"path": str(mine), "sha256": digest}})
    assert made.deliver(tmp_path / "out") == tmp_path / "out" / "Cat.mp4"
    assert mine.read_bytes() == b"precious"


@pytest.mark.parametrize("delivered", [None, 3, {}, {"path": 3}, {"path": "", "sha256": ""}, {"path": "x"}])
def test_a_strange_receipt_is_no_obstacle(made, tmp_path, delivered):
    made.job.write_receipt(made.job.receipt() | {"delivered": delivered})
    assert made.deliver(tmp_path / "out").name == "Cat.mp4"


def test_another_folder_gets_its_own_file(made, tmp_path):
    made.deliver(tmp_path / "a")
    made.deliver(tmp_path / "b")
    assert listing(tmp_path / "a") == listing(tmp_path / "b") == {"Cat.mp4": b"movie"}


DIE = """
import os, sys
from pathlib import Path
from h3spool.deliver import deliver
from h3spool.job import Job
from h3spool.spool import Spool
root, name, digest, folder, death = sys.argv[1:]
job = Job(Spool(root), name, Path(root, "verified", name))
real, calls = os.link, []
def link(source, target):
    if "Cat" in str(target):
        if death == "after":
            real(source, target)
        os.kill(os.getpid(), 9)
    real(source, target)
os.link = link
deliver(job, job.file(".mp4"), digest, Path(folder), "Cat")
"""


@pytest.mark.parametrize("death", ["before", "after"])
def test_a_death_around_the_placing_does_not_double(decoder, made, tmp_path, death):
    argv = [sys.executable, "-c", DIE, decoder.root, made.job.name, made.digest, tmp_path / "out", death]
    assert subprocess.run(argv, check=False).returncode == -9
    assert made.job.receipt()["delivered"]["path"] == str(tmp_path / "out" / "Cat.mp4")
    made.render(b"decoded again")
    made.deliver(tmp_path / "out")
    visible = {name: data for name, data in listing(tmp_path / "out").items() if not name.startswith(".")}
    assert visible == {"Cat.mp4": b"decoded again"}


def test_a_folder_that_cannot_be_written_to(made, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(IOFailed, match="delivering to"):
        made.deliver(tmp_path / "file")
    with pytest.raises((IOFailed, NotPermitted)):
        made.deliver("/proc/out")
    assert "delivered" not in json.loads(made.job.file(".pipeline.json").read_text())


def test_nothing_is_left_over_when_it_fails(decoder, made, tmp_path):
    job = Job(decoder, "other", decoder.root / "verified" / "nothing")
    with pytest.raises(IOFailed):
        deliver(job, tmp_path / "no.mp4", "", tmp_path / "out", "Cat")
    assert listing(tmp_path / "out") == {}
