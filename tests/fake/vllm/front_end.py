"""The launched process: it starts the engine where this version starts it, and fails as this version fails."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

from fake_scenario import FaultKind, Scenario

from vllm import wording
from vllm.engine_core import Ranks, has_linger, start
from vllm.launch_config import Launch
from vllm.launch_record import record
from vllm.processes import Child, fork, obey_signals, stay
from vllm.speech import STDERR, Speech, traceback_text


@dataclass
class Engine:
    """A started engine."""

    blocks: int
    length: int
    child: Child | None  # None: it runs in this process
    ranks: Ranks | None

    def end(self) -> None:
        """End it and its workers."""
        if self.child:
            self.child.kill()
            self.child.wait()
        if self.ranks:
            self.ranks.end()


def has_engine_process(played: Scenario, serving: bool) -> bool:
    """True when the engine is a child of the launched process."""
    if played.is_v1:
        if not serving and os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            return False
        return serving or played.release >= (0, 6, 5)
    return serving and played.release >= (0, 5, 4)


def start_engine(launch: Launch, speech: Speech, serving: bool, closes: tuple[Any, ...] = ()) -> Engine:
    """Start the engine; raises, exits, hangs or kills itself when it does not come up."""
    if not has_engine_process(launch.scenario, serving):
        ranks = Ranks(launch, speech, closes)
        try:
            blocks, length = start(launch, speech, ranks)
        except Exception:
            time.sleep(has_linger(launch))
            ranks.end()
            raise
        return Engine(blocks, length, None, ranks)
    front = os.getpid()
    if launch.scenario.is_v1 and launch.scenario.release < (0, 8, 5):
        _kill_tree_on_signal(speech)
    name = wording.engine_name(launch.scenario)
    child = fork(launch.number, name, lambda line: _engine_process(launch, line, front, closes), closes)
    if not launch.scenario.is_v1:
        speech.info(f"Started engine process with PID {child.pid}", "api_server.py:296")
    if leaving := launch.fault(FaultKind.EXIT_ZERO):
        time.sleep(leaving.amount)
        os._exit(0)
    answer = child.hear()
    if not answer:
        _fail(launch, child, speech)
    ready = json.loads(answer)
    return Engine(ready["blocks"], ready["length"], child, None)


def _engine_process(launch: Launch, line: Child, front: int, closes: tuple[Any, ...]) -> None:
    played = launch.scenario
    speech = Speech(played, wording.engine_name(played))
    obey_signals(launch.faults)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    ranks = Ranks(launch, speech, (*closes, line.line))
    try:
        blocks, length = start(launch, speech, ranks)
    except Exception as error:
        _announce(played, speech, error, front)
        time.sleep(has_linger(launch))
        ranks.end()
        record(launch.number, "refused", error=str(error)[:200])
        sys.exit(1)
    line.say(json.dumps({"blocks": blocks, "length": length}))
    if line.hear() == "die":
        _die_serving(speech, ranks)
    stay()  # the front end is gone; nothing here looks for that


def _die_serving(speech: Speech, ranks: Ranks) -> None:
    fatal: Exception = RuntimeError("CUDA error: an illegal memory access was encountered")
    try:
        ranks.play("serve")
    except Exception as error:
        fatal = error
    speech.error(f"EngineCore encountered a fatal error.\n{traceback_text(fatal)}")
    ranks.end()
    sys.exit(1)


def _announce(played: Scenario, speech: Speech, error: Exception, front: int) -> None:
    text = traceback_text(error)
    if played.is_v1 and played.release >= (0, 8, 5):
        speech.error(f"EngineCore failed to start.\n{text}")
    elif played.is_v1 and played.release >= (0, 7, 0):
        speech.error(f"EngineCore hit an exception: {text}")
        os.kill(front, signal.SIGUSR1)
        return
    elif played.release >= (0, 6, 4):
        speech.error(f"{error}\n{text}", "engine.py:400")
    name = speech.name if played.is_v1 else "SpawnProcess-1"
    speech.bare(f"Process {name}:\n{text}")


def _kill_tree_on_signal(speech: Speech) -> None:
    def kill(*_: object) -> None:
        speech.bare(
            "CRITICAL 12-01 12:00:00 [core_client.py:359] Got fatal signal from worker processes, shutting down. See "
            "stack trace above for root cause issue.",
            1,
        )
        for pid in _descendants(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    signal.signal(signal.SIGUSR1, kill)


def _descendants(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as listed:
        children = [int(word) for word in listed.read().split()]
    return [found for child in children for found in (*_descendants(child), child)]


def _fail(launch: Launch, child: Child, speech: Speech) -> None:
    played, status = launch.scenario, child.wait()
    if played.is_v1:
        if played.release >= (0, 8, 4):
            text = "Engine core initialization failed. See root cause above."
            if played.release >= (0, 9, 0):
                text += f" Failed core proc(s): {{'{child.role}': {status}}}"
            raise RuntimeError(text)
        if played.release >= (0, 7, 0):
            raise RuntimeError(f"{child.role} initialization failed. See root cause above.")
        raise RuntimeError("EngineCoreProc failed to start.")
    if played.release >= (0, 6, 4):
        raise RuntimeError("Engine process failed to start. See stack trace for the root cause.")
    if played.release >= (0, 6, 2):
        raise RuntimeError("Engine process failed to start")
    if played.release >= (0, 5, 5):
        speech.error("RPCServer process died before responding to readiness probe", "api_server.py:188")
        sys.exit(0)
    stay()  # 0.5.4 waits for an answer that never comes


def leave_with(error: BaseException, speech: Speech) -> None:
    """End the launched process as an uncaught exception ends Python."""
    speech.traceback(error, STDERR)
    os._exit(1)
