"""Start the fake engine without the prober, and ask it: for the tests of the fake itself."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine, Scenario, make_engine, wait_until, write_model

ENTRYPOINT = "vllm.entrypoints.openai.api_server"


class Started:
    """A running `python -m vllm.entrypoints.openai.api_server` and its log."""

    def __init__(self, engine: FakeEngine, directory: Path, *flags: str, model: str | None = None) -> None:
        self.engine = engine
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        model = model or str(write_model(directory / "model"))
        self.log_path = directory / "engine.log"
        command = [sys.executable, "-m", ENTRYPOINT, "--model", model, "--host", "127.0.0.1"]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *flags],
                env={**os.environ, **engine.environment, "VLLM_API_KEY": "sesame"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def ask(
        self, method: str, path: str, body: Any = None, key: str = "sesame", timeout: float = 10
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, json.dumps(body), {"Authorization": f"Bearer {key}"})
            answer = connection.getresponse()
            text = answer.read().decode()
            return answer.status, json.loads(text) if text.startswith(("{", "[")) else text
        finally:
            connection.close()

    def complete(self, tokens: int, timeout: float = 10, **more: Any) -> tuple[int, Any]:
        body = {"prompt": [7] * tokens, "max_tokens": 1, "ignore_eos": True, **more}
        return self.ask("POST", "/v1/completions", body, timeout=timeout)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log
        try:
            return self.ask("GET", "/health", timeout=0.5)[0] == 200
        except OSError:
            return False

    def wait_ready(self) -> Started:
        wait_until(self.is_ready, what="readiness")
        return self

    def wait(self) -> int:
        return self.process.wait(timeout=10)


@contextmanager
def started(directory: Path, scenario: Scenario, *flags: str, **more: Any) -> Iterator[Started]:
    environment = more.pop("environment", None)
    engine = make_engine(directory, scenario, environment)
    run = Started(engine, directory, *flags, **more)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()
        engine.end_all()


def length_flag(length: int) -> tuple[str, str]:
    return "--max-model-len", str(length)
