"""Comparing two nights: what fell is a regression, jitter and "could not tell" are not."""

from __future__ import annotations

import json

import pytest
from row_makers import HOSTILE, a_row

from prober.records import Source, Status
from prober.results.diff import ChangeKind, diff, diff_json, markdown_diff, render_diff
from prober.results.schema import Row

NO_NUMBER = {"max_model_len": None, "status": Status.INCONCLUSIVE}
NO_FIT = {"max_model_len": None, "status": Status.DOES_NOT_FIT}


@pytest.mark.parametrize(
    ("before", "after", "kind", "is_regression"),
    [
        ({}, {}, None, False),
        ({}, {"max_model_len": 3967}, ChangeKind.SHORTER, True),
        ({}, {"max_model_len": 4096}, ChangeKind.LONGER, False),
        ({}, NO_FIT, ChangeKind.SHORTER, True),
        (NO_FIT, {}, ChangeKind.LONGER, False),
        (NO_FIT, NO_FIT, None, False),
        ({}, NO_NUMBER, ChangeKind.UNSETTLED, False),
        (NO_NUMBER, {}, ChangeKind.SETTLED, False),
        (NO_NUMBER, NO_NUMBER, None, False),
        ({}, {"vllm_version": "0.29.0"}, None, False),
        ({}, {"vllm_version": "0.29.0", "max_model_len": 3000}, ChangeKind.SHORTER, True),
        ({}, {"measured_at": "2026-05-01T00:00:00Z", "seconds": 9.5, "driver": "560"}, None, False),
    ],
)
def test_what_became_of_one_row(
    before: dict[str, object], after: dict[str, object], kind: ChangeKind | None, is_regression: bool
) -> None:
    difference = diff([a_row(**before)], [a_row(**after)])
    assert [change.kind for change in difference.changes] == ([kind] if kind else [])
    assert difference.alike == (0 if kind else 1)
    assert difference.has_regression is is_regression


def test_lost_and_gained_rows() -> None:
    difference = diff([a_row(model="a")], [a_row(model="b")])
    assert [(change.kind, change.row.model) for change in difference.changes] == [
        (ChangeKind.LOST, "a"),
        (ChangeKind.GAINED, "b"),
    ]
    assert difference.has_regression
    assert not diff([], [a_row()]).has_regression


@pytest.mark.parametrize(("length", "is_regression"), [(9900, False), (9899, True), (10100, False)])
def test_jitter_inside_the_tolerance_is_alike(length: int, is_regression: bool) -> None:
    difference = diff([a_row(max_model_len=10000)], [a_row(max_model_len=length)], tolerance=0.01)
    assert difference.has_regression is is_regression


def test_no_tolerance_hides_that_it_no_longer_fits() -> None:
    assert diff([a_row()], [a_row(**NO_FIT)], tolerance=0.5).has_regression


def test_equal_versions_are_compared_first() -> None:
    old = [a_row(vllm_version="0.27.0", max_model_len=100), a_row(vllm_version="0.28.0", max_model_len=200)]
    new = [a_row(vllm_version="0.28.0", max_model_len=200), a_row(vllm_version="0.29.0", max_model_len=300)]
    (change,) = diff(old, new).changes
    assert change.old is not None
    assert change.new is not None
    assert (change.kind, change.old.vllm_version, change.new.vllm_version) == (ChangeKind.LONGER, "0.27.0", "0.29.0")


def test_reports_are_not_compared() -> None:
    assert diff([a_row(source=Source.REPORTED)], []).changes == ()


def test_regressions_come_first_in_every_form() -> None:
    old = [a_row(model="a"), a_row(model="z", max_model_len=1000)]
    new = [a_row(model="a", max_model_len=5000), a_row(model="z", max_model_len=900, vllm_version="0.29.0")]
    difference = diff(old, new)
    text = render_diff(difference)
    assert text.splitlines()[0] == "shorter    z  NVIDIA L4  1  0.28.0 -> 0.29.0  1,000 -> 900 (-10.0%)"
    assert markdown_diff(difference).splitlines()[2] == (
        "| shorter | z | NVIDIA L4 | 1 | 0.28.0 -> 0.29.0 | 1,000 -> 900 (-10.0%) |"
    )
    plain = json.loads(diff_json(difference))
    assert plain["regression"] is True
    assert [change["kind"] for change in plain["changes"]] == ["shorter", "longer"]
    assert plain["changes"][0]["share"] == -0.1


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_stays_in_its_line_and_cell(name: str) -> None:
    row: Row = a_row(model=name)
    difference = diff([row], [])
    (_, _, line, *_) = markdown_diff(difference).splitlines()
    assert line.replace("\\|", "").count("|") == 7
    assert "<script" not in line
    assert len(render_diff(difference).splitlines()) == 2
