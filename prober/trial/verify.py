"""Verify that a started vLLM serves: send requests without blocking the caller that follows the log."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from prober.records import Verify
from prober.trial.prompts import token_ids

POLL_SECONDS = 0.5
CALL_SECONDS = 10.0
BURST_REQUESTS, BURST_TOKENS = 8, 4  # short concurrent requests after the full-length one
SHORTEST_FOR_BURST = 4 * (BURST_REQUESTS + BURST_TOKENS)
UNSUPPORTED = re.compile(r"does not support|not supported|unsupported", re.I)
EMPTY_ANSWER = "the request was ended without a token"
GAUGE = re.compile(r"^vllm:(num_requests_running|num_requests_waiting|(?:gpu|kv)_cache_usage_perc)\{.*\} (\S+)$", re.M)
CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.M)


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A snapshot of vLLM's scheduler metrics."""

    running: float
    waiting: float
    kv_usage: float

    @property
    def is_stuck(self) -> bool:
        return self.running == 0 and self.waiting > 0


@dataclass(slots=True)
class Progress:
    """State of a verification; written by the verifier, read by the caller."""

    is_ready: bool = False
    is_asked: bool = False
    is_finished: bool = False  # no more requests follow
    is_answered: bool = False
    rejection: str | None = None
    max_model_len: int | None = None  # as vLLM reports it
    num_gpu_blocks: int | None = None
    block_size: int | None = None
    stuck_since: float | None = None  # monotonic seconds; the request waits, nothing runs, the KV cache does not grow
    steps: int = 0  # observed changes of the scheduler metrics
    _last: Scheduler | None = field(default=None, repr=False)

    def saw(self, now: float, scheduler: Scheduler) -> None:
        has_moved = scheduler != self._last
        self.steps += has_moved
        if not scheduler.is_stuck or (has_moved and self._last is not None):
            self.stuck_since = None
        elif self.stuck_since is None:
            self.stuck_since = now
        self._last = scheduler

    def answered(self, prompt_tokens: int | None, completion_tokens: int | None, sent: int) -> None:
        """Accept a response only if the whole prompt was read and a token came back: V0 responds to ignored prompts."""
        if completion_tokens == 0:
            self.rejection = EMPTY_ANSWER
        elif prompt_tokens != sent or completion_tokens is None:
            self.rejection = f"only {prompt_tokens} of {sent} prompt tokens were read"
        else:
            self.is_answered = True
        self.is_finished = True


class Proof(Protocol):
    """A verification in progress."""

    progress: Progress

    def look(self) -> None:
        """Update `progress` without waiting."""

    def close(self) -> None:
        """Send no more requests."""


def prompt_length(verify: Verify, length: int, answers_tokens: bool = True) -> int:
    """Return the prompt tokens to send: a full request, with the generated token, fills ``length`` exactly."""
    return length - answers_tokens if verify is Verify.FULL else 1


class RequestRefused(Exception):
    """A request failed; the message says why."""


class NoSuchEndpoint(RequestRefused):
    """The model does not support this endpoint."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One API endpoint. ``answers_tokens``: it generates tokens, which need room in the KV cache."""

    path: str
    answers_tokens: bool

    def body(self, model: str, prompt: list[int], answer_tokens: int) -> dict[str, Any]:
        if not self.answers_tokens:
            return {"model": model, "input": prompt}
        wanted = {"max_tokens": answer_tokens, "ignore_eos": True, "temperature": 0}
        return {"model": model, "prompt": prompt, **wanted}

    def usage(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return prompt and completion tokens; without generated text, the number of returned items counts."""
        usage = dict(answer.get("usage") or {})
        return usage if self.answers_tokens else {**usage, "completion_tokens": len(answer.get("data") or ())}


ENDPOINTS = (
    Endpoint("/v1/completions", answers_tokens=True),
    Endpoint("/v1/embeddings", answers_tokens=False),
    Endpoint("/pooling", answers_tokens=False),
)


class ServerProof:
    """Verify a server over HTTP, in a thread. Never uses a proxy.

    ``is_ours`` returns whether the trial itself listens on the port: another server's response proves nothing.
    """

    def __init__(self, port: int, key: str, verify: Verify, is_ours: Callable[[], bool]) -> None:
        self.progress = Progress()
        self._port, self._key, self._verify, self._is_ours = port, key, verify, is_ours
        self._closed = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def look(self) -> None:
        if self.progress.is_asked and not self.progress.is_finished:
            text = self._get("/metrics")
            gauges = {name.replace("gpu_cache", "kv_cache"): float(value) for name, value in GAUGE.findall(text or "")}
            if len(gauges) == 3:
                running, waiting = gauges["num_requests_running"], gauges["num_requests_waiting"]
                self.progress.saw(time.monotonic(), Scheduler(running, waiting, gauges["kv_cache_usage_perc"]))

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while self._get("/health") is None or not self._is_ours():
            if self._closed.wait(POLL_SECONDS):
                return
        progress = self.progress
        model = self._model()
        progress.max_model_len = model.get("max_model_len")
        self._read_cache_config()
        progress.is_ready = True
        if self._verify is Verify.NONE or progress.max_model_len is None:
            progress.is_finished = True
            return
        self._prove(str(model["id"]), progress.max_model_len)

    def _prove(self, model: str, length: int) -> None:
        """Send one request of the full length, then a burst of short ones, as a server receives them."""
        progress = self.progress
        progress.is_asked = True
        try:
            endpoint, sent, usage = self._request_in_full(model, length)
            if self._verify is Verify.FULL and length >= SHORTEST_FOR_BURST:
                with ThreadPoolExecutor(BURST_REQUESTS) as pool:
                    short = range(BURST_TOKENS, BURST_TOKENS + BURST_REQUESTS)
                    list(pool.map(lambda count: self._ask(endpoint, model, count, BURST_TOKENS), short))
        except RequestRefused as refused:
            progress.rejection, progress.is_finished = str(refused), True
        else:
            progress.answered(usage.get("prompt_tokens"), usage.get("completion_tokens"), sent)

    def _request_in_full(self, model: str, length: int) -> tuple[Endpoint, int, dict[str, Any]]:
        """Use the first endpoint that the model supports; return it, the tokens sent and the response's usage."""
        reasons = []
        for endpoint in ENDPOINTS:
            sent = prompt_length(self._verify, length, endpoint.answers_tokens)
            try:
                return endpoint, sent, self._ask(endpoint, model, sent, 1)
            except NoSuchEndpoint as missing:
                reasons.append(f"{endpoint.path}: {missing}")
        raise RequestRefused("; ".join(reasons))

    def _model(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._get("/v1/models") or "")["data"][0])
        except (ValueError, LookupError, TypeError):
            return {}

    def _read_cache_config(self) -> None:
        found = CACHE_CONFIG.search(self._get("/metrics") or "")
        labels = dict(re.findall(r'(\w+)="([^"]*)"', found[1])) if found else {}
        for name in ("num_gpu_blocks", "block_size"):
            if labels.get(name, "").isdigit():
                setattr(self.progress, name, int(labels[name]))

    def _ask(self, endpoint: Endpoint, model: str, prompt_tokens: int, answer_tokens: int) -> dict[str, Any]:
        """Send one request and return its usage. Raises RequestRefused if it fails."""
        body = endpoint.body(model, token_ids(prompt_tokens), answer_tokens)
        try:
            status, text = self._call("POST", endpoint.path, json.dumps(body), timeout=None)
            answer = json.loads(text) if status == 200 else {}
            if status == 200:
                return endpoint.usage(answer)
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            raise RequestRefused(f"no answer: {error or type(error).__name__}") from error
        why = error_message(text)
        is_missing = status == 404 or (status in (400, 405, 501) and UNSUPPORTED.search(why))
        raise (NoSuchEndpoint if is_missing else RequestRefused)(f"HTTP {status}: {why}")

    def _get(self, path: str) -> str | None:
        """Return the body of a 200 response, else None."""
        try:
            status, text = self._call("GET", path, None, timeout=CALL_SECONDS)
        except (OSError, http.client.HTTPException):
            return None
        return text if status == 200 else None

    def _call(self, method: str, path: str, body: str | None, timeout: float | None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout)
        try:
            headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        finally:
            connection.close()


def error_message(text: str) -> str:
    """Return the message of an OpenAI-style error body, or the beginning of the body."""
    try:
        body = json.loads(text)
        return str((body.get("error") or body).get("message") or text[:500])
    except (ValueError, AttributeError):
        return text[:500]


class OfflineProof:
    """Follow the events file of the offline script."""

    def __init__(self, events: Path) -> None:
        self.progress = Progress()
        self._events = events
        self._read_bytes = 0
        self._sent = 0

    def close(self) -> None:
        """Do nothing: the script sends the requests."""

    def look(self) -> None:
        try:
            with self._events.open("rb") as lines:
                lines.seek(self._read_bytes)
                for line in lines:
                    if line.endswith(b"\n"):
                        self._read_bytes += len(line)
                        self._take(json.loads(line))
        except FileNotFoundError:
            return

    def _take(self, event: dict[str, Any]) -> None:
        progress = self.progress
        match event["event"]:
            case "ready":
                progress.is_ready = True
                for name in ("max_model_len", "num_gpu_blocks", "block_size"):
                    setattr(progress, name, event.get(name))
            case "asked":
                progress.is_asked = True
                self._sent = event["prompt_tokens"]
            case "answered":
                progress.answered(event["prompt_tokens"], event["completion_tokens"], self._sent)
            case "rejected":
                progress.rejection, progress.is_finished = event["why"], True
            case "scheduler":
                if {"running", "waiting", "kv_usage"} <= event.keys():
                    seen = Scheduler(event["running"], event["waiting"], event["kv_usage"])
                    progress.saw(time.monotonic(), seen)
