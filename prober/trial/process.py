"""Run one command in isolation and kill everything it started. The only module that starts subprocesses."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from prober.host import processes
from prober.records import NotReady

SUPERVISOR = Path(__file__).with_name("supervisor.py")
END_SECONDS = 30.0
PR_SET_CHILD_SUBREAPER = 36
SOCKET_TABLE = "/proc/net/tcp"


class Launch:
    """One supervised command: its process tree dies when this object is closed or the prober dies.

    ``tag`` identifies every process of the tree as this trial's, through the environment.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, tag: str) -> None:
        self.tag = tag
        self._lines = ""
        self._earlier = psutil.Process().children(recursive=True)
        _adopt_orphans(True)  # if the supervisor is killed, its children become ours
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", str(SUPERVISOR), str(log), *command],
            env={**environment, **processes.tag(tag)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._supervisor.stdout is not None  # PIPE
        os.set_blocking(self._supervisor.stdout.fileno(), False)

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    @property
    def has_ended(self) -> bool:
        """Whether the command exited by itself, or its supervisor was killed."""
        return "exit " in self._read() or self._supervisor.poll() is not None

    @property
    def exit_status(self) -> int | None:
        """The command's exit status, negative for a signal; None while it runs or if the prober stopped it."""
        for line in self._read().splitlines():
            word, _, status = line.partition(" ")
            if word == "exit" and status != "None":
                return int(status)
        return None

    def processes(self) -> list[psutil.Process]:
        """Return the command's running processes, itself included."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._supervisor.pid).children(recursive=True)
        return []

    def listens_on(self, port: int) -> bool:
        """Whether one of the command's own processes listens on this TCP port; True if the kernel hides it."""
        if not os.access(SOCKET_TABLE, os.R_OK):
            return True
        return any(_listens_on(process, port) for process in self.processes())

    def end(self) -> None:
        """Kill everything the command started and wait for it. Raises NotReady if a process does not die."""
        assert self._supervisor.stdin is not None  # PIPE, both
        assert self._supervisor.stdout is not None
        with contextlib.suppress(OSError):
            self._supervisor.stdin.close()
        try:
            self._supervisor.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        self._read()
        self._supervisor.stdout.close()
        if self._supervisor.returncode != 0:
            self._end_left_over()
        _adopt_orphans(False)

    def _read(self) -> str:
        assert self._supervisor.stdout is not None  # PIPE
        with contextlib.suppress(OSError, ValueError):
            self._lines += (self._supervisor.stdout.read() or b"").decode()
        return self._lines

    def _end_left_over(self) -> None:
        """Kill what a killed supervisor left: our own children now, and processes with this trial's tag."""
        until = time.monotonic() + END_SECONDS
        while left := [*self._orphans(), *(one for one in psutil.process_iter() if _carries(one, self.tag))]:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            _, alive = psutil.wait_procs(left, timeout=max(0.0, until - time.monotonic()))
            if alive:
                pids = ",".join(str(process.pid) for process in alive)
                raise NotReady(f"Processes of the last trial do not die (stuck in the driver?): see `ps -fp {pids}`.")

    def _orphans(self) -> list[psutil.Process]:
        return [one for one in psutil.Process().children(recursive=True) if one not in self._earlier]


def _adopt_orphans(is_wanted: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0)


def _carries(process: psutil.Process, tag: str) -> bool:
    try:
        return process.environ().get(processes.TRIAL_VARIABLE) == tag and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):
        return False


def _listens_on(process: psutil.Process, port: int) -> bool:
    try:
        connections = process.net_connections("tcp")
    except (psutil.Error, OSError):  # it has just ended, or runs as another user
        return False
    return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in connections)


def output_of(command: Sequence[str], timeout_seconds: float) -> tuple[int | None, str]:
    """Run a short command; return its exit status (None: timed out) and its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    except subprocess.TimeoutExpired:
        return None, ""
    except OSError as error:
        return 127, f"cannot run {command[0]}: {error.strerror}"
    return done.returncode, done.stdout + done.stderr
