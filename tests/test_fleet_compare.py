"""Tonight against the night before: what is a regression, what is jitter, what is said, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from row_makers import a_row
from test_fleet_jobs import H100, a_known_row, a_node, cells_of, one_model

from prober.fleet.compare import (
    Compared,
    ExitCode,
    compare,
    exit_code,
    first_bad_version,
    gone_from_fleet,
    proven_again,
    with_first_bad,
)
from prober.fleet.jobs import RefusedCell
from prober.fleet.openmetrics import open_metrics
from prober.fleet.protocol import End, Reply
from prober.fleet.summary import NightSummary, between_versions, markdown, summary_json
from prober.records import Status
from prober.results.diff import ChangeKind
from prober.results.schema import Row

(CELL,) = cells_of(one_model(), [a_node("a")])
T0 = datetime(2026, 1, 8, 1, 0, tzinfo=UTC)


def answered(**changes: Any) -> Reply:
    return Reply(End.ANSWERED, "done", a_known_row(**({"measured_at": "2026-01-08T00:00:00+00:00"} | changes)))


def one(
    answer: Reply, previous: Sequence[Row] = (), history: Sequence[Row] = (), again: Reply | None = None
) -> Compared:
    (compared,) = compare([(CELL, answer)], previous, {CELL.key: history})
    return compared if again is None else proven_again(compared, again)


def a_night(*compared: Compared, **changes: Any) -> NightSummary:
    night = NightSummary("nightly", T0, T0.replace(hour=3), compared, fresh=(), refused=(), gone=())
    return replace(night, **changes)


OLD = a_known_row(max_model_len=4000)


def test_a_fallen_ceiling_is_proven_again_before_it_is_a_regression() -> None:
    fell = one(answered(max_model_len=3000), [OLD])
    assert (fell.kind, fell.needs_proof, fell.is_regression) == (ChangeKind.SHORTER, True, False)
    assert exit_code([fell]) is ExitCode.PARTLY_FAILED  # nobody is woken by a single look
    again = proven_again(fell, answered(max_model_len=3008))
    assert (again.is_regression, again.needs_proof) == (True, False)
    assert exit_code([again]) is ExitCode.REGRESSION


def test_a_fall_under_another_environment_is_seen_as_one() -> None:
    """Rows of before the column, and a node that got a variable: still the same cell."""
    assert one(answered(max_model_len=2000, environment="NCCL_P2P_DISABLE=1"), [OLD]).kind is ChangeKind.SHORTER


def test_a_ceiling_that_stands_up_again_is_fine() -> None:
    again = one(answered(max_model_len=3000), [OLD], again=answered(max_model_len=4000))
    assert (again.kind, exit_code([again])) == (None, ExitCode.FINE)
    assert again.new is not None
    assert again.new.max_model_len == 4000
    text = markdown(a_night(again))
    assert "## Fell once, not confirmed" in text
    assert "4,000 -> 3,000, then 4,000" in text


def test_a_fall_that_cannot_be_proven_again_is_no_regression_and_not_fine() -> None:
    lost = one(answered(max_model_len=3000), [OLD], again=Reply(End.FAILED, "lost"))
    assert (lost.is_regression, exit_code([lost])) == (False, ExitCode.PARTLY_FAILED)


def test_a_gain_is_no_regression() -> None:
    gain = one(answered(max_model_len=5000), [OLD])
    assert (gain.kind, exit_code([gain])) == (ChangeKind.LONGER, ExitCode.FINE)


def test_a_new_row_is_gained() -> None:
    assert one(answered()).kind is ChangeKind.GAINED
    assert one(answered(), [a_known_row(kv_cache_dtype="fp8")]).kind is ChangeKind.GAINED


def test_a_lost_row_is_told_and_partly_failed() -> None:
    lost = one(Reply(End.FAILED, "the node is lost"), [OLD])
    assert (lost.kind, exit_code([lost])) == (ChangeKind.LOST, ExitCode.PARTLY_FAILED)
    assert "failed, the node is lost" in markdown(a_night(lost))


def test_a_row_without_a_number_is_unsettled_and_partly_failed() -> None:
    row = one(answered(status=Status.INCONCLUSIVE, max_model_len=None), [OLD])
    assert (row.kind, exit_code([row])) == (ChangeKind.UNSETTLED, ExitCode.PARTLY_FAILED)


def test_what_no_longer_fits_fell() -> None:
    assert one(answered(status=Status.DOES_NOT_FIT, max_model_len=None), [OLD]).kind is ChangeKind.SHORTER


@pytest.mark.parametrize(("tonight", "kind"), [(3984, None), (3960, None), (3900, ChangeKind.SHORTER)])
def test_a_row_may_move_as_far_as_it_always_has(tonight: int, kind: ChangeKind | None) -> None:
    history = [a_known_row(max_model_len=length) for length in (4000, 3960, 3984)]
    assert one(answered(max_model_len=tonight), [OLD], history).kind is kind


def test_a_row_that_never_moved_may_not() -> None:
    assert one(answered(max_model_len=3984), [OLD], [OLD, OLD]).kind is ChangeKind.SHORTER
    assert one(answered(max_model_len=3999), [OLD], [OLD, OLD]).kind is None  # a fortieth of a percent wakes nobody


def test_another_machine_is_measured_by_the_spread_between_machines() -> None:
    rows = [a_known_row(max_model_len=4000, machine="m1"), a_known_row(max_model_len=3900, machine="m2")]
    assert one(answered(max_model_len=3910, machine="m3"), rows).kind is None
    assert one(answered(max_model_len=3910, machine="m1"), rows).kind is ChangeKind.SHORTER
    assert one(answered(max_model_len=3700, machine="m3"), rows).kind is ChangeKind.SHORTER


def test_another_version_is_compared_with_the_newest_older_one() -> None:
    rows = [a_known_row(vllm_version="0.27.0", max_model_len=5000), a_known_row(vllm_version="0.28.0")]
    same = one(answered(vllm_version="0.32.0"), rows)
    assert (same.kind, same.old) == (None, rows[1])
    assert one(answered(vllm_version="0.32.0", max_model_len=3000), rows).kind is ChangeKind.SHORTER
    assert one(answered(vllm_version="0.26.0", max_model_len=3000), rows).kind is ChangeKind.GAINED


def test_another_commit_of_the_model_is_compared_too() -> None:
    rows = [a_known_row(model_revision="aaa", max_model_len=4000)]
    assert one(answered(model_revision="bbb", max_model_len=3000), rows).kind is ChangeKind.SHORTER


def test_the_first_bad_version_is_named() -> None:
    lengths = {"0.27.0": 4000, "0.28.0": 4000, "0.30.0": 3000, "0.32.0": 3000}
    rows = [a_known_row(vllm_version=version, max_model_len=length) for version, length in lengths.items()]
    assert first_bad_version(rows) == "0.30.0"
    assert first_bad_version(rows[:2]) is None
    assert first_bad_version([]) is None
    fell = one(answered(vllm_version="0.32.0", max_model_len=3000), rows[:2], again=answered(max_model_len=3000))
    fell = proven_again(replace(fell, again=None), answered(vllm_version="0.32.0", max_model_len=3000))
    (named,) = with_first_bad([fell], rows[:3])
    assert named.first_bad_version == "0.30.0"
    assert "first bad version 0.30.0" in markdown(a_night(named))


def test_starting_longer_than_serving_is_shown_as_what_it_is() -> None:
    old = a_row(vllm_version="0.28.0", max_model_len=3969, starts_max_model_len=4096)
    new = a_row(vllm_version="0.32.0", max_model_len=3968, starts_max_model_len=3968)
    (line,) = between_versions([new, old])
    assert "vLLM 0.28.0 -> 0.32.0: serves 3,969 -> 3,968" in line
    assert "0.28.0 starts at 4,096 at least, where a full-length request is never answered" in line
    assert "0.32.0 starts" not in line


def test_machines_that_are_missing_tonight_are_no_fine_night() -> None:
    absent = [RefusedCell("Qwen/Qwen3-8B", "H100", 1, "0.28.0", "the fleet has no H100")]
    assert gone_from_fleet(absent, [OLD]) == absent
    assert gone_from_fleet([replace(absent[0], tensor_parallel_size=16)], [OLD]) == []
    assert exit_code([one(answered())], absent) is ExitCode.PARTLY_FAILED


@pytest.mark.parametrize("status", [Status.BAD_CONFIG, Status.DOES_NOT_FIT, Status.MODEL_LIMIT])
def test_every_answer_is_one(status: Status) -> None:
    assert exit_code([one(answered(status=status, max_model_len=None))]) is ExitCode.FINE


def test_a_regression_is_louder_than_a_failure() -> None:
    fell = one(answered(max_model_len=3000), [OLD], again=answered(max_model_len=3000))
    assert exit_code([one(Reply(End.NOT_REACHED)), fell]) is ExitCode.REGRESSION


def test_the_summary_holds_what_a_person_needs_and_no_path() -> None:
    (path_cell,) = cells_of(one_model(name="/secret/place/own-model"), [a_node("a")])
    failed = compare([(path_cell, Reply(End.FAILED, "a | pipe"))], [], {})
    refused = [RefusedCell("Qwen/Qwen3-8B", H100, 16, "0.28.0", "it needs 16 GPUs")]
    text = markdown(a_night(one(answered(max_model_len=4000), [OLD]), *failed, refused=refused))
    assert text.startswith("# nightly: partly failed\n")
    assert "1 of 2 cells answered" in text
    assert "a \\| pipe" in text
    assert "it needs 16 GPUs" in text
    assert "| Qwen/Qwen3-8B | NVIDIA H100 80GB HBM3 | 1 |  |  | 0.28.0 | 4,000 |" in text
    assert "/secret" not in text


def test_the_json_says_the_same() -> None:
    fell = one(answered(max_model_len=3000), [OLD], again=answered(max_model_len=3000))
    told = json.loads(summary_json(a_night(fell)))
    assert told["exit_code"] == 1
    (cell,) = told["cells"]
    assert (cell["change"], cell["regression"], cell["old"]["max_model_len"]) == ("shorter", True, 4000)


def test_metrics_are_text_that_a_collector_reads() -> None:
    strange = answered(other_flags='--x "a\\b"', max_model_len=5)
    text = open_metrics(a_night(one(answered()), one(strange), one(Reply(End.FAILED)), fresh=[OLD]))
    lines = text.splitlines()
    assert lines[-1] == "# EOF"
    samples = [line for line in lines if line.startswith("prober_ceiling_tokens{")]
    assert len(samples) == len({line.rsplit(" ", 1)[0] for line in samples}) == 2
    assert any('model="Qwen/Qwen3-8B"' in line and line.endswith(" 4000") for line in samples)
    assert any('other_flags="--x \\"a\\\\b\\""' in line and line.endswith(" 5") for line in samples)
    assert 'prober_fleet_cells{end="answered"} 2' in lines
    assert 'prober_fleet_cells{end="fresh"} 1' in lines
    assert "prober_fleet_regressions 0" in lines
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
