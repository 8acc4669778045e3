"""Classify a corpus of public startup logs and print how many are classified correctly. Usage: corpus.py FOLDER

The folder holds ``corpus.csv`` (one row per startup, with its outcome and figures) and ``lines/<id>.log``. A figure
counts only if its digits appear in the lines.
Exit status 1: another failure was classified as capacity, or a good log as a failure.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from prober.logs.classify import classify
from prober.records import Outcome, Verdict

CAPACITY = frozenset({Outcome.KV_TOO_SMALL, Outcome.NO_KV_MEMORY, Outcome.DEVICE_OOM, Outcome.UNSERVABLE})
GOOD = frozenset({Outcome.READY, Outcome.UNFINISHED})
UNREAD = frozenset({Outcome.UNFINISHED, Outcome.CRASH})  # no cause found: the lines have none, or no rule knows it
EXPECTED: dict[str, frozenset[Outcome]] = {
    "ok": GOOD,
    "too_long": frozenset({Outcome.KV_TOO_SMALL}),
    "no_kv_memory": frozenset({Outcome.NO_KV_MEMORY}),
    "oom_load": frozenset({Outcome.DEVICE_OOM}),
    "oom_profile": frozenset({Outcome.DEVICE_OOM}),
    "oom_graph": frozenset({Outcome.DEVICE_OOM}),
    "oom_serving": frozenset({Outcome.DEVICE_OOM}),
    "busy_gpu": frozenset({Outcome.DEVICE_BUSY}),
    "model_limit": frozenset({Outcome.OVER_MODEL_LIMIT}),
    "config_error": frozenset({Outcome.BAD_CONFIG, Outcome.SEQUENCE_SLOTS, Outcome.TOO_SHORT}),
}
ANYTHING_BUT_CAPACITY = frozenset(Outcome) - CAPACITY
FIGURES = {
    "requested_max_model_len": "requested_max_model_len",
    "needed_gib": "needed_gib",
    "available_gib": "available_gib",
    "estimated_max_len": "estimated_max_len",
    "max_tokens_in_cache": "max_tokens_in_cache",
    "gpu_blocks": "gpu_blocks",
    "cpu_blocks": "cpu_blocks",
    "kv_cache_tokens": "kv_cache_tokens",
    "concurrency": "concurrency",
    "weights_gib": "weights_gib",
}


def main(folder: Path) -> int:
    """Print the table and the misses; return the exit status."""
    rows = [row for row in csv.DictReader((folder / "corpus.csv").open(newline="")) if row["lines"] == "yes"]
    logs = {row["id"]: (folder / "lines" / f"{row['id']}.log").read_bytes() for row in rows}
    found = {name: classify(log) for name, log in logs.items()}
    wrong = [row for row in rows if not is_right(row, found[row["id"]])]
    dangerous = [row for row in rows if is_dangerous(row, found[row["id"]])]
    cells = [cell for row in rows for cell in compared(row, found[row["id"]], logs[row["id"]])]
    missed = [cell for cell in cells if not cell[-1]]
    print_outcomes(rows, wrong)
    print(f"\noutcome right       {len(rows) - len(wrong)} of {len(rows)} ({1 - len(wrong) / len(rows):.1%})")
    misread = sum(found[row["id"]].outcome not in UNREAD for row in wrong)
    print(f"read as another     {misread}, as no cause at all {len(wrong) - misread}")
    print(f"dangerous misreads  {len(dangerous)}")
    print(f"figures right       {len(cells) - len(missed)} of {len(cells)} ({1 - len(missed) / len(cells):.1%})")
    for row in wrong:
        verdict = found[row["id"]]
        why = "no cause found: do the lines hold one?" if verdict.outcome in UNREAD else "misread"
        print(f"  miss: {row['id']}: {row['outcome']} read as {verdict.outcome} ({why})")
    for name, column, wanted, got, _ in missed:
        print(f"  miss: {name}: {column} is {wanted}, read {got}")
    return 1 if dangerous else 0


def is_right(row: dict[str, str], verdict: Verdict) -> bool:
    """Whether the outcome is the stated one; crashes, hangs and others only must not be capacity."""
    return verdict.outcome in EXPECTED.get(row["outcome"], ANYTHING_BUT_CAPACITY)


def is_dangerous(row: dict[str, str], verdict: Verdict) -> bool:
    """Whether a misclassification would make a wrong ceiling."""
    is_capacity = bool(EXPECTED.get(row["outcome"], frozenset()) & CAPACITY)
    if row["outcome"] == "ok":
        return verdict.outcome not in GOOD
    return verdict.outcome in CAPACITY and not is_capacity


def compared(row: dict[str, str], verdict: Verdict, log: bytes) -> Iterator[tuple[str, str, str, object, bool]]:
    """Each figure found in the lines: row, column, stated, parsed, and whether they agree."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", log.decode("utf-8", "replace"))
    for column, name in FIGURES.items():
        stated = row[column]
        if not re.fullmatch(r"-?[\d.]+", stated) or not stands_in(stated, text):
            continue
        got = getattr(verdict.figures, name)
        yield row["id"], column, stated, got, got is not None and abs(got - float(stated)) <= tolerance(stated)


def stands_in(stated: str, text: str) -> bool:
    """Whether the number appears in the lines, possibly with trailing zeros."""
    whole = re.escape(stated.rstrip("0").rstrip(".") if "." in stated else stated)
    return re.search(rf"(?<![\d.]){whole}0*(?![\d]|\.\d*[1-9])", text) is not None


def tolerance(stated: str) -> float:
    """Half a unit of the last stated digit."""
    return 0.5 * 10.0 ** -len(stated.partition(".")[2]) if "." in stated else 0.0


def print_outcomes(rows: list[dict[str, str]], wrong: list[dict[str, str]]) -> None:
    """One line per outcome of the corpus."""
    total, missed = Counter(row["outcome"] for row in rows), Counter(row["outcome"] for row in wrong)
    print(f"{'outcome':14} {'rows':>5} {'right':>6}")
    for outcome, count in sorted(total.items()):
        print(f"{outcome:14} {count:5} {count - missed[outcome]:6}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
