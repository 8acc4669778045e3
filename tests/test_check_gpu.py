"""scripts/check_gpu.sh as far as it goes without a GPU: made-up ones, and a torch whose memory is a claim on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from fake_nvml import DRIVER_NOT_LOADED, Gpu, build_stub, nvml_environment, write_state

ROOT = Path(__file__).parents[1]
TORCH = """
import os
from pathlib import Path

uint8 = "uint8"


def ones(count, dtype, device):
    from fake_nvml import claim, visible_uuids

    state = Path(os.environ["FAKE_NVML_STATE"])
    uuids = visible_uuids(state, os.environ.get("CUDA_VISIBLE_DEVICES"))
    cuda.user = os.getpid()
    return LEAK or claim(state, uuids[int(device.partition(":")[2])], count >> 20, hold_seconds=0.3)


class cuda:
    user = None

    @staticmethod
    def _is_in_bad_fork():
        return cuda.user not in (None, os.getpid())

    @staticmethod
    def synchronize(device=0):
        pass
"""


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stub(tmp_path_factory.mktemp("stub"))


def machine(folder: Path, stub: Path, takes_memory: bool = True) -> dict[str, str]:
    (folder / "site" / "torch").mkdir(parents=True)
    text = TORCH.replace("LEAK", "None" if takes_memory else "True")
    (folder / "site" / "torch" / "__init__.py").write_text(text)
    (folder / "site" / "torch" / "version.py").write_text("__version__ = '2.9.0'\ncuda = '12.8'\n")
    write_state(folder / "state", [Gpu(uuid=f"GPU-{uuid4()}", total_mib=24_000)])
    paths = os.pathsep.join([str(folder / "site"), str(ROOT), str(ROOT / "tests")])
    inherited = {name: text for name, text in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**inherited, **nvml_environment(stub, folder / "state"), "PYTHONPATH": paths}


def run(environment: dict[str, str], seconds: int = 200) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(ROOT / "scripts" / "check_gpu.py"), sys.executable, str(seconds)]
    return subprocess.run(script, env=environment, capture_output=True, text=True, timeout=200, check=False)


def test_every_check_passes_on_a_made_up_gpu(tmp_path: Path, stub: Path) -> None:
    done = run(machine(tmp_path, stub))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("GPU 0 NVIDIA H200: 4 of 24000 MiB, GPU-")
    assert [line.split()[:2] for line in lines[1:-1]] == [
        ["ok", "memory_is_taken_and_returned"],
        ["ok", "orphans_end"],
        ["ok", "neighbour_is_respected"],
        ["ok", "left_over_is_ended_when_asked"],
        ["ok", "vllm_is_probed"],
    ]
    assert "no vLLM there" in lines[-2]


def test_a_check_that_cannot_see_the_memory_fails(tmp_path: Path, stub: Path) -> None:
    done = run(machine(tmp_path, stub, takes_memory=False), seconds=8)
    assert done.returncode == 1
    assert "FAILED memory_is_taken_and_returned" in done.stdout
    assert "took 0 MiB only" in done.stdout


def test_machine_without_a_gpu_is_told_so(tmp_path: Path, stub: Path) -> None:
    environment = machine(tmp_path, stub)
    write_state(tmp_path / "state", [], errors={"nvmlInit_v2": DRIVER_NOT_LOADED})
    done = run(environment)
    assert done.returncode == 2
    assert "no idle GPU" in done.stderr
    assert "Traceback" not in done.stderr


def test_script_is_sound_and_says_what_is_missing(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "check_gpu.sh"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(script)], check=True)
    assert os.access(script, os.X_OK)
    done = subprocess.run([str(script), "/no/python"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "check_gpu: /no/python not found\n")
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    done = subprocess.run([str(script), str(bare)], capture_output=True, text=True, check=False)
    assert (done.returncode, "has no torch" in done.stderr) == (2, True)
