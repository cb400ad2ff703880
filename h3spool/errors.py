"""Every failure h3spool reports: one class per exit code.

The docstring of a class is the sentence README prints for its exit code. The message of an instance says what
failed, on which path, why, and what to do next. Anything else that escapes is a bug: exit 1, with a traceback.
"""


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
