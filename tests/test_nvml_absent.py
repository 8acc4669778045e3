"""A machine without NVIDIA's library: the inventory says so, and the machine is still described."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

from prober.host import system
from prober.host.nvml import machine

LISTING = """
import json
from prober.host.nvml import inventory
here = inventory()
print(json.dumps([len(here.gpus), here.problem]))
"""


def test_no_library_is_a_sentence_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"not a library")  # found first, also where a driver is installed
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", LISTING], env=environment, capture_output=True, text=True, check=True)
    count, problem = json.loads(run.stdout)
    assert count == 0
    assert "libnvidia-ml.so.1" in problem
    assert run.stderr == ""


def test_on_the_cpu_the_machine_is_its_cpu() -> None:
    here = machine("cpu", vllm_version="0.32.0", torch_version="2.13.0")
    assert here.device == "cpu"
    assert here.gpu == system.cpu_name()
    assert here.gpu_memory_mib is None
    assert here.driver is None
    assert here.host_memory_mib is not None
    assert 0 < here.host_memory_mib <= psutil.virtual_memory().total // 2**20
    assert (here.vllm_version, here.torch_version) == ("0.32.0", "2.13.0")


def _host(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("machine_id", "machine-id")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_cpu_is_named_as_the_kernel_names_it(tmp_path: Path) -> None:
    text = "processor\t: 0\nmodel\t\t: 49\nmodel name\t: AMD EPYC 7543  32-Core Processor\n"
    assert system.cpu_name(_host(tmp_path / "a", proc__cpuinfo=text)) == "AMD EPYC 7543 32-Core Processor"
    assert system.cpu_name(_host(tmp_path / "b", proc__cpuinfo="CPU implementer\t: 0x41\n")).endswith(" CPU")
    assert system.cpu_name(tmp_path / "nothing").endswith(" CPU")


def test_the_machine_hash_is_stable_short_and_does_not_show_the_id(tmp_path: Path) -> None:
    one = _host(tmp_path / "one", etc__machine_id="3d1219c7c4c5404a\n")
    other = _host(tmp_path / "other", etc__machine_id="aaaa19c7c4c5404a\n")
    assert system.machine_hash(root=one) == system.machine_hash(root=one)
    assert system.machine_hash(root=one) != system.machine_hash(root=other)
    assert len(system.machine_hash(root=one)) == 12
    assert int(system.machine_hash(root=one), 16) >= 0
    assert system.machine_hash(root=one) not in "3d1219c7c4c5404a"


def test_gpus_name_the_machine_where_the_id_is_missing_or_the_image_s(tmp_path: Path) -> None:
    bare, image = tmp_path / "bare", tmp_path / "image"
    bare.mkdir()
    _host(image, etc__machine_id="ffff\n")
    (image / ".dockerenv").touch()
    for root in (bare, image):
        assert system.machine_hash(("GPU-b", "GPU-a"), root) == system.machine_hash(("GPU-a", "GPU-b"), root)
        assert system.machine_hash(("GPU-a",), root) != system.machine_hash(("GPU-b",), root)
        assert system.machine_hash((), root)


def test_a_control_group_limits_the_memory(tmp_path: Path) -> None:
    free = _host(tmp_path / "free", **{"sys__fs__cgroup__memory.max": "max\n"})
    tight = _host(
        tmp_path / "tight",
        **{
            "sys__fs__cgroup__memory.max": "104857600\n",
            "sys__fs__cgroup__memory.current": "94857600\n",
            "sys__fs__cgroup__memory.stat": "anon 5\ninactive_file 5000000\n",
        },
    )
    assert system.memory_total_bytes(free) == psutil.virtual_memory().total
    assert system.memory_total_bytes(tight) == 104857600
    assert system.memory_available_bytes(tight) == 15000000
    assert system.memory_available_bytes(free) > 15000000


def test_a_batch_system_limits_the_memory_of_an_outer_group(tmp_path: Path) -> None:
    for name, controllers, mount, files in (
        ("v2", "0:", "sys/fs/cgroup", ("memory.max", "memory.current")),
        ("v1", "4:memory", "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ):
        root = tmp_path / name
        job = root / mount / "slurm/job_7"
        (job / "step").mkdir(parents=True)
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(f"9:cpu,cpuacct:/\n{controllers}:/slurm/job_7/step\n")
        for file, number in zip(files, (2**30, 2**29), strict=True):
            (job / file).write_text(f"{number}\n")
        assert system.memory_total_bytes(root) == 2**30
        assert system.memory_available_bytes(root) == 2**29


def test_linux_under_windows_is_known(tmp_path: Path) -> None:
    assert system.is_wsl(_host(tmp_path / "w", proc__sys__kernel__osrelease="5.15.153.1-microsoft-standard-WSL2\n"))
    assert not system.is_wsl(_host(tmp_path / "l", proc__sys__kernel__osrelease="6.1.0-18-amd64\n"))
    assert not system.is_wsl(tmp_path / "nothing")
