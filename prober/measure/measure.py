"""Measure each combination of a request: check everything cheap first, then search, then write the row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Protocol

from prober.engine.hub_cache import is_directory, limit_beyond_default, revision_of
from prober.engine.install import Engine, inspect, settings
from prober.measure import devices
from prober.measure.devices import Devices
from prober.measure.hints import known_lengths
from prober.measure.monitor import launcher
from prober.measure.recommend import recommended
from prober.measure.request import Request, why_impossible
from prober.measure.search_loop import Launcher, Listener, Task, measure
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
from prober.trial.process import output_of

USUAL_LAUNCHES = 3
KNOWN_LAUNCHES = 2
QUICK_LAUNCHES = 1
DUMMY_WEIGHTS = ("--load-format", "dummy")
BEYOND_LIMIT_NOTE = f"beyond the model's own limit its answers may be wrong: {BEYOND_LIMIT}=1"


class Display(Listener, Protocol):
    """Shows one search, from its beginning to its end."""

    def __enter__(self) -> Display: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...
    def say(self, line: str) -> None: ...


@dataclass(frozen=True, slots=True)
class PlannedCombination:
    """A combination with its expected number of launches, or the reason why none can succeed."""

    combination: Combination
    launches: int
    impossible: str | None = None


def plan(request: Request) -> list[PlannedCombination]:
    """Return what `probe` would measure, without starting vLLM. Raises UsageError and NotReady as `probe` does."""
    rows = Store(request.results).rows()
    planned = []
    engine, reasons = _checked(request, rows)
    machine = devices.machine_of(engine, request.device)
    for combination, impossible in zip(request.combinations, reasons, strict=True):
        launches = _expected(request.is_quick, combination, bool(known_lengths(rows, combination, machine)))
        planned.append(PlannedCombination(combination, 0 if impossible else launches, impossible))
    return planned


def probe(request: Request, display_of: Callable[[Combination], Display]) -> Iterator[tuple[Ceiling, Row]]:
    """Measure each combination in turn and yield its ceiling and the row that was written.

    Raises UsageError for a request that this machine can never measure, and NotReady where it cannot measure now;
    both before the first launch where possible.
    """
    store = Store(request.results)
    store.check_writable()
    engine, reasons = _checked(request, store.rows() if request.is_certifying else [])
    for combination, impossible in zip(request.combinations, reasons, strict=True):
        if impossible:
            ceiling = _closed(combination, devices.machine_of(engine, request.device), impossible)
        else:
            with (
                display_of(combination) as display,
                devices.hold(
                    engine, request.device, combination.world_size, request.gpus, display.say, request.wait_seconds
                ) as held,
                launcher(held, store, request) as launch,
            ):
                ceiling = measure_one(request, combination, held, store, launch, display)
        row = row_as_written(ceiling)
        store.put([row])
        yield ceiling, row


def measure_one(
    request: Request,
    combination: Combination,
    held: Devices,
    store: Store,
    launch: Launcher,
    listener: Listener,
    assumed_revision: str | None = None,
) -> Ceiling:
    """Measure one combination on devices that are held, for a probe or for a node of a fleet.

    ``assumed_revision`` identifies the model's files until this machine has them. Raises NotReady where the devices do
    not report the free memory that ``request.reserve_mib`` needs, or a trial cannot be run or recorded.
    """
    model, asked = combination.model, combination.model_revision
    at_rest = held.at_rest_mib()
    if request.reserve_mib is not None and at_rest is None:
        raise NotReady("--reserve-mib: no device here reports how much of its memory is free.")
    task = Task(
        combination=combination,
        machine=held.machine,
        verify=request.verify,
        low=request.low,
        high=request.high,
        is_fresh=request.is_fresh or request.is_certifying,
        limit_of=lambda: None if request.is_beyond_limit else limit_beyond_default(model, asked),
        revision_of=lambda: revision_of(model, asked) or assumed_revision,
        settings=settings(request.environment),
        is_quick=request.is_quick,
        is_beyond_limit=request.is_beyond_limit,
        reserve_mib=request.reserve_mib,
        at_rest_mib=at_rest,
        most_launches=request.most_launches,
        most_seconds=request.most_seconds,
    )
    return measure(task, store, launch, listener)


def _checked(request: Request, rows: list[Row]) -> tuple[Engine, list[str | None]]:
    """Return the engine and, for each combination, why no launch can succeed (None: it may).

    Raises UsageError where --certify finds no row among ``rows``, or the only combination needs GPUs that do not exist.
    """
    engine = inspect(request.python, output_of)
    if request.is_certifying:
        _refuse_unknown(request, rows, devices.machine_of(engine, request.device))
    reasons = []
    for combination in request.combinations:
        impossible = why_impossible(combination)
        if impossible is None and len(request.combinations) > 1:  # a single one fails with a UsageError of its own
            impossible = devices.why_never(engine, request.device, combination.world_size, request.gpus)
        reasons.append(impossible)
    return engine, reasons


def _refuse_unknown(request: Request, rows: list[Row], machine: Machine) -> None:
    """--certify measures an existing row again: the same combination, version and machine."""
    known = {row_key(row) for row in rows if row.max_model_len is not None}
    environment = settings(request.environment)
    for combination in request.combinations:
        asked = replace(_closed(combination, machine, ""), settings=environment, reserve_mib=request.reserve_mib)
        if row_key(row_as_written(asked)) not in known:
            raise UsageError(
                f"There is no row of {combination.model} on {machine.gpu} to certify: leave --certify out."
            )


def _expected(is_quick: bool, combination: Combination, is_known: bool) -> int:
    """Number of launches that a search usually takes; a warm one fills its cache at each length first."""
    usual = QUICK_LAUNCHES if is_quick else KNOWN_LAUNCHES if is_known else USUAL_LAUNCHES
    return 2 * usual if combination.compile_state is CompileState.WARM else usual


def _closed(combination: Combination, machine: Machine, why: str) -> Ceiling:
    """The ceiling of a combination that no launch can measure."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Ceiling(combination, machine, Status.BAD_CONFIG, Bracket(), Verify.NONE, why, (), 0.0, 0, now)


def row_as_written(ceiling: Ceiling) -> Row:
    """Return the row of a ceiling, with the model's revision, a recommended length and notes added."""
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
    """Without chunked prefill the batch size, not the model, limits the length."""
    rules = {t.verdict.rule for t in ceiling.trials if t.verdict.outcome is Outcome.OVER_MODEL_LIMIT}
    return ceiling.status is Status.MODEL_LIMIT and rules == {"batched_tokens"}
