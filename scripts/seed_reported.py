"""Turn a table of public startups into ``reported`` rows of the matrix.

    python scripts/seed_reported.py CORPUS.csv [--results results] [--check]

A row needs a public URL, the model, the GPU, the date or vLLM version, and a length that started or was refused for
capacity. A success at length L means that vLLM *starts* at L, never that L is a ceiling. The script is idempotent;
``--check`` only compares, and exits with 1 if the matrix lacks a row.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from prober.records import CompileState, Source
from prober.results.csv_format import row_key
from prober.results.schema import Row
from prober.results.store import Store
from prober.results.text import public_text

_MODEL = re.compile(r"[\w.\-]+(/[\w.\-]+)?")
# Refusals caused by capacity alone. In a reported out-of-memory, another process may have held memory.
_REFUSED = ("too_long", "no_kv_memory")


def reported_rows(table: Iterable[dict[str, str]]) -> list[Row]:
    """Build the rows; starts of one report that differ only in length become one row."""
    grouped: dict[tuple[str, ...], list[Row]] = {}
    for line in table:
        row = _row(line)
        if row is not None:
            grouped.setdefault(row_key(row), []).append(row)
    return [_joined(rows) for _, rows in sorted(grouped.items())]


def _row(line: dict[str, str]) -> Row | None:
    length = _count(line["requested_max_model_len"])
    if length is None and line["requested_max_model_len"] == "auto":
        length = _count(line["estimated_max_len"])
    has_facts = line["gpu_name"] and (line["vllm_version"] or line["date"]) and _MODEL.fullmatch(line["model"])
    if length is None or not has_facts or not line["source_url"].startswith("https://"):
        return None
    if line["outcome"] not in ("ok", *_REFUSED):
        return None
    other = line["other_flags"]
    quantization = line["quantization"]
    notes = [f"settings as reported: {other}" if other else "", _unless_word("quantization", quantization)]
    memory = _number(line["gpu_mem_gib"])
    return Row(
        model=line["model"],
        gpu=re.sub(r"\s*\(.*", "", line["gpu_name"]),
        gpu_memory_mib=round(memory * 1024) if memory else None,
        gpu_count=_count(line["n_gpus"]),
        tensor_parallel_size=_count(line["tp"]),
        pipeline_parallel_size=_count(line["pp"]),
        gpu_memory_utilization=_number(line["gpu_memory_utilization"]),
        dtype=line["dtype"] or None,
        quantization=quantization if quantization and " " not in quantization else None,
        kv_cache_dtype=line["kv_cache_dtype"] or None,
        compile_state=CompileState.EAGER if "--enforce-eager" in other else None,
        vllm_version=line["vllm_version"] or None,
        starts_max_model_len=length if line["outcome"] == "ok" else None,
        refused_max_model_len=length if line["outcome"] in _REFUSED else None,
        estimated_max_model_len=_count(line["estimated_max_len"]),
        num_gpu_blocks=_count(line["gpu_blocks"]),
        kv_cache_tokens=_count(line["kv_cache_tokens"]) or _count(line["max_tokens_in_cache"]),
        kv_cache_gib=_number(line["available_gib"]),
        weights_gib=_number(line["weights_gib"]),
        max_num_seqs=_flag_count(other, "max-num-seqs"),
        max_num_batched_tokens=_flag_count(other, "max-num-batched-tokens"),
        source=Source.REPORTED,
        source_url=line["source_url"],
        notes=public_text("; ".join(filter(None, notes))) or None,
        measured_at=line["date"] or None,
    )


def _joined(rows: list[Row]) -> Row:
    """Merge a report's starts into one row: the longest that started and the refusal above it.

    The figures are those of the longest start. A refusal *below* a start (profiling without chunked prefill) bounds
    nothing and is only noted.
    """
    started = [row for row in rows if row.starts_max_model_len is not None]
    if not started:
        return min(rows, key=lambda row: row.refused_max_model_len or 0)
    best = max(started, key=lambda row: row.starts_max_model_len or 0)
    longest = best.starts_max_model_len or 0
    refused = sorted(row.refused_max_model_len for row in rows if row.refused_max_model_len is not None)
    above = [length for length in refused if length > longest]
    below = [f"refused at {length:,} although it starts at {longest:,}" for length in refused if length <= longest]
    notes = "; ".join(filter(None, [best.notes, *below])) or None
    values = {name: getattr(best, name) for name in Row.__slots__}
    return Row(**values | {"refused_max_model_len": min(above, default=None), "notes": notes})


def _count(cell: str) -> int | None:
    return int(cell) if cell.isdecimal() and int(cell) > 0 else None


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _flag_count(flags: str, name: str) -> int | None:
    match = re.search(rf"--{name}[ =](\d+)\b", flags)
    return int(match[1]) if match else None


def _unless_word(name: str, value: str) -> str:
    return f"{name}: {value}" if " " in value else ""


def main(arguments: list[str]) -> int:
    """Write or compare the rows. Returns 1 if the matrix lacks one of them, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("corpus", type=Path, help="table of public startups (CSV)")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a row is missing or differs")
    options = parser.parse_args(arguments)
    with options.corpus.open(newline="", encoding="utf-8") as file:
        rows = reported_rows(csv.DictReader(file))
    store = Store(options.results)
    if not options.check:
        store.put(rows)
    known = set(store.rows())
    missing = [row for row in rows if row not in known]
    for row in missing:
        print(f"not in {store.matrix_path}: {row.model} on {row.gpu} ({row.source_url})", file=sys.stderr)
    print(f"{len(rows)} reported rows, {len(rows) - len(missing)} of them in {store.matrix_path}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
