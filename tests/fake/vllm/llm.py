"""``vllm.LLM`` and ``vllm.SamplingParams``."""

from __future__ import annotations

import atexit
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fake_scenario import FaultKind

from vllm.engine.arg_utils import EngineArgs
from vllm.front_end import start_engine
from vllm.launch_config import configure
from vllm.launch_record import record, record_start, scenario
from vllm.processes import begin
from vllm.requests import Refused, Service
from vllm.speech import Speech
from vllm.strike import strike


@dataclass
class SamplingParams:
    """How to sample; the fake looks at the number of tokens only."""

    max_tokens: int = 16
    temperature: float = 1.0
    ignore_eos: bool = False
    min_tokens: int = 0
    seed: int | None = None


class LLM:
    """The offline engine: raises what the scenario's version raises."""

    def __init__(self, model: str, **keywords: Any) -> None:
        number = record_start("llm", [f"{name}={value!r}" for name, value in {"model": model, **keywords}.items()])
        begin(number, "front")
        speech = Speech(scenario())
        launch = configure(EngineArgs.from_keywords({"model": model, **keywords}), number, speech)
        engine = start_engine(launch, speech, serving=False)
        atexit.register(engine.end)
        strike(launch.faults, "ready", None, launch.max_num_seqs, speech, number)
        self._service = Service(launch, engine, speech)
        cache = SimpleNamespace(num_gpu_blocks=engine.blocks, block_size=launch.scenario.page(launch.asked))
        model_config = SimpleNamespace(
            max_model_len=self._service.reported_length,
            get_vocab_size=self._vocabulary,
            runner_type="pooling" if launch.scenario.pooling else "generate",
        )
        self.llm_engine = SimpleNamespace(model_config=model_config)
        if launch.scenario.release >= (0, 8, 0):
            self.llm_engine.vllm_config = SimpleNamespace(cache_config=cache, model_config=model_config)
        if launch.scenario.release < (0, 17, 0):
            self.llm_engine.cache_config = cache

    def _vocabulary(self) -> int:
        return self._service.launch.vocabulary

    def get_metrics(self) -> list[Any]:
        """What the scheduler counts (V1)."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        return [
            SimpleNamespace(name=name, value=value) for name, value in zip(names, self._service.load(), strict=True)
        ]

    def encode(self, prompts: Any, **_: Any) -> list[Any]:
        """Give one vector for each prompt."""
        answers = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            record(self._service.launch.number, "request", tokens=len(ids), max_tokens=0, first=ids[:8])
            self._service.generate(ids, 0)
            answers.append(SimpleNamespace(outputs=SimpleNamespace(embedding=[0.5, 0.5]), prompt_token_ids=ids))
        return answers

    def generate(self, prompts: Any, sampling_params: SamplingParams | None = None, **_: Any) -> list[Any]:
        """Answer each prompt (``{"prompt_token_ids": [...]}``); a prompt that is too long is a ValueError."""
        if self._service.launch.scenario.pooling:
            raise ValueError("LLM.generate() is only supported for generative models.")
        asked = prompts if isinstance(prompts, list) else [prompts]
        max_tokens = (sampling_params or SamplingParams()).max_tokens
        answers = []
        for prompt in asked:
            ids = prompt["prompt_token_ids"]
            record(self._service.launch.number, "request", tokens=len(ids), max_tokens=max_tokens, first=ids[:8])
            try:
                tokens = self._service.generate(ids, max_tokens)
            except Refused as refusal:
                raise (ValueError if refusal.status == 400 else RuntimeError)(str(refusal)) from None
            if self._service.launch.fault(FaultKind.COMPLETION_EMPTY):
                tokens = []
            output = SimpleNamespace(token_ids=tokens, text=" a" * len(tokens), finish_reason="length")
            answers.append(SimpleNamespace(outputs=[output], prompt_token_ids=ids, finished=True))
        return answers
