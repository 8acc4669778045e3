"""What the host is: its CPU, its memory, and a name for it that tells nobody who it belongs to."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil

_SALT = "prober.machine.v1"
_CONTAINER_MARKS = (".dockerenv", "run/.containerenv")


def cpu_name(root: Path = Path("/")) -> str:
    """Return the CPU's name as the kernel gives it; the architecture where it gives none (many ARM servers)."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model") and value.strip():
            return " ".join(value.split())
    return f"{platform.machine() or 'unknown'} CPU"


def memory_total_bytes(root: Path = Path("/")) -> int:
    """Return the memory this process may use: the host's, or the control group's limit where that is lower."""
    limits = [int(psutil.virtual_memory().total)]
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limits += _number(root / name)
    return min(limits)


def memory_available_bytes(root: Path = Path("/")) -> int:
    """Return the memory that can be taken without swapping, within the control group's limit."""
    available = [int(psutil.virtual_memory().available)]
    for limit, usage, statistics in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        group = root / "sys/fs/cgroup"
        for most, used in zip(_number(group / limit), _number(group / usage), strict=False):
            available.append(max(0, most - used + _reclaimable(group / statistics)))
    return min(available)


def is_container(root: Path = Path("/")) -> bool:
    """Tell whether this looks like a container, whose ``/etc/machine-id`` may be the image's."""
    return "KUBERNETES_SERVICE_HOST" in os.environ or any((root / mark).exists() for mark in _CONTAINER_MARKS)


def machine_hash(gpu_uuids: Sequence[str] = (), root: Path = Path("/")) -> str:
    """Return 12 hex digits, stable for one machine, from which neither host name nor id can be read back.

    From the machine id; in a container (its id may be that of the image, shared by many hosts) from the GPUs first.
    """
    try:
        machine_id = (root / "etc/machine-id").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        machine_id = ""
    gpus = ",".join(sorted(gpu_uuids))
    known = (gpus, machine_id) if is_container(root) else (machine_id, gpus)
    identity = next((one for one in known if one), socket.gethostname())
    return hashlib.sha256(f"{_SALT}:{identity}".encode()).hexdigest()[:12]


def _number(path: Path) -> list[int]:
    """Return the file's number, or nothing: no such file, or ``max``."""
    try:
        return [int(path.read_text(encoding="ascii"))]
    except (OSError, ValueError):
        return []


def _reclaimable(path: Path) -> int:
    """Return the page cache that the kernel gives back when memory is short."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    pairs = [line.split() for line in lines]
    return sum(int(value) for name, value in pairs if name == "inactive_file")
