"""The child that builds `vllm.LLM`, on versions of vLLM that lack what today's have: here, packages of a few lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from prober.trial import process

CHILD = process.SUPERVISOR.with_name("offline_vllm.py")
ARGUMENTS = """
class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model")
        parser.add_argument("--max-model-len", type=int)
        return parser
"""
# Of 0.4: no parser of its own, no count of requests, no vllm_config, no metrics.
OLD = """
import time
from types import SimpleNamespace as Of


class SamplingParams:
    def __init__(self, max_tokens, ignore_eos, temperature):
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, model, max_model_len=None{more}):
        assert model == "a-model"
        self.llm_engine = Of(model_config=Of(max_model_len=max_model_len or 64), cache_config=Of(num_gpu_blocks=4))

    def generate(self, prompts, sampling, use_tqdm):
        time.sleep({seconds})
        tokens = [prompt["prompt_token_ids"] for prompt in prompts]
        return [Of(prompt_token_ids=one, outputs=[Of(token_ids=[1] * sampling.max_tokens)]) for one in tokens]
"""


def played(folder: Path, *flags: str, more: str = "", seconds: float = 0) -> tuple[list[dict[str, Any]], str]:
    """What the child tells of itself, and what it printed."""
    engine = folder / "site" / "vllm" / "engine"
    engine.mkdir(parents=True)
    (engine.parent / "__init__.py").write_text(OLD.format(more=more, seconds=seconds))
    (engine / "__init__.py").touch()
    (engine / "arg_utils.py").write_text(ARGUMENTS)
    done = subprocess.run(
        [sys.executable, str(CHILD), str(folder / "events"), "full", "--model", "a-model", *flags],
        env={**os.environ, "PYTHONPATH": str(folder / "site")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return [json.loads(line) for line in (folder / "events").read_text().splitlines()], done.stderr


def test_a_version_without_a_parser_or_a_count_of_requests_is_proven_all_the_same(tmp_path: Path) -> None:
    events, said = played(tmp_path, "--max-model-len", "48")
    assert events == [
        {"event": "ready", "max_model_len": 48, "num_gpu_blocks": 4, "block_size": None},
        {"event": "asked", "prompt_tokens": 47},
        {"event": "answered", "prompt_tokens": 47, "completion_tokens": 1},
    ], said


def test_a_version_without_metrics_is_watched_by_the_clock_alone(tmp_path: Path) -> None:
    events, said = played(tmp_path, more=", disable_log_stats=True", seconds=1.3)
    assert [event["event"] for event in events] == ["ready", "asked", "answered"], said
    assert "Traceback" not in said


def test_an_argument_that_vllm_does_not_know_is_its_own_error(tmp_path: Path) -> None:
    events, said = played(tmp_path, more=", *, dtype, disable_log_stats=True")
    assert events == []
    assert "TypeError" in said
    assert "dtype" in said
