"""How busy a fleet is kept: searches that only sleep, on a true cluster. A process of its own, as Ray lingers.

    python fleet_sleep.py ADDRESS

Standard output: one line of JSON with the GPU-seconds slept, the wall time, and how many GPUs there were.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from row_makers import a_trial

from prober.fleet.jobs import Cell, FleetNode, NodeEngine, expand_plan
from prober.fleet.plan import read_plan
from prober.fleet.protocol import End, Job, Known, Reply, Streamed
from prober.fleet.ray_cluster import RayFleet
from prober.fleet.scheduler import Deadline, Schedule
from prober.records import Machine

TRIALS, TRIAL_SECONDS = 2, 2.0
PLAN = """
[[engine]]
version = "0.32.0"
[defaults]
gpus = "H100"
host_memory_gib = 0.5
"""


def sleeping(job: Job, emit: Callable[[Streamed], None]) -> Reply:
    """A search whose trials do nothing for two seconds; in short steps, as a trial is watched."""
    seconds = 0.0 if job.cell.combination.model.startswith("warm") else TRIAL_SECONDS
    for number in range(TRIALS):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.1)
        emit(Streamed(job.cell.key, Known(Machine(job.cell.gpu, "cuda", "m"), a_trial(number + 16))))
    return Reply(End.ANSWERED)


class Nobody:
    """A keeper that keeps nothing."""

    def keep_trial(self, streamed: Streamed) -> None: ...
    def keep_answers(self, answers: Sequence[tuple[Cell, Reply]]) -> None: ...
    def pass_over(self, line: str) -> None: ...


def cells_of(models: str, nodes: Sequence[FleetNode]) -> tuple[Cell, ...]:
    return expand_plan(read_plan(PLAN + models), nodes, (), datetime.now(UTC)).cells


def main() -> None:
    with RayFleet(sys.argv[1], search=sleeping) as fleet:
        nodes = [node for node in fleet.survey(()) if "H100" in node.gpu]
        nodes = [replace(node, engines={"vllm==0.32.0": NodeEngine("0.32.0")}) for node in nodes]
        gpus = sum(node.gpus for node in nodes)

        def drive(cells: Sequence[Cell]) -> float:
            began = time.monotonic()
            jobs = lambda cell, known: Job(cell, until=time.time() + 600, known=known)  # noqa: E731
            answers = Schedule(cells, nodes, fleet, Nobody(), jobs, Deadline(time.time() + 600)).run()
            assert all(answer.end is End.ANSWERED for answer in answers.values())
            return time.monotonic() - began

        drive(cells_of("".join(f'[[model]]\nname = "warm/{n}"\n' for n in range(2 * gpus)), nodes))
        models = "".join(f'[[model]]\nname = "m/{n}"\n' for n in range(2 * gpus))
        models += "".join(f'[[model]]\nname = "l/{n}"\ntp = 2\n' for n in range(gpus // 2))
        cells = cells_of(models, nodes)
        slept = sum(cell.gpus for cell in cells) * TRIALS * TRIAL_SECONDS
        print(json.dumps({"slept": slept, "wall": drive(cells), "gpus": gpus, "cells": len(cells)}))


if __name__ == "__main__":
    main()
