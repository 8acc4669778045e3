"""Stop a trial before it exhausts the host's memory or disk."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from prober.host import system

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # only read
GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Danger:
    """Why the trial must stop now. ``is_ours``: the trial itself used up the resource."""

    what: str
    is_ours: bool


@dataclass(frozen=True, slots=True)
class Floors:
    """What must stay free, in bytes; at most half of the disk or /dev/shm space free before the trial."""

    memory_bytes: int
    shared_memory_bytes: int = 64 * MIB
    disk_bytes: int = 512 * MIB


def usual_floors() -> Floors:
    """Keep 5 % of the host's memory free, and at least 1 GiB (or half of a small host's memory)."""
    total = system.memory_total_bytes()
    return Floors(memory_bytes=max(total // 20, min(GIB, total // 2)))


class Guard:
    """Compares the host's free memory and disk with those before the trial."""

    def __init__(
        self,
        folder: Path,
        floors: Floors | None = None,
        available_bytes: Callable[[], int] = system.memory_available_bytes,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        self._folder = folder
        self._floors = floors or usual_floors()
        self._available_bytes, self._free_bytes = available_bytes, free_bytes
        self._available_before = available_bytes()
        self._shared_floor = min(self._floors.shared_memory_bytes, self._shared_bytes() // 2)
        self._disk_floor = min(self._floors.disk_bytes, free_bytes(folder) // 2)

    def danger(self, processes: Callable[[], Sequence[psutil.Process]]) -> Danger | None:
        """Return why the trial must stop now, or None. Calls ``processes`` (the trial's) only when memory is short."""
        available = self._available_bytes()
        if available < self._floors.memory_bytes:
            taken = self._available_before - available
            ours = memory_bytes(processes())
            what = f"host memory down to {available / GIB:.1f} GiB free, the trial holds {ours / GIB:.1f} GiB"
            return Danger(what, taken > 0 and ours >= 0.7 * taken)
        if self._shared_bytes() < self._shared_floor:
            return Danger(f"{SHARED_MEMORY} is nearly full", is_ours=False)
        if self._free_bytes(self._folder) < self._disk_floor:
            return Danger("the disk for the trial's log and compile cache is nearly full", is_ours=False)
        return None

    def _shared_bytes(self) -> int:
        try:
            return self._free_bytes(SHARED_MEMORY)
        except OSError:
            return 0


def memory_bytes(processes: Sequence[psutil.Process]) -> int:
    """Return the unreclaimable memory of these processes: proportional shares without mapped files."""
    return sum(_held_bytes(process) for process in processes)


def _held_bytes(process: psutil.Process) -> int:
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
        found = re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB$", text, re.MULTILINE)
        return 1024 * sum(map(int, found)) if found else int(process.memory_full_info().uss)
    except (psutil.Error, AttributeError, OSError):
        return 0
