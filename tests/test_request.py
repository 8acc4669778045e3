"""The axes of one command, what closes a cell without a launch, and what a search may spend."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Probe, Run
from fake_engine import Scenario, write_model

from prober.measure.recommend import recommended
from prober.measure.request import Axes, combinations, why_impossible
from prober.records import Bracket, Ceiling, Combination, CompileState, Machine, Status, UsageError, Verify
from prober.results.store import Store

SCENARIO = Scenario(kv_blocks=900, block_size=16, blocks_follow_utilization=True)


def test_product_of_all_axes() -> None:
    axes = Axes("a/b", (1, 2), (0.85, 0.9), ("auto", "fp8"), (("--max-num-seqs", ("16", "64")),))
    found = combinations(axes)
    assert len(found) == len(set(found)) == 16
    assert {c.other_flags for c in found} == {("--max-num-seqs", "16"), ("--max-num-seqs", "64")}


def test_switches_are_varied_by_on_and_off() -> None:
    found = combinations(Axes("a/b", varied=(("--enforce-eager", ("on", "off")),)))
    assert [c.compile_state for c in found] == [CompileState.EAGER, CompileState.COLD]


def test_flag_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="given twice"):
        combinations(Axes("a/b", kv_cache_dtypes=("fp8",), vllm_flags=("--kv-cache-dtype", "auto")))


def test_a_value_that_is_said_twice_is_measured_once(fake_probe: Probe) -> None:
    words = ["--gpu-memory-utilization", "0.9,0.90", "--vary", "block-size=16,16", "--compile", "cold,cold"]
    done, _ = fake_probe(SCENARIO, "--tp", "1,1", "--kv-cache-dtype", "fp8,fp8", *words, "--plan")
    assert "1 combination, " in done.stdout, done.stdout + done.stderr


def test_heads_that_do_not_divide_close_the_cell(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", num_attention_heads=8)
    assert why_impossible(Combination(str(model), tensor_parallel_size=3)) is not None
    assert why_impossible(Combination(str(model), tensor_parallel_size=4)) is None
    assert why_impossible(Combination("nobody/knows", tensor_parallel_size=3)) is None


def test_impossible_cell_takes_no_launch_and_leaves_a_row(fake_probe: Probe, tmp_path: Path) -> None:
    write_model(tmp_path / "model", num_attention_heads=8)
    done, engine = fake_probe(SCENARIO, "--tp", "3,2", "--device", "cpu")
    assert done.returncode == 1
    assert {launch.argv[launch.argv.index("--tensor-parallel-size") + 1] for launch in engine.launches()} == {"2"}
    statuses = {row.tensor_parallel_size: row.status for row in Store(tmp_path / "results").rows()}
    assert statuses == {2: Status.EXACT, 3: Status.BAD_CONFIG}
    assert "cannot be split over 3 ranks" in done.stdout


def test_four_cells_take_few_launches_and_end_in_a_table(fake_probe: Probe, tmp_path: Path) -> None:
    done, engine = fake_probe(SCENARIO, "--tp", "1,2", "--gpu-memory-utilization", "0.5,0.9", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert len(Store(tmp_path / "results").rows()) == 4
    assert len(engine.launches()) <= 10
    assert [" exact " in line for line in done.stdout.splitlines()[-4:]] == [True] * 4


def test_plan_starts_nothing(fake_probe: Probe, tmp_path: Path) -> None:
    done, engine = fake_probe(SCENARIO, "--tp", "1,2", "--plan")
    assert (done.returncode, engine.launches()) == (0, ())
    assert "2 combinations, about 6 launches" in done.stdout
    assert not (tmp_path / "results").exists()


def test_budget_ends_with_the_bracket_and_the_same_command_goes_on(fake_probe: Probe, tmp_path: Path) -> None:
    done, engine = fake_probe(SCENARIO, "--budget-launches", "2", "--json")
    assert (done.returncode, len(engine.launches())) == (1, 2)
    (answer,) = json.loads(done.stdout)
    assert answer["status"] == "inconclusive"
    assert answer["bracket"]["refused"] == 131_072
    assert "budget of 2 launches" in answer["why"]
    done, engine = fake_probe(SCENARIO)
    assert (done.returncode, len(engine.launches())) == (0, 3)


def test_dummy_weights_are_marked(fake_probe: Probe, tmp_path: Path) -> None:
    _, engine = fake_probe(SCENARIO, "--dummy-weights")
    assert "dummy" in engine.launches()[0].argv
    (row,) = Store(tmp_path / "results").rows()
    assert "dummy weights" in (row.notes or "")


@pytest.mark.parametrize("words", [["--vary", "x"], ["--gpu-memory-utilization", "90"], ["--budget-launches", "0"]])
def test_senseless_values_are_refused(run_prober: Run, words: list[str]) -> None:
    assert run_prober("probe", "some/model", *words).returncode == 2


def ceiling(status: Status, serves: int) -> Ceiling:
    machine, bracket = Machine("GPU", "cuda", "m"), Bracket(serves, None)
    return Ceiling(Combination("a/b"), machine, status, bracket, Verify.FULL, "", (), 1.0, 1, "2026-01-01")


def test_recommended_length_leaves_headroom_only_below_memory() -> None:
    below = recommended(ceiling(Status.EXACT, 65_536))
    assert below is not None
    assert (below.length, below.length % 128) == (64_128, 0)
    whole = recommended(ceiling(Status.MODEL_LIMIT, 32_768))
    assert whole is not None
    assert whole.length == 32_768
    assert recommended(ceiling(Status.UNSTABLE, 32_768)) is None
