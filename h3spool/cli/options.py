"""Options that several commands share; those that belong together reach a command as one object."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import click

GIB = 1 << 30


def options(*decorators: Callable) -> Callable:
    """One decorator out of several, in the order they are to be shown."""

    def apply(command: Callable) -> Callable:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


def bundle(name: str, kind: type, *decorators: Callable) -> Callable:
    """Options that reach the command as one keyword `name`, a `kind` (a dataclass with a field for each)."""

    def apply(command: Callable) -> Callable:
        @functools.wraps(command)
        def bundled(**given: object) -> object:
            return command(**{name: kind(**{field.name: given.pop(field.name) for field in fields(kind)})}, **given)

        return options(*decorators)(bundled)

    return apply


def env_option(name: str, *flags: str, **settings: object) -> Callable:
    """An option that H3SPOOL_NAME also sets."""
    return click.option(*flags, envvar=f"H3SPOOL_{name}", show_envvar=True, **settings)


@dataclass(frozen=True)
class SpoolChoice:
    """Which spool."""

    root: str | None
    allow_network_fs: bool

    def open(self, *, broken: bool = False) -> object:
        """The open spool; `broken` is for fsck."""
        from h3spool.spool import Spool

        if self.root is None:
            raise click.UsageError("which spool? give --spool DIR or set H3SPOOL_SPOOL")
        return Spool(self.root, allow_network_fs=self.allow_network_fs, broken=broken)


spool_choice = bundle(
    "where",
    SpoolChoice,
    env_option("SPOOL", "--spool", "-s", "root", help="The spool directory."),
    click.option("--allow-network-fs", is_flag=True, help="Open a spool on NFS or FUSE, at your own risk."),
)


def spool_options(command: Callable) -> Callable:
    """--spool and --allow-network-fs; the command is called with an open `spool`."""

    @spool_choice
    @functools.wraps(command)
    def opened(where: SpoolChoice, **given: object) -> object:
        return command(spool=where.open(), **given)

    return opened


@dataclass(frozen=True)
class PeerChoice:
    """How to reach the peer."""

    remote_command: str
    bwlimit: str | None


peer_options = bundle(
    "peer",
    PeerChoice,
    click.option("--remote-command", default="h3spool", show_default=True, help="How h3spool is called on the peer."),
    click.option("--bwlimit", help="rsync's --bwlimit: KiB/s, or with a unit such as 20m."),
)


@dataclass(frozen=True)
class EngineChoice:
    """What decodes."""

    engine: str
    video_vae: Path | None
    audio_vae: Path | None
    precision: str
    device: str
    seams: str
    url: str
    allow_remote: bool

    def check(self) -> None:
        """Refuse options that lead nowhere, before anything is loaded."""
        if self.engine == "native" and self.video_vae is None:
            raise click.UsageError(
                "which checkpoint? give --video-vae FILE and --audio-vae FILE, or set H3SPOOL_VIDEO_VAE and "
                "H3SPOOL_AUDIO_VAE"
            )

    def hold_device(self, locks: Path) -> None:
        """Refuse (75) to decode beside another process on the same device."""
        if self.engine == "native":
            from h3spool.decode import hold_device

            hold_device(self.device, locks)

    def load(self, ffmpeg: str, progress: Callable[[int, int], None], alive: Callable[[], None]) -> object:
        """Load the decoders, or reach ComfyUI."""
        if self.engine == "comfyui":
            from h3spool.comfyui import ComfyUI
            from h3spool.comfyui_server import Server

            names = {"video_vae": self.video_vae, "audio_vae": self.audio_vae}
            names = {key: str(path) if path else None for key, path in names.items()}
            server = Server(self.url, allow_remote=self.allow_remote)
            return ComfyUI(server, ffmpeg=ffmpeg, progress=progress, **names)
        from h3spool.decode import Decoder

        how = {
            "precision": self.precision,
            "device": self.device,
            "seams": self.seams,
            "progress": progress,
            "alive": alive,
        }
        return Decoder(self.video_vae, self.audio_vae, **how)


engine_options = bundle(
    "engine",
    EngineChoice,
    click.option(
        "--engine",
        type=click.Choice(["native", "comfyui"]),
        default="native",
        show_default=True,
        help="Decode here, or through a running ComfyUI.",
    ),
    env_option(
        "VIDEO_VAE",
        "--video-vae",
        type=click.Path(path_type=Path),
        help="Video VAE: file or folder; with --engine comfyui its name there.",
    ),
    env_option(
        "AUDIO_VAE",
        "--audio-vae",
        type=click.Path(path_type=Path),
        help="Audio VAE: file or folder; with --engine comfyui its name there.",
    ),
    env_option(
        "PRECISION",
        "--precision",
        type=click.Choice(["auto", "int8", "fp16", "bf16", "fp32"]),
        default="auto",
        show_default=True,
        help="Of matrix products and attention.",
    ),
    env_option("DEVICE", "--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."),
    click.option(
        "--seams",
        type=click.Choice(["composited", "official"]),
        default="composited",
        show_default=True,
        help="How tiles are joined: without a lattice, or exactly as official and diffusers do.",
    ),
    click.option("--url", default="http://127.0.0.1:8192", show_default=True, help="The ComfyUI server."),
    click.option(
        "--allow-remote", is_flag=True, help="Accept a ComfyUI on another machine (it has no authentication)."
    ),
)


@dataclass(frozen=True)
class EncodingChoice:
    """How MP4s are written."""

    codec: str
    quality: int
    preset: str | None
    ffmpeg: str | None

    def output(self, **settings: object) -> object:
        """Where results go, once ffmpeg is known to run."""
        from h3spool import ffmpeg, render

        encoding = {"codec": self.codec, "quality": self.quality, "preset": self.preset}
        return render.Output(ffmpeg.find(self.ffmpeg), encoding, **settings)


encoding_options = bundle(
    "encoding",
    EncodingChoice,
    click.option("--codec", default="libx264", show_default=True, help="ffmpeg's: h264_nvenc, libx265, ..."),
    click.option(
        "--quality",
        type=click.IntRange(0, 63),
        default=17,
        show_default=True,
        help="Smaller is better: -crf, for nvenc -cq.",
    ),
    click.option("--preset", help="The encoder's own preset."),
    env_option("FFMPEG", "--ffmpeg", help="Another ffmpeg than the one of imageio-ffmpeg."),
)


@dataclass(frozen=True)
class Stopping:
    """Whether to go on, and how to stop."""

    watch: bool
    grace: float


watch_options = bundle(
    "stopping",
    Stopping,
    click.option("--watch", is_flag=True, help="Go on until stopped."),
    click.option("--grace", default=60.0, show_default=True, help="Seconds that a stop waits for the job at hand."),
)

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
jobs_argument = click.argument("jobs", nargs=-1)
min_free_option = click.option(
    "--min-free", default=2.0, show_default=True, help="GiB that must stay free on the spool's disk."
)
deliver_option = env_option(
    "DELIVER", "--deliver", type=click.Path(path_type=Path), help="Also place the MP4 there, as TITLE.mp4."
)
keep_master_option = click.option("--keep-master", is_flag=True, help="Also keep the lossless master (FFV1, PCM).")
