"""Wait for GPUs to be idle before a trial and for their memory to be released after it.

Before the first trial, idle means: no compute process, no memory in use beyond what a desktop explains, and a stable
amount. Afterwards it means: back at that baseline. Facts that the driver does not report are not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from prober.host import processes
from prober.host.gpu import MIB, Gpu, GpuProcess, Inventory
from prober.host.processes import LeftOver, Owner
from prober.records import NotReady

POLL_SECONDS = 0.5
TOLERANCE_BYTES = 64 * MIB
# Memory shared with the host or a desktop fluctuates: smaller differences mean nothing.
SHARED_TOLERANCE_BYTES = 1024 * MIB


@dataclass(frozen=True, slots=True)
class Baseline:
    """Memory in use on a set of idle GPUs, in bytes by UUID; absent where the driver does not report it."""

    used_bytes: Mapping[str, int] = field(default_factory=dict)
    others_bytes: Mapping[str, int] = field(default_factory=dict)  # of which other users' visible processes

    @property
    def total_used_mib(self) -> int:
        return sum(self.used_bytes.values()) // MIB


def wait_until_idle(
    read: Callable[[], Inventory],
    uuids: Collection[str],
    baseline: Baseline | None = None,
    *,
    limit_seconds: float,
    report: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Baseline:
    """Wait until every GPU of the set is idle and return the memory in use then.

    Calls ``report`` whenever the cause of the wait changes. Raises NotReady after ``limit_seconds``, naming the
    processes and a command to inspect them, or the driver's error if a GPU disappeared.
    """
    until = clock() + limit_seconds
    reported: object = None
    before: Inventory | None = None
    while True:
        now = read()
        missing, gpus = _find(now, uuids)
        busy = tuple(gpu for gpu in gpus if not _is_at_rest(gpu, baseline))
        why = missing or "; ".join(f"GPU {gpu.index}: {describe(gpu)}" for gpu in busy)
        if not why and (baseline is not None or _is_stable(before, gpus)):
            return _baseline(gpus, baseline)
        if why and reported != (reported := missing or _who(busy)):
            report(f"waiting for {why}")
        if clock() >= until:
            raise NotReady(f"waited {limit_seconds:.0f} s for {why or 'GPU memory to stand still'}; {_inspect(busy)}")
        before = now
        sleep(min(POLL_SECONDS, max(0.0, until - clock())))


def wait_for_return(
    read: Callable[[], Inventory],
    before: Baseline,
    *,
    limit_seconds: float,
    report: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, int]:
    """Wait until a trial's memory is released; return what is still held after the limit (see `leak`)."""
    until = clock() + limit_seconds
    has_reported = False
    while True:
        now = read()
        leaked = leak(before, now)
        if not any(leaked.values()) and leaked.keys() == before.used_bytes.keys():
            return leaked
        if clock() >= until:
            return leaked
        if not has_reported:
            report(f"waiting for the trial's GPU memory to return: {_bytes(leaked)}")
            has_reported = True
        sleep(min(POLL_SECONDS, max(0.0, until - clock())))


def leak(before: Baseline, after: Inventory) -> dict[str, int]:
    """Return the bytes held beyond the baseline, by UUID: 0 within the tolerance, absent where not reported.

    Memory that other users' processes took since the baseline is not a leak.
    """
    leaked = {}
    for gpu in after.gpus:
        if gpu.uuid not in before.used_bytes or gpu.memory_used_bytes is None:
            continue
        newcomers = max(0, _others_bytes(gpu) - before.others_bytes.get(gpu.uuid, 0))
        excess = gpu.memory_used_bytes - before.used_bytes[gpu.uuid] - newcomers
        leaked[gpu.uuid] = excess if excess > _tolerance(gpu) else 0
    return leaked


def newcomers(before: Baseline, now: Inventory) -> str | None:
    """Describe other users' processes that took memory since the baseline; None if there are none."""
    for gpu in now.gpus:
        known = before.others_bytes.get(gpu.uuid)
        if known is not None and _others_bytes(gpu) - known > _tolerance(gpu):
            others = (one for one in gpu.processes or () if one.owner is Owner.OTHER)
            return f"GPU {gpu.index}: {', '.join(map(_process, others))}"
    return None


def stale_processes() -> list[LeftOver]:
    """List leftover processes of earlier trials: tagged as a trial's, started by a prober that is dead."""
    return processes.left_over()


def end_stale() -> tuple[list[LeftOver], list[LeftOver]]:
    """Kill those leftovers; return the killed ones and those still alive."""
    found = stale_processes()
    alive = processes.end(found)
    return [one for one in found if one not in alive], alive


def describe(gpu: Gpu) -> str:
    """Describe what holds a GPU's memory."""
    processes = gpu.processes or ()
    held = ", ".join(_process(one) for one in processes)
    unexplained = _unexplained_bytes(gpu)
    if unexplained is not None and unexplained > _tolerance(gpu) and not gpu.is_memory_shared:
        why = "by no process that can be seen here (a zombie context, or another container)"
        if gpu.processes is None:
            why = "and the driver does not say by whom"
        held = ", ".join(part for part in (held, f"{_gib(unexplained)} held {why}") if part)
    return held or "nothing"


# --- interference ----------------------------------------------------------------------------------------------------


def _find(now: Inventory, uuids: Collection[str]) -> tuple[str | None, tuple[Gpu, ...]]:
    gpus = tuple(gpu for gpu in now.gpus if gpu.uuid in uuids)
    missing = sorted(set(uuids) - {gpu.uuid for gpu in gpus})
    if missing:
        return f"{', '.join(missing)}, which the driver does not list ({now.problem or 'it says no reason'})", gpus
    return None, gpus


def _who(busy: Iterable[Gpu]) -> object:
    """Return what changes only when there is something new to report: amounts of memory fluctuate."""
    return tuple((gpu.uuid, tuple(one.pid for one in gpu.processes or ())) for gpu in busy)


def _is_at_rest(gpu: Gpu, baseline: Baseline | None) -> bool:
    if any(one.owner is Owner.OURS_LEFT_OVER for one in gpu.processes or ()):
        return False
    if baseline is None or gpu.memory_used_bytes is None or gpu.uuid not in baseline.used_bytes:
        return gpu.is_idle
    return gpu.memory_used_bytes <= baseline.used_bytes[gpu.uuid] + _tolerance(gpu)


def _is_stable(before: Inventory | None, gpus: Iterable[Gpu]) -> bool:
    """Whether two readings agree: a stopped server releases its memory over seconds."""
    if before is None:
        return False
    earlier = {gpu.uuid: gpu.memory_used_bytes for gpu in before.gpus}
    return all(
        gpu.memory_used_bytes is None or abs(gpu.memory_used_bytes - (earlier.get(gpu.uuid) or 0)) <= _tolerance(gpu)
        for gpu in gpus
    )


def _baseline(gpus: Iterable[Gpu], earlier: Baseline | None) -> Baseline:
    """Return current usage, never above an earlier baseline: small leaks would otherwise add up unnoticed."""
    most = earlier.used_bytes if earlier else {}
    used = {gpu.uuid: gpu.memory_used_bytes for gpu in gpus if gpu.memory_used_bytes is not None}
    return Baseline(
        {uuid: min(count, most.get(uuid, count)) for uuid, count in used.items()},
        {gpu.uuid: _others_bytes(gpu) for gpu in gpus},
    )


def _others_bytes(gpu: Gpu) -> int:
    """Return what other users' processes hold. A hidden process may be ours and just ending: not counted."""
    return sum(one.used_bytes or 0 for one in gpu.processes or () if one.owner is Owner.OTHER)


def _tolerance(gpu: Gpu) -> int:
    return SHARED_TOLERANCE_BYTES if gpu.is_memory_shared else TOLERANCE_BYTES


def _unexplained_bytes(gpu: Gpu) -> int | None:
    """Return what no listed process holds; None where a process's share or the total is not reported."""
    if gpu.memory_used_bytes is None or any(one.used_bytes is None for one in gpu.processes or ()):
        return None
    return gpu.memory_used_bytes - sum(one.used_bytes or 0 for one in gpu.processes or ())


# --- wording ----------------------------------------------------------------------------------------------------------


def _process(one: GpuProcess) -> str:
    whose = {
        Owner.OURS: "a running trial of ours",
        Owner.OURS_LEFT_OVER: "left over from an earlier trial of ours, --kill-stale ends it",
        Owner.OTHER: "",
        Owner.HIDDEN: "not visible from here, perhaps in another container",
    }[one.owner]
    used = "" if one.used_bytes is None else f"{_gib(one.used_bytes)}"
    details = ", ".join(part for part in (one.name, used, whose) if part)
    return f"pid {one.pid}" + (f" ({details})" if details else "")


def _inspect(gpus: Iterable[Gpu]) -> str:
    visible = [str(one.pid) for gpu in gpus for one in gpu.processes or () if one.owner is not Owner.HIDDEN]
    if visible:
        return f"look at them with `ps -fp {','.join(dict.fromkeys(visible))}`"
    return "look at them with `nvidia-smi` on the host"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _bytes(leaked: Mapping[str, int]) -> str:
    return ", ".join(f"{_gib(count)} on {uuid}" for uuid, count in leaked.items() if count) or "the driver does not say"
