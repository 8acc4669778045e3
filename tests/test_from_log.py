"""A log of anybody's as a row: only what it shows, and never a proof of service."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prober.logs.classify import classify
from prober.records import Figures, Outcome, Source, Stage, UsageError, Verdict
from prober.results.from_log import ImportFields, import_row, unknown
from prober.results.schema import from_cells, to_cells

LOGS = Path(__file__).parent / "logs"


def log(name: str) -> bytes:
    return next(LOGS.glob(f"{name}*")).read_bytes()


def test_a_refusal_gives_the_upper_end() -> None:
    row = import_row(classify(log("v1-parent-wraps")), ImportFields(gpu="Acme 24"), "1.0")
    assert (row.refused_max_model_len, row.refused_outcome) == (98304, Outcome.KV_TOO_SMALL)
    assert (row.estimated_max_model_len, row.kv_cache_gib, row.vllm_version) == (81792, 4.37, "0.10.2")
    assert (row.starts_max_model_len, row.max_model_len, row.served_max_model_len) == (None, None, None)
    assert (row.source, row.model, row.gpu_count) == (Source.IMPORTED, "acme/otter-7b", 1)
    assert from_cells(to_cells(row)) == row


def test_a_start_gives_a_length_that_starts_and_no_ceiling() -> None:
    row = import_row(classify(log("good-with-decoys")), ImportFields(gpu="Acme 48"), "1.0")
    assert (row.starts_max_model_len, row.max_model_len, row.status) == (32768, None, None)
    assert row.kv_cache_tokens == 213952


def test_what_the_log_does_not_say_is_asked_for_by_flag() -> None:
    verdict = classify(log("v1-parent-wraps"))
    assert "--model-revision" in unknown(import_row(verdict, ImportFields(gpu="Acme 24"), "1.0"))
    told = ImportFields(gpu="Acme 24", model_revision="abc")
    assert "--model-revision" not in unknown(import_row(verdict, told, "1.0"))
    for gpu in (None, "", " "):
        with pytest.raises(UsageError, match="--gpu"):
            import_row(verdict, ImportFields(gpu=gpu), "1.0")


def test_what_the_person_says_outweighs_the_log() -> None:
    told = ImportFields(gpu="Acme 24", model="acme/badger", vllm_version="0.11.0")
    row = import_row(classify(log("v1-parent-wraps")), told, "1.0")
    assert (row.model, row.vllm_version) == ("acme/badger", "0.11.0")


@pytest.mark.parametrize("name", ["only-the-parent", "still-loading", "interleaved-ranks", "gated"])
def test_a_log_that_says_nothing_about_capacity_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="Only a start or a refusal"):
        import_row(classify(log(name)), ImportFields(gpu="Acme 24"), "1.0")


def test_a_length_that_starts_and_is_never_served_is_both() -> None:
    figures = Figures(requested_max_model_len=3969, model="acme/otter-7b")
    row = import_row(
        Verdict(Outcome.UNSERVABLE, Stage.SERVE, "waits", figures=figures), ImportFields(gpu="Acme 24"), "1.0"
    )
    assert (row.starts_max_model_len, row.refused_max_model_len, row.max_model_len) == (3969, 3969, None)


def test_a_log_without_the_model_s_name_asks_for_it() -> None:
    verdict = classify(log("v1-parent-wraps"))
    nameless = replace(verdict, figures=replace(verdict.figures, model=None))
    with pytest.raises(UsageError, match="does not name the model; say it with --model"):
        import_row(nameless, ImportFields(gpu="Acme 24"), "1.0")
