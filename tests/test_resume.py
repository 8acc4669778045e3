"""Stopped at any moment, the same command goes on: nothing is measured twice, lost or doubled."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from bench import PROBER, running_probe
from fake_engine import FakeEngine, Fault, FaultKind, Scenario, make_engine, wait_until, write_model
from filelock import FileLock
from row_makers import a_row, a_trial

from prober.host.tempdir import LOCK_NAME, PREFIX, private_folder
from prober.results.store import Store

# Its estimate is wrong, so that the search takes five launches.
LYING = Scenario(estimate_error=-300)
ANSWER = ("status", "max_model_len", "refused_max_model_len", "verified", "machine", "other_flags")


def trials(folder: Path) -> list[dict[str, Any]]:
    path = folder / "results" / "trials.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "results" / "matrix.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def finish(folder: Path, engine: FakeEngine, *words: str) -> str:
    with running_probe(folder, engine, *words) as prober:
        assert prober.wait(60) == 0, (folder / "err").read_text()
    assert engine.alive() == ()
    return (folder / "err").read_text()


def assert_nothing_is_lost_or_doubled(folder: Path, engine: FakeEngine, stops: int, ceiling: int) -> None:
    kept = trials(folder)
    answers = [trial["length"] for trial in kept]
    assert len(answers) == len(set(answers)), "a length was answered twice"
    assert len({trial["id"] for trial in kept}) == len(kept)
    assert len(engine.launches()) <= len(kept) + stops, "more was repeated than what was running"
    (row,) = rows(folder)
    assert (row["status"], row["max_model_len"]) == ("exact", str(ceiling))
    before = len(engine.launches())
    assert f"Going on from {len(kept)} recorded trials" in finish(folder, engine)
    assert len(engine.launches()) == before
    (again,) = rows(folder)
    assert [again[name] for name in ANSWER] == [row[name] for name in ANSWER]


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_moment_it_goes_on(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    engine = make_engine(tmp_path / "engine", LYING)
    stops = 6
    for _ in range(stops):
        with running_probe(tmp_path, engine) as prober:
            time.sleep(chance.uniform(0.2, 2.0))
            prober.kill()
            prober.wait()
            wait_until(lambda: not engine.alive(), what="the trial is gone")
    finish(tmp_path, engine)
    ceiling = LYING.ceiling()
    assert ceiling is not None
    assert_nothing_is_lost_or_doubled(tmp_path, engine, stops, ceiling)


@pytest.mark.parametrize("moment", range(1, 5))
def test_killed_in_any_step_it_goes_on(tmp_path: Path, moment: int) -> None:
    """Right when the launch of that number has begun, or its line has just been written."""
    engine = make_engine(tmp_path / "engine", LYING)
    with running_probe(tmp_path, engine) as prober:
        if moment % 2:
            wait_until(lambda: len(engine.launches()) >= moment, what="the launch")
        else:
            wait_until(lambda: len(trials(tmp_path)) >= moment, what="the line")
        prober.kill()
        prober.wait()
        wait_until(lambda: not engine.alive(), what="the trial is gone")
    finish(tmp_path, engine)
    assert_nothing_is_lost_or_doubled(tmp_path, engine, 1, LYING.ceiling() or 0)


def test_torn_last_line_is_mended(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "engine", Scenario())
    finish(tmp_path, engine)
    path = tmp_path / "results" / "trials.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    err = finish(tmp_path, engine)
    assert "Going on from 2 recorded trials" in err
    assert [launch.length for launch in engine.launches()] == [131_072, 496, 497, 497]
    assert [trial["length"] for trial in trials(tmp_path)] == [131_072, 496, 497]
    assert len(rows(tmp_path)) == 1


def test_interrupted_search_keeps_its_bracket_and_says_how_to_go_on(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "engine", Scenario(faults=(Fault(FaultKind.HANG, launches=(3,)),)))
    with running_probe(tmp_path, engine) as prober:
        wait_until(lambda: len(engine.launches()) == 3, what="the third launch")
        prober.send_signal(signal.SIGINT)
        assert prober.wait(10) == 130
    err = (tmp_path / "err").read_text()
    assert "[serves: 496 · refused: 131,072]" in err
    assert "the trials that had ended are kept. The same command goes on from them." in err
    assert "Traceback" not in err
    assert (tmp_path / "out").read_text() == ""
    assert "Going on from 2 recorded trials" in finish(tmp_path, engine)
    assert [launch.length for launch in engine.launches()][2:] == [497, 497]


def test_second_interrupt_leaves_nothing_either(tmp_path: Path) -> None:
    stubborn = (Fault(FaultKind.HANG), Fault(FaultKind.IGNORE_SIGTERM), Fault(FaultKind.CLEAN_ENV_GRANDCHILD))
    engine = make_engine(tmp_path / "engine", Scenario(faults=stubborn[1:] + stubborn[:1]))
    with running_probe(tmp_path, engine) as prober:
        wait_until(lambda: len(engine.alive()) == 3, what="the tree")
        for _ in range(3):
            prober.send_signal(signal.SIGINT)
            time.sleep(0.2)
        assert prober.wait(10) in (130, -signal.SIGINT)
        wait_until(lambda: not engine.alive(), what="everything dead")


LIMITED = "import os, resource, sys; n = int(sys.argv[1]); resource.setrlimit(resource.RLIMIT_FSIZE, (n, n)); "
LIMITED += "os.execv(sys.argv[2], sys.argv[2:])"


def test_full_disk_while_recording_is_said_and_nothing_is_torn(tmp_path: Path) -> None:
    """The disk ends in the middle of the second trial's line."""
    store = Store(tmp_path / "results")
    store.put([a_row()])
    for number in range(200):
        store.append(a_trial(id=f"other-{number}", evidence="x" * 800))
    before = store.trials_path.read_bytes()
    matrix = store.matrix_path.read_bytes()
    engine = make_engine(tmp_path / "engine", Scenario())
    model = write_model(tmp_path / "model")
    words = ["-c", LIMITED, str(len(before) + 3000), str(PROBER), "probe", str(model), "--python", sys.executable]
    done = subprocess.run(
        [sys.executable, *words, "--device", "cpu", "--results", str(store.folder)],
        env={**os.environ, **engine.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "cannot be written: File too large; what was recorded before is intact." in done.stderr
    assert "Traceback" not in done.stderr
    assert store.matrix_path.read_bytes() == matrix
    kept = store.trials_path.read_bytes()
    assert kept.startswith(before)
    new = len(store.trials()) - 200
    assert store.unreadable() == []
    assert 1 <= new < 3
    assert engine.alive() == ()
    launches = len(engine.launches())
    finish(tmp_path, engine)
    assert len(engine.launches()) == launches + 3 - new
    assert len(rows(tmp_path)) == 2


def test_log_that_cannot_be_kept_is_said(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "engine", Scenario())
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "logs").write_text("in the way")
    with running_probe(tmp_path, engine) as prober:
        assert prober.wait(30) == 3
    err = (tmp_path / "err").read_text()
    assert "cannot be written: File exists" in err
    assert "Traceback" not in err
    assert engine.alive() == ()


def test_two_searches_of_one_thing_at_once_lose_and_double_nothing(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "engine", Scenario())
    with (
        running_probe(tmp_path, engine, name="1", is_alone=False) as first,
        running_probe(tmp_path, engine, name="2", is_alone=False) as second,
    ):
        assert (first.wait(30), second.wait(30)) == (0, 0)
    assert engine.alive() == ()
    (row,) = rows(tmp_path)
    assert row["max_model_len"] == "496"
    kept = trials(tmp_path)
    assert len({trial["id"] for trial in kept}) == len(kept) == len(engine.launches())


def test_private_folders_of_killed_probers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    long_ago = time.time() - 3600
    for name in ("dead", "living", "new"):
        (tmp_path / f"{PREFIX}{name}" / "cache").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "elsewhere")
    for name in ("dead", "living"):
        (tmp_path / f"{PREFIX}{name}" / LOCK_NAME).touch()
        os.utime(tmp_path / f"{PREFIX}{name}", (long_ago, long_ago))
    with FileLock(tmp_path / f"{PREFIX}living" / LOCK_NAME), private_folder(tmp_path) as own:
        assert oct(own.stat().st_mode)[-3:] == "700"
        left = {path.name.removeprefix(PREFIX) for path in tmp_path.glob(f"{PREFIX}*")} - {own.name[len(PREFIX) :]}
        assert left == {"living", "new", "link"}
    assert not own.exists()


def test_trial_leaves_no_file_behind(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    engine = make_engine(tmp_path / "engine", Scenario())
    with running_probe(tmp_path, engine, environment={"TMPDIR": str(temporary)}) as prober:
        assert prober.wait(30) == 0
    assert list(temporary.iterdir()) == []
    assert len(list((tmp_path / "results" / "logs").iterdir())) == 3
