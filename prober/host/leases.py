"""One prober a GPU: a lock per GPU UUID on a local disk, held for as long as the GPU is measured on.

The kernel gives the lock back when its holder dies, however it dies, and children that are started (exec) do not
inherit it. Beside each lock stands who holds it, to name them to others. Leases bind the probers of one user on one
host (one ``/tmp``); other users and other containers are seen as neighbours only.
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
    """Who holds a lease."""

    pid: int
    start: str  # of that process, to know it from a later one of the same pid
    since: str  # ISO 8601, UTC

    @property
    def lives(self) -> bool:
        return processes.is_running(self.pid, self.start)


class _Leased(NotReady):
    """Another prober holds this GPU."""

    def __init__(self, gpu: Gpu, holder: Holder | None) -> None:
        super().__init__(_busy(gpu, holder))
        self.uuid = gpu.uuid


class Lease:
    """The hold on some GPUs, given back on exit. ``gpus`` are the ones that are held."""

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
        """Give all of them back. Doing it twice is harmless."""
        while self._locks:
            lock = self._locks.pop()
            _holder_path(Path(lock.lock_file)).unlink(missing_ok=True)
            lock.release()


def lease(gpus: Sequence[Gpu], directory: Path | None = None) -> Lease:
    """Hold these GPUs, all or none, without waiting. A dead holder's lease is taken over.

    Raises NotReady, naming the holder, where another prober holds one of them.
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
    """Choose among the GPUs that no other prober holds and hold them; see ``devices.choose`` for the errors."""
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
    """Tell which GPUs are leased now, and by whom, as far as the living holders have written it down."""
    folder = _folder(directory)
    known = ((uuid, _holder(_lock_path(folder, uuid))) for uuid in uuids)
    return {uuid: holder for uuid, holder in known if holder is not None and holder.lives}


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
    if holder is None or not holder.lives:
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
    """Return the folder of the leases, ours alone.

    Always the same place, whatever the session sets (a nightly job has another ``TMPDIR`` and no ``XDG_RUNTIME_DIR``,
    and must still meet the prober in the terminal).
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
        raise NotReady(f"{folder} belongs to somebody else: leases cannot be kept there; have it removed")
    return folder
