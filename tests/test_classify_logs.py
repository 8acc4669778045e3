"""Whole logs, rendered with figures of our own: the outcome stands in each file's name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prober.logs.classify import Reader, classify, conclude
from prober.records import Figures, Outcome, Stage

LOGS = sorted((Path(__file__).parent / "logs").glob("*.log"))
FAILURES = [path for path in LOGS if path.name.split(".")[-2] not in ("ready", "unfinished")]
GOOD = [path for path in LOGS if path not in FAILURES]


def log(name: str) -> bytes:
    return next(path for path in LOGS if path.name.startswith(name)).read_bytes()


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_each_log_has_the_outcome_in_its_name(path: Path) -> None:
    assert classify(path.read_bytes()).outcome == path.name.split(".")[-2]


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("size", [1, 7, 64, 4096])
def test_how_a_log_is_cut_into_chunks_changes_nothing(path: Path, size: int) -> None:
    content = path.read_bytes()
    reader = Reader()
    for start in range(0, len(content), size):
        reader.feed(content[start : start + size])
    reader.finish()
    assert reader.verdict() == classify(content)


@pytest.mark.parametrize("path", [path for path in GOOD if "restarted" not in path.name], ids=lambda path: path.stem)
def test_a_good_log_never_looks_decided_on_its_way(path: Path) -> None:
    reader = Reader()
    for line in path.read_bytes().splitlines(keepends=True):
        reader.feed(line)
        assert not reader.is_decided, line


def test_a_refusal_is_decided_as_soon_as_its_line_is_complete_and_keeps_all_its_figures() -> None:
    reader = Reader()
    for line in log("v1-parent-wraps").splitlines(keepends=True):
        reader.feed(line)
        if b"To serve at least one request" in line:
            break
        assert not reader.is_decided, line
    assert reader.is_decided
    assert reader.figures == Figures(
        requested_max_model_len=98304,
        needed_gib=5.25,
        available_gib=4.37,
        estimated_max_len=81792,
        weights_gib=13.4811,
        gpu_memory_utilization=0.85,
        max_num_batched_tokens=2048,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        vllm_version="0.10.2",
        model="acme/otter-7b",
    )


def test_half_a_refusal_is_not_decided() -> None:
    content = log("v0-refusal")
    reader = Reader()
    reader.feed(content[: content.index(b"larger than the maximum")])
    assert not reader.is_decided
    assert reader.stage is Stage.KV_CACHE


def test_the_child_s_refusal_is_the_cause_and_not_its_parent_s_complaint() -> None:
    found = classify(log("v1-parent-wraps"))
    assert found.process == "EngineCore_DP0"
    assert found.evidence.startswith("ValueError: To serve at least one request")
    assert found.line == 14


def test_v0_figures() -> None:
    figures = classify(log("v0-refusal")).figures
    assert (figures.requested_max_model_len, figures.max_tokens_in_cache) == (24000, 19216)
    assert (figures.gpu_blocks, figures.cpu_blocks) == (1201, 2048)
    assert (figures.weights_gib, figures.vllm_version) == (13.482, "0.5.4")


def test_the_rank_that_found_its_device_busy_is_named() -> None:
    found = classify(log("interleaved-ranks"))
    assert (found.process, found.rank) == ("Worker_TP1", 1)
    assert (found.figures.free_gib, found.figures.total_gib) == (11.03, 23.52)


def test_memory_that_runs_out_after_readiness_is_of_the_serving_stage() -> None:
    assert classify(log("serving-oom")).stage is Stage.SERVE


def test_a_second_start_in_one_log_has_its_own_figures() -> None:
    figures = classify(log("restarted-with-another-length")).figures
    assert (figures.requested_max_model_len, figures.estimated_max_len) == (32768, 24960)


def test_a_start_that_shows_nothing_yet_leaves_the_failure_before_it_standing() -> None:
    again = b"(APIServer pid=1) INFO 06-03 09:10:01 [api_server.py:1896] vLLM API server version 0.10.2\n"
    assert classify(log("v1-parent-wraps") + again).outcome is Outcome.KV_TOO_SMALL


SERVER = b"(APIServer pid=1) INFO 06-03 09:10:01 [api_server.py:1896] vLLM API server version 0.10.2\n"
ENGINE = (
    b"(EngineCore_DP0 pid=9) INFO 06-03 09:10:02 [core.py:77] Initializing a V1 LLM engine (v0.10.2) with config: x\n"
)
READY = b"(APIServer pid=1) INFO:     Application startup complete.\n"


def test_a_start_that_prints_what_the_one_before_it_printed_is_read_all_the_same() -> None:
    content = log("v1-parent-wraps")
    once, twice = classify(content), classify(content + SERVER + content)
    assert once.line is not None
    assert twice == replace(once, line=once.line + content.count(b"\n") + 1)


def test_a_start_without_a_known_cause_leaves_the_failure_before_it_standing() -> None:
    unknown = SERVER + b"Traceback (most recent call last):\nFooError: bar\n"
    assert classify(log("v1-parent-wraps") + unknown).outcome is Outcome.KV_TOO_SMALL


def test_a_start_that_fails_of_something_known_outweighs_the_failure_before_it() -> None:
    found = classify(log("v1-parent-wraps") + SERVER + log("no-network"))
    assert (found.outcome, found.rule) == (Outcome.CRASH, classify(log("no-network")).rule)


def test_a_start_after_a_good_one_is_not_good_itself() -> None:
    assert classify(SERVER + READY).outcome is Outcome.READY
    assert classify(SERVER + READY + SERVER).outcome is Outcome.UNFINISHED


def test_an_engine_that_starts_after_its_server_gave_up_belongs_to_another_start() -> None:
    for before in (log("v1-parent-wraps"), ENGINE + log("v1-parent-wraps")):
        found = classify(before + ENGINE + READY)
        assert (found.outcome, found.figures.needed_gib) == (Outcome.READY, None)


def test_a_line_that_only_names_an_engine_begins_no_start() -> None:
    reader = Reader()
    reader.feed(
        log("v1-parent-wraps") + b"(APIServer pid=1) INFO 06-03 09:10:03 [core.py:9] The V1 LLM engine is gone\n"
    )
    assert reader.is_decided
    assert reader.figures.needed_gib == 5.25


def test_an_engine_s_trouble_is_of_the_start_that_its_server_began() -> None:
    found = classify(SERVER + ENGINE + log("v1-parent-wraps").partition(b"vLLM API server version")[2])
    assert found.outcome is Outcome.KV_TOO_SMALL


def test_stage_is_ready_once_the_server_is() -> None:
    reader, stages = Reader(), []
    for part in (SERVER, ENGINE, READY):
        reader.feed(part)
        stages.append(reader.stage)
    assert [stage is Stage.READY for stage in stages] == [False, False, True]


def test_to_finish_twice_changes_nothing() -> None:
    for path in LOGS:
        reader = Reader()
        reader.feed(path.read_bytes())
        reader.finish()
        once = reader.verdict()
        reader.finish()
        assert reader.verdict() == once


@pytest.mark.parametrize("status", [0, 1, -9, -10, 137, None])
def test_a_process_that_ends_without_a_cause_is_a_crash_whatever_its_status(status: int | None) -> None:
    for name in ("still-loading", "good-with-decoys", "only-the-parent"):
        reader = Reader()
        reader.feed(log(name))
        assert conclude(reader, status).outcome is Outcome.CRASH


def test_an_end_without_a_cause_is_of_the_stage_that_the_start_had_reached() -> None:
    for name, stage in (("still-loading", Stage.LOAD), ("good-with-decoys", Stage.SERVE)):
        reader = Reader()
        reader.feed(log(name))
        assert conclude(reader, -9).stage is stage


def test_an_end_without_a_cause_tells_the_exit_status() -> None:
    for status, evidence in ((-9, "ended with status -9"), (None, "ended with an unknown status")):
        reader = Reader()
        reader.feed(log("still-loading"))
        found = conclude(reader, status)
        assert (found.evidence, found.rule) == (evidence, "exit_status")


def test_a_cause_in_the_log_outweighs_the_exit_status() -> None:
    reader = Reader()
    reader.feed(log("v0-refusal"))
    assert conclude(reader, -9).outcome is Outcome.KV_TOO_SMALL
    assert conclude(reader, 2).outcome is Outcome.KV_TOO_SMALL, "not every status of 2 is a usage error"


def test_a_usage_error_is_a_bad_configuration_only_with_its_exit_status() -> None:
    for status, outcome in ((2, Outcome.BAD_CONFIG), (1, Outcome.CRASH)):
        reader = Reader()
        reader.feed(b"usage: serve.py [-h]\nserve.py: error: Expected a JSON object\n")
        found = conclude(reader, status)
        assert (found.outcome, found.stage) == (outcome, Stage.CONFIG)


def test_length_is_the_models_and_not_its_drafts() -> None:
    assert classify(log("draft-model-prints")).figures.requested_max_model_len == 131_072


def test_batch_without_chunks_names_the_longest_length() -> None:
    assert classify(log("batch-without-chunks")).figures.model_limit == 8192
