"""From what the user asked to answers in the matrix: check everything cheap, then measure each combination."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from prober import flags, station
from prober.checkpoint import is_directory, revision_of
from prober.controller import Listener, Task, measure
from prober.engine import Engine, inspect
from prober.launch import output_of
from prober.patience import Limits
from prober.records import Ceiling, Combination, CompileState, Entrypoint, UsageError, Verify
from prober.schema import Row
from prober.search import LOWEST
from prober.store import Store


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asked for; every tuple is an axis, and their product is measured."""

    model: str
    python: Path
    results: Path
    tensor_parallel_sizes: tuple[int, ...] = (1,)
    utilizations: tuple[float | None, ...] = (None,)
    entrypoint: Entrypoint = Entrypoint.SERVE
    compile_state: CompileState = CompileState.COLD
    device: str = "auto"
    gpus: tuple[str, ...] | None = None
    low: int = LOWEST
    high: int | None = None
    verify: Verify = Verify.FULL
    is_fresh: bool = False
    wait_seconds: float = station.IDLE_SECONDS
    limits: Limits = field(default_factory=Limits)
    vllm_flags: tuple[str, ...] = ()


class Display(Listener, Protocol):
    """Shows one search, from its beginning to its end."""

    def __enter__(self) -> Display: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...
    def say(self, line: str) -> None: ...


def probe(wish: Wish, display_of: Callable[[Combination], Display]) -> Iterator[tuple[Ceiling, Row]]:
    """Measure each combination in turn; yield its answer and its row as it was written.

    Raises UsageError or NotReady before anything costly where it can.
    """
    combinations = combinations_of(wish)
    store = Store(wish.results)
    store.check_writable()
    engine = inspect(wish.python, output_of)
    for combination in combinations:
        with display_of(combination) as display:
            ceiling = _measured(wish, combination, engine, store, display)
        revision = revision_of(combination.model, combination.model_revision)
        yield ceiling, store.record(ceiling, model_revision=revision)


def combinations_of(wish: Wish) -> Sequence[Combination]:
    """The product of the axes. Raises UsageError for flags that are ours and for a directory that is not there."""
    given = flags.parse(wish.vllm_flags)
    if wish.high is not None and wish.high < wish.low:
        raise UsageError(f"--high {wish.high} is below --low {wish.low}.")
    _refuse_missing_directory(wish.model)
    model = str(Path(wish.model).expanduser().resolve()) if is_directory(wish.model) else wish.model
    first = Combination(
        model=model,
        pipeline_parallel_size=_whole_number(given.columns.get("pipeline_parallel_size", "1")),
        dtype=given.columns.get("dtype"),
        quantization=given.columns.get("quantization"),
        kv_cache_dtype=given.columns.get("kv_cache_dtype"),
        model_revision=given.columns.get("model_revision"),
        entrypoint=wish.entrypoint,
        compile_state=CompileState(given.columns.get("compile_state", wish.compile_state)),
        other_flags=given.others,
    )
    axes = itertools.product(wish.tensor_parallel_sizes, wish.utilizations)
    return [replace(first, tensor_parallel_size=tp, gpu_memory_utilization=share) for tp, share in axes]


def _whole_number(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--pipeline-parallel-size takes a whole number from 1, not {text!r}.")
    return int(text)


def _refuse_missing_directory(model: str) -> None:
    """A path that is not there would be looked for on the Hub, and fail there with a message about names."""
    if (model.startswith(("/", "./", "../", "~")) or model.count("/") > 1) and not is_directory(model):
        raise UsageError(f"There is no directory {model}; a Hub name has the form ORG/NAME.")


def _measured(wish: Wish, combination: Combination, engine: Engine, store: Store, display: Display) -> Ceiling:
    count = combination.tensor_parallel_size * combination.pipeline_parallel_size
    wanted = None if wish.gpus is None else list(wish.gpus)
    with station.hold(engine, wish.device, count, wanted, display.say, wish.wait_seconds) as here:
        task = Task(
            combination=combination,
            machine=here.machine,
            verify=wish.verify,
            low=wish.low,
            high=wish.high,
            is_fresh=wish.is_fresh,
            pinned=revision_of(combination.model) if is_directory(combination.model) else None,
        )
        with station.launcher(here, store, wish.verify, wish.limits) as launch:
            return measure(task, store, launch, display)
