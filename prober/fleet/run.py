"""One run of a plan on a fleet: look at the nodes, measure, prove falls again, compare, and write it all down."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

from prober.fleet import compare, scheduler
from prober.fleet.compare import Compared
from prober.fleet.jobs import AGAIN, Cell, FleetNode, Jobs, expand_plan, runs_on
from prober.fleet.journal import FleetFiles, Run
from prober.fleet.known_rows import KnownRows
from prober.fleet.openmetrics import open_metrics
from prober.fleet.plan import EngineSpec, Plan
from prober.fleet.protocol import End, Job, Known, Reply, Streamed
from prober.fleet.scheduler import Executor, Schedule
from prober.fleet.summary import NightSummary, markdown, summary_json
from prober.fleet.version_bisect import FirstBad, between, next_version
from prober.measure.summary import describe
from prober.records import NotReady, Trial, UsageError
from prober.report import page as report
from prober.results.from_ceiling import public_model
from prober.results.store import Store

MOST_HINTS = 20  # rows sent with a job
MOST_RECORDED = 200  # trials sent with a job


class Fleet(Executor, Protocol):
    """A fleet that can also describe itself."""

    def survey(self, engines: Sequence[EngineSpec], makes_engines: bool = False) -> list[FleetNode]: ...


@dataclass(slots=True)
class Recorder:
    """Keeps what comes back, and says it."""

    files: FleetFiles
    rows: KnownRows  # of the matrix and of tonight: what is learned is a hint to what comes later
    say: Callable[[str], None]
    passed_over: list[str] = field(default_factory=list)

    def keep_trial(self, streamed: Streamed) -> None:
        self.files.trial(streamed)
        trial = streamed.known.trial
        length = "the model's limit" if trial.length is None else f"{trial.length:,}"
        self.say(f"{streamed.known.machine.gpu}: {length}: {trial.verdict.outcome} after {trial.seconds:.0f} s")

    def keep_answers(self, answers: Sequence[tuple[Cell, Reply]]) -> None:
        self.files.answers(answers, _now())
        for cell, answer in answers:
            if answer.row is not None:
                self.rows.add(answer.row)
            self.say(f"{describe(cell.combination)} on {cell.gpu}: {answer.end}, {answer.why}")

    def pass_over(self, line: str) -> None:
        self.passed_over.append(line)
        self.say(line)


def look(plan: Plan, fleet: Fleet, store: Store) -> tuple[Jobs, list[FleetNode]]:
    """What `--dry-run` shows: nothing is made, nothing is started."""
    nodes = fleet.survey(plan.engines)
    return expand_plan(plan, nodes, store.rows(), _now()), nodes


def run_night(plan: Plan, fleet: Fleet, results: Path, say: Callable[[str], None]) -> NightSummary:
    """Run a plan and write the summary. Goes on with a run of this folder that was interrupted.

    Raises NotReady where no node can be used or the folder cannot be written, UsageError for a plan without cells.
    """
    store = Store(results)
    store.check_writable()
    files = FleetFiles(store)
    with files.held():
        run = files.begin(_now(), timedelta(hours=plan.deadline_hours))
        if run.is_resumed:
            say(f"Going on with the run of {run.began:%Y-%m-%d %H:%M} UTC: {len(run.answers)} cells are answered.")
        previous, history = files.previous(), files.history()
        nodes = _surveyed(plan, fleet, say)
        laid = expand_plan(plan, nodes, previous, run.began)
        _refuse_empty(laid, plan)
        work = _Work(plan, fleet, Recorder(files, KnownRows(store.rows()), say), nodes, run, store.trials())
        answers = work.measure(laid.cells)
        compared = compare.compare([(c, answers[c.key]) for c in laid.cells], previous, history)
        compared = work.prove_again(compared)
        compared = compare.with_first_bad(compared, previous)
        gone = compare.gone_from_fleet(laid.refused, previous)
        fresh = [row for _, row in laid.fresh]
        night = NightSummary(plan.name, run.began, _now(), compared, fresh, laid.refused, gone, work.keeper.passed_over)
        files.write(_texts(night, store, say))
        files.finish()
        return night


def _texts(night: NightSummary, store: Store, say: Callable[[str], None]) -> dict[str, str]:
    """Everything that a night leaves to read, by the name of its file."""
    texts = {"summary.md": markdown(night), "summary.json": summary_json(night), "ceilings.prom": open_metrics(night)}
    try:
        return {**texts, "report.html": report.page_of(store.rows(), night.ended)}
    except NotReady as error:  # the page needs an extra of its own; the night does not
        say(f"No report.html: {error}")
        return texts


def _surveyed(plan: Plan, fleet: Fleet, say: Callable[[str], None]) -> list[FleetNode]:
    nodes = fleet.survey(plan.engines, makes_engines=True)
    for node in nodes:
        for note in [*([node.problem] if node.problem else []), *node.notes]:
            say(f"{node.name}: {note}")
    if all(node.problem for node in nodes):
        raise NotReady(f"no node of the fleet can be used: {nodes[0].problem if nodes else 'there is none'}")
    return nodes


def _refuse_empty(laid: Jobs, plan: Plan) -> None:
    if not laid.cells and not laid.fresh:
        first = laid.refused[0]
        raise UsageError(f"Nothing of the plan {plan.name} can run on this fleet; {first.model}: {first.why}.")


@dataclass(slots=True)
class _Work:
    """What the searches of one run share."""

    plan: Plan
    fleet: Executor
    keeper: Recorder
    nodes: Sequence[FleetNode]
    run: Run
    trials: Sequence[Trial] = ()  # recorded before the run

    @property
    def until(self) -> float:
        return self.run.began.timestamp() + self.plan.deadline_hours * 3600

    def measure(self, cells: Sequence[Cell]) -> dict[str, Reply]:
        """Answer the cells; what the run has answered already is not measured again."""
        answers = {cell.key: self.run.answers[cell.key] for cell in cells if cell.key in self.run.answers}
        left = [cell for cell in cells if cell.key not in answers]
        return {**answers, **self._drive(left)}

    def prove_again(self, compared: Sequence[Compared]) -> list[Compared]:
        """Search once more, from nothing, what fell: only a ceiling that falls twice wakes anybody."""
        second = {one.cell.key: replace(one.cell, key=one.cell.key + AGAIN) for one in compared if one.needs_proof}
        if second:
            self.keeper.say(f"{len(second)} ceilings fell: each is proven once more.")
        answers = self.measure(list(second.values()))
        return [
            compare.proven_again(one, answers[second[one.cell.key].key]) if one.cell.key in second else one
            for one in compared
        ]

    def _drive(self, cells: Sequence[Cell]) -> dict[str, Reply]:
        if not cells:
            return {}
        night = scheduler.Deadline(self.until, self.plan.retry_minutes * 60)
        return Schedule(cells, self.nodes, self.fleet, self.keeper, self._job, night, self.run.known).run()

    def _job(self, cell: Cell, known: tuple[Known, ...]) -> Job:
        """The search of a cell: its time, and what is known of it and of its like."""
        minutes = self.plan.cell_minutes
        until = self.until if minutes is None else min(self.until, time.time() + minutes * 60)
        return Job(
            cell=cell,
            until=until,
            known=known,
            recorded=self._unsettled(cell),
            hints=self.keeper.rows.hints(cell.combination, cell.gpu, MOST_HINTS),
            verify=self.plan.verify,
            low=self.plan.low,
            high=self.plan.high,
            wait_seconds=self.plan.wait_minutes * 60,
        )

    def _unsettled(self, cell: Cell) -> tuple[Trial, ...]:
        """Return recorded trials that a search of this cell continues from: those newer than its settled row.

        A settled cell is measured again from nothing, because that is what a night is for; so is a second proof.
        """
        if cell.key.endswith(AGAIN):
            return ()
        since = self.keeper.rows.settled_at(cell.combination, cell.gpu)
        names = (None, public_model(cell.combination.model))
        trials = [t for t in self.trials if t.started_at > since and t.verdict.figures.model in names]
        return tuple(trials[-MOST_RECORDED:])


def bisect(
    plan: Plan, fleet: Fleet, results: Path, model: str, good: str, bad: str, say: Callable[[str], None]
) -> FirstBad:
    """Find the first version at which the model's ceiling is below that of ``good``, on one cell of the plan.

    All on one node: two cards of a type differ. Raises UsageError where the plan does not have what is asked for,
    NotReady where good or bad cannot be measured, or do not differ.
    """
    if all(wish.model != model for wish in plan.models):
        raise UsageError(f"The plan has no model {model}.")
    store = Store(results)
    store.check_writable()
    files = FleetFiles(store)
    with files.held():
        nodes = _surveyed(plan, fleet, say)
        models = tuple(wish for wish in plan.models if wish.model == model)
        laid = expand_plan(replace(plan, models=models, fresh_days=None), nodes, (), _now())
        _refuse_empty(laid, plan)
        cells = _by_version(laid.cells)
        versions = between(cells, good, bad)
        nodes = [_one_node(nodes, [cells[version] for version in versions])]
        work = _Work(plan, fleet, Recorder(files, KnownRows(store.rows()), say), nodes, Run(_now()))
        ceilings = {version: _ceiling(work, cells[version]) for version in (good, bad)}
        if (least := ceilings[good]) is None or ceilings[bad] is None:
            raise NotReady("the ceiling of GOOD or BAD could not be measured; see what was said above.")
        _refuse_alike(least, ceilings[bad], good, bad)
        floor = least * (1 - compare.QUIET_SHARE)
        is_bad: dict[str, bool | None] = {}
        while not isinstance(step := next_version(versions, is_bad), FirstBad):
            length = _ceiling(work, cells[step])
            is_bad[step] = None if length is None else length < floor
        return step


def _by_version(cells: Sequence[Cell]) -> dict[str, Cell]:
    """The cells of one combination on one type of GPU, the first of the plan, by version."""
    first = cells[0]
    same = [cell for cell in cells if (cell.combination, cell.gpu) == (first.combination, first.gpu)]
    return {cell.vllm_version: cell for cell in same if cell.vllm_version is not None}


def _one_node(nodes: Sequence[FleetNode], cells: Sequence[Cell]) -> FleetNode:
    for node in nodes:
        if all(runs_on(cell, node) for cell in cells):
            return node
    raise NotReady("no single node has all of these vLLM versions.")


def _ceiling(work: _Work, cell: Cell) -> int | None:
    answer = work.measure([cell])[cell.key]
    return compare.ceiling_of(answer.row) if answer.end is End.ANSWERED else None


def _refuse_alike(least: int, most: int | None, good: str, bad: str) -> None:
    if most is not None and most >= least * (1 - compare.QUIET_SHARE):
        raise NotReady(f"vLLM {bad} is not worse than {good}: {most:,} tokens, and {least:,}.")


def _now() -> datetime:
    return datetime.now(UTC)
