"""A fleet for the tests: Ray nodes on 127.0.0.1, made-up GPUs, the fake engine, and the command that drives it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil
from fake_nvml import Gpu, nvml_environment, write_state
from ray_cluster import LOCAL_ONLY

TESTS = Path(__file__).parent
H100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA L4"
DRIVER = "from prober.cli.main import main; main()"
GIB = 2**30
# Ray notices a dead node within seconds instead of half a minute, and keeps idle workers for the next search.
SETTINGS = {
    "RAY_idle_worker_killing_time_threshold_ms": "30000",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass(frozen=True)
class NodeSpec:
    """One node: so many GPUs of one type. ``memory_gib``: host memory that Ray may hand out."""

    name: str
    gpu: str = H100
    gpus: int = 8
    memory_gib: float = 12
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class FleetCluster:
    """A running cluster."""

    address: str
    raylets: dict[str, int]
    states: dict[str, Path]  # of the made-up GPUs, by node
    gpus: dict[str, tuple[Gpu, ...]]
    environment: dict[str, str]

    def kill(self, name: str) -> None:
        """End a node as a power cut would: everything that runs on it, at once."""
        raylet = psutil.Process(self.raylets[name])
        doomed = [raylet, *raylet.children(recursive=True)]
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    @contextmanager
    def driver(self, *words: str | Path, cwd: Path) -> Iterator[subprocess.Popen[str]]:
        """A running `prober fleet …`, with its answer on a pipe and its progress in a file, ``driver.log``."""
        with (cwd / "driver.log").open("a") as log:
            driver = subprocess.Popen(
                [sys.executable, "-c", DRIVER, "fleet", *map(str, words), "--address", self.address],
                env={**os.environ, **self.environment},
                cwd=cwd,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

        try:
            yield driver
        finally:
            driver.kill()
            driver.communicate()

    def drive(self, *words: str | Path, cwd: Path, timeout: float = 120) -> tuple[int, str, str]:
        """Run it to its end: exit code, answer, progress."""
        with self.driver(*words, cwd=cwd) as driver:
            answer, _ = driver.communicate(timeout=timeout)
        return driver.returncode, answer, (cwd / "driver.log").read_text()


@contextmanager
def fleet_cluster(
    folder: Path, stub: Path, specs: Sequence[NodeSpec], environment: Mapping[str, str]
) -> Iterator[FleetCluster]:
    """Start the nodes (and a head without GPUs), and end every process of them afterwards."""
    sockets = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a socket's path has at most 107 characters
    environment = {**os.environ, **LOCAL_ONLY, **SETTINGS, **environment}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), environment.get("PYTHONPATH", "")])
    states, made = {}, {}
    nodes: list[dict[str, object]] = [{"name": "head", "num_cpus": 1, "num_gpus": 0, "memory": 2 * GIB}]
    for number, spec in enumerate(specs):
        made[spec.name] = tuple(
            Gpu(
                uuid=f"GPU-{number:04d}{n:04d}-0000-0000-0000-{os.getpid():012d}",
                name=spec.gpu,
                pci=f"00000000:{n + 1:02X}:00.0",
            )
            for n in range(spec.gpus)
        )
        states[spec.name] = write_state(folder / f"{spec.name}.nvml", made[spec.name])
        variables = {**environment, **nvml_environment(stub, states[spec.name]), **spec.environment}
        # Two CPUs: Ray starts as many workers ahead for each driver, and searches ask for none.
        accelerator = {"accelerator_type:" + spec.gpu.split()[1]: 1}
        nodes.append(
            {"name": spec.name, "num_cpus": 2, "num_gpus": spec.gpus, "resources": accelerator,
             "memory": int(spec.memory_gib * GIB), "env_vars": variables}
        )  # fmt: skip
    with (folder / "cluster.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(TESTS / "ray_cluster.py")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    tree: set[psutil.Process] = set()
    try:
        raylets, address = _started(process, {"folder": str(sockets), "nodes": nodes}, folder)
        yield FleetCluster(address, raylets, states, made, environment)
        tree = set(psutil.Process(process.pid).children(recursive=True))
    finally:
        _end(process, tree, sockets)


def _started(process: subprocess.Popen[str], wanted: object, folder: Path) -> tuple[dict[str, int], str]:
    stdin, stdout = _pipes(process)
    stdin.write(json.dumps(wanted) + "\n")
    stdin.flush()
    line = stdout.readline()
    assert line, (folder / "cluster.log").read_text()
    up = json.loads(line)
    return up["pids"], up["address"]


def _end(process: subprocess.Popen[str], tree: set[psutil.Process], sockets: Path) -> None:
    stdin, stdout = _pipes(process)
    with suppress(psutil.NoSuchProcess):
        tree |= set(psutil.Process(process.pid).children(recursive=True))
    stdin.close()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    stdout.close()
    for one in tree:
        with suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGKILL)
    psutil.wait_procs(tree, timeout=10)
    for _ in range(50):  # an agent that is just ending may still write there
        shutil.rmtree(sockets, ignore_errors=True)
        if not sockets.exists():
            break
        time.sleep(0.1)


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout
