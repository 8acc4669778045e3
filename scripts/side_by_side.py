"""Compare five methods of finding a max_model_len on the real engine.

    .venv/bin/python scripts/side_by_side.py PYTHON… [--only MODEL] [--output results/bench.csv]

For each interpreter that has vLLM and each tiny model: the usual tutorial loop (double from 4,096 until a start
fails), doubling and then halving to one token, the same with a request of full length at each start, vLLM's own
``--max-model-len auto``, and the prober. Each answer is then tested with a request of that length.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from prober.cli.progress import PlainDisplay
from prober.engine.install import Engine, inspect
from prober.measure import devices
from prober.measure.monitor import launcher
from prober.measure.request import Request
from prober.measure.search_loop import Task, measure
from prober.records import Combination, CompileState, Outcome, Verify
from prober.results.store import Store
from prober.search.next_length import LOWEST
from prober.trial.process import output_of
from prober.trial.run import TrialContext, attempt
from prober.trial.timeouts import Limits

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "prober" / "models" / "tiny-llama"
FIRST = 4096
LIMIT = 1_048_576


@dataclass(frozen=True)
class Subject:
    """A tiny model and its KV cache size."""

    folder: Path
    kv_mib: int
    flags: tuple[str, ...] = ()


SUBJECTS = (
    Subject(TINY, 64),
    Subject(ROOT / "tests" / "models" / "tiny-gemma3", 32),
    # Its CPU kernel takes one chunk of the state-space scan at a time (mamba_mixer2.py, 0.32.0).
    Subject(ROOT / "tests" / "models" / "tiny-granite-hybrid", 8, ("--max-num-batched-tokens", "128")),
)


@dataclass
class Result:
    """The answer of one method."""

    way: str
    vllm_version: str
    model: str
    kv_mib: int
    launches: int
    seconds: float
    answer: int | None
    is_answered: bool | None
    machine: str
    measured_at: str


class Starter:
    """Starts vLLM at one length after another and counts the starts."""

    def __init__(self, engine: Engine, combination: Combination, folder: Path) -> None:
        self.engine, self.combination, self.folder = engine, combination, folder
        self.launches = 0

    def shows(self, length: int | None, verify: Verify, flags: tuple[str, ...] = ()) -> tuple[Outcome, int | None]:
        self.launches += 1
        flagged = Combination(
            self.combination.model,
            compile_state=CompileState.EAGER,
            other_flags=(*self.combination.other_flags, *flags),
        )
        setting = TrialContext(self.engine, flagged, verify, Limits(), self.folder, {"CUDA_VISIBLE_DEVICES": ""})
        verdict, _ = attempt(setting, length, f"bench-{time.monotonic_ns()}", lambda *_: None)
        return verdict.outcome, verdict.figures.requested_max_model_len

    def is_good(self, length: int, verify: Verify) -> bool:
        return self.shows(length, verify)[0] is Outcome.FITS


def double(starter: Starter, verify: Verify = Verify.NONE) -> int | None:
    """The usual tutorial loop."""
    best, length = None, FIRST
    while length <= LIMIT and starter.is_good(length, verify):
        best, length = length, length * 2
    return best


def double_then_halve(starter: Starter, verify: Verify = Verify.NONE) -> int | None:
    best = double(starter, verify)
    low, high = best or LOWEST - 1, min((best or FIRST // 2) * 2, LIMIT + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if starter.is_good(middle, verify) else (low, middle)
    return low if low >= LOWEST else None


def auto(starter: Starter) -> int | None:
    outcome, length = starter.shows(None, Verify.NONE, ("--max-model-len", "auto"))
    return length if outcome is Outcome.FITS else None


def ours(starter: Starter) -> int | None:
    with tempfile.TemporaryDirectory() as folder, devices.hold(starter.engine, "cpu", 1, None, print, 600) as here:
        store = Store(Path(folder))
        task = Task(starter.combination, here.machine)
        with launcher(here, store, Request([starter.combination], starter.engine.python, store.folder)) as launch:
            display = PlainDisplay(starter.combination, Verify.FULL, print)
            ceiling = measure(task, store, launch, display)
    starter.launches += ceiling.launches
    return ceiling.max_model_len


WAYS: tuple[tuple[str, Callable[[Starter], int | None]], ...] = (
    ("double", double),
    ("double then halve", double_then_halve),
    ("the same, asked in full", partial(double_then_halve, verify=Verify.FULL)),
    ("auto", auto),
    ("prober", ours),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("pythons", nargs="+", type=Path)
    parser.add_argument("--only", help="run one model only")
    parser.add_argument("--way", choices=[name for name, _ in WAYS], help="run one method only")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with (
        given.output.open("a", newline="") if given.output else nullcontext() as file,
        tempfile.TemporaryDirectory() as folder,
    ):
        writer = csv.writer(file, lineterminator="\n") if file else None
        if writer and file and file.tell() == 0:
            writer.writerow(field.name for field in fields(Result))
        subjects = [subject for subject in SUBJECTS if given.only in (None, subject.folder.name)]
        for subject, python in itertools.product(subjects, given.pythons):
            engine = inspect(python.absolute(), output_of)
            combination = combination_of(subject, Path(folder))
            for name, way in [way for way in WAYS if given.way in (None, way[0])]:
                result = measured(name, way, engine, combination, subject.kv_mib)
                print(result)
                if writer and file:
                    writer.writerow(getattr(result, field.name) for field in fields(Result))
                    file.flush()


def combination_of(subject: Subject, folder: Path) -> Combination:
    """Yield the subject as vLLM gets it: a copy that has a tokenizer."""
    model = folder / subject.folder.name
    shutil.copytree(TINY, model, dirs_exist_ok=True)
    shutil.copy(subject.folder / "config.json", model)
    space = ("--kv-cache-memory-bytes", str(subject.kv_mib * 2**20))
    flags = ("--load-format", "dummy", "--max-num-seqs", "16", *space, *subject.flags)
    return Combination(str(model), compile_state=CompileState.EAGER, other_flags=flags)


def measured(
    name: str, way: Callable[[Starter], int | None], engine: Engine, combination: Combination, kv_mib: int
) -> Result:
    """Run one method, then test its answer (not counted)."""
    with tempfile.TemporaryDirectory() as folder:
        starter, began = Starter(engine, combination, Path(folder)), time.monotonic()
        answer = way(starter)
        seconds, launches = time.monotonic() - began, starter.launches
        served = None if answer is None else starter.shows(answer, Verify.FULL)[0] is Outcome.FITS
    machine = devices.machine_of(engine, "cpu")
    return Result(
        way=name,
        vllm_version=engine.vllm_version,
        model=Path(combination.model).name,
        kv_mib=kv_mib,
        launches=launches,
        seconds=round(seconds, 1),
        answer=answer,
        is_answered=served,
        machine=f"{machine.gpu}, {(machine.host_memory_mib or 0) // 1024} GiB",
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


if __name__ == "__main__":
    main()
