"""What a request gets: its blocks and an answer, a refusal, or nothing for ever."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from fake_scenario import Fault, FaultKind

from vllm import wording
from vllm.front_end import Engine
from vllm.launch_config import Launch
from vllm.processes import stay
from vllm.speech import Speech

ENGINE_ENDS = (
    FaultKind.CRASH,
    FaultKind.SEGFAULT,
    FaultKind.KILLED,
    FaultKind.EXIT,
    FaultKind.DEVICE_OOM,
)


class Refused(Exception):
    """The server's answer is an error with this HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass
class Service:
    """A ready engine and the requests at it."""

    launch: Launch
    engine: Engine
    speech: Speech
    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    is_dead: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def reported_length(self) -> int:
        """``max_model_len`` as the front end knows it: stale after auto-fit before 0.20.0."""
        if self.launch.length == -1 and self.launch.scenario.release < (0, 20, 0):
            return self.launch.limit
        return self.engine.length

    def load(self) -> tuple[int, int, float]:
        """Requests running, requests waiting, and the share of the KV cache in use."""
        if self.waiting and self.launch.scenario.stuck_thrashes:
            at_work = time.monotonic() % 1.0
            return (1, 0, at_work) if at_work > 0.1 else (0, 1, 0.0)
        return self.running, self.waiting, self.used_blocks / max(1, self.engine.blocks)

    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The answered tokens of one request; raises Refused; may never return."""
        self._admit(prompt, max_tokens)
        self._play_faults(len(prompt))
        page = self.launch.scenario.page(self.launch.asked)
        needed = -(-(len(prompt) + max_tokens - 1) // page)  # the last token is sampled, never stored
        usable = self.launch.scenario.usable_blocks(self.engine.length, self.launch.number, self.launch.asked)
        if needed > usable:
            if not self.launch.scenario.is_v1:
                self.speech.warning(
                    f"Input prompt ({len(prompt)} tokens) + lookahead slots (0) is too long and exceeds the capacity "
                    "of block_manager",
                    "scheduler.py:1012",
                )
                return []
            with self.lock:
                self.waiting += 1
            stay()
        with self.lock:
            self.running += 1
            self.used_blocks += needed
        if speed := self.launch.scenario.prefill_tokens_per_second:
            time.sleep(len(prompt) / speed)
        with self.lock:
            self.running -= 1
            self.used_blocks -= needed
        return [(prompt[0] + step) % self.launch.vocabulary for step in range(max_tokens)]

    def _admit(self, prompt: list[int], max_tokens: int) -> None:
        limit = self.reported_length
        if not prompt:
            raise Refused(400, "The decoder prompt cannot be empty")
        if len(prompt) + max_tokens > limit or self.launch.fault(FaultKind.COMPLETION_TOO_LONG):
            raise Refused(400, wording.request_too_long(self.launch.scenario, len(prompt), max_tokens, limit))
        strange = [token for token in prompt if not 0 <= token < self.launch.vocabulary]
        if strange:
            raise Refused(400, f"Token id {strange[0]} is out of vocabulary")

    def _play_faults(self, prompt_tokens: int) -> None:
        launch = self.launch
        hang = launch.fault(FaultKind.COMPLETION_HANGS) or self._serve_fault(FaultKind.HANG)
        if hang and prompt_tokens >= hang.amount:
            with self.lock:
                self.running += 1
            stay()
        if fault := launch.fault(FaultKind.COMPLETION_FAILS):
            raise Refused(500, fault.text or "Internal server error")
        if launch.fault(FaultKind.DIES_SERVING) or self._serve_fault(*ENGINE_ENDS):
            self._die()
            raise Refused(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")

    def _serve_fault(self, *kinds: FaultKind) -> Fault | None:
        return next((fault for fault in self.launch.faults if fault.stage == "serve" and fault.kind in kinds), None)

    def _die(self) -> None:
        """The engine dies of its faults; raises what it raises when it lives in this process."""
        self.is_dead = True
        if self.engine.child:
            self.engine.child.say("die")
            self.engine.child.wait()
            self.speech.error(f"Engine core proc {self.engine.child.role} died unexpectedly, shutting down client.")
        elif self.engine.ranks:
            self.engine.ranks.play("serve")
