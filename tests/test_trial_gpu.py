"""A whole `prober probe` on made-up GPUs: neighbours, zombies, leaks, left-overs, and a second prober."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from bench import bystander, running_probe
from fake_engine import FakeEngine, Fault, FaultKind, Launched, Scenario, make_engine, wait_until, write_model
from fake_nvml import Gpu, build_stub, claim, nvml_environment, write_state

from prober import lookup
from prober.results.store import Store

ANSWER = "496  (a request of exactly that length was answered)"
GPU_MIB = 9000
FREE_MIB = 24_000 - 4 - GPU_MIB


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stub(tmp_path_factory.mktemp("stub"))


@dataclass
class Box:
    """A machine of made-up GPUs, with UUIDs of its own: leases are kept by UUID in one place for all tests."""

    folder: Path
    stub: Path
    uuids: tuple[str, ...]

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def environment(self) -> dict[str, str]:
        inherited = {"CUDA_VISIBLE_DEVICES": ""} if "CUDA_VISIBLE_DEVICES" in os.environ else {}
        return {**inherited, **nvml_environment(self.stub, self.state)}

    def show(self, **facts: Any) -> None:
        shown = [
            Gpu(uuid=uuid, pci=f"00000000:{0x1B + n:02X}:00.0", total_mib=24_000, **facts)
            for n, uuid in enumerate(self.uuids)
        ]
        write_state(self.state, shown)

    def engine(self, *faults: Fault, **played: Any) -> FakeEngine:
        return make_engine(self.folder / "engine", Scenario(faults=faults, gpu_mib=GPU_MIB, **played))

    def probing(self, engine: FakeEngine, *words: str, name: str = "") -> Any:
        asked = {"name": name, "is_alone": name in ("", "1"), "device": "auto", "environment": self.environment}
        return running_probe(self.folder, engine, *words, **asked)  # type: ignore[arg-type]  # of three types

    def probe(self, engine: FakeEngine, *words: str) -> tuple[int, str, str]:
        with self.probing(engine, *words) as prober:
            code = prober.wait(60)
            assert engine.alive() == ()
        return code, self.said("out"), self.said("err")

    def said(self, name: str) -> str:
        return (self.folder / name).read_text()

    def trials(self) -> list[dict[str, Any]]:
        recorded = self.folder / "results" / "trials.jsonl"
        return [json.loads(line) for line in recorded.read_text().splitlines()] if recorded.exists() else []


@pytest.fixture
def box(tmp_path: Path, stub: Path) -> Box:
    made = Box(tmp_path, stub, (f"GPU-{uuid4()}",))
    made.show()
    return made


@contextmanager
def neighbour(box: Box, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else's process on the first GPU."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    own = {name: text for name, text in os.environ.items() if not name.startswith("PROBER_")}
    process = subprocess.Popen(command, env={**own, **environment})
    claim(box.state, box.uuids[0], 7000, process.pid)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_memory_is_back_at_its_baseline_before_each_trial(box: Box) -> None:
    engine = box.engine()
    code, out, _ = box.probe(engine)
    assert (code, ANSWER in out) == (0, True)
    assert [trial["leaked_mib"] for trial in box.trials()] == [0, 0, 0]
    assert "NVIDIA H200" in out
    assert {launch.environment["CUDA_VISIBLE_DEVICES"] for launch in engine.launches()} == {"0"}


def test_what_stays_free_at_the_peak_is_recorded_and_may_be_demanded(box: Box) -> None:
    code, out, err = box.probe(box.engine(stage_seconds={"ready": 1.0}), "--reserve-mib", "14000")
    assert (code, ANSWER in out) == (0, True), err
    served = next(trial for trial in box.trials() if trial["verdict"]["outcome"] == "fits")
    assert served["least_free_mib"] == FREE_MIB
    assert "14,996 MiB on the fullest GPU at the peak" in out
    (row,) = Store(box.folder / "results").rows()
    assert (row.least_free_mib, row.reserve_mib) == (FREE_MIB, 14_000)


def test_a_length_that_leaves_too_little_free_does_not_count(box: Box) -> None:
    engine = box.engine(stage_seconds={"ready": 1.0})
    _, out, err = box.probe(engine, "--reserve-mib", "16000")
    assert "it leaves 14,996 MiB free, and 16,000 MiB were asked for" in out, err
    assert "Ask for less with --reserve-mib" in out
    assert len(engine.launches()) <= 3, "a shorter length leaves hardly more: no long way down"
    (row,) = Store(box.folder / "results").rows()
    assert (row.max_model_len, row.reserve_mib, row.refused_max_model_len) == (None, 16_000, 16)
    assert "14996 MiB left free" in str(row.refused_evidence)
    answer = lookup(row.model, results=box.folder / "results")
    assert not answer.hits, "that nothing fits under a reserve says nothing without one"


def test_trials_beside_another_load_are_not_taken_over(box: Box) -> None:
    engine = box.engine()
    box.probe(engine)
    box.show(used_mib=500)
    code, _, err = box.probe(engine)
    assert (code, "Going on from" in err) == (0, False)
    assert len(engine.launches()) > 3


def test_two_gpus_are_taken_for_two_ranks(box: Box) -> None:
    box.uuids = (*box.uuids, f"GPU-{uuid4()}", f"GPU-{uuid4()}")
    box.show()
    with neighbour(box):
        code, _, err = box.probe(engine := box.engine(), "--tp", "2")
    assert code == 0, err
    assert {launch.environment["CUDA_VISIBLE_DEVICES"] for launch in engine.launches()} == {"1,2"}
    assert "waiting" not in err


def test_a_cell_that_needs_more_gpus_than_there_are_is_closed_and_the_others_measured(box: Box) -> None:
    code, out, _ = box.probe(engine := box.engine(), "--tp", "1,2")
    assert code == 1
    assert len(engine.launches()) == 3
    assert "2 GPUs are needed, and this machine has 1" in out
    rows = {row.tensor_parallel_size: row.status for row in Store(box.folder / "results").rows()}
    assert rows == {1: "exact", 2: "bad_config"}
    code, out, err = box.probe(engine, "--tp", "2")
    assert (code, out, "needs 2" in err) == (2, "", True), "alone it is a mistake, and nothing is written"


def test_neighbour_is_waited_for_and_named(box: Box) -> None:
    engine = box.engine()
    with neighbour(box) as other, box.probing(engine) as prober:
        said = f"waiting for GPU 0: pid {other.pid} (python"
        wait_until(lambda: said in box.said("err"), what=said)
        assert engine.launches() == ()
        other.kill()
        other.wait()
        assert prober.wait(30) == 0
    assert ANSWER in box.said("out")


def test_neighbour_that_stays_ends_the_wait_with_the_list_and_the_command(box: Box) -> None:
    engine = box.engine()
    with neighbour(box) as other:
        code, out, err = box.probe(engine, "--wait", "1")
        assert other.poll() is None
    assert (code, out, engine.launches()) == (3, "", ())
    assert f"prober: waited 1 s for GPU 0: pid {other.pid} (python" in err
    assert "6.8 GiB" in err
    assert f"look at them with `ps -fp {other.pid}`" in err


def test_memory_that_no_process_holds_is_said_as_such(box: Box) -> None:
    box.show(used_mib=5000)
    code, _, err = box.probe(box.engine(), "--wait", "1")
    assert code == 3
    assert "4.9 GiB held by no process that can be seen here (a zombie context, or another container)" in err
    assert "nvidia-smi" in err


def test_memory_that_returns_late_is_waited_for(box: Box) -> None:
    code, out, err = box.probe(box.engine(gpu_hold_seconds=1.0))
    assert (code, ANSWER in out) == (0, True)
    assert "waiting for the trial's GPU memory to return: 8.8 GiB" in err
    assert [trial["leaked_mib"] for trial in box.trials()] == [0, 0, 0]


def holders(box: Box, launch: Launched) -> list[Path]:
    """What processes of this launch have taken of the GPUs."""
    return [path for _, pid, _ in launch.processes for path in Path(f"{box.state}.claims").glob(f"{pid}-*.claim")]


def test_refusal_beside_a_newcomer_says_nothing_about_the_length(box: Box) -> None:
    """A neighbour comes during the second launch, and vLLM refuses a length that fits on the idle GPU."""
    engine = box.engine(launch_jitter=(0, -20, 0, 0, 0, 0), stage_seconds={"load": 2.0})
    with box.probing(engine) as prober:
        wait_until(lambda: len(engine.launches()) == 2 and holders(box, engine.launches()[1]), what="the second launch")
        with neighbour(box) as other:
            wait_until(lambda: len(box.trials()) == 2, what="its verdict")
            wait_until(lambda: f"waiting for GPU 0: pid {other.pid}" in box.said("err"), what="the wait for it")
        assert prober.wait(60) == 0
    second = box.trials()[1]
    assert (second["length"], second["verdict"]["outcome"]) == (496, "device_busy")
    assert f"another process took memory on GPU 0: pid {other.pid} (python" in second["verdict"]["evidence"]
    assert "To serve at least one request" in second["verdict"]["evidence"]
    assert second["leaked_mib"] == 0
    assert ANSWER in box.said("out")


def test_memory_that_a_newcomer_holds_is_no_reserve_of_ours(box: Box) -> None:
    """It would read as "leaves too little free", and send the search down."""
    engine = box.engine(stage_seconds={"ready": 4.0})
    with box.probing(engine, "--reserve-mib", "12000", "--high", "256") as prober:
        wait_until(lambda: engine.launches() and holders(box, engine.launches()[0]), what="the first launch")
        with neighbour(box):
            wait_until(lambda: len(box.trials()) == 1, what="its verdict")
        assert prober.wait(60) == 0
    assert [(trial["length"], trial["least_free_mib"]) for trial in box.trials()] == [(256, None), (256, FREE_MIB)]


def test_a_mistake_in_the_gpus_is_told_at_once_and_no_row_of_the_matrix(box: Box) -> None:
    code, out, err = box.probe(engine := box.engine(), "--tp", "1,2", "--gpus", "7")
    assert (code, out, engine.launches()) == (2, "", ()), err
    assert not (box.folder / "results" / "matrix.csv").exists()


LEAKING = """
import sys
from pathlib import Path
from prober.measure.search_loop import Task, measure
from prober.cli.progress import PlainDisplay
from prober.engine.install import Engine
from prober.measure.request import Request
from prober.records import Combination, NotReady, Verify
from prober.measure.monitor import launcher
from prober.measure.devices import hold
from prober.results.store import Store

model, results = sys.argv[1:]
engine, combination = Engine(Path(sys.executable), "0.32.0", None, False), Combination(model)
store = Store(Path(results))
display = PlainDisplay(combination, Verify.FULL, lambda line: print(line, file=sys.stderr))
with hold(engine, "cuda", 1, None, display.say, 1.0) as here:
    here.return_seconds = 1.0
    with launcher(here, store, Request([combination], engine.python, store.folder)) as launch:
        try:
            measure(Task(combination, here.machine), store, launch, display)
        except NotReady as error:
            sys.exit(f"not ready: {error}")
"""


def test_leak_is_measured_and_recorded_and_no_trial_starts_on_it(box: Box) -> None:
    engine = box.engine(gpu_hold_seconds=-1.0)
    words = [str(write_model(box.folder / "model")), str(box.folder / "results")]
    done = subprocess.run(
        [sys.executable, "-c", LEAKING, *words],
        env={**os.environ, **engine.environment, **box.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    (trial,) = box.trials()
    # Whether it is the trial's own or came from a neighbour that nobody sees: the refusal beside it says nothing.
    assert (trial["leaked_mib"], trial["verdict"]["outcome"]) == (GPU_MIB, "device_busy")
    assert "larger than the available KV cache" in trial["verdict"]["evidence"]
    assert len(engine.launches()) == 1
    assert "not ready: waited 1 s for GPU 0: 8.8 GiB held by no process" in done.stderr


def test_left_overs_are_ended_only_when_asked(box: Box) -> None:
    dead = {"PROBER_TRIAL": f"old-{uuid4().hex[:6]}", "PROBER_PID": "1:99999999999"}
    engine = box.engine()
    with bystander() as running, neighbour(box, **dead) as left:
        code, _, err = box.probe(engine, "--wait", "1")
        assert (code, left.poll()) == (3, None)
        assert f"pid {left.pid}" in err
        assert "left over from an earlier trial of ours, --kill-stale ends it" in err
        code, out, err = box.probe(engine, "--wait", "5", "--kill-stale")
        assert (code, ANSWER in out) == (0, True)
        assert left.wait(5) == -signal.SIGKILL
        assert f"Ended process {left.pid}" in err
        assert running.poll() is None


def test_two_probers_never_share_a_gpu(box: Box) -> None:
    engine = box.engine(Fault(FaultKind.HANG, launches=(1,)))
    with box.probing(engine, name="1") as first:
        wait_until(lambda: len(engine.alive()) == 2, what="the first one's trial")
        with box.probing(engine, name="2") as second:
            assert second.wait(20) == 3
        assert f"leased to another prober, pid {first.pid}" in box.said("err2")
        assert len(engine.launches()) == 1
        box.uuids = (*box.uuids, f"GPU-{uuid4()}")
        box.show()
        with box.probing(engine, name="3") as third:
            assert third.wait(30) == 0
        assert {launch.environment["CUDA_VISIBLE_DEVICES"] for launch in engine.launches()[1:]} == {"1"}
        first.kill()
        first.wait()
        wait_until(lambda: not engine.alive(), what="the first one's trial is gone")
    engine.change(Scenario(gpu_mib=GPU_MIB))
    code, _, err = box.probe(engine, "--gpus", "0", "--fresh")
    assert code == 0, f"a dead prober's lease is taken over: {err}"
