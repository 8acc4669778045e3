"""Answer queries from the matrix, offline: what is known about a model, or what serves a length.

Pure except ``look_up``, which reads the file. Prefers exact rows, then rows that bound the query (same model, GPU type,
parallel sizes and dtypes, measured with no more memory and no less load), then reports; never another GPU type. Does
not import pandas: a lookup takes a fraction of a second.
"""

from __future__ import annotations

import gc
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path

from prober.engine.versions import default_gpu_memory_utilization, version_order
from prober.records import NotReady, Source, Status
from prober.results.answer_text import render_table, to_json
from prober.results.csv_format import Cells, read_cells
from prober.results.naming import near_models, same_gpu, same_model, version_distance
from prober.results.query import Grade, Hit, LookupResult, Query
from prober.results.schema import (
    COLUMNS,
    COMBINATION,
    POSITION,
    SHARED_KEY,
    Row,
    UnreadableRow,
    from_cells,
    to_cells,
    unguard,
)
from prober.results.serve_command import env, flags, is_beyond_limit, yaml

__all__ = [
    "Grade", "Hit", "LookupResult", "Query",
    "answer", "env", "flags", "look_up", "render_table", "to_json", "yaml",
]  # fmt: skip

_ASKED = [c for c in COLUMNS if c.name in COMBINATION and c.name in Query.__dataclass_fields__ and c.name != "model"]
_SAME = tuple(c.name for c in _ASKED if c.kind == "string")
_SIZES = tuple(c.name for c in _ASKED if c.kind == "integer")
# The combination and its source: only reported rows have a URL.
_about = itemgetter(*(POSITION[name] for name in ("source", "source_url", *SHARED_KEY)))
_PROVEN, _STARTS, _STATUS = POSITION["max_model_len"], POSITION["starts_max_model_len"], POSITION["status"]
_MACHINE = POSITION["machine"]
_MODEL, _VERSION = POSITION["model"], POSITION["vllm_version"]
_MEMORY, _COUNT = POSITION["gpu_memory_mib"], POSITION["gpu_count"]
MOST_OF_NEED = 50  # answers to --need: the cheapest proven ones


def look_up(results: Path, question: Query, now: datetime | None = None) -> LookupResult:
    """Answer from a results folder or a matrix file; a missing file is an empty matrix. Raises ``NotReady``."""
    path = results / "matrix.csv" if results.is_dir() or results.suffix != ".csv" else results
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        text = ""
    except (OSError, UnicodeDecodeError) as error:
        raise NotReady(f"{path} cannot be read: {error}.") from error
    with _uncollected():
        return _answer(read_cells(text, str(path)), question, now or datetime.now(UTC))


def answer(rows: Iterable[Row], question: Query, now: datetime) -> LookupResult:
    """Answer from rows in memory."""
    return _answer(map(to_cells, rows), question, now)


def _answer(records: Iterable[Cells], question: Query, now: datetime) -> LookupResult:
    is_candidate = _filter(question)
    model_and_gpu, version_cell = itemgetter(POSITION["model"], POSITION["gpu"]), POSITION["vllm_version"]
    subjects: set[tuple[str, ...]] = set()
    versions: set[str] = set()

    def candidates() -> Iterator[Cells]:
        for cells in records:
            subjects.add(model_and_gpu(cells))
            versions.add(cells[version_cell])
            if is_candidate(cells):
                yield cells

    groups = _grouped(candidates())
    reference = question.vllm_version or max((unguard(v) for v in versions if v), key=version_order, default=None)
    hits = _rank(_hits(groups, question, reference, now), question)
    if question.need is not None:
        hits = hits[:MOST_OF_NEED]
    near: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    if not hits and question.model:
        known = {unguard(model) for model, _ in subjects}
        its_own = {model for model in known if same_model(question.model, model)}
        gpus = tuple(sorted({unguard(gpu) for model, gpu in subjects if unguard(model) in its_own and gpu}))
        near = () if its_own else tuple(near_models(question.model, known))
    return LookupResult(question, hits, near, _command(question), gpus, is_empty=not subjects)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable the garbage collector, which would traverse every cell and find nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _filter(question: Query) -> Callable[[Cells], bool]:
    """Build a cheap filter on raw cells that rejects most records: it dominates the time of a lookup."""
    model_cell, gpu_cell = POSITION["model"], POSITION["gpu"]
    sizes = [(POSITION[name], str(getattr(question, name))) for name in _SIZES if getattr(question, name) is not None]
    models: dict[str, bool] = {}
    gpus: dict[str, bool] = {}

    def matches(asked: str | None, cell: str, seen: dict[str, bool], same: Callable[[str, str], bool]) -> bool:
        if asked is None:
            return True
        if cell not in seen:
            seen[cell] = same(asked, unguard(cell))
        return seen[cell]

    def is_candidate(cells: Cells) -> bool:
        if not matches(question.model, cells[model_cell], models, same_model):
            return False
        if not matches(question.gpu, cells[gpu_cell], gpus, same_gpu):
            return False
        return not sizes or all(cells[index] == size for index, size in sizes)

    return is_candidate


class _Group:
    """One combination across machines. Keeps only the record of the machine with the lowest ceiling."""

    __slots__ = ("highest", "lowest", "lowness", "machines")

    def __init__(self, cells: Cells) -> None:
        self.lowest, self.lowness = cells, _lowness(cells)
        self.highest = _tokens(cells[_PROVEN]) if cells[_PROVEN] else None
        self.machines = {cells[_MACHINE]}

    def add(self, cells: Cells) -> None:
        self.machines.add(cells[_MACHINE])
        if cells[_PROVEN]:
            self.highest = max(self.highest or 0, _tokens(cells[_PROVEN]))
        lowness = _lowness(cells)
        if lowness < self.lowness:
            self.lowest, self.lowness = cells, lowness


def _grouped(candidates: Iterable[Cells]) -> Iterable[_Group]:
    groups: dict[tuple[str, ...], _Group] = {}
    for cells in candidates:
        about = _about(cells)
        group = groups.get(about)
        if group is None:
            groups[about] = _Group(cells)
        else:
            group.add(cells)
    return groups.values()


def _hits(groups: Iterable[_Group], question: Query, reference: str | None, now: datetime) -> list[Hit]:
    """Grade the candidates; for ``need`` the cheapest first, until `MOST_OF_NEED` are found."""
    need, asked = question.need, question.vllm_version
    if need is not None:
        enough = (group for group in groups if group.lowness[1] >= need)
        groups = sorted(enough, key=lambda group: (not _is_version(group, asked), *_cheap_first(group)))
    hits: list[Hit] = []
    settled = 0
    for group in groups:
        if need is not None and settled >= MOST_OF_NEED:
            break
        best = Grade.EXACT if _is_version(group, asked) else Grade.BOUND  # no later group can be better
        row = from_cells(group.lowest)
        grade, differs = _grade(row, question)
        if grade is not None:
            distance = version_distance(row.vllm_version, reference)
            hits.append(Hit(grade, row, len(group.machines), group.highest, differs, _age(row, now), distance))
            settled += grade is best and row.max_model_len is not None
    return hits


def _is_version(group: _Group, asked: str | None) -> bool:
    return asked is None or unguard(group.lowest[_VERSION]) == asked


def _cheap_first(group: _Group) -> tuple[float, int, str]:
    """The order of `_rank` for ``need``, from raw cells."""
    memory, count = group.lowest[_MEMORY], group.lowest[_COUNT]
    total = float(_tokens(memory) * _tokens(count)) if memory and count else float("inf")
    return total, -group.lowness[1], unguard(group.lowest[_MODEL])


def _lowness(cells: Cells) -> tuple[int, int]:
    """Sort key: a machine where nothing fits comes first, an inconclusive one last."""
    if cells[_STATUS] == Status.DOES_NOT_FIT:
        return (0, 0)
    proven, starts = cells[_PROVEN], cells[_STARTS]
    return (1, _tokens(proven)) if proven else (2, _tokens(starts) if starts else 0)


def _tokens(cell: str) -> int:
    try:
        return int(cell)
    except ValueError as error:
        raise UnreadableRow(f"The matrix holds {cell!r} where a number of tokens is expected.") from error


def _grade(row: Row, question: Query) -> tuple[Grade | None, tuple[str, ...]]:
    """Return the row's grade and how it differs from the query; None: it does not answer."""
    if any(not _same(getattr(question, name), getattr(row, name)) for name in _SAME):
        return None, ()
    differs = _differences(row, question)
    if differs is None:
        return None, ()
    if question.need is not None and not _serves(row, question.need, question.concurrency or 1):
        return None, ()
    if question.need is not None and is_beyond_limit(row):
        return None, ()  # beyond the model's limit, output may be wrong: only on explicit request
    if row.source is not Source.MEASURED:
        return Grade.REPORTED, differs
    if question.need is not None and row.max_model_len is None:
        return Grade.UNPROVEN, differs
    if differs:
        # Under harder conditions only a number is a bound: "does not fit" says nothing about easier ones.
        return (Grade.BOUND, differs) if row.max_model_len is not None else (None, ())
    return Grade.EXACT, ()


def _same(asked: str | None, known: str | None) -> bool:
    return asked is None or (known or "auto").casefold() == asked.casefold()


def _differences(row: Row, question: Query) -> tuple[str, ...] | None:
    """List the differences of a row that bounds the query; None: it does not."""
    easier_if_more = (
        ("gpu_memory_mib", question.gpu_memory_mib, row.gpu_memory_mib),
        ("gpu_memory_utilization", question.gpu_memory_utilization, utilization(row)),
    )
    easier_if_less = (
        ("max_num_seqs", question.max_num_seqs, row.max_num_seqs),
        ("max_num_batched_tokens", question.max_num_batched_tokens, row.max_num_batched_tokens),
        ("reserve_mib", 0, row.reserve_mib or 0),
    )
    differs = []
    for settings, sign in ((easier_if_more, 1), (easier_if_less, -1)):
        for name, asked, known in settings:
            if asked is None or asked == known:
                continue
            if known is None or sign * (asked - known) < 0:
                return None
            differs.append(f"{name} {known} where {asked} is asked")
    if question.vllm_version is not None and question.vllm_version != row.vllm_version:
        differs.append(f"vLLM {row.vllm_version or 'of unknown version'} where {question.vllm_version} is asked")
    return tuple(differs)


def utilization(row: Row) -> float | None:
    """Return gpu_memory_utilization as requested, else the default of that vLLM version (CacheConfig)."""
    if row.gpu_memory_utilization is not None or row.vllm_version is None:
        return row.gpu_memory_utilization
    return default_gpu_memory_utilization(row.vllm_version)


def _serves(row: Row, need: int, concurrency: int) -> bool:
    """Whether the row is known to hold ``concurrency`` requests of ``need`` tokens at once."""
    length = row.max_model_len if row.source is Source.MEASURED else None
    if length is None:
        length = row.starts_max_model_len
    if length is None or length < need:
        return False
    if concurrency == 1:
        return True
    if row.max_num_seqs is not None and row.max_num_seqs < concurrency:
        return False
    capacity, block = row.kv_cache_tokens, row.block_size or 1
    if capacity is None and row.num_gpu_blocks is not None and row.block_size is not None:
        capacity = row.num_gpu_blocks * block
    # One block is reserved in recent versions, and each request ends in a block of its own.
    return capacity is not None and capacity - block >= concurrency * -(-need // block) * block


def _age(row: Row, now: datetime) -> int | None:
    try:
        then = datetime.fromisoformat(row.measured_at or "")
    except ValueError:
        return None
    then = then if then.tzinfo else then.replace(tzinfo=UTC)
    return max(0, (now - then).days)


def _rank(hits: list[Hit], question: Query) -> tuple[Hit, ...]:
    """Keep the grades down to the first conclusive one, ordered; cheapest first for ``need``."""
    grades = list(Grade)
    kept: list[Hit] = []
    for grade in grades:
        if any(hit.row.max_model_len is not None or hit.row.status is Status.DOES_NOT_FIT for hit in kept):
            break
        kept += [hit for hit in hits if hit.grade is grade]
    if question.need is not None:
        return tuple(sorted(kept, key=lambda hit: (grades.index(hit.grade), *_cost(hit.row), hit.row.model)))
    # Within a grade, rows that need environment variables come last.
    in_order = sorted(kept, key=lambda hit: (hit.row.environment is not None, _reading_order(hit.row)))
    return tuple(sorted(in_order, key=lambda hit: grades.index(hit.grade)))


def _cost(row: Row) -> tuple[float, int]:
    """Sort key: total GPU memory, unknown last; then the longest first."""
    known = row.gpu_memory_mib is not None and row.gpu_count is not None
    total = float((row.gpu_memory_mib or 0) * (row.gpu_count or 0)) if known else float("inf")
    return total, -(row.max_model_len or row.starts_max_model_len or 0)


def _reading_order(row: Row) -> tuple[str, str, int, tuple[int, ...], int]:
    newest_first = tuple(-part for part in version_order(row.vllm_version or "")[:3])
    return row.model.casefold(), row.gpu, row.gpu_count or 0, newest_first, -(row.max_model_len or 0)


def _command(question: Query) -> str | None:
    """Return the command that measures the queried combination."""
    if question.model is None:
        return None
    words = ["prober", "probe", question.model]
    if question.tensor_parallel_size is not None:
        words += ["--tp", str(question.tensor_parallel_size)]
    if question.gpu_memory_utilization is not None:
        words += ["--gpu-memory-utilization", f"{question.gpu_memory_utilization:g}"]
    if question.entrypoint is not None:
        words += ["--entrypoint", question.entrypoint]
    if question.compile_state is not None:
        words += ["--compile", question.compile_state]
    names = (
        "pipeline_parallel_size",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "max_num_seqs",
        "max_num_batched_tokens",
    )
    passed = [(name, getattr(question, name)) for name in names if getattr(question, name) is not None]
    rest = [word for name, value in passed for word in (f"--{name.replace('_', '-')}", str(value))]
    return shlex.join([*words, "--", *rest] if rest else words)
