"""h3spool: MiniMax H3 video generation as a pipeline over machines.

The sampler node drops finished audio+video latents into a spool directory, a decoder node turns them into MP4s.
The command line is the interface; the one thing offered to Python is `from h3spool import export`.
"""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import `export` on first use, so that `import h3spool` costs nothing inside ComfyUI."""
    if name == "export":
        from h3spool.steps import export

        return export
    raise AttributeError(f"module 'h3spool' has no attribute {name!r}")
