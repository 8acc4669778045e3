"""The journal of a fleet: a killed driver goes on, an ended run does not, and nights become a history."""

from __future__ import annotations

import zlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from row_makers import a_trial
from test_fleet_jobs import H100, a_known_row, a_node, cells_of, one_model

from prober.fleet.jobs import AGAIN
from prober.fleet.journal import FleetFiles
from prober.fleet.protocol import End, Known, Reply, Streamed
from prober.records import Machine, NotReady
from prober.results.store import Store

NOW = datetime(2026, 1, 8, 1, 0, tzinfo=UTC)
EIGHT_HOURS = timedelta(hours=8)
CELLS = cells_of(one_model("tp = [1, 2]"), [a_node("a")])
MACHINE = Machine(H100, "cuda", "m1", gpu_memory_mib=81559, ecc=True)
ROW = a_known_row(max_model_len=4000, measured_at="2026-01-08T01:30:00+00:00")


@pytest.fixture
def files(tmp_path: Path) -> FleetFiles:
    files = FleetFiles(Store(tmp_path))
    with files.held():
        pass
    return files


def a_night_of(files: FleetFiles) -> None:
    files.begin(NOW, EIGHT_HOURS)
    files.trial(Streamed(CELLS[0].key, Known(MACHINE, a_trial(4096, id="t1")), zlib.compress(b"a log")))
    files.answers([(CELLS[0], Reply(End.ANSWERED, "done", ROW)), (CELLS[1], Reply(End.NOT_REACHED, "late"))], NOW)


def test_what_was_shown_is_kept_as_evidence(files: FleetFiles, tmp_path: Path) -> None:
    a_night_of(files)
    store = Store(tmp_path)
    assert [trial.id for trial in store.trials()] == ["t1"]
    assert [row.max_model_len for row in store.rows()] == [4000]
    assert store.log_path("t1").read_bytes() == b"a log"


def test_a_killed_driver_goes_on_where_it_was(files: FleetFiles) -> None:
    a_night_of(files)
    run = files.begin(NOW + timedelta(hours=2), EIGHT_HOURS)
    assert (run.is_resumed, run.began) == (True, NOW)
    assert run.known == {CELLS[0].key: [Known(MACHINE, a_trial(4096, id="t1"))]}
    assert run.answers == {CELLS[0].key: Reply(End.ANSWERED, "done", ROW)}  # what was not reached is tried again


def test_a_torn_last_line_is_left_out_and_the_next_stands_alone(files: FleetFiles, tmp_path: Path) -> None:
    a_night_of(files)
    journal = tmp_path / "fleet" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes() + b'{"event":"answer","cel')
    files.answers([(CELLS[1], Reply(End.ANSWERED, "done", ROW))], NOW)
    assert set(files.begin(NOW, EIGHT_HOURS).answers) == {cell.key for cell in CELLS}


@pytest.mark.parametrize("hours", [9, 100])
def test_a_run_whose_night_is_over_is_not_gone_on_with(files: FleetFiles, hours: int) -> None:
    a_night_of(files)
    run = files.begin(NOW + timedelta(hours=hours), EIGHT_HOURS)
    assert (run.is_resumed, run.answers, run.known) == (False, {}, {})


def test_an_ended_run_becomes_history_and_its_matrix_the_previous_one(files: FleetFiles) -> None:
    a_night_of(files)
    assert files.previous() == []
    assert files.history() == {}
    files.finish()
    run = files.begin(NOW + timedelta(hours=1), EIGHT_HOURS)
    assert (run.is_resumed, run.answers) == (False, {})
    assert files.history() == {CELLS[0].key: [ROW]}
    assert files.previous() == [ROW]
    files.answers([(CELLS[1], Reply(End.ANSWERED, "done", a_known_row(tensor_parallel_size=2)))], NOW)
    assert files.previous() == [ROW]
    assert list(files.history()) == [CELLS[0].key]


def test_second_proofs_belong_to_the_history_of_their_cell(files: FleetFiles) -> None:
    files.begin(NOW, EIGHT_HOURS)
    files.answers([(replace(CELLS[0], key=CELLS[0].key + AGAIN), Reply(End.ANSWERED, "done", ROW))], NOW)
    files.finish()
    files.begin(NOW, EIGHT_HOURS)
    assert files.history() == {CELLS[0].key: [ROW]}


def test_history_older_than_a_month_is_forgotten(files: FleetFiles) -> None:
    a_night_of(files)
    files.finish()
    files.begin(NOW + timedelta(days=31), EIGHT_HOURS)
    assert files.history() == {}


def test_two_drivers_do_not_share_a_folder(files: FleetFiles, tmp_path: Path) -> None:
    with files.held(), pytest.raises(NotReady, match="Another fleet run"), FleetFiles(Store(tmp_path)).held():
        pytest.fail("two drivers at work")
    with files.held():
        pass
