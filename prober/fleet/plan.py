"""A plan for many machines, read from TOML: which models, on which GPUs, with which settings and vLLM versions.

Pure. Every mistake is a ``PlanError`` that names the file, the line and the key; nothing is guessed at.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

from prober.engine import flags
from prober.fleet.toml_table import Lines, PlanError, Table
from prober.records import CompileState, Entrypoint, UsageError, Verify
from prober.search.next_length import LOWEST

EVERY_TYPE = "all"
DEFAULT = "default"  # in an axis: vLLM's own default
USES_RAY = "--distributed-executor-backend"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One vLLM: an interpreter that is there on the nodes, or a version that ``uv`` installs on each node."""

    python: str | None = None
    version: str | None = None

    @property
    def name(self) -> str:
        return self.python or f"vllm=={self.version}"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model and its axes; their product is measured."""

    model: str
    revision: str | None = None
    gpus: tuple[str, ...] = (EVERY_TYPE,)
    tensor_parallel_sizes: tuple[int, ...] = (1,)
    utilizations: tuple[float | None, ...] = (None,)
    kv_cache_dtypes: tuple[str | None, ...] = (None,)
    flags: tuple[tuple[str, ...], ...] = ((),)
    priority: int = 0  # higher comes first
    host_memory_gib: float | None = None  # of one start; None: a guess by its ranks


@dataclass(frozen=True, slots=True)
class Plan:
    """What a night shall answer, and what it may take."""

    models: tuple[ModelSpec, ...]
    engines: tuple[EngineSpec, ...]
    name: str = "fleet"
    deadline_hours: float = 8.0
    cell_minutes: float | None = None  # of one search; None: no more than the night
    fresh_days: float | None = None  # None: everything is measured every time
    wait_minutes: float = 1.0  # for a neighbour, before its node is skipped
    retry_minutes: float = 15.0  # after which a skipped node is tried again
    verify: Verify = Verify.FULL
    entrypoint: Entrypoint = Entrypoint.SERVE
    compile_state: CompileState = CompileState.COLD
    low: int = LOWEST
    high: int | None = None


def read_plan(text: str, name: str = "plan.toml") -> Plan:
    """Read a plan. Raises PlanError."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{name} is no TOML: {error}.") from error
    lines = Lines(name, text)
    top = Table(lines, "", document)
    defaults = top.table("defaults")
    models = tuple(_model(table, defaults) for table in top.tables("model"))
    engines = tuple(_engine(table) for table in top.tables("engine"))
    defaults.refuse_unread()
    plan = _plan(top, models, engines)
    top.refuse_unread()
    _refuse_twins(top, engines)
    return plan


def _plan(top: Table, models: tuple[ModelSpec, ...], engines: tuple[EngineSpec, ...]) -> Plan:
    usual = Plan((), ())
    plan = Plan(
        models=models,
        engines=engines,
        name=top.one("name", str, usual.name),
        deadline_hours=top.positive("deadline_hours", usual.deadline_hours),
        cell_minutes=top.positive("cell_minutes", None),
        fresh_days=top.positive("fresh_days", None),
        wait_minutes=top.positive("wait_minutes", usual.wait_minutes),
        retry_minutes=top.positive("retry_minutes", usual.retry_minutes),
        verify=top.choice("verify", Verify, usual.verify),
        entrypoint=top.choice("entrypoint", Entrypoint, usual.entrypoint),
        compile_state=top.choice("compile", CompileState, usual.compile_state),
        low=top.one("low", int, LOWEST),
        high=top.one("high", int, None),
    )
    if plan.low < 2:
        raise top.error("low", "is at least 2 tokens")
    if plan.high is not None and plan.high < plan.low:
        raise top.error("high", f"{plan.high} is below low, {plan.low}")
    return plan


def _engine(table: Table) -> EngineSpec:
    engine = EngineSpec(table.one("python", str, None), table.one("version", str, None))
    table.refuse_unread()
    if (engine.python is None) == (engine.version is None):
        raise table.error("", "an engine has either python (an interpreter on the nodes) or version (made with uv)")
    if engine.version is not None and not re.fullmatch(r"[0-9][0-9A-Za-z.+!_-]*", engine.version):
        raise table.error("version", f"{engine.version!r} is no version such as 0.32.0")
    return engine


def _model(table: Table, defaults: Table) -> ModelSpec:
    name = table.one("name", str, None)
    if not name:
        raise table.error("name", "every model needs one: a Hub name, or a directory on the nodes")
    if name.startswith(("./", "../", "~")):
        raise table.error("name", f"{name!r} depends on who runs it; nodes need an absolute path")
    table = table.over(defaults)
    wish = ModelSpec(
        model=name,
        revision=table.one("revision", str, None),
        gpus=table.axis("gpus", _word, (EVERY_TYPE,)),
        tensor_parallel_sizes=table.axis("tp", _count, (1,)),
        utilizations=table.axis("gpu_memory_utilization", _share, (None,)),
        kv_cache_dtypes=table.axis("kv_cache_dtype", _dtype, (None,)),
        flags=table.axis("flags", _flags, ((),)),
        priority=table.one("priority", int, 0),
        host_memory_gib=table.positive("host_memory_gib", None),
    )
    table.refuse_unread()
    return wish


def _refuse_twins(top: Table, engines: Sequence[EngineSpec]) -> None:
    names = [engine.name for engine in engines]
    twin = next((name for name in names if names.count(name) > 1), None)
    if twin is not None:
        raise top.error("engine", f"{twin} is there twice")


# --- values of an axis; each raises ValueError with what it takes -----------------------------------------------------


def _word(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError('takes names of GPU types such as "H100", "cpu", or "all"')
    return value.strip()


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("takes whole numbers from 1")
    return value


def _share(value: object) -> float | None:
    if value == DEFAULT:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise ValueError('takes shares of the memory such as 0.9, or "default"')
    return float(value)


def _dtype(value: object) -> str | None:
    if not isinstance(value, str) or not value:
        raise ValueError('takes names such as "fp8", or "default"')
    return None if value in (DEFAULT, "auto") else value


def _flags(value: object) -> tuple[str, ...]:
    if not isinstance(value, str):
        raise ValueError('takes command lines such as "--max-num-seqs 8"')
    words = tuple(shlex.split(value))
    try:
        parsed = flags.parse(words)
    except UsageError as error:
        raise ValueError(str(error)) from error
    if words and flags.value_of(words, USES_RAY) == "ray":
        raise ValueError("must not start Ray inside a task: one search stays on its node")
    if not parsed.columns.get("pipeline_parallel_size", "1").isdigit():
        raise ValueError("--pipeline-parallel-size takes a whole number")
    owned = {"kv_cache_dtype": "kv_cache_dtype", "model_revision": "revision"}
    twice = next((key for column, key in owned.items() if column in parsed.columns), None)
    if twice is not None:
        raise ValueError(f"give it as {twice}, which is an axis of the plan")
    return words
