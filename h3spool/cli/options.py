"""Options that several commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import click

GIB = 1 << 30


def spool_options(command: Callable) -> Callable:
    """--spool and --allow-network-fs; the command is called with an open `spool`."""

    @click.option("--spool", "-s", "root", envvar="H3SPOOL_SPOOL", show_envvar=True, help="The spool directory.")
    @click.option("--allow-network-fs", is_flag=True, help="Open a spool on NFS or FUSE, at your own risk.")
    @functools.wraps(command)
    def opened(root: str | None, allow_network_fs: bool, **options: object) -> object:
        from h3spool.spool import Spool

        if root is None:
            raise click.UsageError("which spool? give --spool DIR or set H3SPOOL_SPOOL")
        return command(spool=Spool(root, allow_network_fs=allow_network_fs), **options)

    return opened


def options(*decorators: Callable) -> Callable:
    """One decorator out of several, in the order they are to be shown."""

    def apply(command: Callable) -> Callable:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


def env_option(name: str, *flags: str, **settings: object) -> Callable:
    """An option that H3SPOOL_NAME also sets."""
    return click.option(*flags, envvar=f"H3SPOOL_{name}", show_envvar=True, **settings)


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
jobs_argument = click.argument("jobs", nargs=-1)
min_free_option = click.option(
    "--min-free", default=2.0, show_default=True, help="GiB that must stay free on the spool's disk."
)
watch_options = options(
    click.option("--watch", is_flag=True, help="Go on until stopped."),
    click.option("--grace", default=60.0, show_default=True, help="Seconds that a stop waits for the job at hand."),
)
peer_options = options(
    click.option("--remote-command", default="h3spool", show_default=True, help="How h3spool is called on the peer."),
    click.option("--bwlimit", help="rsync's --bwlimit: KiB/s, or with a unit such as 20m."),
)
engine_options = options(
    env_option("VIDEO_VAE", "--video-vae", type=click.Path(path_type=Path), help="Video VAE: file or folder."),
    env_option("AUDIO_VAE", "--audio-vae", type=click.Path(path_type=Path), help="Audio VAE: file or folder."),
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
)
encoding_options = options(
    click.option("--codec", default="libx264", show_default=True, help="ffmpeg's: h264_nvenc, libx265, ..."),
    click.option("--quality", default=17, show_default=True, help="Smaller is better: -crf, for nvenc -cq."),
    click.option("--preset", help="The encoder's own preset."),
    env_option("FFMPEG", "--ffmpeg", help="Another ffmpeg than the one of imageio-ffmpeg."),
)
deliver_option = env_option(
    "DELIVER", "--deliver", type=click.Path(path_type=Path), help="Also place the MP4 there, as TITLE.mp4."
)
keep_master_option = click.option("--keep-master", is_flag=True, help="Also keep the lossless master (FFV1, PCM).")
