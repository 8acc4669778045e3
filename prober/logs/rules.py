"""What a failed start-up says, as data: the order is the priority (the first rule that matched is the root cause).

Sources: the messages of 81 releases of vLLM (0.2 to 0.33), PyTorch, Hugging Face Hub, NCCL, Ray and the kernel.
A new failure mode is one line here and one log in tests/logs. ``stage=None``: how far the log had come.
"""
# ruff: noqa: E501 - a message is easier to compare with a log when it stands on one line

from __future__ import annotations

import re
from dataclasses import dataclass

from prober.logs.template import Template
from prober.records import Outcome, Stage


@dataclass(frozen=True, slots=True)
class Rule:
    """One message that decides: what it means, and where in a start-up it is raised."""

    name: str
    outcome: Outcome
    stage: Stage | None
    template: Template


def _rules(outcome: Outcome, stage: Stage | None, *lines: tuple[str, str]) -> tuple[Rule, ...]:
    return tuple(Rule(name, outcome, stage, Template(text)) for name, text in lines)


_BUSY = _rules(
    Outcome.DEVICE_BUSY,
    Stage.CONFIG,
    (
        "free_memory_at_startup",
        "Free memory on device {*}({free_gib}/{total_gib} GiB) {*}less than {desired GPU memory utilization|the engine's budget}{ after excluding external process's weights|} ({gpu_memory_utilization},",
    ),
    ("free_memory_at_startup", "Free memory on device {*}({free_gib}/{total_gib} GiB) {*}is less than "),
    ("external_weights", "Externally held weights on device {*}({}/{total_gib} GiB) exceed the desired"),
    (
        "cpu_memory_at_startup",
        "Available memory on node {} ({free_gib}/{total_gib} GiB) on startup is less than desired CPU memory utilization ({gpu_memory_utilization},",
    ),
    (
        "cpu_memory_for_kv",
        "Available memory on node {} ({free_gib}/{total_gib} GiB) on kv cache allocation is less than",
    ),
)

_PROFILING = _rules(
    Outcome.DEVICE_BUSY,
    Stage.PROFILE,
    ("profiling_assertion", "Error in memory profiling."),
)

_LIMIT = _rules(
    Outcome.OVER_MODEL_LIMIT,
    Stage.CONFIG,
    (
        "over_model_limit",
        "User-specified max_model_len ({requested_max_model_len}) is greater than the derived max_model_len ({*}={model_limit}{)| or | in }",
    ),
    (
        "over_model_limit",
        "User-specified max_model_len ({requested_max_model_len}) is greater than the derived max_model_len",
    ),
)

# Not the model's limit but the batch's, without chunked prefill; to the search it is the same: nothing longer starts.
_BATCH_LIMIT = _rules(
    Outcome.OVER_MODEL_LIMIT,
    Stage.CONFIG,
    (
        "batched_tokens",
        "max_num_batched_tokens ({model_limit}) is smaller than max_model_len ({requested_max_model_len})",
    ),
)

_SLOTS = _rules(
    Outcome.SEQUENCE_SLOTS,
    Stage.CAPTURE,
    ("mamba_slots", "max_num_seqs ({max_num_seqs}) exceeds available Mamba cache blocks ({sequence_slots})"),
)

_SHORT = _rules(
    Outcome.TOO_SHORT,
    Stage.CONFIG,
    (
        "multimodal_item",
        "Chunked MM input disabled but max_tokens_per_mm_item ({}) is larger than max_num_batched_tokens ({max_num_batched_tokens})",
    ),
    (
        "prefill_threshold",
        "long_prefill_token_threshold ({}) cannot be greater than the max_model_len ({requested_max_model_len})",
    ),
    (
        "multimodal_prompt",
        "prompt (length {}) is longer than the maximum model length of {requested_max_model_len}. Make sure that `max_model_len` is no smaller than the number of text tokens plus multimodal tokens",
    ),
    (
        "multimodal_prompt",
        "prompt (total length {}) is too long to fit into the model (context length {requested_max_model_len}). Make sure that `max_model_len` is no smaller than the number of text tokens plus multimodal tokens",
    ),
)

_CONFIG = _rules(
    Outcome.BAD_CONFIG,
    Stage.CONFIG,
    # tensor, pipeline and context parallelism
    (
        "attention_heads",
        "Total number of attention heads ({}) must be divisible by tensor parallel size ({tensor_parallel_size})",
    ),
    (
        "hidden_layers",
        "Total number of hidden layers ({}) must be divisible by pipeline parallel size ({pipeline_parallel_size})",
    ),
    ("experts", "n_physical_experts={} must be divisible by ep_size={}"),
    ("pipeline_unsupported", "Pipeline parallelism is {not supported|only supported}"),
    ("pipeline_unsupported", "Pipeline parallelism is not yet implemented"),
    ("too_few_devices", "The number of required {*} exceeds the total number of available"),
    ("too_few_devices", "to less than max local gpu count"),
    ("too_few_devices", "is less than than max local gpu count"),
    ("too_few_devices", "World size ({}) is larger than the number of available GPUs"),
    (
        "too_few_devices",
        "local_world_size ({}) {must be less than or equal to the number of visible|exceeds assigned_physical_gpu_ids}",
    ),
    ("too_few_devices", "local rank {} is out of bounds"),
    ("too_few_devices", "local_rank {} is out of bounds"),
    ("too_few_devices", "Current node has no {*} available. current_node_resource"),
    ("world_size", "world_size ({}) is not {divisible by|equal to} tensor_model_parallel_size"),
    ("not_divisible", "{AssertionError: |Assertion failed, |assert }{} is not divisible by {}"),
    ("ray_required", "Ray is required "),
    ("single_device", "Executor only supports single "),
    ("quant_groups", "is not divisible by group_size={}"),
    ("context_parallel", "must be divisible by{ |}dcp_size="),
    ("context_parallel", "decode context parallel size must less than or equal to"),
    ("context_parallel", "must be divisible by dcp world size"),
    ("context_parallel", "dcp_kv_cache_interleave_size > 1 is not supported"),
    ("context_parallel", "`--decode-context-parallel-size` ({}) exceeds the maximum"),
    ("context_parallel", "decode_context_parallel_size={} must be 1 or equal"),
    ("context_parallel", "decode_context_parallel_size > 1"),
    ("context_parallel", "When PCP is enabled, DCP must be"),
    ("context_parallel", "decode context parallel group already initialized"),
    ("context_parallel", "CP not support "),
    ("data_parallel", "Invalid data-parallel launch options"),
    # batches
    (
        "batched_tokens",
        "max_num_batched_tokens ({max_num_batched_tokens}) must be greater than or equal to max_num_seqs ({max_num_seqs})",
    ),
    ("chunk_size", "max_num_batched_tokens (chunk size) must be dividable by block size"),
    ("draft_slots", "Consider increasing max_num_batched_tokens or decreasing num_speculative_tokens"),
    ("draft_slots", "does not have enough slots to {support|schedule}"),
    ("draft_slots", "max_num_scheduled_tokens is set to {*} based on the speculative decoding settings"),
    ("length_type", "max_model_len must be {an integer|a positive integer}"),
    ("sliding_window", "Disabling sliding window is not supported for models"),
    ("shared_memory", "cannot currently support max_model_len={requested_max_model_len} with block_size="),
    # dtype, quantization, attention backend, device
    ("bfloat16", "Bfloat16 is only supported on GPUs with compute capability of at least"),
    ("unknown_dtype", "Unknown dtype: "),
    ("dtype", "The model type {*} does not support float16"),
    ("dtype", "is not supported in ROCm. Supported dtypes"),
    ("quantization", "is not supported for quantization method"),
    ("quantization", "The quantization method {*} is not supported for the current GPU"),
    ("quantization", "Quantization method specified in the model config {*}does not match"),
    ("quantization", "Unknown quantization method"),
    ("quantization", "input size is not aligned with the quantized weight shape"),
    ("fp8_architecture", "type fp8e4nv not supported in this architecture"),
    ("kernel_image", "no kernel image is available for execution on the device"),
    ("device_type", "{Not support|Unsupported} device type"),
    ("device_type", "Failed to infer device type"),
    ("attention_backend", "Invalid attention backend for "),
    ("attention_backend", "Selected backend {*} is not valid for this configuration"),
    ("attention_backend", "No valid attention backend found for "),
    ("attention_backend", "Sinks are only supported in"),
    # block size
    ("block_size", "kernel only supports block sizes up to"),
    ("block_size", "does not support block size {}"),
    ("block_size", "should be greater than or equal to and divisible by {dcp|cp}_kv_cache_interleave_size"),
    ("block_size", "--block-size={block_size} requires intel_extension_for_pytorch"),
    ("block_size", "In Mamba cache align mode, block_size ({block_size}) must be <= max_num_batched_tokens"),
    # engine selection
    ("engine", "VLLM_USE_V1=1 is not supported with"),
    ("engine", "Non-Attention backend is not supported by V1"),
    ("engine", "Legacy input mapper is not supported in V1"),
    ("model_runner", "Model Runner V2 {requires Triton|does not yet support}"),
    ("model_runner", "Async scheduling is not supported by the V1 model runner"),
    # host
    ("numa_nodes", "{No|Not} enough allowed NUMA nodes to bind threads"),
    ("kv_cache_space", "Invalid environment variable VLLM_CPU_KVCACHE_SPACE"),
)

_LAYOUT = _rules(
    Outcome.BAD_CONFIG,
    Stage.KV_CACHE,
    ("attention_free", "No memory should be allocated for the cache blocks for an attention-free model"),
    (
        "multimodal_ipc",
        "frontend multimodal GPU decoding reserves {*}but only {available_gib:gib} is available for the KV cache",
    ),
    ("multimodal_ipc", "frontend multimodal GPU decoding reserves "),
    ("hybrid", "Hybrid models with more than one KV cache type are not supported"),
    ("hybrid", "num_gpu_blocks need to be the same across workers"),
    ("hybrid", "KVCacheManager does not support hybrid models"),
    ("hybrid", "KVCacheCoordinator assumes "),
    ("hybrid", "Only one block size is supported for now"),
    ("hybrid", "Hybrid KV cache manager is disabled but failed to convert"),
    ("hybrid", "Hybrid KV cache manager was explicitly enabled but is not supported"),
    ("hybrid", "KV cache specs for the same layer are different across workers"),
    ("hybrid", "Some layers are not assigned to any group"),
    ("hybrid", "page size {of the layer |}is not divisible by the maximum page size"),
    ("hybrid", "enable_return_routed_experts requires at least one kv cache group"),
    ("hybrid", "Failed to promote local KV cache specs"),
    ("block_size", "No common block size for "),
    ("block_size", "Attention block size should be increased to at least"),
    ("hybrid", "cannot express this model's mixed page sizes"),
)

_NO_ROOM = _rules(
    Outcome.NO_KV_MEMORY,
    Stage.KV_CACHE,
    ("no_kv_memory", "No available memory for the cache blocks"),
    ("cannot_auto_fit", "Cannot auto-fit max_model_len"),
    ("cpu_worker_full", "The worker already uses {} GiB (model weights and runtime)"),
)

_TOO_LONG = _rules(
    Outcome.KV_TOO_SMALL,
    Stage.KV_CACHE,
    (
        "kv_bytes",
        "To serve at least one request with the {models's|model's} max seq len ({requested_max_model_len}), {(|}{needed_gib:gib} KV cache is needed, {which is |}larger than {the |}available {KV cache memory |}{(|}{available_gib:gib}",
    ),
    (
        "kv_bytes",
        "{needed_gib:gib} KV cache is needed, which is larger than the available KV cache memory {(|}{available_gib:gib}",
    ),
    (
        "kv_bytes",
        "To serve at least one request with the {models's|model's} max seq len ({requested_max_model_len}), {(|}{needed_gib:gib} KV cache is needed",
    ),
    # cut at an end
    ("kv_bytes", "To serve at least one request with the {models's|model's} max seq len ({requested_max_model_len})"),
    ("kv_bytes", "larger than the available KV cache memory {(|}{refused_gib:gib}"),
    ("kv_tokens", "{The model's |}max seq len ({requested_max_model_len}) is larger than the maximum number of tokens"),
    ("kv_tokens", "maximum number of tokens that can be stored in KV cache ({max_tokens_in_cache})"),
)

_DEVICE_OOM = _rules(
    Outcome.DEVICE_OOM,
    None,
    (
        "device_oom",
        "{CUDA|HIP|NPU|XPU|MPS} out of memory. {*} has a total capacity of {total_gib:gib} of which {free_gib:gib} is free",
    ),
    (
        "device_oom",
        "{CUDA|HIP|NPU|XPU|MPS} out of memory. {*} {total_gib:gib} total capacity; {*} {free_gib:gib} free;",
    ),
    ("device_oom", "{CUDA|HIP|NPU|XPU|MPS} out of memory."),
    ("device_oom", "{CUDA|HIP|NPU|XPU|Triton|CUDA driver|HIP driver} {error|Error}{*}: out of memory"),
    ("device_oom", "Error [CUDA]: out of memory"),
    ("device_oom", "{Cuda|CUDA|HIP|Hip} failure {*}'out of memory'"),
    ("device_oom", "RuntimeError: {CUDA|HIP} out of"),
    ("device_oom", "OutOfMemoryError{: |(}"),
    ("device_oom", "CUDA_ERROR_OUT_OF_MEMORY"),
    ("device_oom", "cudaErrorMemoryAllocation"),
    ("device_oom", "hipErrorOutOfMemory"),
    ("device_oom", "{CUBLAS|CUSOLVER}_STATUS_ALLOC_FAILED"),
    ("device_oom", "UR_RESULT_ERROR_OUT_OF_{DEVICE_MEMORY|RESOURCES}"),
    ("device_oom", "RESOURCE_EXHAUSTED: "),
)

_WARMUP_OOM = _rules(
    Outcome.DEVICE_OOM,
    Stage.CAPTURE,
    ("warmup_oom", "out of memory occurred when warming up {*} with {max_num_seqs} dummy requests"),
    ("warmup_oom", "out of memory occurred when warming up"),
)

_LOAD_OOM = _rules(
    Outcome.DEVICE_OOM,
    Stage.LOAD,
    ("load_oom", "Failed to load model - not enough GPU memory"),
    ("load_oom", "Failed to create {*}weights: {CUDA|HIP|NPU|XPU} out of memory"),
)

_HOST_OOM = _rules(
    Outcome.HOST_OOM,
    None,
    ("kernel_kill", "{Out of memory|Memory cgroup out of memory}: Kill"),
    ("kernel_kill", "oom-kill:"),
    ("kernel_kill", "killed by the OOM killer"),  # systemd
    ("kernel_kill", "Failed with result 'oom-kill'"),
    ("kernel_kill", "oom_reaper: reaped process"),
    ("kernel_kill", "OOMKilled"),
    ("ray_memory_monitor", "node running low on memory"),
    ("ray_memory_monitor", "ray.exceptions.OutOfMemoryError"),
    ("ray_memory_monitor", "Ray killed this worker"),
    ("host_allocation", "DefaultCPUAllocator: can't allocate memory"),
    ("host_allocation", "not enough memory: you tried to allocate"),
    ("host_allocation", "[Errno 12] Cannot allocate memory"),
    ("host_allocation", "unable to mmap {} bytes from file {*}Cannot allocate memory"),
    ("host_allocation", "MemoryError: Unable to allocate"),
)

_UNSERVABLE = _rules(
    Outcome.UNSERVABLE,
    Stage.SERVE,
    ("over_block_manager", "exceeds the capacity of block_manager"),
)

_MACHINE = _rules(
    Outcome.CRASH,
    None,
    ("port_taken", "address already in use"),
    ("port_taken", "[Errno 98] Address already in use"),
    ("disk_full", "No space left on device"),
    ("driver", "Found no NVIDIA driver on your system"),
    ("driver", "No CUDA GPUs are available"),
    ("driver", "The NVIDIA driver on your system is too old"),
    ("driver", "CUDA driver version is insufficient for CUDA runtime version"),
    ("driver", "Unexpected error from cudaGetDeviceCount()"),
    ("driver", "CUDA unknown error - this may be due to"),
    ("driver", "No HIP GPUs are available"),
    ("driver", "could not select device driver"),
    ("driver", "nvidia-container-cli: "),
    ("broken_memory", "uncorrectable ECC error"),
    ("compiler", "Failed to find C compiler"),
    ("compiler", "Could not find nvcc"),
    ("compiler", "Python.h: No such file or directory"),
    ("illegal_access", "an illegal memory access was encountered"),
    ("collective", "NCCL error"),
    ("collective", "Watchdog caught collective operation timeout"),
    ("collective", "torch.distributed.Dist{Network|Store|Backend}Error"),
)

# Without a network every model looks as if it were not there.
_NETWORK = _rules(
    Outcome.CRASH,
    None,
    ("no_network", "We couldn't connect to "),
    ("no_network", "Max retries exceeded with url"),
    ("no_network", "NameResolutionError"),
    ("no_network", "LocalEntryNotFoundError"),
    ("no_network", "429 Client Error"),
    ("download", "Consistency check failed: file should be of size"),
)

# A log that holds both one of these and a refusal for capacity shows that these did no harm: they come later.
_FILES = _rules(
    Outcome.BAD_CONFIG,
    Stage.CONFIG,
    # the model and its files
    ("gated_repo", "You are trying to access a gated repo"),
    ("gated_repo", "Cannot access gated repo"),
    ("gated_repo", "GatedRepoError"),
    ("no_model", "Repository Not Found for url"),  # the Hub answers 401 to who asks for one that does not exist
    ("no_model", "RepositoryNotFoundError"),
    ("no_access", "{401|403} Client Error"),
    ("no_model", "is not a local folder and is not a valid model identifier"),
    ("no_model", "Invalid repository ID or local directory specified"),
    ("no_model", "Repo id must {be in the form|use alphanumeric}"),
    ("no_model", "Can't load the configuration of "),
    ("no_model", "Error no file named "),
    ("no_model", "does not appear to have a file named"),
    ("no_model", "Entry Not Found for url"),
    ("no_revision", "is not a valid git identifier"),
    ("config_format", "No supported config format found in"),
    ("config_format", "Unsupported config format"),
    ("weights_shape", "Attempted to load weight ({*} into parameter"),
    ("no_weights", "Cannot find any model weights with"),
    ("no_weights", "Error while deserializing header"),
    ("remote_code", "set the option `trust_remote_code=True`"),
    ("remote_code", "pass the argument `trust_remote_code=True`"),
    ("remote_code", "contains custom code which must be executed to correctly load"),
    ("architecture", "Model architectures {*} {are not supported|failed to be inspected}"),
    ("architecture", "has no vLLM implementation"),
    ("architecture", "but Transformers does not recognize this architecture"),
    ("architecture", "not supported by the current vLLM"),
    # arguments
    ("arguments", "error: unrecognized arguments"),
    ("arguments", "error: argument -"),
    ("arguments", "error: the following arguments are required"),
    ("arguments", "error: ambiguous option"),
    ("arguments", "TypeError: {*}__init__() got an unexpected keyword argument"),
    ("arguments", "Unexpected keyword argument [type=unexpected_keyword_argument"),
    ("arguments", "vllm: error: "),
)

_MODEL = _rules(
    Outcome.BAD_CONFIG,
    Stage.CONFIG,
    ("config_format", "Unrecognized model in {*}Should have a `model_type` key"),
    ("config_format", "`rope_scaling` must be a dictionary with two fields"),
    ("config_format", "Unknown RoPE scaling type"),
    ("tokenizer", "Tokenizer class {*}does not exist or is not currently imported"),
    ("tokenizer_files", "Couldn't instantiate the backend tokenizer from one of"),
    ("tokenizer_files", "Can't load tokenizer for '{*}"),
    ("tokenizer_files", "Unable to load vocabulary from file"),
    ("quantization", "Cannot find any of {*}in the model's quantization config"),
    ("quantization", "Cannot find the config file for "),
    ("tool_parser", "--enable-auto-tool-choice requires --tool-call-parser"),
    ("tool_parser", "invalid {tool call|reasoning} parser: "),
    ("chat_template", "looks like a file path, but it failed to be opened"),
    ("lora", "is greater than max_lora_rank"),
    ("lora_adapter", "failed: No adapter found for "),
    ("swap_space", "Too large swap space. {*}total CPU memory"),
    ("ray_devices", "Ray does not allocate any GPUs on the driver node"),
    ("forked", "Cannot re-initialize CUDA in forked subprocess"),
    ("main_guard", "start a new process before the current process has finished its bootstrapping phase"),
)

# The model's weights and kernels against this version, its build and this device.
_BUILD = _rules(
    Outcome.BAD_CONFIG,
    None,
    ("weights_names", "Following weights were not initialized from checkpoint"),
    ("weights_names", "There is no module or parameter named "),
    ("quantization", "Marlin does not support weight_bits"),
    ("quant_groups", "is not divisible by min_thread_{k|n}"),
    ("quant_groups", "output size is not aligned with the quantized weight shape"),
    ("too_few_devices", "{CUDA|HIP} error: invalid device ordinal"),
    ("kernel_image", "device kernel image is invalid"),
    ("kernel_image", "{CUDA|HIP} error: invalid device function"),
    ("kernel_image", "the provided PTX was compiled with an unsupported toolchain"),
    ("kernel_resources", "out of resource: shared memory"),
    ("attention_backend", "Head size {} is not supported by"),
    ("attention_backend", "FlashAttention only supports Ampere GPUs or newer"),
)

_CONFIG_WRAP = _rules(
    Outcome.BAD_CONFIG,
    Stage.CONFIG,
    ("validation", "Value error, "),  # the line of a validation error that says why
    (
        "validation",
        "validation {error|errors} for {ModelConfig|VllmConfig|SchedulerConfig|ParallelConfig|CacheConfig|EngineArgs}",
    ),
)

RULES: tuple[Rule, ...] = (
    *_BUSY,
    *_PROFILING,
    *_LIMIT,
    *_BATCH_LIMIT,
    *_SLOTS,
    *_SHORT,
    *_CONFIG,
    *_LAYOUT,
    *_TOO_LONG,
    *_NO_ROOM,
    *_HOST_OOM,  # before the device's: Ray's own OutOfMemoryError is about the host
    *_WARMUP_OOM,
    *_LOAD_OOM,
    *_DEVICE_OOM,
    *_UNSERVABLE,
    *_NETWORK,
    *_FILES,
    *_MODEL,
    *_BUILD,
    *_CONFIG_WRAP,
    *_MACHINE,
)

# A request's own trouble reads like one of these, so they count only while the server starts.
ONLY_BEFORE_READY = (Outcome.BAD_CONFIG, Outcome.OVER_MODEL_LIMIT, Outcome.TOO_SHORT)

# These of them stand above the traceback that says why; the others below it.
OPENING = re.compile(
    r"failed to start\.?\s*$|hit an exception|encountered a fatal error|Exception in worker|Error executing method"
    r"|background task failed"
)

# A server that is stopped ends like this, too.
ONLY_WHILE_STARTING = ("killed", "probe")

# Lines that any failure ends with. They decide nothing: the cause is somewhere else, or not in the log at all.
WRAPPERS: tuple[Rule, ...] = (
    *_rules(
        Outcome.TIMEOUT,
        None,
        ("start_timeout", "Timed out waiting for engine{s to| core processes to}"),
        ("start_timeout", "Did not receive response from front-end process within"),
        ("start_timeout", "RPCServer didn't reply within"),
    ),
    *_rules(
        Outcome.CRASH,
        None,
        ("engine_core", "Engine core initialization failed"),
        ("engine_core", "initialization failed. See root cause above"),
        ("engine_core", "EngineCore failed to start"),
        ("engine_core", "EngineCore hit an exception"),
        ("engine_core", "EngineCore encountered a fatal error"),
        ("engine_core", "EngineCoreProc failed to start"),
        ("engine_core", "Frontend process failed during engine core initialization"),
        ("engine_process", "Engine process failed to start"),
        ("engine_process", "RPCServer process died"),
        ("engine_process", "Task finished unexpectedly. This should never happen"),
        ("engine_process", "Engine loop has died"),
        ("engine_process", "Engine background task failed"),
        ("engine_process", "MQLLMEngine is already dead"),
        ("engine_process", "EngineDeadError"),
        ("engine_process", "Got fatal signal from worker processes"),
        ("engine_process", "RuntimeError: Engine {} failed: "),
        ("engine_process", "Executor failed."),
        ("usage", ".py: error: "),
        ("usage", "vllm serve: error: "),
        ("worker", "WorkerProc {failed|hit an exception|initialization failed|was terminated}"),
        ("worker", "Worker failed with error"),
        ("worker", "{Worker|Engine core} proc {*} died unexpectedly"),
        ("worker", "RayWorkerProc {*}{failed|died unexpectedly}"),
        ("worker", "Exception in worker "),
        ("worker", "Error executing method "),
        ("killed", "died, exit code: -9"),
        ("killed", "exited with code 137"),
        ("killed", "code=killed, status=9/KILL"),
        ("killed", "line {}: {} Killed"),
        ("probe", "failed {liveness|startup} probe, will be restarted"),
        ("signal", "Fatal Python error: "),
        ("signal", "{Segmentation fault|Illegal instruction|Aborted|Bus error} (core dumped)"),
        ("worker", "Worker {*} pid {} died, exit code"),
        ("worker", "because its worker process has died"),
        ("worker", "worker exited with exit code"),
        ("worker", "ChildProcessError: worker died"),
        ("worker", "died with exit code"),
        ("worker", "SIGUSR1 handler not installed"),
    ),
)
