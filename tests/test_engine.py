"""The real vLLM (its CPU build), started for true: what the whole project is about.

`make test` makes the environments and names the first in ENGINE_PYTHON; the older version lies over it.
"""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
from pathlib import Path

import psutil
import pytest
from conftest import Run

from prober.engine.install import inspect
from prober.host.processes import TRIAL_VARIABLE
from prober.logs.classify import classify
from prober.records import Combination, CompileState, Entrypoint, Outcome, Status, Verify
from prober.results.schema import Row
from prober.results.store import Store
from prober.trial.process import output_of
from prober.trial.run import TrialContext, attempt, log_path
from prober.trial.timeouts import Limits

ROOT = Path(__file__).parents[1]
TINY = ROOT / "prober" / "models" / "tiny-llama"
HYBRID = ROOT / "tests" / "models" / "tiny-granite-hybrid"
PYTHON = Path(os.environ.get("ENGINE_PYTHON", ROOT / ".venv-engine" / "bin" / "python"))
OLDER_PYTHON = ROOT / ".venv-engine-0.28.0" / "bin" / "python"
MIB = 2**20
FLAGS = ("--load-format", "dummy", "--max-num-seqs", "16")
MINUTES = 12 * 60

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("engine"), pytest.mark.timeout(MINUTES)]


def kv(mib: int) -> tuple[str, ...]:
    return ("--kv-cache-memory-bytes", str(mib * MIB))


def probe(run: Run, results: Path, *words: str | Path, model: Path = TINY, python: Path = PYTHON) -> tuple[Row, str]:
    done = run(
        *("probe", model, "--compile", "eager", "--device", "cpu", "--python", python, "--results", results),
        *words,
        timeout=MINUTES,
    )
    row = max(Store(results).rows(), key=lambda row: row.measured_at or "")
    return row, done.stdout + done.stderr


def launches(results: Path) -> int:
    return len(Store(results).trials())


def assert_logs_read_alike(results: Path) -> None:
    """What the kept logs say agrees with what the trials showed, and with vLLM's own /metrics.

    A start that served was ended by us: its log may hold that end (a dead engine), but never a refusal.
    """
    for trial in Store(results).trials():
        alone, figures = classify(Store(results).log_path(trial.id).read_bytes()), trial.verdict.figures
        assert alone.figures.requested_max_model_len == trial.length
        if trial.verdict.outcome in (Outcome.FITS, Outcome.UNSERVABLE):
            assert alone.outcome in (Outcome.READY, Outcome.UNFINISHED, Outcome.CRASH), trial.id
            assert figures.gpu_blocks is not None
            assert figures.block_size is not None
            # The log multiplies requests by their length (0.20.1 and later): the last block may not be full.
            needed = -(-(trial.length or 1) // figures.block_size)
            assert alone.figures.kv_cache_tokens == int(figures.gpu_blocks / needed * (trial.length or 0))
        else:
            assert (alone.outcome, alone.evidence) == (trial.verdict.outcome, trial.verdict.evidence)


def tiny(folder: Path, config: str) -> Path:
    """The tiny model with another configuration."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    (folder / "config.json").write_text(config)
    return folder


def test_ceiling_is_proven_in_three_launches_then_known(run_prober: Run, tmp_path: Path) -> None:
    """8 MiB hold 32 blocks of 128 tokens, one of which is reserved; then the same from the records, and both ways."""
    results = tmp_path / "results"
    row, said = probe(run_prober, results, "--", *FLAGS, *kv(8))
    assert (row.status, row.max_model_len, row.refused_max_model_len) == (Status.EXACT, 3968, 3969), said
    assert (row.num_gpu_blocks, row.block_size, row.vllm_version, row.device) == (32, 128, "0.32.0", "cpu")
    assert launches(results) == 3
    probe(run_prober, results, "--", *FLAGS, *kv(8))
    assert launches(results) == 3
    row, said = probe(run_prober, results, "--entrypoint", "llm", "--", *FLAGS, *kv(8))
    assert (row.entrypoint, row.status, row.max_model_len) == (Entrypoint.LLM, Status.EXACT, 3968), said
    assert launches(results) == 5, "a right known row takes two launches"
    assert_logs_read_alike(results)


def test_two_ranks_hold_twice_the_blocks(run_prober: Run, tmp_path: Path) -> None:
    row, said = probe(run_prober, tmp_path / "results", "--tp", "2", "--", *FLAGS, *kv(64))
    assert (row.num_gpu_blocks, row.tensor_parallel_size) == (512, 2), said
    assert (row.status, row.max_model_len, row.refused_max_model_len) == (Status.EXACT, 511 * 128, 511 * 128 + 1)


def test_limit_of_the_model_that_fits_takes_one_launch(run_prober: Run, tmp_path: Path) -> None:
    model = tiny(tmp_path / "short", (TINY / "config.json").read_text().replace("1048576", "2048"))
    row, said = probe(run_prober, tmp_path / "results", "--", *FLAGS, *kv(8), model=model)
    assert (row.status, row.max_model_len, launches(tmp_path / "results")) == (Status.MODEL_LIMIT, 2048, 1), said


def test_hybrid_model_has_a_proven_ceiling_too(run_prober: Run, tmp_path: Path) -> None:
    """Three Mamba layers and one of attention; the CPU kernel scans one chunk of 128 tokens a step (0.32.0).

    vLLM sizes the attention block after the Mamba state, which depends on the CPU's vector width: 256 or 384 tokens.
    A request takes three blocks of each Mamba group beside those of attention, and one block is reserved.
    """
    model, results = tiny(tmp_path / "hybrid", (HYBRID / "config.json").read_text()), tmp_path / "results"
    flags = ("--load-format", "dummy", "--max-num-seqs", "4", "--max-num-batched-tokens", "128", *kv(8))
    row, said = probe(run_prober, results, "--", *flags, model=model)
    served = next(trial for trial in Store(results).trials() if trial.id == row.served_trial)
    log = Store(results).log_path(served.id).read_text()
    block, groups = (
        re.search(r"attention block size to (\d+) tokens", log),
        re.search(r"kv cache group sizes \(([\d, ]+)\)", log),
    )
    assert block is not None
    assert groups is not None
    assert (row.block_size, len(groups[1].split(","))) == (int(block[1]), 4)
    truth = ((row.num_gpu_blocks or 0) - 1 - 3 * 3) * int(block[1])
    assert (row.status, row.max_model_len, row.refused_max_model_len) == (Status.EXACT, truth, truth + 1), said
    assert launches(results) == 3


def test_quick_answer_of_an_embedding_model(run_prober: Run, tmp_path: Path) -> None:
    """vLLM chooses the length itself, and a whole prompt of it comes back as a vector."""
    results = tmp_path / "results"
    row, said = probe(run_prober, results, "--quick", "--", *FLAGS, *kv(8), "--runner", "pooling", "--convert", "embed")
    assert (row.status, row.max_model_len, row.refused_max_model_len) == (Status.AT_LEAST, 3968, None), said
    assert (row.estimated_max_model_len, launches(results)) == (3968, 1)


def test_directory_without_a_configuration_ends_at_once(run_prober: Run, tmp_path: Path) -> None:
    model = tmp_path / "empty"
    model.mkdir()
    row, said = probe(run_prober, tmp_path / "results", "--", *FLAGS, *kv(8), model=model)
    assert (row.status, row.max_model_len, row.refused_max_model_len) == (Status.BAD_CONFIG, None, None), said
    assert launches(tmp_path / "results") == 1
    assert "Invalid repository ID or local directory" in (row.refused_evidence or ""), said


def test_older_version_serves_less_than_it_starts(run_prober: Run, tmp_path: Path) -> None:
    """0.28.0 starts at 4,096 and never answers there; 3,969 is the longest that 31 blocks serve."""
    results = tmp_path / "results"
    row, said = probe(run_prober, results, "--", *FLAGS, *kv(8), python=OLDER_PYTHON)
    assert row.vllm_version == "0.28.0"
    assert (row.status, row.max_model_len, row.refused_max_model_len) == (Status.EXACT, 3969, 3970), said
    assert (row.starts_max_model_len, row.estimated_max_model_len) == (4096, 4096)
    assert row.refused_outcome is Outcome.UNSERVABLE
    assert launches(results) == 4
    (_, headings, line) = run_prober("lookup", "tiny-llama", "--results", results).stdout.splitlines()[:3]
    assert "max_model_len  starts  status" in headings
    assert "3,969   4,096" in line
    assert_logs_read_alike(results)


def test_refused_trial_is_over_within_three_seconds_and_leaves_nothing(tmp_path: Path) -> None:
    combination = Combination(
        str(TINY), compile_state=CompileState.EAGER, other_flags=(*FLAGS, *kv(8)), entrypoint=Entrypoint.SERVE
    )
    engine, tag = inspect(PYTHON, output_of), f"refused-{uuid.uuid4()}"  # other tests' trials run beside it
    setting = TrialContext(engine, combination, Verify.FULL, Limits(), tmp_path, {})
    seen: list[float] = []
    finished = threading.Event()

    def watch() -> None:
        log = log_path(setting, tag)
        while not finished.wait(0.02):
            if log.exists() and b"To serve at least one request" in log.read_bytes():
                seen.append(time.monotonic())
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    verdict, _ = attempt(setting, 3969, tag, lambda *_: None)
    over = time.monotonic()
    finished.set()
    watcher.join()
    assert (verdict.outcome, verdict.figures.estimated_max_len) == (Outcome.KV_TOO_SMALL, 3968)
    assert over - seen[0] < 3.0
    assert not [p.pid for p in psutil.process_iter() if _tag(p) == tag]


def _tag(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(TRIAL_VARIABLE)
    except psutil.Error:
        return None
