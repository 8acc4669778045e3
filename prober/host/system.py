"""Host facts: CPU, memory, and an anonymous machine hash."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import psutil

_SALT = "prober.machine.v1"
_CONTAINER_MARKS = (".dockerenv", "run/.containerenv")


def cpu_name(root: Path = Path("/")) -> str:
    """Return the CPU's name from the kernel; the architecture if there is none (many ARM servers)."""
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
    """Return the memory this process may use: the host's, or the cgroup limit if lower."""
    limits = [most for group in _groups(root) for most in _limit(group)]
    return min([int(psutil.virtual_memory().total), *limits])


def memory_available_bytes(root: Path = Path("/")) -> int:
    """Return the memory available without swapping, within the cgroup limit."""
    left = [int(psutil.virtual_memory().available)]
    for group in _groups(root):
        for most in _limit(group):
            used = [*_number(group / "memory.current"), *_number(group / "memory.usage_in_bytes")]
            left += [max(0, most - count + _reclaimable(group / "memory.stat")) for count in used]
    return min(left)


def is_wsl(root: Path = Path("/")) -> bool:
    """Whether this is WSL: the desktop shares the GPU, and its processes are not visible."""
    try:
        return "microsoft" in (root / "proc/sys/kernel/osrelease").read_text(encoding="ascii").lower()
    except (OSError, UnicodeDecodeError):
        return False


def is_container(root: Path = Path("/")) -> bool:
    """Whether this looks like a container, where ``/etc/machine-id`` may come from the image."""
    return "KUBERNETES_SERVICE_HOST" in os.environ or any((root / mark).exists() for mark in _CONTAINER_MARKS)


def machine_hash(gpu_uuids: Sequence[str] = (), root: Path = Path("/")) -> str:
    """Return 12 hex digits, stable for one machine, that do not reveal its host name or id.

    Derived from the machine id; in a container (whose id may come from the image) from the GPU UUIDs if there are any.
    """
    try:
        machine_id = (root / "etc/machine-id").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        machine_id = ""
    gpus = ",".join(sorted(gpu_uuids))
    known = (gpus, machine_id) if is_container(root) else (machine_id, gpus)
    identity = next((one for one in known if one), socket.gethostname())
    return salted([identity])


def salted(identities: Sequence[str]) -> str:
    """Return 12 hex digits of a salted hash of the identities."""
    return hashlib.sha256(f"{_SALT}:{','.join(identities)}".encode()).hexdigest()[:12]


def _groups(root: Path) -> Iterator[Path]:
    """Yield this process's memory cgroups, innermost first: a batch system may set the limit at any level."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    mounts = {"": "sys/fs/cgroup", "memory": "sys/fs/cgroup/memory"}  # version 2; version 1
    paths = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    paths += [["0", "", "/"], ["0", "memory", "/"]]  # in a container the path may be the host's
    for _, controllers, path in paths:
        for controller in {"memory", ""} & set(controllers.split(",")):
            inner = PurePosixPath(path.lstrip("/"))
            yield from (root / mounts[controller] / level for level in (inner, *inner.parents))


def _limit(group: Path) -> list[int]:
    return [*_number(group / "memory.max"), *_number(group / "memory.limit_in_bytes")]


def _number(path: Path) -> list[int]:
    """Return the file's number; nothing if the file is missing or says ``max``."""
    try:
        return [int(path.read_text(encoding="ascii"))]
    except (OSError, ValueError):
        return []


def _reclaimable(path: Path) -> int:
    """Return the page cache that the kernel reclaims when memory is short."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    pairs = [line.split() for line in lines]
    names = ("inactive_file", "total_inactive_file")  # in version 1 the first is without the inner groups
    return max((int(value) for name, value in pairs if name in names), default=0)
