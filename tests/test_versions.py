"""Facts about vLLM versions, at the release where each begins or ends."""

from __future__ import annotations

import pytest

from prober.engine import versions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.9.2rc2.dev1", (0, 9, 2)),
        ("v0.11", (0, 11, 0)),
        ("0.8.5.post1", (0, 8, 5)),
        ("1.2.3+cu129", (1, 2, 3)),
        ("dev", None),
        ("", None),
        (None, None),
    ],
)
def test_release_of_a_version(text: str | None, expected: versions.Release | None) -> None:
    assert versions.release(text) == expected


@pytest.mark.parametrize(
    ("version", "share", "ungranted", "counts", "auto"),
    [
        ("0.8.2", 0.90, 0, False, False),
        ("0.8.3", 0.90, 1, False, False),
        ("0.19.1", 0.90, 1, False, False),
        ("0.20.0", 0.92, 1, False, True),
        ("0.28.0", 0.92, 1, False, True),
        ("0.29.0", 0.92, 0, True, True),
        ("1.0.0", 0.92, 0, True, True),
        (None, 0.90, 1, True, False),
        ("dev", 0.90, 1, True, False),
    ],
)
def test_facts_of_a_version(version: str | None, share: float, ungranted: int, counts: bool, auto: bool) -> None:
    assert versions.default_gpu_memory_utilization(version) == share
    assert versions.ungranted_blocks(version) == ungranted
    assert versions.counts_null_block(version) is counts
    assert versions.supports_auto_length(version) is auto
