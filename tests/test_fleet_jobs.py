"""A plan laid over a fleet: cells, what cannot run and why, what is fresh, the order, and where each starts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fake_engine import write_model
from row_makers import a_row

from prober.fleet.jobs import Cell, FleetNode, Jobs, NodeEngine, expand_plan
from prober.fleet.placement import Queue
from prober.fleet.plan import Plan, read_plan
from prober.records import CompileState, Entrypoint, Status, Verify
from prober.results.schema import Row

NOW = datetime(2026, 1, 8, tzinfo=UTC)
H100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA L4"


def a_node(name: str, gpu: str = H100, gpus: int = 8, **changes: Any) -> FleetNode:
    engines = {"vllm==0.28.0": NodeEngine("0.28.0"), "vllm==0.32.0": NodeEngine("0.32.0")}
    node = FleetNode(name, name, gpu, gpus, host_memory_mib=256 * 1024, driver="550.1", engines=engines)
    return dataclasses.replace(node, **changes)


def a_plan(models: str, top: str = "", versions: Sequence[str] = ("0.28.0",)) -> Plan:
    return read_plan(top + "\n" + "".join(f'[[engine]]\nversion = "{v}"\n' for v in versions) + models)


def one_model(more: str = "", name: str = "Qwen/Qwen3-8B") -> str:
    return f'[[model]]\nname = "{name}"\n{more}\n'


def laid(plan: Plan, nodes: Sequence[FleetNode], rows: Sequence[Row] = ()) -> Jobs:
    return expand_plan(plan, nodes, rows, NOW)


def a_known_row(**changes: Any) -> Row:
    known = {
        "gpu": H100,
        "driver": "550.1",
        "entrypoint": Entrypoint.SERVE,
        "compile_state": CompileState.COLD,
        "measured_at": "2026-01-05T00:00:00+00:00",
    }
    return a_row(**(known | changes))


def test_the_product_of_the_axes_on_every_type_present() -> None:
    plan = a_plan(one_model('tp = [1, 2]\nkv_cache_dtype = ["auto", "fp8"]'), versions=["0.28.0", "0.32.0"])
    out = laid(plan, [a_node("a"), a_node("b"), a_node("c", L4)])
    assert len(out.cells) == 2 * 2 * 2 * 2
    assert {cell.gpu for cell in out.cells} == {H100, L4}
    assert {cell.vllm_version for cell in out.cells} == {"0.28.0", "0.32.0"}
    assert len({cell.key for cell in out.cells}) == len(out.cells)
    assert out.refused == ()


@pytest.mark.parametrize("asked", ["H100", "nvidia h100", "H100 80GB"])
def test_types_are_named_as_people_name_them(asked: str) -> None:
    out = laid(a_plan(one_model(f'gpus = "{asked}"')), [a_node("a"), a_node("c", L4)])
    assert [cell.gpu for cell in out.cells] == [H100]


def test_ray_names_a_type_too() -> None:
    out = laid(a_plan(one_model('gpus = "OWN-LABEL"')), [a_node("a", accelerator="OWN-LABEL"), a_node("c", L4)])
    assert [cell.gpu for cell in out.cells] == [H100]


def test_nodes_without_a_gpu_are_taken_only_when_they_are_named() -> None:
    nodes = [a_node("a"), a_node("head", "AMD EPYC", 0)]
    assert [cell.gpus for cell in laid(a_plan(one_model()), nodes).cells] == [1]
    (cell,) = laid(a_plan(one_model('gpus = "cpu"\ntp = 2')), nodes).cells
    assert (cell.gpu, cell.is_cpu, cell.gpus) == ("AMD EPYC", True, 0)


@pytest.mark.parametrize(
    ("model", "nodes", "why"),
    [
        ("tp = 16", [a_node("a"), a_node("b")], "needs 16 GPUs on one node, and no node has more than 8"),
        ('gpus = "B200"', [a_node("a")], "the fleet has no B200"),
        ("", [], "the fleet has no GPU that can be used"),
        ("host_memory_gib = 999", [a_node("a")], "needs 999 GiB of host memory, and no node has more than 256.0 GiB"),
        (
            "",
            [a_node("a", engines={"vllm==0.28.0": NodeEngine(problem="there is no uv")})],
            "vllm==0.28.0 does not run on any of these nodes: there is no uv",
        ),
        ("", [a_node("a", problem="it is ill")], "the fleet has no GPU that can be used"),
        ('tp = 4\nflags = "--pipeline-parallel-size 4"', [a_node("a")], "needs 16 GPUs on one node"),
    ],
)
def test_what_can_never_run_is_told_with_the_reason(model: str, nodes: Sequence[FleetNode], why: str) -> None:
    out = laid(a_plan(one_model(model)), nodes)
    assert out.cells == ()
    assert why in out.refused[0].why


def test_heads_that_cannot_be_split_are_told_without_a_launch(tmp_path: Path) -> None:
    model = write_model(tmp_path / "own", num_attention_heads=8)
    out = laid(a_plan(one_model("tp = [1, 3]", name=str(model))), [a_node("a")])
    assert [cell.gpus for cell in out.cells] == [1]
    assert "8 attention heads cannot be split over 3 ranks" in out.refused[0].why
    assert str(tmp_path) not in repr(out.refused)


def test_priority_first_then_the_largest() -> None:
    plan = a_plan(one_model("tp = [1, 4, 2]") + one_model("priority = 5", name="urgent/one"))
    cells = laid(plan, [a_node("a")]).cells
    assert [(cell.priority, cell.gpus) for cell in cells] == [(5, 1), (0, 4), (0, 2), (0, 1)]


def test_fresh_rows_spare_their_cells() -> None:
    plan = a_plan(one_model("tp = [1, 2]"), top="fresh_days = 7")
    out = laid(plan, [a_node("a")], [a_known_row()])
    assert [cell.combination.tensor_parallel_size for cell in out.cells] == [2]
    assert [row.max_model_len for _, row in out.fresh] == [3968]


@pytest.mark.parametrize(
    "changes",
    [
        {"vllm_version": "0.27.0"},
        {"driver": "551.0"},
        {"measured_at": (NOW - timedelta(days=8)).isoformat()},
        {"measured_at": None},
        {"status": Status.INCONCLUSIVE},
        {"status": Status.AT_LEAST},
        {"verified": Verify.SHORT},
        {"gpu": L4},
        {"other_flags": "--max-num-seqs 8"},
        {"kv_cache_dtype": "fp8"},
        {"model": "Qwen/Qwen3-4B"},
        {"reserve_mib": 1024},
        {"environment": "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"},
    ],
)
def test_a_row_of_something_else_is_not_fresh(changes: dict[str, Any]) -> None:
    plan = a_plan(one_model(), top="fresh_days = 7")
    assert laid(plan, [a_node("a")], [a_known_row()]).cells == ()
    assert len(laid(plan, [a_node("a")], [a_known_row(**changes)]).cells) == 1


def test_nothing_is_fresh_unless_the_plan_says_so() -> None:
    assert len(laid(a_plan(one_model()), [a_node("a")], [a_known_row()]).cells) == 1


@pytest.mark.parametrize(
    ("rows", "launches"),
    [
        ([], 3),
        ([a_known_row()], 2),
        ([a_known_row(status=Status.MODEL_LIMIT)], 1),
        ([a_known_row(status=Status.MODEL_LIMIT), a_known_row(vllm_version="0.2")], 2),
        ([a_known_row(gpu=L4)], 3),
    ],
)
def test_expected_launches_follow_what_is_known(rows: list[Row], launches: int) -> None:
    assert laid(a_plan(one_model()), [a_node("a")], rows).expected_launches == launches


# --- where each starts ------------------------------------------------------------------------------------------------


def cells_of(models: str, nodes: Sequence[FleetNode]) -> tuple[Cell, ...]:
    return laid(a_plan(models), nodes).cells


def started(queue: Queue, now: float = 0.0) -> list[tuple[int, str]]:
    return [(cell.gpus, node.name) for cell, node in queue.place(now)]


def test_the_largest_start_first_and_fill_nodes_up() -> None:
    nodes = [a_node("a"), a_node("b", gpus=4)]
    queue = Queue(cells_of(one_model("tp = [1, 2, 4, 8]"), nodes), nodes)
    assert started(queue) == [(8, "a"), (4, "b")]
    assert len(queue) == 2


def test_a_large_cell_keeps_its_node_from_smaller_ones_behind_it() -> None:
    nodes = [a_node("a", gpus=4)]
    (small, *_), (large,) = cells_of(one_model("priority = 1"), nodes), cells_of(one_model("tp = 4"), nodes)
    queue = Queue([small], nodes)
    assert started(queue) == [(1, "a")]
    queue.add(large)
    for number in range(3):
        queue.add(dataclasses.replace(small, key=f"later-{number}", priority=-1))
    assert started(queue) == []
    queue.give_back(small, "a")
    assert started(queue) == [(4, "a")]


def test_no_more_searches_at_once_than_host_memory_allows() -> None:
    nodes = [a_node("a", host_memory_mib=100 * 1024)]
    models = "".join(one_model("host_memory_gib = 40", name=f"m/{n}") for n in range(5))
    cells = cells_of(models, nodes)
    queue = Queue(cells, nodes)
    assert len(started(queue)) == 2
    queue.give_back(cells[0], "a")
    assert len(started(queue)) == 1


def test_a_skipped_node_starts_nothing_until_its_time() -> None:
    nodes = [a_node("a")]
    queue = Queue(cells_of(one_model(), nodes), nodes)
    queue.skip("a", 100.0)
    assert started(queue, 99.0) == []
    assert started(queue, 100.0) == [(1, "a")]


def test_a_cpu_takes_one_search_at_a_time() -> None:
    nodes = [a_node("head", "AMD EPYC", 0)]
    queue = Queue(cells_of(one_model('gpus = "cpu"\ntp = [1, 2]'), nodes), nodes)
    assert len(started(queue)) == 1
    assert started(queue) == []


def test_cells_without_a_node_left_come_out_of_line() -> None:
    nodes = [a_node("a"), a_node("c", L4)]
    queue = Queue(cells_of(one_model(), nodes), nodes)
    queue.lose("c")
    assert [cell.gpu for cell in queue.take_hopeless()] == [L4]
    assert len(queue) == 1


def test_a_thousand_gpus_and_ten_thousand_cells_are_planned_in_seconds() -> None:
    types = [H100, L4, "NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA H200"]
    nodes = [a_node(f"node-{n}", types[n % 5]) for n in range(125)]
    axes = 'tp = [1, 2, 4, 8]\ngpu_memory_utilization = [0.8, 0.85, 0.9, 0.95]\nkv_cache_dtype = ["auto", "fp8"]'
    models = "".join(one_model(axes, name=f"org/model-{n}") for n in range(32))
    plan = a_plan(models, versions=["0.28.0", "0.32.0"])
    rows = [a_known_row(model=f"org/model-{n % 32}", gpu=types[n % 5], machine=f"m{n}") for n in range(2000)]
    began = time.perf_counter()
    out = laid(plan, nodes, rows)
    queue = Queue(out.cells, nodes)
    first = queue.place(0.0)
    seconds = time.perf_counter() - began
    assert len(out.cells) == 10_240
    assert sum(cell.gpus for cell, _ in first) == 1000
    assert seconds < 5


def test_where_each_need_is_met_and_never_all_on_one_node_that_is_said() -> None:
    plan = a_plan(one_model("host_memory_gib = 64"))
    small = a_node("a", host_memory_mib=32 * 1024)
    other = a_node("b", engines={"vllm==0.28.0": NodeEngine(problem="there is no vLLM")})
    out = laid(plan, [small, other])
    assert [one.why for one in out.refused] == ["no single node has the GPUs, the host memory and the engine together"]
