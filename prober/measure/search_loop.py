"""Search one combination: choose a length, launch it, record the trial, repeat."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Protocol

from prober import __version__
from prober.engine.flags import value_of
from prober.engine.versions import length_regimes, supports_auto_length
from prober.measure.hints import known_lengths
from prober.records import (
    AUTO,
    Bracket,
    Ceiling,
    Combination,
    Machine,
    Outcome,
    Report,
    Stage,
    Status,
    Trial,
    Verdict,
    Verify,
)
from prober.results.from_ceiling import public_model
from prober.results.store import Store
from prober.search.interpret import interpret
from prober.search.next_length import LOWEST, Answer, Done, Space, Try, bracket, next_step

log = logging.getLogger(__name__)

TRIALS_LAST = timedelta(days=7)  # older trials are only hints: drivers, caches and files change
AT_REST_TOLERANCE_MIB = 256  # drivers and desktops move by about that much
SEQUENCES_FLAG = "--max-num-seqs"


@dataclass(frozen=True, slots=True)
class Task:
    """What to measure, and how hard to prove it."""

    combination: Combination
    machine: Machine
    verify: Verify = Verify.FULL
    low: int = LOWEST
    high: int | None = None
    is_fresh: bool = False  # recorded trials only hint
    # Both are called again around each launch, because the first one may download the model.
    limit_of: Callable[[], int | None] = lambda: None  # the model's own limit where vLLM defaults to a shorter length
    revision_of: Callable[[], str | None] = lambda: None  # what identifies the model's files; None: not known
    settings: tuple[str, ...] = ()  # NAME=value of the environment that vLLM reads
    is_quick: bool = False  # the first length that serves ends the search
    hints: tuple[int, ...] = ()  # lengths to begin with, before those of known rows
    is_beyond_limit: bool = False  # vLLM accepts lengths above the model's own limit
    reserve_mib: int | None = None  # device memory that must stay free for a length to count
    at_rest_mib: int | None = None  # device memory in use now, on all devices of the machine's set
    most_launches: int | None = None  # then end with the bracket so far
    most_seconds: float | None = None  # no launch begins later


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """Result of one launch, with the devices' memory before, during and after it (see `Trial`); None: not reported."""

    verdict: Verdict
    exit_status: int | None = None
    leaked_mib: int | None = None
    least_free_mib: int | None = None
    at_rest_mib: int | None = None


# Launches once: combination, length (None: the model's limit, AUTO: vLLM's choice), trial id, progress callback.
Launcher = Callable[[Combination, int | None, str, Report], LaunchResult]


class Listener(Protocol):
    """Receives the events of one search."""

    def resumed(self, trials: Sequence[Trial]) -> None: ...
    def launching(self, step: Try, launch: int, bracket: Bracket) -> None: ...
    def running(self, stage: Stage, age_seconds: float) -> None: ...
    def finished(self, trial: Trial) -> None: ...


class Lowered(Exception):  # not an error: the same search on another axis
    """vLLM allows fewer sequences than requested."""

    def __init__(self, sequences: int, length: int | None) -> None:
        super().__init__(sequences)
        self.sequences, self.length = sequences, length


def measure(task: Task, store: Store, launch: Launcher, listener: Listener) -> Ceiling:
    """Find and prove the ceiling and record every trial as it ends; the caller records the ceiling.

    Trials of the same combination on the same machine in the same state are not repeated. Raises NotReady where
    the devices are busy or the results folder cannot be written; recorded trials stay.
    """
    store.check_writable()
    began = time.monotonic()
    launched: list[Trial] = []
    fewer: int | None = None
    while True:
        search = _Search(task, store, launch, listener, launched, began)
        try:
            done = search.run()
        except Lowered as lowered:
            combination = with_sequences(task.combination, lowered.sequences)
            fewer = lowered.sequences
            task = replace(task, combination=combination, hints=(lowered.length,) if lowered.length else ())
            continue
        return Ceiling(
            combination=task.combination,
            machine=task.machine,
            status=done.status,
            bracket=done.bracket,
            verify=task.verify,
            why=done.why,
            trials=tuple(search.trials),
            seconds=time.monotonic() - began if launched else sum(t.seconds for t in search.trials),
            launches=len({t.id for t in [*search.trials, *launched]}),
            measured_at=_now().isoformat(timespec="seconds") if launched else _last_start(search.trials),
            reserve_mib=task.reserve_mib,
            settings=task.settings,
            is_quick=task.is_quick,
            lowered_sequences=fewer,
        )


class _Search:
    """State of one running search."""

    def __init__(
        self, task: Task, store: Store, launch: Launcher, listener: Listener, launched: list[Trial], began: float
    ) -> None:
        self.task, self.store, self.launch, self.listener = task, store, launch, listener
        self.launched, self.began = launched, began
        self.combination_key = combination_key(task.combination, task.revision_of())
        self.state_key = state_key(task.machine, task.settings, task.reserve_mib)
        since = _now() if task.is_fresh else _now() - TRIALS_LAST
        same = [t for t in store.trials() if self._is_same(t) and _when(t) >= since]
        self.lowered = next((_lowered(t) for t in reversed(same) if self._wants_fewer(t)), None)
        recorded = [t for t in same if _is_answer(t, task.verify)]
        ours = [t for t in launched if self._is_keyed(t) and t not in recorded]
        self.trials = recorded + ours
        rows = store.rows()
        self.space = Space(
            task.low,
            task.high,
            task.limit_of(),
            hints=(*task.hints, *known_lengths(rows, task.combination, task.machine)),
            switches=length_regimes(task.machine.vllm_version, task.combination.other_flags),
            is_quick=task.is_quick,
            has_auto=supports_auto_length(task.machine.vllm_version),
        )

    def _is_same(self, trial: Trial) -> bool:
        return self._is_keyed(trial) and self._is_rest_alike(trial)

    def _is_keyed(self, trial: Trial) -> bool:
        return (trial.combination_key, trial.state_key) == (self.combination_key, self.state_key)

    def _is_rest_alike(self, trial: Trial) -> bool:
        """Memory that another process took or released between two trials changes what a length needs."""
        then, now = trial.at_rest_mib, self.task.at_rest_mib
        return then is None or now is None or abs(then - now) <= AT_REST_TOLERANCE_MIB

    def run(self) -> Done:
        if self.lowered:  # known from an earlier run
            raise self.lowered
        log.info("%d recorded trials count; %d lengths are hints", len(self.trials), len(self.space.hints))
        if self.trials:
            self.listener.resumed(self.trials)
        while True:
            observations = [o for t in self.trials if (o := interpret(t, self.task.verify)) is not None]
            if self.task.is_beyond_limit:  # a start without a length shows a limit that does not hold here
                observations = [o if o.reading is Answer.OVER_LIMIT else replace(o, limit=None) for o in observations]
            self.space = replace(self.space, limit=self.task.limit_of())
            step = next_step(observations, self.space)
            if isinstance(step, Done):
                log.info("done: %s, %s", step.status, step.why)
                return step
            so_far = bracket(observations, self.space)
            if (spent := self._spent()) is not None:
                return Done(Status.INCONCLUSIVE, so_far, spent)
            chosen = {None: "the default", AUTO: "auto"}.get(step.length, step.length)
            log.info("launch %d: max_model_len %s, %s", len(self.launched) + 1, chosen, step.why)
            self.listener.launching(step, len(self.launched) + 1, so_far)
            self._try(step.length)

    def _wants_fewer(self, trial: Trial) -> bool:
        """vLLM allows fewer sequences than the current value; the same number again would loop forever."""
        slots, asked = trial.verdict.figures.sequence_slots, value_of(self.task.combination.other_flags, SEQUENCES_FLAG)
        is_fewer = asked is None or not asked.isdecimal() or (slots or 0) < int(asked)
        return trial.verdict.outcome is Outcome.SEQUENCE_SLOTS and bool(slots) and is_fewer

    def _spent(self) -> str | None:
        """Say which budget is used up; None: none is."""
        most_launches, most_seconds = self.task.most_launches, self.task.most_seconds
        if most_launches is not None and len(self.launched) >= most_launches:
            return f"the budget of {most_launches} launches is used up"
        if most_seconds is not None and time.monotonic() - self.began >= most_seconds:
            return f"the budget of {most_seconds / 60:g} minutes is used up"
        return None

    def _try(self, length: int | None) -> None:
        tag, started, began = _trial_id(), _now(), time.monotonic()
        result = self.launch(self.task.combination, length, tag, self.listener.running)
        figures, revision = result.verdict.figures, self.task.revision_of()  # known by now if this launch downloaded it
        trial = Trial(
            id=tag,
            combination_key=combination_key(self.task.combination, revision),
            state_key=self.state_key,
            length=figures.requested_max_model_len if length in (None, AUTO) else length,
            is_default_length=length is None,
            verify=self.task.verify,
            verdict=result.verdict,
            seconds=round(time.monotonic() - began, 2),
            started_at=started.isoformat(timespec="seconds"),
            exit_status=result.exit_status,
            leaked_mib=result.leaked_mib,
            least_free_mib=result.least_free_mib,
            reserve_mib=self.task.reserve_mib,
            at_rest_mib=result.at_rest_mib,
            prober_version=__version__,
            model_revision=revision,
        )
        log.info("trial %s: %s, max_model_len %s: %s", tag, trial.verdict.outcome, trial.length, trial.verdict.evidence)
        self.store.append(trial)
        self.trials.append(trial)
        self.launched.append(trial)
        self.listener.finished(trial)
        if self._wants_fewer(trial):
            raise _lowered(trial)


def with_sequences(combination: Combination, sequences: int) -> Combination:
    """Return the combination with ``--max-num-seqs`` appended; vLLM uses the last value of a repeated flag."""
    return replace(combination, other_flags=(*combination.other_flags, SEQUENCES_FLAG, str(sequences)))


def combination_key(combination: Combination, revision: str | None) -> str:
    """Hash a combination. Two paths to a directory with the same ``revision`` are one model."""
    model = public_model(combination.model) if revision else combination.model
    return _hash({**asdict(combination), "model": model, "pinned": revision})


def state_key(machine: Machine, settings: Sequence[str] = (), reserve_mib: int | None = None) -> str:
    """Hash the machine, the environment variables that vLLM reads, and the memory that must stay free."""
    demanded = {} if reserve_mib is None else {"reserve_mib": reserve_mib}
    return _hash({**asdict(machine), "settings": sorted(settings), **demanded})


def _lowered(trial: Trial) -> Lowered:
    return Lowered(trial.verdict.figures.sequence_slots or 1, trial.length)


def _is_answer(trial: Trial, verify: Verify) -> bool:
    """Whether a recorded trial settles its length; an unexplained failure is launched again."""
    observation = interpret(trial, verify)
    return observation is not None and observation.reading is not Answer.UNKNOWN


def _hash(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _trial_id() -> str:
    return f"{_now():%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"


def _last_start(trials: Sequence[Trial]) -> str:
    return trials[-1].started_at if trials else _now().isoformat(timespec="seconds")


def _when(trial: Trial) -> datetime:
    return datetime.fromisoformat(trial.started_at)


def _now() -> datetime:
    return datetime.now(UTC)
