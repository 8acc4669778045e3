"""The vLLM of a plan on a node: an interpreter that is there, or one that uv (here: a script) makes once."""

from __future__ import annotations

import sys
import time
import zlib
from pathlib import Path

import pytest
from fake_engine import FakeEngine, Scenario, make_engine, write_model

from prober import __version__
from prober.fleet import node_engine
from prober.fleet.jobs import Cell, FleetNode, NodeEngine
from prober.fleet.node import describe, search
from prober.fleet.plan import EngineSpec
from prober.fleet.protocol import End, Job, Streamed
from prober.host import system
from prober.records import Combination, Status

MADE = EngineSpec(version="0.32.0")
PLAIN = Scenario(version="0.32.0")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a PATH on which there is no uv yet."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path / "cache" / "prober" / "engines"


def a_uv(folder: Path, scenario: Scenario = PLAIN, installs: str = "exit 0") -> Path:
    """`uv venv … DIR` makes DIR/bin/python, which has the fake vLLM; `uv pip install` does what it is told."""
    engine = make_engine(folder / "engine", scenario)
    exports = "".join(f"export {name}='{value}'\n" for name, value in engine.environment.items())
    (folder / "python").write_text(f'#!/bin/sh\n{exports}exec {sys.executable} "$@"\n')
    (folder / "python").chmod(0o755)
    uv = folder / "bin" / "uv"
    uv.write_text(
        f"""#!/bin/sh
echo "$@" >>{folder / "uv.log"}
if [ "$1" = venv ]; then
    for last; do :; done
    mkdir -p "$last/bin" && cp {folder / "python"} "$last/bin/python"
else
    {installs}
fi
"""
    )
    uv.chmod(0o755)
    return folder / "uv.log"


def test_a_version_is_made_once(cache: Path, tmp_path: Path) -> None:
    log = a_uv(tmp_path)
    assert node_engine.look(MADE) == NodeEngine(version="0.32.0")  # it can be made
    assert not cache.exists()
    assert node_engine.make(MADE) == NodeEngine(version="0.32.0")
    assert node_engine.make(MADE) == node_engine.look(MADE) == NodeEngine(version="0.32.0")
    venv, install = log.read_text().splitlines()
    assert venv.startswith("venv ")
    assert install.endswith(" vllm==0.32.0")
    assert [path.name for path in cache.iterdir()] == ["vllm-0.32.0"]
    assert node_engine.python_of(MADE) == cache / "vllm-0.32.0" / "bin" / "python"


def test_what_cannot_be_installed_is_told_and_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    a_uv(tmp_path, installs="echo 'no such version' >&2; exit 1")
    assert node_engine.make(MADE).problem == "vllm==0.32.0 could not be made: no such version"
    assert list(cache.iterdir()) == []


def test_a_node_without_uv_says_so(cache: Path) -> None:
    assert node_engine.look(MADE).problem == "vllm==0.32.0 cannot be made: there is no uv on the node"


def test_an_interpreter_is_asked_for_its_version(cache: Path, tmp_path: Path) -> None:
    a_uv(tmp_path)
    assert node_engine.look(EngineSpec(python=str(tmp_path / "python"))) == NodeEngine(version="0.32.0")
    missing = node_engine.look(EngineSpec(python="/no/such/python"))
    assert missing.version is None
    assert "/no/such/python does not run" in (missing.problem or "")


def test_a_node_with_another_prober_is_not_used() -> None:
    node = describe(FleetNode("id", "a", "unknown"), (), makes_engines=False, driver_version="0.0.0")
    assert node.problem is not None
    assert "and the driver 0.0.0" in node.problem


def test_gpus_that_the_driver_does_not_show_are_not_used() -> None:
    node = describe(FleetNode("id", "a", "unknown", gpus=8), (), makes_engines=False, driver_version=__version__)
    assert node.problem is not None
    assert "Ray offers 8 GPUs, and the driver shows none" in node.problem


def a_job(engine: EngineSpec, model: Path, gpu: str) -> Job:
    cell = Cell("key", Combination(str(model)), gpu, True, engine, "0.32.0")
    return Job(cell, until=time.time() + 120)


def test_a_search_on_a_node_without_gpus_runs_the_engine_that_was_made(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_uv(tmp_path, Scenario(version="0.32.0", on_cpu=True, kv_blocks=32, block_size=128))
    assert node_engine.make(MADE).problem is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    told: list[Streamed] = []
    answer = search(a_job(MADE, write_model(tmp_path / "model"), system.cpu_name()), told.append)
    assert (answer.end, answer.row is not None) == (End.ANSWERED, True), answer.why
    assert answer.row is not None
    assert (answer.row.status, answer.row.max_model_len) == (Status.EXACT, 3968)
    assert [one.known.trial.length for one in told] == [131_072, 3968, 3969]
    assert b"startup complete" in zlib.decompress(told[1].log)
    launches = FakeEngine(tmp_path / "engine" / "scenario.json", {}).launches()
    assert not [name for launch in launches for name in launch.environment if name.startswith("RAY_")]
    other = search(a_job(MADE, tmp_path / "model", "another CPU"), told.append)
    assert (other.end, "not a another CPU" in other.why) == (End.NOT_READY, True)
    assert len(told) == 3


def test_a_search_without_its_engine_is_not_ready(cache: Path, tmp_path: Path) -> None:
    nothing = EngineSpec(python=str(tmp_path / "python"))
    answer = search(a_job(nothing, write_model(tmp_path / "model"), system.cpu_name()), lambda _: None)
    assert answer.end is End.NOT_READY
    assert "does not run" in answer.why
