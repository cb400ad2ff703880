"""decode, mux and loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import click

from h3spool.cli.handover import peer_link
from h3spool.cli.options import (
    GIB,
    deliver_option,
    encoding_options,
    engine_options,
    env_option,
    jobs_argument,
    json_option,
    keep_master_option,
    min_free_option,
    peer_options,
    spool_options,
    watch_options,
)
from h3spool.cli.output import Batch, Progress, out, run_passes, stoppable
from h3spool.errors import NotUsable


def make_engine(
    video_vae: Path | None, audio_vae: Path | None, precision: str, device: str, seams: str, progress: Callable
) -> object:
    """Load the decoders (this imports torch)."""
    if video_vae is None:
        raise click.UsageError(
            "which checkpoint? give --video-vae FILE (and --audio-vae FILE), or set H3SPOOL_VIDEO_VAE"
        )
    from h3spool.decode import Decoder

    return Decoder(video_vae, audio_vae, precision=precision, device=device, seams=seams, progress=progress)


def make_output(ffmpeg: str | None, codec: str, quality: int, preset: str | None, **settings: object) -> object:
    """Where results go, once ffmpeg is known to run."""
    from h3spool import media, render

    encoding = {"codec": codec, "quality": quality, "preset": preset}
    return render.Output(media.ffmpeg_exe(ffmpeg), encoding, **settings)


@click.command()
@click.argument("jobs", nargs=-1, metavar="[JOB]... | FILE")
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), help="Decode a latent FILE to this MP4, without a spool."
)
@click.option("--mux", is_flag=True, help="Make the MP4 in the same pass: verified -> done.")
@keep_master_option
@deliver_option
@click.option("--allow", default="", help="With -o: what the file is meant to be; see export.")
@engine_options
@encoding_options
@min_free_option
@watch_options
@json_option
@click.option("--spool", "-s", "root", envvar="H3SPOOL_SPOOL", show_envvar=True, help="The spool directory.")
@click.option("--allow-network-fs", is_flag=True, help="Open a spool on NFS or FUSE, at your own risk.")
def decode(
    jobs: tuple[str, ...],
    output: Path | None,
    mux: bool,
    keep_master: bool,
    deliver: Path | None,
    allow: str,
    video_vae: Path | None,
    audio_vae: Path | None,
    precision: str,
    device: str,
    seams: str,
    codec: str,
    quality: int,
    preset: str | None,
    ffmpeg: str | None,
    min_free: float,
    watch: bool,
    grace: float,
    as_json: bool,
    root: str | None,
    allow_network_fs: bool,
) -> None:
    """Decode verified jobs to lossless masters, with --mux to MP4s; or one latent FILE to -o OUT.mp4.

    \b
    Example: h3spool decode --mux --video-vae video.safetensors --audio-vae audio.safetensors
             h3spool decode clip.h3latent -o clip.mp4
    """
    settings = {"mux": mux or output is not None, "keep_master": keep_master, "deliver": deliver}
    encoding = (ffmpeg, codec, quality, preset)
    engine = (video_vae, audio_vae, precision, device, seams)
    if output is not None:
        return decode_one_file(jobs, output, allow, engine, make_output(*encoding, **settings), as_json)
    from h3spool.spool import Spool

    if root is None:
        raise click.UsageError("which spool? give --spool DIR or set H3SPOOL_SPOOL, or decode FILE -o OUT.mp4")
    spool = Spool(root, allow_network_fs=allow_network_fs)
    decoding = Decoding(spool, engine, encoding, settings, min_free)
    from h3spool.loop import Pass

    if watch:
        decoding.load()
        run_passes([Pass("decode", decoding.decode)], once=False, grace_s=grace, as_json=as_json)
    with stoppable():
        Batch(as_json).run(decoding.decode(jobs))


def decode_one_file(
    files: tuple[str, ...], target: Path, allow: str, engine: tuple, output: object, as_json: bool
) -> None:
    """`decode FILE -o OUT.mp4`."""
    from h3spool import latent, render

    if len(files) != 1 or target.suffix != ".mp4":
        raise click.UsageError("decode one latent: h3spool decode FILE -o OUT.mp4")
    path, words = Path(files[0]), latent.parse_allow(allow)
    with stoppable():
        render.decode_file(path, target, make_engine(*engine, Progress().clips), output, allow=words)
    out({"file": str(target), "receipt": str(target.with_suffix(".pipeline.json"))}, as_json, "file")


class Decoding:
    """The decoder side of a spool: engine and ffmpeg are loaded when the first job needs them, and kept."""

    def __init__(self, spool: object, engine: tuple, encoding: tuple, settings: dict, min_free: float):
        if spool.role != "decoder":
            raise NotUsable(f"{spool.root}: is a sampler's spool; decode and mux belong to a decoder's")
        self.spool, self._engine_options, self._encoding, self._settings = spool, engine, encoding, settings
        self._min_free_bytes = int(min_free * GIB)
        self._engine = self._output = None

    def load(self) -> None:
        """Load what decoding needs, before anything is claimed."""
        if self._engine is None:
            self._output = make_output(*self._encoding, **self._settings)
            self._engine = make_engine(*self._engine_options, Progress().clips)

    def _room(self) -> None:
        self.spool.require_space(256 << 20, self._min_free_bytes)

    def decode(self, names: Iterable[str] = ()) -> Iterable[object]:
        """One pass of decode."""
        from h3spool import render, steps

        def ready() -> None:
            self._room()
            self.load()

        act = lambda job, attempt: render.decode(job, attempt, self._engine, self._output)  # noqa: E731
        return steps.work(self.spool, "decode", act, names, ready=ready)

    def mux(self, names: Iterable[str] = ()) -> Iterable[object]:
        """One pass of mux; needs no engine."""
        from h3spool import render, steps

        def ready() -> None:
            self._room()
            self._output = self._output or make_output(*self._encoding, **self._settings)

        return steps.work(
            self.spool, "mux", lambda job, attempt: render.mux(job, attempt, self._output), names, ready=ready
        )


@click.command()
@jobs_argument
@encoding_options
@deliver_option
@min_free_option
@watch_options
@json_option
@spool_options
def mux(
    spool: object,
    jobs: tuple[str, ...],
    codec: str,
    quality: int,
    preset: str | None,
    ffmpeg: str | None,
    deliver: Path | None,
    min_free: float,
    watch: bool,
    grace: float,
    as_json: bool,
) -> None:
    """Make MP4s from the masters in decoded/.

    \b
    Example: h3spool mux --codec libx265 --quality 20
    """
    from h3spool.loop import Pass

    decoding = Decoding(spool, (), (ffmpeg, codec, quality, preset), {"deliver": deliver}, min_free)
    if watch:
        run_passes([Pass("mux", decoding.mux)], once=False, grace_s=grace, as_json=as_json)
    with stoppable():
        Batch(as_json).run(decoding.mux(jobs))


@click.command()
@click.option("--once", is_flag=True, help="End when nothing is ready, with the batch's exit code.")
@env_option("TO", "--to", "to", help="Sampler: the peer to push to.")
@peer_options
@engine_options
@encoding_options
@keep_master_option
@deliver_option
@click.option("--grace", default=60.0, show_default=True, help="Seconds that a stop waits for the job at hand.")
@min_free_option
@json_option
@spool_options
def loop(
    spool: object,
    once: bool,
    to: str | None,
    remote_command: str,
    bwlimit: str | None,
    video_vae: Path | None,
    audio_vae: Path | None,
    precision: str,
    device: str,
    seams: str,
    codec: str,
    quality: int,
    preset: str | None,
    ffmpeg: str | None,
    keep_master: bool,
    deliver: Path | None,
    grace: float,
    min_free: float,
    as_json: bool,
) -> None:
    """Do everything this node's role does, until stopped.

    A sampler verifies and pushes; a decoder verifies, muxes what is in decoded/, and decodes to MP4s.

    \b
    Example: h3spool loop --to decoder@atelier:spool
             h3spool loop --video-vae video.safetensors --audio-vae audio.safetensors --deliver ~/Videos
    """
    from h3spool import push as sending
    from h3spool import steps
    from h3spool.loop import Pass

    checking = Pass("verify", lambda: steps.verify(spool))
    if spool.role == "sampler":
        if to is None:
            raise click.UsageError("where to? give --to [USER@]HOST:SPOOL or set H3SPOOL_TO")
        with peer_link(to, remote_command, bwlimit, min_free) as link:
            passes = [checking, Pass("push", lambda: sending.push(spool, link))]
            return run_passes(passes, once=once, grace_s=grace, as_json=as_json)
    settings = {"mux": True, "keep_master": keep_master, "deliver": deliver}
    engine = (video_vae, audio_vae, precision, device, seams)
    decoding = Decoding(spool, engine, (ffmpeg, codec, quality, preset), settings, min_free)
    if not once:
        decoding.load()
    passes = [checking, Pass("mux", decoding.mux), Pass("decode", decoding.decode)]
    return run_passes(passes, once=once, grace_s=grace, as_json=as_json)


COMMANDS = (decode, mux, loop)
