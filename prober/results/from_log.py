"""Import rows from vLLM startup logs.

Pure. A log proves that a length starts or is refused for capacity. It never proves that a request was served, so
``max_model_len`` stays empty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from prober.records import Figures, Outcome, Source, UsageError, Verdict
from prober.results.from_ceiling import public_model
from prober.results.schema import Row
from prober.results.text import public_text

_REFUSALS = (Outcome.KV_TOO_SMALL, Outcome.NO_KV_MEMORY, Outcome.DEVICE_OOM, Outcome.UNSERVABLE)


@dataclass(frozen=True, slots=True)
class ImportFields:
    """Facts that the user supplies about a log. ``None``: take it from the log, or leave it empty."""

    model: str | None = None
    model_revision: str | None = None
    gpu: str | None = None
    gpu_memory_mib: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    gpu_memory_utilization: float | None = None
    vllm_version: str | None = None
    measured_at: str | None = None
    source_url: str | None = None


def import_row(verdict: Verdict, fields: ImportFields, prober_version: str) -> Row:
    """Convert the verdict of a log into a row.

    Raises UsageError if the log shows neither a start nor a refusal for capacity, or lacks the model or the GPU.
    """
    if verdict.outcome is not Outcome.READY and verdict.outcome not in _REFUSALS:
        raise UsageError(f"Only a start or a refusal for capacity can be imported; this log is: {verdict.outcome}.")
    row = _base_row(verdict.figures, fields)
    row = _with_figures(row, verdict.figures)
    length = verdict.figures.requested_max_model_len
    if verdict.outcome is Outcome.READY:
        # Without a requested length, the server started with the one it chose.
        row = replace(row, starts_max_model_len=length or verdict.figures.estimated_max_len)
    else:
        evidence = public_text(verdict.evidence) or None
        row = replace(row, refused_max_model_len=length, refused_outcome=verdict.outcome, refused_evidence=evidence)
    if verdict.outcome is Outcome.UNSERVABLE:
        row = replace(row, starts_max_model_len=length)
    return replace(row, prober_version=prober_version)


def unknown(row: Row) -> tuple[str, ...]:
    """Return the flags that supply what is missing from the row."""
    flags = {
        "model_revision": "--model-revision",
        "gpu_memory_mib": "--gpu-memory-mib",
        "tensor_parallel_size": "--tp",
        "gpu_memory_utilization": "--gpu-memory-utilization",
        "vllm_version": "--vllm",
        "measured_at": "--date",
    }
    return tuple(flag for name, flag in flags.items() if getattr(row, name) is None)


def _base_row(figures: Figures, fields: ImportFields) -> Row:
    model = (fields.model or figures.model or "").strip()
    if not model:
        raise UsageError("The log does not name the model; say it with --model.")
    gpu = (fields.gpu or "").strip()
    if not gpu:
        raise UsageError("A log does not name the device it ran on; say it with --gpu.")
    tensor = fields.tensor_parallel_size or figures.tensor_parallel_size
    pipeline = fields.pipeline_parallel_size or figures.pipeline_parallel_size
    return Row(
        model=public_model(model),
        model_revision=fields.model_revision,
        gpu=gpu,
        gpu_memory_mib=fields.gpu_memory_mib,
        gpu_count=tensor * pipeline if tensor and pipeline else None,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        gpu_memory_utilization=fields.gpu_memory_utilization or figures.gpu_memory_utilization,
        vllm_version=fields.vllm_version or figures.vllm_version,
        measured_at=fields.measured_at,
        source=Source.IMPORTED,
        source_url=fields.source_url,
    )


def _with_figures(row: Row, figures: Figures) -> Row:
    return replace(
        row,
        estimated_max_model_len=figures.estimated_max_len,
        num_gpu_blocks=figures.gpu_blocks,
        block_size=figures.block_size,
        kv_cache_tokens=figures.kv_cache_tokens,
        kv_cache_gib=figures.available_gib,
        weights_gib=figures.weights_gib,
        max_num_seqs=figures.max_num_seqs,
        max_num_batched_tokens=figures.max_num_batched_tokens,
    )
