"""What known rows suggest to begin with."""

from __future__ import annotations

from typing import Any

import pytest
from row_makers import a_row

from prober.measure.hints import known_lengths
from prober.records import Combination, Machine
from prober.results.schema import Row
from prober.results.text import public_flags

MODEL, L4 = "Qwen/Qwen3-8B", Machine("NVIDIA L4", "cuda", "m1", gpu_memory_mib=23034, vllm_version="0.28.0")


def row(length: int | None, utilization: float | None = 0.9, ranks: int = 1, **changes: Any) -> Row:
    values = {"max_model_len": length, "gpu_memory_utilization": utilization, "tensor_parallel_size": ranks}
    standard = {"entrypoint": "serve", "compile_state": "cold"}
    return a_row(**(standard | values | changes))


def blocks(count: int, utilization: float | None = 0.9, ranks: int = 1, **changes: Any) -> Row:
    """A row with so many blocks of 16 tokens, all of which but the null block serve."""
    return row((count - 1) * 16, utilization, ranks, num_gpu_blocks=count, block_size=16, **changes)


def known(*rows: Row, utilization: float | None = 0.9, ranks: int = 1, flags: tuple[str, ...] = ()) -> tuple[int, ...]:
    asked = Combination(MODEL, ranks, gpu_memory_utilization=utilization, other_flags=flags)
    return known_lengths(rows, asked, L4)


def test_nothing_known_suggests_nothing() -> None:
    assert known() == ()


@pytest.mark.parametrize(
    "unlike",
    [
        {"model": "Qwen/Qwen3-4B"},
        {"gpu": "NVIDIA A10G"},
        {"gpu_memory_mib": 46068},
        {"tensor_parallel_size": None},
        {"max_model_len": None, "starts_max_model_len": None},
    ],
)
def test_rows_of_other_models_and_devices_and_half_known_ones_do_not_count(unlike: dict[str, Any]) -> None:
    assert known(row(5000, **unlike)) == ()


def test_same_combination_on_this_version_then_this_machine_then_the_newest_comes_first() -> None:
    here = row(1000, measured_at="2026-01-02T00:00:00Z")
    rows = [
        row(2000, measured_at="2026-03-01T00:00:00Z", vllm_version="0.27.0"),
        row(3000, measured_at="2026-02-01T00:00:00Z", machine="m2"),
        here,
        row(4000, measured_at="2026-01-01T00:00:00Z"),
        row(5000, measured_at=None),
    ]
    for count, best in ((5, 1000), (2, 3000), (1, 2000)):
        assert known(*rows[:count]) == (best,)
        assert known(*reversed(rows[:count])) == (best,)


def test_length_that_starts_counts_where_none_is_proven() -> None:
    assert known(row(None, starts_max_model_len=4096)) == (4096,)


def test_same_combination_comes_before_what_its_neighbours_say() -> None:
    assert known(blocks(1000, 0.8), blocks(1400, 1.0), row(7777, 0.9)) == (7777,)


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float16"},
        {"quantization": "awq"},
        {"kv_cache_dtype": "fp8"},
        {"entrypoint": "llm"},
        {"compile_state": "eager"},
        {"pipeline_parallel_size": 2},
        {"other_flags": "--max-num-seqs 16"},
    ],
)
def test_row_that_is_merely_like_it_is_the_last_choice(other: dict[str, Any]) -> None:
    """Its blocks say nothing of this combination's; its length is better than none, the newest best."""
    alike = [blocks(count, 0.9, measured_at=f"2026-01-0{count // 1000}", **other) for count in (1000, 2000)]
    for order in (alike, alike[::-1]):
        assert known(*order, row(5000, measured_at=None, **other)) == (1999 * 16,)
        assert known(*order, blocks(100, 0.8), blocks(120, 0.7)) == (79 * 16,)
    assert known(*alike, ranks=2) == (), "another number of ranks is not like it"


def test_further_flags_must_be_the_same() -> None:
    flags = ("--max-num-seqs", "16")
    rows = [row(1000, measured_at="2026-02-01"), row(2000, other_flags=public_flags(flags), measured_at="2026-01-01")]
    assert known(*rows, flags=flags) == (2000,)
    assert known(*rows) == (1000,)


@pytest.mark.parametrize(("utilization", "count"), [(0.85, 1100), (0.95, 1300), (0.6, 600)])
def test_blocks_lie_on_a_line_over_the_utilization(utilization: float, count: int) -> None:
    rows = [blocks(1000, 0.8), blocks(1200, 0.9)]
    assert known(*rows, utilization=utilization) == ((count - 1) * 16,)


def test_line_goes_through_the_two_nearest_utilizations() -> None:
    assert known(blocks(10, 0.3), blocks(1000, 0.8), blocks(1200, 0.9), utilization=0.85) == (1099 * 16,)


def test_tokens_beyond_the_last_whole_block_stay() -> None:
    """Before 0.29.0 one token more than the blocks hold is served, at the neighbour's ceiling and here."""
    rows = [
        row(999 * 16 + 1, 0.8, num_gpu_blocks=1000, block_size=16),
        row(1199 * 16 + 1, 0.9, num_gpu_blocks=1200, block_size=16),
    ]
    assert known(*rows, utilization=0.85) == (1099 * 16 + 1,)


def test_line_that_ends_below_nothing_leaves_the_newest_row_that_is_like_it() -> None:
    for count in (100, 101):  # 101 leaves the null block alone
        rows = [blocks(count, 0.8, measured_at="2026-01-02"), blocks(count + 100, 0.9, measured_at="2026-01-01")]
        assert known(*rows, utilization=0.7) == ((count - 1) * 16,)


def test_utilization_that_nobody_gave_lies_on_no_line() -> None:
    line = [blocks(1000, 0.8, measured_at="2026-01-02"), blocks(1200, 0.9)]
    assert known(*line, blocks(50, None), utilization=0.85) == (1099 * 16,)
    assert known(*line, utilization=None) == (999 * 16,)


def test_blocks_grow_as_the_ranks_where_nothing_tells_better() -> None:
    assert known(blocks(1000), ranks=2) == (1999 * 16,)
    assert known(blocks(1000, ranks=4), ranks=2) == (499 * 16,)
    assert known(blocks(1000, 0.8), ranks=2) == (), "of another utilization, too: no neighbour"


def test_another_utilization_tells_how_blocks_grow_with_the_ranks() -> None:
    rows = [blocks(1000, 0.9, 1), blocks(800, 0.8, 1), blocks(2000, 0.8, 2)]
    assert known(*rows, ranks=2) == (2499 * 16,)
    assert known(blocks(9000, 0.9, 4), *rows, blocks(6000, 0.8, 4), ranks=2) == (2999 * 16,)


@pytest.mark.parametrize("unknown", ["num_gpu_blocks", "block_size"])
def test_without_blocks_and_their_size_no_neighbour_counts(unknown: str) -> None:
    half: dict[str, Any] = {"num_gpu_blocks": 400, "block_size": 16} | {unknown: None}
    rows = [row(5000, 0.8, measured_at="2026-01-01", **half), row(6000, 0.9, measured_at="2026-01-02", **half)]
    assert known(*rows, utilization=0.84) == (6000,), "the newest, not the nearest"
