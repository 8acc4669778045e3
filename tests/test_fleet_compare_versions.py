"""The first bad version between a good and a bad one, with versions that cannot tell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prober.fleet.version_bisect import FirstBad, between, next_version
from prober.records import UsageError

VERSIONS = ("0.8.0", "0.9.0", "0.10.0", "0.11.0", "0.12.0")


def test_versions_are_ordered_as_versions() -> None:
    assert between(["0.10.0", "0.9.0", "0.8.0", "0.11.0"], "0.9.0", "0.11.0") == ("0.9.0", "0.10.0", "0.11.0")


@pytest.mark.parametrize(
    ("good", "bad", "told"),
    [("0.7.0", "0.9.0", "no vLLM 0.7.0"), ("0.9.0", "0.8.0", "not older"), ("0.9.0", "0.9.0", "not older")],
)
def test_what_makes_no_interval_is_refused(good: str, bad: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        between(VERSIONS, good, bad)


@given(st.integers(2, 40), st.data())
def test_the_first_bad_version_is_found_in_few_steps(count: int, data: st.DataObject) -> None:
    versions = tuple(f"0.{n}.0" for n in range(count))
    first_bad = data.draw(st.integers(1, count - 1))
    mute = data.draw(st.sets(st.integers(1, count - 1), max_size=4)) - {count - 1}
    is_bad: dict[str, bool | None] = {}
    while not isinstance(step := next_version(versions, is_bad), FirstBad):
        assert step not in is_bad
        index = versions.index(step)
        is_bad[step] = None if index in mute else index >= first_bad
    found, good = versions.index(step.version), versions.index(step.last_good)
    assert good < first_bad <= found
    assert set(step.untold) == {versions[n] for n in range(good + 1, found)}
    assert set(range(good + 1, found)) <= mute
    assert len(is_bad) <= (count - 1).bit_length() + len(mute)
