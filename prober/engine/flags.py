"""vLLM's own flags as the user gave them after ``--``: what we must own, and what a row has a column for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prober.records import UsageError

# What the prober itself sets, and what to say instead.
OWNED: Mapping[str, str] = {
    "--model": "give the model as `prober probe MODEL`",
    "--max-model-len": "finding it is the prober's work; bound it with --low and --high",
    "--host": "trials listen on 127.0.0.1 only",
    "--port": "trials take a free port",
    "--uds": "trials listen on 127.0.0.1 only",
    "--api-key": "each trial has a random key of its own",
    "--tensor-parallel-size": "use prober's --tp",
    "-tp": "use prober's --tp",
    "--gpu-memory-utilization": "use prober's --gpu-memory-utilization",
    "--config": "give its settings as flags, so that the row can name them",
}
# What a row has a column for: flag -> field of Combination.
COLUMNS: Mapping[str, str] = {
    "--pipeline-parallel-size": "pipeline_parallel_size",
    "-pp": "pipeline_parallel_size",
    "--dtype": "dtype",
    "--quantization": "quantization",
    "-q": "quantization",
    "--kv-cache-dtype": "kv_cache_dtype",
    "--revision": "model_revision",
    "--enforce-eager": "compile_state",
}


@dataclass(frozen=True, slots=True)
class Flags:
    """The user's flags: those with a column by field name, the others in their order, untouched."""

    columns: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()


def parse(flags: Sequence[str]) -> Flags:
    """Sort the flags. Raises UsageError for one that the prober must own. Values are not judged: vLLM does that."""
    columns: dict[str, str] = {}
    others: list[str] = []
    left = list(flags)
    while left:
        word = left.pop(0)
        name, has_value, value = word.partition("=")
        name = _dashed(name)
        _refuse_owned(name)
        name = _whole(name)
        if name not in COLUMNS:
            others.append(word)
        elif name == "--enforce-eager":
            if has_value:
                raise UsageError("--enforce-eager is a switch and takes no value.")
            columns["compile_state"] = "eager"
        elif has_value or left:
            columns[COLUMNS[name]] = value if has_value else left.pop(0)
        else:
            raise UsageError(f"{name} needs a value.")
    return Flags(columns, tuple(others))


def _dashed(name: str) -> str:
    """vLLM takes ``--max_model_len`` for ``--max-model-len`` (FlexibleArgumentParser)."""
    return name.replace("_", "-") if name.startswith("--") else name


def _whole(name: str) -> str:
    """The flag of a column that an unambiguous beginning stands for: --kv-cache-dt."""
    wholes = [flag for flag in COLUMNS if len(name) > 5 and flag.startswith(name)]
    return wholes[0] if len(wholes) == 1 else name


def _refuse_owned(name: str) -> None:
    for owned, instead in OWNED.items():
        # argparse also takes unambiguous beginnings: --max-model-l, --tensor-par
        if (
            name == owned
            or (owned == "-tp" and name == "-t")
            or (len(name) > 5 and name.startswith("--") and owned.startswith(name))
        ):
            raise UsageError(f"{owned} is not for you to set here: {instead}.")


def value_of(flags: Sequence[str], name: str) -> str | None:
    """The last value given for a flag, in either spelling; None: not given."""
    found = None
    for word, after in zip(flags, [*flags[1:], ""], strict=False):
        flag, has_value, value = word.partition("=")
        if _dashed(flag) == name:
            found = value if has_value else after
    return found
