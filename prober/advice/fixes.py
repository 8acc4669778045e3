"""Single ways out of a failure, each with its own number and its price. advice.py says which suit which failure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from prober.advice import estimate
from prober.advice.estimate import HIGHEST_UTILIZATION, Room
from prober.records import Figures, Verdict


@dataclass(frozen=True, slots=True)
class Fix:
    """One way out. ``value`` is what ``flag`` takes; ``expected_max_model_len`` None: not computable from this log."""

    action: str
    flag: str | None
    value: int | float | str | None
    expected_max_model_len: int | None
    why: str


def shorter(figures: Figures) -> Iterator[Fix]:
    length = estimate.length_that_fits(figures)
    if length is None:
        return
    told = figures.estimated_max_len or figures.max_tokens_in_cache
    kept = f", less the block(s) that this version never grants (vLLM says {told:,})" if told and told > length else ""
    yield Fix("ask for a shorter length", "--max-model-len", length, length, f"what this run's KV memory holds{kept}")


def higher_utilization(figures: Figures) -> Iterator[Fix]:
    missing, length, least = estimate.missing_gib(figures), figures.requested_max_model_len, ""
    if missing is None and figures.available_gib is not None and figures.available_gib <= 0:
        missing, length, least = -figures.available_gib + 0.01, None, "at least "  # a cache of nearly nothing
    now = estimate.utilization(figures)
    if now >= HIGHEST_UTILIZATION:
        yield Fix(
            "do not raise gpu_memory_utilization", None, None, None,
            f"it is {now:g} already; above {HIGHEST_UTILIZATION} graphs, the driver and neighbours run out of memory",
        )  # fmt: skip
        return
    if missing is None:
        yield Fix(
            "raise gpu_memory_utilization", "--gpu-memory-utilization", HIGHEST_UTILIZATION, None,
            f"now {now:.2f}; the log does not say how much is missing; {HIGHEST_UTILIZATION} is the most to try",
        )  # fmt: skip
        return
    lack = f"{least}{missing:.2f} GiB are missing"
    needed = estimate.utilization_for(figures, missing)
    if needed is None:
        yield Fix(
            "raise gpu_memory_utilization", "--gpu-memory-utilization", None, length,
            f"{lack}; divided by the device's total GiB that is how much to add to {now:.2f}",
        )  # fmt: skip
    elif needed > HIGHEST_UTILIZATION:
        yield Fix(
            "do not raise gpu_memory_utilization", None, None, None,
            f"{lack}, which takes {needed:.2f}; above {HIGHEST_UTILIZATION} graphs, the driver "
            "and neighbours run out of memory instead",
        )  # fmt: skip
    else:
        fraction = HIGHEST_UTILIZATION if least else needed
        yield Fix(
            "raise gpu_memory_utilization", "--gpu-memory-utilization", fraction, length,
            f"{lack} of {figures.total_gib:.2f}; less is left for graphs and neighbours",
        )  # fmt: skip


def more_host_memory(figures: Figures) -> Iterator[Fix]:
    asked, held = figures.requested_max_model_len, figures.max_tokens_in_cache
    why = f"{asked / held:.1f} times what it is now" if asked and held else "whole GiB of host memory"
    yield Fix("give the KV cache more host memory", "VLLM_CPU_KVCACHE_SPACE", None, asked, why)


def lower_utilization(figures: Figures) -> Iterator[Fix]:
    now = estimate.utilization(figures)
    lower = round(now - 0.05, 2)
    yield Fix(
        "lower gpu_memory_utilization", "--gpu-memory-utilization", lower, None,
        "memory ran out after the KV cache was sized, so the cache must be smaller; raising the fraction makes this "
        "worse. If the length is then refused, no fraction works and the device is too small for it",
    )  # fmt: skip


def smaller_cache_entries(figures: Figures, known: Room | None) -> Iterator[Fix]:
    length = known.length(gib_per_token=known.gib_per_token / 2) if known else None
    if length is None and (fits := estimate.length_that_fits(figures)) is not None:
        length = fits * 2
    yield Fix(
        "keep the KV cache in eight bits", "--kv-cache-dtype", "fp8", _within(length, figures),
        "half the bytes per token, unless the cache is fp8 already; some accuracy, and some devices cannot",
    )  # fmt: skip


def smaller_working_set(figures: Figures, known: Room | None) -> Iterator[Fix]:
    if figures.activation_gib:
        freed = figures.activation_gib / 2
        batch = figures.max_num_batched_tokens
        yield Fix(
            "batch fewer tokens", "--max-num-batched-tokens", batch // 2 if batch else 2048,
            _within(known.length(freed), figures) if known else None,
            f"activations take {figures.activation_gib:.2f} GiB and follow the batch; long prompts are read slower",
        )  # fmt: skip
    else:
        batch = figures.max_num_batched_tokens
        yield Fix(
            "batch fewer tokens", "--max-num-batched-tokens", batch // 2 if batch else 2048, None,
            "activations follow the batch; long prompts are read slower",
        )  # fmt: skip
    graphs = figures.cuda_graph_gib
    freed_by_eager = f"graphs take {graphs:.2f} GiB" if graphs and graphs > 0 else "graphs take up to a few GiB"
    yield Fix(
        "run without CUDA graphs", "--enforce-eager", None,
        _within(known.length(graphs), figures) if known and graphs and graphs > 0 else None,
        f"{freed_by_eager}; decoding becomes slower",
    )  # fmt: skip


def fewer_sequences(figures: Figures) -> Iterator[Fix]:
    seqs = figures.max_num_seqs
    yield Fix(
        "allow fewer sequences", "--max-num-seqs", max(1, seqs // 4) if seqs else 64, None,
        "the sampler's and the host's buffers grow with it; the price is concurrency",
    )  # fmt: skip


def more_devices(figures: Figures, known: Room | None) -> Iterator[Fix]:
    size = (figures.tensor_parallel_size or 1) * 2
    length = None
    if known is not None:
        freed = (figures.weights_gib or 0.0) / 2
        length = known.length(freed, known.gib_per_token / 2)
    yield Fix(
        "spread the model over more devices", "--tensor-parallel-size", size, _within(length, figures),
        "weights and KV heads are split; the size must divide the number of attention heads",
    )  # fmt: skip


def smaller_weights(figures: Figures, known: Room | None) -> Iterator[Fix]:
    weights = figures.weights_gib
    if weights is None or weights <= 0:
        yield Fix("use quantized weights", None, None, None, "an AWQ, GPTQ or FP8 version of the model; some accuracy")
        return
    yield Fix(
        "use quantized weights", None, None,
        _within(known.length(weights / 2), figures) if known else None,
        f"the weights take {weights:.2f} GiB; in eight bits about half if they are in sixteen now; some accuracy",
    )  # fmt: skip


def half_the_length(figures: Figures) -> Iterator[Fix]:
    length = figures.requested_max_model_len
    if length and length > 1:
        yield Fix(
            "ask for a shorter length", "--max-model-len", length // 2, None,
            "buffers grow with the length; half of it is a guess that a trial must prove",
        )  # fmt: skip


def free_memory(verdict: Verdict) -> Iterator[Fix]:
    if _holds_all_itself(verdict):
        return
    holders = _others(verdict.evidence)
    figures = verdict.figures
    if holders:
        who = ", ".join(f"process {pid} holds {size}" for pid, size in holders)
    elif figures.free_gib is not None and figures.total_gib is not None:
        who = f"{figures.total_gib - figures.free_gib:.2f} of {figures.total_gib:.2f} GiB are taken (see nvidia-smi)"
    else:
        who = "nvidia-smi shows who holds it; a server that was just stopped needs some seconds"
    yield Fix("free device memory", None, None, None, who)


def _others(evidence: str) -> list[tuple[str, str]]:
    """Who else holds device memory. PyTorch lists itself, too: in a container by a number that it does not know."""
    holders = re.findall(r"Process (\d+) has ([\d.]+ [GM]iB) memory in use", evidence)
    own = re.search(r"Of the allocated memory ([\d.]+) GiB is allocated by PyTorch", evidence)
    if "this process has" in evidence:
        return holders
    if own is None:
        return holders if len(holders) > 1 else []
    able = [(float(size[:-4]), (pid, size)) for pid, size in holders if size.endswith("GiB")]
    itself = min((one for one in able if one[0] >= float(own[1])), default=None)
    return [holder for holder in holders if itself is None or holder != itself[1]]


def _holds_all_itself(verdict: Verdict) -> bool:
    """The message says that this process has nearly all of the device: there is nobody to free it from."""
    evidence, total = verdict.evidence, verdict.figures.total_gib
    if "memory in use" in evidence and "this process has" not in evidence:
        return not _others(evidence)
    held = re.search(r"this process has ([\d.]+) GiB|([\d.]+) GiB already allocated", evidence)
    return held is not None and total is not None and float(held[1] or held[2]) > 0.9 * total


def _within(length: int | None, figures: Figures) -> int | None:
    """Never promise more than was asked for: nothing is known beyond."""
    if not length:
        return None
    asked = figures.requested_max_model_len
    return min(length, asked) if asked else length
