"""A folder of this prober's own, for what its trials write; and the end of those that killed probers have left."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "prober-trials-"
SETTLED_SECONDS = 60.0  # a younger one may not be locked yet


@contextmanager
def private_folder(parent: Path) -> Iterator[Path]:
    """Yield an empty folder that only we can read, gone afterwards; those that killed probers have left go, too.

    A lock says that its prober lives: it holds across containers that share the parent.
    """
    remove_left_over(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def remove_left_over(parent: Path) -> None:
    """Remove our own private folders whose prober is dead. A new one may not be locked yet: it is left alone."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            if is_ours and time.time() - found.st_mtime > SETTLED_SECONDS:
                handle = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(handle)
