"""The command line: the only package that prints and exits. stdout is data, stderr is for people.

Command bodies import what they need, so that `--help` costs click alone and torch is loaded by decoding only.
"""

from __future__ import annotations

import os
import sys
import traceback

import click

from h3spool import __version__
from h3spool.cli import decoding, feed, handover, look, upkeep
from h3spool.cli.output import note
from h3spool.errors import H3SpoolError, Interrupted


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        code = commands.main(prog_name="h3spool", standalone_mode=False)
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = 2
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except Interrupted as error:
        note(f"h3spool: {error}; nothing is lost")
        code = error.exit_code
    except (BrokenPipeError, SystemExit):  # the reader of stdout went away, which click ends with sys.exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 0
    except H3SpoolError as error:
        note(f"h3spool: {error}")
        code = error.exit_code
    except Exception:
        note(f"h3spool {__version__}: this is a bug, please report it:\n{traceback.format_exc()}")
        code = 1
    sys.exit(code or 0)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="h3spool %(version)s")
def commands() -> None:
    """Sample MiniMax H3 clips on one machine, decode them on another, lose nothing in between."""


for _module in (feed, handover, decoding, look, upkeep):
    for _command in _module.COMMANDS:
        commands.add_command(_command)
