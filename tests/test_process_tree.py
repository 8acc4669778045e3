"""Whatever a trial starts, and however the trial or the prober ends: nothing of it lives on, and nothing else dies."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from bench import bench, bystander, running_probe
from fake_engine import FakeEngine, Fault, FaultKind, Scenario, make_engine, wait_until

from prober.records import Entrypoint, Outcome, Stage, Verify

STUBBORN = (
    Fault(FaultKind.SETSID_GRANDCHILD),
    Fault(FaultKind.DOUBLE_FORK),
    Fault(FaultKind.CLEAN_ENV_GRANDCHILD),
    Fault(FaultKind.IGNORE_SIGTERM),
)
ROLES = {"front", "EngineCore", "Worker_TP0", "Worker_TP1", "setsid_grandchild", "double_fork", "clean_env_grandchild"}
WAITS = Fault(FaultKind.HANG, "ready", launches=(1,))


@pytest.fixture(autouse=True)
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """Lives through every test here."""
    with bystander() as process:
        yield process


def roles(engine: FakeEngine, launch: int = 1) -> set[str]:
    return {role for role, _, _ in engine.launches()[launch - 1].processes}


@pytest.mark.parametrize("entrypoint", Entrypoint)
@pytest.mark.parametrize(
    ("length", "further", "outcome"),
    [
        (64, (), Outcome.FITS),
        (5000, (), Outcome.KV_TOO_SMALL),
        (64, (WAITS,), Outcome.TIMEOUT),
        (64, (Fault(FaultKind.SEGFAULT, "capture"),), Outcome.CRASH),
    ],
)
def test_whole_tree_dies_after_every_ending(
    tmp_path: Path, entrypoint: Entrypoint, length: int, further: tuple[Fault, ...], outcome: Outcome
) -> None:
    scenario = Scenario(faults=(*STUBBORN, *further))
    trial = bench(tmp_path, scenario, entrypoint=entrypoint, tensor_parallel_size=2)
    began = time.monotonic()
    verdict, _ = trial.attempt(length)
    assert time.monotonic() - began < 15
    assert verdict.outcome is outcome, verdict
    assert roles(trial.engine) == ROLES


def test_launcher_that_leaves_with_success_takes_its_worker_along(tmp_path: Path) -> None:
    trial = bench(tmp_path, Scenario(faults=(Fault(FaultKind.EXIT_ZERO, amount=0.3),)))
    verdict, status = trial.attempt()
    assert (verdict.outcome, status) == (Outcome.CRASH, 0)
    assert roles(trial.engine) == {"front", "EngineCore"}


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, 130, "The same command goes on from them."),
        (signal.SIGTERM, 143, "The same command goes on from them."),
        (signal.SIGHUP, -signal.SIGHUP, ""),
        (signal.SIGKILL, -signal.SIGKILL, ""),
    ],
)
def test_trial_does_not_outlive_the_prober(tmp_path: Path, number: signal.Signals, code: int, said: str) -> None:
    engine = make_engine(tmp_path / "engine", Scenario(faults=(*STUBBORN, WAITS)))
    with running_probe(tmp_path, engine, "--tp", "2") as prober:
        wait_until(lambda: {role for role, _ in engine.alive()} == ROLES, what="the whole tree")
        prober.send_signal(number)
        assert prober.wait(10) == code
        wait_until(lambda: not engine.alive(), seconds=5, what=f"nothing alive: {engine.alive()}")
    text = (tmp_path / "err").read_text()
    assert said in text
    assert "Traceback" not in text


def test_killed_supervisor_leaves_nothing_and_the_search_goes_on(tmp_path: Path) -> None:
    scenario = Scenario(faults=(*STUBBORN, WAITS))
    engine = make_engine(tmp_path / "engine", scenario)
    with running_probe(tmp_path, engine, "--tp", "2", "--high", "64") as prober:
        wait_until(lambda: {role for role, _ in engine.alive()} == ROLES, what="the whole tree")
        first = {pid for _, pid in engine.alive()}
        (supervisor,) = psutil.Process(prober.pid).children()
        supervisor.kill()
        wait_until(lambda: not first & {pid for _, pid in engine.alive()}, what="the first launch is gone")
        assert prober.wait(20) == 0
        assert engine.alive() == ()
    assert len(engine.launches()) == 2
    assert "64  (a request of exactly that length was answered)" in (tmp_path / "out").read_text()


@pytest.mark.parametrize("stubborn", [(), (Fault(FaultKind.IGNORE_SIGTERM),)])
@pytest.mark.parametrize("version", ["0.32.0", "0.10.2", "0.8.0"])
def test_refused_trial_is_over_within_three_seconds(tmp_path: Path, version: str, stubborn: tuple[Fault, ...]) -> None:
    """The refusal stands in the log, and vLLM takes half a minute to go: nobody waits for that."""
    trial = bench(tmp_path, Scenario(version=version, faults=(Fault(FaultKind.LINGER, amount=30), *stubborn)))
    refused_at: list[float] = []

    def look(_stage: Stage, _age: float) -> None:
        if not refused_at and b"ValueError" in trial.log().replace(b"ValueError: Tokenizer", b""):
            refused_at.append(time.monotonic())

    assert trial.attempt(5000, report=look)[0].outcome is Outcome.KV_TOO_SMALL
    assert time.monotonic() - refused_at[0] < 3


def test_proof_that_was_not_asked_for_is_no_reason_to_stay(tmp_path: Path) -> None:
    trial = bench(tmp_path, Scenario(faults=(Fault(FaultKind.COMPLETION_HANGS),)), verify=Verify.NONE)
    assert trial.attempt()[0].outcome is Outcome.FITS
    assert trial.engine.launches()[0].requests == ()


def test_children_are_the_kernels_first_choice(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "engine", Scenario(faults=(WAITS,)))
    with running_probe(tmp_path, engine, "--tp", "2") as prober:
        wait_until(lambda: len(engine.alive()) == 4, what="the tree")
        scores = {int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for _, pid in engine.alive()}
        own = int(Path(f"/proc/{prober.pid}/oom_score_adj").read_text())
    assert scores == {1000}
    assert own == int(Path(f"/proc/{os.getpid()}/oom_score_adj").read_text())
