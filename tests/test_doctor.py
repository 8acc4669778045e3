"""What doctor finds on machines of every kind, and that it always says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prober.engine.install import Engine
from prober.host.gpu import MIB, Gpu, GpuProcess, Inventory
from prober.host.processes import Owner
from prober.measure.doctor import Finding, Places, State, checks, is_ready, lines, to_json
from prober.records import NotReady

GIB = 1024 * MIB
SECRET = "hf_aVeryRealLookingToken"
CPU_ENGINE = Engine(Path("/opt/engine/bin/python"), "0.32.0", "2.13.0", is_cpu_build=True)
CUDA_ENGINE = Engine(Path("/opt/engine/bin/python"), "0.32.0", "2.13.0", is_cpu_build=False)
L4 = Gpu(0, "GPU-aa", "NVIDIA L4", 23 * GIB, 0, 300 * MIB, "8.9", True, False, power_limit_watts=72.0, processes=())
ONE = Inventory((L4,), "550.54", "12.4", None, ("GPU-aa",))
NONE = Inventory(problem="the NVIDIA driver is not loaded")


def found(
    folder: Path, here: Inventory = ONE, engine: Engine = CUDA_ENGINE, why: str | None = None, **environment: str
) -> dict[str, Finding]:
    """Look at a machine whose home and results are empty folders."""
    places = Places(folder / "results", {"HOME": str(folder), **environment}, folder)
    return {one.name: one for one in checks(places.results, here, lambda: engine, lambda: why, places)}


def test_a_good_machine_is_ready(tmp_path: Path) -> None:
    findings = found(tmp_path, HF_TOKEN=SECRET)
    assert is_ready(list(findings.values()))
    for name in ("python", "engine", "driver", "gpu 0", "shared memory", "results", "hub token"):
        assert findings[name].state is State.OK, findings[name]
        assert findings[name].what_to_do == ""
    assert not (tmp_path / "results").exists()  # it only looks


def test_whatever_is_not_ok_says_what_to_do(tmp_path: Path) -> None:
    for here in (ONE, NONE):
        for engine in (CPU_ENGINE, CUDA_ENGINE):
            for finding in found(tmp_path, here, engine, "no module named torch").values():
                assert (finding.state is State.OK) == (finding.what_to_do == ""), finding


def test_no_engine_fails_with_the_reason(tmp_path: Path) -> None:
    def find() -> Engine:
        raise NotReady("no vLLM in /usr/bin/python3")

    findings = checks(tmp_path, ONE, find)
    assert not is_ready(findings)
    engine = next(one for one in findings if one.name == "engine")
    assert (engine.state, engine.what) == (State.FAIL, "no vLLM in /usr/bin/python3")


def test_an_engine_that_does_not_import_fails_with_the_reason(tmp_path: Path) -> None:
    engine = found(tmp_path, why="operator torchvision::nms does not exist")["engine"]
    assert engine.state is State.FAIL
    assert "torchvision::nms" in engine.what


def test_without_a_gpu_the_cpu_build_is_ready_and_a_cuda_build_is_not(tmp_path: Path) -> None:
    findings = found(tmp_path, NONE, CPU_ENGINE)
    assert is_ready(list(findings.values()))
    assert findings["gpu"].state is State.WARN
    assert "the NVIDIA driver is not loaded" in findings["gpu"].what
    assert found(tmp_path, NONE, CUDA_ENGINE)["engine"].state is State.FAIL
    assert found(tmp_path, ONE, CPU_ENGINE)["engine"].state is State.WARN


@pytest.mark.parametrize(
    ("gpu", "what", "mend"),
    [
        (
            Gpu(0, "u", "L4", 23 * GIB, 7 * GIB, 0, processes=(GpuProcess(4321, 7 * GIB, Owner.OTHER, "train.py"),)),
            "train.py, 7.0 GiB",
            "ps -fp 4321",
        ),
        (
            Gpu(0, "u", "L4", 23 * GIB, 7 * GIB, 0, processes=(GpuProcess(4321, 7 * GIB, Owner.HIDDEN),)),
            "not visible from here",
            "nvidia-smi on the host",
        ),
        (
            Gpu(0, "u", "L4", 23 * GIB, 0, 0, processes=(GpuProcess(5, None, Owner.OURS_LEFT_OVER, "python"),)),
            "left over from an earlier trial",
            "--kill-stale",
        ),
        (Gpu(0, "u", "L4", 23 * GIB, 2 * GIB, 0, processes=()), "by no process that can be seen", "nvidia-smi"),
        (Gpu(0, "u", "GB10", 120 * GIB, 9 * GIB, None, is_unified_memory=True), "shared with the host", "idle"),
        (Gpu(0, "u", "RTX", 24 * GIB, 2 * GIB, 0, is_under_windows=True), "shared with Windows", "idle"),
        (Gpu(0, "u", "L4"), "neither its memory nor its processes", "no other process"),
    ],
)
def test_a_gpu_that_is_not_simply_idle_is_a_warning(tmp_path: Path, gpu: Gpu, what: str, mend: str) -> None:
    finding = found(tmp_path, Inventory((gpu,)))["gpu 0"]
    assert finding.state is State.WARN
    assert what in finding.what
    assert mend in finding.what_to_do


def test_the_token_is_found_where_the_hub_looks_and_never_shown(tmp_path: Path) -> None:
    home = tmp_path / "hub"
    home.mkdir()
    (home / "token").write_text(SECRET + "\n")
    for name, value in (("HF_TOKEN", SECRET), ("HUGGING_FACE_HUB_TOKEN", SECRET), ("HF_HOME", str(home))):
        findings = found(tmp_path, ONE, CUDA_ENGINE, None, **{name: value})
        assert findings["hub token"].state is State.OK
        shown = to_json(list(findings.values()), ONE) + "\n".join(lines(list(findings.values())))
        assert SECRET not in shown
    assert found(tmp_path)["hub token"].state is State.WARN
    assert found(tmp_path, HF_TOKEN=" ")["hub token"].state is State.WARN
    switched_off = found(tmp_path, HF_TOKEN=SECRET, HF_HUB_DISABLE_IMPLICIT_TOKEN="1")["hub token"]
    assert switched_off.state is State.WARN
    assert "disabled by" in switched_off.what


def test_results_that_cannot_be_written_fail_and_weights_only_warn(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    places = Places(blocked / "results", {"HOME": str(blocked)}, tmp_path / "no such place")
    findings = {one.name: one for one in checks(places.results, ONE, lambda: CUDA_ENGINE, places=places)}
    assert findings["results"].state is State.FAIL
    assert "--results" in findings["results"].what_to_do
    assert findings["weights"].state is State.WARN
    assert findings["shared memory"].state is State.WARN


def test_a_full_disk_fails() -> None:
    places = Places(Path("/proc/results"), {"HOME": "/nowhere"})  # a file system with no free byte
    findings = {one.name: one for one in checks(places.results, ONE, lambda: CUDA_ENGINE, places=places)}
    assert findings["results"].state is State.FAIL


def test_json_has_every_fact_of_every_gpu_and_null_for_unknown(tmp_path: Path) -> None:
    bare = Gpu(1, "GPU-bb", "NVIDIA T4", processes=(GpuProcess(7, None, Owner.HIDDEN),))
    content = json.loads(to_json(list(found(tmp_path).values()), Inventory((L4, bare), "550.54", "12.4")))
    assert content["ready"] is True
    assert content["driver"] == "550.54"
    assert content["gpus"][0]["power_limit_watts"] == 72.0
    assert content["gpus"][0]["processes"] == []
    assert content["gpus"][1]["memory_total_bytes"] is None
    assert content["gpus"][1]["processes"] == [
        {"pid": 7, "used_bytes": None, "owner": "hidden", "name": None, "is_graphics": False}
    ]
    assert {"name", "state", "what", "what_to_do"} == content["findings"][0].keys()


def test_lines_stand_under_each_other() -> None:
    text = lines([Finding("gpu 0", State.OK, "fine"), Finding("shared memory", State.WARN, "small", "--shm-size=8g")])
    assert text == ["ok    gpu 0          fine", "warn  shared memory  small", "                     → --shm-size=8g"]
