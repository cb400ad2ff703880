"""decode, mux and loop."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import click

from h3spool.cli.handover import peer_link, tell_peer
from h3spool.cli.options import (
    GIB,
    EncodingChoice,
    EngineChoice,
    PeerChoice,
    SpoolChoice,
    Stopping,
    deliver_option,
    encoding_options,
    engine_options,
    env_option,
    jobs_argument,
    json_option,
    keep_master_option,
    min_free_option,
    peer_options,
    spool_choice,
    spool_options,
    watch_options,
)
from h3spool.cli.output import Batch, Progress, note, out, run_passes, stoppable
from h3spool.errors import NotUsable

_JOB_BYTES = 256 << 20  # a master of 124 frames at 768x1344 is about 200 MB


class Decoding:
    """The decoder side of a spool. Engine and ffmpeg are loaded when the first job needs them, and kept."""

    def __init__(
        self, spool: object, engine: EngineChoice | None, encoding: EncodingChoice, min_free: float, **settings: object
    ):
        from h3spool.loop import Watchdog

        if spool.role != "decoder":
            raise NotUsable(f"{spool.root}: is a sampler's spool; decode and mux belong to a decoder's")
        self.spool, self._engine_choice, self._encoding, self._settings = spool, engine, encoding, settings
        self._min_free_bytes = int(min_free * GIB)
        self._engine = self._output = None
        self._loading: Future | None = None
        self._device_held = False
        self._progress = Progress("decoded", "parts")
        self._watchdog = Watchdog(
            lambda waited_s: note(f"h3spool: nothing was decoded for {waited_s:.0f} s: the device is wedged; ending")
        )

    def load_ahead(self) -> None:
        """Begin to load in a thread, so that this one can verify; `load` waits for it and raises what went wrong."""
        self._engine_choice.check()
        self._loading = Future()
        threading.Thread(target=self._load_into, args=(self._loading,), name="h3spool-load").start()

    def _load_into(self, future: Future) -> None:
        try:
            future.set_result(self._load())
        except BaseException as error:  # raised where it is waited for
            future.set_exception(error)

    def load(self) -> tuple[()]:
        """Load what decoding needs, before anything is claimed. As a step of a loop it moves no job."""
        if self._loading is not None:
            loading, self._loading = self._loading, None
            loading.result()
        elif self._engine is None:
            self._engine_choice.check()
            self._load()
        return ()

    def _load(self) -> None:
        self._output = self._encoding.output(**self._settings)
        if not self._device_held:
            self._engine_choice.hold_device(self.spool.root / "locks")
            self._device_held = True
        self._engine = self._engine_choice.load(self._output.ffmpeg, self._clip_done, self._watchdog.feed)

    def _clip_done(self, done: int, total: int) -> None:
        self._watchdog.feed()
        self._progress.update(done, total)

    def decode(self, names: Iterable[str] = ()) -> Iterable[object]:
        """One pass of decode."""
        from h3spool import render, steps

        def ready() -> None:
            self.spool.require_space(_JOB_BYTES, self._min_free_bytes)
            self.load()

        def act(job: object, attempt: int) -> str:
            with self._watchdog.watching():
                return render.decode(job, attempt, self._engine, self._output)

        return steps.work(self.spool, "decode", act, names, ready=ready)

    def mux(self, names: Iterable[str] = ()) -> Iterable[object]:
        """One pass of mux; needs no engine."""
        from h3spool import render, steps

        def ready() -> None:
            self.spool.require_space(_JOB_BYTES, self._min_free_bytes)
            self._output = self._output or self._encoding.output(**self._settings)

        def act(job: object, attempt: int) -> str:
            return render.mux(job, attempt, self._output)

        return steps.work(self.spool, "mux", act, names, ready=ready)


@click.command()
@click.argument("jobs", nargs=-1, metavar="[JOB]... | FILE")
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), help="Decode a latent FILE to this MP4, without a spool."
)
@click.option("--mux", is_flag=True, help="Make the MP4 in the same pass: verified -> done.")
@keep_master_option
@deliver_option
@click.option("--allow", multiple=True, help="With -o: what the file is meant to be; see export.")
@engine_options
@encoding_options
@min_free_option
@watch_options
@json_option
@spool_choice
def decode(
    jobs: tuple[str, ...],
    output: Path | None,
    mux: bool,
    keep_master: bool,
    deliver: Path | None,
    allow: tuple[str, ...],
    engine: EngineChoice,
    encoding: EncodingChoice,
    min_free: float,
    stopping: Stopping,
    as_json: bool,
    where: SpoolChoice,
) -> None:
    """Decode verified jobs to lossless masters, with --mux to MP4s; or one latent FILE to -o OUT.mp4.

    \b
    Example: h3spool decode --mux --video-vae video.safetensors --audio-vae audio.safetensors
             h3spool decode clip.h3latent -o clip.mp4
    """
    from h3spool.loop import Pass

    if output is None and any(os.path.isfile(job) for job in jobs):
        raise click.UsageError("to decode a file, say where to: h3spool decode FILE -o OUT.mp4")
    if output is not None:
        return decode_one_file(jobs, output, allow, engine, encoding, as_json)
    settings = {"mux": mux, "keep_master": keep_master, "deliver": deliver}
    decoding = Decoding(where.open(), engine, encoding, min_free, **settings)
    if stopping.watch:
        decoding.load()
        passes = [Pass("decode", decoding.decode)]
        run_passes(passes, decoding.spool, once=False, grace_s=stopping.grace, as_json=as_json)
    with stoppable():
        Batch(as_json).run(decoding.decode(jobs))


def decode_one_file(
    files: tuple[str, ...],
    target: Path,
    allow: tuple[str, ...],
    engine: EngineChoice,
    encoding: EncodingChoice,
    as_json: bool,
) -> None:
    """`decode FILE -o OUT.mp4`."""
    from h3spool import latent, render

    if len(files) != 1:
        raise click.UsageError("-o decodes one latent: h3spool decode FILE -o OUT.mp4")
    if target.suffix != ".mp4":
        raise click.UsageError(f"-o {target}: the name must end in .mp4")
    if not target.absolute().parent.is_dir():
        raise click.UsageError(f"-o {target}: there is no folder {target.parent}")
    engine.check()
    words, output = latent.parse_allow(",".join(allow)), encoding.output()
    with stoppable():
        clip = render.load_file(Path(files[0]), words)  # a wrong file is refused before a checkpoint is loaded
        loaded = engine.load(output.ffmpeg, Progress("decoded", "parts").update, lambda: None)
        render.decode_file(clip, target, loaded, output)
    out({"file": str(target), "receipt": str(target.with_suffix(".pipeline.json"))}, as_json, "file")


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
    encoding: EncodingChoice,
    deliver: Path | None,
    min_free: float,
    stopping: Stopping,
    as_json: bool,
) -> None:
    """Make MP4s from the masters in decoded/.

    \b
    Example: h3spool mux --codec libx265 --quality 20
    """
    from h3spool.loop import Pass

    decoding = Decoding(spool, None, encoding, min_free, deliver=deliver)
    if stopping.watch:
        run_passes([Pass("mux", decoding.mux)], spool, once=False, grace_s=stopping.grace, as_json=as_json)
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
    peer: PeerChoice,
    engine: EngineChoice,
    encoding: EncodingChoice,
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

    checking = Pass("verify", lambda: steps.verify_if_idle(spool))
    if spool.role == "sampler":
        if to is None:
            raise click.UsageError("where to? give --to [USER@]HOST:SPOOL or set H3SPOOL_TO")
        with peer_link(to, peer, min_free) as link:
            if not once:
                tell_peer(spool, link)
            passes = [checking, Pass("push", lambda: sending.push(spool, link))]
            return run_passes(passes, spool, once=once, grace_s=grace, as_json=as_json)
    decoding = Decoding(spool, engine, encoding, min_free, keep_master=keep_master, deliver=deliver)
    passes = [checking, Pass("mux", decoding.mux), Pass("decode", decoding.decode)]
    if not once:
        decoding.load_ahead()
        passes.insert(2, Pass("load", decoding.load, vital=True))
    return run_passes(passes, spool, once=once, grace_s=grace, as_json=as_json)


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--check", type=click.Path(path_type=Path), help="Decode this latent with both and compare the frames.")
@env_option("DEVICE", "--device", default="auto", show_default=True, help="For --check: auto, cpu, cuda or cuda:N.")
@json_option
def quantize(source: Path, target: Path, check: Path | None, device: str, as_json: bool) -> None:
    """Turn a float video VAE of any layout into an int8_convrot file, for ComfyUI and h3spool.

    \b
    Example: h3spool quantize minimax_h3_video_vae_fp16.safetensors minimax_h3_video_vae_int8.safetensors
    """
    if target.exists():
        raise click.UsageError(f"{target} exists; give a new name, or move it away first")
    from h3spool.vae import quantize as writing

    with stoppable():
        facts = writing.quantize(source, target, Progress("quantised", "linears").update)
        if not facts["encoder"]:
            note("h3spool decodes this file, ComfyUI does not load it: the source has no encoder under ComfyUI's names")
        if check is not None:
            from h3spool import decode, render

            video = render.load_file(check).clip.video.array()
            pair = [decode.Decoder(path, None, device=device) for path in (source, target)]
            facts |= decode.difference(*pair, video) | {"precision": [engine.facts["precision"] for engine in pair]}
    if as_json:
        return out({"file": str(target), **facts}, as_json)
    click.echo(f"{target}  {facts['bytes'] >> 20} MiB")
    note("weights: " + ", ".join(f"{kind} {snr:.1f} dB" for kind, snr in facts["snr_db"].items()) + " (SNR)")
    if check is not None:
        equal = f"{facts['equal']:.1%} equal, at most {facts['max']} off"
        note(f"frames before and after: PSNR {facts['psnr_db']} dB, {equal}")


COMMANDS = (decode, mux, loop, quantize)
