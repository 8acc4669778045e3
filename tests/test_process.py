"""One command under supervision: how it ends, what it listens on, and the shared memory it leaves."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest
from bench import bystander
from fake_engine import wait_until

from prober.trial.process import Launch, output_of

TAG = f"trial-{uuid.uuid4()}"  # an end ends whatever carries its tag: beside us another worker runs these tests
SHM = Path("/dev/shm")


@contextmanager
def launched(folder: Path, code: str, *words: str) -> Iterator[Launch]:
    command = [sys.executable, "-c", code, *words]
    with Launch(command, os.environ, folder / "log", TAG) as launch:
        yield launch


def log(folder: Path) -> str:
    return (folder / "log").read_text() if (folder / "log").exists() else ""


def ended(launch: Launch) -> int | None:
    wait_until(lambda: launch.has_ended, what="the end")
    return launch.exit_status


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(2)", 2),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os, signal; signal.signal(10, signal.SIG_DFL); os.kill(os.getpid(), 10)", -10),
        ("import os; os.abort()", -6),
    ],
)
def test_exit_status_is_the_commands_own(tmp_path: Path, code: str, status: int) -> None:
    with launched(tmp_path, code) as launch:
        assert ended(launch) == status
    assert launch.exit_status == status


def test_a_command_that_had_to_be_ended_has_no_status(tmp_path: Path) -> None:
    with launched(tmp_path, "import time; time.sleep(60)") as launch:
        assert not launch.has_ended
    assert launch.has_ended
    assert launch.exit_status is None


def test_both_streams_go_to_the_log_and_nothing_is_read_from_us(tmp_path: Path) -> None:
    code = "import sys; print('out', flush=True); sys.stderr.write('err'); print(repr(sys.stdin.read()))"
    with launched(tmp_path, code) as launch:
        assert ended(launch) == 0
    assert log(tmp_path) == "out\nerr''\n"


def test_a_command_that_cannot_be_run_says_so_in_the_log(tmp_path: Path) -> None:
    with Launch(["/no/such/program"], os.environ, tmp_path / "log", TAG) as launch:
        assert ended(launch) == 127
    assert log(tmp_path) == "prober: cannot run /no/such/program: No such file or directory\n"


def test_ending_twice_is_harmless(tmp_path: Path) -> None:
    with launched(tmp_path, "import time; time.sleep(60)") as launch:
        launch.end()
        launch.end()


def test_a_polite_end_comes_first(tmp_path: Path) -> None:
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(print('bye'))); print(1, flush=True)"
    with launched(tmp_path, f"{code}; time.sleep(60)"):
        wait_until(lambda: log(tmp_path) == "1\n", what="the handler")
    assert log(tmp_path) == "1\nbye\n"


def test_children_of_the_prober_that_are_no_part_of_the_trial_live_on(tmp_path: Path) -> None:
    """Also when the supervisor was killed, and its orphans have become children of the prober, too."""
    orphan = (
        "import os, time; os.fork() or os.execve(os.sys.executable, ['x', '-c', 'import time; time.sleep(60)'], {})"
    )
    with bystander(), launched(tmp_path, f"{orphan}; time.sleep(60)") as launch:
        wait_until(lambda: len(launch.processes()) == 2, what="the tree")
        tree = launch.processes()
        wait_until(lambda: any(one.cmdline()[:1] == ["x"] for one in tree), what="the untagged child")
        supervisor = tree[0].parent()
        assert supervisor is not None
        supervisor.kill()
        wait_until(lambda: launch.has_ended, what="the supervisor's death")
        launch.end()
        assert not [one for one in tree if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        assert not [one for one in psutil.Process().children() if one.status() == psutil.STATUS_ZOMBIE]


def test_only_the_trials_own_listener_counts(tmp_path: Path) -> None:
    code = (
        "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print(s.getsockname()[1], "
        "flush=True); time.sleep(60)"
    )
    with socket.socket() as mine, launched(tmp_path, code) as launch:
        mine.bind(("127.0.0.1", 0))
        mine.listen()
        wait_until(lambda: log(tmp_path).endswith("\n"), what="the port")
        # The kernel's table of sockets may miss an entry while others change it: the prober, too, asks again.
        wait_until(lambda: launch.listens_on(int(log(tmp_path))), what="its own listener")
        assert not launch.listens_on(mine.getsockname()[1])
        assert not launch.listens_on(1)


MAKES_SEGMENT = """
import os, signal, sys, time
from multiprocessing import resource_tracker, shared_memory
how, *names = sys.argv[1:]
resource_tracker.register = lambda *_: None
kept = [shared_memory.SharedMemory(name, create=True, size=4096) for name in names]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("made", flush=True)
time.sleep(1.5 if how == "killed" else 60)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_shared_memory_of_a_killed_trial_is_removed(tmp_path: Path, how: str) -> None:
    name = f"psm_{uuid.uuid4().hex[:12]}"
    try:
        with launched(tmp_path, MAKES_SEGMENT, how, name) as launch:
            wait_until(lambda: log(tmp_path) == "made\n", what="the segment")
            assert (SHM / name).exists()
            if how == "killed":
                assert ended(launch) == -signal.SIGKILL
        assert not (SHM / name).exists()
    finally:
        (SHM / name).unlink(missing_ok=True)


MAPS = """
import mmap, sys, time
files = [open(path, 'r+b') for path in sys.argv[1:]]
kept = [mmap.mmap(file.fileno(), 4096) for file in files]
print("made", flush=True)
time.sleep(60)
"""


def test_shared_memory_of_others_stays(tmp_path: Path) -> None:
    """What was there before (a segment, a model in a folder), and what somebody else has mapped, too."""
    mark = uuid.uuid4().hex[:12]
    before, folder, shared = SHM / f"before_{mark}", SHM / f"models_{mark}", f"shared_{mark}"
    with ExitStack() as cleaning:
        cleaning.callback(shutil.rmtree, folder, ignore_errors=True)
        for path in (before, SHM / shared):
            cleaning.callback(path.unlink, missing_ok=True)
        before.write_bytes(bytes(4096))
        code = "import pathlib, sys; p = pathlib.Path(sys.argv[2]); p.parent.mkdir(); p.write_bytes(bytes(4096)); "
        code += "pathlib.Path(sys.argv[3]).write_bytes(bytes(4096)); sys.argv[1:1] = []" + MAPS
        with launched(tmp_path, code, str(before), str(folder / "weights"), str(SHM / shared)):
            wait_until(lambda: log(tmp_path) == "made\n", what="the mappings")
            mine = SharedMemory(shared)
        assert before.exists()
        assert (folder / "weights").exists()
        assert (SHM / shared).exists()
        mine.close()


def test_output_of_a_short_command() -> None:
    assert output_of([sys.executable, "-c", "print(1)"], 10) == (0, "1\n")
    assert output_of([sys.executable, "-c", "raise SystemExit('no')"], 10) == (1, "no\n")
    assert output_of([sys.executable, "-c", "import time; time.sleep(60)"], 0.2) == (None, "")
    status, said = output_of(["/no/such/program"], 10)
    assert status == 127
    assert "cannot run /no/such/program" in said
