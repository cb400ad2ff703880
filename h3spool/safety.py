"""What a spool refuses to lie on: links, other users' directories, modes open to others, network filesystems."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from h3spool.errors import NotPermitted, NotUsable, from_os_error

_NETWORK_FS = re.compile(r"nfs|cifs|smb|fuse|9p|afs|ceph|glusterfs|lustre")


def refuse_unsafe(path: Path) -> None:
    """Refuse a directory that is missing, a link, another user's, or writable by others.

    Raises:
        NotUsable, NotPermitted, IOFailed
    """
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        raise NotUsable(f"{path}: missing; `h3spool fsck --repair` recreates the directories of a spool") from None
    except OSError as error:
        raise from_os_error(error, "opening", path) from error
    if not stat.S_ISDIR(info.st_mode):
        raise NotPermitted(f"{path}: must be a directory, not a link or a file")
    if info.st_uid != os.geteuid():
        raise NotPermitted(f"{path}: belongs to uid {info.st_uid}, this process is uid {os.geteuid()}")
    if info.st_mode & 0o022:
        raise NotPermitted(f"{path}: is writable by group or others; chmod 700 {path}")


def refuse_network_fs(root: Path) -> None:
    """Refuse NFS, FUSE and their like, where flock and rename do not mean the same; machines share work by push.

    Raises:
        NotUsable
    """
    device = os.stat(root).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:  # no /proc in this sandbox: nothing to go by
        return
    for line in mounts:
        fields = line.split()
        kind = fields[fields.index("-") + 1]
        if fields[2] == wanted and _NETWORK_FS.match(kind):
            raise NotUsable(
                f"{root}: lies on a {kind} filesystem, where locks and renames cannot be trusted; use a local disk and "
                "`h3spool push`, or --allow-network-fs at your own risk"
            )
