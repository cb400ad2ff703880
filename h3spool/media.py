"""Media files: frames and samples to a lossless master and an MP4, and what is in such a file.

Frames are uint8 `[n, H, W, 3]` (R, G, B, full range) at 24 frames a second; sound is float32 `[2, n]` (left, right) at
32 kHz. In one pass they become

* the master: Matroska, FFV1 level 3 `gbrp` with a CRC in each of 4 slices, float PCM; it reads back bit-equal;
* the MP4: yuv420p in BT.709 by conversion and by tags, limited range, AAC 192k at 48 kHz (soxr), `+faststart`.

Sound is cut or padded with silence to the length of the picture, never stretched. Outputs go to the paths given
(temporary names of the caller), are removed again on any failure, and are not fsynced. There is no ffprobe: `probe`
decodes the whole file and reads what ffmpeg prints. ffmpeg is killed and reaped on any exception, and dies with the
thread that started it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import subprocess
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from h3spool.errors import BadData, IOFailed
from h3spool.ffmpeg import QUIET, Ffmpeg, version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import IO

    import numpy as np

FRAME_RATE = 24
SOUND_HZ = 32_000  # what the audio VAE decodes to, and the master's rate
MP4_SOUND_HZ = 48_000
SOUND_TOLERANCE_S = 1024 / MP4_SOUND_HZ  # one AAC frame

# Converting *and* tagging: either alone shifts the colours. setpts: Matroska stamps whole milliseconds, so count again.
TO_BT709 = (
    f"settb=1/{FRAME_RATE},setpts=N,"
    "scale=in_range=pc:out_range=tv:out_color_matrix=bt709:flags=accurate_rnd+full_chroma_int+lanczos,format=yuv420p,"
    "setparams=range=tv:color_primaries=bt709:color_trc=bt709:colorspace=bt709"
)
BT709_TAGS = shlex.split("-color_primaries bt709 -color_trc bt709 -colorspace bt709 -color_range tv")
MASTER = shlex.split("-c:v ffv1 -level 3 -g 1 -slices 4 -slicecrc 1 -pix_fmt gbrp -c:a pcm_f32le -f matroska")
DECODE = shlex.split("-map 0:v:0? -map 0:a:0? -fps_mode passthrough -enc_time_base:v 1:90000 -f framecrc -")


@dataclass(frozen=True)
class Encoding:
    """How the MP4's picture is compressed.

    `codec` is an encoder of ffmpeg (`libx264`, `h264_nvenc`, `hevc_nvenc`, `libx265`, `libsvtav1`, ...), `quality` its
    `-crf`, for nvenc `-cq` (smaller is better), `preset` is the encoder's own word (None: its default).
    """

    codec: str = "libx264"
    quality: int = 17
    preset: str | None = None


@dataclass(frozen=True)
class Picture:
    """The size of a video: `width` and `height` in pixels, both even (H3's are multiples of 16), and `frames`."""

    width: int
    height: int
    frames: int

    @property
    def duration_s(self) -> float:
        """Length in seconds at 24 frames a second."""
        return self.frames / FRAME_RATE


def encode(
    exe: str,
    frames: Iterable[np.ndarray],
    sound: Iterable[np.ndarray] | None,
    picture: Picture,
    *,
    mp4: Path | None = None,
    master: Path | None = None,
    encoding: Encoding | None = None,
    tags: Mapping[str, str] | None = None,
) -> dict:
    """Encode streamed frames and sound to `mp4` and/or `master` in one pass, and check what was written.

    Args:
        frames: uint8 `[n, H, W, 3]` clips, any n, in all exactly `picture.frames`; taken one at a time.
        sound: float32 `[2, n]` chunks at 32 kHz, all of them read before the first frame; None: no sound track.
        encoding: of the MP4; None: H.264, CRF 17.
        tags: metadata of both files: `title`, `comment`.

    Returns:
        `ffmpeg` (version), `ffmpeg_args`, `encode_s` (wall clock), `frames_xxh3` and `sound_xxh3` (XXH3-128 of the
        bytes as the master holds them; None without sound), `mp4` and `master`: the `probe` of each file asked for.

    Raises:
        BadData: frames or sound of another shape, type or number than announced, or an odd size.
        Unavailable: ffmpeg or the encoder is missing.
        IOFailed: ffmpeg failed or the disk is full; the last lines of ffmpeg say why.
    """
    import xxhash

    if picture.width % 2 or picture.height % 2:
        raise BadData(f"an MP4 needs an even width and height, not {picture.width}x{picture.height}")
    started = time.monotonic()
    digest = xxhash.xxh3_128()
    track = None if sound is None else _interleaved(sound, -(-picture.frames * SOUND_HZ // FRAME_RATE))
    with _removed_on_failure(mp4, master), open(os.memfd_create("sound"), "wb+") as memory:
        argv = [exe, *QUIET, "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{picture.width}x{picture.height}"]
        argv += ["-r", str(FRAME_RATE), "-i", "pipe:0"]
        maps = ["-map", "0:v"]
        if track is not None:
            memory.write(track)
            memory.seek(0)
            argv += ["-f", "f32le", "-ar", str(SOUND_HZ), "-ac", "2", "-i", f"pipe:{memory.fileno()}"]
            maps += ["-map", "1:a"]
        if mp4 is not None:
            argv += [*maps, *_mp4_arguments(picture, encoding, tags), _url(mp4)]
        if master is not None:
            argv += [*maps, *MASTER, *_metadata(tags), _url(master)]
        with Ffmpeg(argv, pass_fds=(memory.fileno(),)) as child:
            for block in _checked_frames(frames, picture):
                digest.update(block)
                child.write(block)
        facts = {**_run_facts(exe, argv, started), "frames_xxh3": digest.hexdigest()}
        facts["sound_xxh3"] = None if track is None else xxhash.xxh3_128_hexdigest(track)
        for name, path in (("mp4", mp4), ("master", master)):
            if path is not None:
                facts[name] = check(exe, path, picture, sound=track is not None)
    return facts


def mux(
    exe: str,
    master: Path,
    mp4: Path,
    picture: Picture,
    *,
    sound: bool,
    encoding: Encoding | None = None,
    tags: Mapping[str, str] | None = None,
) -> dict:
    """Encode `master` to `mp4`, the same MP4 that `encode` writes in one pass, and check it.

    `picture` and `sound` (is there a track) say what the master must hold; the rest is as in `encode`.

    Returns:
        `ffmpeg`, `ffmpeg_args`, `encode_s` and `mp4` as `encode` does.

    Raises:
        Unavailable: ffmpeg or the encoder is missing.
        IOFailed: the master is damaged or another one, ffmpeg failed, or the disk is full.
    """
    started = time.monotonic()
    with _removed_on_failure(mp4):
        argv = [exe, *QUIET, "-i", _url(master), "-map", "0:v", *(["-map", "0:a"] if sound else [])]
        argv += [*_mp4_arguments(picture, encoding, tags), _url(mp4)]
        with Ffmpeg(argv):
            pass
        return {**_run_facts(exe, argv, started), "mp4": check(exe, mp4, picture, sound=sound)}


def probe(exe: str, path: Path) -> dict:
    """Decode the whole of `path` and return what is in it.

    Returns:
        `bytes`, `duration_s` (of the longer stream), `frames`, `video` (`codec`, `pix_fmt`, `range`, `color`, `width`,
        `height`, `start_s`, `duration_s`), `audio` (`codec`, `sample_rate_hz`, `channels`, `samples`, `start_s`,
        `duration_s`). What a file has not is None.

    Raises:
        Unavailable: ffmpeg is missing.
        IOFailed: the file is missing, damaged, or nothing that ffmpeg reads.
    """
    argv = [exe, *QUIET, "-loglevel", "level+info", "-i", _url(path), *DECODE]
    with Ffmpeg(argv, stdout=subprocess.PIPE) as child:
        child.process.stdin.close()
        streams = _decoded_streams(child.process.stdout)
    facts: dict = {"bytes": path.stat().st_size, "frames": 0, "video": None, "audio": None}
    facts["duration_s"] = max((s["start_s"] + s["duration_s"] for s in streams), default=0.0)
    for stream in streams:
        kind = stream["media_type"]
        timing = {key: stream[key] for key in ("start_s", "duration_s")}
        facts[kind] = {**_described(child.lines, kind), **timing}
        if kind == "video":
            facts["frames"] = stream["packets"]
        else:
            facts[kind]["samples"] = round(stream["duration_s"] * facts[kind]["sample_rate_hz"])
    return facts


def check(exe: str, path: Path, picture: Picture, *, sound: bool) -> dict:
    """Return the `probe` of an MP4 or master that is as it must be.

    That is: `picture.frames` frames of its size, in an MP4 BT.709 yuv420p in limited range; a sound track if and only
    if `sound`, frames / 24 s long to within one AAC frame (21.3 ms at 48 kHz); both start at 0.

    Raises:
        Unavailable: ffmpeg is missing.
        IOFailed: it is not, or cannot be decoded.
    """
    facts = probe(exe, path)
    video, audio = facts["video"] or {}, facts["audio"] or {}
    got = video.get("width"), video.get("height"), facts["frames"]
    color = video.get("pix_fmt"), video.get("range"), video.get("color")
    wrong = []
    if got != (picture.width, picture.height, picture.frames):
        wrong.append("its picture is {}x{} with {} frames".format(*got))
    if video and video["codec"] != "ffv1" and color != ("yuv420p", "tv", "bt709"):
        wrong.append("its colours are {} {} {}, not yuv420p tv bt709".format(*color))
    if bool(audio) != sound:
        wrong.append("it has a sound track" if audio else "it has no sound track")
    if audio and abs(audio["duration_s"] - picture.duration_s) > SOUND_TOLERANCE_S:
        wrong.append(f"its sound lasts {audio['duration_s']:.4f} s")
    if video.get("start_s") or audio.get("start_s"):
        wrong.append("a stream does not start at 0")
    if wrong:
        raise IOFailed(
            f"{path}: ffmpeg reported success, but {', '.join(wrong)}; expected {picture.width}x{picture.height}, "
            f"{picture.frames} frames, {picture.duration_s:.4f} s {'with' if sound else 'without'} sound"
        )
    return facts


def _mp4_arguments(picture: Picture, encoding: Encoding | None, tags: Mapping[str, str] | None) -> list[str]:
    encoding = encoding or Encoding()
    argv = ["-vf", TO_BT709, "-r", str(FRAME_RATE), "-c:v", encoding.codec, *BT709_TAGS]
    if encoding.codec.endswith("_nvenc"):
        argv += ["-rc", "vbr", "-cq", str(encoding.quality), "-b:v", "0"]
    else:
        argv += ["-crf", str(encoding.quality)]
    if encoding.preset is not None:
        argv += ["-preset", encoding.preset]
    if encoding.codec.startswith("hevc") or encoding.codec == "libx265":
        argv += ["-tag:v", "hvc1"]  # the spelling that Apple's players accept
    samples = picture.frames * MP4_SOUND_HZ // FRAME_RATE
    argv += ["-af", f"aresample={MP4_SOUND_HZ}:resampler=soxr,apad=whole_len={samples},atrim=end_sample={samples}"]
    argv += ["-c:a", "aac", "-b:a", "192k", "-ar", str(MP4_SOUND_HZ)]
    return [*argv, *_metadata(tags), "-movflags", "+faststart", "-f", "mp4"]


def _metadata(tags: Mapping[str, str] | None) -> list[str]:
    pairs = (("-metadata", f"{key}={value}".replace("\0", "")) for key, value in (tags or {}).items())
    return ["-map_metadata", "-1", *itertools.chain.from_iterable(pairs)]  # nothing but ours


def _url(path: Path) -> str:
    return f"file:{path}"  # a colon or a leading dash in a name stays part of the name


def _run_facts(exe: str, argv: list[str], started: float) -> dict:
    return {"ffmpeg": version(exe), "ffmpeg_args": argv[1:], "encode_s": round(time.monotonic() - started, 3)}


def _checked_frames(frames: Iterable[np.ndarray], picture: Picture) -> Iterator[memoryview]:
    import numpy as np

    seen, size = 0, (picture.height, picture.width, 3)
    for clip in frames:
        if clip.dtype != np.uint8 or clip.ndim != 4 or clip.shape[1:] != size:
            raise BadData(f"decoded frames are {clip.dtype} {list(clip.shape)}, not uint8 [n, H, W, 3] = {size}")
        seen += len(clip)
        if seen > picture.frames:
            break
        yield memoryview(np.ascontiguousarray(clip)).cast("B")
    if seen != picture.frames:
        raise BadData(f"the decoder gave {'at least ' * (seen > picture.frames)}{seen} frames, not {picture.frames}")


def _interleaved(sound: Iterable[np.ndarray], samples: int) -> np.ndarray:
    """Join the chunks to float32 `[samples, 2]`, cut or padded with silence."""
    import numpy as np

    track, end = np.zeros((samples, 2), "<f4"), 0
    for chunk in sound:
        if chunk.dtype != np.float32 or chunk.ndim != 2 or len(chunk) != 2:
            raise BadData(f"decoded sound is {chunk.dtype} {list(chunk.shape)}, not float32 [2, n]")
        part = chunk[:, : samples - end].T
        track[end : end + len(part)] = part
        end += len(part)
    return track


@contextlib.contextmanager
def _removed_on_failure(*paths: Path | None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for path in filter(None, paths):
            path.unlink(missing_ok=True)
        raise


def _decoded_streams(framecrc: IO[bytes]) -> list[dict]:
    """Read ffmpeg's framecrc: per stream its kind, the packets, when it starts and how long it lasts."""
    streams: dict[int, dict] = {}
    for raw in framecrc:
        line = raw.decode()
        if header := re.match(r"#(tb|media_type) (\d+): (\S+)", line):
            stream = streams.setdefault(int(header[2]), {"packets": 0, "start": 0, "end": 0})
            stream[header[1]] = header[3]
        elif not line.startswith("#"):
            index, _dts, pts, duration = (int(field) for field in line.split(",")[:4])
            stream = streams[index]
            if not stream["packets"]:
                stream["start"] = pts
            stream["packets"] += 1
            stream["end"] = pts + duration
    for stream in streams.values():
        start, end = (stream.pop(edge) * Fraction(stream["tb"]) for edge in ("start", "end"))
        stream |= {"start_s": round(float(start), 6), "duration_s": round(float(end - start), 6)}
    return list(streams.values())


def _described(lines: Iterable[str], kind: str) -> dict:
    """Read what ffmpeg prints about an input's first stream of `kind`: `Stream #0:0: Video: h264 (High), ...`."""
    found = (re.match(rf"(\[info\])? *Stream #0:.*?: {kind.title()}: ((\w+).*)", line) for line in lines)
    _, text, codec = next(match for match in found if match).groups()
    if kind == "audio":
        rate, layout = re.search(r"(\d+) Hz, (\w+)", text).groups()
        return {"codec": codec, "sample_rate_hz": int(rate), "channels": {"mono": 1, "stereo": 2}.get(layout)}
    pixels, notes, width, height = re.search(r", (\w+)(?:\(([^)]*)\))?, (\d+)x(\d+)", text).groups()
    words = [note.strip() for note in (notes or "").split(",")]
    span = next((word for word in words if word in ("tv", "pc")), None)
    color = next((word for word in words if re.match(r"bt|smpte|gbr|\w+/", word)), None)
    size = {"width": int(width), "height": int(height)}
    return {"codec": codec, "pix_fmt": pixels, "range": span, "color": color, **size}
