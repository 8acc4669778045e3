"""Launch settings from a proven row: flags, a --config file, or an environment file for a container.

Pure. A row without a proven ceiling raises ``Unproven``.
"""

from __future__ import annotations

import json
import shlex

from prober.records import CompileState, ProberError
from prober.results.schema import Row

BEYOND_LIMIT = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"  # vLLM's own switch (envs.py)


class Unproven(ProberError):
    """The row has no length that was proven to serve."""


def flags(row: Row) -> str:
    """Return the arguments of ``vllm serve``, quoted for a POSIX shell. Raises ``Unproven``."""
    return shlex.join([row.model, *_words(row)])


def is_beyond_limit(row: Row) -> bool:
    """Whether the row was measured with vLLM's switch for lengths above the model's own limit."""
    return BEYOND_LIMIT in (row.environment or "")


def command(row: Row) -> str:
    """Return the whole command for a POSIX shell, with its environment variables. Raises ``Unproven``."""
    return f"{row.environment} vllm serve {flags(row)}" if row.environment else f"vllm serve {flags(row)}"


def yaml(row: Row) -> str:
    """Write a vLLM ``--config`` file. Values are JSON scalars and lists, a subset of YAML. Raises ``Unproven``."""
    lines = [f"model: {json.dumps(row.model, ensure_ascii=False)}"]
    for name, values in _options(row):
        value: object = True if not values else values[0] if len(values) == 1 else values
        lines.append(f"{name}: {json.dumps(_plain(value), ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def env(row: Row) -> str:
    """Write an environment file for a container (``docker run --env-file``, which has no quoting).

    ``VLLM_FLAGS`` holds all arguments of ``vllm serve``, the other variables single settings. Raises ``Unproven``.
    """
    settings = {
        "MODEL": row.model,
        "MAX_MODEL_LEN": str(_proven(row)),
        "TENSOR_PARALLEL_SIZE": row.tensor_parallel_size,
        "PIPELINE_PARALLEL_SIZE": row.pipeline_parallel_size,
        "GPU_MEMORY_UTILIZATION": row.gpu_memory_utilization,
        "DTYPE": row.dtype,
        "QUANTIZATION": row.quantization,
        "KV_CACHE_DTYPE": row.kv_cache_dtype,
        "VLLM_FLAGS": flags(row),
        **dict(setting.split("=", 1) for setting in shlex.split(row.environment or "")),
    }
    if any("\n" in str(value) for value in settings.values()):
        raise Unproven("A setting of this row holds a line break, which an environment file cannot: use --flags.")
    return "".join(f"{name}={value}\n" for name, value in settings.items() if value is not None)


def _proven(row: Row) -> int:
    if row.max_model_len is None:
        raise Unproven(f"No length is proven for {row.model} on {row.gpu}: nothing to serve with; measure it first.")
    return row.max_model_len


def _words(row: Row) -> list[str]:
    """Return the flags after the model's name in a fixed order, then further flags in the user's order."""
    settings = [
        ("--revision", None if (row.model_revision or "").startswith("config-") else row.model_revision),
        ("--max-model-len", _proven(row)),
        ("--tensor-parallel-size", row.tensor_parallel_size),
        ("--pipeline-parallel-size", row.pipeline_parallel_size if row.pipeline_parallel_size != 1 else None),
        ("--gpu-memory-utilization", row.gpu_memory_utilization),
        ("--dtype", row.dtype),
        ("--quantization", row.quantization),
        ("--kv-cache-dtype", row.kv_cache_dtype),
    ]
    words = [word for name, value in settings if value is not None for word in (name, str(value))]
    try:
        others = shlex.split(row.other_flags or "")
    except ValueError as error:
        raise Unproven(f"A shell cannot split this row's further flags ({error}): {row.other_flags}") from error
    if row.compile_state is CompileState.EAGER and "--enforce-eager" not in others:
        words.append("--enforce-eager")
    return words + others


def _options(row: Row) -> list[tuple[str, list[str]]]:
    options: list[tuple[str, list[str]]] = []
    for word in _words(row):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options.append((name, [value] if equals else []))
        elif options:
            options[-1][1].append(word)
    return options


def _plain(value: object) -> object:
    """Convert numbers; everything else stays text."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        for kind in (int, float):
            try:
                number = kind(value)
            except ValueError:
                continue
            return number if str(number) == value else value
    return value
