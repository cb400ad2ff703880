"""Latent -> frames and waveform, on one device, with both decoders kept warm between jobs.

Frames leave one temporal clip at a time (17 frames, and the 5-frame tail last), so that nothing is longer than a clip.
8-bit values are round-half-to-even of 255 times the clamped pixel. A thread decodes the next clip while the caller
encodes this one.
"""

import contextlib
import ctypes
import fcntl
import math
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from h3spool.errors import BadData, NotUsable, TryLater, Unavailable, explained
from h3spool.vae import cpu, int8, tiling, video, weights

# Read by PyTorch at its first allocation: most memory here is buffers of 15-240 MB, fresh in every block, and faulting
# one in by 4 KiB pages takes longer than casting a weight into it (measured: 92 ms for 134 MB, 28 ms by huge pages).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

PRECISIONS = ("auto", "int8", "fp16", "bf16", "fp32")
SEAMS = ("composited", "official")
ROWS_CPU, ROWS_CUDA = 3600, 14400  # tokens per product: two full tiles (more was not faster) and eight (unmeasured)
DTYPES = {"int8": torch.int8, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Decoder:
    """Both decoders, loaded and kept warm between jobs.

    Args:
        video_vae: file or folder of the video VAE.
        audio_vae: of the audio VAE; None decodes no sound.
        precision: one of PRECISIONS. "auto" is bf16 on a CPU that has it, else fp32; fp16 on CUDA.
        device: "auto", "cpu", "cuda" or "cuda:N".
        seams: one of SEAMS.
        progress: called with (clips done, clips in all) after each clip, in the decoding thread.
        alive: called whenever a part of a clip is done: a large clip takes minutes on a CPU.

    Attributes:
        facts: what the receipt says of the engine and its checkpoints.

    Raises:
        NotFound, NotUsable, IOFailed: as `vae.weights.load_video`.
        Unavailable: there is no such device.
    """

    def __init__(
        self,
        video_vae: Path,
        audio_vae: Path | None,
        *,
        precision: str = "auto",
        device: str = "auto",
        seams: str = "composited",
        progress: Callable[[int, int], None] | None = None,
        alive: Callable[[], None] = lambda: None,
    ):
        start = time.monotonic()
        self._device = _device(device)
        self._precision = _precision(precision, self._device, quantised=weights.is_int8(video_vae))
        self._seams, self._progress, self._alive = seams, progress, alive
        self._video, video_facts = weights.load_video(video_vae, DTYPES[self._precision], self._device)
        self._width = video_facts["width"]
        self._audio, audio_facts = weights.load_audio(audio_vae, self._device) if audio_vae else (None, None)
        self._most = 64  # tiles per call, halved when memory runs out
        self.facts = {
            "engine": "native",
            "precision": self._precision,
            "seams": seams,
            "device": _device_name(self._device),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "video_vae": video_facts,
            "audio_vae": audio_facts,
            "load_s": round(time.monotonic() - start, 3),
        }

    def frames(self, video: np.ndarray, report: dict) -> Iterator[np.ndarray]:
        """Decode the picture.

        Args:
            video: [1, 24, T, H, W] float32 in the sampler's scale.
            report: filled as clips are done: "clips", "fallbacks" (clip, from, to), "seconds" of computing,
                "peak_memory_bytes".

        Yields:
            [n, 16H, 16W, 3] uint8 RGB; F(T) frames in all.

        Raises:
            BadData: wrong shape, or a clip is not finite in any precision.
            Unavailable: not even one tile fits the memory.
        """
        if video.ndim != 5 or video.shape[:2] != (1, 24):
            raise BadData(f"a video latent is [1, 24, T, H, W], not {list(video.shape)}")
        z = torch.from_numpy(np.ascontiguousarray(video[0], dtype=np.float32))
        report |= {"clips": 0, "fallbacks": [], "seconds": 0.0}
        clips = (self._clip(z, index, report) for index in range(tiling.clip_count(z.shape[1])))
        pieces = tiling.join_clips(clips, tiling.frame_count(z.shape[1]))
        yield from _ahead(_timed((_on_host(_eight_bit(piece)) for piece in pieces), report))
        report["peak_memory_bytes"] = _peak_bytes(self._device)

    def sound(self, audio: np.ndarray, report: dict) -> Iterator[np.ndarray]:
        """Decode the sound, always in float32.

        Args:
            audio: [1, 32, 2, Ta] float32 in the sampler's scale.
            report: filled: "chunks", "seconds", "peak_memory_bytes".

        Yields:
            [2, n] float32 at 32 kHz in [-1, 1]; 800 * Ta samples in all.

        Raises:
            BadData: wrong shape, or a chunk is not finite.
            NotUsable: no audio VAE was given.
        """
        if self._audio is None:
            raise NotUsable("this latent has sound but no audio VAE was given: use --audio-vae")
        if audio.ndim != 4 or audio.shape[:3] != (1, 32, 2):
            raise BadData(f"an audio latent is [1, 32, 2, Ta], not {list(audio.shape)}")
        z = torch.from_numpy(np.ascontiguousarray(audio[0].swapaxes(0, 1), dtype=np.float32))
        report |= {"chunks": 0, "seconds": 0.0}
        yield from _ahead(_timed(self._waves(z, report), report))
        report["peak_memory_bytes"] = _peak_bytes(self._device)

    def _clip(self, z: Tensor, index: int, report: dict) -> Tensor:
        """Decode one clip of z [24, T, H, W] to raw pixels [3, 28, 16H, 16W], one rung up if it is not finite."""
        rungs = _rungs(self._precision, self._device)
        for rung, higher in zip(rungs, [*rungs[1:], None], strict=True):
            raw = self._raw(tiling.clip(z, index), DTYPES[rung])
            if torch.isfinite(raw).all():
                report["clips"] += 1
                if self._progress:
                    self._progress(report["clips"], tiling.clip_count(z.shape[1]))
                return raw
            if higher:
                report["fallbacks"].append({"clip": index, "from": rung, "to": higher})
        raise BadData(f"clip {index} (from frame {tiling.FRAMES * index}) is not finite, not even in {rungs[-1]}")

    def _raw(self, z: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode z [24, 7, H, W] to raw pixels; out of memory halves the tile batch, for later clips too."""
        tiles = tiling.cut(self._video.denormalise(z.to(self._device)))
        batch = min(self._most, self._fitting(math.prod(tiles.shape[2:]), dtype))
        while True:
            try:
                return tiling.stitch(self._video(tiles, dtype, batch, self._alive), *z.shape[2:], self._seams)
            except RuntimeError as e:
                if not _out_of_memory(e):
                    raise
                if batch == 1:
                    raise Unavailable(f"not enough memory on {self._device} to decode one tile: {e}") from e
            batch = self._most = batch // 2

    def _fitting(self, tokens: int, dtype: torch.dtype) -> int:
        """Tiles of `tokens` that a block takes at once: as many as are of use, within half of the free memory."""
        cuda = self._device.type == "cuda"
        free = torch.cuda.mem_get_info(self._device)[0] if cuda else _available_bytes()
        # widest: the gated product (12 D), or qkv with float32 q and k; 16 D covers both with what lies around them
        each = tokens * self._width * max(16 * dtype.itemsize, 32)
        useful = -(-(ROWS_CUDA if cuda else ROWS_CPU) // tokens)
        return max(1, min(useful, free // 2 // each))

    def _waves(self, z: Tensor, report: dict) -> Iterator[Callable[[], np.ndarray]]:
        # cuDNN would run float32 convolutions in TF32
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            for wave in self._audio(z.to(self._device)):
                if not torch.isfinite(wave).all():
                    raise BadData(f"the sound is not finite in chunk {report['chunks']}")
                report["chunks"] += 1
                yield _on_host(wave)


def _on_host(x: Tensor) -> Callable[[], np.ndarray]:
    """Start copying to the host, from a GPU into pinned memory, without waiting; the function returned waits."""
    copy = x.to("cpu", non_blocking=True)
    if not x.is_cuda:
        return copy.numpy
    there = torch.cuda.current_stream(x.device).record_event()

    def wait() -> np.ndarray:
        there.synchronize()
        return copy.numpy()

    return wait


def _ahead(items: Iterator[Callable[[], np.ndarray]]) -> Iterator[np.ndarray]:
    """Run an iterator in a thread, one item ahead of the caller; closing the generator stops the thread.

    The thread holds at most the item it is making and one that waits. Its exception is raised where the item would be.
    The caller, not the thread, waits for an item to reach the host.
    """
    slot, stop = queue.Queue(maxsize=1), threading.Event()
    thread = threading.Thread(target=_feed, args=(items, slot, stop), name="h3spool-decode", daemon=True)
    thread.start()
    try:
        while True:
            item, error = slot.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item()
    finally:
        stop.set()
        while thread.is_alive():  # it may wait for a place in the queue
            with contextlib.suppress(queue.Empty):
                slot.get(timeout=0.05)


@torch.inference_mode()
def _feed(items: Iterator[Callable[[], np.ndarray]], slot: queue.Queue, stop: threading.Event) -> None:
    try:
        for item in items:
            if stop.is_set():
                return
            slot.put((item, None))
        slot.put((None, None))
    except BaseException as e:  # raised in the caller's thread
        slot.put((None, e))


def hold_device(device: str, folder: Path) -> int:
    """Take the lock of a device, of which one decoding process at a time has the use; it is held until this one ends.

    A GPU's lock lies in the machine's temporary folder and is known by its UUID; the CPU's lies in `folder`.

    Returns:
        the descriptor that holds it.

    Raises:
        TryLater: another process decodes on it.
        Unavailable: there is no such device.
    """
    found = _device(device)
    path = folder / "device-cpu"
    if found.type == "cuda":
        path = Path(tempfile.gettempdir()) / f"h3spool-{torch.cuda.get_device_properties(found).uuid}.lock"
    with explained("locking", path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise TryLater(f"{path}: another h3spool decodes on {found}; one at a time is faster") from None
    return fd


def difference(first: Decoder, second: Decoder, video: np.ndarray) -> dict[str, float]:
    """Decode one latent [1, 24, T, H, W] with two decoders and compare the 8-bit frames, clip by clip.

    Returns:
        `psnr_db` (infinite where they are equal), `max` (0..255) and `equal`, the share of equal values.
    """
    squares = count = equal = largest = 0
    for a, b in zip(first.frames(video, {}), second.frames(video, {}), strict=True):
        off = np.abs(a.astype(np.int16) - b)
        squares, count = squares + int(np.square(off, dtype=np.int64).sum()), count + off.size
        equal, largest = equal + int((off == 0).sum()), max(largest, int(off.max()))
    psnr = 10 * math.log10(255**2 * count / squares) if squares else math.inf
    return {"psnr_db": round(psnr, 2), "max": largest, "equal": round(equal / count, 4)}


def _timed(items: Iterator, report: dict) -> Iterator:
    """Add the seconds that each item takes to report["seconds"]; give the memory back that it left behind.

    Without that the heaps of the two threads keep freed pieces of clips, by chance up to two clips more.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    while True:
        start = time.monotonic()
        item = next(items, None)
        if trim:
            trim(0)
        report["seconds"] += time.monotonic() - start
        if item is None:
            return
        yield item


def _eight_bit(raw: Tensor) -> Tensor:
    """raw: [3, n, H, W] -> [n, H, W, 3] uint8."""
    pixels = video.finalise(raw).mul_(255).round_().to(torch.uint8)
    return pixels.permute(1, 2, 3, 0).contiguous()


def _device(name: str) -> torch.device:
    found = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if found else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise Unavailable(f"{name!r} is no device: use auto, cpu, cuda or cuda:N") from e
    if device.type not in ("cpu", "cuda"):
        raise Unavailable(f"h3spool decodes on cpu and cuda, not on {name}")
    if device.type == "cuda" and (not found or (device.index or 0) >= torch.cuda.device_count()):
        raise Unavailable(
            f"there is no {name}: this PyTorch ({torch.__version__}) sees {torch.cuda.device_count()} GPUs"
        )
    return device


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"cpu {models[0]}" if models else "cpu"


def _precision(asked: str, device: torch.device, *, quantised: bool) -> str:
    """Resolve the precision. int8 falls to floats (of the same weights) where a device multiplies those faster."""
    if asked == "int8" and not quantised:
        raise NotUsable("--precision int8 needs an int8_convrot checkpoint; `h3spool quantize IN OUT` makes one")
    if quantised and asked in ("auto", "int8") and int8.backend(device).product is not None:
        return "int8"
    if asked not in ("auto", "int8"):
        return asked
    if device.type == "cuda":
        return "fp16"
    return "bf16" if cpu.has_bfloat16() else "fp32"


def _rungs(precision: str, device: torch.device) -> tuple[str, ...]:
    """The precisions in which a clip is tried; each rung computes with the weights as stored."""
    between = ("fp16",) if precision == "int8" and device.type == "cuda" else ()
    return (precision, *between, "fp32") if precision != "fp32" else ("fp32",)


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error)


def _available_bytes() -> int:
    """Memory that can be had without swapping, as the kernel estimates it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def _peak_bytes(device: torch.device) -> int:
    """Most memory held so far: allocated on a GPU, else resident in this process (mapped weights included)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text()  # ru_maxrss would count the process that started this one
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
