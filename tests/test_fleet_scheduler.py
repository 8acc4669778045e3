"""Driving a night on a fleet that is only simulated: what is lost, busy or late, and ten thousand cells."""

from __future__ import annotations

import heapq
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from row_makers import a_trial
from test_fleet_jobs import H100, L4, a_node, cells_of, one_model

from prober.fleet.jobs import Cell, FleetNode
from prober.fleet.protocol import Answered, End, Event, Job, Known, Lost, Reply, Streamed
from prober.fleet.scheduler import MOST_LOSSES, Deadline, Schedule
from prober.records import Machine

MACHINE = Machine(H100, "cuda", "m1")
ANSWERED = Reply(End.ANSWERED, "done")


@dataclass
class Simulated:
    """A fleet with a clock of its own: each job takes its seconds and then shows what ``outcome`` says."""

    outcome: Callable[[Job, FleetNode], Sequence[Event]]
    seconds: Callable[[Job], float] = lambda _: 10.0
    now: float = 0.0
    started: list[tuple[Job, FleetNode, float]] = field(default_factory=list)
    stops: int = 0
    _due: list[tuple[float, int, Job, FleetNode]] = field(default_factory=list)

    def start(self, job: Job, node: FleetNode) -> None:
        self.started.append((job, node, self.now))
        heapq.heappush(self._due, (self.now + self.seconds(job), len(self.started), job, node))

    def wait(self, seconds: float) -> Sequence[Event]:
        if not self._due or self._due[0][0] > self.now + 60:
            self.now += 60
            return []
        self.now = max(self.now, self._due[0][0])
        events: list[Event] = []
        while self._due and self._due[0][0] <= self.now:
            _, _, job, node = heapq.heappop(self._due)
            events += self.outcome(job, node)
        return events

    def stop(self) -> Sequence[Event]:
        self.stops += 1
        left, self._due = self._due, []
        return [Lost(job.cell.key, "it was stopped", False) for _, _, job, _ in left]


@dataclass
class Kept:
    """A keeper that only remembers."""

    trials: list[Streamed] = field(default_factory=list)
    answers: list[tuple[Cell, Reply]] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)

    def keep_trial(self, streamed: Streamed) -> None:
        self.trials.append(streamed)

    def keep_answers(self, answers: Sequence[tuple[Cell, Reply]]) -> None:
        self.answers += answers

    def pass_over(self, line: str) -> None:
        self.passed_over.append(line)


def a_job(cell: Cell, known: tuple[Known, ...]) -> Job:
    return Job(cell, until=1e9, known=known)


def drive(cells: Sequence[Cell], nodes: Sequence[FleetNode], fleet: Simulated, until: float = 1e9) -> Kept:
    kept = Kept()
    answers = Schedule(cells, nodes, fleet, kept, a_job, Deadline(until, 600.0), clock=lambda: fleet.now).run()
    assert answers == {cell.key: answer for cell, answer in kept.answers}
    assert set(answers) == {cell.key for cell in cells}
    assert fleet.stops
    return kept


def done(job: Job, node: FleetNode) -> Sequence[Event]:
    return [Answered(job.cell.key, ANSWERED)]


def test_every_cell_is_answered_once_on_its_own_type() -> None:
    nodes = [a_node("a"), a_node("c", L4)]
    cells = cells_of(one_model("tp = [1, 2, 4, 8]"), nodes)
    fleet = Simulated(done)
    kept = drive(cells, nodes, fleet)
    assert Counter(cell.key for cell, _ in kept.answers) == {cell.key: 1 for cell in cells}
    assert all(job.cell.gpu == node.gpu for job, node, _ in fleet.started)


def test_no_node_ever_runs_more_than_its_gpus() -> None:
    nodes = [a_node("a"), a_node("b", gpus=4)]
    cells = cells_of("".join(one_model("tp = [1, 2, 4, 8]", name=f"m/{n}") for n in range(20)), nodes)
    fleet = Simulated(done, seconds=lambda job: 3.0 * job.cell.gpus)
    drive(cells, nodes, fleet)
    for node in nodes:
        spans = [
            (began, began + 3.0 * job.cell.gpus, job.cell.gpus) for job, where, began in fleet.started if where == node
        ]
        busiest = max(sum(gpus for begin, end, gpus in spans if begin <= at < end) for at, _, _ in spans)
        assert 0 < busiest <= node.gpus


def test_a_lost_search_goes_on_elsewhere_with_what_is_known() -> None:
    nodes = [a_node("a"), a_node("b"), a_node("c", L4)]
    (cell,) = cells_of(one_model('gpus = "H100"'), nodes)
    known = Known(MACHINE, a_trial(4096))

    def outcome(job: Job, node: FleetNode) -> Sequence[Event]:
        if len(fleet.started) == 1:
            return [Streamed(job.cell.key, known), Lost(job.cell.key, "the node is lost", node_is_gone=True)]
        return done(job, node)

    fleet = Simulated(outcome)
    kept = drive([cell], nodes, fleet)
    (_, first, _), (job, second, _) = fleet.started
    assert {first.name, second.name} == {"a", "b"}
    assert job.known == (known,)
    assert kept.trials == [Streamed(cell.key, known)]
    assert kept.answers == [(cell, ANSWERED)]


def test_cells_whose_last_node_is_lost_say_so() -> None:
    nodes = [a_node("a", gpus=1), a_node("c", L4)]
    cells = cells_of(one_model() + one_model(name="other/one"), nodes)

    def outcome(job: Job, node: FleetNode) -> Sequence[Event]:
        return [Lost(job.cell.key, "the node is lost", True)] if node.gpu == H100 else done(job, node)

    kept = drive(cells, nodes, Simulated(outcome))
    ends = {(cell.combination.model, cell.gpu): answer for cell, answer in kept.answers}
    assert all((answer.end is End.FAILED) == (gpu == H100) for (_, gpu), answer in ends.items())
    assert all("no node is left" in answer.why for answer in ends.values() if answer.end is End.FAILED)


def test_a_cell_that_brings_its_process_down_again_and_again_is_given_up() -> None:
    nodes = [a_node("a"), a_node("b")]
    (cell,) = cells_of(one_model(), nodes)
    fleet = Simulated(lambda job, node: [Lost(job.cell.key, "out of memory", False)])
    kept = drive([cell], nodes, fleet)
    assert len(fleet.started) == MOST_LOSSES
    assert kept.answers[0][1].end is End.FAILED
    assert "out of memory" in kept.answers[0][1].why


def test_a_failure_of_the_search_itself_is_an_answer() -> None:
    nodes = [a_node("a")]
    (cell,) = cells_of(one_model(), nodes)
    failed = Reply(End.FAILED, "no such directory")
    fleet = Simulated(lambda job, node: [Answered(job.cell.key, failed)])
    assert drive([cell], nodes, fleet).answers == [(cell, failed)]
    assert len(fleet.started) == 1


def test_a_busy_node_is_passed_over_and_tried_again_later() -> None:
    nodes = [a_node("a")]
    (cell,) = cells_of(one_model(), nodes)

    def outcome(job: Job, node: FleetNode) -> Sequence[Event]:
        return [Answered(job.cell.key, Reply(End.NOT_READY, "pid 7"))] if fleet.now < 1000 else done(job, node)

    fleet = Simulated(outcome)
    kept = drive([cell], nodes, fleet)
    assert [began for _, _, began in fleet.started] == sorted(began for _, _, began in fleet.started)
    gaps = [later - earlier for (_, _, earlier), (_, _, later) in zip(fleet.started, fleet.started[1:], strict=False)]
    assert gaps
    assert min(gaps) >= 600
    assert kept.passed_over == ["skipped: a: pid 7; Qwen/Qwen3-8B is put back in line"] * len(gaps)
    assert kept.answers == [(cell, ANSWERED)]


def test_a_busy_node_does_not_hold_up_another() -> None:
    nodes = [a_node("a"), a_node("b")]
    (cell,) = cells_of(one_model(), nodes)
    fleet = Simulated(
        lambda job, node: (
            [Answered(job.cell.key, Reply(End.NOT_READY, "busy"))] if node.name == "a" else done(job, node)
        )
    )
    drive([cell], nodes, fleet)
    assert fleet.now < 600


def test_the_deadline_ends_the_line_and_stragglers() -> None:
    nodes = [a_node("a", gpus=1)]
    cells = cells_of(one_model() + one_model(name="other/one"), nodes)
    fleet = Simulated(done, seconds=lambda _: 1e6)
    kept = drive(cells, nodes, fleet, until=100.0)
    assert len(fleet.started) == 1
    assert {answer.end for _, answer in kept.answers} == {End.NOT_REACHED}
    assert fleet.now < 1000


def test_nothing_is_left_running_when_it_is_interrupted() -> None:
    nodes = [a_node("a")]
    (cell,) = cells_of(one_model(), nodes)

    def interrupted(job: Job, node: FleetNode) -> Sequence[Event]:
        raise KeyboardInterrupt

    fleet = Simulated(interrupted)
    with pytest.raises(KeyboardInterrupt):
        drive([cell], nodes, fleet)
    assert fleet.stops == 1


def test_ten_thousand_cells_on_a_thousand_gpus_are_driven_at_little_cost() -> None:
    nodes = [a_node(f"n{n}", host_memory_mib=10**7) for n in range(125)]
    axes = "tp = [1, 2, 4, 8]\ngpu_memory_utilization = [0.8, 0.85, 0.9, 0.95]"
    cells = cells_of("".join(one_model(axes, name=f"m/{n}") for n in range(625)), nodes)
    assert len(cells) == 10_000
    ideal = sum(cell.gpus for cell in cells) * 10.0 / 1000
    fleet = Simulated(lambda job, node: [Streamed(job.cell.key, Known(MACHINE, a_trial(4096))), *done(job, node)])
    tracemalloc.start()
    began = time.perf_counter()
    drive(cells, nodes, fleet)
    seconds = time.perf_counter() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert fleet.now <= ideal / 0.9
    assert seconds < 30
    assert peak < 512 * 2**20


def test_second_proof_of_a_cell_is_a_cell_of_its_own() -> None:
    nodes = [a_node("a")]
    (cell,) = cells_of(one_model(), nodes)
    kept = drive([cell, replace(cell, key=f"{cell.key}-again")], nodes, Simulated(done))
    assert len(kept.answers) == 2
