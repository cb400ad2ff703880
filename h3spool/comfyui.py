"""Decode through a running ComfyUI instead of natively: the same interface as `decode.Decoder`, over its HTTP API.

Two graphs of core nodes, one for the picture and one for the sound:

    LoadLatent + VAELoader -> VAEDecode          -> PreviewImage    PNG of 8 bit (ComfyUI truncates, it does not round)
    LoadLatent + VAELoader -> LTXVAudioVAEDecode -> PreviewAudio    FLAC of 16 bit; the level is left as it is

Uploads and results lie in ComfyUI's temp folder, which it empties at every start. When a clip has been fetched, its
files are overwritten with nothing (the API cannot delete them) and its history entries are removed.

The prompt id is a hash of the latent and the VAE, so whoever asks for the same decode again finds the one that waits,
runs or is finished: no crash on either side decodes a clip twice. `/history` is the truth: the websocket falls silent,
announces success before the history has it, and knows no steps of a VAE, so it is not used. A prompt that is in neither
queue nor history was lost by a restart and is sent again, under new file names, because ComfyUI answers a graph that it
knows from its cache, with files that may be gone.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import PurePath
from typing import TYPE_CHECKING

from h3spool import container, ffmpeg, latent
from h3spool.comfyui_server import TEMP, Away, Server, choose_vae
from h3spool.container import Tensor
from h3spool.errors import BadData, IOFailed, NotPermitted, NotUsable, TryLater
from h3spool.gate import BLACK_MAX

if TYPE_CHECKING:
    import numpy as np

NODES = ("LoadLatent", "VAELoader", "VAEDecode", "LTXVAudioVAEDecode", "PreviewImage", "PreviewAudio")
FOLDER = "h3spool"  # in ComfyUI's temp folder
CLIP_FRAMES = 17  # frames fetched and unpacked at a time
SAMPLE_RATE_HZ, SAMPLES_PER_TOKEN = 32_000, 800
MAX_SUBMISSIONS = 3  # of one clip: a server that dies of it must not be restarted into the same death for ever
HEARTBEAT_S = 30.0  # how often progress is told while the server works
ABSENT_POLLS = 3  # a prompt that was sent must be missing so often in a row before it counts as lost
# The decoding node and its VAE input, the node that saves and its input (and the name of its output in the history).
_DECODE = {
    "picture": ("VAEDecode", "vae", "PreviewImage", "images"),
    "sound": ("LTXVAudioVAEDecode", "audio_vae", "PreviewAudio", "audio"),
}
_IDS = uuid.uuid5(uuid.NAMESPACE_URL, "h3spool:comfyui")
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")


class ComfyUI:
    """Decodes through one ComfyUI server, one clip at a time.

    Args:
        server: the connection to it.
        ffmpeg: the program that unpacks PNG and FLAC.
        video_vae: name in the server's models/vae (of a path, the last part); None takes the one of MiniMax H3 that is
            there, fp16 before int8. An int8 VAE whose picture is all black gives way to the fp16 one.
        audio_vae: likewise; it may be missing as long as no latent has sound.
        progress: called with (clips fetched, clips in all), now and then while the server works and after each clip.
        poll_s: how often to look.
        patience_s: how long nothing may change on the server before it counts as hung.
        grace_s: how long it may be away (a restart) before the job is put back.

    Attributes:
        facts: what the receipt says of the engine.

    Raises:
        NotUsable: a node or the video VAE is missing there.
        NotPermitted, TryLater, Unavailable: as `Server`.
    """

    def __init__(
        self,
        server: Server,
        *,
        ffmpeg: str,
        video_vae: str | None = None,
        audio_vae: str | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        poll_s: float = 0.5,
        patience_s: float = 3600.0,
        grace_s: float = 120.0,
    ):
        self._server = server
        self._ffmpeg, self._progress = ffmpeg, progress
        self._poll_s, self._patience_s, self._grace_s = poll_s, patience_s, grace_s
        self._fetched: list[tuple[_Prompt, list[dict]]] = []
        stats = server.json("GET", "/system_stats")
        if missing := [name for name in NODES if server.node(name) is None]:
            raise NotUsable(f"{server.url} lacks the core nodes {', '.join(missing)}; update ComfyUI (0.33 or newer)")
        names = server.vae_names()
        video = choose_vae(names, "video", server.url, video_vae)
        if video is None:
            raise NotUsable(f"{server.url} has no video VAE of MiniMax H3 in models/vae; it offers {', '.join(names)}")
        spare = choose_vae([name for name in names if "fp16" in name], "video", server.url)
        self._video_vaes = [video, spare] if spare and "int8" in video else [video]
        self._audio_vae = choose_vae(names, "audio", server.url, audio_vae)
        system = stats.get("system", {})
        self.facts = {
            "engine": "comfyui",
            "url": server.url,
            "comfyui": system.get("comfyui_version"),
            "torch": system.get("pytorch_version"),
            "device": ", ".join(str(device.get("name")) for device in stats.get("devices", [])),
            "video_vae": {"name": video},
            "audio_vae": {"name": self._audio_vae},
            "audio_node": "LTXVAudioVAEDecode",
            "handover": "PNG of 8 bit, truncated; FLAC",
        }

    def frames(self, video: np.ndarray, report: dict) -> Iterator[np.ndarray]:
        """Decode the picture.

        Args:
            video: [1, 24, T, H, W] float32 in the sampler's scale.
            report: filled: "clips", "fallbacks" (clip, from, to), "seconds" (until the server was done), "prompt_id",
                "submissions", "warnings".

        Yields:
            [n, 16H, 16W, 3] uint8 RGB; F(T) frames in all.

        Raises:
            BadData: wrong shape.
            IOFailed: the decode failed, or what came back is not this clip; the attempt counts.
            TryLater, NotUsable, NotPermitted, Unavailable
        """
        import numpy as np

        if video.ndim != 5 or video.shape[:2] != (1, latent.VIDEO_CHANNELS):
            raise BadData(f"a video latent is [1, 24, T, H, W], not {list(video.shape)}")
        tokens = video.shape[2]
        sent = video if tokens > 1 else np.repeat(video, 2, axis=2)  # one token decodes badly; of two, frame 0 is kept
        expected, size = latent.frame_count(sent.shape[2]), (16 * video.shape[3], 16 * video.shape[4])
        report |= {"clips": 0, "fallbacks": [], "seconds": 0.0, "warnings": []}
        for vae, spare in zip(self._video_vaes, [*self._video_vaes[1:], None], strict=True):
            prompt = _Prompt("picture", container.tensor_of(sent), vae)
            files = self._run(prompt, report)
            if len(files) != expected:
                raise IOFailed(
                    f"{self._server.url} made {len(files)} frames, {expected} were expected; is {vae} the video VAE of "
                    "MiniMax H3?"
                )
            if spare is None or not self._all_black(files, size):
                break
            self._clean(prompt, files)
            report["fallbacks"].append({"clip": 0, "from": vae, "to": spare})
        yield from self._pictures(files[: latent.frame_count(tokens)], size, report)
        for done in [*self._fetched, (prompt, files)]:
            self._clean(*done)
        self._fetched.clear()

    def sound(self, audio: np.ndarray, report: dict) -> Iterator[np.ndarray]:
        """Decode the sound.

        Args:
            audio: [1, 32, 2, Ta] float32 in the sampler's scale.
            report: filled: "chunks", "seconds", "prompt_id", "submissions", "bits".

        Yields:
            [2, 800 * Ta] float32 at 32 kHz, in one piece.

        Raises:
            BadData, IOFailed, TryLater, NotPermitted, Unavailable: as `frames`.
            NotUsable: also where the server has no audio VAE.
        """
        if audio.ndim != 4 or audio.shape[:3] != (1, latent.AUDIO_CHANNELS, 2):
            raise BadData(f"an audio latent is [1, 32, 2, Ta], not {list(audio.shape)}")
        if self._audio_vae is None:
            raise NotUsable(
                f"{self._server.url} has no audio VAE of MiniMax H3 in models/vae, and this latent has sound"
            )
        report |= {"chunks": 0, "seconds": 0.0}
        prompt = _Prompt("sound", container.tensor_of(audio), self._audio_vae)
        files = self._run(prompt, report)
        flac = self._fetch(files[0])
        report["bits"] = _check_flac(flac, self._audio_vae)
        argv = ["-f", "flac", "-i", "-", "-f", "f32le", "-"]
        yield ffmpeg.unpack(self._ffmpeg, flac, argv, "<f4", (SAMPLES_PER_TOKEN * audio.shape[3], 2)).T
        report["chunks"] = 1
        self._fetched.append((prompt, files))  # kept until the picture is here: a kill before that must not cost it

    # ------------------------------------------------------------ one prompt

    def _run(self, prompt: _Prompt, report: dict) -> list[dict]:
        """Have the server decode, through restarts and one shortage of memory; the files of the result."""
        start, submissions, freed = time.monotonic(), 0, False
        while True:
            entry = self._wait(prompt, absent_polls=ABSENT_POLLS if submissions else 1)
            if entry is not None:
                files = self._result(prompt, entry)
                if files:
                    took = round(time.monotonic() - start, 3)
                    report |= {"seconds": took, "prompt_id": prompt.id, "submissions": submissions}
                    return files
                self._forget(prompt, entry, [])
                if submissions:  # what failed before we came is of an earlier try
                    freed = self._explain(entry, freed)
            if submissions == MAX_SUBMISSIONS:
                raise IOFailed(
                    f"{self._server.url} lost this clip {submissions} times: it was restarted, or it dies while "
                    "decoding it; ComfyUI's log says more"
                )
            submissions += 1
            try:
                self._send(prompt)
            except Away:
                pass  # it may have arrived and only the answer been lost: the wait finds out

    def _wait(self, prompt: _Prompt, absent_polls: int) -> dict | None:
        """The prompt's history entry, once it has one; None when it is nowhere, `absent_polls` times in a row."""
        absent, state, told = 0, None, float("-inf")
        changed = answered = time.monotonic()
        while True:
            now = time.monotonic()
            try:
                found = self._server.locate(prompt.id)
            except Away:
                if now - answered > self._grace_s:
                    raise
            else:
                if isinstance(found, dict):
                    return found
                answered, absent = now, absent + 1 if found is None else 0
                if absent == absent_polls:
                    return None
                if found != state:
                    state, changed = found, now
                elif now - changed > self._patience_s:
                    self._give_up(prompt, found)
            if now - told >= HEARTBEAT_S:
                told = now
                self._progress(0, prompt.clips)
            time.sleep(self._poll_s)

    def _give_up(self, prompt: _Prompt, state: str | None) -> None:
        if state != "running":
            raise TryLater(f"{self._server.url}: the decode has been {state} for {self._patience_s:g} s")
        self._server.json("POST", "/interrupt", {"prompt_id": prompt.id})
        raise IOFailed(f"{self._server.url}: the decode did not end in {self._patience_s:g} s and was interrupted")

    def _send(self, prompt: _Prompt) -> None:
        """Upload the latent under a new name and queue the graph."""
        name = f"{prompt.id}-{secrets.token_hex(4)}.latent"
        stored = self._server.upload(name, prompt.file, FOLDER)
        # False: a restart in between emptied the temp folder. The prompt is absent then, so it is sent again.
        self._server.submit(prompt.graph(f"{FOLDER}/{stored.get('name', name)} [{TEMP}]"), prompt.id)

    def _result(self, prompt: _Prompt, entry: dict) -> list[dict]:
        """The files of a success that are still there; none of a failure, or of an answer from the cache."""
        if (entry.get("status") or {}).get("status_str") != "success":
            return []
        files = prompt.results(entry)
        return files if files and self._server.view(files[-1]) else []

    def _explain(self, entry: dict, freed: bool) -> bool:
        """Raise why a prompt of ours failed; a first shortage of memory has the server unload its models instead."""
        status = entry.get("status") or {}
        if status.get("status_str") == "success":
            return freed  # an empty answer: send it again
        told = {kind: message for kind, message in status.get("messages", [])}
        if "execution_interrupted" in told:
            raise TryLater(f"the decode was interrupted on {self._server.url}; the job was put back")
        error = told.get("execution_error", {})
        kind, said = str(error.get("exception_type", "")), str(error.get("exception_message", "")).strip()[:500]
        if not (kind.endswith("OutOfMemoryError") or any(sign in said for sign in _OUT_OF_MEMORY)):
            raise IOFailed(f"{self._server.url}: ComfyUI's {error.get('node_type', 'decode')} failed: {kind}: {said}")
        if freed:
            raise TryLater(
                f"{self._server.url} has not enough memory for this clip, even with its models unloaded: {said}. Stop "
                "what else uses the device; a tiled decode does not help, MiniMax H3's always is"
            )
        self._server.json("POST", "/free", {"unload_models": True, "free_memory": True})
        time.sleep(2 * self._poll_s)  # it frees when its worker next looks up; a prompt sent at once would run first
        return True

    def _forget(self, prompt: _Prompt, entry: dict, files: list[dict]) -> None:
        """Empty a prompt's files on the server, and remove it from the history."""
        for file in [*files, *prompt.uploads(entry)]:
            if file.get("type") == TEMP:
                self._server.upload(str(file["filename"]), b"", str(file.get("subfolder", "")), overwrite=True)
        self._server.json("POST", "/history", {"delete": [prompt.id]})

    def _clean(self, prompt: _Prompt, files: list[dict]) -> None:
        """Forget a decode that has been fetched; what cannot be emptied is gone at ComfyUI's next start anyway."""
        try:
            entry = self._server.locate(prompt.id)
            self._forget(prompt, entry if isinstance(entry, dict) else {}, files)
        except (TryLater, NotUsable, NotPermitted):
            pass

    # ------------------------------------------------------------ its files

    def _fetch(self, file: dict) -> bytes:
        data = self._server.view(file)
        if data is None:
            raise TryLater(f"{self._server.url} no longer has {file.get('filename')}; it was restarted, decode again")
        return data

    def _pictures(self, files: list[dict], size: tuple[int, int], report: dict) -> Iterator[np.ndarray]:
        """Fetch and unpack PNGs of `size` (height, width), one clip's worth at a time."""
        for first in range(0, len(files), CLIP_FRAMES):
            pngs = [self._fetch(file) for file in files[first : first + CLIP_FRAMES]]
            for png in pngs:
                _check_png(png, size)
            argv = ["-f", "image2pipe", "-c:v", "png", "-i", "-", "-fps_mode", "passthrough", "-f", "rawvideo"]
            argv += ["-pix_fmt", "rgb24", "-"]
            clip = ffmpeg.unpack(self._ffmpeg, b"".join(pngs), argv, "u1", (len(pngs), *size, 3))
            if zero := [first + index for index, frame in enumerate(clip) if not frame.any()]:
                report["warnings"].append(f"frames {zero} are exactly black, which is how ComfyUI saves NaN")
            yield clip
            report["clips"] += 1
            self._progress(report["clips"], -(-len(files) // CLIP_FRAMES))

    def _all_black(self, files: list[dict], size: tuple[int, int]) -> bool:
        """Whether no frame has a value above black; it stops at the first clip that has one."""
        with closing(self._pictures(files, size, {"clips": 0, "warnings": []})) as clips:
            return all(clip.max() <= BLACK_MAX for clip in clips)


class _Prompt:
    """One decode of one stream: its id, the core `.latent` that is uploaded, and its graph."""

    def __init__(self, stream: str, tensor: Tensor, vae: str):
        self.stream, self.vae = stream, vae
        frames = latent.frame_count(tensor.shape[2]) if stream == "picture" else round(tensor.shape[3] * 24 / 40)
        self.clips = -(-frames // CLIP_FRAMES)
        # Without the second tensor, LoadLatent takes the file for one of 2023 and scales it by 1/0.18215.
        tensors = {"latent_tensor": tensor, "latent_format_version_0": Tensor("F32", (0,), b"")}
        self.file = b"".join(container.serialize(tensors, {}))
        self.id = str(uuid.uuid5(_IDS, f"{stream} {vae} {hashlib.sha256(self.file).hexdigest()}"))

    def graph(self, latent_name: str) -> dict[str, dict]:
        """The graph in API format."""
        decode, vae_input, preview, preview_input = _DECODE[self.stream]
        return {
            "1": {"class_type": "LoadLatent", "inputs": {"latent": latent_name}},
            "2": {"class_type": "VAELoader", "inputs": {"vae_name": self.vae}},
            "3": {"class_type": decode, "inputs": {"samples": ["1", 0], vae_input: ["2", 0]}},
            "4": {"class_type": preview, "inputs": {preview_input: ["3", 0]}},
        }

    def results(self, entry: dict) -> list[dict]:
        """The files that a history entry names."""
        found = (entry.get("outputs") or {}).get("4", {}).get(_DECODE[self.stream][3], [])
        return [file for file in found if isinstance(file, dict) and file.get("filename")]

    def uploads(self, entry: dict) -> list[dict]:
        """The latent that a history entry was made from."""
        try:
            name = entry["prompt"][2]["1"]["inputs"]["latent"]
        except (KeyError, IndexError, TypeError):
            return []
        path = PurePath(str(name).removesuffix(f" [{TEMP}]"))
        return [{"filename": path.name, "subfolder": str(path.parent), "type": TEMP}]


def _check_png(png: bytes, size: tuple[int, int]) -> None:
    """Refuse what is not an 8-bit RGB picture of `size` (height, width), by its header."""
    if png[:8] != b"\x89PNG\r\n\x1a\n" or len(png) < 33:
        raise IOFailed("ComfyUI sent something that is not a PNG")
    width, height, depth, colour = struct.unpack_from(">IIBB", png, 16)
    if (height, width, depth, colour) != (*size, 8, 2):
        raise IOFailed(
            f"ComfyUI made a picture of {width}x{height}, {depth} bit, colour type {colour}; {size[1]}x{size[0]}, "
            "8 bit, colour type 2 was expected. Is it the video VAE of MiniMax H3?"
        )


def _check_flac(flac: bytes, vae: str) -> int:
    """Refuse what is not stereo at 32 kHz, by its header; its bits a sample."""
    if flac[:4] != b"fLaC" or len(flac) < 42:
        raise IOFailed("ComfyUI sent something that is not a FLAC")
    packed = int.from_bytes(flac[18:26], "big")  # rate 20 bits, channels - 1 3, bits - 1 5, samples 36
    rate, channels = packed >> 44, (packed >> 41 & 7) + 1
    if (rate, channels) != (SAMPLE_RATE_HZ, 2):
        raise NotUsable(
            f"{vae} gives {channels} channels at {rate} Hz, not 2 at {SAMPLE_RATE_HZ}: it is of another model"
        )
    return (packed >> 36 & 31) + 1
