"""Other ways to measure: quick, certify, bisection, with a reserve, beyond the limit, warm, models without text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import Probe, Run
from fake_engine import Fault, FaultKind, Scenario
from test_probe import EIGHT_MIB, rows


def test_quick_takes_one_launch_and_claims_no_more_than_it_saw(fake_probe: Probe, tmp_path: Path) -> None:
    done, engine = fake_probe(EIGHT_MIB, "--quick")
    assert (done.returncode, [launch.length for launch in engine.launches()]) == (0, [-1]), done.stderr
    assert "3,968  (a request of exactly that length was answered)" in done.stdout
    assert "was not put to the test" in done.stdout
    (row,) = rows(tmp_path)
    assert (row["status"], row["max_model_len"], row["refused_max_model_len"]) == ("at_least", "3968", "")
    assert row["estimated_max_model_len"] == "3968"


def test_quick_does_not_believe_a_choice_that_waits_for_ever(fake_probe: Probe) -> None:
    done, engine = fake_probe(Scenario(version="0.28.0", kv_blocks=32, block_size=128), "--quick")
    assert [launch.length for launch in engine.launches()] == [-1, 3969], done.stderr
    assert "3,969  (a request of exactly" in done.stdout


def test_quick_works_where_vllm_chooses_no_length(fake_probe: Probe) -> None:
    done, engine = fake_probe(Scenario(version="0.12.0", kv_blocks=32, block_size=16), "--quick")
    assert (done.returncode, len(engine.launches())) == (0, 3), done.stderr  # its estimate starts and never serves
    assert "497  (a request of exactly" in done.stdout


def test_the_whole_search_goes_on_from_a_quick_one(fake_probe: Probe, tmp_path: Path) -> None:
    fake_probe(EIGHT_MIB, "--quick")
    done, engine = fake_probe(EIGHT_MIB)
    assert (done.returncode, [launch.length for launch in engine.launches()][1:]) == (0, [3969]), done.stderr
    assert rows(tmp_path)[0]["status"] == "exact"


def test_a_quick_search_ends_only_where_vllms_own_figures_do(fake_probe: Probe) -> None:
    fake_probe(EIGHT_MIB, "--high", "1024")
    done, engine = fake_probe(EIGHT_MIB, "--quick")
    assert [launch.length for launch in engine.launches()] == [1024, 3968], done.stderr
    assert "3,968  (a request of exactly" in done.stdout


def test_a_choice_that_vllm_names_wrongly_is_not_asked_for(fake_probe: Probe, tmp_path: Path) -> None:
    """Before 0.20.0 the server goes on naming the length it had before it chose one."""
    fake_probe(Scenario(version="0.16.0", kv_blocks=32, block_size=128), "--quick")
    assert rows(tmp_path)[0]["starts_max_model_len"] == "4096"


def test_certify_proves_a_known_row_anew_in_two_launches(fake_probe: Probe) -> None:
    unknown, engine = fake_probe(EIGHT_MIB, "--certify")
    assert (unknown.returncode, engine.launches()) == (2, ())
    assert "to certify: leave --certify out" in unknown.stderr
    fake_probe(EIGHT_MIB)
    other, _ = fake_probe(EIGHT_MIB, "--certify", "--plan", vllm=["--kv-cache-dtype", "fp8"])
    assert (other.returncode, "to certify" in other.stderr) == (2, True), "a row that is merely like it"
    done, engine = fake_probe(EIGHT_MIB, "--certify")
    assert (done.returncode, [launch.length for launch in engine.launches()[3:]]) == (0, [3968, 3969])


def test_beyond_the_models_limit_only_with_an_end_and_a_warning(
    fake_probe: Probe, run_prober: Run, tmp_path: Path
) -> None:
    refused, engine = fake_probe(EIGHT_MIB, "--beyond-model-limit", limit=2048)
    assert (refused.returncode, engine.launches()) == (2, ())
    assert "needs --high" in refused.stderr
    done, engine = fake_probe(EIGHT_MIB, "--beyond-model-limit", "--high", "8192", limit=2048)
    assert done.returncode == 0, done.stderr
    (row,) = rows(tmp_path)
    assert (row["status"], row["max_model_len"]) == ("exact", "3968")
    assert row["environment"] == "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
    assert "beyond the model's own limit" in row["notes"]
    assert row["launch_command"].startswith("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve model ")
    found = run_prober("lookup", "model")
    assert "measured with VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 in the environment" in found.stdout
    assert "  VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve" in done.stdout
    pasted = run_prober("lookup", "model", "--flags")
    assert (pasted.returncode, pasted.stdout) == (1, "")
    assert "only with VLLM_ALLOW_LONG_MAX_MODEL_LEN=1: see --env" in pasted.stderr
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1" in run_prober("lookup", "model", "--env").stdout
    assert run_prober("lookup", "--need", "3000").returncode == 1, "nobody asked for answers that may be wrong"
    fake_probe(EIGHT_MIB, limit=2048)
    assert [row["max_model_len"] for row in rows(tmp_path)] == ["2048", "3968"], "another row: neither replaces"


def test_a_reserve_needs_a_device_that_tells_its_memory(fake_probe: Probe) -> None:
    done, engine = fake_probe(EIGHT_MIB, "--reserve-mib", "512")
    assert (done.returncode, engine.launches()) == (3, ())
    assert "no device here reports" in done.stderr


def test_sequences_and_compile_states_are_axes(fake_probe: Probe, tmp_path: Path) -> None:
    done, _ = fake_probe(EIGHT_MIB, "--max-num-seqs", "8,16", "--compile", "cold,eager")
    assert done.returncode == 0, done.stderr
    cells = {(row["other_flags"], row["compile_state"], row["max_model_len"]) for row in rows(tmp_path)}
    assert cells == {(f"--max-num-seqs {count}", state, "3968") for count in (8, 16) for state in ("cold", "eager")}
    eager, engine = fake_probe(EIGHT_MIB, "--enforce-eager", "--max-num-seqs", "8")
    assert "Going on from" in eager.stderr
    assert "--enforce-eager" in engine.launches()[-1].argv


@pytest.mark.parametrize(("state", "ceiling"), [("cold", 3968), ("warm", 4480)])
def test_each_length_is_as_cold_or_as_warm_as_the_others(
    fake_probe: Probe, tmp_path: Path, state: str, ceiling: int
) -> None:
    scenario = Scenario(kv_blocks=32, block_size=128, warm_blocks=4)
    done, engine = fake_probe(scenario, "--compile", state)
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path)[0]["max_model_len"] == str(ceiling)
    lengths = [launch.length for launch in engine.launches()]
    assert lengths == [131_072, 3968, 3969] if state == "cold" else lengths[::2] == lengths[1::2]


def test_a_cache_that_could_not_be_filled_is_no_warm_trial(fake_probe: Probe, tmp_path: Path) -> None:
    """The first start fills the cache and crashes: what follows would be cold, and refuse what a warm start serves."""
    crash = Fault(FaultKind.CRASH, stage="load", launches=(1,))
    scenario = Scenario(kv_blocks=32, block_size=128, warm_blocks=4, faults=(crash,))
    done, _ = fake_probe(scenario, "--compile", "warm", "--high", "4300")
    assert done.returncode == 0, done.stderr
    (row,) = rows(tmp_path)
    assert (row["status"], row["max_model_len"], row["refused_max_model_len"]) == ("at_least", "4300", "")
    assert "the compile cache could not be filled" in done.stderr


@pytest.mark.parametrize("entrypoint", ["serve", "llm"])
def test_models_without_text_are_asked_for_what_they_give(fake_probe: Probe, tmp_path: Path, entrypoint: str) -> None:
    scenario = Scenario(kv_blocks=32, block_size=128, pooling=True)
    done, engine = fake_probe(scenario, "--entrypoint", entrypoint)
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path)[0]["max_model_len"] == "3968"
    assert engine.launches()[1].requests[0] == 3968, "the whole length: nothing is added to it"


def test_fewer_sequences_are_remembered(fake_probe: Probe) -> None:
    scenario = Scenario(
        kv_blocks=32, block_size=128, faults=(Fault(FaultKind.SEQUENCE_SLOTS, stage="capture", amount=134),)
    )
    _, engine = fake_probe(scenario)
    before = len(engine.launches())
    again, engine = fake_probe(scenario)
    assert (again.returncode, len(engine.launches())) == (0, before), again.stderr


def test_the_same_number_of_sequences_again_is_no_way_on(fake_probe: Probe) -> None:
    says = Fault(FaultKind.SAYS, stage="capture", text=SLOTS)
    scenario = Scenario(kv_blocks=32, block_size=128, faults=(says, CRASH))
    done, engine = fake_probe(scenario, "--high", "2048", vllm=["--max-num-seqs", "134"])
    assert (done.returncode, len(engine.launches())) == (1, 4), done.stderr
    assert "sequence_slots" in done.stderr


SLOTS = (
    "ERROR 12-01 10:00:00 [core.py:1] ValueError: max_num_seqs (256) exceeds available Mamba cache blocks (134). Each "
    "decode sequence requires one Mamba cache block."
)
CRASH = Fault(FaultKind.CRASH, stage="capture")


def test_the_time_that_is_left_is_said(fake_probe: Probe) -> None:
    done, _ = fake_probe(EIGHT_MIB)
    first, second, third = [line for line in done.stderr.splitlines() if line.startswith("Launch ")]
    assert "left" not in first
    for line in (second, third):
        assert re.search(r", about \d+ s left$", line), line


def test_a_busy_host_is_given_time(fake_probe: Probe) -> None:
    fault = Fault(FaultKind.DEVICE_BUSY, stage="config", launches=(1,))
    done, engine = fake_probe(Scenario(kv_blocks=32, block_size=128, faults=(fault,)), "--wait", "1")
    assert (done.returncode, len(engine.launches())) == (0, 4), done.stderr
    assert "other processes use this machine's memory: waiting 1 s" in done.stderr
