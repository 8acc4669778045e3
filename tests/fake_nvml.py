"""GPUs that a test makes up: a stub of ``libnvidia-ml.so.1`` for the true nvidia-ml-py, fed by a text file.

``build_stub(directory)`` compiles ``tests/fake/nvml_stub.c``; ``write_state(path, gpus)`` says what it shows, and may
be called again while things run. Memory that a process takes is a claim: a file that counts while the process lives.
A process that should see these GPUs needs ``nvml_environment(...)``; the test process itself calls ``load_stub`` once.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MIB = 2**20
GIB = 2**30
SOURCE = Path(__file__).parent / "fake" / "nvml_stub.c"

NOT_SUPPORTED = 3
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
LIBRARY_MISMATCH = 18
UNKNOWN = 999


@dataclass(frozen=True)
class GpuProcess:
    """A process that NVML lists, whether or not it exists here. ``used_mib`` None: the driver does not say."""

    pid: int
    used_mib: int | None
    is_graphics: bool = False


@dataclass(frozen=True)
class Mig:
    """A MIG device of a GPU."""

    uuid: str
    total_mib: int = 9856
    used_mib: int = 0
    slices: int = 1
    name: str = "NVIDIA A100-SXM4-40GB MIG 1g.10gb"
    gpu_instance: int = 7
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """A GPU at rest. None: NVML answers "not supported". ``used_mib`` is what no listed process holds."""

    uuid: str = "GPU-00000000-0000-0000-0000-000000000000"
    name: str | None = "NVIDIA H200"
    total_mib: int | None = 143_771  # None: unified memory, NVML has no figure
    used_mib: int = 4
    reserved_mib: int = 600
    pci: str | None = "00000000:1B:00.0"
    capability: tuple[int, int] | None = (9, 0)
    ecc: bool | None = True
    mig_mode: bool | None = False
    migs: tuple[Mig, ...] = ()
    power_milliwatts: int | None = 700_000
    nvlinks: tuple[int, int] | None = (18, 18)  # links, active ones
    processes: tuple[GpuProcess, ...] = ()
    errors: Mapping[str, int] = field(default_factory=dict)  # NVML's C function → error code
    delays_ms: Mapping[str, int] = field(default_factory=dict)  # NVML's C function → how long it takes


def gpus(count: int, **facts: object) -> tuple[Gpu, ...]:
    """So many GPUs of one kind, told apart by UUID and PCI address."""
    return tuple(
        Gpu(uuid=f"GPU-{n:08d}-0000-0000-0000-000000000000", pci=f"00000000:{0x1B + n:02X}:00.0", **facts)  # type: ignore[arg-type]  # the caller's keywords are Gpu's
        for n in range(count)
    )


def write_state(
    path: Path,
    shown: Sequence[Gpu],
    driver: str | None = "570.86.15",
    cuda: int | None = 12_080,
    errors: Mapping[str, int] | None = None,
    delays_ms: Mapping[str, int] | None = None,
) -> Path:
    """Say what NVML shows from now on; atomic. ``errors`` and ``delays_ms`` here are of every GPU and of the system."""
    lines = [] if driver is None else [f"driver {driver}"]
    lines += [] if cuda is None else [f"cuda {cuda}"]
    lines += _rules(errors or {}, delays_ms or {})
    for gpu in shown:
        lines += _gpu_lines(gpu)
    draft = path.with_suffix(".draft")
    draft.write_text("\n".join(lines) + "\n", encoding="utf-8")
    draft.replace(path)
    return path


def build_stub(directory: Path) -> Path:
    """Compile the stub with the machine's ``cc`` and return the folder that LD_LIBRARY_PATH needs; built once."""
    mark = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    folder = directory / f"nvml-{mark}"
    library = folder / "libnvidia-ml.so.1"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"draft-{os.getpid()}.so"
        command = ["cc", "-O1", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
        subprocess.run([*command, "-o", str(draft), str(SOURCE)], check=True, capture_output=True, text=True)
        draft.replace(library)
    return folder


def load_stub(folder: Path) -> None:
    """Let pynvml in this process find the stub: the loader knows a library by its name once it is loaded."""
    ctypes.CDLL(str(folder / "libnvidia-ml.so.1"), mode=os.RTLD_GLOBAL)


def nvml_environment(folder: Path, state: Path) -> dict[str, str]:
    """What a process needs in its environment to see the made-up GPUs."""
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": os.pathsep.join(paths), "FAKE_NVML_STATE": str(state)}


def claim(
    state: Path, uuid: str, mib: int, pid: int | None = None, hold_seconds: float = 0.0, is_listed: bool = True
) -> Path:
    """Take memory on a GPU for a living process until it is gone; returns the claim's file (unlink it to give back).

    ``hold_seconds``: the memory stays so long after the death was first seen; negative: for ever. ``is_listed`` False:
    NVML shows the memory and not the process, as from within a container.
    """
    pid = os.getpid() if pid is None else pid
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    born = int(stat.rpartition(")")[2].split()[19])
    folder = Path(f"{state}.claims")
    folder.mkdir(exist_ok=True)
    path = folder / f"{pid}-{len(list(folder.iterdir()))}-{uuid}.claim"
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.write_text(f"{uuid} {pid} {born} {mib * MIB} {int(hold_seconds * 1000)} {int(is_listed)}\n", encoding="ascii")
    draft.replace(path)
    return path


def free_and_total_mib(uuid: str) -> tuple[float, float | None]:
    """What NVML says of one GPU's memory, asked of the library that this process finds; total None: not supported."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    handle, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    library.nvmlInit_v2()
    code = library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
    code = code or library.nvmlDeviceGetMemoryInfo(handle, memory)
    return (0.0, None) if code else (memory[1] / MIB, memory[0] / MIB)


def visible_uuids(state: Path, visible: str | None) -> list[str]:
    """The UUIDs that a CUDA_VISIBLE_DEVICES of indices or UUIDs (also MIG) names; None: every GPU."""
    words = [line.split(" ", 1) for line in state.read_text(encoding="utf-8").splitlines() if " " in line]
    all_gpus = [uuid for kind, uuid in words if kind == "gpu"]
    if visible is None:
        return all_gpus
    chosen = [word.strip() for word in visible.split(",") if word.strip()]
    return [all_gpus[int(word)] if word.isdigit() else word for word in chosen]


def _rules(errors: Mapping[str, int], delays_ms: Mapping[str, int]) -> list[str]:
    return [f"error {name} {code}" for name, code in errors.items()] + [
        f"delay {name} {milliseconds}" for name, milliseconds in delays_ms.items()
    ]


def _process_lines(processes: Sequence[GpuProcess]) -> list[str]:
    return [
        f"process {one.pid} {'-' if one.used_mib is None else one.used_mib * MIB} {'g' if one.is_graphics else 'c'}"
        for one in processes
    ]


def _gpu_lines(gpu: Gpu) -> list[str]:
    facts = {
        "name": gpu.name,
        "pci": gpu.pci,
        "memory": gpu.total_mib and f"{gpu.total_mib * MIB} {gpu.used_mib * MIB} {gpu.reserved_mib * MIB}",
        "capability": gpu.capability and f"{gpu.capability[0]} {gpu.capability[1]}",
        "ecc": None if gpu.ecc is None else int(gpu.ecc),
        "migmode": None if gpu.mig_mode is None else int(gpu.mig_mode),
        "power": gpu.power_milliwatts,
        "nvlink": gpu.nvlinks and f"{gpu.nvlinks[0]} {gpu.nvlinks[1]}",
    }
    lines = [f"gpu {gpu.uuid}", *(f"{name} {fact}" for name, fact in facts.items() if fact is not None)]
    lines += _process_lines(gpu.processes) + _rules(gpu.errors, gpu.delays_ms)
    for mig in gpu.migs:
        lines += [f"mig {mig.uuid}", f"name {mig.name}", f"memory {mig.total_mib * MIB} {mig.used_mib * MIB} 0"]
        lines += [f"instance {mig.gpu_instance} 0 {mig.slices}", *_process_lines(mig.processes)]
    return lines
