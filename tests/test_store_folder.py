"""The committed results folder: described by the schema, valid against it, and its reports are what the seed says."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prober.records import Source
from prober.results.csv_format import read_records, record_of, render
from prober.results.datapackage import pages
from prober.results.schema import HEADER, from_cells

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
CORPUS = ROOT.parent / "shared" / "corpus" / "corpus.csv"
_PARSERS: dict[str, Any] = {"integer": int, "number": float, "string": str}


@pytest.mark.parametrize("name", sorted(pages()))
def test_the_description_is_what_the_schema_says(name: str) -> None:
    assert (RESULTS / name).read_text(encoding="utf-8") == pages()[name], "run scripts/describe_results.py"


def test_the_matrix_is_valid_against_its_table_schema() -> None:
    (resource,) = json.loads((RESULTS / "datapackage.json").read_text(encoding="utf-8"))["resources"]
    fields = resource["schema"]["fields"]
    with (RESULTS / resource["path"]).open(newline="", encoding=resource["encoding"]) as file:
        header, *records = csv.reader(file)
    assert header == [field["name"] for field in fields]
    assert records
    for cells in records:
        for field, cell in zip(fields, cells, strict=True):
            constraints = field.get("constraints", {})
            assert cell or not constraints.get("required"), field["name"]
            if cell:
                _PARSERS[field["type"]](cell)
                assert cell in constraints.get("enum", [cell]), field["name"]


def test_the_matrix_is_sorted_and_in_its_own_form() -> None:
    text = (RESULTS / "matrix.csv").read_text(encoding="utf-8")
    records = read_records(text)
    assert render(records) == text
    assert [record_of(from_cells(record.cells)).text for record in records] == [record.text for record in records]
    assert len({record.key for record in records}) == len(records)
    assert "/home/" not in text


def test_no_report_claims_a_proof() -> None:
    rows = [from_cells(record.cells) for record in read_records((RESULTS / "matrix.csv").read_text(encoding="utf-8"))]
    reported = [row for row in rows if row.source is Source.REPORTED]
    assert reported
    for row in reported:
        proofs = [row.max_model_len, row.served_max_model_len, row.verified, row.status, row.machine]
        assert proofs == [None] * 5
        assert row.source_url is not None
        assert row.source_url.startswith("https://")
        assert row.starts_max_model_len or row.refused_max_model_len


def test_every_column_is_in_the_readme() -> None:
    text = pages()["README.md"]
    assert all(f"| {name} |" in text or f"| **{name}** |" in text for name in HEADER)


@pytest.mark.skipif(not CORPUS.exists(), reason="the table of public start-ups is not beside this checkout")
def test_the_seed_changes_nothing_that_is_committed(tmp_path: Path) -> None:
    seed = [sys.executable, str(ROOT / "scripts" / "seed_reported.py"), str(CORPUS)]
    subprocess.run([*seed, "--results", str(RESULTS), "--check"], check=True, timeout=60, cwd=ROOT)
    for _ in range(2):
        subprocess.run([*seed, "--results", str(tmp_path)], check=True, timeout=60, cwd=ROOT)
    reports = [record for record in read_records((RESULTS / "matrix.csv").read_text(encoding="utf-8"))
               if from_cells(record.cells).source is Source.REPORTED]  # fmt: skip
    assert (tmp_path / "matrix.csv").read_text(encoding="utf-8") == render(reports)
    (tmp_path / "matrix.csv").write_text(render(reports[1:]))
    check = subprocess.run([*seed, "--results", str(tmp_path), "--check"], timeout=60, cwd=ROOT, capture_output=True)
    assert check.returncode == 1
    assert b"not in" in check.stderr
