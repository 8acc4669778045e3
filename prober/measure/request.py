"""What the user asked for: the combinations to measure and how to search them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from prober.engine import flags
from prober.engine.hub_cache import attention_heads, is_directory
from prober.measure.devices import IDLE_SECONDS
from prober.records import Combination, CompileState, Entrypoint, UsageError, Verify
from prober.results.serve_command import BEYOND_LIMIT
from prober.search.next_length import LOWEST
from prober.trial.timeouts import Limits


@dataclass(frozen=True, slots=True)
class Request:
    """Combinations to measure in turn, with the options of their searches.

    Lengths are tokens. Raises UsageError where ``high`` is below ``low``, or ``is_beyond_limit`` lacks one.
    """

    combinations: Sequence[Combination]
    python: Path  # the interpreter that has vLLM
    results: Path
    device: str = "auto"  # auto, cuda or cpu
    gpus: tuple[str, ...] | None = None  # numbers or UUIDs; None: any idle ones
    low: int = LOWEST
    high: int | None = None
    verify: Verify = Verify.FULL
    is_fresh: bool = False  # recorded trials only hint
    is_certifying: bool = False  # measure known rows again; a combination without a row is an error
    is_quick: bool = False  # the first length that serves ends the search
    reserve_mib: int | None = None  # device memory that must stay free for a length to count
    is_beyond_limit: bool = False  # let vLLM exceed the model's own limit
    most_launches: int | None = None
    most_seconds: float | None = None
    wait_seconds: float = IDLE_SECONDS
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.high is not None and self.high < self.low:
            raise UsageError(f"--high {self.high} is below --low {self.low}.")
        if self.is_beyond_limit and self.high is None:
            raise UsageError("--beyond-model-limit needs --high: nothing else ends the search.")

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables added to the environment of every trial."""
        return {BEYOND_LIMIT: "1"} if self.is_beyond_limit else {}


@dataclass(frozen=True, slots=True)
class Axes:
    """The values of each axis; their product is measured."""

    model: str
    tensor_parallel_sizes: tuple[int, ...] = (1,)
    utilizations: tuple[float | None, ...] = (None,)
    kv_cache_dtypes: tuple[str | None, ...] = (None,)
    varied: tuple[tuple[str, tuple[str, ...]], ...] = ()  # further vLLM flags, each with its values
    entrypoint: Entrypoint = Entrypoint.SERVE
    compile_states: tuple[CompileState, ...] = (CompileState.COLD,)
    vllm_flags: tuple[str, ...] = ()


def combinations(axes: Axes) -> list[Combination]:
    """Return the product of the axes, ordered so that each answer gives a hint to the next.

    Raises UsageError for flags that the prober sets itself and for a model directory that does not exist.
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
    """--enforce-eager among vLLM's own flags overrides --compile."""
    state = given.columns.get("compile_state")
    return axes.compile_states if state is None else (CompileState(state),)


def why_impossible(combination: Combination) -> str | None:
    """Say why no launch of the combination can succeed, as far as the model's local config shows; None: it may."""
    heads = attention_heads(combination.model)
    if heads is not None and heads % combination.tensor_parallel_size:
        return f"{heads} attention heads cannot be split over {combination.tensor_parallel_size} ranks"
    return None


def _whole_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--pipeline-parallel-size takes a whole number from 1, not {text!r}.")
    return int(text)


def _refuse_missing_directory(model: str) -> None:
    """vLLM would look for a missing path on the Hub and fail there with a message about repository names."""
    if not model.strip():
        raise UsageError("The model has no name; give a Hub name of the form ORG/NAME, or a directory.")
    is_path = model.startswith(("/", "./", "../", "~")) or model.endswith("/") or model.count("/") > 1
    if is_path and not is_directory(model):
        raise UsageError(f"There is no directory {model}; a Hub name has the form ORG/NAME.")
