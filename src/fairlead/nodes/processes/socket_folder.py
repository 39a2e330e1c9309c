"""The folder of a server's Unix sockets: only its user can enter it, and it does not outlive the server long.

A server that is killed cannot remove its folder, so the next one of this user does. The lock of a file in the
folder says whether its server still runs: the system releases the lock however the process ends.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "fairlead-"
LOCK = "lock"


@contextmanager
def socket_folder() -> Iterator[str]:
    """Make a folder for the time of the block. First remove those of servers that were killed.

    Raises `OSError`.
    """
    # `tempfile` would report a lack of descriptors as a lack of folders.
    os.close(os.open(os.devnull, os.O_RDONLY))
    _remove_abandoned(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        # A file with the name of the lock is locked from the beginning, or it would look abandoned.
        draft = folder / "draft"
        with draft.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            draft.rename(folder / LOCK)
            yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user whose lock is free. One without a lock may be just being made."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
