"""Real ffmpeg on small clips; what was written is read back by a second, independent ffmpeg call."""

import os
import resource
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash

from h3spool import ffmpeg, media
from h3spool.errors import BadData, IOFailed, Unavailable

COLORS = np.array(
    [
        (74, 203, 221),
        (255, 0, 0),
        (0, 255, 0),
        (0, 0, 255),
        (255, 255, 255),
        (0, 0, 0),
        (128, 128, 128),
        (250, 180, 20),
    ],
    np.uint8,
)
PICTURE = media.Picture(width=128, height=64, frames=39)
TAGS = {"title": "Küche = 鍋\nStream #0:0: Video: h264", "comment": "h3spool job 20260101T000000000Z-a-12345678"}


@pytest.fixture(scope="module")
def exe():
    return ffmpeg.find()


def color_bars(frames=PICTURE.frames):
    return np.broadcast_to(np.repeat(COLORS, 16, axis=0), (frames, 64, 128, 3)).copy()


def noise(frames=PICTURE.frames, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (frames, 64, 128, 3), np.uint8)


def click(samples=52_000, at=32_000):
    sound = np.zeros((2, samples), np.float32)
    sound[0, at], sound[1, at] = 0.75, -0.5
    return sound


def in_clips(array, n=17):
    return (array[i : i + n] for i in range(0, len(array), n))


def decoded(exe, path, *arguments):
    argv = [exe, "-v", "error", "-i", f"file:{path}", *arguments, "-"]
    return subprocess.run(argv, capture_output=True, check=True).stdout


def frames_of(exe, path):
    argv = ["-vf", "settb=1/24,setpts=N,scale=in_color_matrix=bt709:flags=accurate_rnd+full_chroma_int"]
    raw = decoded(exe, path, *argv, "-r", "24", "-pix_fmt", "rgb24", "-f", "rawvideo")
    return np.frombuffer(raw, np.uint8).reshape(-1, 64, 128, 3)


def sound_of(exe, path):
    return np.frombuffer(decoded(exe, path, "-map", "0:a", "-f", "f32le"), np.float32).reshape(-1, 2).T


@pytest.fixture(scope="module")
def bars(exe, tmp_path_factory):
    """Flat colours and a click at 1 s, as MP4 and master in one pass."""
    folder = tmp_path_factory.mktemp("bars")
    mp4, master = folder / "-odd:name.part", folder / "master.part"
    facts = media.encode(
        exe, in_clips(color_bars()), in_clips_of_sound(click()), PICTURE, mp4=mp4, master=master, tags=TAGS
    )
    return mp4, master, facts


def in_clips_of_sound(sound):
    return (sound[:, i : i + 9600] for i in range(0, sound.shape[1], 9600))


def test_mp4_colours_are_right_to_2_of_255(exe, bars):
    got = frames_of(exe, bars[0])
    assert len(got) == 39
    centres = got[:, 32, 8::16].astype(int)
    assert np.abs(centres - COLORS).max() <= 2


def test_mp4_is_bt709_limited_with_both_streams_at_zero(bars):
    facts = bars[2]["mp4"]
    assert facts["frames"] == 39
    assert facts["duration_s"] == pytest.approx(39 / 24, abs=1e-6)
    assert facts["bytes"] == bars[0].stat().st_size
    assert facts["video"] == {
        "codec": "h264",
        "pix_fmt": "yuv420p",
        "range": "tv",
        "color": "bt709",
        "width": 128,
        "height": 64,
        "start_s": 0,
        "duration_s": 1.625,
    }
    assert facts["audio"] == {
        "codec": "aac",
        "sample_rate_hz": 48000,
        "channels": 2,
        "samples": 78000,
        "start_s": 0,
        "duration_s": 1.625,
    }


def test_mp4_index_stands_before_the_data(bars):
    data = bars[0].read_bytes()
    assert 0 < data.index(b"moov") < data.index(b"mdat")


def test_mp4_carries_title_and_job(exe, bars):
    text = decoded(exe, bars[0], "-f", "ffmetadata").decode()
    assert "Küche \\= 鍋" in text
    assert TAGS["comment"] in text


def test_click_stays_at_one_second_in_the_mp4(exe, bars):
    heard = sound_of(exe, bars[0])
    assert heard.shape == (2, 78000)
    peaks = np.abs(heard).argmax(axis=1)
    assert np.abs(peaks / 48000 - 1).max() < 0.0015
    assert heard[0, peaks[0]] > 0.2
    assert heard[1, peaks[1]] < -0.1


def test_master_reads_back_bit_equal(exe, tmp_path):
    frames, sound = noise(), np.random.default_rng(1).standard_normal((2, 52_000)).astype(np.float32)
    master = tmp_path / "m"
    facts = media.encode(exe, in_clips(frames), [sound], PICTURE, master=master)
    assert np.array_equal(frames_of(exe, master), frames)
    assert np.array_equal(sound_of(exe, master), sound)
    assert facts["frames_xxh3"] == xxhash.xxh3_128_hexdigest(frames)
    assert facts["sound_xxh3"] == xxhash.xxh3_128_hexdigest(np.ascontiguousarray(sound.T))
    assert facts["master"]["video"]["codec"] == "ffv1"
    assert facts["master"]["audio"]["codec"] == "pcm_f32le"
    assert "mp4" not in facts


def test_fingerprints_do_not_depend_on_the_chunks(exe, bars, tmp_path):
    facts = media.encode(exe, in_clips(color_bars(), 5), [click()], PICTURE, master=tmp_path / "m")
    assert [facts[k] for k in ("frames_xxh3", "sound_xxh3")] == [bars[2][k] for k in ("frames_xxh3", "sound_xxh3")]
    other = color_bars()
    other[38, 0, 0, 0] ^= 1
    assert media.encode(exe, [other], [click()], PICTURE, master=tmp_path / "m")["frames_xxh3"] != facts["frames_xxh3"]


def test_mux_from_the_master_gives_the_same_mp4(exe, bars, tmp_path):
    mp4 = tmp_path / "later.mp4"
    facts = media.mux(exe, bars[1], mp4, PICTURE, sound=True, tags=TAGS)
    assert facts["mp4"] == {**bars[2]["mp4"], "bytes": mp4.stat().st_size}
    assert np.array_equal(frames_of(exe, mp4), frames_of(exe, bars[0]))
    assert np.array_equal(sound_of(exe, mp4), sound_of(exe, bars[0]))


@pytest.mark.parametrize(("frames", "given"), [(5, 6400), (22, 29600), (5, 9000)])
def test_sound_is_cut_or_padded_never_stretched(exe, tmp_path, frames, given):
    picture = media.Picture(128, 64, frames)
    mp4, master = tmp_path / "v", tmp_path / "m"
    sound = click(given, at=3000)
    facts = media.encode(exe, [noise(frames)], [sound], picture, mp4=mp4, master=master)
    wanted = -(-frames * 4000 // 3)
    heard = sound_of(exe, master)
    assert heard.shape == (2, wanted)
    assert np.array_equal(heard[:, : min(given, wanted)], sound[:, :wanted])
    assert not heard[:, given:].any()
    assert facts["mp4"]["audio"]["samples"] == frames * 2000
    assert abs(np.abs(sound_of(exe, mp4)[0]).argmax() / 48000 - 3000 / 32000) < 0.0015


def test_a_clip_without_sound_has_one_stream(exe, tmp_path):
    mp4, master = tmp_path / "v", tmp_path / "m"
    facts = media.encode(exe, [noise(5)], None, media.Picture(128, 64, 5), mp4=mp4, master=master)
    assert facts["sound_xxh3"] is None
    assert facts["mp4"]["audio"] is None
    assert media.mux(exe, master, tmp_path / "v2", media.Picture(128, 64, 5), sound=False)["mp4"]["audio"] is None


@pytest.mark.parametrize(("codec", "preset", "named"), [("libx265", "ultrafast", "hevc"), ("libsvtav1", "12", "av1")])
def test_other_codecs(exe, tmp_path, codec, preset, named):
    encoding = media.Encoding(codec, quality=30, preset=preset)
    picture = media.Picture(128, 64, 5)
    facts = media.encode(exe, [color_bars(5)], None, picture, mp4=tmp_path / "v", encoding=encoding)
    assert facts["mp4"]["video"]["codec"] == named
    assert "-crf 30" in " ".join(facts["ffmpeg_args"])


def test_nvenc_gets_cq_and_without_the_device_is_unavailable(tmp_path):
    spy = script(tmp_path, 'echo "$@" >"$0.args"; echo "[error] Cannot load libcuda.so.1" >&2; exit 1')
    with pytest.raises(Unavailable, match="--codec"):
        media.encode(spy, [noise(5)], None, media.Picture(128, 64, 5), mp4=tmp_path / "v", encoding=nvenc())
    assert "-c:v h264_nvenc" in Path(f"{spy}.args").read_text()
    assert "-cq 22" in Path(f"{spy}.args").read_text()


def nvenc():
    return media.Encoding("h264_nvenc", quality=22)


def script(folder, body):
    """A stand-in for ffmpeg: answers -version, else runs `body`."""
    path = folder / "fake-ffmpeg"
    path.write_text(f'#!/bin/sh\n[ "$1" = -version ] && echo "ffmpeg version 0" && exit\n{body}\n')
    path.chmod(0o755)
    return str(path)


def endless():
    while True:
        yield noise(17)


def test_ffmpeg_that_dies_midway_is_explained_from_its_stderr(tmp_path):
    fake = script(tmp_path, 'head -c 100000 >/dev/null; for i in $(seq 300); do echo "line $i" >&2; done; exit 3')
    with pytest.raises(IOFailed, match=r"(?s)exit status 3.*line 300") as caught:
        media.encode(fake, endless(), None, media.Picture(128, 64, 10**6), mp4=tmp_path / "v")
    assert "line 5\n" not in str(caught.value)
    assert not (tmp_path / "v").exists()


def test_ffmpeg_that_reports_success_but_wrote_nothing_is_caught(exe, tmp_path):
    fake = script(tmp_path, f'case "$*" in *framecrc*) exec {exe} "$@";; esac; cat >/dev/null; exit 0')
    with pytest.raises(IOFailed, match="No such file"):
        media.encode(fake, [noise()], None, PICTURE, mp4=tmp_path / "v")


def test_an_unknown_codec_is_unavailable(exe, tmp_path):
    with pytest.raises(Unavailable, match="Unknown encoder 'h266'"):
        media.encode(exe, [noise()], None, PICTURE, mp4=tmp_path / "v", encoding=media.Encoding("h266"))


def test_a_missing_folder_is_an_io_failure(exe, tmp_path):
    with pytest.raises(IOFailed, match=r"(?s)absent/v.*No such file or directory"):
        media.encode(exe, [noise()], [click()], PICTURE, mp4=tmp_path / "absent" / "v")


def test_no_half_file_stays_when_a_file_cannot_grow(exe, tmp_path):
    mp4, master = tmp_path / "v", tmp_path / "m"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    try:
        with pytest.raises(IOFailed, match=r"File too large|signal 25"):
            media.encode(exe, in_clips(noise()), None, PICTURE, mp4=mp4, master=master)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_said(exe, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no mount here")
    try:
        with pytest.raises(IOFailed, match="no space left on the disk"):
            media.encode(exe, in_clips(noise()), [click()], PICTURE, master=disk / "m")
        assert os.listdir(disk) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def children():
    """Names of this process's children, the dead that nobody reaped among them."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = status.read_text().rsplit(")", 1)
        except OSError:  # it has ended meanwhile
            continue
        if int(fields.split()[1]) == os.getpid():
            found.append(name.split("(")[1])
    return found


def test_an_exception_in_the_frames_kills_reaps_and_removes(exe, tmp_path):
    mp4 = tmp_path / "v"

    def failing():
        yield noise(17)
        for _ in range(100):  # until ffmpeg has opened its output
            if mp4.exists():
                break
            time.sleep(0.05)
        assert mp4.exists()
        assert any("ffmpeg" in name for name in children())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        media.encode(exe, failing(), None, PICTURE, mp4=mp4)
    assert not mp4.exists()
    assert children() == []


def test_ffmpeg_dies_with_a_killed_h3spool(exe, tmp_path):
    code = """if True:
        import sys, time, numpy as np
        from pathlib import Path
        from h3spool import media
        def frames():
            yield np.zeros((5, 64, 128, 3), np.uint8)
            print("fed", flush=True)
            time.sleep(60)
        media.encode(sys.argv[1], frames(), None, media.Picture(128, 64, 9), mp4=Path(sys.argv[2]))
    """
    mp4 = tmp_path / "orphan-probe"
    parent = subprocess.Popen([sys.executable, "-c", code, exe, str(mp4)], stdout=subprocess.PIPE)
    parent.stdout.readline()
    assert running_on(mp4)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while running_on(mp4) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not running_on(mp4)


def running_on(path):
    """Ids of the processes whose last argument is the URL of `path`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().endswith(f"file:{path}\0".encode()):
                found.append(folder.name)
        except OSError:  # it has ended meanwhile
            continue
    return found


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([noise(38)], "38 frames, not 39"),
        ([noise(39), noise(17)], "at least 56 frames, not 39"),
        ([noise(39)[:, :48]], r"uint8 \[39, 48, 128, 3\]"),
        ([noise(39).astype(np.float32)], "float32"),
    ],
)
def test_frames_that_are_not_as_announced_are_refused(exe, tmp_path, frames, said):
    with pytest.raises(BadData, match=said):
        media.encode(exe, frames, None, PICTURE, mp4=tmp_path / "v")
    assert os.listdir(tmp_path) == []


def test_sound_of_another_shape_is_refused(exe, tmp_path):
    with pytest.raises(BadData, match=r"float32 \[52000, 2\]"):
        media.encode(exe, [noise()], [click().T], PICTURE, mp4=tmp_path / "v")


def test_an_odd_size_is_refused(exe, tmp_path):
    with pytest.raises(BadData, match="even width and height, not 127x64"):
        media.encode(exe, [], None, media.Picture(127, 64, 5), mp4=tmp_path / "v")


def test_a_damaged_master_is_not_muxed(exe, tmp_path):
    master = tmp_path / "m"
    media.encode(exe, [noise(5)], None, media.Picture(128, 64, 5), master=master)
    data = bytearray(master.read_bytes())
    data[len(data) // 2] ^= 0x40  # in a slice: ffmpeg complains of its CRC and exits 0
    master.write_bytes(data)
    with pytest.raises(IOFailed, match="CRC mismatch"):
        media.probe(exe, master)
    with pytest.raises(IOFailed, match="CRC mismatch"):
        media.mux(exe, master, tmp_path / "v", media.Picture(128, 64, 5), sound=False)
    assert not (tmp_path / "v").exists()


def test_a_truncated_mp4_is_refused(exe, bars, tmp_path):
    short = tmp_path / "short.mp4"
    short.write_bytes(bars[0].read_bytes()[:-2000])
    with pytest.raises(IOFailed):
        media.check(exe, short, PICTURE, sound=True)


@pytest.mark.parametrize(
    ("picture", "sound", "said"),
    [
        (media.Picture(128, 64, 56), True, "with 39 frames"),
        (media.Picture(64, 64, 39), True, "its picture is 128x64"),
        (PICTURE, False, "it has a sound track"),
        (media.Picture(128, 64, 22), True, r"its sound lasts 1.6250 s"),
    ],
)
def test_check_says_what_differs(exe, bars, picture, sound, said):
    with pytest.raises(IOFailed, match=said):
        media.check(exe, bars[0], picture, sound=sound)


def test_check_refuses_untagged_colours_and_late_sound(exe, tmp_path):
    odd = tmp_path / "odd.mp4"
    argv = [exe, "-v", "error", "-f", "lavfi", "-i", "color=s=128x64:r=24:d=1.625", "-itsoffset", "0.5"]
    argv += ["-f", "lavfi", "-i", "sine=d=1.625", "-pix_fmt", "yuv420p", str(odd)]
    subprocess.run(argv, check=True)
    with pytest.raises(IOFailed, match=r"its colours are yuv420p None None.*a stream does not start at 0"):
        media.check(exe, odd, PICTURE, sound=True)


def test_probe_of_something_else_is_an_io_failure(exe, tmp_path):
    (tmp_path / "x").write_text("not a film")
    with pytest.raises(IOFailed, match="Invalid data"):
        media.probe(exe, tmp_path / "x")
    with pytest.raises(IOFailed, match="No such file"):
        media.probe(exe, tmp_path / "absent")


def test_ffmpeg_is_found_and_names_its_version():
    assert ffmpeg.version(ffmpeg.find())[0].isdigit()


def test_a_missing_or_wrong_ffmpeg_is_unavailable(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("x")
    plain.chmod(stat.S_IRUSR)
    for override in (str(tmp_path / "absent"), str(plain), "no-such-ffmpeg-anywhere"):
        with pytest.raises(Unavailable, match="--ffmpeg"):
            ffmpeg.find(override)
    with pytest.raises(Unavailable, match="does not answer like ffmpeg"):
        ffmpeg.find("/bin/echo")
    with pytest.raises(Unavailable, match="does not run"):
        ffmpeg.find("/bin/false")
