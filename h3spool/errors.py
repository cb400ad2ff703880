"""Every failure h3spool reports: one class per exit code.

The docstring of a class is the sentence README prints for its exit code. The message of an instance says what
failed, on which path, why, and what to do next. Anything else that escapes is a bug: exit 1, with a traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike


class H3SpoolError(Exception):
    """A bug in h3spool: the traceback is shown, please report it."""

    exit_code = 1


class BadData(H3SpoolError):
    """The data is wrong: a hash, shape, length or value that no retry can mend."""

    exit_code = 65


class NotFound(H3SpoolError):
    """There is no such job, file or spool."""

    exit_code = 66


class Unavailable(H3SpoolError):
    """A program or device is missing."""

    exit_code = 69


class IOFailed(H3SpoolError):
    """Local or remote input/output failed, or the disk here is full."""

    exit_code = 74


class TryLater(H3SpoolError):
    """Try again later: the host is unreachable, a lock is held, the peer is full."""

    exit_code = 75


class NotPermitted(H3SpoolError):
    """Permission denied: unsafe modes or owner, a host key or authentication refused."""

    exit_code = 77


class NotUsable(H3SpoolError):
    """A checkpoint, spool format, role or wire version cannot be used here."""

    exit_code = 78


ERRORS = (BadData, NotFound, Unavailable, IOFailed, TryLater, NotPermitted, NotUsable)
BY_EXIT_CODE = {error.exit_code: error for error in ERRORS}  # what a peer's exit code means here
# What a batch exits with when several kinds of failure occurred: the one that most needs a person comes first.
_PRECEDENCE = (1, 74, 77, 78, 69, 75, 65, 66)


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived; the job at hand was put back. Exits with 128 + the signal's number."""

    def __init__(self, signum: int):
        super().__init__(f"interrupted by signal {signum}")
        self.exit_code = 128 + signum


def batch_exit_code(codes: Iterable[int]) -> int:
    """The exit code of a batch, given those of its jobs."""
    occurred = set(codes)
    return next((code for code in _PRECEDENCE if code in occurred), 0)


def from_os_error(error: OSError, doing: str, path: str | PathLike[str]) -> H3SpoolError:
    """Say in our terms what the operating system refused while `doing` something with `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return IOFailed(
            f"{path}: {doing} failed: the disk is full (or out of inodes); free some space and run it again"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return NotPermitted(f"{path}: {doing} failed: {error.strerror}; check its owner and mode")
    if error.errno == errno.ELOOP:
        return NotPermitted(f"{path}: {doing} failed: it is a symbolic link, which a spool never follows")
    return IOFailed(f"{path}: {doing} failed: {error.strerror or error}")


@contextmanager
def explained(doing: str, path: str | PathLike[str]) -> Iterator[None]:
    """Turn an OSError of the block into one of ours, naming `path`."""
    try:
        yield
    except OSError as error:
        raise from_os_error(error, doing, path) from error
