"""What counts as an answer, over HTTP and from the offline child."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fake_engine import wait_until

from prober.records import Verify
from prober.trial.prompts import FIRST_ID, LAST_ID, token_ids
from prober.trial.verify import OfflineProof, Progress, Scheduler, ServerProof, error_message, prompt_length

KEY = "random-key"
USAGE = {"prompt_tokens": 99, "completion_tokens": 1}
METRICS = (
    'vllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'
    'vllm:gpu_cache_usage_perc{engine="0"} 0.25\nvllm:cache_config_info{block_size="16",num_gpu_blocks="7"} 1.0\n'
)


@dataclass
class Script:
    """What the server answers, and what it was asked."""

    completion: tuple[int, str] = (200, json.dumps({"usage": USAGE}))
    models: str = json.dumps({"data": [{"id": "served", "max_model_len": 100}]})
    health: int = 200
    metrics: str = METRICS
    may_answer: threading.Event | None = None
    asked: list[tuple[str, str | None, Any]] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    script: Script

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        self.script.asked.append((self.path, self.headers["Authorization"], None))
        pages = {"/health": (self.script.health, ""), "/v1/models": (200, self.script.models)}
        self._answer(*pages.get(self.path, (200, self.script.metrics)))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.script.asked.append((self.path, self.headers["Authorization"], body))
        if self.script.may_answer:
            self.script.may_answer.wait(10)
        self._answer(*self.script.completion)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def asking(
    script: Script, verify: Verify = Verify.FULL, is_ours: Callable[[], bool] = lambda: True
) -> Iterator[ServerProof]:
    handler = type("Scripted", (Handler,), {"script": script})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        proof = ServerProof(server.server_address[1], KEY, verify, is_ours)
        yield proof
        proof.close()
        server.shutdown()


def finished(script: Script, verify: Verify = Verify.FULL) -> Progress:
    with asking(script, verify) as proof:
        wait_until(lambda: proof.progress.is_finished, what="an answer")
        return proof.progress


def test_full_proof_fills_the_length_exactly() -> None:
    script = Script()
    progress = finished(script)
    assert progress.is_answered
    assert (progress.max_model_len, progress.num_gpu_blocks, progress.block_size) == (100, 7, 16)
    (path, key, body), *burst = [one for one in script.asked if one[2] is not None]
    assert (path, key, body["model"]) == ("/v1/completions", f"Bearer {KEY}", "served")
    assert (len(body["prompt"]), body["max_tokens"], body["ignore_eos"]) == (99, 1, True)
    assert sorted(len(short["prompt"]) for _, _, short in burst) == list(range(4, 12)), "then a burst of short ones"


def test_short_proof_sends_one_token_and_no_proof_none() -> None:
    script = Script(completion=(200, json.dumps({"usage": {"prompt_tokens": 1, "completion_tokens": 1}})))
    assert finished(script, Verify.SHORT).is_answered
    assert len(script.asked[-1][2]["prompt"]) == 1
    progress = finished(script := Script(), Verify.NONE)
    assert progress.is_ready
    assert not progress.is_answered
    assert all(body is None for _, _, body in script.asked)


@pytest.mark.parametrize(
    ("completion", "why"),
    [
        ((200, json.dumps({"usage": {**USAGE, "completion_tokens": 0}})), "ended without a token"),
        ((200, json.dumps({"usage": {**USAGE, "prompt_tokens": 50}})), "only 50 of 99 prompt tokens were read"),
        ((200, "no JSON"), "no answer"),
        ((200, "[]"), "no answer"),
        ((400, json.dumps({"error": {"message": "maximum context length is 99"}})), "HTTP 400: maximum context length"),
        ((400, json.dumps({"object": "error", "message": "flat"})), "HTTP 400: flat"),
        ((500, "Internal"), "HTTP 500: Internal"),
    ],
)
def test_anything_else_is_no_answer(completion: tuple[int, str], why: str) -> None:
    progress = finished(Script(completion=completion))
    assert not progress.is_answered
    assert why in (progress.rejection or "")


def test_stranger_on_the_port_is_not_asked() -> None:
    looked: list[bool] = []

    def is_ours() -> bool:
        looked.append(len(looked) > 1)
        return looked[-1]

    script = Script()
    with asking(script, is_ours=is_ours) as proof:
        wait_until(lambda: proof.progress.is_answered, what="our own server at the third look")
    assert len(looked) == 3
    assert [path for path, _, _ in script.asked[:4]] == ["/health", "/health", "/health", "/v1/models"]


def test_a_closed_proof_stops_asking() -> None:
    script = Script(health=503)
    before = threading.active_count()
    with asking(script) as proof:
        wait_until(lambda: script.asked, what="a question")
        proof.close()
    wait_until(lambda: threading.active_count() <= before, what="the thread's end")
    assert not proof.progress.is_ready


def test_proxies_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert finished(Script()).is_answered


@pytest.mark.parametrize("models", ["", "{}", '{"data": []}', '{"data": [{"id": "x"}]}'])
def test_server_that_does_not_tell_its_length_proves_nothing(models: str) -> None:
    progress = finished(Script(models=models))
    assert not progress.is_answered
    assert progress.max_model_len is None


def test_scheduler_is_watched_while_the_request_runs() -> None:
    held = threading.Event()
    script = Script(may_answer=held)
    with asking(script) as proof:
        wait_until(lambda: proof.progress.is_asked, what="the request")
        proof.look()
        assert proof.progress.steps == 1
        proof.look()
        assert proof.progress.steps == 1
        script.metrics = METRICS.replace("0.25", "0.5")
        proof.look()
        assert proof.progress.steps == 2
        script.metrics = METRICS.replace('running{engine="0"} 1.0', 'running{engine="0"} 0.0').replace(
            "0.0\nvllm:gpu", "1.0\nvllm:gpu"
        )
        proof.look()
        proof.look()
        assert proof.progress.stuck_since is not None
        held.set()
        wait_until(lambda: proof.progress.is_answered, what="the answer")


def test_a_request_is_stuck_when_it_waits_while_nothing_moves() -> None:
    progress = Progress()
    progress.saw(1.0, Scheduler(0, 1, 0.0))
    assert progress.stuck_since == 1.0
    progress.saw(2.0, Scheduler(0, 1, 0.0))
    assert progress.stuck_since == 1.0
    progress.saw(3.0, Scheduler(1, 0, 0.5))
    assert progress.stuck_since is None
    progress.saw(4.0, Scheduler(0, 1, 0.0))
    assert progress.stuck_since is None, "it has just moved"
    progress.saw(5.0, Scheduler(0, 1, 0.0))
    assert progress.stuck_since == 5.0
    assert not Scheduler(0, 0, 0.9).is_stuck


def test_offline_events_are_read_as_they_come(tmp_path: Path) -> None:
    events = tmp_path / "events"
    proof = OfflineProof(events)
    proof.look()
    assert not proof.progress.is_ready
    ready = {"event": "ready", "max_model_len": 100, "num_gpu_blocks": 7, "block_size": None}
    asked = {"event": "asked", "prompt_tokens": 99}
    line = json.dumps(ready) + "\n" + json.dumps(asked)
    events.write_text(line)
    proof.look()
    assert (proof.progress.is_ready, proof.progress.is_asked, proof.progress.max_model_len) == (True, False, 100)
    events.write_text(line + "\n" + json.dumps({"event": "scheduler", "running": 1, "waiting": 0, "kv_usage": 0.1}))
    proof.look()
    assert (proof.progress.is_asked, proof.progress.steps) == (True, 0)
    answered = json.dumps({"event": "answered", "prompt_tokens": 99, "completion_tokens": 1})
    events.write_text(events.read_text() + "\n" + answered + "\n")
    proof.look()
    assert (proof.progress.steps, proof.progress.is_answered) == (1, True)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        ({"event": "answered", "prompt_tokens": 98, "completion_tokens": 1}, "only 98 of 99"),
        ({"event": "answered", "prompt_tokens": 99, "completion_tokens": 0}, "without a token"),
        ({"event": "rejected", "why": "The prompt is longer than the maximum"}, "longer than the maximum"),
    ],
)
def test_offline_answer_must_be_whole(tmp_path: Path, event: dict[str, Any], why: str) -> None:
    events = tmp_path / "events"
    events.write_text(json.dumps({"event": "asked", "prompt_tokens": 99}) + "\n" + json.dumps(event) + "\n")
    proof = OfflineProof(events)
    proof.look()
    assert not proof.progress.is_answered
    assert why in (proof.progress.rejection or "")


def test_prompts_are_ordinary_varied_and_repeatable() -> None:
    assert [prompt_length(verify, 100) for verify in (Verify.FULL, Verify.SHORT)] == [99, 1]
    ids = token_ids(10_000)
    assert ids == token_ids(10_000)
    assert len(ids) == 10_000
    assert FIRST_ID <= min(ids) <= max(ids) <= LAST_ID
    assert len(set(ids)) > 500
    blocks = [tuple(ids[at : at + 16]) for at in range(0, len(ids), 16)]
    assert len(set(blocks)) == len(blocks), "no block is like another: no cached prefix"
    assert token_ids(9_999)[:16] != ids[:16]


def test_error_bodies_are_read() -> None:
    assert error_message('{"error": "Unauthorized"}') == '{"error": "Unauthorized"}'
    assert error_message("[1]") == "[1]"
    assert error_message("x" * 1000) == "x" * 500
