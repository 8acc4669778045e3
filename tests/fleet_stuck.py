"""Searches that hear no interrupt: each has started a process and is inside one long call. A process of its own.

    python fleet_stuck.py ADDRESS

Standard output: one line of JSON, how many of the started processes lived before and after the fleet was stopped.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
from fleet_sleep import cells_of

from prober.fleet.jobs import NodeEngine
from prober.fleet.protocol import End, Job, Reply, Streamed
from prober.fleet.ray_cluster import RayFleet
from prober.trial.process import Launch

SECONDS = "271.8"  # of the sleep that stands for an engine: nothing else on the machine sleeps as long
SEARCHES = 4


def stuck(job: Job, emit: Callable[[Streamed], None]) -> Reply:  # an executor's search
    """One sleep is one call: Python acts on an interrupt only after it."""
    folder = Path(tempfile.mkdtemp())
    with Launch(["sleep", SECONDS], os.environ, folder / "log", f"stuck-{os.getpid()}"):
        time.sleep(float(SECONDS))
    return Reply(End.ANSWERED)


def engines() -> int:
    lines = [one.info["cmdline"] for one in psutil.process_iter(["cmdline"])]
    return sum(line == ["sleep", SECONDS] for line in lines)


def main() -> None:
    with RayFleet(sys.argv[1], search=stuck, end_seconds=3.0) as fleet:
        nodes = [node for node in fleet.survey(()) if "H100" in node.gpu]
        nodes = [replace(node, engines={"vllm==0.32.0": NodeEngine("0.32.0")}) for node in nodes]
        models = "".join(f'[[model]]\nname = "m/{n}"\n' for n in range(SEARCHES))
        for cell, node in zip(cells_of(models, nodes), nodes * SEARCHES, strict=False):
            fleet.start(Job(cell, until=time.time() + 600), node)
        until = time.monotonic() + 60
        while engines() < SEARCHES and time.monotonic() < until:
            time.sleep(0.1)
        before = engines()
        fleet.stop()
        print(json.dumps({"before": before, "after": engines()}))


if __name__ == "__main__":
    main()
