"""The page that compares ways shows what was measured, and every row of it."""

from __future__ import annotations

import csv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_table_is_what_the_measurements_say() -> None:
    with (ROOT / "results" / "bench.csv").open(newline="") as file:
        measured = [
            (
                f"{row['model']}, {row['kv_mib']} MiB",
                row["vllm_version"],
                row["way"],
                row["launches"],
                f"{float(row['seconds']):.0f}",
                f"{int(row['answer']):,}",
                "yes" if row["is_answered"] == "True" else "**no**",
            )
            for row in csv.DictReader(file)
        ]
    lines = (ROOT / "docs" / "side-by-side.md").read_text(encoding="utf-8").splitlines()
    shown = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines if line.startswith("| tiny-")]
    assert shown == measured
    ours = [row for row in measured if row[2] == "prober"]
    assert {row[-1] for row in ours} == {"yes"}
