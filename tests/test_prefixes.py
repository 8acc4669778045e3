"""One refusal in every dress that logs wear; its outcome and figures never change."""

from __future__ import annotations

import json
import textwrap

import pytest

from prober.logs.classify import Reader, classify
from prober.records import Outcome

HEADER = "(EngineCore_DP0 pid=12) ERROR 04-15 06:30:01 [core.py:700] "
MESSAGE = (
    "ValueError: To serve at least one request with the model's max seq len (133072), (5.11 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (4.01 GiB). Based on the available memory, the estimated "
    "maximum model length is 104448. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when "
    "initializing the engine."
)
LINE = HEADER + MESSAGE
BAR = "Loading safetensors checkpoint shards: 100%|██████████| 5/5 [00:10<00:00,  2.10s/it]"


def hard(width: int) -> str:
    return "\n".join(LINE[start : start + width] for start in range(0, len(LINE), width))


DRESSES = {
    "bare": MESSAGE,
    "logger": LINE,
    "old logger": "ERROR 04-15 06:30:01 engine.py:366] " + MESSAGE,
    "carriage return": LINE + "\r\n" + HEADER + "next\r\n",
    "compose": "vllm-1  | " + LINE,
    "kubernetes": "2026-01-01T00:00:00.123456789Z stderr F " + LINE,
    "kubectl": "[pod/vllm-0/server] " + LINE,
    "docker timestamps": "2026-01-01T00:00:00.123456789Z " + LINE,
    "buildkite": "[2026-01-28T23:59:42Z] " + LINE,
    "systemd": "Jan 01 00:00:00 host vllm[1]: " + LINE,
    "torchrun": "[rank0]: " + MESSAGE,
    "json-file": json.dumps({"log": LINE + "\n", "stream": "stdout", "time": "2026-01-01T00:00:00Z"}),
    "cloud": json.dumps({"severity": "INFO", "textPayload": LINE}),
    "vllm json": json.dumps({"level": "ERROR", "message": "EngineCore failed", "exc_info": f"Traceback:\n{MESSAGE}"}),
    "colours": f"\x1b[1;36m(EngineCore_DP0 pid=7)\x1b[0;0m \x1b[31mERROR\x1b[0m \x1b[90m01-26 09:25:37\x1b[0m "
    f"\x1b[90m[core.py:935]\x1b[0m {MESSAGE}",
    "broken colours": f"[0;36m(EngineCore_DP0 pid=7)[0;0m [31mERROR[0m [90m01-26 09:25:37[0m [core.py:935] {MESSAGE}",
    "coloured numbers": MESSAGE.replace("133072", "\x1b[1;36m133072\x1b[0m"),
    "progress bar before": f"{BAR}\r{LINE}",
    "progress bar glued": BAR + LINE,
    "records on one line": f"INFO 04-15 06:30:01 [gpu_worker.py:1] Available KV cache memory: 4.01 GiB{LINE}"
    "INFO 04-15 06:30:02 [core.py:1] bye",
    "ray": f"\x1b[36m(RayWorkerWrapper pid=12, ip=10.0.0.1)\x1b[0m {MESSAGE} [repeated 30x across cluster]",
    "passed on by a parent": f"RuntimeError: Worker failed with error '{MESSAGE}', please check the stack trace above",
    "a terminal's box": f"│ {LINE}      │",
    "a launcher's log": f"2026-06-09 14:01:52.982 [Error] (Process) {LINE}",
    "quoted": f"> {LINE}",
    "thousands": LINE.replace("133072", "133,072").replace("104448", "104,448"),
    "no end of line": LINE,
    **{f"hard wrap at {width}": hard(width) for width in (60, 72, 80, 99, 100, 120, 132, 160, 211)},
    **{
        f"soft wrap at {width}": "\n".join(textwrap.wrap(LINE, width, subsequent_indent="    "))
        for width in (60, 80, 100, 132)
    },
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
@pytest.mark.parametrize("dress", DRESSES, ids=str)
def test_a_refusal_is_read_in_every_dress(dress: str, encoding: str) -> None:
    found = classify((DRESSES[dress] + "\n").encode(encoding))
    figures = found.figures
    assert found.outcome is Outcome.KV_TOO_SMALL
    assert (figures.requested_max_model_len, figures.needed_gib, figures.available_gib) == (133072, 5.11, 4.01)
    assert figures.estimated_max_len == 104448


@pytest.mark.parametrize("size", [1, 61, 1000])
@pytest.mark.parametrize("dress", DRESSES, ids=str)
def test_how_a_dressed_refusal_is_cut_into_chunks_changes_nothing(dress: str, size: int) -> None:
    ordinary = "INFO 04-15 06:30:00 [x.py:1] all is well\n" * 60
    content = f"{ordinary}{DRESSES[dress]}\n{ordinary}".encode()
    reader = Reader()
    for start in range(0, len(content), size):
        reader.feed(content[start : start + size])
    assert reader.is_decided, "before the end of the log"
    assert reader.verdict() == classify(content)
    assert reader.verdict().line == 61 + dress.endswith("at 60"), "a header of its own fills a narrow line"
    assert "all is well" not in reader.verdict().evidence[:30]


def test_evidence_is_cleaned_of_everything_around_it() -> None:
    plain = ("compose", "kubernetes", "systemd", "json-file", "colours", "ray", "a terminal's box")
    for dress in plain:
        assert classify(DRESSES[dress].encode()).evidence == MESSAGE
    assert classify(f"{BAR}\r{BAR}\r{MESSAGE}\r{BAR}".encode()).evidence == MESSAGE, "redraws are lines of their own"


def test_invalid_bytes_do_no_harm() -> None:
    found = classify(b"\xff\xfe\xfa broken \x80\n" * 3 + b"\n\x80\x81" + LINE.encode() + b"\xff\n")
    assert found.outcome is not Outcome.READY
    found = classify(b"\x80\x81\x82\x83 broken\n" + LINE.encode() + b"\xff\n")
    assert (found.outcome, found.line) == (Outcome.KV_TOO_SMALL, 2)


def test_lines_of_other_processes_inside_a_wrapped_message_are_left_out() -> None:
    for words in ("which is", "KV cache memory ("):
        half = LINE.index(words)
        text = f"{LINE[:half]}\n(Worker_TP1 pid=3) INFO 04-15 06:30:01 [x.py:1] something else\n{LINE[half:]}\n"
        assert classify(text.encode()).figures == classify(LINE.encode()).figures


def test_wherever_a_message_is_broken_in_two_it_is_read_from_its_first_line() -> None:
    more = "INFO 04-15 06:30:02 [x.py:1] all is well\n" * 60
    for place in range(LINE.index("To serve") + 1, len(LINE)):
        found = classify(f"{LINE[:place]}\n{LINE[place:]}\n{more}".encode())
        assert (found.outcome, found.line) == (Outcome.KV_TOO_SMALL, 1), LINE[place:]
        assert found.figures.requested_max_model_len == 133072, LINE[place:]


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("Available KV cache memory: -2.14 GiB", "available_gib", -2.14),
        ("the rest of the memory reserved for KV Cache is -0.94GiB.", "available_gib", -0.94),
        ("Loading model weights took 244.61 MB", "weights_gib", 244.61 / 1024),
        ("Current kv cache memory in use is 11811160064 bytes.", "available_gib", 11.0),
        ("# cuda blocks: 0, # CPU blocks: 4681", "gpu_blocks", 0),
        ("# CPU blocks: 512", "gpu_blocks", 512),
        ("# GPU blocks: 229, # CPU blocks: 512", "cpu_blocks", 512),
        ("Maximum concurrency for 4,200 tokens per request: 0.00x", "concurrency", 0.0),
        ("GPU KV cache size:         1,037,152 tokens", "kv_cache_tokens", 1037152),
        ("Graph capturing finished in 18 secs, took -0.03 GiB", "cuda_graph_gib", -0.03),
        ("Auto-fit max_model_len: reduced from 262144 to 172032 to fit in x (3 GiB)", "estimated_max_len", 172032),
        ("total_gpu_memory (6.00GiB) x gpu_memory_utilization (0.90) = 5.40GiB", "gpu_memory_utilization", 0.9),
        ("Initializing a V1 LLM engine (v0.9.2rc2.dev18+geb9) with config: x", "vllm_version", "0.9.2rc2.dev18+geb9"),
        ("greater than the derived max_model_len", "model_limit", None),
    ],
)  # fmt: skip
def test_figures_in_their_many_forms(text: str, name: str, value: object) -> None:
    got = getattr(classify(f"INFO 04-15 06:30:01 [x.py:1] {text}\n".encode()).figures, name)
    assert got == (pytest.approx(value) if isinstance(value, float) else value)


def test_of_several_ranks_the_smallest_binds_and_the_largest_weights() -> None:
    ranks = ((3, 9.5, 7.0), (1, 8.25, 7.5), (2, 9.0, 6.0))
    text = "".join(
        f"(Worker_TP{rank} pid={rank}) INFO 04-15 06:30:01 [x.py:1] Model loading took {weights} GiB and 3.0 seconds\n"
        f"(Worker_TP{rank} pid={rank}) INFO 04-15 06:30:01 [x.py:1] Available KV cache memory: {room} GiB\n"
        f"INFO 04-15 06:30:01 [x.py:1] GPU KV cache size: {int(room * 1000)} tokens\n"
        for rank, room, weights in ranks
    )
    figures = classify(text.encode()).figures
    assert (figures.available_gib, figures.kv_cache_tokens, figures.weights_gib) == (8.25, 8250, 7.5)


@pytest.mark.parametrize("keep", [(0, 140), (0, 200), (60, 400), (110, 500), (118, 260)])
def test_a_message_cut_at_an_end_still_reads_as_what_it_is(keep: tuple[int, int]) -> None:
    assert classify(LINE[slice(*keep)].encode()).outcome is Outcome.KV_TOO_SMALL


def test_wherever_a_message_is_cut_it_never_reads_as_another_failure() -> None:
    unsure = (Outcome.KV_TOO_SMALL, Outcome.UNFINISHED, Outcome.CRASH)
    for place in range(len(LINE)):
        assert classify(LINE[:place].encode()).outcome in unsure
        assert classify(LINE[place:].encode()).outcome in unsure
