"""Failures that are not about memory, family by family: each is named, and none of them reads as capacity."""

from __future__ import annotations

import pytest

from prober.advice.explain import explain
from prober.logs.classify import classify
from prober.records import Outcome, Stage

BAD, CRASH = Outcome.BAD_CONFIG, Outcome.CRASH
FAMILIES = [
    ("ValueError: Following weights were not initialized from checkpoint: {'otter.weight'}", BAD, "weights_names"),
    ("ValueError: There is no module or parameter named 'tail' in OtterForCausalLM", BAD, "weights_names"),
    ("ValueError: Unrecognized model in /m/otter. Should have a `model_type` key in its config", BAD, "config_format"),
    ("ValueError: `rope_scaling` must be a dictionary with two fields, got {'x': 1}", BAD, "config_format"),
    ("ValueError: Tokenizer class OtterTokenizer does not exist or is not currently imported.", BAD, "tokenizer"),
    ("ValueError: Couldn't instantiate the backend tokenizer from one of: ", BAD, "tokenizer_files"),
    ("OSError: Can't load tokenizer for '/m/otter'. If you were trying to load it", BAD, "tokenizer_files"),
    ("ValueError: Marlin does not support weight_bits = uint2b2. Only types = [] are supported", BAD, "quantization"),
    ("ValueError: Weight input_size_per_partition = 96 is not divisible by min_thread_k = 128.", BAD, "quant_groups"),
    ("RuntimeError: CUDA error: invalid device ordinal", BAD, "too_few_devices"),
    ("ValueError: Ray does not allocate any GPUs on the driver node. Consider adjusting", BAD, "ray_devices"),
    ("RuntimeError: Triton Error [CUDA]: device kernel image is invalid", BAD, "kernel_image"),
    ("RuntimeError: HIP error: invalid device function", BAD, "kernel_image"),
    ("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 9", BAD, "kernel_resources"),
    ("ValueError: Head size 72 is not supported by OtterAttention.", BAD, "attention_backend"),
    ("ValueError: Too large swap space. 8.00 GiB out of the 7.75 GiB total CPU memory is allocated", BAD, "swap_space"),
    ("ValueError: LoRA rank 32 is greater than max_lora_rank 8.", BAD, "lora"),
    ("ValueError: Loading lora otter failed: No adapter found for /m/otter", BAD, "lora_adapter"),
    ("TypeError: Error: --enable-auto-tool-choice requires --tool-call-parser", BAD, "tool_parser"),
    ("RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA", BAD, "forked"),
    ("RuntimeError: Failed to find C compiler. Please specify via CC", CRASH, "compiler"),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", CRASH, "broken_memory"),
    ("torch.distributed.DistNetworkError: The client socket has timed out", CRASH, "collective"),
    ("[rank1]:[E415 06:30:01.1 X.cpp:632] [Rank 1] Watchdog caught collective operation timeout", CRASH, "collective"),
    ("RuntimeError: No HIP GPUs are available", CRASH, "driver"),
    ('docker: Error response from daemon: could not select device driver "" with capabilities', CRASH, "driver"),
    ("requests.exceptions.HTTPError: 429 Client Error: Too Many Requests for url", CRASH, "no_network"),
    ("vllm-1 exited with code 137", CRASH, "killed"),
    ("ERROR 04-15 06:30:01 x.py:120] Worker VllmWorkerProcess pid 71 died, exit code: -9", CRASH, "killed"),
    ("./run.sh: line 3: 71 Killed                  vllm serve otter", CRASH, "killed"),
    ("Container vllm failed startup probe, will be restarted", CRASH, "probe"),
    ("OSError: [Errno 98] Address already in use", CRASH, "port_taken"),
    ("Segmentation fault (core dumped)", CRASH, "signal"),
    ("The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR", CRASH, "worker"),
]


@pytest.mark.parametrize(("line", "outcome", "rule"), FAMILIES, ids=[line[:40] for line, _, _ in FAMILIES])
def test_a_family_is_named(line: str, outcome: Outcome, rule: str) -> None:
    found = explain([f"Traceback (most recent call last):\n{line}\n".encode()])
    assert (found.verdict.outcome, found.verdict.rule) == (outcome, rule)
    assert found.fixes


@pytest.mark.parametrize("line", [line for line, outcome, _ in FAMILIES if outcome is BAD], ids=lambda line: line[:40])
def test_a_refusal_for_capacity_outweighs_them(line: str) -> None:
    """The start went on after them, so they did no harm."""
    refusal = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
    assert classify(f"{line}\n{refusal}\n".encode()).outcome is Outcome.NO_KV_MEMORY


@pytest.mark.parametrize(
    "line", ["vllm-1 exited with code 137", "Container vllm failed liveness probe, will be restarted"]
)
def test_a_server_that_was_ready_may_be_stopped(line: str) -> None:
    text = f"INFO:     Application startup complete.\n{line}\n"
    assert classify(text.encode()).outcome is Outcome.READY


@pytest.mark.parametrize(
    "answer", ["Repo id must be in the form 'otter' or 'acme/otter': '/m/otter.gguf'.", "401 Client Error.", "an otter"]
)
def test_what_vllm_only_tried_is_no_failure(answer: str) -> None:
    text = f"ERROR 04-15 06:30:01 [config.py:1] Error retrieving safetensors: {answer}, retrying 1 of 2\n"
    assert classify(text.encode()).outcome is Outcome.UNFINISHED


@pytest.mark.parametrize("quoted", ["`{}`", '"{}"', "“{}”", "[Bug]: {}", "> {}", "[Bug]: it hits [rank0]: {}"])
def test_an_error_that_somebody_quotes_is_an_error(quoted: str) -> None:
    assert classify(quoted.format("AssertionError: an otter is no fish").encode()).outcome is Outcome.CRASH


def test_systemd_names_the_killer() -> None:
    for message in ("A process of this unit has been killed by the OOM killer.", "Failed with result 'oom-kill'."):
        text = f"Jan 01 00:00:00 host systemd[1]: vllm.service: {message}\n"
        assert classify(text.encode()).outcome is Outcome.HOST_OOM


def test_a_guess_of_the_killer_is_no_proof() -> None:
    text = "There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory"
    assert classify(text.encode()).outcome is not Outcome.HOST_OOM


def test_a_warning_of_torch_s_own_log_is_harmless() -> None:
    text = "[rank0]:[W415 06:30:01.123456789 X.cpp:122] Warning: CUDA warning: an illegal memory access was encountered"
    assert classify(text.encode()).outcome is Outcome.UNFINISHED


def test_the_line_that_says_why_is_the_evidence_of_a_validation_error() -> None:
    text = (
        "pydantic.ValidationError: 1 validation error for ModelConfig\n  Value error, an otter is no model [type=x]\n"
    )
    found = classify(text.encode())
    assert found.outcome is Outcome.BAD_CONFIG
    assert found.evidence.startswith("Value error, an otter")


def test_a_prompt_of_items_that_the_length_cannot_hold_is_too_short() -> None:
    text = (
        "ValueError: The decoder prompt (length 5100) is longer than the maximum model length of 4096. Make sure that "
        "`max_model_len` is no smaller than the number of text tokens plus multimodal tokens."
    )
    found = explain([text.encode()])
    assert (found.verdict.outcome, found.verdict.figures.requested_max_model_len) == (Outcome.TOO_SHORT, 4096)
    assert (found.fixes[0].flag, found.fixes[0].value) == ("--max-model-len", 5100)


def test_weights_that_cannot_be_created_are_of_loading() -> None:
    text = "ERROR 04-15 06:30:01 [x.py:1] Failed to create unquantized linear weights: CUDA out of memory. Tried to"
    found = classify(text.encode())
    assert (found.outcome, found.stage) == (Outcome.DEVICE_OOM, Stage.LOAD)


def test_a_repository_that_does_not_exist_is_a_name_and_not_a_token() -> None:
    text = (
        "X.RepositoryNotFoundError: 401 Client Error. (Request ID: x)\n\nRepository Not Found for url: https://x/y.\n"
    )
    assert classify(text.encode()).rule == "no_model"


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("Loading model weights took in total 12.5 GiB of device memory (12.5 GiB/94.6 GiB used)", "weights_gib", 12.5),
    ],
)
def test_figures_of_other_devices(line: str, name: str, value: float) -> None:
    text = f"INFO 04-15 06:30:01 hpu_model_runner.py:791] {line}\n"
    assert getattr(classify(text.encode()).figures, name) == value
