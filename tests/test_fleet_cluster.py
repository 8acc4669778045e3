"""`prober fleet` on a true Ray cluster of 127.0.0.1: three nodes, two types of made-up GPUs, the fake engine."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, Scenario, make_engine, wait_until, write_model
from fake_nvml import build_stub, claim
from fleet_cluster import H100, L4, FleetCluster, NodeSpec, fleet_cluster

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra `fleet` is not installed")

ONE_LAUNCH = Scenario(kv_blocks=32, block_size=128, bytes_per_token=2048)  # 2,048 tokens, the models' limit, fit
THREE_LAUNCHES = Scenario(kv_blocks=8, block_size=128, bytes_per_token=2048)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[FakeEngine]:
    engine = make_engine(folder / "engine", ONE_LAUNCH)
    yield engine
    left = engine.alive()
    engine.end_all()
    assert left == ()


@pytest.fixture(scope="module")
def cluster(folder: Path, engine: FakeEngine) -> Iterator[FleetCluster]:
    specs = [NodeSpec("a"), NodeSpec("b"), NodeSpec("c", gpu=L4)]
    with fleet_cluster(folder, build_stub(folder), specs, engine.environment) as cluster:
        yield cluster


def a_plan(folder: Path, models: int = 1, defaults: str = "host_memory_gib = 4", top: str = "", more: str = "") -> Path:
    """A plan of so many model directories with a limit of 2,048 tokens, on the interpreter that runs the tests."""
    names = [write_model(folder / f"model-{number}", 2048, num_attention_heads=16) for number in range(models)]
    text = f"""
deadline_hours = 0.2
wait_minutes = 0.01
retry_minutes = 0.03
{top}
[defaults]
{defaults}
[[engine]]
python = "{sys.executable}"
"""
    path = folder / "plan.toml"
    path.write_text(text + "".join(f'[[model]]\nname = "{name}"\n' for name in names) + more)
    return path


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "results" / "matrix.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def trials_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "results" / "trials.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_thirty_cells_each_once_and_what_cannot_run_is_told_at_once(
    cluster: FleetCluster, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.change(ONE_LAUNCH)
    before = len(engine.launches())
    too_large = f'[[model]]\nname = "{tmp_path / "model-0"}"\ntp = 16\n'
    plan = a_plan(tmp_path, models=5, defaults="tp = [1, 2, 4]\nhost_memory_gib = 4", more=too_large)
    code, shown, _ = cluster.drive(plan, "--dry-run", cwd=tmp_path)
    assert code == 0
    assert "30 cells" in shown
    assert shown.count("it needs 16 GPUs on one node, and no node has more than 8") == 2
    assert not (tmp_path / "results").exists()

    code, summary, progress = cluster.drive(plan, cwd=tmp_path)
    assert code == 0, progress
    rows = rows_of(tmp_path)
    assert Counter((row["gpu"], row["tensor_parallel_size"]) for row in rows) == {
        (gpu, tp): 5 for gpu in (H100, L4) for tp in ("1", "2", "4")
    }
    assert {row["max_model_len"] for row in rows} == {"2048"}
    assert len({(row["model"], row["gpu"], row["tensor_parallel_size"]) for row in rows}) == 30
    assert len(engine.launches()) - before == len(trials_of(tmp_path)) == 30
    assert engine.alive() == ()
    assert "30 of 30 cells answered" in summary
    assert summary.count("it needs 16 GPUs") == 2
    assert str(tmp_path) not in summary
    logs = {path.stem for path in (tmp_path / "results" / "logs").iterdir()}
    assert logs == {trial["id"] for trial in trials_of(tmp_path)}
    metrics = (tmp_path / "results" / "fleet" / "ceilings.prom").read_text()
    assert metrics.count("\nprober_ceiling_tokens{") == 30
    asked = [launch.environment for launch in engine.launches()[before:]]
    assert not [name for environment in asked for name in environment if name.startswith("RAY_")]


def test_busy_node_is_skipped_with_its_reason_and_tried_again(
    cluster: FleetCluster, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.change(ONE_LAUNCH)
    taken = [claim(cluster.states["c"], gpu.uuid, 20_000) for gpu in cluster.gpus["c"]]
    plan = a_plan(tmp_path, defaults='gpus = "L4"')
    log = tmp_path / "driver.log"
    with cluster.driver(plan, cwd=tmp_path) as driver:
        wait_until(lambda: "skipped: " in log.read_text(), 60, "the busy node is skipped")
        assert rows_of_or_none(tmp_path) == []
        for one in taken:
            one.unlink()
        answer, _ = driver.communicate(timeout=60)
    assert driver.returncode == 0, log.read_text()
    assert [row["max_model_len"] for row in rows_of(tmp_path)] == ["2048"]
    assert "## Passed over" in answer
    assert f"pid {os.getpid()}" in answer


def rows_of_or_none(folder: Path) -> list[dict[str, str]]:
    return rows_of(folder) if (folder / "results" / "matrix.csv").exists() else []


def test_killed_driver_leaves_nothing_alive_and_the_next_repeats_nothing(
    cluster: FleetCluster, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.change(THREE_LAUNCHES)
    before = len(engine.launches())
    plan = a_plan(tmp_path, models=3, defaults="gpus = 'H100'\nhost_memory_gib = 8")
    with cluster.driver(plan, cwd=tmp_path):
        wait_until(lambda: len(trials_of(tmp_path)) >= 3, 60, "three trials")
    wait_until(lambda: engine.alive() == (), 30, "what the killed driver had started ends")
    kept = trials_of(tmp_path)
    under_way = len(engine.launches()) - before - len(kept)

    code, _, progress = cluster.drive(plan, cwd=tmp_path)
    assert code == 0, progress
    assert "Going on with the run" in progress
    assert {row["max_model_len"] for row in rows_of(tmp_path)} == {"896"}
    trials = trials_of(tmp_path)
    assert len({trial["id"] for trial in trials}) == len(trials)
    # Two nodes may have taken turns on a search; only an edge that another machine showed is proven here again.
    per_search = Counter(trial["combination_key"] for trial in trials)
    assert all(count <= 4 for count in per_search.values()), per_search
    assert len(engine.launches()) - before == len(trials) + under_way


def test_terminated_driver_ends_every_trial_on_every_node(
    cluster: FleetCluster, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.change(replace(THREE_LAUNCHES, stage_seconds={"load": 60.0}))
    before = len(engine.launches())
    plan = a_plan(tmp_path, models=2)
    with cluster.driver(plan, cwd=tmp_path) as driver:
        wait_until(lambda: len(engine.launches()) - before >= 4, 60, "searches on every node")
        began = time.monotonic()
        driver.send_signal(signal.SIGTERM)
        driver.communicate(timeout=60)
    assert driver.returncode == 143
    assert time.monotonic() - began < 90
    assert engine.alive() == ()


def test_searches_that_hear_no_interrupt_are_ended_with_what_they_started(
    cluster: FleetCluster, tmp_path: Path
) -> None:
    """Their workers have to be killed; what these had started is gone as well once the driver has stopped."""
    told = json.loads(script("fleet_stuck.py", cluster, tmp_path / "stuck.log"))
    assert told == {"before": 4, "after": 0}


def test_deadline_ends_searches_with_their_brackets(cluster: FleetCluster, engine: FakeEngine, tmp_path: Path) -> None:
    engine.change(replace(THREE_LAUNCHES, stage_seconds={"profile": 1.0, "kv_cache": 2.5}))
    plan = a_plan(tmp_path, defaults='gpus = "L4"', top="cell_minutes = 0.1")
    code, summary, progress = cluster.drive(plan, cwd=tmp_path)
    assert code == 4, progress
    (row,) = rows_of(tmp_path)
    assert (row["status"], row["max_model_len"], row["refused_max_model_len"]) == ("inconclusive", "", "2048")
    assert "expired, the time was up" in summary
    assert engine.alive() == ()


def test_node_that_dies_costs_at_most_one_trial_of_each_search(
    folder: Path, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.change(replace(THREE_LAUNCHES, stage_seconds={"load": 1.0}))
    before = len(engine.launches())
    specs = [NodeSpec("doomed", gpus=1), NodeSpec("spare", gpus=1), NodeSpec("other", L4, gpus=1)]
    with fleet_cluster(tmp_path, build_stub(folder), specs, engine.environment) as cluster:
        plan = a_plan(tmp_path, models=2)
        with cluster.driver(plan, cwd=tmp_path) as driver:
            wait_until(lambda: len(trials_of(tmp_path)) >= 3, 60, "some trials")
            cluster.kill("doomed")
            answer, _ = driver.communicate(timeout=120)
        assert driver.returncode == 0, (tmp_path / "driver.log").read_text()
    rows = rows_of(tmp_path)
    assert Counter(row["gpu"] for row in rows) == {H100: 2, L4: 2}
    assert {(row["status"], row["max_model_len"], row["refused_max_model_len"]) for row in rows} == {
        ("exact", "896", "897")
    }
    assert "lost: " in answer
    # Both edges of every row were launched on the machine that the row names.
    state_of = {trial["id"]: trial["state_key"] for trial in trials_of(tmp_path)}
    assert all(state_of[row["served_trial"]] == state_of[row["refused_trial"]] for row in rows)
    repeated = Counter((trial["combination_key"], trial["length"]) for trial in trials_of(tmp_path))
    on_types = 2  # each combination is searched once on each type of GPU
    for model in {key for key, _ in repeated}:
        assert sum(max(0, n - on_types) for (key, _), n in repeated.items() if key == model) <= 1
    wait_until(lambda: engine.alive() == (), 20, "nothing of it lives on")
    assert len(engine.launches()) > before


def test_gpus_are_kept_busy(cluster: FleetCluster, tmp_path: Path) -> None:
    """Trials of 2 s on 16 GPUs; the workers are warm, as they are for all but the first minute of a night."""
    told = json.loads(script("fleet_sleep.py", cluster, tmp_path / "sleep.log"))
    assert (told["gpus"], told["cells"]) == (16, 40)
    utilisation = told["slept"] / told["gpus"] / told["wall"]
    print(f"{utilisation:.1%} busy")
    assert utilisation >= 0.9


def script(name: str, cluster: FleetCluster, log: Path) -> str:
    """Run one of the scripts beside this file on the cluster; return its last line."""
    with log.open("w") as errors:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name(name)), cluster.address],
            env={**os.environ, **cluster.environment},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, log.read_text()
    return done.stdout.splitlines()[-1]


def an_engine(folder: Path, version: str, kv_blocks: int) -> Path:
    """An interpreter that has the fake vLLM of this version, whatever its environment says."""
    scenario = replace(THREE_LAUNCHES, version=version, kv_blocks=kv_blocks)
    exports = make_engine(folder / version, scenario).environment
    python = folder / version / "python"
    lines = "".join(f"export {name}='{value}'\n" for name, value in exports.items())
    python.write_text(f'#!/bin/sh\n{lines}exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_first_bad_version_is_found_on_the_cluster(cluster: FleetCluster, tmp_path: Path, form: str) -> None:
    blocks = {"0.30.0": 8, "0.31.0": 6, "0.32.0": 6}
    engines = "".join(f'[[engine]]\npython = "{an_engine(tmp_path, *one)}"\n' for one in blocks.items())
    model = write_model(tmp_path / "model", 2048)
    (tmp_path / "plan.toml").write_text(f'{engines}[[model]]\nname = "{model}"\ngpus = "H100"\nhost_memory_gib = 4\n')
    words = ["plan.toml", "--bisect-version", str(model), "0.30.0", "0.32.0"]
    code, answer, progress = cluster.drive(*words, *(["--json"] if form == "json" else []), cwd=tmp_path)
    assert code == 0, progress
    if form == "json":
        assert json.loads(answer) == {"version": "0.31.0", "last_good": "0.30.0", "untold": []}
    else:
        assert answer == "The first bad version is 0.31.0; 0.30.0 is good.\n"
    assert {(row["vllm_version"], row["status"]) for row in rows_of(tmp_path)} == {(v, "exact") for v in blocks}
