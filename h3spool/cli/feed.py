"""init and export: make a spool, feed it."""

from __future__ import annotations

from pathlib import Path

import click

from h3spool.cli.options import GIB, json_option, min_free_option, spool_options
from h3spool.cli.output import Batch, note, run_passes
from h3spool.errors import NotFound


@click.command()
@click.argument("root", metavar="SPOOL")
@click.option("--role", type=click.Choice(["sampler", "decoder"]), required=True, help="What this machine does.")
@click.option("--node", help="Name of this machine in receipts; default: its host name.")
@click.option("--allow-network-fs", is_flag=True, help="Create it on NFS or FUSE, at your own risk.")
def init(root: str, role: str, node: str | None, allow_network_fs: bool) -> None:
    """Create a spool, and say what to do next.

    \b
    Example: h3spool init ~/spool --role decoder
    """
    from h3spool.spool import Spool

    spool = Spool.create(root, role, node, allow_network_fs=allow_network_fs)
    click.echo(str(spool.root))
    note(f"{role} spool of node {spool.node}. Next:\n  export H3SPOOL_SPOOL={spool.root}")
    if role == "sampler":
        note("  h3spool export LATENT...                  (or the ComfyUI node, see README)")
        note("  h3spool loop --to [USER@]HOST:SPOOL       (verifies and pushes until stopped)")
    else:
        note("  h3spool loop --video-vae FILE --audio-vae FILE    (verifies and decodes until stopped)")


@click.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option("--video", type=click.Path(path_type=Path), help="The video half of a pair of ComfyUI .latent files.")
@click.option("--audio", type=click.Path(path_type=Path), help="The audio half of the pair.")
@click.option("--watch", type=click.Path(path_type=Path), help="Export what appears in this folder, until stopped.")
@click.option("--name", help="Title of the clip; any characters. Default: the file's own title or name.")
@click.option("--meta", multiple=True, metavar="KEY=VALUE", help="A fact of sampling: seed, steps, lora, prompt, ...")
@click.option(
    "--allow", multiple=True, help="Unusual but meant, comma-separated: image,no-audio,silent,black,off-grid."
)
@click.option("--allow-pickle", is_flag=True, help="Read torch pickles too (weights only, nothing is executed).")
@min_free_option
@json_option
@spool_options
def export(
    spool: object,
    files: tuple[Path, ...],
    video: Path | None,
    audio: Path | None,
    watch: Path | None,
    name: str | None,
    meta: tuple[str, ...],
    allow: tuple[str, ...],
    allow_pickle: bool,
    min_free: float,
    as_json: bool,
) -> None:
    """Put latent files of any known tool into the spool.

    \b
    Example: h3spool export clip.safetensors --name "Cat on a roof" --meta seed=7
             h3spool export --video v.latent --audio a.latent
             h3spool export --watch ComfyUI/output/latents
    """
    from h3spool import latent
    from h3spool.loop import Pass
    from h3spool.watch import Settings, Watcher, export_files

    if any("=" not in pair for pair in meta):
        raise click.UsageError("--meta takes KEY=VALUE")
    if (audio and not video) or not (files or video or watch):
        raise click.UsageError("give latent files, --video FILE with --audio FILE, or --watch FOLDER")
    facts = dict(pair.split("=", 1) for pair in meta)
    settings = Settings(name, latent.parse_allow(",".join(allow)), facts, int(min_free * GIB))
    if watch:
        if not watch.is_dir():
            raise NotFound(f"{watch}: there is no such folder to watch")
        passes = [Pass("export", Watcher(spool, watch, settings).scan)]
        run_passes(passes, spool, once=False, grace_s=60, as_json=as_json)
    pairs = [[video, *([audio] if audio else [])]] if video else []
    every = [*pairs, *([file] for file in files)]
    Batch(as_json).run(export_files(spool, paths, settings, allow_pickle=allow_pickle) for paths in every)


COMMANDS = (init, export)
