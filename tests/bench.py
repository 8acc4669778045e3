"""One trial of the fake engine, in this process: the true launcher, proof and guard, with limits of seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fake_engine import FakeEngine, Scenario, make_engine, write_model

from prober.engine.install import Engine
from prober.host import processes
from prober.records import Combination, Entrypoint, Stage, Verdict, Verify
from prober.trial.memory_guard import Guard
from prober.trial.run import TrialContext, attempt, log_path
from prober.trial.timeouts import Limits

PROBER = Path(sys.executable).with_name("prober")
# A trial's end ends whatever carries its tag, anywhere on the machine: beside us other workers run trials of theirs.
TRIAL = f"trial-{uuid.uuid4()}"
QUICK = Limits(dict.fromkeys(Stage, 1.5))  # seconds without progress; the fake takes none


@dataclass(frozen=True)
class Bench:
    """A scenario, and how its trials are set up."""

    engine: FakeEngine
    setting: TrialContext

    def attempt(
        self,
        length: int | None = 64,
        tag: str = TRIAL,
        guard: Guard | None = None,
        report: Callable[[Stage, float], None] = lambda *_: None,
    ) -> tuple[Verdict, int | None]:
        """Run one trial; fails the test if anything of it lives on."""
        shown = attempt(self.setting, length, tag, report, guard)
        assert self.engine.launches(), self.log(tag)
        assert self.engine.alive() == ()
        return shown

    def log(self, tag: str = TRIAL) -> bytes:
        path = log_path(self.setting, tag)
        return path.read_bytes() if path.exists() else b""

    def with_limits(self, limits: Limits) -> Bench:
        return replace(self, setting=replace(self.setting, limits=limits))


def bench(
    folder: Path,
    scenario: Scenario,
    *,
    verify: Verify = Verify.FULL,
    entrypoint: Entrypoint = Entrypoint.SERVE,
    limits: Limits = QUICK,
    tensor_parallel_size: int = 1,
    flags: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Bench:
    """Set a scenario up in an empty folder."""
    engine = make_engine(folder / "engine", scenario)
    model = write_model(folder / "model")
    combination = Combination(
        str(model), entrypoint=entrypoint, tensor_parallel_size=tensor_parallel_size, other_flags=flags
    )
    work = folder / "work"
    work.mkdir()
    installed = Engine(Path(sys.executable), scenario.version, None, is_cpu_build=False)
    devices = {**engine.environment, **(environment or {})}
    return Bench(engine, TrialContext(installed, combination, verify, limits, work, devices))


@contextmanager
def bystander(**environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that no trial started: named like a worker of vLLM, marked like one of another prober's trials."""
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)", "vllm.entrypoints.openai"]
    process = subprocess.Popen(
        command,
        env={**os.environ, **processes.tag("another-trial"), **environment},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
        assert process.poll() is None, "a process that we did not start was ended"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _hear_signals() -> None:
    """Under nohup, or in the background of a script, these are ignored from birth."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def running_probe(
    folder: Path,
    engine: FakeEngine,
    *words: str,
    name: str = "",
    is_alone: bool = True,
    device: str = "cpu",
    model: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """`prober probe` of the fake engine, in a process of its own; its streams go to files `out` and `err` + `name`."""
    model = model or folder / "model"
    if not model.exists():
        write_model(model)
    command = [str(PROBER), "probe", str(model), "--python", sys.executable, "--device", device]
    own = {name: text for name, text in os.environ.items() if name not in ("ENGINE_PYTHON", "PROBER_TRIAL")}
    with (folder / f"out{name}").open("w") as out, (folder / f"err{name}").open("w") as err:
        process = subprocess.Popen(
            [*command, "--results", str(folder / "results"), *words],
            env={**own, **engine.environment, **(environment or {})},
            stdout=out,
            stderr=err,
            text=True,
            cwd=folder,
            preexec_fn=_hear_signals,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            if is_alone:
                engine.end_all()
