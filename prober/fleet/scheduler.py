"""Drive a night: start cells where there is room, keep what comes back, put back what was lost, end with the deadline.

Knows neither Ray nor files: an executor runs jobs, a keeper keeps what they showed.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prober.fleet.jobs import Cell, FleetNode
from prober.fleet.placement import Queue
from prober.fleet.protocol import Answered, End, Event, Job, Known, Lost, Reply, Streamed
from prober.results.from_ceiling import public_model

POLL_SECONDS = 0.5
GRACE_SECONDS = 120.0  # after the deadline, for running searches to end by themselves
SETTLE_SECONDS = 60.0  # after a lost process: a dead node is told from a killed process only after a while
MOST_LOSSES = 3  # of one cell: it may be what brings its nodes down


class Executor(Protocol):
    """Runs jobs on nodes."""

    def start(self, job: Job, node: FleetNode) -> None: ...
    def wait(self, seconds: float) -> Sequence[Event]: ...  # at most so long for something to happen
    def stop(self) -> Sequence[Event]: ...  # end every job: nothing of them lives on; what they had shown until then


class Recording(Protocol):
    """Keeps what the jobs show, before it is acted upon."""

    def keep_trial(self, streamed: Streamed) -> None: ...
    def keep_answers(self, answers: Sequence[tuple[Cell, Reply]]) -> None: ...
    def pass_over(self, line: str) -> None: ...  # a node was skipped or lost, and why


@dataclass(frozen=True, slots=True)
class Deadline:
    """When it ends (seconds since the epoch), and after how many seconds a skipped node is tried again."""

    until: float
    retry_seconds: float = 900.0


class Schedule:
    """One night's work. ``job_of`` makes the job of a cell from what is known to it at that moment."""

    def __init__(
        self,
        cells: Iterable[Cell],
        nodes: Iterable[FleetNode],
        executor: Executor,
        keeper: Recording,
        job_of: Callable[[Cell, tuple[Known, ...]], Job],
        night: Deadline,
        known: Mapping[str, Sequence[Known]] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._executor, self._keeper, self._job_of = executor, keeper, job_of
        self._night, self._clock = night, clock
        self._queue = Queue(cells, nodes)
        self._known: dict[str, list[Known]] = defaultdict(
            list, {key: list(ones) for key, ones in (known or {}).items()}
        )
        self._running: dict[str, tuple[Cell, FleetNode]] = {}
        self._losses: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}  # why a cell that waits was not measured where it was tried
        self.answers: dict[str, Reply] = {}

    def run(self) -> dict[str, Reply]:
        """Answer every cell, by its key. However it ends, no job lives on."""
        try:
            while self._queue or self._running:
                self._turn()
        finally:
            for event in self._executor.stop():
                if isinstance(event, Streamed):
                    self._keeper.keep_trial(event)
        return self.answers

    def _turn(self) -> None:
        now = self._clock()
        if now >= self._night.until:
            self._end([(cell, self._not_reached(cell)) for cell in self._queue.take_all()])
        if now >= self._night.until + GRACE_SECONDS:
            self._note(self._executor.stop())
        for cell, node in self._queue.place(now):
            self._running[cell.key] = (cell, node)
            self._executor.start(self._job_of(cell, tuple(self._known[cell.key])), node)
        if self._queue or self._running:
            self._note(self._executor.wait(POLL_SECONDS))

    def _note(self, events: Iterable[Event]) -> None:
        ended = []
        for event in events:
            if isinstance(event, Streamed):
                self._keeper.keep_trial(event)
                self._known[event.cell_key].append(event.known)
                continue
            cell, node = self._running.pop(event.cell_key)
            self._queue.give_back(cell, node.id)
            answer = self._lost(cell, node, event) if isinstance(event, Lost) else self._answered(cell, node, event)
            if answer is not None:
                ended.append((cell, answer))
        self._end(ended)

    def _answered(self, cell: Cell, node: FleetNode, event: Answered) -> Reply | None:
        if event.answer.end is not End.NOT_READY:
            return event.answer
        self._queue.skip(node.id, self._clock() + self._night.retry_seconds)
        return self._again(cell, f"{node.name}: {event.answer.why}", "skipped")

    def _lost(self, cell: Cell, node: FleetNode, event: Lost) -> Reply | None:
        why = f"{node.name}: {event.why}"
        if event.node_is_gone:
            self._queue.lose(node.id)
        else:
            self._queue.skip(node.id, self._clock() + SETTLE_SECONDS)
        self._losses[cell.key] += 1
        if self._losses[cell.key] >= MOST_LOSSES:
            return Reply(End.FAILED, f"lost {MOST_LOSSES} times, the last time by {why}")
        return self._again(cell, why, "lost")

    def _again(self, cell: Cell, why: str, what: str) -> Reply | None:
        """Put the cell back in line; return the answer where there is no use in that."""
        self._reasons[cell.key] = why
        self._keeper.pass_over(f"{what}: {why}; {public_model(cell.combination.model)} is put back in line")
        self._queue.add(cell)
        hopeless = self._queue.take_hopeless()
        self._end([(one, self._unplaceable(one, why)) for one in hopeless if one.key != cell.key])
        return self._unplaceable(cell, why) if cell in hopeless else None

    def _unplaceable(self, cell: Cell, why: str) -> Reply:
        return Reply(End.FAILED, f"no node is left that could run it ({self._reasons.get(cell.key, why)})")

    def _not_reached(self, cell: Cell) -> Reply:
        return Reply(End.NOT_REACHED, self._reasons.get(cell.key, "the deadline came before its turn"))

    def _end(self, ended: Sequence[tuple[Cell, Reply]]) -> None:
        if ended:
            self._keeper.keep_answers(ended)
            self.answers.update((cell.key, answer) for cell, answer in ended)
