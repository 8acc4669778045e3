"""One trial: what it is given, what it shows, and what it leaves."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from bench import TRIAL, Bench, bench
from fake_engine import Scenario

from prober.records import CompileState, Entrypoint, Outcome, Stage, Verdict, Verify


def with_compile_state(trial: Bench, state: CompileState) -> Bench:
    combination = replace(trial.setting.combination, compile_state=state)
    return replace(trial, setting=replace(trial.setting, combination=combination))


@pytest.mark.parametrize("entrypoint", Entrypoint)
def test_fit_tells_vllms_own_figures(tmp_path: Path, entrypoint: Entrypoint) -> None:
    trial = bench(tmp_path, Scenario(kv_blocks=40, block_size=32), entrypoint=entrypoint)
    verdict, status = trial.attempt(1000)
    assert (verdict.outcome, verdict.stage) == (Outcome.FITS, Stage.SERVE)
    assert trial.engine.launches()[0].requests[0] == 999
    figures = verdict.figures
    assert (figures.requested_max_model_len, figures.gpu_blocks, figures.block_size) == (1000, 40, 32)
    assert status is None or entrypoint is Entrypoint.LLM


@pytest.mark.parametrize("entrypoint", Entrypoint)
@pytest.mark.parametrize(("verify", "sent"), [(Verify.NONE, ()), (Verify.SHORT, (1,)), (Verify.FULL, (63,))])
def test_no_more_is_asked_than_was_wanted(
    tmp_path: Path, entrypoint: Entrypoint, verify: Verify, sent: tuple[int, ...]
) -> None:
    trial = bench(tmp_path, Scenario(), entrypoint=entrypoint, verify=verify)
    assert trial.attempt(64)[0].outcome is Outcome.FITS
    requests = trial.engine.launches()[0].requests
    assert requests[: len(sent)] == sent
    assert len(requests) == (9 if verify is Verify.FULL else len(sent)), "after a full proof a burst of short ones"


@pytest.mark.parametrize("entrypoint", Entrypoint)
def test_without_a_length_the_models_own_limit_is_found_out(tmp_path: Path, entrypoint: Entrypoint) -> None:
    trial = bench(tmp_path, Scenario(model_limit=320), entrypoint=entrypoint)
    verdict, _ = trial.attempt(None)
    (launch,) = trial.engine.launches()
    assert launch.is_default_length
    assert (verdict.outcome, verdict.figures.requested_max_model_len) == (Outcome.FITS, 320)
    assert launch.requests[0] == 319


def blocks_of(verdict: Verdict) -> int | None:
    return verdict.figures.gpu_blocks


def test_cold_starts_find_an_empty_cache_and_warm_ones_what_the_first_left(tmp_path: Path) -> None:
    trial = bench(tmp_path, Scenario(warm_blocks=5))
    assert [blocks_of(trial.attempt(64, tag)[0]) for tag in ("a", "b")] == [32, 32]
    warm = with_compile_state(trial, CompileState.WARM)
    assert [blocks_of(warm.attempt(64, tag)[0]) for tag in ("c", "d")] == [32, 37]
    roots = [launch.environment["VLLM_CACHE_ROOT"] for launch in trial.engine.launches()]
    assert len({*roots[:2], roots[2]}) == 3
    assert roots[2] == roots[3]
    eager = with_compile_state(trial, CompileState.EAGER)
    eager.attempt(64, "e")
    assert "--enforce-eager" in trial.engine.launches()[-1].argv


def test_only_the_log_stays(tmp_path: Path) -> None:
    trial = bench(tmp_path, Scenario())
    trial.attempt(64)
    assert sorted(path.name for path in trial.setting.folder.iterdir()) == ["cache", f"{TRIAL}.log"]
    assert sorted(path.name for path in (trial.setting.folder / "cache").iterdir()) == ["modelinfos"]


def test_stages_are_told_while_it_runs(tmp_path: Path) -> None:
    seen: list[tuple[Stage, float]] = []
    scenario = Scenario(stage_seconds={"load": 0.5, "capture": 0.5, "ready": 0.5})
    bench(tmp_path, scenario).attempt(64, report=lambda stage, age: seen.append((stage, age)))
    order = list(Stage)
    places = [order.index(stage) for stage, _ in seen]
    assert places == sorted(places)
    assert {stage for stage, _ in seen} >= {Stage.CONFIG, Stage.LOAD, Stage.CAPTURE}
    assert [age for _, age in seen] == sorted(age for _, age in seen)


def test_nothing_of_it_is_open_in_the_prober(tmp_path: Path) -> None:
    trial = bench(tmp_path, Scenario())
    trial.attempt(64, "warm-up")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        trial.attempt(64, f"n{number}")
    assert len(os.listdir("/proc/self/fd")) <= before
