"""What runs on a node of a fleet: it says what it is, and searches one cell with its own devices. Knows no Ray."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from prober import __version__
from prober.engine.hub_cache import is_directory, limit_beyond_default, revision_of
from prober.engine.install import Engine, inspect, settings
from prober.fleet import node_engine
from prober.fleet.jobs import FleetNode
from prober.fleet.migrated_trials import split, still_guiding
from prober.fleet.plan import EngineSpec
from prober.fleet.protocol import End, Job, Known, Reply, Streamed
from prober.host import idle, nvml, system
from prober.host.tempdir import private_folder
from prober.measure import devices
from prober.measure.measure import row_as_written
from prober.measure.monitor import launcher
from prober.measure.search_loop import Launcher, Task, combination_key, measure
from prober.records import Bracket, Ceiling, Machine, NotReady, ProberError, Stage, Status, Trial
from prober.results.schema import Row
from prober.results.store import Store
from prober.search.interpret import interpret
from prober.search.next_length import Space, Try
from prober.search.next_length import bracket as bracket_of
from prober.trial.process import output_of
from prober.trial.timeouts import Limits

LOG_BYTES = 4 * 2**20  # of a trial's log that travel to the driver: the end, where the evidence is

Emit = Callable[[Streamed], None]


class Expired(Exception):  # not an error: the time for this search is up
    """The search ends with the bracket it has."""


def search(job: Job, emit: Emit) -> Reply:
    """Run one search here, telling each trial as it ends. Nothing of it lives on afterwards, however it ends."""
    idle.end_stale()  # what a killed search of ours has left on this node
    try:
        with without_ray():
            return _answer(job, emit)
    except NotReady as error:
        return Reply(End.NOT_READY, str(error))
    except ProberError as error:
        return Reply(End.FAILED, str(error))


def end_left_over(limit_seconds: float = 30.0) -> None:
    """End what killed searches have left on this node. A worker that was just killed may take a moment to die."""
    until = time.monotonic() + limit_seconds
    quiet = 0
    while quiet < 3 and time.monotonic() < until:
        ended, alive = idle.end_stale()
        quiet = 0 if ended or alive else quiet + 1
        time.sleep(0.2)


@contextlib.contextmanager
def without_ray() -> Iterator[None]:
    """Hide the cluster from what is started here: vLLM would spread one start over other nodes."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("RAY_")}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _answer(job: Job, emit: Emit) -> Reply:
    engine = _engine(node_engine.python_of(job.cell.engine))
    device = "cpu" if job.cell.is_cpu else "cuda"
    with devices.hold(engine, device, job.cell.gpus, None, lambda _: None, job.wait_seconds) as here:
        if here.machine.gpu != job.cell.gpu:
            return Reply(End.NOT_READY, f"the GPU is a {here.machine.gpu}, not a {job.cell.gpu}")
        with private_folder(Path(tempfile.gettempdir())) as folder:
            search_here = Search(job, here.machine, folder, emit)
            with launcher(here, search_here.store, job.verify, Limits()) as launch:
                return search_here.run(launch)


@cache
def _engine(python: Path) -> Engine:
    """Asked once in the life of a worker: it takes a good part of a second."""
    return inspect(python, output_of)


class Search:
    """One job's search on this machine, from what is known of it here and elsewhere."""

    def __init__(self, job: Job, machine: Machine, folder: Path, emit: Emit) -> None:
        self._job, self._machine, self._folder, self._emit = job, machine, folder, emit
        self._settings = settings()
        self._own, self._carried = split(job.known, machine, self._settings)
        self._hints: list[Row] = list(job.hints)
        self._before = len(self._own)
        self.store = Store(folder)  # where logs go; trials of each attempt have a store of their own

    def run(self, launch: Launcher) -> Reply:
        """Search until the answer stands on trials of this machine alone, or until the time is up."""
        model = self._job.cell.combination.model
        pinned = revision_of(model) if is_directory(model) else None
        task = Task(
            combination=self._job.cell.combination,
            machine=self._machine,
            verify=self._job.verify,
            low=self._job.low,
            high=self._job.high,
            limit_of=lambda: limit_beyond_default(model),
            settings=self._settings,
            pinned=pinned,
        )
        began = time.monotonic()
        try:
            ceiling = self._settled(task, launch)
        except Expired:
            ceiling = self._interrupted(task, time.monotonic() - began)
            return Reply(End.EXPIRED, ceiling.why, row_as_written(ceiling) if ceiling.trials else None)
        own = {trial.id for trial in self._own}
        trials = tuple(trial for trial in ceiling.trials if trial.id in own)
        ceiling = replace(ceiling, trials=trials, launches=len(self._own) - self._before or len(trials))
        return Reply(End.ANSWERED, ceiling.why, row_as_written(ceiling))

    def _settled(self, task: Task, launch: Launcher) -> Ceiling:
        attempt = 0
        while True:
            store = self._store(attempt)
            ceiling = measure(task, store, launch, self)
            guiding = still_guiding(ceiling, self._carried)
            if guiding is None:
                return ceiling
            self._carried, attempt = guiding, attempt + 1
            self._hints.append(row_as_written(ceiling))

    def _store(self, attempt: int) -> Store:
        store = Store(self._folder / str(attempt))
        for trial in [*self._carried, *self._own]:
            store.append(trial)
        store.put(self._hints)
        return store

    def _interrupted(self, task: Task, seconds: float) -> Ceiling:
        key = combination_key(task.combination, task.pinned)  # not those with fewer sequences than were asked for
        trials = tuple(trial for trial in self._own if trial.combination_key == key)
        observations = [o for trial in trials if (o := interpret(trial, task.verify)) is not None]
        bracket = bracket_of(observations, Space())
        return Ceiling(
            combination=task.combination,
            machine=self._machine,
            status=Status.INCONCLUSIVE,
            bracket=bracket,
            verify=task.verify,
            why=f"the time was up after {len(trials)} launches; {_words(bracket)}",
            trials=trials,
            seconds=seconds,
            launches=len(trials),
            measured_at=trials[-1].started_at if trials else "",
            settings=task.settings,
        )

    # The listener of the search

    def resumed(self, trials: Sequence[Trial]) -> None:  # noqa: ARG002  # the listener's protocol
        self._check()

    def launching(self, step: Try, launch: int, bracket: Bracket) -> None:  # noqa: ARG002  # the listener's protocol
        self._check()

    def running(self, stage: Stage, age_seconds: float) -> None:  # noqa: ARG002  # the listener's protocol
        self._check()

    def finished(self, trial: Trial) -> None:
        self._own.append(trial)
        self._emit(Streamed(self._job.cell.key, Known(self._machine, trial), self._log(trial)))

    def _check(self) -> None:
        if time.time() >= self._job.until:
            raise Expired

    def _log(self, trial: Trial) -> bytes:
        with contextlib.suppress(OSError), self.store.log_path(trial.id).open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - LOG_BYTES))
            return zlib.compress(log.read())
        return b""


def _words(bracket: Bracket) -> str:
    serves = "nothing was seen to serve" if bracket.serves is None else f"{bracket.serves:,} served"
    refused = "nothing was refused" if bracket.refused is None else f"{bracket.refused:,} was refused"
    return f"{serves}, {refused}"


def describe(node: FleetNode, engines: Sequence[EngineSpec], makes_engines: bool, driver_version: str) -> FleetNode:
    """Fill in what only the node itself can say; ``node`` holds what Ray says of it. May make engines (minutes)."""
    if __version__ != driver_version:
        return replace(node, problem=f"it has prober {__version__}, and the driver {driver_version}")
    here = nvml.inventory(None)
    types = sorted({gpu.name for gpu in here.gpus})
    problem = None
    if node.gpus and not types:
        problem = f"Ray offers {node.gpus} GPUs, and the driver shows none ({here.problem})"
    elif len(types) > 1 and node.gpus:
        problem = f"GPUs of several types on one node cannot be told apart by Ray: {', '.join(types)}"
    known = {wish.name: (node_engine.make if makes_engines else node_engine.look)(wish) for wish in engines}
    return replace(
        node,
        gpu=types[0] if node.gpus and types else system.cpu_name(),
        gpus=min(node.gpus, len(here.gpus)),
        driver=here.driver if node.gpus else None,
        engines=known,
        problem=problem,
        notes=tuple(f"GPU {gpu.index} is busy: {idle.describe(gpu)}" for gpu in here.gpus if not gpu.is_idle),
    )
