"""From what the user asked to answers in the matrix: check everything cheap, then measure each combination."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

from prober.engine.hub_cache import is_directory, limit_beyond_default, revision_of
from prober.engine.install import Engine, inspect, settings
from prober.measure import devices
from prober.measure.hints import known_lengths
from prober.measure.monitor import launcher
from prober.measure.recommend import recommended
from prober.measure.request import Axes, combinations, why_impossible
from prober.measure.search_loop import Listener, Task, measure
from prober.records import (
    Bracket,
    Ceiling,
    Combination,
    CompileState,
    Machine,
    NotReady,
    Outcome,
    Status,
    UsageError,
    Verify,
)
from prober.results.csv_format import row_key
from prober.results.from_ceiling import row_of
from prober.results.schema import CeilingKind, Row
from prober.results.serve_command import BEYOND_LIMIT
from prober.results.store import Store
from prober.search.next_length import LOWEST, Strategy
from prober.trial.process import output_of
from prober.trial.timeouts import Limits

USUAL_LAUNCHES = 3
KNOWN_LAUNCHES = 2
QUICK_LAUNCHES = 1
BISECT_LAUNCHES = 16
DUMMY_WEIGHTS = ("--load-format", "dummy")
BEYOND_LIMIT_NOTE = f"beyond the model's own limit its answers may be wrong: {BEYOND_LIMIT}=1"


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for."""

    axes: Axes
    python: Path
    results: Path
    device: str = "auto"
    gpus: tuple[str, ...] | None = None
    low: int = LOWEST
    high: int | None = None
    verify: Verify = Verify.FULL
    is_fresh: bool = False
    is_certifying: bool = False  # prove known rows anew; what has none is a mistake
    strategy: Strategy = Strategy.HINTS
    reserve_mib: int | None = None
    is_beyond_limit: bool = False
    most_launches: int | None = None
    most_seconds: float | None = None
    wait_seconds: float = devices.IDLE_SECONDS
    limits: Limits = field(default_factory=Limits)


class Display(Listener, Protocol):
    """Shows one search, from its beginning to its end."""

    def __enter__(self) -> Display: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...
    def say(self, line: str) -> None: ...


@dataclass(frozen=True, slots=True)
class PlannedCombination:
    """One combination before it is measured: how many launches to expect, or why none can help."""

    combination: Combination
    launches: int
    impossible: str | None = None


def plan(wish: Request) -> list[PlannedCombination]:
    """What `probe` would measure; nothing is started. Raises UsageError as `probe` does."""
    rows = Store(wish.results).rows()
    engine = inspect(wish.python, output_of)
    here = devices.machine_of(engine, wish.device)
    cells, wanted = [], _checked(wish)
    if wish.is_certifying:
        _refuse_unknown(wish, wanted, rows, here)
    for combination in wanted:
        impossible = _why_never(wish, engine, combination, len(wanted))
        expected = _expected(wish, combination, bool(known_lengths(rows, combination, here)))
        cells.append(PlannedCombination(combination, 0 if impossible else expected, impossible))
    return cells


def probe(wish: Request, display_of: Callable[[Combination], Display]) -> Iterator[tuple[Ceiling, Row]]:
    """Measure each combination in turn; yield its answer and its row as it was written.

    Raises UsageError or NotReady before anything costly where it can.
    """
    cells = _checked(wish)
    store = Store(wish.results)
    store.check_writable()
    engine = inspect(wish.python, output_of)
    if wish.is_certifying:
        _refuse_unknown(wish, cells, store.rows(), devices.machine_of(engine, wish.device))
    reasons = [_why_never(wish, engine, combination, len(cells)) for combination in cells]  # mistakes before launches
    for combination, impossible in zip(cells, reasons, strict=True):
        if impossible:
            ceiling = _closed(combination, devices.machine_of(engine, wish.device), impossible)
        else:
            with display_of(combination) as display:
                ceiling = _measured(wish, combination, engine, store, display)
        row = row_as_written(ceiling)
        store.put([row])
        yield ceiling, row


def _checked(wish: Request) -> list[Combination]:
    if wish.high is not None and wish.high < wish.low:
        raise UsageError(f"--high {wish.high} is below --low {wish.low}.")
    if wish.is_beyond_limit and wish.high is None:
        raise UsageError("--beyond-model-limit needs --high: nothing else ends the search.")
    return combinations(wish.axes)


def _expected(wish: Request, combination: Combination, is_known: bool) -> int:
    """Starts of vLLM that a search takes as a rule; a warm one fills its cache at each length first."""
    usual = KNOWN_LAUNCHES if is_known else USUAL_LAUNCHES
    usual = {Strategy.QUICK: QUICK_LAUNCHES, Strategy.BISECT: BISECT_LAUNCHES}.get(wish.strategy, usual)
    return 2 * usual if combination.compile_state is CompileState.WARM else usual


def _why_never(wish: Request, engine: Engine, combination: Combination, cells: int) -> str | None:
    """Why no launch can help this cell. Too few GPUs closes one of several cells; of a single one it is a mistake."""
    impossible = why_impossible(combination)
    if impossible or cells == 1:
        return impossible
    return devices.why_never(engine, wish.device, _gpus(combination), _wanted(wish))


def _added(wish: Request) -> dict[str, str]:
    """What the wish adds to the environment of each trial."""
    return {BEYOND_LIMIT: "1"} if wish.is_beyond_limit else {}


def _gpus(combination: Combination) -> int:
    return combination.tensor_parallel_size * combination.pipeline_parallel_size


def _wanted(wish: Request) -> list[str] | None:
    return None if wish.gpus is None else list(wish.gpus)


def _refuse_unknown(wish: Request, cells: Iterable[Combination], rows: Iterable[Row], here: Machine) -> None:
    """To certify is to prove the very same row anew: this combination, version and machine."""
    known = {row_key(row) for row in rows if row.max_model_len is not None}
    around = settings(_added(wish))
    for combination in cells:
        asked = replace(_closed(combination, here, ""), settings=around, reserve_mib=wish.reserve_mib)
        if row_key(row_as_written(asked)) not in known:
            raise UsageError(f"There is no row of {combination.model} on {here.gpu} to certify: leave --certify out.")


def _closed(combination: Combination, machine: Machine, why: str) -> Ceiling:
    """The answer of a combination that no launch can help."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Ceiling(combination, machine, Status.BAD_CONFIG, Bracket(), Verify.NONE, why, (), 0.0, 0, now)


def row_as_written(ceiling: Ceiling) -> Row:
    """The row of a measured ceiling, with what the files at hand and the rules of thumb add to it."""
    combination, advised = ceiling.combination, recommended(ceiling)
    has_dummy_weights = any(pair == DUMMY_WEIGHTS for pair in itertools.pairwise(combination.other_flags))
    values = dict(setting.split("=", 1) for setting in ceiling.settings)
    is_beyond_limit = values.get(BEYOND_LIMIT, "").lower() in ("1", "true")  # as vLLM reads it
    fewer = ceiling.lowered_sequences
    lowered = f"max_num_seqs lowered to {fewer}, as vLLM asks: so many requests run at once, and no more"
    notes = [("dummy weights", has_dummy_weights), (BEYOND_LIMIT_NOTE, is_beyond_limit), (lowered, fewer is not None)]
    return row_of(
        ceiling,
        is_directory=is_directory(combination.model),
        model_revision=revision_of(combination.model, combination.model_revision),
        recommended_max_model_len=advised.length if advised else None,
        ceiling_kind=CeilingKind.CONFIG if _is_ended_by_batch(ceiling) else None,
        notes=[*(note for note, is_true in notes if is_true), *([advised.why] if advised else [])],
    )


def _is_ended_by_batch(ceiling: Ceiling) -> bool:
    """Without chunked prefill the batch, not the model, is what allows no longer length."""
    rules = {t.verdict.rule for t in ceiling.trials if t.verdict.outcome is Outcome.OVER_MODEL_LIMIT}
    return ceiling.status is Status.MODEL_LIMIT and rules == {"batched_tokens"}


def _measured(wish: Request, combination: Combination, engine: Engine, store: Store, display: Display) -> Ceiling:
    known_limit = partial(limit_beyond_default, combination.model, combination.model_revision)
    added = _added(wish)
    count = _gpus(combination)
    with devices.hold(engine, wish.device, count, _wanted(wish), display.say, wish.wait_seconds) as here:
        at_rest = here.at_rest_mib()
        if wish.reserve_mib is not None and at_rest is None:
            raise NotReady("--reserve-mib: no device here tells how much of its memory is free.")
        task = Task(
            combination=combination,
            machine=here.machine,
            verify=wish.verify,
            low=wish.low,
            high=wish.high,
            is_fresh=wish.is_fresh or wish.is_certifying or wish.strategy is Strategy.BISECT,
            limit_of=(lambda: None) if wish.is_beyond_limit else known_limit,
            settings=settings(added),
            strategy=wish.strategy,
            is_beyond_limit=wish.is_beyond_limit,
            reserve_mib=wish.reserve_mib,
            at_rest_mib=at_rest,
            most_launches=wish.most_launches,
            most_seconds=wish.most_seconds,
            pinned=revision_of(combination.model, combination.model_revision),
        )
        with launcher(here, store, wish.verify, wish.limits, added) as launch:
            return measure(task, store, launch, display)
