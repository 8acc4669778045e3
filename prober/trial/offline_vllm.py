"""Build ``vllm.LLM`` and verify it. A standalone script for any interpreter that has vLLM.

    python offline_vllm.py EVENTS none|short|full VLLM-FLAGS…

It writes one JSON object per line to EVENTS: ``ready`` (max_model_len, num_gpu_blocks, block_size), then ``answered``
(prompt_tokens, completion_tokens) or ``rejected`` (why). vLLM's own output goes to stdout as usual.
"""

import argparse
import contextlib
import importlib
import json
import os
import runpy
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Python puts a script's directory first on sys.path; our modules must not shadow others.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
SAMPLE_SECONDS = 1.0
BURST_REQUESTS, BURST_TOKENS = 8, 4
POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify")


def main() -> None:
    events, verify, *flags = sys.argv[1:]
    with open(events, "a", encoding="utf-8", buffering=1) as out:
        lock = threading.Lock()

        def say(event: str, **facts: object) -> None:
            with lock:
                out.write(json.dumps({"event": event, **facts}) + "\n")

        llm, asked_stats = build(flags)
        length = max_model_len(llm)
        say("ready", max_model_len=length, **blocks(llm))
        if asked_stats:
            threading.Thread(target=sample, args=(llm, say), daemon=True).start()
        if verify != "none":
            prove(llm, length, verify, say)
        # No shutdown call works in every vLLM version; the supervisor kills the process tree.
        os._exit(0)


def build(flags: list[str]) -> tuple:  # type: ignore[type-arg]  # old interpreters
    """Return the LLM and whether it reports scheduler metrics."""
    from vllm import LLM

    arguments = given_arguments(flags)
    model = str(arguments.pop("model"))
    counted = dict(arguments, disable_log_stats=False)
    try:
        return LLM(model=model, **counted), True
    except TypeError as error:
        if "disable_log_stats" not in str(error):
            raise
        return LLM(model=model, **arguments), False


def given_arguments(flags: list[str]) -> dict[str, object]:
    """Parse the flags with vLLM's parser and drop its defaults: LLM has defaults of its own."""
    from vllm.engine.arg_utils import EngineArgs

    parser = EngineArgs.add_cli_args(parser_class()())
    given, default = vars(parser.parse_args(flags)), vars(parser.parse_args([]))
    return {name: value for name, value in given.items() if name == "model" or value != default.get(name)}


def parser_class() -> type:
    """Return vLLM's parser class, by version: 0.12 and later, 0.5.1 and later, earlier."""
    for module in ("vllm.utils.argparse_utils", "vllm.utils"):
        with contextlib.suppress(ImportError, AttributeError):
            return importlib.import_module(module).FlexibleArgumentParser  # type: ignore[no-any-return]
    return argparse.ArgumentParser


def max_model_len(llm) -> int:  # type: ignore[no-untyped-def]  # vLLM is not ours to type
    engine = llm.llm_engine
    for config in (getattr(getattr(engine, "vllm_config", None), "model_config", None), engine.model_config):
        if config is not None:
            return int(config.max_model_len)
    raise AttributeError("max_model_len")


def blocks(llm) -> dict[str, object]:  # type: ignore[no-untyped-def]
    engine = llm.llm_engine
    config = getattr(getattr(engine, "vllm_config", engine), "cache_config", None)
    return {name: getattr(config, name, None) for name in ("num_gpu_blocks", "block_size")}


def prove(llm, length: int, verify: str, say) -> None:  # type: ignore[no-untyped-def]
    """Send a prompt that, with the generated token, fills the length; then a burst of short ones."""
    tokens = (length if is_pooling(llm) else length - 1) if verify == "full" else 1
    say("asked", prompt_tokens=tokens)
    try:
        (answer,) = ask(llm, [tokens], 1)
        if verify == "full" and length >= 4 * (BURST_REQUESTS + BURST_TOKENS):
            ask(llm, [BURST_TOKENS + n for n in range(BURST_REQUESTS)], BURST_TOKENS)
    except ValueError as error:
        say("rejected", why=str(error))
        return
    say("answered", prompt_tokens=len(answer.prompt_token_ids or ()), completion_tokens=returned(llm, answer))


def is_pooling(llm) -> bool:  # type: ignore[no-untyped-def]
    """Whether the model returns vectors or scores: ModelConfig.runner_type (0.8 and later), .task before."""
    config = llm.llm_engine.model_config
    kind = getattr(config, "runner_type", None) or getattr(config, "task", None)
    return str(kind) in ("pooling", "embedding", "embed", "classify", "reward", "score")


def returned(llm, answer) -> int:  # type: ignore[no-untyped-def]
    """Count the generated tokens; 1 for the result of a pooling model."""
    if is_pooling(llm):
        return 1 if answer.outputs is not None else 0
    return len(answer.outputs[0].token_ids) if answer.outputs else 0


def ask(llm, prompt_tokens: list[int], answer_tokens: int):  # type: ignore[no-untyped-def]
    from vllm import SamplingParams

    token_ids = runpy.run_path(str(HERE / "prompts.py"))["token_ids"]
    prompts = [{"prompt_token_ids": token_ids(count)} for count in prompt_tokens]
    if is_pooling(llm):
        return encode(llm, prompts)  # type: ignore[no-untyped-call]
    sampling = SamplingParams(max_tokens=answer_tokens, ignore_eos=True, temperature=0.0)
    return llm.generate(prompts, sampling, use_tqdm=False)


def encode(llm, prompts):  # type: ignore[no-untyped-def]
    """Encode with the model's own task, which newer versions require."""
    for task in (getattr(llm, "pooling_task", None), *getattr(llm, "supported_tasks", ())):
        if task in POOLING_TASKS:
            return llm.encode(prompts, pooling_task=task, use_tqdm=False)
    return llm.encode(prompts, use_tqdm=False)


def sample(llm, say) -> None:  # type: ignore[no-untyped-def]
    """Report scheduler metrics every second, so that a request that never runs is noticed."""
    names = {
        "vllm:num_requests_running": "running",
        "vllm:num_requests_waiting": "waiting",
        "vllm:kv_cache_usage_perc": "kv_usage",
        "vllm:gpu_cache_usage_perc": "kv_usage",  # its name before 0.10
    }
    while True:
        time.sleep(SAMPLE_SECONDS)
        try:
            seen = {names[m.name]: float(m.value) for m in llm.get_metrics() if m.name in names}
        except Exception:  # a version without metrics: only the time limit applies
            return
        say("scheduler", **seen)


if __name__ == "__main__":
    main()
