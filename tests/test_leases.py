"""Two probers on one host never share a GPU, and a dead one holds nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prober.host import leases
from prober.host.gpu import Gpu, Inventory
from prober.host.leases import choose_and_lease, holders, lease
from prober.records import NotReady, UsageError

GPUS = tuple(Gpu(index, f"GPU-{index}1c2", "NVIDIA L4", 24 * 2**30, 0, 0, processes=()) for index in range(3))

HOLD = """
import sys, subprocess, time
from pathlib import Path
from prober.host.gpu import Gpu
from prober.host.leases import lease
held = lease([Gpu(int(i), f"GPU-{i}1c2", "NVIDIA L4") for i in sys.argv[2].split(",")], Path(sys.argv[1]))
if len(sys.argv) > 3:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
    print(child.pid, flush=True)
else:
    print("held", flush=True)
time.sleep(60)
"""


@contextmanager
def holder(folder: Path, indices: str, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", HOLD, str(folder), indices, *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_a_second_prober_is_refused_and_told_who_holds_the_gpu(tmp_path: Path) -> None:
    with holder(tmp_path, "0,1") as (process, _):
        with pytest.raises(NotReady, match=rf"GPU 1 .*pid {process.pid}, since 20"):
            lease(GPUS[1:], tmp_path)
        assert {uuid: one.pid for uuid, one in holders([gpu.uuid for gpu in GPUS], tmp_path).items()} == {
            GPUS[0].uuid: process.pid,
            GPUS[1].uuid: process.pid,
        }


def test_all_or_none(tmp_path: Path) -> None:
    with holder(tmp_path, "2"):
        with pytest.raises(NotReady):
            lease(GPUS, tmp_path)
        assert holders([gpu.uuid for gpu in GPUS[:2]], tmp_path) == {}
        with lease(GPUS[:2], tmp_path):  # nothing of the failed one is held
            pass


def test_the_lease_ends_with_the_block_also_by_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), lease(GPUS, tmp_path):
        raise ZeroDivisionError
    assert holders([gpu.uuid for gpu in GPUS], tmp_path) == {}
    with lease(GPUS, tmp_path) as held:
        assert held.gpus == GPUS
        held.release()  # twice is harmless


def test_one_process_cannot_hold_a_gpu_twice(tmp_path: Path) -> None:
    with lease(GPUS[:1], tmp_path), pytest.raises(NotReady, match=f"pid {os.getpid()}"):
        lease(GPUS[:1], tmp_path)


def test_a_killed_holder_s_lease_is_taken_over(tmp_path: Path) -> None:
    with holder(tmp_path, "0") as (process, _):
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert (tmp_path / f"{GPUS[0].uuid}.json").exists()  # it could not tidy up
        assert holders([GPUS[0].uuid], tmp_path) == {}
        with lease(GPUS[:1], tmp_path):
            assert holders([GPUS[0].uuid], tmp_path)[GPUS[0].uuid].pid == os.getpid()


def test_a_child_that_outlives_the_holder_does_not_keep_the_lease(tmp_path: Path) -> None:
    with holder(tmp_path, "0", "with a child") as (process, child):
        try:
            process.kill()
            process.wait(10)
            os.kill(int(child), 0)  # it lives
            with lease(GPUS[:1], tmp_path):
                pass
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_a_stopped_holder_still_holds(tmp_path: Path) -> None:
    with holder(tmp_path, "0") as (process, _):
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(NotReady):
            lease(GPUS[:1], tmp_path)


def test_two_probers_take_different_gpus(tmp_path: Path) -> None:
    here = Inventory(GPUS)
    with holder(tmp_path, "0"), choose_and_lease(here, 1, None, tmp_path) as held:
        assert held.gpus == GPUS[1:2]
        with pytest.raises(NotReady, match="is leased to another prober"):
            choose_and_lease(here, 1, ["0"], tmp_path)
        with pytest.raises(NotReady, match="is leased to another prober"):
            choose_and_lease(here, 2, None, tmp_path)
        with pytest.raises(UsageError):
            choose_and_lease(here, 4, None, tmp_path)


def test_many_probers_at_once_never_share(tmp_path: Path) -> None:
    script = """
import sys, time
from pathlib import Path
from prober.host.gpu import Gpu, Inventory
from prober.host.leases import choose_and_lease
from prober.records import NotReady
gpus = tuple(Gpu(i, f"GPU-{i}1c2", "NVIDIA L4", 24 * 2**30, 0, 0, processes=()) for i in range(3))
folder = Path(sys.argv[1])
while not (folder / "go").exists():
    time.sleep(0.001)
try:
    held = choose_and_lease(Inventory(gpus), 1, None, folder)
except NotReady:
    print("none", flush=True)
else:
    print(held.gpus[0].index, flush=True)
    sys.stdin.read()
"""
    pipe = subprocess.PIPE
    probers = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdin=pipe, stdout=pipe, text=True)
        for _ in range(6)
    ]
    time.sleep(0.5)
    (tmp_path / "go").touch()
    answers = [prober.stdout.readline().strip() for prober in probers if prober.stdout]
    for prober in probers:
        prober.communicate("")
    assert sorted(answers) == ["0", "1", "2", "none", "none", "none"]


def test_a_damaged_note_beside_the_lock_names_nobody(tmp_path: Path) -> None:
    with lease(GPUS[:1], tmp_path):
        (tmp_path / f"{GPUS[0].uuid}.json").write_text("{")
        with pytest.raises(NotReady, match="has not said who it is"):
            lease(GPUS[:1], tmp_path)


def test_the_place_does_not_depend_on_the_session() -> None:
    script = "import prober.host.leases as l; print(l._folder(None))"
    places = set()
    for session in ({}, {"TMPDIR": "/var/tmp", "XDG_RUNTIME_DIR": "/var/tmp"}):
        run = subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, **session}, capture_output=True, text=True, check=True
        )
        places.add(run.stdout)
    assert len(places) == 1
    assert leases._folder(None).stat().st_mode & 0o077 == 0


def test_a_lease_that_cannot_be_written_is_told_and_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / f"{GPUS[1].uuid}.json.draft").mkdir()  # where the holder would say who it is
    with pytest.raises(NotReady, match="the lease of GPU 1 cannot be written"):
        lease(GPUS, tmp_path)
    with lease(GPUS[:1], tmp_path), lease(GPUS[2:], tmp_path):
        pass
    (tmp_path / f"{GPUS[2].uuid}.lock").unlink()
    (tmp_path / f"{GPUS[2].uuid}.lock").mkdir()
    with pytest.raises(NotReady, match="the lease of GPU 2 cannot be written"):
        lease(GPUS[2:], tmp_path)


def test_without_a_free_gpu_the_refusal_is_not_about_leases(tmp_path: Path) -> None:
    with pytest.raises(NotReady, match="the driver is not loaded"):
        choose_and_lease(Inventory(problem="the driver is not loaded"), 1, None, tmp_path)


@pytest.mark.parametrize(
    ("kind", "told"), [("file", "leases cannot be kept in"), ("folder", "belongs to another user")]
)
def test_a_place_that_somebody_else_has_taken_is_refused(kind: str, told: str) -> None:
    """In the name of a user that nobody is, whose folder is therefore ours to spoil."""
    user = 3_000_000_000 + os.getpid()
    taken = Path(f"/tmp/prober-leases-{user}")
    taken.touch() if kind == "file" else taken.mkdir()
    script = f"import os; os.getuid = lambda: {user}; import prober.host.leases as l; l._folder(None)"
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    finally:
        taken.unlink() if kind == "file" else taken.rmdir()
    assert told in done.stderr
