"""What a GPU is, which ones CUDA_VISIBLE_DEVICES shows, and which to take for a probe. Pure: nothing is asked here."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from prober.host.processes import Owner
from prober.records import NotReady, UsageError

MIB = 1024 * 1024
# What a GPU may hold and still count as idle. Drivers that do not tell their own reserve apart count it as used.
IDLE_BYTES = 512 * MIB
IDLE_BYTES_WITH_RESERVE = 1024 * MIB


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that the driver says holds memory on a GPU."""

    pid: int  # as the driver counts: in a container it may be the host's number
    used_bytes: int | None = None
    owner: Owner = Owner.OTHER
    name: str | None = None
    is_graphics: bool = False  # a desktop: it holds some memory for ever and does not disturb


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one MIG device. ``None``: the driver does not say."""

    index: int  # NVML's, in PCI order, as nvidia-smi counts; of a MIG device its parent's
    uuid: str
    name: str
    memory_total_bytes: int | None = None  # on unified memory the host's
    memory_used_bytes: int | None = None  # without what the driver reserves, where it tells them apart
    memory_reserved_bytes: int | None = None
    compute_capability: str | None = None  # "9.0"
    ecc: bool | None = None
    mig: bool | None = None
    parent_uuid: str | None = None  # of a MIG device
    power_limit_watts: float | None = None
    nvlink_links: int | None = None  # active ones
    processes: tuple[GpuProcess, ...] | None = None
    is_unified_memory: bool = False
    is_under_windows: bool = False  # WSL: the desktop holds some of the memory, and no process can be seen

    @property
    def is_memory_shared(self) -> bool:
        """Others that NVML does not show hold and move memory all the time, so that its amount alone says little."""
        return self.is_unified_memory or self.is_under_windows

    @property
    def is_idle(self) -> bool:
        """Nobody computes on it, as far as the driver tells, and no memory is held that a desktop does not explain."""
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
    """The GPUs this process may use, and what stands in the way."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None  # the newest CUDA the driver serves
    problem: str | None = None  # why there are none, or what NVML would not say
    uuids: tuple[str, ...] = ()  # of every physical GPU that answered, also of those that are not visible


def visible_gpus(gpus: Sequence[Gpu], setting: str | None) -> tuple[tuple[Gpu, ...], str | None]:
    """Return what ``CUDA_VISIBLE_DEVICES=setting`` shows of the GPUs, in its order, and a sentence about what it hides.

    CUDA's rules: unset shows all; the first entry's kind (number, ``GPU-`` prefix, ``MIG-`` name) is that of all; the
    first entry that names no device ends the list; a device named twice empties it; a number is read up to its first
    other character; the number of a GPU that is split into MIG devices means its first one.
    """
    if setting is None:
        return tuple(gpus), None
    shown: list[Gpu] = []
    for entry in (part.strip() for part in setting.split(",")):
        gpu = _named(gpus, entry) if _kind(entry) == _kind(setting.strip()) else None
        if gpu is None:
            complaint = f"CUDA_VISIBLE_DEVICES={setting!r} shows no GPU from {entry!r} on"
            return tuple(shown), complaint if setting.strip() else "CUDA_VISIBLE_DEVICES is empty and hides every GPU"
        if gpu in shown:
            return (), f"CUDA_VISIBLE_DEVICES={setting!r} names GPU {gpu.index} twice, for which CUDA shows none"
        shown.append(gpu)
    return tuple(shown), None


def visible_setting(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return the environment in which a trial sees exactly these GPUs.

    Numbers where possible: vLLM up to 0.9 reads ``CUDA_VISIBLE_DEVICES`` with ``int()``. Numbers need the PCI order.
    """
    names = (gpu.uuid if gpu.parent_uuid else str(gpu.index) for gpu in gpus)
    return {"CUDA_VISIBLE_DEVICES": ",".join(names), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def choose(
    inventory: Inventory, count: int, wanted: Sequence[str] | None = None, taken: Collection[str] = ()
) -> tuple[Gpu, ...]:
    """Take ``count`` GPUs of one type: idle ones first, then those that hold the least (the caller waits for them).

    ``wanted``: numbers or UUIDs (their beginnings) to choose from; ``taken``: UUIDs that another prober has leased.
    Raises UsageError where this machine can never serve the wish, NotReady where it cannot now.
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
    """Return the GPUs the user named; each entry must name exactly one."""
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


def _too_few(inventory: Inventory, have: int, count: int, is_wish: bool) -> str:
    need = f"--tp {count} needs {count}"
    if is_wish:
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
    """Group by name and memory (two cards of one name may differ in memory), in the order of first appearance."""
    groups: dict[tuple[str, int | None], list[Gpu]] = {}
    for gpu in gpus:
        gib = None if gpu.memory_total_bytes is None else round(gpu.memory_total_bytes / 2**30)
        groups.setdefault((gpu.name, gib), []).append(gpu)
    return [tuple(group) for group in groups.values()]
