"""Rows for the tests of the page: a small matrix with every kind of answer, and a large one."""

from __future__ import annotations

import itertools

from row_makers import HOSTILE, a_row

from prober.records import Outcome, Source, Status, Verify
from prober.results.schema import CeilingKind, Row

MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-FP8", "meta-llama/Llama-3.1-8B-Instruct", "openai/gpt-oss-120b")
GPUS = (("NVIDIA L4", 23034), ("NVIDIA H100 80GB HBM3", 81559), ("NVIDIA H200", 143771))


def proven(length: int, **changes: object) -> Row:
    """A row with both edges and the evidence for them."""
    values: dict[str, object] = {
        "max_model_len": length,
        "served_max_model_len": length,
        "starts_max_model_len": length + 128,
        "refused_max_model_len": length + 1,
        "ceiling_kind": CeilingKind.MEMORY,
        "why": f"It serves at {length:,} and is refused at {length + 1:,}.",
        "served_trial": "trial-a",
        "served_evidence": "/health 200; one token after a prompt of full length",
        "refused_trial": "trial-b",
        "refused_outcome": Outcome.KV_TOO_SMALL,
        "refused_evidence": "ValueError: the KV cache is needed,\nlarger than what is available",
        "driver": "580.65.06",
        "torch_version": "2.9.0",
        "host_memory_mib": 515632,
    }
    return a_row(**values | changes)


def matrix() -> list[Row]:
    """A hundred rows: four models on three GPUs with two sizes, and one of each lesser kind of answer."""
    rows = []
    axes = itertools.product(enumerate(MODELS), enumerate(GPUS), (1, 2), (0.9, 0.95), ("0.9.2", "0.10.0"))
    for (m, model), (g, (gpu, memory)), tp, share, version in axes:
        length = 16 * (100 + 700 * g * tp + 37 * m) * (4**g) + int(share * 1000) * 16 + len(version)
        rows.append(
            proven(
                length, model=model, gpu=gpu, gpu_memory_mib=memory, gpu_count=tp, tensor_parallel_size=tp,
                gpu_memory_utilization=share, vllm_version=version, kv_cache_dtype="fp8" if m == 1 else None,
                measured_at=f"2026-0{1 + m}-{10 + g}T12:00:00Z",
            )
        )  # fmt: skip
    second = rows[0]
    return [*rows, proven(1024, **_same_as(second), machine="m2"), *_lesser()]


def _same_as(row: Row) -> dict[str, object]:
    names = ("model", "gpu", "gpu_memory_mib", "gpu_count", "tensor_parallel_size", "gpu_memory_utilization",
             "vllm_version", "kv_cache_dtype")  # fmt: skip
    return {name: getattr(row, name) for name in names}


def _lesser() -> list[Row]:
    nothing: dict[str, object] = {"max_model_len": None, "starts_max_model_len": None, "verified": None}
    return [
        a_row(model="big/does-not-fit", **nothing | {"status": Status.DOES_NOT_FIT}),
        a_row(model="big/starts-only", **nothing | {"status": None, "starts_max_model_len": 9000,
                                                    "verified": Verify.NONE}),
        a_row(model="big/at-least", status=Status.AT_LEAST, max_model_len=5000),
        a_row(model="big/unstable", **nothing | {"status": Status.UNSTABLE, "served_max_model_len": 3000,
                                                 "refused_max_model_len": 4000}),
        a_row(model="big/reported", **nothing | {
            "status": None, "starts_max_model_len": 20272, "source": Source.REPORTED, "machine": None,
            "source_url": "https://example.org/issues/1", "tensor_parallel_size": None, "vllm_version": None}),
        a_row(model="big/refused", **nothing | {"status": None, "refused_max_model_len": 850_000,
                                                "source": Source.REPORTED, "source_url": "javascript:alert(1)"}),
    ]  # fmt: skip


def hostile() -> list[Row]:
    """Every text that has broken a page, in every column that takes one."""
    rows = []
    for index, text in enumerate(HOSTILE):
        rows += [
            proven(
                4096 + index, model=text, gpu=text, dtype=text, quantization=text, kv_cache_dtype=text, notes=text,
                vllm_version=text, other_flags=text, why=text, served_evidence=text, driver=text, machine=f"m{share}",
                gpu_memory_utilization=share, model_revision=text, source_url=text, measured_at=text,
            )
            for share in (0.8, 0.9)
        ]  # fmt: skip
    return rows


def many(count: int) -> list[Row]:
    """A fleet's matrix, each row with its evidence: few models, so that the long table starts near the top."""
    rows = []
    shares = [0.84 + step / 100 for step in range(12)]
    axes = itertools.product(range(9), GPUS, (1, 2, 4), shares, [f"0.{minor}.0" for minor in range(24, 30)])
    for m, (gpu, memory), tp, share, version in itertools.islice(axes, count):
        rows.append(
            proven(
                int(1000 * (1 + m) * tp * share * (memory / 23034)), model=f"org/model-{m}-Instruct",
                gpu=gpu, gpu_memory_mib=memory, gpu_count=tp, tensor_parallel_size=tp, gpu_memory_utilization=share,
                vllm_version=version, model_revision="9c925d64d72725edaf899c6cb9c377fd0709d9c5", cuda="12.9",
                block_size=16, trials=3, seconds=412.5, weights_gib=15.3, kv_cache_gib=2.25, prober_version="0.1.0",
            )
        )  # fmt: skip
    assert len(rows) == count
    return rows
