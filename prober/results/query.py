"""The nouns of a look-up: what is asked of the matrix, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from prober.records import CompileState, Entrypoint
from prober.results.schema import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What is asked. ``None`` leaves it open. ``need`` turns the question round: what serves so many tokens?"""

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
    concurrency: int | None = None  # such requests at once


class Grade(StrEnum):
    """How a row answers, best first."""

    EXACT = "exact"  # measured for what was asked
    BOUND = "bound"  # measured under harder conditions: what was asked should serve at least as much
    UNPROVEN = "unproven"  # measured, but no request of full length was answered
    REPORTED = "reported"  # somebody's log or a public report, not measured by the prober


@dataclass(frozen=True, slots=True)
class Hit:
    """One combination that answers. ``row`` is the lowest of its machines'; a row is only ever about one machine."""

    grade: Grade
    row: Row
    machines: int
    highest: int | None  # the highest proven ceiling among the machines
    differs: tuple[str, ...]  # of a bound: what was measured instead
    age_days: int | None
    version_distance: str


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What the matrix knows. Nothing: no hits, and then what to try instead."""

    question: Query
    hits: tuple[Hit, ...]
    did_you_mean: tuple[str, ...]
    command: str | None  # measures what was asked; None: the question names no model
    known_gpus: tuple[str, ...] = ()  # of no hits: where something is known of this very model
    is_empty: bool = False  # the matrix holds no row at all

    @property
    def is_found(self) -> bool:
        """Something is known, be it second-class."""
        return bool(self.hits)
