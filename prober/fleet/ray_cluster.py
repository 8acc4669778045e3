"""Run jobs on the nodes of a Ray cluster. One Ray task is one search; the driver says on which node.

A task is never retried by Ray, which would hand it the arguments of its first start: a lost one comes back as ``Lost``
and is started anew with what is known by then. What a task itself says, failures included, is an answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from prober import __version__
from prober.fleet import node as fleet_node
from prober.fleet.jobs import FleetNode
from prober.fleet.plan import EngineSpec
from prober.fleet.protocol import Answered, End, Event, Job, Lost, Reply, Streamed
from prober.fleet.scheduler import Executor
from prober.records import NotReady

SearchHere = Callable[[Job, Callable[[Streamed], None]], Reply]

POLL_SECONDS = 0.5
SURVEY_SECONDS = 180.0
MAKE_SECONDS = 7200.0
END_SECONDS = 45.0  # for cancelled searches to end what they had started, and again for what they left
CONNECT_SECONDS = 10.0
MIB = 2**20
# Ray would kill the supervisor of a trial with its worker; left alive, it ends the trial's whole tree.
WORKER_ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "false"}
LOCAL = "local"
# Makes 127.0.0.1 a Ray's own address, so that nothing of it can be reached from elsewhere; read when it is imported.
LOCAL_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


class RayFleet(Executor):
    """A connection to a running Ray cluster; ``local``: one of this machine alone, which ends with it.

    Raises NotReady where there is none.
    """

    def __init__(
        self, address: str | None, search: SearchHere = fleet_node.search, end_seconds: float = END_SECONDS
    ) -> None:
        self._signals = _Signals()
        os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", **(LOCAL_ENVIRONMENT if address == LOCAL else {})})
        ray = self._ray = _ray()
        _refuse_silence(address or os.environ.get("RAY_ADDRESS") or "auto")
        try:
            ray.init(
                address=address or "auto",
                namespace="prober",
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"env_vars": WORKER_ENVIRONMENT},
                **({"include_dashboard": False} if address == LOCAL else {}),
            )
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise NotReady(f"there is no Ray cluster at {address or 'this machine'}: {_first_line(error)}") from error
        finally:
            self._signals.take_over()
        self._task = ray.remote(max_calls=0, max_retries=0)(_on_node)  # max_calls: we hold no GPU between searches
        self._search, self._end_seconds = search, end_seconds
        here = ray.get_runtime_context().get_node_id()
        self._ledger = ray.remote(num_cpus=0)(TrialRelay).options(scheduling_strategy=_on(here)).remote()
        self._running: dict[Any, tuple[str, str]] = {}  # task's reference -> key of the cell, id of the node

    def __enter__(self) -> RayFleet:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            self._ray.shutdown()
            self._signals.give_back()

    def survey(self, engines: Sequence[EngineSpec], makes_engines: bool = False) -> list[FleetNode]:
        """Let every node describe itself. One that does not answer is listed with that problem."""
        describe = self._ray.remote(num_cpus=0, max_retries=0)(fleet_node.describe)
        nodes = {n["NodeID"]: _as_ray_says(n) for n in self._ray.nodes() if n["Alive"]}
        asked = {
            describe.options(scheduling_strategy=_on(node.id)).remote(node, engines, makes_engines, __version__): node
            for node in nodes.values()
        }
        limit = MAKE_SECONDS if makes_engines else SURVEY_SECONDS
        answered = self._wait_for_all(list(asked), limit)
        found = [self._described(ref, node) if ref in answered else _silent(node, limit) for ref, node in asked.items()]
        for ref in set(asked) - set(answered):
            self._ray.cancel(ref, force=True)
        return sorted(found, key=lambda node: (node.gpu, node.name, node.id))

    def _wait_for_all(self, refs: list[Any], seconds: float) -> list[Any]:
        until = time.monotonic() + seconds
        while True:
            ended, left = self._ray.wait(refs, num_returns=len(refs), timeout=POLL_SECONDS)
            self._signals.act()
            if not left or time.monotonic() >= until:
                return list(ended)

    def _described(self, ref: Any, node: FleetNode) -> FleetNode:
        try:
            described: FleetNode = self._ray.get(ref)
        except Exception as error:  # whatever is wrong on that node, the others are not stopped by it
            return replace(node, problem=f"it does not run the prober: {_last_line(error)}")
        return described

    def start(self, job: Job, node: FleetNode) -> None:
        """Start a job on exactly that node, with its GPUs and host memory accounted for by Ray, too."""
        cell = job.cell
        task = self._task.options(
            num_gpus=cell.gpus,
            num_cpus=0 if cell.gpus else 1,
            memory=None if node.host_memory_mib is None else cell.host_memory_mib * MIB,
            scheduling_strategy=_on(node.id),
            name=f"prober {cell.combination.model}",
        )
        self._running[task.remote(self._search, job, self._ledger)] = (cell.key, node.id)

    def wait(self, seconds: float) -> Sequence[Event]:
        """Return what happened, waiting at most so long for a job to end; trials first."""
        if self._running:
            ended, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
            more, _ = self._ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
            ended = list(dict.fromkeys([*ended, *more]))
        else:
            ended = []
            time.sleep(seconds)
        self._signals.act()
        streamed: list[Event] = list(self._ray.get(self._ledger.take.remote()))
        return [*streamed, *map(self._ended, ended)]

    def stop(self) -> Sequence[Event]:
        """Interrupt every job, as Ctrl-C would; return once no trial lives on any node that can still be reached.

        A search inside one long call hears no interrupt: its worker is killed, and its node ends what it had started.
        """
        running = list(self._running)
        if running:
            for ref in running:
                self._ray.cancel(ref)
            _, stuck = self._ray.wait(running, num_returns=len(running), timeout=self._end_seconds)
            for ref in stuck:
                self._ray.cancel(ref, force=True)
            self._ray.wait(running, num_returns=len(running), timeout=self._end_seconds)
            self._end_left_over({self._running[ref][1] for ref in stuck})
        try:
            events: list[Event] = list(self._ray.get(self._ledger.take.remote(), timeout=self._end_seconds))
        except self._ray.exceptions.RayError:
            events = []  # the connection is gone, and with it what had not been told
        return [*events, *map(self._ended, running)]

    def _end_left_over(self, nodes: Collection[str]) -> None:
        end = self._ray.remote(num_cpus=0, max_retries=0)(fleet_node.end_left_over)
        ended = [end.options(scheduling_strategy=_on(node)).remote() for node in nodes if self._is_alive(node)]
        if ended:
            self._ray.wait(ended, num_returns=len(ended), timeout=END_SECONDS)

    def _ended(self, ref: Any) -> Event:
        key, node = self._running.pop(ref)
        errors = self._ray.exceptions
        gone = (errors.NodeDiedError, errors.TaskUnschedulableError, errors.LocalRayletDiedError)
        try:
            return Answered(key, self._ray.get(ref, timeout=0))
        except errors.TaskCancelledError:
            return Lost(key, "it was stopped", node_is_gone=False)
        except errors.RayTaskError as error:
            return Answered(key, Reply(End.FAILED, f"the search ended in an error of its own: {_last_line(error)}"))
        except errors.RayError as error:
            is_gone = isinstance(error, gone) or not self._is_alive(node)
            return Lost(key, f"the node is lost ({_first_line(error)})" if is_gone else _first_line(error), is_gone)

    def _is_alive(self, node: str) -> bool:
        return any(n["NodeID"] == node and n["Alive"] for n in self._ray.nodes())


class _Signals:
    """Ctrl-C and SIGTERM, acted upon between Ray's calls: an exception from a handler confuses the call it falls into.

    Ray also takes SIGTERM over when it connects; what was there before is what the signal means to the command.
    """

    def __init__(self) -> None:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self._came: int | None = None

    def take_over(self) -> None:
        for number in self._before:
            signal.signal(number, self._note)

    def give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def act(self) -> None:
        """Do now what a signal that came in between asks for."""
        if self._came is not None:
            number, self._came = self._came, None
            handler = self._before[signal.Signals(number)]
            if callable(handler):
                handler(number, None)
            elif handler is signal.SIG_DFL:
                raise KeyboardInterrupt

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._came = number


class TrialRelay:
    """Where running searches tell their trials, next to the driver. It runs as a Ray actor."""

    def __init__(self) -> None:
        self._told: list[Streamed] = []

    def tell(self, streamed: Streamed) -> None:
        self._told.append(streamed)

    def take(self) -> list[Streamed]:
        told, self._told = self._told, []
        return told


def _on_node(search: SearchHere, job: Job, ledger: Any) -> Reply:
    """The body of a task: returns only after the ledger has every trial."""
    ray = _ray()
    return search(job, lambda streamed: ray.get(ledger.tell.remote(streamed)))


def _on(node_id: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def _as_ray_says(node: Mapping[str, Any]) -> FleetNode:
    resources, labels = node["Resources"], node.get("Labels") or {}
    prefix = "accelerator_type:"
    accelerators = [name.removeprefix(prefix) for name in resources if name.startswith(prefix)]
    accelerator = labels.get("ray.io/accelerator-type") or next(iter(accelerators), None)
    memory = resources.get("memory")
    return FleetNode(
        id=node["NodeID"],
        name=node.get("NodeName") or node["NodeManagerAddress"],
        gpu=accelerator or "unknown",
        gpus=int(resources.get("GPU", 0)),
        accelerator=accelerator,
        host_memory_mib=None if memory is None else int(memory) // MIB,
    )


def _refuse_silence(address: str) -> None:
    """Raise NotReady where nobody listens at HOST:PORT: Ray would end the command, with 1 for a fallen ceiling."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():  # auto, local, ray://HOST:PORT
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise NotReady(f"there is no Ray cluster at {address}: {error.strerror or error}") from error


def _silent(node: FleetNode, seconds: float) -> FleetNode:
    return replace(node, problem=f"it did not describe itself within {seconds:.0f} s")


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise NotReady("A fleet needs Ray: pip install ray.") from None
    with contextlib.suppress(ImportError):
        import ray.exceptions
    return ray


def _first_line(error: BaseException) -> str:
    """What Ray says, without the explanations that follow its first sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". ")[0]


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
