"""A length to serve with, below what was proven."""

from __future__ import annotations

from typing import Any

import pytest
from row_makers import a_ceiling, a_trial

from prober.measure.recommend import recommended
from prober.records import Bracket, Status, Verify


def length(serves: int, block: int | None = None, **changes: Any) -> int | None:
    trials = (a_trial(serves, block_size=block), a_trial(serves - 1, block_size=7))
    advice = recommended(a_ceiling(**{"bracket": Bracket(serves, serves + 1), "trials": trials} | changes))
    return advice.length if advice else None


@pytest.mark.parametrize(
    ("serves", "block", "expected"),
    [
        (100_000, 16, 98_000),  # 2 % less
        (100_000, 128, 97_920),  # in whole blocks
        (100_000, None, 97_920),  # of 128 where nobody told their size
        (200, 196, 196),
        (200, 197, 200),  # shorter than a block: no headroom is left to give
    ],
)
def test_headroom_is_two_percent_and_what_fills_no_block(serves: int, block: int | None, expected: int) -> None:
    assert length(serves, block) == expected


@pytest.mark.parametrize("status", [Status.MODEL_LIMIT, Status.AT_LEAST])
def test_where_memory_does_not_end_it_the_whole_length_is_recommended(status: Status) -> None:
    assert length(100_000, 16, status=status) == 100_000


def test_nothing_is_recommended_without_a_proof() -> None:
    assert length(100_000, 16, verify=Verify.NONE) is None
    assert length(100_000, 16, status=Status.UNSTABLE) is None
