"""init and export: make a spool, feed it."""

from __future__ import annotations

from pathlib import Path

import click

from h3spool.cli.options import GIB, json_option, min_free_option, spool_options
from h3spool.cli.output import Batch, note
from h3spool.errors import BadData, H3SpoolError


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
@click.option("--name", help="Title of the clip; any characters.")
@click.option("--meta", multiple=True, metavar="KEY=VALUE", help="A fact of sampling: seed, steps, lora, prompt, ...")
@click.option("--allow", default="", help="Unusual but meant: image,no-audio,silent,black,off-grid.")
@click.option("--allow-pickle", is_flag=True, help="Read torch pickles too (weights only, nothing is executed).")
@min_free_option
@json_option
@spool_options
def export(
    spool: object,
    files: tuple[Path, ...],
    video: Path | None,
    audio: Path | None,
    name: str | None,
    meta: tuple[str, ...],
    allow: str,
    allow_pickle: bool,
    min_free: float,
    as_json: bool,
) -> None:
    """Put latent files of any known tool into the spool.

    \b
    Example: h3spool export clip.safetensors --name "Cat on a roof" --meta seed=7
             h3spool export --video v.latent --audio a.latent
    """
    from h3spool import importers, latent, steps

    if any("=" not in pair for pair in meta):
        raise click.UsageError("--meta takes KEY=VALUE")
    pairs = [(video, audio)] if video else []
    if (audio and not video) or not (files or pairs):
        raise click.UsageError("give latent files, or --video FILE with --audio FILE")
    words = latent.parse_allow(allow)

    def one(main_file: Path, second: Path | None) -> steps.Outcome:
        try:
            found = importers.load([main_file, *([second] if second else [])], allow_pickle=allow_pickle)
            facts = {**found.facts, **dict(pair.split("=", 1) for pair in meta)}
            title = name or facts.pop("title", None)
            job = steps.export(
                found.video,
                found.audio,
                spool=spool,
                title=title,
                allow=words | latent.parse_allow(str(facts.pop("allow", ""))),
                meta=facts,
                producer=found.producer,
                min_free_bytes=int(min_free * GIB),
            )
        except BadData as error:
            return steps.Outcome(str(main_file), "refused", BadData(f"{main_file}: {error}"))
        except H3SpoolError as error:
            return steps.Outcome(str(main_file), "refused", error)
        return steps.Outcome(job, "incoming")

    Batch(as_json).run(one(*pair) for pair in [*pairs, *((file, None) for file in files)])


COMMANDS = (init, export)
