"""From a verdict to the ways out: best first, each with its own number and its price."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from prober.advice import causes, estimate
from prober.advice.estimate import HIGHEST_UTILIZATION
from prober.advice.fixes import (
    Fix,
    fewer_sequences,
    free_memory,
    half_the_length,
    higher_utilization,
    lower_utilization,
    more_devices,
    more_host_memory,
    shorter,
    smaller_cache_entries,
    smaller_weights,
    smaller_working_set,
)
from prober.records import Outcome, Stage, Verdict


def fixes(verdict: Verdict) -> tuple[Fix, ...]:
    """The ways out of this failure; none for a start that did not fail."""
    advise = _ADVICE.get(verdict.outcome)
    return tuple(advise(verdict)) if advise is not None else ()


def _kv_too_small(verdict: Verdict) -> Iterator[Fix]:
    figures = verdict.figures
    yield from shorter(figures)
    if "VLLM_CPU_KVCACHE_SPACE" in verdict.evidence:
        yield from more_host_memory(figures)
        return
    known = estimate.room(figures)
    more = tuple(higher_utilization(figures))
    yield from (fix for fix in more if fix.flag is not None)
    yield from smaller_cache_entries(figures, known)
    yield from smaller_working_set(figures, known)
    yield from more_devices(figures, known)
    yield from smaller_weights(figures, known)
    yield from (fix for fix in more if fix.flag is None)


def _no_kv_memory(verdict: Verdict) -> Iterator[Fix]:
    figures = verdict.figures
    if "VLLM_CPU_KVCACHE_SPACE" in verdict.evidence:
        yield from more_host_memory(figures)
        return
    total, weights = figures.total_gib, figures.weights_gib
    more: tuple[Fix, ...] = ()
    if total is not None and weights is not None and weights >= total * HIGHEST_UTILIZATION:
        yield Fix(
            "use more or larger devices", None, None, None,
            f"no setting can work: the weights alone take {weights:.2f} GiB of the device's {total:.2f} GiB",
        )  # fmt: skip
    else:
        more = tuple(higher_utilization(figures))
        yield from (fix for fix in more if fix.flag is not None)
        yield from smaller_working_set(figures, None)
    yield from more_devices(figures, None)
    yield from smaller_weights(figures, None)
    yield from (fix for fix in more if fix.flag is None)


def _device_oom(verdict: Verdict) -> Iterator[Fix]:
    figures = verdict.figures
    if verdict.rule == "device_oom_somewhere":
        yield from free_memory(verdict)
        yield from smaller_working_set(figures, None)
        yield from more_devices(figures, None)
        yield from smaller_weights(figures, None)
        return
    if verdict.stage is Stage.LOAD:
        yield from free_memory(verdict)
        yield from more_devices(figures, None)
        yield from smaller_weights(figures, None)
        return
    if verdict.rule == "warmup_oom":
        yield from fewer_sequences(figures)
    if verdict.stage in (Stage.CAPTURE, Stage.SERVE, Stage.KV_CACHE):
        yield from lower_utilization(figures)
    yield from smaller_working_set(figures, None)
    if verdict.rule != "warmup_oom":
        yield from fewer_sequences(figures)
    if verdict.stage is Stage.PROFILE:
        yield from half_the_length(figures)
    yield from free_memory(verdict)
    yield from more_devices(figures, None)


def _host_oom(verdict: Verdict) -> Iterator[Fix]:
    room = Fix(
        "give the process more host memory", None, None, None,
        "a higher limit of the container, or fewer other processes; weights pass through it, and swap space is in it",
    )  # fmt: skip
    if verdict.stage in (Stage.CONFIG, Stage.DOWNLOAD, Stage.LOAD) and verdict.rule != "guard":
        yield room
    yield from fewer_sequences(verdict.figures)
    yield from half_the_length(verdict.figures)
    yield Fix("free host memory", None, None, None, "host buffers grow with max_num_seqs × max_model_len")


def _device_busy(verdict: Verdict) -> Iterator[Fix]:
    figures = verdict.figures
    if verdict.stage is Stage.PROFILE:
        yield Fix(
            "start again on a quiet device", None, None, None,
            "another process freed memory while vLLM measured; nothing is wrong with the settings",
        )  # fmt: skip
        return
    yield from free_memory(verdict)
    if figures.free_gib is not None and figures.total_gib:
        share = math.floor(figures.free_gib / figures.total_gib * 100) / 100
        if share > 0.05:
            yield Fix(
                "lower gpu_memory_utilization", "--gpu-memory-utilization", share, None,
                f"{figures.free_gib:.2f} of {figures.total_gib:.2f} GiB are free; the KV cache shrinks with it",
            )  # fmt: skip


def _sequence_slots(verdict: Verdict) -> Iterator[Fix]:
    slots = verdict.figures.sequence_slots
    yield Fix(
        "allow fewer sequences", "--max-num-seqs", slots, verdict.figures.requested_max_model_len,
        "each sequence needs one Mamba block; the price is concurrency, not length",
    )  # fmt: skip
    yield from higher_utilization(verdict.figures)


def _over_model_limit(verdict: Verdict) -> Iterator[Fix]:
    limit = verdict.figures.model_limit
    yield Fix("ask for the model's limit", "--max-model-len", limit, limit, "the model was not trained for more")
    yield Fix(
        "extend the model's positions", "--hf-overrides", None, None,
        "rope scaling (YaRN), if the model's card says so; quality beyond the trained length is the price",
    )  # fmt: skip


def _too_short(verdict: Verdict) -> Iterator[Fix]:
    if verdict.rule == "prefill_threshold":
        yield Fix("ask for a longer length", "--max-model-len", None, None, "it must reach the prefill threshold")
        return
    if verdict.rule == "multimodal_prompt":
        length = re.search(r"prompt \((?:total )?length (\d+)\)", verdict.evidence)
        yield Fix(
            "ask for a longer length", "--max-model-len", int(length[1]) if length else None, None,
            "text and multimodal tokens of one prompt must fit; fewer items per prompt (--limit-mm-per-prompt), too",
        )  # fmt: skip
        return
    item = re.search(r"max_tokens_per_mm_item \((\d+)\)", verdict.evidence)
    yield Fix(
        "raise max_num_batched_tokens", "--max-num-batched-tokens", int(item[1]) if item else None, None,
        "one multimodal item must fit a batch; activations grow and the KV cache shrinks a little",
    )  # fmt: skip


def _unservable(verdict: Verdict) -> Iterator[Fix]:
    figures = verdict.figures
    block, length = figures.block_size or 16, figures.requested_max_model_len
    shorter = max(0, (length - 1) // block * block) or None if length else None
    yield Fix(
        "ask for one block less", "--max-model-len", shorter, shorter,
        "the server starts, but never grants the last block of a request of full length",
    )  # fmt: skip
    yield from higher_utilization(figures)


def _bad_config(verdict: Verdict) -> Iterator[Fix]:
    heads = re.search(r"attention heads \((\d+)\)", verdict.evidence)
    if heads:
        sizes = [size for size in estimate.divisors(int(heads[1])) if size <= 16]
        fewer = [size for size in sizes if size <= (verdict.figures.tensor_parallel_size or 1)]
        # The other dimensions of a model are multiples of powers of two; more devices there may not be.
        best = max(fewer, key=lambda size: (size.bit_count() == 1, size))
        yield Fix(
            "use a tensor-parallel size that divides the heads", "--tensor-parallel-size", best, None,
            f"{heads[1]} attention heads allow {', '.join(map(str, sizes))}, if the model's other dimensions do; "
            "--pipeline-parallel-size uses any number of devices",
        )  # fmt: skip
        return
    action, flag, value, why = causes.CONFIG.get(verdict.rule or "", causes.CONFIG_UNKNOWN)
    if needed := re.search(r"Minimum capability: (\d+)\. Current capability: (\d+)", verdict.evidence):
        why = f"this GPU has compute capability {_capability(needed[2])}, and it needs {_capability(needed[1])}"
    yield Fix(action, flag, value, None, why)


def _capability(digits: str) -> str:
    return f"{digits[:-1] or 0}.{digits[-1]}"


def _crash(verdict: Verdict) -> Iterator[Fix]:
    action, flag, value, why = causes.of_crash(verdict)
    yield Fix(action, flag, value, None, why)


def _timeout(_: Verdict) -> Iterator[Fix]:
    yield Fix(
        "give the engine more time", "VLLM_ENGINE_READY_TIMEOUT_S", 3600, None,
        "a slow disk or download looks like this; a hung collective does too, then the workers' logs say more",
    )  # fmt: skip


_ADVICE: dict[Outcome, Callable[[Verdict], Iterator[Fix]]] = {
    Outcome.KV_TOO_SMALL: _kv_too_small,
    Outcome.NO_KV_MEMORY: _no_kv_memory,
    Outcome.DEVICE_OOM: _device_oom,
    Outcome.HOST_OOM: _host_oom,
    Outcome.UNSERVABLE: _unservable,
    Outcome.SEQUENCE_SLOTS: _sequence_slots,
    Outcome.OVER_MODEL_LIMIT: _over_model_limit,
    Outcome.TOO_SHORT: _too_short,
    Outcome.DEVICE_BUSY: _device_busy,
    Outcome.BAD_CONFIG: _bad_config,
    Outcome.CRASH: _crash,
    Outcome.TIMEOUT: _timeout,
}
