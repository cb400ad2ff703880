"""Two ComfyUI nodes: one saves a MiniMax H3 audio+video latent into a spool, one loads such a latent.

They run in ComfyUI's own Python and import numpy, torch and ComfyUI's modules only while they work. An error of h3spool
is shown in ComfyUI's interface as it is. A latent that the spool refuses is kept in ComfyUI's output folder: sampling
took minutes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from h3spool.errors import BadData, H3SpoolError

CATEGORY = "latent/MiniMax H3"
RESCUE = "h3spool_rescue"  # in ComfyUI's output folder


class SaveMiniMaxH3AVLatent:
    """LATENT in, LATENT through: exports the clip into a spool, with all checks and what the workflow says of it."""

    CATEGORY = CATEGORY
    DESCRIPTION = "Save the audio+video latent of MiniMax H3 into an h3spool spool, for a decoder on another machine."
    FUNCTION = "save"
    OUTPUT_NODE = True
    RETURN_TYPES = ("LATENT",)
    RETURN_NAMES = ("samples",)

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        """What ComfyUI asks of a node."""
        spool = {"default": os.environ.get("H3SPOOL_SPOOL", ""), "tooltip": "Folder made by `h3spool init`."}
        title = {"default": "", "tooltip": "Name of the clip; the MP4 can be delivered under it."}
        allow = {
            "default": "",
            "tooltip": "What is unusual but meant, comma-separated: image, no-audio, silent, black, off-grid.",
        }
        return {
            "required": {"samples": ("LATENT",), "spool": ("STRING", spool), "title": ("STRING", title)},
            "optional": {"allow": ("STRING", allow)},
            "hidden": {"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO", "unique_id": "UNIQUE_ID"},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, spool: str | None = None, allow: str | None = None) -> bool | str:
        """Look at the spool before anything is sampled; an input that is connected (None) is looked at later."""
        from h3spool.latent import parse_allow
        from h3spool.spool import Spool

        try:
            if spool is not None:
                Spool(_folder(spool))
            parse_allow(allow or "")
        except H3SpoolError as error:
            return str(error)
        return True

    def save(
        self,
        samples: dict,
        spool: str,
        title: str,
        allow: str = "",
        prompt: dict | None = None,
        extra_pnginfo: dict | None = None,
        unique_id: str | None = None,
    ) -> dict:
        """Export each clip of the latent; the latent itself goes on unchanged."""
        from h3spool import export
        from h3spool.latent import parse_allow

        facts, producer = _account(prompt, extra_pnginfo, unique_id, samples)
        allowed = parse_allow(allow)
        clips = _clips(samples)
        jobs = []
        for number, (video, audio) in enumerate(clips, 1):
            name = f"{title} {number}".strip() if len(clips) > 1 else title
            try:
                jobs.append(
                    export(video, audio, spool=_folder(spool), title=name, allow=allowed, meta=facts, producer=producer)
                )
            except H3SpoolError as error:
                raise type(error)(f"{error}{_rescue(video, audio, facts | {'title': name})}") from error
        return {"ui": {"text": [f"h3spool: {job}" for job in jobs]}, "result": (samples,)}


class LoadMiniMaxH3AVLatent:
    """A latent file (any that `h3spool export` reads), or a job of a spool, as a LATENT of video and audio."""

    CATEGORY = CATEGORY
    DESCRIPTION = "Load an audio+video latent of MiniMax H3: a file, or a job of an h3spool spool."
    FUNCTION = "load"
    RETURN_TYPES = ("LATENT",)
    RETURN_NAMES = ("samples",)

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        """What ComfyUI asks of a node."""
        latent = {"default": "", "tooltip": "Path of a latent file, or the name of a job in the spool."}
        spool = {"default": os.environ.get("H3SPOOL_SPOOL", ""), "tooltip": "Only for a job: the spool's folder."}
        allow = {"default": "", "tooltip": "What is unusual but meant, such as no-audio; see the Save node."}
        return {
            "required": {"latent": ("STRING", latent)},
            "optional": {"spool": ("STRING", spool), "allow": ("STRING", allow)},
        }

    @classmethod
    def IS_CHANGED(cls, latent: str, spool: str = "", allow: str = "") -> str:
        """The file's identity: another content under the same name is loaded anew."""
        info = os.stat(_latent_path(latent, spool))
        return f"{info.st_ino} {info.st_size} {info.st_mtime_ns} {allow}"

    @classmethod
    def VALIDATE_INPUTS(cls, latent: str | None = None, spool: str | None = "") -> bool | str:
        """Say at once that the file is not there; inputs that are connected (None) are looked at later."""
        try:
            if latent is not None and spool is not None:
                _latent_path(latent, spool)
        except H3SpoolError as error:
            return str(error)
        return True

    def load(self, latent: str, spool: str = "", allow: str = "") -> tuple[dict]:
        """Read and check the clip."""
        import torch

        from h3spool import importers
        from h3spool.latent import build, check

        path = _latent_path(latent, spool)
        clip = importers.load([path])
        words = ",".join(filter(None, [clip.facts.get("allow", ""), allow]))
        try:
            check(build(clip.video, clip.audio, {"allow": words}))
        except BadData as error:
            raise BadData(f"{path}: {error}") from None
        streams = [torch.from_numpy(stream.array().copy()) for stream in (clip.video, clip.audio) if stream is not None]
        return ({"samples": streams[0] if len(streams) == 1 else _nested(streams)},)


def _folder(spool: str) -> Path:
    if not spool.strip():
        raise BadData("no spool is given: make one with `h3spool init`, and write its folder into the node")
    return Path(spool.strip()).expanduser()


def _latent_path(latent: str, spool: str) -> Path:
    from h3spool.errors import NotFound
    from h3spool.spool import Spool, valid_job

    path = Path(latent.strip()).expanduser()
    if path.is_file():
        return path
    if valid_job(latent.strip()) and spool.strip() and (found := Spool(_folder(spool)).find(latent.strip())):
        return found[1].latent
    raise NotFound(f"{latent!r}: no such file" + (f", and no job in {spool}" if spool.strip() else ""))


def _nested(streams: list) -> object:
    from comfy.nested_tensor import NestedTensor

    return NestedTensor(streams)


def _clips(samples: dict) -> list[tuple]:
    """The clips of a LATENT, each (video [1, 24, T, H, W], audio [1, 32, 2, Ta] or None): a batch holds several."""
    value = samples["samples"]
    streams = list(value.unbind()) if getattr(value, "is_nested", False) else [value]
    if len(streams) > 2 or streams[0].ndim != 5:
        shapes = ", ".join(str(list(stream.shape)) for stream in streams)
        raise BadData(
            f"this is no latent of MiniMax H3: its shape is {shapes}, not [1, 24, T, H, W] and [1, 32, 2, Ta]"
        )
    video, audio = streams[0], streams[1] if len(streams) == 2 else None
    return [(video[i : i + 1], None if audio is None else audio[i : i + 1]) for i in range(video.shape[0])]


def _account(
    prompt: dict | None, extra_pnginfo: dict | None, unique_id: str | None, samples: dict
) -> tuple[dict, dict]:
    """The facts of sampling that go into the latent, and the whole workflow, which goes beside it."""
    from h3spool.importers import sampling_facts

    version = getattr(sys.modules.get("comfyui_version"), "__version__", "")
    facts = {"producer": f"ComfyUI {version}".strip()}
    producer: dict[str, object] = {"tool": "ComfyUI", "version": version}
    if others := sorted(str(key) for key in samples if key != "samples"):
        producer["not_saved"] = others  # noise masks and the like are of no use to a decoder
    arguments = getattr(sys.modules.get("comfy.cli_args"), "args", None)
    if not getattr(arguments, "disable_metadata", False):
        facts |= sampling_facts(prompt or {}, unique_id)
        producer |= {"prompt": prompt, **(extra_pnginfo or {})}
    return facts, producer


def _rescue(video: object, audio: object, facts: dict) -> str:
    """Keep a refused latent in ComfyUI's output folder, if it can be written at all; a sentence for the message."""
    import secrets

    from h3spool import latent

    try:
        import folder_paths

        pieces = latent.serialize(latent.build(video, audio, facts))
        path = Path(folder_paths.get_output_directory()) / RESCUE / f"{secrets.token_hex(6)}.h3latent"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"".join(pieces))
    except (H3SpoolError, OSError, ImportError) as error:
        return f". The sampled latent could not be kept either ({error})"
    return f". The sampled latent is kept in {path}: `h3spool export {path}` takes it when this is mended"


NODE_CLASS_MAPPINGS = {
    "SaveMiniMaxH3AVLatent": SaveMiniMaxH3AVLatent,
    "LoadMiniMaxH3AVLatent": LoadMiniMaxH3AVLatent,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "SaveMiniMaxH3AVLatent": "Save MiniMax H3 AV Latent",
    "LoadMiniMaxH3AVLatent": "Load MiniMax H3 AV Latent",
}
