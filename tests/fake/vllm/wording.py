"""What each version of vLLM prints and raises, as formats (vllm-messages.csv); the figures are the scenario's."""

from __future__ import annotations

from fake_scenario import Asked, Scenario

GIB = 2**30
DOCUMENTATION = " See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."


def gib(scenario: Scenario, amount: float) -> str:
    """An amount of bytes in GiB as this version rounds it."""
    return str(round(amount / GIB, 2)) if scenario.release >= (0, 14, 0) else f"{amount / GIB:.2f}"


def engine_name(scenario: Scenario) -> str:
    """The engine process in the log."""
    if not scenario.is_v1 or scenario.release < (0, 8, 3) or scenario.release >= (0, 18, 0):
        return "EngineCore"
    return "EngineCore_0" if scenario.release < (0, 10, 2) else "EngineCore_DP0"


def worker_name(scenario: Scenario, asked: Asked, rank: int) -> str:
    """The worker of a rank in the log."""
    if not scenario.is_v1:
        return "VllmWorkerProcess"
    if scenario.release < (0, 10, 1):
        return f"VllmWorker rank={rank}"
    pipeline, tensor = divmod(rank, asked.tensor_parallel_size)
    parts = [f"_PP{pipeline}"] if asked.pipeline_parallel_size > 1 else []
    parts += [f"_TP{tensor}"] if asked.tensor_parallel_size > 1 else []
    return "Worker" + "".join(parts)


def kv_too_small(scenario: Scenario, asked: Asked, length: int, launch: int, available_blocks: int) -> str:
    """The refusal of a length for want of KV blocks."""
    page = scenario.page(asked)
    knob = "VLLM_CPU_KVCACHE_SPACE" if scenario.on_cpu and not scenario.is_v1 else "gpu_memory_utilization"
    end = f"Try increasing `{knob}` or decreasing `max_model_len` when initializing the engine."
    if not scenario.is_v1:
        return (
            f"The model's max seq len ({length}) is larger than the maximum number of tokens that can be stored in KV "
            f"cache ({available_blocks * page}). {end}"
        )
    rank_bytes = page * scenario.bytes_per_token // asked.world_size
    needed, available = -(-length // page) * rank_bytes, available_blocks * rank_bytes
    release = scenario.release
    whose = "model's" if release >= (0, 22, 0) else "models's"
    unit = "GB" if release < (0, 8, 3) else "GiB"
    estimate = ""
    if release >= (0, 9, 1):
        fitting = scenario.checked_blocks(length, launch, asked) * page + scenario.estimate_error
        estimate = f" Based on the available memory, the estimated maximum model length is {fitting}."
    elif release >= (0, 8, 4):
        estimate = " Based on the available memory,"
    if release >= (0, 22, 0):
        end = end.replace("` or", "` (which also controls CPU memory on the CPU backend) or")
    if release >= (0, 13, 0):
        end += DOCUMENTATION
    return (
        f"To serve at least one request with the {whose} max seq len ({length}), ({gib(scenario, needed)} {unit} KV "
        f"cache is needed, which is larger than the available KV cache memory ({gib(scenario, available)} {unit})."
        f"{estimate} {end}"
    )


def no_kv_memory(scenario: Scenario) -> str:
    """The refusal when not one block is left."""
    knob = "VLLM_CPU_KVCACHE_SPACE" if scenario.on_cpu and not scenario.is_v1 else "gpu_memory_utilization"
    text = f"No available memory for the cache blocks. Try increasing `{knob}` when initializing the engine"
    if scenario.release >= (0, 22, 0):
        text += " (this flag also controls CPU memory reservation on the CPU backend, despite its name)"
    return text + "." + (DOCUMENTATION if scenario.release >= (0, 13, 0) else "")


def over_model_limit(scenario: Scenario, length: int, limit: int) -> str:
    """The refusal of a length that the model's config does not allow."""
    tail = "" if scenario.release < (0, 4, 0) else " or model_max_length=None"
    text = (
        f"User-specified max_model_len ({length}) is greater than the derived max_model_len "
        f"(max_position_embeddings={limit}{tail} in model's config.json)."
    )
    if scenario.release < (0, 10, 2):
        text += " This may lead to incorrect model outputs or CUDA errors."
    if scenario.release < (0, 5, 4):
        return text + " Make sure the value is correct and within the model context size."
    text += " To allow overriding this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
    if scenario.release >= (0, 10, 2):
        text += (
            ". VLLM_ALLOW_LONG_MAX_MODEL_LEN must be used with extreme caution. If the model uses relative position "
            "encoding (RoPE), positions exceeding derived_max_model_len lead to nan."
        )
    return text


def no_config(scenario: Scenario, model: str) -> str:
    """The refusal of a model without a config.json."""
    if scenario.release < (0, 9, 1):
        return f"No supported config format found in {model}."
    return (
        f"Invalid repository ID or local directory specified: '{model}'.\nPlease verify the following requirements:\n"
        "1. Provide a valid Hugging Face repository ID.\n"
        "2. Specify a local directory that contains a recognized configuration file.\n"
        "   - For Hugging Face models: ensure the presence of a 'config.json'.\n"
        "   - For Mistral models: ensure the presence of a 'params.json'.\n"
    )


def config_error(scenario: Scenario, subject: str, text: str) -> str:
    """A config-time refusal as pydantic wraps it from 0.9.1 on."""
    return (
        f"1 validation error for {subject}\n  Value error, {text} [type=value_error, "
        "input_value=ArgsKwargs((), {'model': ...}), input_type=ArgsKwargs]\n"
        "    For further information visit https://errors.pydantic.dev/2.12/v/value_error"
    )


def heads_by_tp(heads: int, tensor_parallel_size: int) -> str:
    """The refusal of a TP size that does not divide the heads."""
    return (
        f"Total number of attention heads ({heads}) must be divisible by tensor parallel size ({tensor_parallel_size})."
    )


def device_oom(scenario: Scenario, stage: str, max_num_seqs: int) -> tuple[str, str]:
    """Type and text of an out-of-memory error of the device."""
    if stage == "capture" and scenario.is_v1:
        return "RuntimeError", (
            f"CUDA out of memory occurred when warming up sampler with {max_num_seqs} dummy requests. Please try "
            "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine."
        )
    return "torch.OutOfMemoryError", (
        f"CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of {scenario.total_gib:.2f} GiB "
        "of which 511.44 MiB is free. Including non-PyTorch memory, this process has 22.90 GiB memory in use. Of the "
        "allocated memory 22.40 GiB is allocated by PyTorch, and 62.02 MiB is reserved by PyTorch but unallocated. If "
        "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
        "avoid fragmentation."
    )


def default_utilization(scenario: Scenario) -> float:
    """``gpu_memory_utilization`` when nobody says."""
    return 0.92 if scenario.release >= (0, 20, 0) else 0.9


def device_busy(scenario: Scenario, utilization: float, free_gib: float, total_gib: float) -> str:
    """The refusal to start on a device that others use."""
    where = "" if scenario.release < (0, 14, 0) else "cuda:0 "
    return (
        f"Free memory on device {where}({free_gib:.2f}/{total_gib:.2f} GiB) on startup is less than desired GPU memory "
        f"utilization ({utilization}, {total_gib * utilization:.2f} GiB). Decrease GPU memory utilization or reduce "
        "GPU memory used by other processes."
    )


def profile_assert(scenario: Scenario) -> str:
    """The assertion that fails when a neighbour frees memory during the profile."""
    text = "Error in memory profiling. Initial free memory 7.41 GiB, current free memory 20.18 GiB. This happens when "
    if scenario.release < (0, 9, 1):
        return text + "the GPU memory was not properly cleaned up before initializing the vLLM instance."
    return text + (
        "other processes sharing the same container release GPU memory while vLLM is profiling during initialization. "
        "To fix this, ensure consistent GPU memory allocation or isolate vLLM in its own container."
    )


def sequence_slots(max_num_seqs: int, slots: int) -> str:
    """The refusal of more sequences than there are Mamba blocks."""
    return (
        f"max_num_seqs ({max_num_seqs}) exceeds available Mamba cache blocks ({slots}). Each decode sequence requires "
        "one Mamba cache block, so CUDA graph capture cannot proceed. Please lower max_num_seqs to at most "
        f"{slots} or increase gpu_memory_utilization."
    )


def too_short(batched: int) -> str:
    """The refusal of a batch smaller than one multimodal item."""
    return (
        f"Chunked MM input disabled but max_tokens_per_mm_item (16384) is larger than max_num_batched_tokens "
        f"({batched}). Please increase max_num_batched_tokens."
    )


def kv_sizes(scenario: Scenario, asked: Asked, length: int, blocks: int) -> list[str]:
    """The lines that name the KV cache's size after a passed check."""
    tokens = blocks * scenario.page(asked)
    device = "CPU" if scenario.on_cpu and scenario.release >= (0, 30, 0) else "GPU"
    concurrency = f"Maximum concurrency for {length:,} tokens per request: {tokens / length:.2f}x"
    if not scenario.is_v1:
        concurrency = concurrency.replace(f"{length:,}", str(length))
        first = f"# GPU blocks: {blocks}, # CPU blocks: 2048"
        if scenario.on_cpu:
            first = f"# cpu blocks: {blocks}, # CPU blocks: 0"
        return [first, concurrency] if scenario.release >= (0, 6, 3) else [first]
    if scenario.release >= (0, 28, 0):
        return [f"{device} KV cache size: {tokens:,} tokens, {concurrency}"]
    return [f"{device} KV cache size: {tokens:,} tokens", concurrency]


def request_too_long(scenario: Scenario, prompt_tokens: int, max_tokens: int, limit: int) -> str:
    """The server's refusal of a request longer than the context."""
    if scenario.release < (0, 11, 0):
        return (
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the messages, {max_tokens} in the completion). "
            "Please reduce the length of the messages or completion."
        )
    return (
        f"'max_tokens' or 'max_completion_tokens' is too large: {max_tokens}. This model's maximum context length is "
        f"{limit} tokens and your request has {prompt_tokens} input tokens ({max_tokens} > {limit} - {prompt_tokens})."
    )
