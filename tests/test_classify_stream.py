"""Logs of any size and any content: bounded memory, linear time, no exception."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prober.logs.classify import Reader, classify, conclude
from prober.logs.messages import FIGURES, FRAMES, OUTER_FRAMES, STAGES
from prober.logs.rules import RULES, WRAPPERS
from prober.records import Outcome, Verdict

REFUSAL = (
    b"ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV "
    b"cache (7344). Try increasing `gpu_memory_utilization`\n"
)
NAMES = {rule.name for rule in RULES}
TEXTS = (
    [rule.template.text for rule in (*RULES, *WRAPPERS)]
    + [t.text for t in FIGURES]
    + [t.text for _, t in STAGES + FRAMES + OUTER_FRAMES]
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(st.binary(max_size=200), st.sampled_from(TEXTS).map(str.encode)), max_size=30),
    st.integers(1, 50),
)
def test_no_log_raises_and_every_reading_is_a_verdict(parts: list[bytes], size: int) -> None:
    content = b"".join(parts)
    reader = Reader()
    for start in range(0, len(content), size):
        reader.feed(content[start : start + size])
        assert isinstance(reader.verdict(), Verdict)
    assert conclude(reader, 1).outcome is not Outcome.FITS


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=300), st.text(max_size=300))
def test_text_around_a_refusal_does_not_hide_it(before: str, after: str) -> None:
    # Texts are drawn from the rules' own words, too: a message is no text around one.
    assume(not {classify(part.encode("utf-8", "replace")).rule for part in (before, after)} & NAMES)
    content = f"{before}\n".encode("utf-8", "replace") + REFUSAL + after.encode("utf-8", "replace")
    found = classify(b"start\n" + content)
    assert found.outcome is Outcome.KV_TOO_SMALL
    assert found.figures.max_tokens_in_cache == 7344


@pytest.mark.parametrize(
    "text",
    [
        b"To serve at least one request with the model's max seq len (1",
        b"CUDA out of memory. ",
        b"\x1b[31m\x1b[",
        b"(EngineCore_DP0 pid=1) ERROR 01-01 00:00:00 [core.py:1] ",
        b'{"log":"Error: {"a":{"a":{"a":\n',
        b"Maximum concurrency for 1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1 tokens per request:",
        b"Free memory on device (",
        b"Model loading took \r",
        b"a.b-c | " * 20 + b"Error: \n",
    ],
    ids=lambda text: text[:20].decode(),
)
def test_time_is_linear_in_adversarial_text(text: bytes) -> None:
    def seconds(size: int) -> float:
        content = (text * (size // len(text) + 1))[:size]
        began = time.process_time()
        classify(content)
        return time.process_time() - began

    small = min(seconds(200_000) for _ in range(2))
    assert seconds(2_000_000) < 30 * small + 0.5


def test_ordinary_text_passes_fast_and_in_little_memory() -> None:
    line = (
        b"INFO 05-01 12:%02d:%02d [loggers.py:127] Engine 000: Avg prompt throughput: %d.1 tokens/s, Running: 3 reqs, "
        b"Waiting: 0 reqs, GPU KV cache usage: 1.%d%%, Prefix cache hit rate: 12.0%%\n"
    )
    block = b"".join(line % (i // 60 % 60, i % 60, i, i % 10) for i in range(8_000))
    reader = Reader()
    reader.feed(block)
    began = time.process_time()
    for _ in range(20):
        reader.feed(block)
    rate = 20 * len(block) / (time.process_time() - began) / 1e6
    tracemalloc.start()
    reader.feed(block)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    reader.feed(REFUSAL)
    reader.finish()
    assert reader.verdict().outcome is Outcome.KV_TOO_SMALL
    assert rate > 25, f"{rate:.0f} MB/s"  # 50 and more on an idle core; half of it where others work too
    assert peak < 20e6


def test_a_line_without_end_is_read_in_pieces() -> None:
    content = b"x" * 3_000_000 + REFUSAL.strip()
    assert classify(content).outcome is Outcome.KV_TOO_SMALL


def test_line_numbers_count_ends_of_lines_and_not_redraws() -> None:
    content = b"one\r\ntwo\rredrawn\rredrawn\r\n" + b"three\n" * 70_000 + REFUSAL
    assert classify(content).line == 70_003
    assert classify(b"\n" + REFUSAL).line == 2
