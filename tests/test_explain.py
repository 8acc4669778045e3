"""`prober explain`: one sentence, the place, the budget, the ways out; as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prober.advice.explain import explain, explain_verdict, render, to_dict
from prober.records import Figures, Outcome, Stage, Verdict

LOGS = Path(__file__).parent / "logs"


def chunks(name: str, size: int = 100) -> list[bytes]:
    content = next(LOGS.glob(f"{name}*")).read_bytes()
    return [content[start : start + size] for start in range(0, len(content), size)]


def test_a_refusal_is_told_with_its_numbers() -> None:
    text = render(explain(chunks("v1-parent-wraps")))
    assert text.startswith("One request of 98,304 tokens needs more KV cache than there is: 5.25 GiB against 4.37 GiB.")
    assert "stage kv_cache, line 14, EngineCore_DP0" in text
    assert "1. ask for a shorter length: --max-model-len 81776 → about 81,776 tokens" in text
    assert "13.48 weights + 4.37 KV cache (GiB)" in text


def test_json_has_the_promised_keys_and_survives_a_round_trip() -> None:
    found = json.loads(json.dumps(to_dict(explain(chunks("v1-parent-wraps")))))
    assert {"outcome", "stage", "evidence", "line", "process", "figures", "fixes"} <= found.keys()
    assert found["outcome"] == "kv_too_small"
    assert found["figures"]["needed_gib"] == 5.25
    assert found["figures"]["cpu_blocks"] is None
    assert set(found["fixes"][0]) == {"action", "flag", "value", "expected_max_model_len", "why"}


def test_a_log_that_shows_nothing_is_unfinished_and_has_no_fix() -> None:
    for content in ([], [b""], [b"hello\n"]):
        explanation = explain(content)
        assert explanation.verdict.outcome is Outcome.UNFINISHED
        assert explanation.fixes == ()
        assert "neither a failure nor readiness" in render(explanation)


def test_a_log_that_only_wraps_says_which_part_to_bring() -> None:
    explanation = explain(chunks("only-the-parent"))
    assert explanation.verdict.outcome is Outcome.CRASH
    assert explanation.sentence.endswith("only wraps a cause that it does not show.")
    assert "provide the part of the log before this line" in render(explanation)


def test_a_budget_holds_only_what_was_printed() -> None:
    assert explain(chunks("gated")).budget == ()


@pytest.mark.parametrize("path", sorted(LOGS.glob("*.log")), ids=lambda path: path.stem)
def test_every_log_renders_to_text(path: Path) -> None:
    text = render(explain([path.read_bytes()]))
    assert text.endswith("\n")
    assert "None" not in text


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        (
            Verdict(Outcome.SEQUENCE_SLOTS, Stage.CAPTURE, figures=Figures(sequence_slots=134)),
            "The Mamba cache has 134 slots, fewer than max_num_seqs asks for.",
        ),
        (
            Verdict(Outcome.CRASH, Stage.SERVE),
            "The server failed while serving a request, for a reason that says nothing about memory.",
        ),
        (
            Verdict(Outcome.KV_TOO_SMALL, Stage.KV_CACHE),
            "One request of the length needs more KV cache than there is.",
        ),
    ],
)
def test_a_sentence_needs_no_figure_and_uses_what_there_is(verdict: Verdict, sentence: str) -> None:
    assert explain_verdict(verdict).sentence == sentence
