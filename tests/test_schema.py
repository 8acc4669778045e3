"""Any row survives the way to text and back; what would harm a reader does not get in."""

from __future__ import annotations

import csv
import dataclasses
import io
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from row_makers import HOSTILE, a_row, rows

from prober.fleet.known_rows import about, about_row
from prober.records import Combination, Source
from prober.results.csv_format import ForeignMatrix, read_cells, read_records, record_of, render
from prober.results.from_ceiling import columns_of
from prober.results.schema import (
    COLUMNS,
    COMBINATION,
    HEADER,
    KEY,
    SCHEMA_VERSION,
    Row,
    UnreadableRow,
    current_names,
    from_cells,
    from_strings,
    from_values,
    guard,
    to_cells,
    to_strings,
    to_values,
    unguard,
)


@given(rows)
def test_any_row_survives_the_file(row: Row) -> None:
    text = render([record_of(row)])
    assert [from_cells(cells) for cells in read_cells(text)] == [row]
    assert [record.text for record in read_records(text)] == [record_of(row).text]


@given(rows)
def test_any_row_survives_strings_and_values(row: Row) -> None:
    assert from_strings(to_strings(row)) == row
    assert from_values(to_values(row)) == row


@given(rows)
def test_csv_readers_see_the_same_cells(row: Row) -> None:
    text = render([record_of(row)])
    records = list(csv.reader(io.StringIO(text, newline="")))
    assert records == [list(HEADER), to_cells(row)]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_name_stays_what_it_is_and_starts_no_formula(name: str) -> None:
    row = a_row(model=name, notes=name, other_flags=name)
    (cells,) = read_cells(render([record_of(row)]))
    assert from_cells(cells) == row
    assert all(not cell.strip(" ").startswith(("=", "+", "-", "@", "\t", "\r")) for cell in cells)


@pytest.mark.parametrize("name", [name for name in HOSTILE if "\x00" not in name])
def test_pandas_reads_a_hostile_name(name: str) -> None:
    text = render([record_of(a_row(model=name))])
    table = pd.read_csv(io.StringIO(text, newline=""), keep_default_na=False, na_values=[""], dtype={"model": "string"})
    assert unguard(table["model"][0]) == name


def test_guard_is_undone_for_guarded_text_too() -> None:
    for text in ("'", "''=", "=1", "'-x", "plain", "-1", "a-1"):
        assert unguard(guard(text)) == text
    assert guard("a-1") == "a-1"


def test_every_column_is_described() -> None:
    assert len(set(HEADER)) == len(HEADER)
    for column in COLUMNS:
        assert len(column.meaning) > 5, column.name
        assert column.kind in ("string", "integer", "number")
        assert (
            column.kind == "string"
            or column.unit
            or column.name.endswith(("_count", "_size", "_utilization", "_version"))
        )
    assert {c.name for c in COLUMNS if c.is_required} == {"model", "gpu", "source", "schema_version"}


def test_a_value_that_its_column_does_not_allow_is_named() -> None:
    cells = to_strings(a_row())
    with pytest.raises(UnreadableRow, match="max_model_len"):
        from_strings(cells | {"max_model_len": "many"})
    with pytest.raises(UnreadableRow, match="status"):
        from_strings(cells | {"status": "fine"})
    with pytest.raises(UnreadableRow, match="model is empty"):
        from_strings(cells | {"model": ""})
    with pytest.raises(UnreadableRow, match="modell"):
        from_values({"modell": "x"})


def test_an_older_file_with_fewer_columns_in_another_order_is_read() -> None:
    text = "gpu,model,source,schema_version,max_model_len\nNVIDIA L4,m,measured,1,4096\n"
    (cells,) = read_cells(text)
    assert from_cells(cells) == Row(model="m", gpu="NVIDIA L4", source=Source.MEASURED, max_model_len=4096)
    assert render(read_records(text)).startswith(",".join(HEADER) + "\n")


def test_version_1_is_read_and_written_as_this_version() -> None:
    added_since = {"environment", "reserve_mib", "least_free_mib", "launch_command"}
    cells = to_strings(a_row()) | {"schema_version": "1"}
    old = [name for name in HEADER if name not in added_since]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([old, [cells[name] for name in old]])
    (record,) = read_records(text.getvalue())
    known = {name: cells[name] for name in old}
    assert from_cells(record.cells) == from_strings(known | {"schema_version": str(SCHEMA_VERSION)})


def test_renamed_column_is_found_from_every_earlier_version() -> None:
    migrations = {3: {"a": "b"}, 4: {}, 5: {"b": "c", "x": "y"}}
    assert current_names(["a", "b", "c", "x", "z"], migrations) == ["c", "c", "c", "y", "z"]


def test_a_file_saved_by_a_spreadsheet_is_read() -> None:
    text = "\ufeff" + render([record_of(a_row())]).replace("\n", "\r\n")
    assert [from_cells(cells) for cells in read_cells(text)] == [a_row()]
    assert "\r" not in render(read_records(text))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a,b\n1,2\n", "not a matrix"),
        ("hello", "not a matrix"),
        (",".join(HEADER) + ",mine\n", "mine"),
        (",".join(HEADER) + "\nonly,three,cells\n", "line 2"),
        (",".join(HEADER) + "\n<<<<<<< HEAD\n", "prober merge"),
        ("<<<<<<< HEAD\n" + ",".join(HEADER) + "\n", "prober merge"),
        (",".join(HEADER) + '\n"open quote\n', "line"),
    ],
)
def test_a_foreign_file_is_refused_in_a_sentence(text: str, why: str) -> None:
    with pytest.raises(ForeignMatrix, match=why):
        list(read_cells(text))


def test_a_newer_schema_is_refused() -> None:
    text = render([record_of(a_row(schema_version=SCHEMA_VERSION + 1))])
    with pytest.raises(ForeignMatrix, match="newer prober"):
        list(read_cells(text))


def test_rows_are_sorted_whatever_order_they_came_in() -> None:
    some = [a_row(model=m, gpu_count=n) for m in ("b", "a", "c") for n in (16, 2, 1)]
    text = render(map(record_of, some))
    assert text == render(map(record_of, reversed(some)))
    assert [(r.model, r.gpu_count) for r in map(from_cells, read_cells(text))][:3] == [("a", 1), ("a", 2), ("a", 16)]


def test_a_combination_and_its_row_have_one_key_whatever_columns_it_has() -> None:
    changes: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "dtype": "half",
        "quantization": "awq",
        "kv_cache_dtype": "fp8",
    }
    combination = Combination("m", other_flags=("--block-size", "32"), gpu_memory_utilization=0.8, **changes)
    row = Row(gpu="L4", **columns_of(combination))
    assert about(combination, "L4") == about_row(row)
    for name in COMBINATION:
        changed: dict[str, Any] = {name: "another"}
        assert about_row(dataclasses.replace(row, **changed)) != about_row(row), name


def test_every_key_column_is_asked_for_or_named_as_found_by_the_prober() -> None:
    """A new key column that is a field of Combination needs no other line: look-ups, hints and fleets derive theirs."""
    found = {
        "model_revision", "gpu", "gpu_memory_mib", "gpu_count", "vllm_version", "environment", "reserve_mib", "machine",
    }  # fmt: skip
    assert set(KEY) == {*COMBINATION, *found}
    assert {*COMBINATION, "model_revision"} == {field.name for field in dataclasses.fields(Combination)}
