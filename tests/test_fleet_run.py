"""Whole nights on a fleet that is only simulated: compared with the last one, proven again, gone on with, bisected."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
from row_makers import a_trial
from test_fleet_jobs import H100, a_known_row, a_node, a_plan, one_model

from prober.fleet.compare import ExitCode
from prober.fleet.jobs import FleetNode, NodeEngine
from prober.fleet.plan import EngineSpec, Plan
from prober.fleet.protocol import Answered, End, Event, Job, Known, Reply, Streamed
from prober.fleet.run import bisect, run_night
from prober.fleet.version_bisect import FirstBad
from prober.records import Machine, NotReady, Status, UsageError
from prober.results.schema import Row
from prober.results.store import Store

MACHINE = Machine(H100, "cuda", "m1")


@dataclass
class Fleet:
    """Nodes whose searches end at once, at the ceiling that ``ceiling_of`` says; None: could not tell."""

    ceiling_of: Callable[[Job], int | None] = lambda _: 4000
    nodes: Sequence[FleetNode] = (a_node("a"), a_node("b"))
    interrupt_after: int | None = None
    jobs: list[Job] = field(default_factory=list)
    _events: list[Event] = field(default_factory=list)

    def survey(self, engines: Sequence[EngineSpec], makes_engines: bool = False) -> list[FleetNode]:
        return list(self.nodes)

    def start(self, job: Job, node: FleetNode) -> None:
        self.jobs.append(job)
        trial = dataclasses.replace(a_trial(4096), id=f"trial-{id(self)}-{len(self.jobs)}")
        self._events.append(Streamed(job.cell.key, Known(MACHINE, trial)))
        if self.interrupt_after is None or len(self.jobs) <= self.interrupt_after:
            self._events.append(Answered(job.cell.key, Reply(End.ANSWERED, "done", self._row(job))))

    def _row(self, job: Job) -> Row:
        length, combination = self.ceiling_of(job), job.cell.combination
        return a_known_row(
            model=combination.model,
            vllm_version=job.cell.vllm_version,
            max_model_len=length,
            status=Status.EXACT if length is not None else Status.INCONCLUSIVE,
            measured_at=datetime.now(UTC).isoformat(),
        )

    def wait(self, seconds: float) -> Sequence[Event]:
        if not self._events:
            raise KeyboardInterrupt
        events, self._events = self._events, []
        return events

    def stop(self) -> Sequence[Event]:
        return []


PLAN = a_plan(one_model() + one_model(name="other/one"))


def night(folder: Path, fleet: Fleet, plan: Plan = PLAN) -> tuple[ExitCode, str]:
    said: list[str] = []
    run = run_night(plan, fleet, folder, said.append)
    return run.code, (folder / "fleet" / "summary.md").read_text()


def test_a_first_night_fills_the_matrix_and_is_fine(tmp_path: Path) -> None:
    code, summary = night(tmp_path, Fleet())
    assert code is ExitCode.FINE
    assert "2 of 2 cells answered" in summary
    assert [row.max_model_len for row in Store(tmp_path).rows()] == [4000, 4000]
    assert len(Store(tmp_path).trials()) == 2
    assert json.loads((tmp_path / "fleet" / "summary.json").read_text())["exit_code"] == 0
    assert (tmp_path / "fleet" / "ceilings.prom").read_text().endswith("# EOF\n")
    assert "other/one" in (tmp_path / "fleet" / "report.html").read_text()


def test_a_fallen_ceiling_is_measured_twice_and_wakes(tmp_path: Path) -> None:
    night(tmp_path, Fleet())
    fleet = Fleet(lambda job: 3000 if job.cell.combination.model == "other/one" else 4000)
    code, summary = night(tmp_path, fleet)
    assert code is ExitCode.REGRESSION
    assert [job.cell.combination.model for job in fleet.jobs].count("other/one") == 2
    assert len(fleet.jobs) == 3
    assert "other/one, TP 1 on NVIDIA H100 80GB HBM3, vLLM 0.28.0: 4,000 -> 3,000, proven twice" in summary


def test_a_fall_that_does_not_repeat_wakes_nobody(tmp_path: Path) -> None:
    night(tmp_path, Fleet())
    fleet = Fleet(lambda job: 3000 if len(fleet.jobs) == 1 else 4000)
    code, summary = night(tmp_path, fleet)
    assert code is ExitCode.FINE
    assert "Fell once, not confirmed" in summary
    assert [row.max_model_len for row in Store(tmp_path).rows()] == [4000, 4000]


def test_the_second_proof_starts_from_nothing_but_hints(tmp_path: Path) -> None:
    night(tmp_path, Fleet())
    fleet = Fleet(lambda _: 3000)
    night(tmp_path, fleet)
    assert all(job.known == () for job in fleet.jobs)
    assert all(job.hints for job in fleet.jobs)


def test_a_night_after_a_regression_compares_with_the_new_ceiling(tmp_path: Path) -> None:
    night(tmp_path, Fleet())
    night(tmp_path, Fleet(lambda _: 3000))
    code, _ = night(tmp_path, Fleet(lambda _: 3000))
    assert code is ExitCode.FINE


def test_an_interrupted_night_is_gone_on_with(tmp_path: Path) -> None:
    first = Fleet(interrupt_after=1)
    with pytest.raises(KeyboardInterrupt):
        night(tmp_path, first)
    assert len(Store(tmp_path).rows()) == 1
    second = Fleet()
    code, summary = night(tmp_path, second)
    assert (code, "2 of 2 cells answered" in summary) == (ExitCode.FINE, True)
    answered, unanswered = first.jobs
    assert [job.cell.key for job in second.jobs] == [unanswered.cell.key]
    assert [known.machine for known in second.jobs[0].known] == [MACHINE]
    third = Fleet()
    night(tmp_path, third)
    assert len(third.jobs) == 2  # that night was over: this is another one
    assert answered.cell.key in {job.cell.key for job in third.jobs}


def test_what_could_not_be_told_is_a_partly_failed_night(tmp_path: Path) -> None:
    code, summary = night(tmp_path, Fleet(lambda _: None))
    assert code is ExitCode.PARTLY_FAILED
    assert "## Without an answer" in summary


def test_fresh_cells_are_not_measured_and_still_told(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, fresh_days=7)
    night(tmp_path, Fleet(), plan)
    fleet = Fleet()
    code, summary = night(tmp_path, fleet, plan)
    assert (code, fleet.jobs) == (ExitCode.FINE, [])
    assert "2 still fresh" in summary
    assert (tmp_path / "fleet" / "ceilings.prom").read_text().count("\nprober_ceiling_tokens{") == 2


def test_machines_that_are_gone_are_told(tmp_path: Path) -> None:
    plan = a_plan(one_model('gpus = "H100"') + one_model('gpus = "L4"', name="other/one"))
    night(tmp_path, Fleet(), plan)
    code, summary = night(tmp_path, Fleet(nodes=[a_node("c", "NVIDIA L4")]), plan)
    assert code is ExitCode.PARTLY_FAILED
    assert "machines are missing" in summary


def test_a_fleet_without_a_usable_node_is_not_ready(tmp_path: Path) -> None:
    with pytest.raises(NotReady, match="it is ill"):
        night(tmp_path, Fleet(nodes=[a_node("a", problem="it is ill")]))


def test_a_plan_that_cannot_run_at_all_says_why(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs 16 GPUs"):
        night(tmp_path, Fleet(), a_plan(one_model("tp = 16")))


VERSIONS = ["0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"]


def bisected(folder: Path, fleet: Fleet, good: str = "0.27.0", bad: str = "0.32.0") -> FirstBad:
    plan = a_plan(one_model() + one_model(name="other/one"), versions=VERSIONS)
    fleet.nodes = [a_node("a", engines={}), a_node("b", engines={})]
    return bisect(plan, fleet, folder, "other/one", good, bad, lambda _: None)


def test_the_first_bad_version_is_bisected_on_one_node(tmp_path: Path) -> None:
    fleet = Fleet(lambda job: 4000 if (job.cell.vllm_version or "") < "0.30.0" else 3000)
    assert bisected(tmp_path, fleet) == FirstBad("0.30.0", "0.29.0")
    assert len(fleet.jobs) <= 5
    assert {job.cell.combination.model for job in fleet.jobs} == {"other/one"}


def test_a_version_that_cannot_tell_is_named(tmp_path: Path) -> None:
    lengths = {"0.27.0": 4000, "0.28.0": 4000, "0.29.0": None, "0.30.0": 3000, "0.31.0": 3000, "0.32.0": 3000}
    found = bisected(tmp_path, Fleet(lambda job: lengths[job.cell.vllm_version or ""]))
    assert found == FirstBad("0.30.0", "0.28.0", ("0.29.0",))


def test_bisection_needs_a_difference(tmp_path: Path) -> None:
    with pytest.raises(NotReady, match="is not worse than"):
        bisected(tmp_path, Fleet())
    with pytest.raises(NotReady, match="could not be measured"):
        bisected(tmp_path, Fleet(lambda _: None))
    with pytest.raises(UsageError, match=r"no vLLM 0\.1"):
        bisected(tmp_path, Fleet(), good="0.1")
    with pytest.raises(UsageError, match="has no model nobody/nothing"):
        bisect(PLAN, Fleet(), tmp_path, "nobody/nothing", "0.27.0", "0.32.0", lambda _: None)


def test_bisection_needs_one_node_with_every_version(tmp_path: Path) -> None:
    plan = a_plan(one_model(), versions=["0.28.0", "0.32.0"])
    lacks = NodeEngine(problem="there is no uv on the node")
    nodes = [a_node("a", engines={"vllm==0.32.0": lacks}), a_node("b", engines={"vllm==0.28.0": lacks})]
    with pytest.raises(NotReady, match="no single node has all of these"):
        bisect(plan, Fleet(nodes=nodes), tmp_path, "Qwen/Qwen3-8B", "0.28.0", "0.32.0", lambda _: None)


def test_a_trial_that_ended_while_the_night_was_stopped_is_kept(tmp_path: Path) -> None:
    class Late(Fleet):
        def stop(self) -> Sequence[Event]:
            trial = dataclasses.replace(a_trial(2048), id="late")
            return [Streamed(self.jobs[-1].cell.key, Known(MACHINE, trial))]

    with pytest.raises(KeyboardInterrupt):
        night(tmp_path, Late(interrupt_after=0))
    assert "late" in {trial.id for trial in Store(tmp_path).trials()}


def test_a_folder_of_the_fleet_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "fleet" / "summary.md.draft").mkdir(parents=True)
    with pytest.raises(NotReady, match="fleet cannot be written: Is a directory"):
        night(tmp_path, Fleet())


def test_a_night_continues_from_trials_that_are_newer_than_any_settled_row(tmp_path: Path) -> None:
    """A stopped probe's trials are sent with the job. Once a row is settled, the next night measures from nothing."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    Store(tmp_path).append(dataclasses.replace(a_trial(4096), id="of-a-probe", started_at=now))
    first, second = Fleet(), Fleet(lambda _: 3000)
    night(tmp_path, first)
    assert [[trial.id for trial in job.recorded] for job in first.jobs] == [["of-a-probe"], ["of-a-probe"]]
    night(tmp_path, second)
    assert [job.recorded for job in second.jobs] == [()] * 4
