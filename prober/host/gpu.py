"""GPU inventory types, CUDA_VISIBLE_DEVICES rules, and the choice of GPUs for a probe. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from prober.host.processes import Owner
from prober.records import NotReady, UsageError

MIB = 1024 * 1024
# Memory an idle GPU may hold. Older drivers count their own reserve as used.
IDLE_BYTES = 512 * MIB
IDLE_BYTES_WITH_RESERVE = 1024 * MIB


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds GPU memory, as reported by the driver."""

    pid: int  # as the driver reports it: in a container possibly the host's pid
    used_bytes: int | None = None
    owner: Owner = Owner.OTHER
    name: str | None = None
    is_graphics: bool = False  # a desktop: holds some memory permanently and does not interfere


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one MIG device. ``None``: the driver does not report it."""

    index: int  # NVML index in PCI order, as in nvidia-smi; for a MIG device its parent's
    uuid: str
    name: str
    memory_total_bytes: int | None = None  # with unified memory the host's
    memory_used_bytes: int | None = None  # without the driver's reserve, if reported separately
    memory_reserved_bytes: int | None = None
    compute_capability: str | None = None  # "9.0"
    ecc: bool | None = None
    mig: bool | None = None
    parent_uuid: str | None = None  # MIG devices only
    power_limit_watts: float | None = None
    nvlink_links: int | None = None  # active links
    processes: tuple[GpuProcess, ...] | None = None
    is_unified_memory: bool = False
    is_under_windows: bool = False  # WSL: the desktop holds some memory; processes are not visible

    @property
    def is_memory_shared(self) -> bool:
        """Whether processes that NVML does not list share this memory, so that the used amount alone says little."""
        return self.is_unified_memory or self.is_under_windows

    @property
    def is_idle(self) -> bool:
        """Whether no compute process is listed and no memory is used beyond what a desktop explains."""
        processes = self.processes or ()
        if any(not one.is_graphics for one in processes):
            return False
        if self.memory_used_bytes is None or self.is_memory_shared:
            return True
        desktop = sum(one.used_bytes or 0 for one in processes)
        allowed = IDLE_BYTES_WITH_RESERVE if self.memory_reserved_bytes is None else IDLE_BYTES
        return self.memory_used_bytes - desktop <= allowed


@dataclass(frozen=True, slots=True)
class Inventory:
    """The GPUs this process may use, and why others are missing."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None  # newest CUDA version the driver supports
    problem: str | None = None  # why GPUs or facts about them are missing
    uuids: tuple[str, ...] = ()  # every physical GPU that responded, including hidden ones


def visible_gpus(gpus: Sequence[Gpu], value: str | None) -> tuple[tuple[Gpu, ...], str | None]:
    """Apply ``CUDA_VISIBLE_DEVICES=value``: return the visible GPUs in its order, and a warning if entries are invalid.

    CUDA's rules: unset (None) shows all; every entry must be of the first one's kind (number, ``GPU-`` prefix or
    ``MIG-`` name); the first invalid entry ends the list; a duplicate empties it; a number is read up to its first
    non-digit; the number of a GPU in MIG mode means its first MIG device.
    """
    if value is None:
        return tuple(gpus), None
    visible: list[Gpu] = []
    for entry in (part.strip() for part in value.split(",")):
        gpu = _named(gpus, entry) if _kind(entry) == _kind(value.strip()) else None
        if gpu is None:
            warning = f"CUDA_VISIBLE_DEVICES={value!r} shows no GPU from {entry!r} on"
            return tuple(visible), warning if value.strip() else "CUDA_VISIBLE_DEVICES is empty and hides every GPU"
        if gpu in visible:
            return (), f"CUDA_VISIBLE_DEVICES={value!r} names GPU {gpu.index} twice, for which CUDA shows none"
        visible.append(gpu)
    return tuple(visible), None


def visible_setting(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return the environment variables that make exactly these GPUs visible.

    Uses indices where possible, in PCI order: vLLM up to 0.9 reads ``CUDA_VISIBLE_DEVICES`` with ``int()``.
    """
    names = (gpu.uuid if gpu.parent_uuid else str(gpu.index) for gpu in gpus)
    return {"CUDA_VISIBLE_DEVICES": ",".join(names), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def choose(
    inventory: Inventory, count: int, wanted: Sequence[str] | None = None, taken: Collection[str] = ()
) -> tuple[Gpu, ...]:
    """Choose ``count`` GPUs of one type: idle ones first, then those with the least memory in use.

    ``wanted``: indices or UUID prefixes to choose from; ``taken``: UUIDs leased by other probers. Busy GPUs may be
    returned: the caller waits for them. Raises UsageError if this machine can never satisfy the request, NotReady if
    it cannot now.
    """
    if not inventory.gpus:
        raise NotReady(inventory.problem or "no GPU is visible")
    candidates = inventory.gpus if wanted is None else _resolve(inventory.gpus, wanted)
    if len(candidates) < count:
        raise UsageError(_too_few(inventory, len(candidates), count, wanted is not None))
    if count > 1:
        candidates = _without_mig(candidates, count)
    types = [kind for kind in _by_type(candidates) if len(kind) >= count]
    if not types:
        listing = ", ".join(f"{len(kind)} × {kind[0].name}" for kind in _by_type(candidates))
        raise UsageError(f"--tp {count} needs {count} GPUs of one type, here are {listing}")
    free = [tuple(gpu for gpu in kind if gpu.uuid not in taken) for kind in types]
    enough = [kind for kind in free if len(kind) >= count]
    if not enough:
        leased = ", ".join(str(gpu.index) for gpu in candidates if gpu.uuid in taken)
        raise NotReady(f"{count} free GPUs are needed and GPU {leased} is leased to another prober: wait for it")
    best = max(enough, key=lambda kind: min(count, sum(gpu.is_idle for gpu in kind)))
    ranked = sorted(best, key=lambda gpu: (not gpu.is_idle, 0 if gpu.is_idle else gpu.memory_used_bytes or 0))
    return tuple(sorted(ranked[:count], key=best.index))


def _kind(entry: str) -> str:
    return next((prefix for prefix in ("GPU-", "MIG-") if entry.startswith(prefix)), "number")


def _named(gpus: Iterable[Gpu], entry: str) -> Gpu | None:
    if _kind(entry) == "number":
        digits = re.match(r"\d+", entry)
        return next((gpu for gpu in gpus if digits and gpu.index == int(digits[0])), None)
    matches = [gpu for gpu in gpus if gpu.uuid == entry or gpu.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _resolve(gpus: Sequence[Gpu], wanted: Sequence[str]) -> tuple[Gpu, ...]:
    """Return the GPUs named by ``--gpus``; each entry must name exactly one."""
    found: list[Gpu] = []
    for entry in wanted:
        matches = [gpu for gpu in gpus if entry == str(gpu.index) or (len(entry) > 4 and gpu.uuid.startswith(entry))]
        if len(matches) != 1:
            here = ", ".join(gpu.uuid if gpu.parent_uuid else str(gpu.index) for gpu in gpus)
            which = "names several devices" if matches else "names no GPU that this process may use"
            raise UsageError(f"--gpus {entry} {which}; there are: {here}")
        if matches[0] in found:
            raise UsageError(f"--gpus names GPU {entry} twice")
        found += matches
    return tuple(found)


def _too_few(inventory: Inventory, have: int, count: int, is_requested: bool) -> str:
    need = f"--tp {count} needs {count}"
    if is_requested:
        return f"--gpus names {have} GPU{'s' * (have != 1)}, {need}"
    if have < len(inventory.uuids):
        return f"CUDA_VISIBLE_DEVICES shows {have} of this machine's {len(inventory.uuids)} GPUs, {need}"
    return f"this machine has {have} GPU{'s' * (have != 1)}, {need}"


def _without_mig(gpus: Sequence[Gpu], count: int) -> tuple[Gpu, ...]:
    whole = tuple(gpu for gpu in gpus if gpu.parent_uuid is None)
    if len(whole) < count:
        raise UsageError(
            f"--tp {count} needs {count} whole GPUs, here are {len(whole)}: tensor parallelism cannot join MIG devices"
        )
    return whole


def _by_type(gpus: Iterable[Gpu]) -> list[tuple[Gpu, ...]]:
    """Group by name and memory (cards of one name may differ in memory), in order of first appearance."""
    groups: dict[tuple[str, int | None], list[Gpu]] = {}
    for gpu in gpus:
        gib = None if gpu.memory_total_bytes is None else round(gpu.memory_total_bytes / 2**30)
        groups.setdefault((gpu.name, gib), []).append(gpu)
    return [tuple(group) for group in groups.values()]
