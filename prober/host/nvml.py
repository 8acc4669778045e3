"""GPU inventory from NVML. The only module that imports pynvml.

Every query can fail: no library, no driver, no permission, not supported (unified memory, MIG, WSL), GPU lost. The fact
is then ``None``; a failure the user should know of becomes a sentence in ``Inventory.problem``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

import pynvml

from prober.host import processes, system
from prober.host.gpu import MIB, Gpu, GpuProcess, Inventory, choose, visible_gpus, visible_setting
from prober.host.processes import Owner
from prober.records import Machine

__all__ = ["Gpu", "GpuProcess", "Inventory", "choose", "inventory", "machine", "visible_setting"]

_REFUSALS = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError, UnicodeDecodeError)
_FROM_ENVIRONMENT: Final = "\0"  # not a possible value of an environment variable


def inventory(visible: str | None = _FROM_ENVIRONMENT) -> Inventory:
    """List the GPUs that ``CUDA_VISIBLE_DEVICES`` (or ``visible``; None: all) makes visible. Never raises."""
    if visible == _FROM_ENVIRONMENT:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        pynvml.nvmlInit()
    except _REFUSALS as refusal:
        return Inventory(problem=_why_none(refusal))
    try:
        return _listed(visible)
    except _REFUSALS as refusal:
        return Inventory(problem=_why_none(refusal))
    finally:
        with contextlib.suppress(*_REFUSALS):
            pynvml.nvmlShutdown()


def machine(
    device: Literal["cuda", "cpu"],
    gpus: Sequence[Gpu] = (),
    here: Inventory | None = None,
    *,
    vllm_version: str | None = None,
    torch_version: str | None = None,
) -> Machine:
    """Describe the machine a combination is measured on: the chosen ``gpus`` out of the inventory ``here``."""
    here = here or Inventory()
    is_gpu = device == "cuda" and bool(gpus)
    total = gpus[0].memory_total_bytes if is_gpu else None
    return Machine(
        gpu=gpus[0].name if is_gpu else system.cpu_name(),
        device="cuda" if is_gpu else "cpu",
        machine=system.machine_hash(here.uuids or tuple(gpu.parent_uuid or gpu.uuid for gpu in gpus)),
        gpu_memory_mib=None if total is None else total // MIB,
        driver=here.driver if is_gpu else None,
        cuda=here.cuda if is_gpu else None,
        vllm_version=vllm_version,
        torch_version=torch_version,
        host_memory_mib=system.memory_total_bytes() // MIB,
        ecc=gpus[0].ecc if is_gpu else None,
        mig=gpus[0].parent_uuid is not None if is_gpu else None,
        power_limit_watts=gpus[0].power_limit_watts if is_gpu else None,
        gpu_hash=system.salted(sorted(gpu.uuid for gpu in gpus)) if is_gpu else None,
    )


# --- reading NVML ---------------------------------------------------------------------------------------------------


def _query(function: Callable[..., Any], *arguments: Any) -> Any:
    """Query NVML; None if it fails."""
    try:
        return function(*arguments)
    except _REFUSALS:
        return None


def _listed(visible: str | None) -> Inventory:
    gpus: list[Gpu] = []
    uuids: list[str] = []
    problems: list[str] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except _REFUSALS as refusal:
            problems.append(f"GPU {index} does not answer ({refusal})")
            continue
        gpu = _gpu(handle, index)
        uuids.append(gpu.uuid)
        if gpu.mig:
            slices = list(_mig_devices(handle, gpu))
            gpus += slices
            if not slices:
                problems.append(f"GPU {index} is in MIG mode and has no MIG device that this process may use")
        else:
            gpus.append(gpu)
    usable, warning = visible_gpus(gpus, visible)
    if warning:
        problems.append(warning)
    if not uuids and not problems:
        problems.append("the NVIDIA driver runs and lists no GPU")
    driver = _query(pynvml.nvmlSystemGetDriverVersion)
    return Inventory(usable, driver, _cuda_version(), "; ".join(problems) or None, tuple(uuids))


def _cuda_version() -> str | None:
    number = _query(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def _gpu(handle: Any, index: int) -> Gpu:
    capability = _query(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    ecc = _query(pynvml.nvmlDeviceGetEccMode, handle)
    mig = _query(pynvml.nvmlDeviceGetMigMode, handle)
    total, used, reserved, is_unified = _memory(handle)
    return Gpu(
        index=index,
        uuid=_query(pynvml.nvmlDeviceGetUUID, handle) or f"index-{index}",
        name=_query(pynvml.nvmlDeviceGetName, handle) or "unknown NVIDIA GPU",
        memory_total_bytes=total,
        memory_used_bytes=used,
        memory_reserved_bytes=reserved,
        compute_capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        ecc=None if ecc is None else bool(ecc[0]),
        mig=None if mig is None else bool(mig[0]),
        power_limit_watts=_power_limit_watts(handle),
        nvlink_links=_nvlink_links(handle),
        processes=_processes(handle),
        is_unified_memory=is_unified,
        is_under_windows=system.is_wsl(),
    )


def _mig_devices(parent_handle: Any, parent: Gpu) -> Iterator[Gpu]:
    for number in range(_query(pynvml.nvmlDeviceGetMaxMigDeviceCount, parent_handle) or 0):
        handle = _query(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, parent_handle, number)
        uuid = None if handle is None else _query(pynvml.nvmlDeviceGetUUID, handle)
        if uuid is None:
            continue  # an unused slot
        total, used, reserved, _ = _memory(handle)
        yield Gpu(
            index=parent.index,
            uuid=uuid,
            name=_mig_name(handle, parent.name),
            memory_total_bytes=total,
            memory_used_bytes=used,
            memory_reserved_bytes=reserved,
            compute_capability=parent.compute_capability,
            ecc=parent.ecc,
            mig=True,
            parent_uuid=parent.uuid,
            power_limit_watts=parent.power_limit_watts,
            processes=_processes(handle),
        )


def _mig_name(handle: Any, parent_name: str) -> str:
    """Return a name that includes the profile: 1g.10gb and 3g.40gb slices have different ceilings."""
    name = str(_query(pynvml.nvmlDeviceGetName, handle) or parent_name)
    size = _query(pynvml.nvmlDeviceGetAttributes, handle)
    if "MIG" in name or size is None:
        return name if "MIG" in name else f"{name} MIG"
    return f"{name} MIG {size.gpuInstanceSliceCount}g.{-(-size.memorySizeMB // 1024)}gb"


def _memory(handle: Any) -> tuple[int | None, int | None, int | None, bool]:
    """Return total, used and reserved bytes, and whether they are the host's (unified memory is unknown to NVML)."""
    refusals = []
    for version in (pynvml.nvmlMemory_v2, None):
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version)
        except _REFUSALS as refusal:
            refusals.append(refusal)
            continue
        if memory.total:
            return memory.total, memory.used, (memory.reserved if version else None), False
        refusals.append(pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED))
    if isinstance(refusals[-1], pynvml.NVMLError_NotSupported):
        total = system.memory_total_bytes()
        return total, total - system.memory_available_bytes(), None, True
    return None, None, None, False


def _power_limit_watts(handle: Any) -> float | None:
    for function in (pynvml.nvmlDeviceGetEnforcedPowerLimit, pynvml.nvmlDeviceGetPowerManagementLimit):
        milliwatts = _query(function, handle)
        if milliwatts is not None:
            return float(milliwatts) / 1000
    return None


def _nvlink_links(handle: Any) -> int | None:
    states = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        state = _query(pynvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            break
        states.append(state)
    return sum(bool(state) for state in states) if states else None


def _processes(handle: Any) -> tuple[GpuProcess, ...] | None:
    compute = _query_first(
        (pynvml.nvmlDeviceGetComputeRunningProcesses_v3, pynvml.nvmlDeviceGetComputeRunningProcesses_v2), handle
    )
    if compute is None:
        return None
    graphics = _query_first(
        (pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3, pynvml.nvmlDeviceGetGraphicsRunningProcesses_v2), handle
    )
    graphics_pids = {one.pid for one in graphics or ()}
    found = {one.pid: one.usedGpuMemory for one in (*(graphics or ()), *compute)}
    return tuple(_process(pid, used, pid in graphics_pids) for pid, used in sorted(found.items()))


def _query_first(functions: Sequence[Callable[..., Any]], handle: Any) -> Any:
    """Query the newest variant that this driver supports."""
    answers = (_query(function, handle) for function in functions)
    return next((answer for answer in answers if answer is not None), None)


def _process(pid: int, used: int | None, is_graphics: bool) -> GpuProcess:
    owner = processes.owner_of(pid)
    name = None if owner is Owner.HIDDEN else processes.name_of(pid)
    return GpuProcess(pid, used, owner, name, is_graphics)


def _why_none(refusal: Exception) -> str:
    """Explain in one sentence why NVML is unavailable, and what to do."""
    if isinstance(refusal, pynvml.NVMLError_LibraryNotFound):
        return "no NVIDIA driver library (libnvidia-ml.so.1) here: install it, or start the container with --gpus all"
    if isinstance(refusal, pynvml.NVMLError_DriverNotLoaded):
        return "the NVIDIA driver is not loaded: try `nvidia-smi`, then `modprobe nvidia` or a reboot"
    if isinstance(refusal, pynvml.NVMLError_LibRmVersionMismatch):
        return "the NVIDIA library and the loaded driver differ in version (an update came in between): reboot"
    if isinstance(refusal, pynvml.NVMLError_NoPermission):
        return "no permission to ask the NVIDIA driver: look at the rights of /dev/nvidia*"
    return f"the NVIDIA driver does not answer ({refusal}): try `nvidia-smi`"
