"""The inventory through the true nvidia-ml-py and a made-up NVML: every machine that the field has met."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_nvml import (
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    LIBRARY_MISMATCH,
    MIB,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    Gpu,
    GpuProcess,
    Mig,
    build_stub,
    claim,
    gpus,
    nvml_environment,
    write_state,
)

from prober.host import processes

LISTING = """
import dataclasses, json
from prober.host.nvml import inventory
print(json.dumps(dataclasses.asdict(inventory())))
"""
NOBODY = 2**22 - 7  # above the usual largest pid


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stub(tmp_path_factory.mktemp("stub"))


class Machine:
    """A made-up machine that child processes of this test see."""

    def __init__(self, stub: Path, folder: Path) -> None:
        self.state = folder / "state"
        self.environment = {**os.environ, **nvml_environment(stub, self.state)}
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)

    def run(self, script: str, *arguments: str, **environment: str) -> str:
        command = [sys.executable, "-c", script, *arguments]
        run = subprocess.run(
            command, env={**self.environment, **environment}, capture_output=True, text=True, timeout=60, check=False
        )
        assert run.returncode == 0, run.stderr
        assert run.stderr == ""
        return run.stdout

    def list(self, visible: str | None = None) -> dict[str, Any]:
        chosen = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        listed: dict[str, Any] = json.loads(self.run(LISTING, **chosen))
        return listed

    def only_gpu(self) -> dict[str, Any]:
        (gpu,) = self.list()["gpus"]
        assert isinstance(gpu, dict)
        return gpu


@pytest.fixture
def machine(stub: Path, tmp_path: Path) -> Machine:
    return Machine(stub, tmp_path)


@contextmanager
def sleeper(mark: Mapping[str, str] | None = None) -> Iterator[int]:
    script = "print('up', flush=True); import time; time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, **(mark or {})}, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield child.pid
        finally:
            child.kill()


def test_every_fact_of_a_good_gpu(machine: Machine) -> None:
    write_state(machine.state, [Gpu(used_mib=4, reserved_mib=600, total_mib=143_771)])
    here = machine.list()
    assert (here["driver"], here["cuda"], here["problem"]) == ("570.86.15", "12.8", None)
    assert here["gpus"] == [
        {
            "index": 0,
            "uuid": "GPU-00000000-0000-0000-0000-000000000000",
            "name": "NVIDIA H200",
            "memory_total_bytes": 143_771 * MIB,
            "memory_used_bytes": 4 * MIB,
            "memory_reserved_bytes": 600 * MIB,
            "compute_capability": "9.0",
            "ecc": True,
            "mig": False,
            "parent_uuid": None,
            "power_limit_watts": 700.0,
            "nvlink_links": 18,
            "processes": [],
            "is_unified_memory": False,
            "is_under_windows": False,
        }
    ]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("GPU-00000002", [2]),
        ("GPU-00000001-0000-0000-0000-000000000000,GPU-00000000", [1, 0]),
        ("0,7,1", [0]),
        ("", []),
        ("-1", []),
    ],
)
def test_cuda_visible_devices_filters(machine: Machine, visible: str | None, indices: list[int]) -> None:
    write_state(machine.state, gpus(3))
    here = machine.list(visible)
    assert [gpu["index"] for gpu in here["gpus"]] == indices
    assert len(here["uuids"]) == 3
    if visible in ("", "-1", "0,7,1"):
        assert "CUDA_VISIBLE_DEVICES" in here["problem"]


def test_a_gpu_split_into_mig_devices_is_listed_as_those(machine: Machine) -> None:
    slices = (Mig("MIG-aa", 9856, 12), Mig("MIG-bb", 19968, 0, 2, "NVIDIA A100-SXM4-40GB"))
    write_state(machine.state, [Gpu("GPU-x", "NVIDIA A100-SXM4-40GB", mig_mode=True, migs=slices), Gpu("GPU-y")])
    here = machine.list()
    first, second, whole = here["gpus"]
    assert (first["uuid"], first["parent_uuid"], first["index"], first["mig"]) == ("MIG-aa", "GPU-x", 0, True)
    assert (first["memory_total_bytes"], first["memory_used_bytes"]) == (9856 * MIB, 12 * MIB)
    assert first["name"] == "NVIDIA A100-SXM4-40GB MIG 1g.10gb"
    assert second["name"] == "NVIDIA A100-SXM4-40GB MIG 2g.20gb"  # an older driver names only the card
    assert (whole["uuid"], whole["index"], whole["parent_uuid"]) == ("GPU-y", 1, None)
    assert here["uuids"] == ["GPU-x", "GPU-y"]
    assert [gpu["uuid"] for gpu in machine.list("MIG-bb")["gpus"]] == ["MIG-bb"]
    assert [gpu["uuid"] for gpu in machine.list("0")["gpus"]] == ["MIG-aa"]


def test_mig_mode_without_devices_is_said(machine: Machine) -> None:
    write_state(machine.state, [Gpu(mig_mode=True)])
    here = machine.list()
    assert here["gpus"] == []
    assert "MIG mode and has no MIG device" in here["problem"]


def test_on_unified_memory_the_hosts_memory_is_taken_and_flagged(machine: Machine) -> None:
    gb10 = Gpu("GPU-s", "NVIDIA GB10", None, capability=(12, 1), ecc=None, mig_mode=None, nvlinks=None)
    write_state(machine.state, [gb10])
    gpu = machine.only_gpu()
    assert gpu["is_unified_memory"] is True
    assert 0 < gpu["memory_total_bytes"] <= psutil.virtual_memory().total
    assert 0 < gpu["memory_used_bytes"] < gpu["memory_total_bytes"]
    assert (gpu["ecc"], gpu["mig"], gpu["nvlink_links"]) == (None, None, None)


def test_a_total_of_zero_is_no_figure(machine: Machine) -> None:
    write_state(machine.state, [Gpu(total_mib=1000, used_mib=0, reserved_mib=0)])
    text = machine.state.read_text()
    assert f"memory {1000 * MIB} 0 0" in text
    machine.state.write_text(text.replace(f"memory {1000 * MIB} 0 0", "memory 0 0 0"))
    assert machine.only_gpu()["is_unified_memory"] is True


def test_memory_that_may_not_be_asked_is_unknown_and_not_the_hosts(machine: Machine) -> None:
    denied = {"nvmlDeviceGetMemoryInfo": NO_PERMISSION, "nvmlDeviceGetMemoryInfo_v2": NO_PERMISSION}
    write_state(machine.state, [Gpu(errors=denied)])
    gpu = machine.only_gpu()
    assert (gpu["memory_total_bytes"], gpu["memory_used_bytes"], gpu["is_unified_memory"]) == (None, None, False)


def test_an_older_driver_answers_the_older_questions(machine: Machine) -> None:
    old = {
        "nvmlDeviceGetMemoryInfo_v2": FUNCTION_NOT_FOUND,
        "nvmlDeviceGetComputeRunningProcesses_v3": FUNCTION_NOT_FOUND,
        "nvmlDeviceGetGraphicsRunningProcesses_v3": FUNCTION_NOT_FOUND,
    }
    write_state(machine.state, [Gpu(errors=old, processes=(GpuProcess(NOBODY, 100),))])
    gpu = machine.only_gpu()
    assert gpu["memory_total_bytes"] == 143_771 * MIB
    assert gpu["memory_reserved_bytes"] is None
    assert [one["pid"] for one in gpu["processes"]] == [NOBODY]


ASKED = (
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetEccMode",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetPowerManagementLimit",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlShutdown",
)


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, GPU_IS_LOST, UNKNOWN])
def test_a_gpu_that_answers_nothing_is_still_listed(machine: Machine, code: int) -> None:
    write_state(machine.state, [Gpu()], errors=dict.fromkeys(ASKED, code))
    here = machine.list()
    (gpu,) = here["gpus"]
    assert gpu["uuid"]
    assert gpu["name"] == "unknown NVIDIA GPU"
    assert gpu["processes"] is None
    assert (here["driver"], here["cuda"], gpu["compute_capability"], gpu["power_limit_watts"]) == (None,) * 4


@pytest.mark.parametrize("question", ASKED)
def test_one_refused_question_costs_no_other_fact(machine: Machine, question: str) -> None:
    write_state(machine.state, [Gpu()], errors={question: NOT_SUPPORTED})
    gpu = machine.only_gpu()
    known = sum(fact is not None for fact in gpu.values())
    assert known >= 13  # of 15; a whole GPU has no parent


def test_a_lost_gpu_does_not_hide_the_others(machine: Machine) -> None:
    one, two = gpus(2)
    lost = Gpu(one.uuid, pci=one.pci, errors={"nvmlDeviceGetHandleByIndex_v2": GPU_IS_LOST})
    write_state(machine.state, [lost, two])
    here = machine.list()
    assert [gpu["index"] for gpu in here["gpus"]] == [1]
    assert "GPU 0 does not answer" in here["problem"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (DRIVER_NOT_LOADED, "driver is not loaded"),
        (LIBRARY_MISMATCH, "reboot"),
        (NO_PERMISSION, "no permission"),
        (UNKNOWN, "does not answer"),
    ],
)
def test_a_driver_that_does_not_start_is_a_sentence(machine: Machine, code: int, words: str) -> None:
    write_state(machine.state, [Gpu()], errors={"nvmlInitWithFlags": code, "nvmlInit_v2": code})
    here = machine.list()
    assert here["gpus"] == []
    assert words in here["problem"]


def test_a_driver_without_gpus_is_said(machine: Machine) -> None:
    write_state(machine.state, [])
    assert machine.list()["problem"] == "the NVIDIA driver runs and lists no GPU"


def test_processes_are_told_apart(machine: Machine) -> None:
    dead_prober = {"PROBER_TRIAL": "t1", "PROBER_PID": "1:99999999999"}
    with sleeper(processes.tag("t0")) as ours, sleeper(dead_prober) as left, sleeper() as other:
        listed = (GpuProcess(ours, 10), GpuProcess(left, 20), GpuProcess(other, None), GpuProcess(NOBODY, 30))
        write_state(machine.state, [Gpu(processes=(*listed, GpuProcess(os.getpid(), 40, is_graphics=True)))])
        listed_by_pid = {one["pid"]: one for one in machine.only_gpu()["processes"]}
        name = psutil.Process(other).name()
    assert {pid: one["owner"] for pid, one in listed_by_pid.items()} == {
        ours: "ours",
        left: "ours_left_over",
        other: "other",
        NOBODY: "hidden",
        os.getpid(): "other",
    }
    assert (listed_by_pid[other]["used_bytes"], listed_by_pid[NOBODY]["used_bytes"]) == (None, 30 * MIB)
    assert (listed_by_pid[NOBODY]["name"], listed_by_pid[other]["name"]) == (None, name)
    assert [pid for pid, one in listed_by_pid.items() if one["is_graphics"]] == [os.getpid()]


WAIT = """
import sys
from prober.host.nvml import inventory
from prober.host.idle import wait_until_idle
from prober.records import NotReady
uuids = [gpu.uuid for gpu in inventory().gpus]
try:
    rest = wait_until_idle(inventory, uuids, limit_seconds=float(sys.argv[1]), report=print)
except NotReady as refusal:
    print("not ready:", refusal)
else:
    print("at rest with", rest.total_used_mib, "MiB")
"""


def test_a_neighbour_is_waited_for_until_it_is_gone(machine: Machine) -> None:
    write_state(machine.state, [Gpu("GPU-x", used_mib=4)])
    with sleeper() as neighbour:
        claim(machine.state, "GPU-x", 9000, neighbour)
        name = psutil.Process(neighbour).name()
        said = machine.run(WAIT, "1").splitlines()
        assert said[0] == f"waiting for GPU 0: pid {neighbour} ({name}, 8.8 GiB)"
        assert said[1].startswith("not ready: waited 1 s for GPU 0: pid")
        assert said[1].endswith(f"`ps -fp {neighbour}`")
        with subprocess.Popen(
            [sys.executable, "-c", WAIT, "30"], env=machine.environment, stdout=subprocess.PIPE, text=True
        ) as waiting:
            assert waiting.stdout is not None
            assert f"pid {neighbour}" in waiting.stdout.readline()
            psutil.Process(neighbour).kill()
            assert waiting.stdout.readline() == "at rest with 4 MiB\n"


def test_memory_that_a_dead_process_still_holds_is_said_as_such(machine: Machine) -> None:
    write_state(machine.state, [Gpu("GPU-x")])
    with sleeper() as neighbour:
        claim(machine.state, "GPU-x", 4096, neighbour, hold_seconds=-1, is_listed=False)
    said = machine.run(WAIT, "1")
    assert "4.0 GiB held by no process that can be seen here" in said
    assert "nvidia-smi" in said


LEAK = """
import sys
from prober.host.nvml import inventory
from prober.host.idle import Baseline, wait_for_return
print(wait_for_return(inventory, Baseline({"GPU-x": 4 * 2**20}), limit_seconds=float(sys.argv[1]), report=print))
"""


def test_a_dead_trial_s_memory_is_waited_for_also_while_the_driver_still_lists_it(machine: Machine) -> None:
    write_state(machine.state, [Gpu("GPU-x", used_mib=4)])
    with sleeper(processes.tag("t1")) as trial:
        claim(machine.state, "GPU-x", 5000, trial, hold_seconds=1.5)
    said = machine.run(LEAK, "20").splitlines()
    assert said == ["waiting for the trial's GPU memory to return: 4.9 GiB on GPU-x", "{'GPU-x': 0}"]


def test_a_leak_is_measured(machine: Machine) -> None:
    write_state(machine.state, [Gpu("GPU-x", used_mib=4)])
    with sleeper(processes.tag("t1")) as trial:
        claim(machine.state, "GPU-x", 5000, trial, hold_seconds=-1, is_listed=False)
    assert machine.run(LEAK, "1").splitlines()[-1] == f"{{'GPU-x': {5000 * MIB}}}"


def test_a_machine_with_gpus_is_described(machine: Machine) -> None:
    write_state(machine.state, gpus(2))
    script = """
import dataclasses, json
from prober.host.nvml import inventory, machine
here = inventory()
print(json.dumps(dataclasses.asdict(machine("cuda", here.gpus[:1], here, vllm_version="0.32.0"))))
"""
    facts = json.loads(machine.run(script))
    assert (facts["gpu"], facts["device"], facts["gpu_memory_mib"]) == ("NVIDIA H200", "cuda", 143_771)
    assert (facts["driver"], facts["cuda"], facts["vllm_version"]) == ("570.86.15", "12.8", "0.32.0")
    assert len(facts["machine"]) == 12


def test_listing_is_quick_enough_to_be_repeated(machine: Machine) -> None:
    write_state(machine.state, gpus(8))
    script = """
import time
from prober.host.nvml import inventory
inventory()
began = time.process_time()
inventory()
print(time.process_time() - began)
"""
    assert float(machine.run(script)) < 0.25
