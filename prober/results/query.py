"""Types of a lookup: the query and its result."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from prober.records import CompileState, Entrypoint
from prober.results.schema import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A lookup query. ``None`` matches anything; ``need`` searches for what serves that many tokens."""

    model: str | None = None
    gpu: str | None = None
    gpu_memory_mib: int | None = None  # of one device
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    gpu_memory_utilization: float | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    entrypoint: Entrypoint | None = None
    compile_state: CompileState | None = None
    vllm_version: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    need: int | None = None  # tokens of one request
    concurrency: int | None = None  # simultaneous requests of that length


class Grade(StrEnum):
    """How well a row answers the query, best first."""

    EXACT = "exact"  # measured under the requested conditions
    BOUND = "bound"  # measured under harder conditions: a lower bound
    UNPROVEN = "unproven"  # measured, but no full-length request was answered
    REPORTED = "reported"  # an imported log or a public report, not measured by the prober


@dataclass(frozen=True, slots=True)
class Hit:
    """One matching combination. ``row`` is the lowest among its machines; each row is about one machine."""

    grade: Grade
    row: Row
    machines: int
    highest: int | None  # the highest proven ceiling among the machines
    differs: tuple[str, ...]  # of a bound: conditions that differ from the query
    age_days: int | None
    version_distance: str


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The result of a lookup: hits, or suggestions if there are none."""

    question: Query
    hits: tuple[Hit, ...]
    did_you_mean: tuple[str, ...]
    command: str | None  # measures the queried combination; None: the query names no model
    known_gpus: tuple[str, ...] = ()  # without hits: GPUs with rows of this model
    is_empty: bool = False  # the matrix has no rows

    @property
    def is_found(self) -> bool:
        """Whether there are any hits, proven or not."""
        return bool(self.hits)
