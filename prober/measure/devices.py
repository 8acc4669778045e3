"""The devices that trials run on: leased GPUs, idle before and after each trial, or the CPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from prober.engine.install import Engine
from prober.host import idle, nvml
from prober.host.gpu import MIB, Gpu, visible_setting
from prober.host.leases import choose_and_lease
from prober.records import Machine, NotReady

log = logging.getLogger(__name__)

IDLE_SECONDS = 600.0  # to wait for a GPU that others use, by default
RETURN_SECONDS = 60.0  # to wait until a trial's own memory is released
LET_PASS_SECONDS = 60.0  # to wait for a busy host, before the next launch


@dataclass(slots=True)
class Devices:
    """One machine's devices, held for one search."""

    engine: Engine
    machine: Machine
    chosen: tuple[Gpu, ...] = ()  # empty: the CPU
    say: Callable[[str], None] = lambda _: None  # reports what it waits for
    idle_seconds: float = IDLE_SECONDS
    return_seconds: float = RETURN_SECONDS
    baseline: idle.Baseline = field(default_factory=idle.Baseline)

    @property
    def environment(self) -> Mapping[str, str]:
        return visible_setting(self.chosen) if self.chosen else {"CUDA_VISIBLE_DEVICES": ""}

    def wait_until_idle(self) -> None:
        """Wait until every GPU is at its baseline. Raises NotReady, naming the holder, after ``idle_seconds``."""
        if self.chosen:
            uuids = [gpu.uuid for gpu in self.chosen]
            earlier = self.baseline if self.baseline.used_bytes else None
            self.baseline = idle.wait_until_idle(
                everything, uuids, earlier, limit_seconds=self.idle_seconds, report=self.say
            )

    def let_pass(self) -> None:
        """Pause after a launch that met a busy host, whose users are not visible. GPUs are watched instead."""
        if not self.chosen:
            seconds = min(LET_PASS_SECONDS, self.idle_seconds)
            self.say(f"other processes use this machine's memory: waiting {seconds:.0f} s")
            time.sleep(seconds)

    def at_rest_mib(self) -> int | None:
        """Return the memory in use on the devices now, in MiB; None: not reported, or a device is busy."""
        uuids = {gpu.uuid for gpu in self.chosen}
        here = [gpu for gpu in everything().gpus if gpu.uuid in uuids] if uuids else []
        used = [gpu.memory_used_bytes for gpu in here if gpu.is_idle and gpu.memory_used_bytes is not None]
        return sum(used) // MIB if used and len(used) == len(uuids) else None

    def leaked_mib(self) -> int | None:
        """Wait until the trial's memory is released; return what is not, in MiB over all GPUs. None: the CPU."""
        if not self.chosen:
            return None
        left = idle.wait_for_return(everything, self.baseline, limit_seconds=self.return_seconds, report=self.say)
        return sum(left.values()) // MIB if left else None


def everything() -> nvml.Inventory:
    """Return all devices of the machine, including those that CUDA_VISIBLE_DEVICES hides."""
    return nvml.inventory(None)


@contextmanager
def hold(
    engine: Engine,
    device: str,
    count: int,
    wanted: Sequence[str] | None,
    say: Callable[[str], None],
    idle_seconds: float,
) -> Iterator[Devices]:
    """Lease ``count`` GPUs of one type, or use the CPU where ``device`` says so.

    Raises UsageError for GPUs that do not exist, NotReady where not enough are free.
    """
    here = nvml.inventory()
    if _is_cpu(engine, device, here):
        log.info("use the CPU; no GPU is leased")
        yield Devices(engine, _machine(engine, "cpu", (), here), say=say, idle_seconds=idle_seconds)
        return
    with choose_and_lease(here, count, wanted) as lease:
        log.info("leased %s", ", ".join(f"GPU {gpu.index} ({gpu.uuid})" for gpu in lease.gpus))
        yield Devices(engine, _machine(engine, "cuda", lease.gpus, here), tuple(lease.gpus), say, idle_seconds)


def why_never(engine: Engine, device: str, count: int, wanted: Sequence[str] | None) -> str | None:
    """Say why this machine can never hold ``count`` GPUs; None: it can, if not now.

    Raises UsageError for ``wanted`` GPUs that do not exist or that the environment hides.
    """
    here = nvml.inventory()
    if _is_cpu(engine, device, here) or not here.gpus:
        return None
    if count > len(here.uuids):
        return f"{count} GPUs are needed, and this machine has {len(here.uuids)}"
    with suppress(NotReady):
        nvml.choose(here, count, wanted)
    return None


def machine_of(engine: Engine, device: str) -> Machine:
    """Describe what would be measured on, without a lease: the CPU, or the first GPU."""
    here = nvml.inventory()
    if _is_cpu(engine, device, here):
        return _machine(engine, "cpu", (), here)
    return _machine(engine, "cuda", here.gpus[:1], here)


def _is_cpu(engine: Engine, device: str, here: nvml.Inventory) -> bool:
    """A CUDA build without a GPU is not a CPU engine: leasing then raises NotReady with the reason."""
    has_no_cuda = engine.is_cpu_build or engine.torch_version is None
    return (
        device == "cpu"
        or (device == "auto" and not here.gpus and has_no_cuda)
        or (device == "auto" and engine.is_cpu_build)
    )


def _machine(engine: Engine, device: Literal["cuda", "cpu"], chosen: Sequence[Gpu], here: nvml.Inventory) -> Machine:
    versions = {"vllm_version": engine.vllm_version, "torch_version": engine.torch_version}
    return nvml.machine(device, chosen, here, **versions)
