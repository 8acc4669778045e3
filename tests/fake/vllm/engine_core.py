"""The engine: its stages, its workers, and the KV check, in whatever process this version runs them."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

from fake_scenario import FaultKind

from vllm import gpu_memory, wording
from vllm.launch_config import Launch, fill_cache
from vllm.processes import Child, fork, obey_signals
from vllm.speech import STDERR, Speech, traceback_text, write
from vllm.strike import strike


def play_worker_stage(launch: Launch, stage: str, rank: int, speech: Speech) -> None:
    """Play one stage of one rank: its lines, its time, its faults."""
    played = launch.scenario
    if stage == "load":
        gpu_memory.refuse_if_busy(rank, launch.asked.gpu_memory_utilization)
        gpu_memory.take(rank)
        speech.info(f"Starting to load model {launch.args.model}...", "gpu_model_runner.py:4978")
    _spend(stage, played.stage_seconds.get(stage, 0), speech if rank == 0 else None)
    strike(launch.faults, stage, rank, launch.max_num_seqs, speech, launch.number)
    unit = "GB" if played.release < (0, 8, 3) else "GiB"
    if stage == "load":
        weights = played.weights_gib / launch.asked.world_size
        took = f"Loading model weights took {weights:.4f} GB"
        if played.release >= (0, 8, 0):
            took = f"Model loading took {weights:.4f} {unit} and 0.512345 seconds"
        if played.release >= (0, 14, 0):
            took = f"Model loading took {weights:.2f} GiB memory and 0.512345 seconds"
        speech.info(took, "gpu_model_runner.py:5088")
    elif stage == "compile" and not launch.args.enforce_eager and played.is_v1:
        fill_cache()
        speech.info("Dynamo bytecode transform time: 0.52 s", "backends.py:1151")
    elif stage == "profile" and played.is_v1 and played.release >= (0, 9, 1):
        blocks = played.blocks(abs(launch.length), launch.number, launch.asked)
        amount = blocks * played.page(launch.asked) * played.bytes_per_token // launch.asked.world_size
        speech.info(f"Available KV cache memory: {wording.gib(played, amount)} GiB", "gpu_worker.py:772")
    elif stage == "capture" and not launch.args.enforce_eager:
        speech.info("Graph capturing finished in 1 secs, took 0.41 GiB", "gpu_model_runner.py:5400")


PROGRESS = {
    "download": "model-00001-of-00004.safetensors",
    "load": "Loading safetensors checkpoint shards",
    "capture": "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE)",
}


def _spend(stage: str, seconds: float, speech: Speech | None) -> None:
    """Let a stage take its time; where vLLM shows a bar, the bar moves (parts end in a carriage return)."""
    if not seconds or speech is None or stage not in PROGRESS:
        time.sleep(seconds)
        return
    for step in range(1, 11):
        time.sleep(seconds / 10)
        bar = "#" * step + " " * (10 - step)
        write(STDERR, f"\r{PROGRESS[stage]}: {step * 10:3d}%|{bar}| {step}/10 [00:0{step % 10}<00:01,  1.00it/s]")
    write(STDERR, "\n")


def _worker(launch: Launch, rank: int, line: Child) -> None:
    speech = Speech(launch.scenario, wording.worker_name(launch.scenario, launch.asked, rank))
    obey_signals(launch.faults)
    while stage := line.hear():  # the end of the line: the engine is dead, and so is its worker
        try:
            play_worker_stage(launch, stage, rank, speech)
        except Exception as error:
            loading = stage in ("download", "load")
            what = "WorkerProc failed to start." if loading else "WorkerProc hit an exception."
            if not launch.scenario.is_v1:
                what = f"Exception in worker {speech.name} while processing method {stage}."
            speech.error(f"{what}\n{traceback_text(error)}", "multiproc_executor.py:1057")
            line.say(json.dumps({"error": str(error), "stage": stage}))
            if loading:
                sys.exit(1)
        else:
            line.say(json.dumps({"done": stage}))


class Ranks:
    """The workers of an engine: this process itself for one rank, else one process each."""

    def __init__(self, launch: Launch, speech: Speech, closes: tuple[Any, ...] = ()) -> None:
        self.launch, self.speech = launch, speech
        self.workers: list[Child] = []
        if launch.asked.world_size > 1:
            for rank in range(launch.asked.world_size):
                inherited = (*closes, *(worker.line for worker in self.workers))
                role = wording.worker_name(launch.scenario, launch.asked, rank)
                worker = fork(launch.number, role, partial(_worker, launch, rank), inherited)
                self.workers.append(worker)

    def play(self, stage: str) -> None:
        """Play a stage in every rank; raises what the engine raises when a worker fails or dies."""
        if not self.workers:
            play_worker_stage(self.launch, stage, 0, self.speech)
            return
        for worker in self.workers:
            worker.say(stage)
        answers = [worker.hear() for worker in self.workers]
        failed = [json.loads(answer)["error"] for answer in answers if answer and "error" in json.loads(answer)]
        if all(answers) and not failed:
            return
        for worker, answer in zip(self.workers, answers, strict=True):
            if not answer:
                self._report_death(worker)
        if stage in ("download", "load"):
            raise Exception(
                "WorkerProc initialization failed due to an exception in a background process. See stack trace for "
                "root cause."
            )
        if failed:
            raise RuntimeError(
                f"Worker failed with error '{failed[0]}', please check the stack trace above for the root cause"
            )
        raise RuntimeError("cancelled")  # what is left when a worker died without a word

    def _report_death(self, worker: Child) -> None:
        status = worker.wait()
        release = self.launch.scenario.release
        if not self.launch.scenario.is_v1:
            self.speech.error(f"Worker {worker.role} pid {worker.pid} died, exit code: {status}")
        elif release >= (0, 8, 5):
            code = f" (exit code: {status})" if release >= (0, 26, 0) else ""
            self.speech.error(f"Worker proc {worker.role} died unexpectedly{code}, shutting down executor.")

    def end(self) -> None:
        """Kill the workers: the engine is going down."""
        for worker in self.workers:
            worker.kill()
            worker.wait()


def start(launch: Launch, speech: Speech, ranks: Ranks) -> tuple[int, int]:
    """Play the stages up to readiness; returns the blocks and the length, or raises what this version raises."""
    played = launch.scenario
    which = "a V1" if played.is_v1 else "a V0"
    if played.release < (0, 7, 1):
        which = "an"
    config = f"model='{launch.args.model}', max_seq_len={launch.length}, tensor_parallel_size={ranks_text(launch)}"
    speech.info(f"Initializing {which} LLM engine (v{played.version}) with config: {config}")
    for stage in ("download", "load", "compile", "profile"):
        ranks.play(stage)
    if played.decoys:
        decoy_lines(speech)
    time.sleep(played.stage_seconds.get("kv_cache", 0))
    strike(launch.faults, "kv_cache", None, launch.max_num_seqs, speech, launch.number)
    blocks, length = _check(launch, speech)
    ranks.play("capture")
    if played.release >= (0, 6, 5):
        took = "0.81 s (compilation: 0.52 s)" if played.release >= (0, 20, 0) else "0.81 seconds"
        speech.info(f"init engine (profile, create kv cache, warmup model) took {took}", "core.py:405")
    return blocks, length


def ranks_text(launch: Launch) -> str:
    """TP and PP as the config line names them."""
    return f"{launch.asked.tensor_parallel_size}, pipeline_parallel_size={launch.asked.pipeline_parallel_size}"


LOGGING_ERROR = """--- Logging error ---
Traceback (most recent call last):
  File "/usr/lib/python3.10/logging/__init__.py", line 1100, in emit
    msg = self.format(record)
  File "/usr/lib/python3.10/logging/__init__.py", line 368, in getMessage
    msg = msg % self.args
TypeError: %d format: a real number is required, not NoneType
Call stack:
  File "/usr/lib/python3.10/runpy.py", line 196, in _run_module_as_main
    return _run_code(code, main_globals, None,
Message: 'Chunked prefill is enabled with max_num_batched_tokens=%d.'
Arguments: (None,)"""


def decoy_lines(speech: Speech) -> None:
    """Lines of good logs that read like failures."""
    if speech.scenario.release < (0, 6, 4):
        speech.info(
            "CUDA graphs can take additional 1~3 GiB memory per GPU. If you are running out of memory, consider "
            "decreasing `gpu_memory_utilization` or enforcing eager mode.",
            "model_runner.py:1399",
        )
        speech.bare(LOGGING_ERROR)
    else:
        speech.warning("If out of memory error occurs during cudagraph capture, consider decreasing the fraction.")
    speech.warning(
        "Skipping the warm-up of the chat template: ValueError: Tokenizer not available when `skip_tokenizer_init=True`"
    )


def _check(launch: Launch, speech: Speech) -> tuple[int, int]:
    played, asked = launch.scenario, launch.asked
    at = launch.limit if launch.length == -1 else launch.length
    found = played.blocks(at, launch.number, asked)
    used = asked.num_gpu_blocks_override or found
    if asked.num_gpu_blocks_override:
        speech.info(f"Overriding num_gpu_blocks={found} with num_gpu_blocks_override={used}", "kv_cache_utils.py:805")
    length = _fit(launch, speech, at) if launch.length == -1 else at
    if not played.is_v1:  # V0 says what it found, then looks
        for line in wording.kv_sizes(played, asked, length, used):
            speech.info(line, "executor_base.py:116")
    if (found if played.is_v1 else used) <= 0:
        raise ValueError(wording.no_kv_memory(played))
    if not played.starts(length, launch.number, asked):
        raise ValueError(wording.kv_too_small(played, asked, length, launch.number, used))
    if played.is_v1:
        for line in wording.kv_sizes(played, asked, length, used):
            speech.info(line, "kv_cache_utils.py:1744")
    return used, length


def _fit(launch: Launch, speech: Speech, limit: int) -> int:
    played = launch.scenario
    room = played.checked_blocks(limit, launch.number, launch.asked) * played.page(launch.asked)
    if room <= 0:
        raise ValueError(
            "Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token. Try "
            "increasing `gpu_memory_utilization`."
        )
    if room >= limit:
        speech.info(f"Auto-fit max_model_len: full model context length {limit} fits in available GPU memory")
        return limit
    amount = wording.gib(played, room * played.bytes_per_token)
    speech.info(
        f"Auto-fit max_model_len: reduced from {limit} to {room} to fit in available GPU memory ({amount} GiB "
        "available for KV cache)"
    )
    return room


def has_linger(launch: Launch) -> float:
    """Seconds that a refused start lives on."""
    fault = launch.fault(FaultKind.LINGER)
    return fault.amount if fault else 0.0
