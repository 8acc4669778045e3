"""What a running search looks like: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PROBER
from fake_engine import Scenario, make_engine, write_model

from prober.measure.summary import duration

SCENARIO = Scenario(kv_blocks=32, block_size=128, stage_seconds={"load": 1.0})
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def probe_on_a_terminal(folder: Path, **environment: str) -> tuple[int, str, str]:
    """Run it with a terminal as its stderr; the exit code, the answer, and all that was shown."""
    engine = make_engine(folder / "engine", SCENARIO)
    command = [str(PROBER), "probe", str(write_model(folder / "model")), "--python", sys.executable, "--device", "cpu"]
    ours, theirs = pty.openpty()
    size = {"TERM": "xterm", "COLUMNS": "160", "LINES": "50"}
    with subprocess.Popen(
        command,
        env={**os.environ, **engine.environment, **size, **environment},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while chunk := os.read(ours, 65536):
                shown += chunk
        except OSError:  # how a terminal says that nobody writes any more
            pass
        os.close(ours)
        answer, _ = process.communicate(timeout=60)
    assert engine.alive() == ()
    return process.returncode, answer, shown.decode()


def last_frame(shown: str) -> str:
    text = CONTROL.sub("", shown)
    return text[text.rindex("Probing ") :]


def test_on_a_terminal_there_is_a_table_and_the_running_launch_beneath_it(tmp_path: Path) -> None:
    code, answer, shown = probe_on_a_terminal(tmp_path)
    assert (code, "3,968" in answer) == (0, True), shown
    text = CONTROL.sub("", shown)
    assert "launch 1: the model's limit" in text
    assert "serves: nothing yet · refused: nothing yet" in text
    assert re.search(r"loading, \d+ s", text)
    assert re.search(r"serves: 3,968 · refused: 131,072, about \d+ s left", text)
    # what stays on the screen: the header, each trial, and no launch
    last = last_frame(shown)
    assert re.search(r"^\s+3,968\s+serves\s+\d+ s", last, re.MULTILINE)
    assert re.search(r"^\s+3,969\s+too long \(kv_too_small\)\s+\d+ s", last, re.MULTILINE)
    assert "launch " not in last
    again, _, shown = probe_on_a_terminal(tmp_path)
    assert (again, len(re.findall(r"\brecorded\b", last_frame(shown)))) == (0, 3)


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(tmp_path: Path) -> None:
    code, _, shown = probe_on_a_terminal(tmp_path, TERM="dumb")
    assert code == 0, shown
    assert "\x1b" not in shown
    assert "Launch 1: the model's limit" in shown


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0 s"), (61, "1 min 1 s"), (3600 * 26 + 60 * 5, "26 h 05 min")])
def test_durations_are_said_in_two_units_at_most(seconds: float, words: str) -> None:
    assert duration(seconds) == words
