"""The cells of a night: the plan's product over what the fleet has; what can never run, what is still fresh.

Pure. One cell is one search: a combination, on one type of GPU, with one vLLM.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta

from prober.engine import flags
from prober.fleet.known_rows import Freshness, KnownRows
from prober.fleet.plan import EVERY_TYPE, EngineSpec, ModelSpec, Plan
from prober.measure.request import why_impossible
from prober.records import Combination, CompileState
from prober.results.from_ceiling import public_model
from prober.results.naming import same_gpu
from prober.results.schema import Row
from prober.results.text import public_text

CPU = "cpu"  # what a plan calls a node without a GPU
ANY_GPU = "GPU that can be used"
AGAIN = "-again"  # ends the key of a cell that is measured a second time in one night
RANK_GIB = 4.0  # host memory that one rank of vLLM takes at least: its process, CUDA's context, pinned buffers


@dataclass(frozen=True, slots=True)
class NodeEngine:
    """One vLLM on one node: its version, or why it does not run there."""

    version: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class FleetNode:
    """One machine of the fleet, as it described itself."""

    id: str  # Ray's
    name: str  # for people: its address
    gpu: str  # the device's name; of a node without GPUs the CPU's
    gpus: int = 0  # 0: the CPU
    accelerator: str | None = None  # Ray's name of the type, such as H100
    host_memory_mib: int | None = None  # that Ray may hand out; None: no limit is known
    driver: str | None = None
    engines: Mapping[str, NodeEngine] = field(default_factory=dict)  # by the name of the wish
    problem: str | None = None  # why it cannot be used at all
    notes: tuple[str, ...] = ()  # what a person should know: a GPU is busy now


@dataclass(frozen=True, slots=True)
class Cell:
    """One search."""

    key: str  # the same for the same wish, whatever else the plan holds
    combination: Combination
    gpu: str  # as in FleetNode.gpu
    is_cpu: bool
    engine: EngineSpec
    vllm_version: str | None
    priority: int = 0
    host_memory_mib: int = 0
    expected_launches: int = 3

    @property
    def gpus(self) -> int:
        """GPUs it needs; 0: it runs on the CPU."""
        return 0 if self.is_cpu else self.combination.world_size

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Sorts what comes first to the front: priority, then the largest."""
        return (-self.priority, -self.gpus, -self.host_memory_mib, self.key)


@dataclass(frozen=True, slots=True)
class RefusedCell:
    """A cell of the plan that no machine of this fleet can ever run."""

    model: str
    gpu: str
    tensor_parallel_size: int
    engine: str
    why: str


@dataclass(frozen=True, slots=True)
class Jobs:
    """The plan laid over the fleet."""

    cells: tuple[Cell, ...]  # in the order in which they shall start
    fresh: tuple[tuple[Cell, Row], ...]  # proven already
    refused: tuple[RefusedCell, ...]

    @property
    def expected_launches(self) -> int:
        return sum(cell.expected_launches for cell in self.cells)


def expand_plan(plan: Plan, nodes: Sequence[FleetNode], rows: Iterable[Row], now: datetime) -> Jobs:
    """Lay a plan over a fleet: what to run, what is proven already, what cannot run here and why."""
    by_type = _by_type(nodes)
    known = KnownRows(rows)
    cells, fresh, refused = {}, [], []
    impossible = _Impossible()
    for model, engine, gpu in _wishes(plan, by_type):
        for combination in _combinations(plan, model):
            cell = _fitting(combination, model, engine, gpu, by_type, impossible.why(combination))
            if isinstance(cell, RefusedCell):
                refused.append(cell)
                continue
            row = known.fresh(combination, gpu, _asked(plan, cell, by_type[gpu], now))
            if row is not None:
                fresh.append((cell, row))
            else:
                cells[cell.key] = replace(cell, expected_launches=known.expected_launches(combination, gpu))
    ordered = sorted(cells.values(), key=lambda cell: cell.order)
    return Jobs(tuple(ordered), tuple(fresh), tuple(dict.fromkeys(refused)))


def runs_on(cell: Cell, node: FleetNode) -> bool:
    """Say whether the node could run the cell if nothing else ran there."""
    return (
        node.problem is None
        and node.gpu == cell.gpu
        and (node.gpus == 0) == cell.is_cpu
        and node.gpus >= cell.gpus
        and (node.host_memory_mib is None or node.host_memory_mib >= cell.host_memory_mib)
        and node.engines.get(cell.engine.name, NodeEngine()).problem is None
    )


def _by_type(nodes: Iterable[FleetNode]) -> dict[str, list[FleetNode]]:
    types: dict[str, list[FleetNode]] = defaultdict(list)
    for node in nodes:
        if node.problem is None:
            types[node.gpu].append(node)
    return types


def _wishes(plan: Plan, by_type: Mapping[str, list[FleetNode]]) -> Iterator[tuple[ModelSpec, EngineSpec, str]]:
    """Each model, engine and type of GPU; a type that nobody has is passed on as it was asked for."""
    for model, engine in itertools.product(plan.models, plan.engines):
        types = dict.fromkeys(gpu for asked in model.gpus for gpu in _types(asked, by_type))
        yield from ((model, engine, gpu) for gpu in types)


def _types(asked: str, by_type: Mapping[str, list[FleetNode]]) -> list[str]:
    with_gpus = [gpu for gpu, nodes in by_type.items() if nodes[0].gpus]
    if asked == EVERY_TYPE:
        return with_gpus or [ANY_GPU]
    if asked.casefold() == CPU:
        return [gpu for gpu, nodes in by_type.items() if not nodes[0].gpus] or [asked]
    same = [gpu for gpu in with_gpus if same_gpu(asked, gpu) or by_type[gpu][0].accelerator == asked]
    return same or [asked]


def _combinations(plan: Plan, model: ModelSpec) -> Iterator[Combination]:
    axes = (model.tensor_parallel_sizes, model.utilizations, model.kv_cache_dtypes, model.flags)
    for tp, share, kv, words in itertools.product(*axes):
        given = flags.parse(words)
        yield Combination(
            model=model.model,
            tensor_parallel_size=tp,
            pipeline_parallel_size=int(given.columns.get("pipeline_parallel_size", "1")),
            gpu_memory_utilization=share,
            dtype=given.columns.get("dtype"),
            quantization=given.columns.get("quantization"),
            kv_cache_dtype=kv,
            model_revision=model.revision,
            entrypoint=plan.entrypoint,
            compile_state=CompileState(given.columns.get("compile_state", plan.compile_state)),
            other_flags=given.others,
        )


def _fitting(
    combination: Combination,
    model: ModelSpec,
    engine: EngineSpec,
    gpu: str,
    by_type: Mapping[str, list[FleetNode]],
    why: str | None,
) -> Cell | RefusedCell:
    nodes = by_type.get(gpu, [])
    is_cpu = bool(nodes) and nodes[0].gpus == 0
    gib = model.host_memory_gib if model.host_memory_gib is not None else combination.world_size * RANK_GIB
    cell = Cell(
        key=_key(combination, gpu, engine),
        combination=combination,
        gpu=gpu,
        is_cpu=is_cpu,
        engine=engine,
        vllm_version=engine.version or _version(nodes, engine),
        priority=model.priority,
        host_memory_mib=round(gib * 1024),
    )
    if why is None and any(runs_on(cell, node) for node in nodes):
        return cell
    why = why or _why_nowhere(cell, nodes)
    label = cell.vllm_version or public_text(engine.name)
    return RefusedCell(public_model(combination.model), gpu, combination.tensor_parallel_size, label, public_text(why))


class _Impossible:
    """Why no launch can help, asked once for each model and size: it reads the model's configuration."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], str | None] = {}

    def why(self, combination: Combination) -> str | None:
        about = (combination.model, combination.tensor_parallel_size)
        if about not in self._known:
            self._known[about] = why_impossible(combination)
        return self._known[about]


def _key(combination: Combination, gpu: str, engine: EngineSpec) -> str:
    about = json.dumps([asdict(combination), gpu, engine.name], sort_keys=True)
    return hashlib.sha256(about.encode()).hexdigest()[:16]


def _asked(plan: Plan, cell: Cell, nodes: Iterable[FleetNode], now: datetime) -> Freshness:
    since = None if plan.fresh_days is None else now - timedelta(days=plan.fresh_days)
    return Freshness(since, cell.vllm_version, frozenset(node.driver for node in nodes), plan.verify, plan.high)


def _version(nodes: Iterable[FleetNode], engine: EngineSpec) -> str | None:
    versions = (node.engines[engine.name].version for node in nodes if engine.name in node.engines)
    return next((version for version in versions if version is not None), None)


def _why_nowhere(cell: Cell, nodes: Sequence[FleetNode]) -> str:
    """The first of the reasons that holds for every node."""
    if not nodes:
        return f"the fleet has no {cell.gpu}"
    most = max(node.gpus for node in nodes)
    if most < cell.gpus:
        return f"it needs {cell.gpus} GPUs on one node, and no node has more than {most} of this type"
    engines = [node.engines.get(cell.engine.name, NodeEngine()).problem for node in nodes]
    if all(engines):
        return f"{cell.engine.name} does not run on any of these nodes: {engines[0]}"
    memory = max(node.host_memory_mib or 0 for node in nodes)
    if memory < cell.host_memory_mib:
        asked = f"{cell.host_memory_mib / 1024:g} GiB of host memory"
        return f"it needs {asked}, and no node has more than {memory / 1024:.1f} GiB (host_memory_gib in the plan)"
    return "no single node has the GPUs, the host memory and the engine together"
