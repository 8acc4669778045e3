"""The axes of one command and the combinations that they span."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from prober.engine import flags
from prober.engine.hub_cache import attention_heads, is_directory
from prober.records import Combination, CompileState, Entrypoint, UsageError


@dataclass(frozen=True, slots=True)
class Axes:
    """What the user gave; every tuple of values is an axis, and their product is measured."""

    model: str
    tensor_parallel_sizes: tuple[int, ...] = (1,)
    utilizations: tuple[float | None, ...] = (None,)
    kv_cache_dtypes: tuple[str | None, ...] = (None,)
    varied: tuple[tuple[str, tuple[str, ...]], ...] = ()  # further vLLM flags, each with its values
    entrypoint: Entrypoint = Entrypoint.SERVE
    compile_states: tuple[CompileState, ...] = (CompileState.COLD,)
    vllm_flags: tuple[str, ...] = ()


def combinations(axes: Axes) -> list[Combination]:
    """The product of the axes, neighbours beside each other so that one answer helps the next.

    Raises UsageError for flags that the prober must own and for a directory that is not there.
    """
    _refuse_missing_directory(axes.model)
    choices = [[(flag, value) for value in values] for flag, values in axes.varied]
    found = []
    for varied in itertools.product(*choices):
        given = flags.parse([*axes.vllm_flags, *_words(varied)])
        first = _first(axes, given)
        sizes, dtypes, shares = axes.tensor_parallel_sizes, _dtypes(axes, first), axes.utilizations
        for size, dtype, state, share in itertools.product(sizes, dtypes, _states(axes, given), shares):
            found.append(
                replace(
                    first,
                    tensor_parallel_size=size,
                    kv_cache_dtype=dtype,
                    compile_state=state,
                    gpu_memory_utilization=share,
                )
            )
    return found


def _words(varied: Iterable[tuple[str, str]]) -> list[str]:
    """FLAG=on sets a switch, FLAG=off leaves it out, anything else is the flag's value."""
    words: list[str] = []
    for flag, value in varied:
        if value != "off":
            words += [flag] if value == "on" else [flag, value]
    return words


def _first(axes: Axes, given: flags.Flags) -> Combination:
    return Combination(
        model=axes.model,
        pipeline_parallel_size=_whole_number(given.columns.get("pipeline_parallel_size", "1")),
        dtype=given.columns.get("dtype"),
        quantization=given.columns.get("quantization"),
        kv_cache_dtype=given.columns.get("kv_cache_dtype"),
        model_revision=given.columns.get("model_revision"),
        entrypoint=axes.entrypoint,
        other_flags=given.others,
    )


def _dtypes(axes: Axes, first: Combination) -> Sequence[str | None]:
    if axes.kv_cache_dtypes == (None,):
        return (first.kv_cache_dtype,)
    if first.kv_cache_dtype is not None:
        raise UsageError("--kv-cache-dtype is given twice: before and after --.")
    return axes.kv_cache_dtypes


def _states(axes: Axes, given: flags.Flags) -> Sequence[CompileState]:
    """--enforce-eager among vLLM's own flags says it, too."""
    said = given.columns.get("compile_state")
    return axes.compile_states if said is None else (CompileState(said),)


def why_impossible(combination: Combination) -> str | None:
    """Say why no launch can help, as far as the files at hand tell; None: it may work."""
    heads = attention_heads(combination.model)
    if heads is not None and heads % combination.tensor_parallel_size:
        return f"{heads} attention heads cannot be split over {combination.tensor_parallel_size} ranks"
    return None


def _whole_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--pipeline-parallel-size takes a whole number from 1, not {text!r}.")
    return int(text)


def _refuse_missing_directory(model: str) -> None:
    """A path that is not there would be looked for on the Hub, and fail there with a message about names."""
    if not model.strip():
        raise UsageError("The model has no name; give a Hub name of the form ORG/NAME, or a directory.")
    is_path = model.startswith(("/", "./", "../", "~")) or model.endswith("/") or model.count("/") > 1
    if is_path and not is_directory(model):
        raise UsageError(f"There is no directory {model}; a Hub name has the form ORG/NAME.")
