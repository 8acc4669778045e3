"""The configuration stage, in the launched process itself: what is asked for, and whether the model allows it."""

from __future__ import annotations

import json
import os
import time
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path

from fake_scenario import Asked, Fault, FaultKind, Scenario

from vllm import wording
from vllm.engine.arg_utils import EngineArgs
from vllm.launch_record import record, scenario
from vllm.speech import ConfigError, Speech
from vllm.strike import strike


@dataclass(frozen=True)
class Launch:
    """One start: the scenario, its number, and what was asked of it."""

    scenario: Scenario
    number: int
    args: Namespace
    asked: Asked
    length: int  # -1: auto-fit
    limit: int
    vocabulary: int

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults of this launch at this length."""
        length = self.limit if self.length == -1 else self.length
        return tuple(fault for fault in self.scenario.faults if fault.is_active(self.number, length))

    def fault(self, kind: FaultKind) -> Fault | None:
        """The first active fault of a kind."""
        return next((fault for fault in self.faults if fault.kind is kind), None)

    @property
    def max_num_seqs(self) -> int:
        """As asked for, else vLLM's default."""
        return self.asked.max_num_seqs or 256


def _cache_mark() -> Path:
    root = os.environ.get("VLLM_CACHE_ROOT") or Path.home() / ".cache" / "vllm"
    return Path(root) / "torch_compile_cache" / "compiled"


def fill_cache() -> None:
    """Leave something compiled in VLLM_CACHE_ROOT, if one is given: the next start there is a warm one."""
    if "VLLM_CACHE_ROOT" in os.environ:
        _cache_mark().parent.mkdir(parents=True, exist_ok=True)
        _cache_mark().touch()


def _refuse(subject: str, text: str) -> None:
    if scenario().release >= (0, 9, 1):
        raise ConfigError(wording.config_error(scenario(), subject, text))
    raise ValueError(text)


def _read_config(model: str) -> dict[str, object]:
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            _refuse("ModelConfig", wording.no_config(scenario(), model))
        config: dict[str, object] = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return config
    if model.startswith((".", "/")) or model.count("/") > 1:
        _refuse("ModelConfig", wording.no_config(scenario(), model))
    return {}  # a Hub name: the scenario says the rest


def _integer(config: dict[str, object], name: str, default: int) -> int:
    value = config.get(name, default)
    return value if isinstance(value, int) else default


def _resolve_length(asked: int | None, limit: int, speech: Speech) -> int:
    if asked is None:
        length = min(scenario().default_length or limit, limit)
    elif asked == -1 and scenario().release >= (0, 14, 0):
        return -1
    elif asked > limit and os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1":
        _refuse("ModelConfig", wording.over_model_limit(scenario(), asked, limit))
        raise AssertionError
    else:
        length = asked
    lowered = scenario().silently_lowered_to
    if lowered is not None and lowered < length:
        speech.warning(f"The draft model's max_model_len is smaller; reducing max_model_len to {lowered}.")
        length = lowered
    if scenario().release >= (0, 9, 2):
        speech.info(f"Using max model len {length}")
    return length


def configure(engine_args: EngineArgs, number: int, speech: Speech) -> Launch:
    """Play the configuration stage; raises what this version raises."""
    args, played = engine_args.args, scenario()
    record(number, "asked", length=args.max_model_len, by_default=args.max_model_len is None, model=args.model)
    config = _read_config(args.model)
    limit = played.limit(_integer(config, "max_position_embeddings", 0))
    asked = replace(engine_args.asked(), is_warm=not args.enforce_eager and _cache_mark().exists())
    length = _resolve_length(args.max_model_len, limit, speech)
    launch = Launch(played, number, args, asked, length, limit, _integer(config, "vocab_size", 1024))
    record(number, "configured", length=length)
    heads = _integer(config, "num_attention_heads", 0)
    if heads % asked.tensor_parallel_size:
        _refuse("VllmConfig", wording.heads_by_tp(heads, asked.tensor_parallel_size))
    time.sleep(played.stage_seconds.get("config", 0))
    strike(launch.faults, "config", None, launch.max_num_seqs, speech, number)
    return launch
