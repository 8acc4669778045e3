"""Whose a process is: read from the mark in its environment, never from its name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from prober.host import processes
from prober.host.processes import Owner

DEAD_PROBER = {"PROBER_TRIAL": "t1", "PROBER_PID": "1:99999999999"}


@contextmanager
def process(mark: Mapping[str, str], user: int | None = None) -> Iterator[int]:
    command, pipe = ["/bin/sh", "-c", "echo up; read line"], subprocess.PIPE
    environment = {**os.environ, **mark}
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, user=user) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield child.pid
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("mark", "owner"),
    [
        ({}, Owner.OTHER),
        ({"PROBER_TRIAL": "t1"}, Owner.OTHER),
        ({"PROBER_TRIAL": "", "PROBER_PID": "1:5"}, Owner.OTHER),
        ({"PROBER_TRIAL": "t1", "PROBER_PID": "x:5"}, Owner.OTHER),
        ({"PROBER_TRIAL": "t1", "PROBER_PID": "77"}, Owner.OTHER),
        (DEAD_PROBER, Owner.OURS_LEFT_OVER),
    ],
)
def test_the_mark_says_whose_a_process_is(mark: Mapping[str, str], owner: Owner) -> None:
    with process(mark) as pid:
        assert processes.owner_of(pid) is owner


def test_a_trial_of_a_living_prober_is_ours() -> None:
    with process(processes.tag("t2")) as pid:
        assert processes.owner_of(pid) is Owner.OURS
        assert pid not in [one.pid for one in processes.left_over()]


def test_the_pid_of_a_dead_prober_given_to_another_process_does_not_revive_it() -> None:
    with process({}) as stranger, process({"PROBER_TRIAL": "t3", "PROBER_PID": f"{stranger}:1"}) as pid:
        assert processes.owner_of(pid) is Owner.OURS_LEFT_OVER


def test_the_mark_outlives_a_process_that_renames_itself() -> None:
    assert processes.tag("t4")["SPT_NOENV"] == "1"  # setproctitle would write over the environment


def test_a_pid_that_shows_nothing_is_hidden() -> None:
    with process({}) as pid:
        pass
    assert processes.owner_of(pid) is Owner.HIDDEN
    assert processes.name_of(pid) is None
    assert processes.start_of(pid) is None


def test_a_process_that_has_ended_and_is_not_yet_reaped_is_hidden_and_does_not_run() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], env={**os.environ, **DEAD_PROBER})
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert processes.owner_of(child.pid) is Owner.HIDDEN
        assert processes.start_of(child.pid) is None
    finally:
        child.wait()


def test_an_ending_process_has_no_environment_left_and_is_not_called_another_s() -> None:
    with subprocess.Popen(["/bin/sleep", "60"], env={}) as child:
        try:
            assert processes.owner_of(child.pid) is Owner.HIDDEN
        finally:
            child.kill()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start another user's process")
def test_another_user_s_trial_is_never_ours() -> None:
    with process(DEAD_PROBER, user=65534) as pid:
        assert processes.owner_of(pid) is Owner.OTHER
        assert pid not in [one.pid for one in processes.left_over()]


def test_only_left_overs_are_ended() -> None:
    with process(DEAD_PROBER) as left, process({}) as stranger, process(processes.tag("t5")) as ours:
        found = [one for one in processes.left_over() if one.pid in (left, stranger, ours)]
        assert [(one.pid, one.trial) for one in found] == [(left, "t1")]
        start = processes.start_of(stranger)
        assert start is not None
        lies = [processes.LeftOver(pid, processes.start_of(pid) or "", "t1", "python") for pid in (stranger, ours)]
        assert processes.end(lies, grace_seconds=0.1) == lies  # both live on
        assert processes.end(found) == []
        assert processes.start_of(left) is None
        assert processes.is_running(stranger, start)


def test_a_pid_that_was_given_to_another_process_is_not_ended() -> None:
    with process(DEAD_PROBER) as left:
        processes.end([processes.LeftOver(left, "1", "t1", "python")], grace_seconds=0.1)
        assert processes.owner_of(left) is Owner.OURS_LEFT_OVER
