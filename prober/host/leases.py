"""GPU leases: one lock file per GPU UUID on a local disk, held while a prober measures on the GPU.

The kernel releases the lock when its holder dies, and child processes (exec) do not inherit it. A file beside each
lock names the holder. Leases work among the probers of one user on one host (one ``/tmp``); other users and containers
are only seen as processes on the GPU.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from prober.host import processes
from prober.host.files import replace_file
from prober.host.gpu import Gpu, Inventory, choose
from prober.records import NotReady


@dataclass(frozen=True, slots=True)
class Holder:
    """The prober that holds a lease."""

    pid: int
    start: str  # start time of the process: a pid alone can be reused
    since: str  # ISO 8601, UTC

    @property
    def is_running(self) -> bool:
        return processes.is_running(self.pid, self.start)


class _Leased(NotReady):
    """Another prober holds this GPU."""

    def __init__(self, gpu: Gpu, holder: Holder | None) -> None:
        super().__init__(_busy(gpu, holder))
        self.uuid = gpu.uuid


class Lease:
    """A context manager that holds ``gpus`` until exit."""

    def __init__(self, gpus: Sequence[Gpu], locks: Sequence[FileLock]) -> None:
        self.gpus = tuple(gpus)
        self._locks = list(locks)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Release all GPUs. Idempotent."""
        while self._locks:
            lock = self._locks.pop()
            _holder_path(Path(lock.lock_file)).unlink(missing_ok=True)
            lock.release()


def lease(gpus: Sequence[Gpu], directory: Path | None = None) -> Lease:
    """Lease these GPUs, all or none, without waiting. A dead holder's lease is taken over.

    Raises NotReady, naming the holder, if another prober holds one of them.
    """
    folder = _folder(directory)
    held = Lease(gpus, ())
    try:
        for gpu in sorted(gpus, key=lambda gpu: gpu.uuid):
            held._locks.append(_lock(folder, gpu))
    except BaseException:
        held.release()
        raise
    return held


def choose_and_lease(
    inventory: Inventory, count: int, wanted: Sequence[str] | None = None, directory: Path | None = None
) -> Lease:
    """Choose GPUs that no other prober holds and lease them. Raises as `gpu.choose` does."""
    taken: dict[str, _Leased] = {}
    while True:
        try:
            return lease(choose(inventory, count, wanted, taken), directory)
        except _Leased as refusal:
            taken[refusal.uuid] = refusal
        except NotReady:
            for first in taken.values():
                raise first from None  # it names the holder
            raise


def holders(uuids: Sequence[str], directory: Path | None = None) -> dict[str, Holder]:
    """Return the running holders of the leased GPUs, by UUID."""
    folder = _folder(directory)
    known = ((uuid, _holder(_lock_path(folder, uuid))) for uuid in uuids)
    return {uuid: holder for uuid, holder in known if holder is not None and holder.is_running}


def _lock(folder: Path, gpu: Gpu) -> FileLock:
    path = _lock_path(folder, gpu.uuid)
    lock = FileLock(path, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise _Leased(gpu, _holder(path)) from None
    except OSError as error:
        raise NotReady(f"the lease of GPU {gpu.index} cannot be written ({error})") from None
    here = Holder(os.getpid(), processes.start_of(os.getpid()) or "", datetime.now(UTC).isoformat(timespec="seconds"))
    try:
        replace_file(_holder_path(path), json.dumps(asdict(here)).encode())
    except OSError as error:
        lock.release()
        raise NotReady(f"the lease of GPU {gpu.index} cannot be written ({error})") from None
    return lock


def _busy(gpu: Gpu, holder: Holder | None) -> str:
    if holder is None or not holder.is_running:
        return f"GPU {gpu.index} ({gpu.name}) is leased to another prober that has not said who it is: try again"
    return (
        f"GPU {gpu.index} ({gpu.name}) is leased to another prober, pid {holder.pid}, since {holder.since}: "
        f"wait for it, or look at it with `ps -fp {holder.pid}`"
    )


def _holder(lock_path: Path) -> Holder | None:
    try:
        written = json.loads(_holder_path(lock_path).read_text(encoding="utf-8"))
        return Holder(int(written["pid"]), str(written["start"]), str(written["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _lock_path(folder: Path, uuid: str) -> Path:
    return folder / f"{re.sub(r'[^A-Za-z0-9.-]', '_', uuid)}.lock"


def _holder_path(lock_path: Path) -> Path:
    return lock_path.with_suffix(".json")


def _folder(directory: Path | None) -> Path:
    """Return this user's lease directory.

    Does not depend on ``TMPDIR`` or ``XDG_RUNTIME_DIR``, which differ between a scheduled job and a terminal session.
    """
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        return directory
    base = Path("/tmp") if os.access("/tmp", os.W_OK) else Path(tempfile.gettempdir())  # noqa: S108 # checked below
    folder = base / f"prober-leases-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise NotReady(f"leases cannot be kept in {folder} ({error})") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise NotReady(f"{folder} belongs to another user, so leases cannot be kept there: have it removed")
    return folder
