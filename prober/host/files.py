"""Atomic file replacement."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file in one step: readers see the old content or the new one, also after a crash.

    The content is on disk (fsync) when this returns; a symbolic link stays a link. Writers of one path must exclude
    each other, because they share the draft beside it. Raises OSError and leaves the file as it was.
    """
    target = path.resolve()
    draft = target.with_name(f"{target.name}.draft")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
