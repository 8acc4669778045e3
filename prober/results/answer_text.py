"""Lookup results as text: a table for the terminal, JSON for programs.

Pure. Every number comes with its age and version distance; unproven lengths are labelled as such.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from prober.records import Source, Status
from prober.results.query import Grade, Hit, LookupResult
from prober.results.schema import Row, to_values
from prober.results.serve_command import Unproven, flags
from prober.results.table import text_table
from prober.results.text import printable

_TITLES = {
    Grade.EXACT: "Measured:",
    Grade.BOUND: "Measured under other conditions; what you asked for should serve at least this:",
    Grade.UNPROVEN: "The server started at this length, but no full-length request was answered:",
    Grade.REPORTED: "Not measured by the prober, only reported (a start proves no service):",
}
_HEADINGS = ("model", "GPU", "TP", "PP", "util", "KV dtype", "vLLM", "max_model_len", "starts", "status", "age", "")
_SUBJECT_COLUMNS = _HEADINGS.index("max_model_len")  # the columns before it identify a row
_NUMBERS = {2, 3, 4, 7, 8}


def to_json(answer: LookupResult) -> str:
    """Write the result as one JSON object; every hit includes its whole row."""
    return json.dumps(
        {
            "found": answer.is_found,
            "hits": [_hit_values(hit) for hit in answer.hits],
            "did_you_mean": list(answer.did_you_mean),
            "known_gpus": list(answer.known_gpus),
            "command": answer.command,
        },
        ensure_ascii=False,
        indent=2,
    )


def _hit_values(hit: Hit) -> dict[str, Any]:
    try:
        serve = flags(hit.row)
    except Unproven:
        serve = None
    return {
        "grade": str(hit.grade),
        "machines": hit.machines,
        "highest_max_model_len": hit.highest,
        "differs": list(hit.differs),
        "age_days": hit.age_days,
        "version_distance": hit.version_distance,
        "serve_flags": serve,
        "row": to_values(hit.row),
    }


def render_table(answer: LookupResult) -> str:
    """Write the result for a terminal, one table per grade, with control characters replaced."""
    if not answer.is_found:
        return _render_nothing(answer)
    blocks = []
    for grade in Grade:
        hits = [hit for hit in answer.hits if hit.grade is grade]
        if hits:
            blocks.append(
                "\n".join([_TITLES[grade], text_table([_HEADINGS, *_lines(hits)], _NUMBERS), *_remarks(hits)])
            )
    return "\n\n".join(blocks) + "\n"


def _render_nothing(answer: LookupResult) -> str:
    question = answer.question
    about = printable(question.model) if question.model else "any model"
    lines = [f"Nothing is known about {about} under these conditions."]
    if question.need is not None:
        times = f", {question.concurrency} requests at once" if question.concurrency else ""
        lines = [f"Nothing is known that serves {question.need:,} tokens{times} with {about}."]
    if answer.known_gpus:
        lines.append(f"There are rows of {about} on {', '.join(map(printable, answer.known_gpus))}.")
    if answer.did_you_mean:
        lines.append("Did you mean " + " or ".join(map(printable, answer.did_you_mean)) + "?")
    if answer.command:
        lines.append(f"To measure it: {printable(answer.command)}")
    return "\n".join(lines) + "\n"


def _lines(hits: list[Hit]) -> list[tuple[str, ...]]:
    """One line per hit. Hits that would look identical end with the settings that distinguish them."""
    lines = [_cells(hit) for hit in hits]
    alike = Counter(line[:_SUBJECT_COLUMNS] for line in lines)
    return [
        (*line[:-1], f"{line[-1]}  {_settings(hit.row)}".rstrip()) if alike[line[:_SUBJECT_COLUMNS]] > 1 else line
        for hit, line in zip(hits, lines, strict=True)
    ]


def _settings(row: Row) -> str:
    parts = (row.dtype, row.quantization, row.entrypoint, row.compile_state, row.other_flags)
    return " ".join(part for part in parts if part)


def _cells(hit: Hit) -> tuple[str, ...]:
    row = hit.row
    gpu = row.gpu if (row.gpu_count or 1) == 1 else f"{row.gpu_count}x {row.gpu}"
    utilization = f"{row.gpu_memory_utilization:g}" if row.gpu_memory_utilization is not None else "default"
    return (
        row.model,
        gpu,
        _count(row.tensor_parallel_size),
        _count(row.pipeline_parallel_size),
        utilization,
        row.kv_cache_dtype or "default",
        row.vllm_version or "unknown",
        _length(hit),
        _count(row.starts_max_model_len),
        _status(row),
        _age(hit.age_days),
        hit.version_distance,
    )


def _count(value: int | None) -> str:
    return f"{value:,}" if value is not None else "-"


def _length(hit: Hit) -> str:
    lowest = hit.row.max_model_len
    if lowest is not None and hit.highest is not None and hit.highest > lowest:
        return f"{lowest:,} to {hit.highest:,}"
    return _count(lowest)


def _status(row: Row) -> str:
    if row.status is not None:
        text = row.status.replace("_", " ")
        return f"{text} ({row.ceiling_kind})" if row.ceiling_kind and row.status is not Status.DOES_NOT_FIT else text
    if row.starts_max_model_len is None and row.refused_max_model_len is not None:
        return f"refused at {row.refused_max_model_len:,}"
    return "starts" if row.starts_max_model_len is not None else "unknown"


def _age(days: int | None) -> str:
    if days is None:
        return "age unknown"
    if days < 1:
        return "today"
    if days < 60:
        return f"{days} day{'s' if days > 1 else ''} old"
    return f"{days // 30} months old" if days < 730 else f"{days // 365} years old"


def _remarks(hits: list[Hit]) -> list[str]:
    remarks = []
    for hit in hits:
        name = f"{hit.row.model} on {hit.row.gpu}"
        if hit.machines > 1:
            remarks.append(f"{name}: {hit.machines} machines; the lowest is shown, a row is only about its machine.")
        if hit.differs:
            remarks.append(f"{name}: measured with {', '.join(hit.differs)}.")
        if hit.row.environment:
            remarks.append(f"{name}: measured with {hit.row.environment} in the environment.")
        if hit.row.source is Source.REPORTED and hit.row.source_url:
            remarks.append(f"{name}: {hit.row.source_url}")
        if hit.row.notes and hit.row.source is Source.MEASURED:
            remarks.append(f"{name}: {hit.row.notes}")
    return [f"  {printable(remark)}" for remark in dict.fromkeys(remarks)]
