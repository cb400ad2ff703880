"""The ComfyUI custom node package `h3_latent_handoff`: `nodes` holds the two nodes, `install` puts them into a ComfyUI.

What is installed is one file that says where this h3spool lies and loads it from there, so that the nodes run in
ComfyUI's own Python, with its torch and numpy, whatever environment h3spool itself lives in.
"""

from __future__ import annotations

import os
from pathlib import Path

import h3spool
from h3spool.errors import NotFound, NotPermitted, explained

FOLDER = "h3_latent_handoff"
_MARK = "Written by `h3spool comfyui install`"
_STUB = '''"""{mark}; run it again when h3spool has moved. Saves MiniMax H3 latents into a spool."""

import importlib.util
import os
import sys

H3SPOOL = {package!r}

if "h3spool" not in sys.modules:
    if not os.path.isfile(os.path.join(H3SPOOL, "__init__.py")):
        raise ImportError("h3spool is no longer in " + H3SPOOL + ": run `h3spool comfyui install` again")
    # This package alone: its folder on sys.path would offer ComfyUI everything else that is installed beside it.
    spec = importlib.util.spec_from_file_location(
        "h3spool", os.path.join(H3SPOOL, "__init__.py"), submodule_search_locations=[H3SPOOL]
    )
    sys.modules["h3spool"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["h3spool"])

from h3spool.node.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
'''


def install(custom_nodes: Path | str) -> Path:
    """Write the node package into a ComfyUI; doing it again renews it.

    Args:
        custom_nodes: the `custom_nodes` folder, or the ComfyUI folder that holds it.

    Returns:
        The folder written. ComfyUI loads it at its next start.

    Raises:
        NotFound: there is no such folder.
        NotPermitted: something else has the package's name there.
        IOFailed
    """
    place = Path(custom_nodes)
    if (place / "custom_nodes").is_dir():
        place = place / "custom_nodes"
    if not place.is_dir() or place.name != "custom_nodes":
        raise NotFound(f"{place}: not a custom_nodes folder; give the one of your ComfyUI")
    folder = place / FOLDER
    stub, fresh = folder / "__init__.py", folder / f".{os.getpid()}.part"
    with explained("installing the node", folder):
        ours = stub.is_file() and _MARK in stub.read_text(errors="replace")
        if folder.is_symlink() or (folder.exists() and not ours):
            raise NotPermitted(f"{folder}: is there and was not written by h3spool; move it away first")
        folder.mkdir(exist_ok=True)
        fresh.write_text(_STUB.format(mark=_MARK, package=str(Path(h3spool.__file__).resolve().parent)))
        os.replace(fresh, stub)
    return folder
