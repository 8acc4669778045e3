"""The OpenAI-compatible server: health, models, completions and metrics of one ready engine."""

from __future__ import annotations

import json
import os
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fake_scenario import FaultKind

from vllm.launch_record import record
from vllm.requests import Refused, Service


class Server(ThreadingHTTPServer):
    """Listens from its construction; answers only once ``service`` is set and it serves."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64
    service: Service
    keys: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    def server_bind(self) -> None:
        """Bind without looking up the host's name, which can take seconds."""
        import socketserver

        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is no news."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    protocol_version = "HTTP/1.1"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """One access line as uvicorn writes it, on stdout."""
        host, port = self.client_address[:2]
        status = HTTPStatus(int(code))
        self.server.service.speech.bare(f'INFO:     {host}:{port} - "{self.requestline}" {status} {status.phrase}', 1)

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_json(self, status: int, body: Any) -> None:
        self._send(status, json.dumps(body).encode(), "application/json")

    def _send_error(self, status: int, text: str) -> None:
        kind = {400: "BadRequestError", 401: "Unauthorized", 404: "NotFoundError"}.get(status, "InternalServerError")
        error: dict[str, Any] = {"message": text, "type": kind, "param": None, "code": status}
        is_flat = self.server.service.launch.scenario.release < (0, 10, 0)
        self._send_json(status, {"object": "error", **error} if is_flat else {"error": error})

    def _is_allowed(self) -> bool:
        given = self.headers.get("Authorization", "")
        if not self.server.keys or given in {f"Bearer {key}" for key in self.server.keys}:
            return True
        self._send_json(401, {"error": "Unauthorized"})
        return False

    def do_GET(self) -> None:
        """Health and metrics need no key; the rest of /v1 does."""
        service = self.server.service
        if self.path == "/health":
            failing = service.is_dead or service.launch.fault(FaultKind.HEALTH_FAILS)
            self._send(503 if failing else 200, b"", "text/plain")
        elif self.path == "/metrics":
            self._send(200, metrics(service).encode(), "text/plain; version=0.0.4; charset=utf-8")
        elif self.path == "/version":
            self._send_json(200, {"version": service.launch.scenario.version})
        elif self.path == "/v1/models":
            if self._is_allowed():
                cards = [
                    {"id": name, "object": "model", "owned_by": "vllm", "max_model_len": service.reported_length}
                    for name in self.server.models
                ]
                self._send_json(200, {"object": "list", "data": cards})
        else:
            self._send_json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        """Completions, or embeddings of a pooling model."""
        length = int(self.headers.get("Content-Length", "0"))
        body = self.rfile.read(length)
        is_pooling = self.server.service.launch.scenario.pooling
        known = ("/v1/embeddings", "/pooling") if is_pooling else ("/v1/completions",)
        if self.path not in known:
            self._send_json(404, {"detail": "Not Found"})
        elif self._is_allowed():
            try:
                self._answer(json.loads(body), is_pooling)
            except Refused as refusal:
                self._send_error(refusal.status, str(refusal))
            except (ValueError, TypeError, KeyError) as error:
                self._send_error(400, f"{type(error).__name__}: {error}")

    def _answer(self, asked: dict[str, Any], is_pooling: bool) -> None:
        service = self.server.service
        if asked.get("model", self.server.models[0]) not in self.server.models:
            raise Refused(404, f"The model `{asked['model']}` does not exist.")
        prompt = asked["input" if is_pooling else "prompt"]
        if isinstance(prompt, str):
            prompt = [ord(letter) % service.launch.vocabulary for letter in prompt]
        elif prompt and isinstance(prompt[0], list):
            prompt = prompt[0]
        max_tokens = 0 if is_pooling else int(asked.get("max_tokens", 16))
        record(service.launch.number, "request", tokens=len(prompt), max_tokens=max_tokens, first=prompt[:8])
        if is_pooling:
            service.generate(prompt, 0)
            vector = [{"object": "embedding", "index": 0, "embedding": [0.5, 0.5]}]
            self._send_json(200, {"object": "list", "data": vector, "usage": {"prompt_tokens": len(prompt)}})
            return
        tokens = service.generate(prompt, max_tokens)
        if service.launch.fault(FaultKind.COMPLETION_EMPTY):
            tokens = []
        self._send_json(200, _completion(self.server.models[0], prompt, tokens))


def _completion(model: str, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens), "total_tokens": len(prompt) + len(tokens)}
    choice = {"index": 0, "text": " a" * len(tokens), "logprobs": None, "finish_reason": "length"}
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": usage,
    }


def metrics(service: Service) -> str:
    """The Prometheus page."""
    played, asked = service.launch.scenario, service.launch.asked
    usage = "kv_cache_usage_perc" if played.release >= (0, 10, 0) else "gpu_cache_usage_perc"
    label = f'{{engine="0",model_name="{service.launch.args.model}"}}'
    running, waiting, used = service.load()
    return "".join(
        f"# TYPE vllm:{name} gauge\nvllm:{name}{labels} {value}\n"
        for name, labels, value in (
            ("num_requests_running", label, float(running)),
            ("num_requests_waiting", label, float(waiting)),
            (usage, label, used),
            (
                "cache_config_info",
                f'{{block_size="{played.page(asked)}",engine="0",num_gpu_blocks="{service.engine.blocks}"}}',
                1.0,
            ),
        )
    )


def serve(server: Server) -> None:
    """Answer until the process is ended, or the engine is dead."""
    service = server.service
    speech = service.speech
    pid = os.getpid()
    speech.bare(f"INFO:     Started server process [{pid}]\nINFO:     Waiting for application startup.")
    speech.bare("INFO:     Application startup complete.")
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    while not service.is_dead:
        time.sleep(0.05)
    time.sleep(0.5)  # the failed request is answered, then uvicorn shuts down
    service.engine.end()
    os._exit(0)
