"""Merging matrices: the newest proof wins, and whatever is dropped is named."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from row_makers import a_row, rows

from prober.records import Source, Status
from prober.results.csv_format import ForeignMatrix, record_of, render
from prober.results.merge import merge, merged_json, read_rows, render_merged
from prober.results.schema import Row

OLD, NEW = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"


def test_rows_about_different_things_all_stay() -> None:
    some = [a_row(machine=f"m{i}") for i in range(3)]
    merged = merge([some[:2], some[1:]])
    assert list(merged.rows) == some
    assert (merged.dropped, merged.identical) == ((), 1)


@pytest.mark.parametrize(
    ("loser", "why"),
    [
        (a_row(measured_at=OLD, max_model_len=5000), "newer"),
        (a_row(measured_at="2026-03-01T00:00:00Z", status=Status.INCONCLUSIVE, max_model_len=None), "proves less"),
        (a_row(measured_at="2026-03-01T00:00:00Z", source=Source.IMPORTED), "imported"),
    ],
)
def test_the_newest_proof_stands_and_the_other_is_named(loser: Row, why: str) -> None:
    winner = a_row(measured_at=NEW)
    for order in itertools.permutations([[loser], [winner]]):
        merged = merge(order)
        assert merged.rows == (winner,)
        assert [(dropped.row, dropped.kept) for dropped in merged.dropped] == [(loser, winner)]
        assert why in merged.dropped[0].why
        assert why in render_merged(merged)
        assert json.loads(merged_json(merged))["dropped"][0]["row"]["model"] == loser.model


def test_a_drop_names_the_row_that_stands_in_the_end() -> None:
    chain = [a_row(measured_at=f"2026-01-0{day}T00:00:00Z", max_model_len=day) for day in (1, 2, 3)]
    merged = merge([chain])
    assert [dropped.kept for dropped in merged.dropped] == [chain[2], chain[2]]


@given(st.lists(st.lists(rows, max_size=4), max_size=3))
def test_no_row_vanishes(matrices: list[list[Row]]) -> None:
    merged = merge([*matrices, *matrices])
    total = 2 * sum(map(len, matrices))
    assert len(merged.rows) + len(merged.dropped) + merged.identical == total
    assert {row for rows_ in matrices for row in rows_} == set(merged.rows) | {d.row for d in merged.dropped}


def conflict(ours: list[Row], theirs: list[Row], base: list[Row] | None = None) -> str:
    lines = [record_of(row).text for row in (a_row(machine="shared-1"), a_row(machine="shared-2"))]
    middle = "<<<<<<< HEAD\n" + "".join(record_of(row).text for row in ours)
    if base is not None:
        middle += "||||||| 1234567\n" + "".join(record_of(row).text for row in base)
    middle += "=======\n" + "".join(record_of(row).text for row in theirs) + ">>>>>>> other\n"
    return render([]) + lines[0] + middle + lines[1]


@pytest.mark.parametrize("base", [None, [a_row(machine="base")]])
def test_both_sides_of_a_git_conflict_are_read(base: list[Row] | None) -> None:
    ours, theirs = [a_row(machine="ours"), a_row(machine="both")], [a_row(machine="theirs"), a_row(machine="both")]
    merged = merge([read_rows(conflict(ours, theirs, base))])
    assert {row.machine for row in merged.rows} == {"shared-1", "shared-2", "ours", "theirs", "both"}


def test_a_conflict_mark_inside_a_cell_is_only_text() -> None:
    row = a_row(notes="a\n=======\n>>>>>>> b\n")
    assert read_rows(render([record_of(row)])) == [row]


def test_a_file_that_is_no_matrix_is_refused() -> None:
    with pytest.raises(ForeignMatrix):
        read_rows("a,b\n1,2\n")
    with pytest.raises(ForeignMatrix):
        read_rows("<<<<<<< a\nx,y\n=======\nz\n>>>>>>> b\n")


def test_merging_the_merged_changes_nothing() -> None:
    merged = merge([[a_row(measured_at=OLD), a_row(measured_at=NEW), a_row(model="b")]])
    again = merge([merged.rows])
    assert (again.rows, again.dropped, again.identical) == (merged.rows, (), 0)
