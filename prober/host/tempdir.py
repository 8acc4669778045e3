"""Private temporary directories for trials, and removal of those that killed probers left behind."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

PREFIX = "prober-trials-"
LOCK_NAME = ".lock"
SETTLED_SECONDS = 60.0  # a younger directory may not be locked yet


@contextmanager
def private_folder(parent: Path) -> Iterator[Path]:
    """Yield a new directory that only this user can read, and remove it afterwards.

    Also removes the directories of dead probers. The kernel releases a directory's lock when its prober dies, and the
    lock is visible across containers that share ``parent``.
    """
    remove_left_over(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    with FileLock(folder / LOCK_NAME, timeout=0, thread_local=False):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_left_over(parent: Path) -> None:
    """Remove this user's private directories whose prober is dead."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError, Timeout):
            found = folder.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            if is_ours and time.time() - found.st_mtime > SETTLED_SECONDS:
                with FileLock(folder / LOCK_NAME, timeout=0, thread_local=False):
                    shutil.rmtree(folder, ignore_errors=True)
