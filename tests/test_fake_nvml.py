"""The stub of NVML answers the true nvidia-ml-py as a driver would."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
from fake_engine import Scenario, wait_until
from fake_nvml import (
    DRIVER_NOT_LOADED,
    GIB,
    MIB,
    NO_PERMISSION,
    Gpu,
    GpuProcess,
    Mig,
    build_stub,
    claim,
    gpus,
    load_stub,
    nvml_environment,
    visible_uuids,
    write_state,
)
from started import length_flag, started


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_stub(tmp_path_factory.getbasetemp())
    load_stub(folder)
    return folder


@pytest.fixture
def state(stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = write_state(tmp_path / "gpus", gpus(2))
    monkeypatch.setenv("FAKE_NVML_STATE", str(path))
    pynvml.nvmlInit()
    yield path
    pynvml.nvmlShutdown()


@pytest.fixture
def neighbour() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def handle(index: int = 0) -> object:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def used_mib(index: int = 0) -> int:
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle(index), pynvml.nvmlMemory_v2).used) // MIB


def used_by_gpu() -> list[int]:
    return [used_mib(index) for index in range(pynvml.nvmlDeviceGetCount())]


def pids(device: object) -> list[tuple[int, int | None]]:
    return [(one.pid, one.usedGpuMemory) for one in pynvml.nvmlDeviceGetComputeRunningProcesses(device)]


def test_facts_of_a_gpu(state: Path) -> None:
    assert pynvml.nvmlDeviceGetCount() == 2
    assert pynvml.nvmlDeviceGetName(handle()) == "NVIDIA H200"
    assert pynvml.nvmlDeviceGetUUID(handle(1)) == gpus(2)[1].uuid
    assert pynvml.nvmlDeviceGetPciInfo(handle(1)).busId == "00000000:1C:00.0"
    assert pynvml.nvmlDeviceGetCudaComputeCapability(handle()) == (9, 0)
    assert pynvml.nvmlDeviceGetEccMode(handle()) == [1, 1]
    assert pynvml.nvmlDeviceGetEnforcedPowerLimit(handle()) == 700_000
    assert pynvml.nvmlDeviceGetNvLinkState(handle(), 17) == 1
    assert pynvml.nvmlSystemGetDriverVersion() == "570.86.15"
    assert pynvml.nvmlSystemGetCudaDriverVersion() == 12_080
    by_uuid = pynvml.nvmlDeviceGetHandleByUUID(gpus(2)[1].uuid)
    assert pynvml.nvmlDeviceGetIndex(by_uuid) == 1


def test_the_old_memory_call_counts_reserved_as_used(state: Path) -> None:
    write_state(state, [Gpu(total_mib=1000, used_mib=100, reserved_mib=30)])
    new = pynvml.nvmlDeviceGetMemoryInfo(handle(), pynvml.nvmlMemory_v2)
    old = pynvml.nvmlDeviceGetMemoryInfo(handle())
    assert [figure // MIB for figure in (new.total, new.used, new.reserved, new.free)] == [1000, 100, 30, 870]
    assert [figure // MIB for figure in (old.total, old.used, old.free)] == [1000, 130, 870]


def test_state_may_change_while_things_run(state: Path) -> None:
    write_state(state, gpus(3, used_mib=77))
    assert pynvml.nvmlDeviceGetCount() == 3
    assert used_mib(2) == 77


def test_absent_facts_are_not_supported(state: Path) -> None:
    write_state(state, [Gpu(total_mib=None, ecc=None, mig_mode=None, power_milliwatts=None, nvlinks=None)])
    for question in (
        pynvml.nvmlDeviceGetMemoryInfo,
        pynvml.nvmlDeviceGetEccMode,
        pynvml.nvmlDeviceGetMigMode,
        pynvml.nvmlDeviceGetEnforcedPowerLimit,
    ):
        with pytest.raises(pynvml.NVMLError_NotSupported):
            question(handle())


def test_errors_strike_one_function_of_one_gpu(state: Path) -> None:
    errors = {"nvmlDeviceGetComputeRunningProcesses_v3": NO_PERMISSION}
    write_state(state, [*gpus(1), Gpu(uuid="GPU-1", errors=errors)])
    assert pids(handle(0)) == []
    with pytest.raises(pynvml.NVMLError_NoPermission):
        pids(handle(1))


def test_driver_may_be_gone(state: Path) -> None:
    write_state(state, gpus(1), errors={"nvmlInitWithFlags": DRIVER_NOT_LOADED})
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        pynvml.nvmlInit()


def test_listed_processes_hold_their_memory(state: Path) -> None:
    processes = (GpuProcess(4_000_001, 1000), GpuProcess(4_000_002, None), GpuProcess(4_000_003, 50, is_graphics=True))
    write_state(state, [Gpu(used_mib=5, processes=processes)])
    assert pids(handle()) == [(4_000_001, 1000 * MIB), (4_000_002, None)]
    assert [one.pid for one in pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle())] == [4_000_003]
    assert used_mib() == 1055


def test_claim_lasts_as_long_as_its_process(state: Path, neighbour: subprocess.Popen[bytes]) -> None:
    claim(state, gpus(1)[0].uuid, 300, neighbour.pid)
    assert (used_mib(), pids(handle())) == (304, [(neighbour.pid, 300 * MIB)])
    assert used_mib(1) == 4
    neighbour.kill()
    neighbour.wait()
    assert (used_mib(), pids(handle())) == (4, [])


def test_leak_outlives_its_process_and_hides_it(state: Path, neighbour: subprocess.Popen[bytes]) -> None:
    leak = claim(state, gpus(1)[0].uuid, 300, neighbour.pid, hold_seconds=-1)
    neighbour.kill()
    neighbour.wait()
    assert (used_mib(), pids(handle())) == (304, [])
    leak.unlink()
    assert used_mib() == 4


def test_container_sees_memory_and_no_process(state: Path, neighbour: subprocess.Popen[bytes]) -> None:
    claim(state, gpus(1)[0].uuid, 300, neighbour.pid, is_listed=False)
    assert (used_mib(), pids(handle())) == (304, [])


def test_mig_devices_have_memory_of_their_own(state: Path, neighbour: subprocess.Popen[bytes]) -> None:
    migs = (Mig("MIG-a", total_mib=10_000), Mig("MIG-b", total_mib=20_000, slices=3))
    write_state(state, [Gpu(uuid="GPU-m", mig_mode=True, migs=migs)])
    claim(state, "MIG-b", 600, neighbour.pid)
    assert pynvml.nvmlDeviceGetCount() == 1
    first, second = (pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle(), n) for n in range(2))
    assert pynvml.nvmlDeviceGetUUID(second) == "MIG-b"
    assert pynvml.nvmlDeviceGetAttributes(second).memorySizeMB == 20_000
    assert pynvml.nvmlDeviceGetAttributes(second).gpuInstanceSliceCount == 3
    assert (pids(first), pids(second)) == ([], [(neighbour.pid, 600 * MIB)])
    assert used_mib() == 604  # the whole card's
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle(), 2)


def test_other_processes_find_the_stub_too(stub: Path, tmp_path: Path) -> None:
    state = write_state(tmp_path / "s", gpus(4, total_mib=80 * GIB // MIB))
    code = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=nvml_environment(stub, state), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "4"


def test_visible_devices_name_gpus_by_index_or_uuid(state: Path) -> None:
    first, second = (gpu.uuid for gpu in gpus(2))
    assert visible_uuids(state, None) == [first, second]
    assert visible_uuids(state, f"1,{first}") == [second, first]
    assert visible_uuids(state, "") == []


def test_engine_holds_gpu_memory_while_it_lives(stub: Path, state: Path, tmp_path: Path) -> None:
    write_state(state, gpus(3, used_mib=5))
    scenario = Scenario(gpu_mib=70_000, gpu_hold_seconds=0.5)
    environment = {**nvml_environment(stub, state), "CUDA_VISIBLE_DEVICES": "2,0"}
    with started(tmp_path, scenario, *length_flag(64), "-tp", "2", environment=environment) as run:
        run.wait_ready()
        assert used_by_gpu() == [70_005, 5, 70_005]
        run.engine.end_all()
        run.wait()
        assert used_by_gpu() == [70_005, 5, 70_005]  # dead, and the driver takes its time
        wait_until(lambda: used_by_gpu() == [5, 5, 5], what="memory back")


def test_engine_refuses_a_gpu_that_others_use(stub: Path, state: Path, tmp_path: Path) -> None:
    write_state(state, gpus(1, used_mib=90_000))
    environment = nvml_environment(stub, state)
    with started(tmp_path, Scenario(gpu_mib=1000), *length_flag(64), environment=environment) as run:
        assert run.wait() == 1
        assert "Free memory on device cuda:0 (51.92/140.40 GiB) on startup is less than desired" in run.log
