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
from prober.engine.install import Engine, inspect, settings
from prober.fleet import node_engine
from prober.fleet.jobs import FleetNode
from prober.fleet.migrated_trials import recorded_here, split, still_guiding
from prober.fleet.plan import EngineSpec
from prober.fleet.protocol import End, Job, Known, Reply, Streamed
from prober.host import idle, nvml, system
from prober.host.tempdir import private_folder
from prober.measure import devices
from prober.measure.devices import Devices
from prober.measure.measure import measure_one, row_as_written
from prober.measure.monitor import launcher
from prober.measure.request import Request
from prober.measure.search_loop import Launcher, combination_key
from prober.records import Bracket, Ceiling, NotReady, ProberError, Stage, Status, Trial
from prober.results.schema import Row
from prober.results.store import Store
from prober.search.interpret import interpret
from prober.search.next_length import Space, Try
from prober.search.next_length import bracket as bracket_of
from prober.trial.process import output_of

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
    with devices.hold(engine, device, job.cell.gpus, None, lambda _: None, job.wait_seconds) as held:
        if held.machine.gpu != job.cell.gpu:
            return Reply(End.NOT_READY, f"the GPU is a {held.machine.gpu}, not a {job.cell.gpu}")
        with private_folder(Path(tempfile.gettempdir())) as folder:
            search_here = Search(job, held, folder, emit)
            with launcher(held, search_here.store, search_here.request) as launch:
                return search_here.run(launch)


@cache
def _engine(python: Path) -> Engine:
    """Inspected once per worker: it takes a good part of a second."""
    return inspect(python, output_of)


class Search:
    """One job's search on this machine. It starts from the trials of this machine and is guided by those of others."""

    def __init__(self, job: Job, held: Devices, folder: Path, emit: Emit) -> None:
        self._job, self._devices, self._folder, self._emit = job, held, folder, emit
        self.request = Request(
            combinations=[job.cell.combination],
            python=held.engine.python,
            results=folder,
            low=job.low,
            high=job.high,
            verify=job.verify,
        )
        environment = settings(self.request.environment)
        self._own, self._carried = split(job.known, held.machine, environment)
        self._own += recorded_here(job.recorded, self._own, held.machine, environment)
        self._hints: list[Row] = list(job.hints)
        self._before = len(self._own)
        self.store = Store(folder)  # holds the logs; the trials of each attempt have a store of their own

    def run(self, launch: Launcher) -> Reply:
        """Search until the answer rests on trials of this machine alone, or until the time is up."""
        began = time.monotonic()
        try:
            ceiling = self._settled(launch)
        except Expired:
            ceiling = self._interrupted(time.monotonic() - began)
            return Reply(End.EXPIRED, ceiling.why, row_as_written(ceiling) if ceiling.trials else None)
        own = {trial.id for trial in self._own}
        trials = tuple(trial for trial in ceiling.trials if trial.id in own)
        ceiling = replace(ceiling, trials=trials, launches=len(self._own) - self._before or len(trials))
        return Reply(End.ANSWERED, ceiling.why, row_as_written(ceiling))

    def _settled(self, launch: Launcher) -> Ceiling:
        # Until the model is downloaded here, assume the commit that other trials of this run had.
        revisions = (one.trial.model_revision for one in reversed(self._job.known))
        assumed = next((revision for revision in revisions if revision is not None), None)
        attempt = 0
        while True:
            store = self._store(attempt)
            combination = self._job.cell.combination
            ceiling = measure_one(self.request, combination, self._devices, store, launch, self, assumed)
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

    def _interrupted(self, seconds: float) -> Ceiling:
        combination, verify = self._job.cell.combination, self._job.verify
        # Without the trials whose --max-num-seqs the search had lowered: they have another key.
        trials = tuple(t for t in self._own if t.combination_key == combination_key(combination, t.model_revision))
        observations = [o for trial in trials if (o := interpret(trial, verify)) is not None]
        bracket = bracket_of(observations, Space())
        return Ceiling(
            combination=combination,
            machine=self._devices.machine,
            status=Status.INCONCLUSIVE,
            bracket=bracket,
            verify=verify,
            why=f"the time was up after {len(trials)} launches; {_words(bracket)}",
            trials=trials,
            seconds=seconds,
            launches=len(trials),
            measured_at=trials[-1].started_at if trials else "",
            settings=settings(self.request.environment),
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
        self._emit(Streamed(self._job.cell.key, Known(self._devices.machine, trial), self._log(trial)))

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
    known = {engine.name: (node_engine.make if makes_engines else node_engine.look)(engine) for engine in engines}
    return replace(
        node,
        gpu=types[0] if node.gpus and types else system.cpu_name(),
        gpus=min(node.gpus, len(here.gpus)),
        driver=here.driver if node.gpus else None,
        engines=known,
        problem=problem,
        notes=tuple(f"GPU {gpu.index} is busy: {idle.describe(gpu)}" for gpu in here.gpus if not gpu.is_idle),
    )
