"""Memory on the made-up GPUs (``fake_nvml``): taken while a process lives, and looked at before it is taken."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm import wording
from vllm.launch_record import scenario

HELD: list[Any] = []


def _gpu_of(rank: int) -> tuple[Path, str] | None:
    state = os.environ.get("FAKE_NVML_STATE")
    if state is None or not scenario().gpu_mib:
        return None
    from fake_nvml import visible_uuids

    uuids = visible_uuids(Path(state), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if rank >= len(uuids):
        raise RuntimeError("CUDA error: invalid device ordinal")
    return Path(state), uuids[rank]


def take(rank: int) -> None:
    """Hold the scenario's share of the rank's GPU until this process is dead (and longer, if the scenario says so)."""
    if os.environ.get("FAKE_VLLM_TORCH"):
        _take_really(rank)
    elif gpu := _gpu_of(rank):
        from fake_nvml import claim

        played = scenario()
        claim(*gpu, played.gpu_mib, hold_seconds=played.gpu_hold_seconds, is_listed=played.gpu_is_listed)


def _take_really(rank: int) -> None:
    """Hold memory of a true GPU, through torch (scripts/check_gpu.py). A fork of a process that uses CUDA cannot."""
    import torch

    if scenario().gpu_mib and not torch.cuda._is_in_bad_fork():
        HELD.append(torch.ones(scenario().gpu_mib << 20, dtype=torch.uint8, device=f"cuda:{rank}"))
        torch.cuda.synchronize(rank)


def refuse_if_busy(rank: int, utilization: float | None) -> None:
    """Raise vLLM's refusal when less is free than the utilization asks for (0.9.1 on; earlier ones did not look)."""
    played = scenario()
    if played.release < (0, 9, 1) or not (gpu := _gpu_of(rank)):
        return
    from fake_nvml import free_and_total_mib

    free, total = free_and_total_mib(gpu[1])
    asked = utilization or wording.default_utilization(played)
    if total is not None and free < asked * total:
        raise ValueError(wording.device_busy(played, asked, free / 1024, total / 1024))
