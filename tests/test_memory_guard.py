"""The trial ends before the host suffers. Nothing here takes more than some tens of MiB."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from bench import Bench, bench
from fake_engine import Fault, FaultKind, Scenario

from prober.host import system
from prober.records import Entrypoint, Outcome, Stage
from prober.search.interpret import answer_of
from prober.search.next_length import Answer
from prober.trial.memory_guard import GIB, MIB, SHARED_MEMORY, Floors, Guard, memory_bytes, usual_floors
from prober.trial.timeouts import Limits


class Host:
    """A host as the guard sees it; what is free changes as the test says."""

    def __init__(self, memory: int = 8 * GIB, shared: int = 8 * GIB, disk: int = 8 * GIB) -> None:
        self.memory, self.shared, self.disk = memory, shared, disk

    def free(self, path: Path) -> int:
        return self.shared if path == SHARED_MEMORY else self.disk

    def guard(self, folder: Path) -> Guard:
        return Guard(folder, Floors(memory_bytes=GIB), lambda: self.memory, self.free)


def nobody() -> Sequence[psutil.Process]:
    return []


def test_host_with_room_is_in_no_danger_and_nobody_is_counted(tmp_path: Path) -> None:
    def never() -> Sequence[psutil.Process]:
        raise AssertionError

    assert Host().guard(tmp_path).danger(never) is None
    assert Host(memory=GIB).guard(tmp_path).danger(never) is None


@contextmanager
def holding(mib: int) -> Iterator[psutil.Process]:
    code = f"import time; kept = b'x' * ({mib} << 20); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield psutil.Process(process.pid)
        process.kill()


def test_what_the_trial_took_is_its_own_doing_and_what_others_took_is_not(tmp_path: Path) -> None:
    here = Host(memory=GIB + 40 * MIB)
    guard = here.guard(tmp_path)
    here.memory = GIB - 1
    with holding(40) as trial:
        found = guard.danger(lambda: [trial])
    assert found is not None
    assert found.is_ours
    # 40 MiB and an interpreter, whose size is not ours to say
    assert re.fullmatch(r"host memory down to 1\.0 GiB free, the trial holds 0\.[01] GiB", found.what)
    shared = guard.danger(nobody)
    assert shared is not None
    assert not shared.is_ours
    here.memory = GIB + 50 * MIB
    tight = Host(memory=GIB // 2).guard(tmp_path)
    found = tight.danger(nobody)
    assert found is not None
    assert not found.is_ours, "the host was short before the trial began"


def test_full_disk_or_shared_memory_is_a_danger_that_says_nothing_about_the_length(tmp_path: Path) -> None:
    here = Host()
    guard = here.guard(tmp_path)
    here.shared = 60 * MIB
    assert (found := guard.danger(nobody)) is not None
    assert (found.what, found.is_ours) == ("/dev/shm is nearly full", False)
    here.shared, here.disk = 8 * GIB, 500 * MIB
    assert (found := guard.danger(nobody)) is not None
    assert (found.what, found.is_ours) == ("the disk for the trial's log and compile cache is nearly full", False)


def test_small_disk_is_no_danger_in_itself(tmp_path: Path) -> None:
    here = Host(shared=64 * MIB, disk=100 * MIB)
    guard = here.guard(tmp_path)
    assert guard.danger(nobody) is None
    here.shared = 31 * MIB
    assert guard.danger(nobody) is not None
    here.shared, here.disk = 64 * MIB, 49 * MIB
    assert guard.danger(nobody) is not None


def test_usual_floor_leaves_the_host_room_to_live() -> None:
    total = system.memory_total_bytes()
    assert total // 20 <= usual_floors().memory_bytes <= total // 2


def test_memory_of_a_process_that_is_gone_counts_nothing() -> None:
    with holding(30) as process:
        assert 30 * MIB < memory_bytes([process]) < 60 * MIB
    assert memory_bytes([process]) == 0


def growing(tmp_path: Path, entrypoint: Entrypoint = Entrypoint.SERVE) -> Bench:
    # Above the floor for some two seconds: the trial looks every 0.2 s, and less often on a machine with other work.
    fault = Fault(FaultKind.GROW_HOST_MEMORY, "profile", from_length=60, amount=200, rate=50)
    patient = Limits(dict.fromkeys(Stage, 10.0))
    return bench(tmp_path, Scenario(faults=(fault,)), entrypoint=entrypoint, limits=patient)


def shrinking(limit_mib: int, folder: Path, trial: Callable[[], int]) -> Guard:
    """A host on which only the trial takes memory: so much is free above the floor when it begins."""
    free = GIB + limit_mib * MIB
    return Guard(folder, Floors(memory_bytes=GIB), lambda: free - trial())


@pytest.mark.parametrize("entrypoint", Entrypoint)
def test_growing_trial_ends_before_the_host_suffers(tmp_path: Path, entrypoint: Entrypoint) -> None:
    trial = growing(tmp_path, entrypoint)
    most: list[int] = [0]

    def taken() -> int:
        processes = [psutil.Process(pid) for _, pid in trial.engine.alive() if psutil.pid_exists(pid)]
        most.append(memory_bytes(processes))
        return most[-1]

    began = time.monotonic()
    verdict, status = trial.attempt(64, guard=shrinking(100, tmp_path, taken))
    assert (verdict.outcome, verdict.rule, verdict.stage) == (Outcome.HOST_OOM, "guard", Stage.PROFILE)
    assert answer_of(verdict) is Answer.TOO_LONG
    assert verdict.evidence.startswith("host memory down to 1.0 GiB free, the trial holds 0.")
    assert status is None
    assert 100 * MIB < max(most) < 200 * MIB
    assert time.monotonic() - began < 10
    assert trial.attempt(59, "t2", guard=shrinking(100, tmp_path, taken))[0].outcome is Outcome.FITS


def test_when_a_neighbour_takes_the_memory_nothing_is_said_about_the_length(tmp_path: Path) -> None:
    trial = bench(tmp_path, Scenario(faults=(Fault(FaultKind.HANG, "load"),)))
    guard = Guard(tmp_path, Floors(memory_bytes=GIB), lambda: GIB // 2 if trial.engine.alive() else 2 * GIB)
    verdict, _ = trial.attempt(64, guard=guard)
    assert (verdict.outcome, verdict.rule) == (Outcome.HOST_OOM, "guard_shared")
    assert answer_of(verdict) is Answer.UNKNOWN


def test_full_disk_ends_the_trial(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    fault = Fault(FaultKind.FILL_DISK, amount=60, rate=100, text=str(disk))
    trial = bench(tmp_path, Scenario(faults=(fault, Fault(FaultKind.HANG, "ready"))))

    def free(path: Path) -> int:
        if path == SHARED_MEMORY:
            return GIB
        held = 0
        for _, pid in trial.engine.alive():
            for link in Path(f"/proc/{pid}/fd").iterdir():
                if os.readlink(link).startswith(str(disk)):
                    held += link.stat().st_size
        return 40 * MIB - held

    verdict, _ = trial.attempt(64, guard=Guard(tmp_path, free_bytes=free))
    assert (verdict.outcome, verdict.rule) == (Outcome.HOST_OOM, "guard_shared")
    assert "disk" in verdict.evidence
    assert answer_of(verdict) is Answer.UNKNOWN
