"""A search on a node: what it knows from elsewhere guides it and never decides; its time ends it with its bracket."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from row_makers import a_trial
from test_fleet_jobs import H100, a_node, cells_of, one_model

from prober.engine.install import Engine
from prober.fleet.node import Search, without_ray
from prober.fleet.protocol import End, Job, Known, Reply, Streamed
from prober.measure.devices import Devices
from prober.measure.search_loop import LaunchResult, combination_key, state_key
from prober.records import Combination, Figures, Machine, Outcome, Report, Stage, Status, Verdict
from prober.results.schema import Row

NODES = [a_node("a")]
(CELL,) = cells_of(one_model(), NODES)
HERE = Machine(H100, "cuda", "here", gpu_memory_mib=81559, vllm_version="0.28.0")
THERE = replace(HERE, machine="there", gpu_hash="other cards")
ENGINE = Engine(Path("python3"), "0.28.0", None, is_cpu_build=False)
LIMIT = 32_768


class Truth:
    """A machine whose ceiling is known, as a launcher; it remembers the lengths it was launched at."""

    def __init__(self, ceiling: int, estimate: int | None = None) -> None:
        self.ceiling, self.estimate = ceiling, estimate
        self.launched: list[int] = []

    def __call__(self, combination: Combination, length: int | None, tag: str, report: Report) -> LaunchResult:
        report(Stage.CONFIG, 0.0)
        length = LIMIT if length is None else length
        self.launched.append(length)
        figures = Figures(requested_max_model_len=length, estimated_max_len=self.estimate)
        if length <= self.ceiling:
            return LaunchResult(
                Verdict(Outcome.FITS, Stage.SERVE, "answered", figures=replace(figures, estimated_max_len=None))
            )
        return LaunchResult(Verdict(Outcome.KV_TOO_SMALL, Stage.KV_CACHE, "too small", figures=figures))


def searched(
    folder: Path, truth: Truth, known: Sequence[Known] = (), hints: Sequence[Row] = (), until: float | None = None
) -> tuple[Reply, list[Streamed]]:
    told: list[Streamed] = []
    job = Job(CELL, time.time() + 600 if until is None else until, tuple(known), tuple(hints))
    return Search(job, Devices(ENGINE, HERE), folder, told.append).run(truth), told


def elsewhere(machine: Machine, *results: tuple[int, Outcome], estimate: int | None = None) -> list[Known]:
    """Trials of the same cell that another machine has launched."""
    key = combination_key(CELL.combination, None)
    trials = [
        a_trial(length, outcome, id=f"there-{n}", estimated_max_len=None if outcome is Outcome.FITS else estimate)
        for n, (length, outcome) in enumerate(results)
    ]
    now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    mine = [replace(t, combination_key=key, state_key=state_key(machine), started_at=now) for t in trials]
    return [Known(machine, trial) for trial in mine]


def proven(answer: Reply) -> tuple[Status | None, int | None]:
    assert answer.row is not None
    return answer.row.status, answer.row.max_model_len


def test_a_search_from_nothing_tells_every_trial(tmp_path: Path) -> None:
    truth = Truth(3968, estimate=3968)
    answer, told = searched(tmp_path, truth)
    assert (answer.end, proven(answer)) == (End.ANSWERED, (Status.EXACT, 3968))
    assert truth.launched == [LIMIT, 3968, 3969] == [one.known.trial.length for one in told]
    assert {one.known.machine for one in told} == {HERE}


def test_trials_of_this_very_machine_are_not_repeated(tmp_path: Path) -> None:
    truth = Truth(3968)
    known = elsewhere(HERE, (LIMIT, Outcome.KV_TOO_SMALL), (3968, Outcome.FITS), estimate=3968)
    answer, _ = searched(tmp_path, truth, known)
    assert truth.launched == [3969]
    assert proven(answer) == (Status.EXACT, 3968)


def test_a_search_lost_elsewhere_repeats_one_trial_at_most(tmp_path: Path) -> None:
    truth = Truth(3968)
    known = elsewhere(THERE, (LIMIT, Outcome.KV_TOO_SMALL), (3968, Outcome.FITS), estimate=3968)
    answer, told = searched(tmp_path, truth, known)
    assert sorted(truth.launched) == [3968, 3969]  # the edge that was seen there, and the one that was lost
    assert answer.row is not None
    own = {one.known.trial.id for one in told}
    assert {answer.row.served_trial, answer.row.refused_trial} == own
    assert answer.row.trials == 2


def test_a_long_bisection_goes_on_where_it_was(tmp_path: Path) -> None:
    truth = Truth(3000)
    served, refused = [2048, 2996], [LIMIT, 4096, 3010]
    steps = [*((n, Outcome.FITS) for n in served), *((n, Outcome.KV_TOO_SMALL) for n in refused)]
    answer, _ = searched(tmp_path, truth, elsewhere(THERE, *steps))
    assert proven(answer) == (Status.EXACT, 3000)
    assert len(truth.launched) <= 6
    assert LIMIT not in truth.launched


def test_answers_of_another_card_never_become_this_ones(tmp_path: Path) -> None:
    truth = Truth(3000)
    known = elsewhere(THERE, (LIMIT, Outcome.KV_TOO_SMALL), (3968, Outcome.FITS), (3969, Outcome.KV_TOO_SMALL))
    answer, _ = searched(tmp_path, truth, known)
    assert proven(answer) == (Status.EXACT, 3000)
    assert {3000, 3001} <= set(truth.launched)


def test_trials_of_another_type_of_gpu_do_not_even_guide(tmp_path: Path) -> None:
    other = replace(THERE, gpu_memory_mib=40_000)
    known = elsewhere(other, (LIMIT, Outcome.KV_TOO_SMALL), (100, Outcome.KV_TOO_SMALL))
    answer, _ = searched(tmp_path, Truth(LIMIT), known)
    assert proven(answer) == (Status.MODEL_LIMIT, LIMIT)


def test_nothing_fits_must_be_found_here(tmp_path: Path) -> None:
    known = elsewhere(THERE, (LIMIT, Outcome.KV_TOO_SMALL), (16, Outcome.KV_TOO_SMALL))
    answer, _ = searched(tmp_path, Truth(5000), known)
    assert proven(answer) == (Status.EXACT, 5000)


@settings(max_examples=60, deadline=None)
@given(st.integers(16, LIMIT), st.integers(16, LIMIT), st.lists(st.integers(16, LIMIT), max_size=6))
def test_whatever_another_machine_saw_the_ceiling_is_this_machines(here: int, there: int, lengths: list[int]) -> None:
    results = [(n, Outcome.FITS if n <= there else Outcome.KV_TOO_SMALL) for n in dict.fromkeys([LIMIT, *lengths])]
    with tempfile.TemporaryDirectory() as folder:
        answer, told = searched(Path(folder), Truth(here), elsewhere(THERE, *results))
    assert proven(answer) == (Status.MODEL_LIMIT if here == LIMIT else Status.EXACT, here)
    own = {one.known.trial.id for one in told}
    assert answer.row is not None
    assert answer.row.served_trial in own


def test_the_end_of_its_time_ends_a_search_with_its_bracket(tmp_path: Path) -> None:
    truth = Truth(3968, estimate=3968)
    known = elsewhere(HERE, (LIMIT, Outcome.KV_TOO_SMALL), (2048, Outcome.FITS))
    answer, _ = searched(tmp_path, truth, known, until=time.time() - 1)
    assert answer.end is End.EXPIRED
    assert answer.row is not None
    assert (answer.row.status, answer.row.max_model_len) == (Status.INCONCLUSIVE, None)
    assert (answer.row.served_max_model_len, answer.row.refused_max_model_len) == (2048, LIMIT)
    assert truth.launched == []


def test_a_search_that_had_no_time_at_all_has_no_row(tmp_path: Path) -> None:
    answer, _ = searched(tmp_path, Truth(3968), until=time.time() - 1)
    assert (answer.end, answer.row) == (End.EXPIRED, None)


def test_what_is_started_on_a_node_does_not_see_the_cluster() -> None:
    os.environ["RAY_ADDRESS"] = "10.0.0.1:6379"
    try:
        with without_ray():
            assert not [name for name in os.environ if name.startswith("RAY_")]
        assert os.environ["RAY_ADDRESS"] == "10.0.0.1:6379"
    finally:
        del os.environ["RAY_ADDRESS"]
