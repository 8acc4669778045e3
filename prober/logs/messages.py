"""What a start-up says on its way, as data: how far it has come, that it is ready, and the figures it prints."""
# ruff: noqa: E501 - a message is easier to compare with a log when it stands on one line

from __future__ import annotations

from prober.logs.template import Template
from prober.records import Stage

# The first of a stage says that everything before it is done.
STAGES: tuple[tuple[Stage, Template], ...] = tuple(
    (stage, Template(text))
    for stage, texts in (
        (
            Stage.DOWNLOAD,
            (
                "Using model weights format",
                "Downloading shards",
                "Downloading (…)",
                "Fetching {} files",
                "Downloading and loading",
            ),
        ),
        (
            Stage.LOAD,
            (
                "Starting to load model",
                "Loading drafter model",
                "Loading safetensors checkpoint shards",
                "Loading pt checkpoint shards",
                "Loading weights took",
                "Time spent downloading weights",
            ),
        ),
        (
            Stage.COMPILE,
            (
                "Dynamo bytecode transform time",
                "Using cache directory: ",
                "Compiling a graph for ",
                "Cache the graph ",
                "Directly load the compiled graph",
                "Start compiling function",
            ),
        ),
        (
            Stage.PROFILE,
            (
                "Loading model weights took",
                "Model loading took",
                "Encoder cache will be initialized",
                "torch.compile takes ",
                "Profiling CUDA graph memory",
                "Estimated CUDA graph memory",
                "Initial free memory",
            ),
        ),
        (
            Stage.KV_CACHE,
            (
                "Memory profiling takes",
                "Memory profiling results",
                "Available KV cache memory",
                "KV cache size: ",
                "Maximum concurrency for",
                "{GPU|CPU|cuda|CUDA|cpu|hip|xpu} blocks: {}",
                "Auto-fit max_model_len: ",
            ),
        ),
        (
            Stage.CAPTURE,
            (
                "Capturing the model for CUDA graphs",
                "Capturing cudagraphs for decoding",
                "Capturing CUDA graph",
                "[Warmup][",  # HPU
                "CUDA graphs can take additional",
                "Graph capturing finished",
                "Compile and warming up model",
                "Autotuning process starts",
                "init engine (profile, create kv cache, warmup model) took",
            ),
        ),
    )
    for text in texts
)

# The server says so itself. Only these take back a failure that stood before them.
READY: tuple[Template, ...] = (Template("Application startup complete"), Template("Uvicorn running on"))
# It answers, so it must have become ready; printed on a timer too, also by a server whose engine has just died.
SERVING: tuple[Template, ...] = (
    *(Template("Avg prompt throughput: "), Template("Processed prompts: ")),
    *(Template("Added request "), Template('"POST /v1/{completions|chat/completions} HTTP/')),
    # a request's own trouble: the server is up and refuses it
    *(Template("Error in preprocessing prompt inputs"), Template("This model's maximum context length is {}")),
    *(Template("Exception in ASGI application"), Template("Error in {chat completion|completion} stream generator")),
    *(Template("in create_{chat_completion|completion}"), Template("in render_{chat|completion}_request")),
)

# The functions in the frames of a traceback say where it was raised, also when the log is cut or another process has
# come further. Of one traceback the outermost counts.
FRAMES: tuple[tuple[Stage, Template], ...] = tuple(
    (stage, Template(name))
    for stage, names in (
        (
            Stage.CONFIG,
            ("init_device", "init_worker_distributed_environment", "initialize_model_parallel", "create_engine_config"),
        ),
        (
            Stage.LOAD,
            (
                *("load_model", "load_weights", "create_weights", "initialize_model", "_initialize_model"),
                *("make_layers", "process_weights_after_loading", "_get_quantization_config"),
            ),
        ),
        (
            Stage.PROFILE,
            ("profile_run", "determine_available_memory", "determine_num_available_blocks"),
        ),
        (
            Stage.KV_CACHE,
            (
                *("allocate_kv_cache", "_allocate_kv_cache", "initialize_kv_cache", "_init_cache_engine"),
                *("raise_if_cache_size_invalid", "check_enough_kv_cache_memory", "get_kv_cache_configs"),
                *("get_kv_cache_config",),
            ),
        ),
        (
            Stage.CAPTURE,
            (
                *("capture_model", "compile_or_warm_up_model", "_capture_cudagraphs", "_warm_up_model"),
                *("warm_up_model", "warmup_model", "kernel_warmup", "capture_begin", "capture_end"),
                "torch/cuda/graphs.py",
            ),
        ),
        (
            Stage.SERVE,
            (
                *("run_busy_loop", "_process_engine_step", "run_engine_loop", "engine_step", "step_async"),
                *("start_worker_execution_loop", "execute_model_async", "output_handler", "run_asgi"),
            ),
        ),
    )
    for name in names
)
# These contain or belong to several stages: a frame of the other kind says more.
OUTER_FRAMES: tuple[tuple[Stage, Template], ...] = tuple(
    (stage, Template(name))
    for stage, names in (
        (Stage.COMPILE, ("torch/_inductor/",)),
        (Stage.PROFILE, ("_initialize_kv_caches", "_dummy_run")),
        (Stage.KV_CACHE, ("initialize_cache", "initialize_from_config")),
        (Stage.CAPTURE, ("_dummy_sampler_run",)),
    )
    for name in names
)
FRAME = Template('", line {}, in ')

# A new server in the same log: what stood before belongs to an earlier start.
SERVER_STARTS: tuple[Template, ...] = (Template("vLLM API server version"),)
ENGINE_STARTS: tuple[Template, ...] = (Template("Initializing a{n|} {V0 |V1 |}LLM engine"),)

TRACEBACK = Template("Traceback (most recent call last)")
LOGGING_ERROR = Template("--- Logging error ---")
LOGGING_ERROR_END = Template("Arguments: ")
EXCEPTIONS = (
    *(TRACEBACK, LOGGING_ERROR, LOGGING_ERROR_END),
    *(Template("Error: "), Template("Exception: "), Template("Error("), Template("Exception(")),
    *(Template("AssertionError"), Template("NotImplementedError"), Template("BackendCompilerFailed")),
)

FIGURES: tuple[Template, ...] = tuple(
    Template(text)
    for text in (
        "estimated maximum model length is {estimated_max_len}",
        "Auto-fit max_model_len: reduced from {model_limit} to {auto_length} to fit in available {GPU|KV cache} memory ({auto_available_gib:gib}",
        "Auto-fit max_model_len: reduced from {model_limit} to {auto_length} ",
        "Auto-fit max_model_len: full model context length {auto_length} fits",
        "Auto-fit max_model_len: attention-free model, using derived max_model_len={auto_length}",
        "Available KV cache memory: {available_gib:gib}",
        "reserved {available_gib:gib} memory for KV Cache as specified",
        "memory reserved for KV Cache is {available_gib:gib}",
        "kv_cache_size={available_gib:gib}",
        "Auto set ({available_gib}/{total_gib}) GiB for KV cache on node",
        "Explicitly set ({available_gib}/{total_gib}) GiB for KV cache on node",
        "Current kv cache memory in use is {used_gib:gib}",
        "KV cache size: {kv_cache_tokens} tokens",
        "KV cache size is {kv_cache_tokens} tokens",
        "Maximum concurrency for {concurrency_length} tokens per request: {concurrency}x",
        "Maximum concurrency ... {concurrency}x",
        "blocks: {gpu_blocks}, # CPU blocks: {cpu_blocks}",
        "# {GPU|cuda|CUDA|cpu|hip|xpu|rocm|npu|hpu|tpu|neuron} blocks: {gpu_blocks}",
        "# CPU blocks: {lone_cpu_blocks}",  # the CPU backend up to 0.6: there these are the device's blocks
        "num_gpu_blocks is: {gpu_blocks}",
        "The engine can allocate {gpu_blocks} GPU blocks, {cpu_blocks} CPU blocks",
        "Overriding num_gpu_blocks={} with num_gpu_blocks_override={override_blocks}",
        "Replacing profiled num_gpu_blocks={} with forced_num_gpu_blocks={override_blocks}",
        "Loading model weights took {weights_gib:gib}",
        "Loading model weights took in total {weights_gib:gib}",
        "Model loading took {weights_gib:gib}",
        "model weights take {weights_gib:gib}",
        "{weights_gib:gib} for weight",
        "non_torch_memory takes {non_torch_gib:gib}",
        "non_torch_memory={non_torch_gib:gib}",
        "{non_torch_gib:gib} for non-torch memory",
        "peak_torch_memory={peak_gib:gib}",
        "activation peak memory takes {activation_gib:gib}",
        "{activation_gib:gib} for peak activation",
        "{activation_gib:gib} peak activation",
        "Graph capturing finished in {} secs, took {cuda_graph_gib:gib}",
        "Estimated CUDA graph memory: {cuda_graph_gib:gib}",
        "CUDA graph pool memory: {cuda_graph_gib:gib} (actual)",
        "{cuda_graph_gib:gib} for CUDAGraph memory",
        "{cuda_graph_gib:gib} for NPU graph memory",
        "total_gpu_memory ({total_gib:gib}) x gpu_memory_utilization ({gpu_memory_utilization})",
        "total_gpu_memory={total_gib:gib}",
        "Free memory on device {*}({free_gib}/{total_gib} GiB) on startup",
        "Desired GPU memory utilization is ({gpu_memory_utilization},",
        "The current --gpu-memory-utilization={gpu_memory_utilization} is",
        "Initial free memory: {free_gib:gib}",
        "Initial free memory {free_gib:gib}",
        "total capacity of {total_gib:gib} of which {free_gib:gib} is free",
        "Using max model len {using_length}",
        "block_size={block_size}",
        "Setting attention block size to {block_size} tokens",
        "Setting kv cache block size to {block_size} ",
        "Forcing kv cache block size to {block_size} ",
        "Defaulting max_num_batched_tokens to {max_num_batched_tokens}",
        "Setting max_num_batched_tokens to {max_num_batched_tokens}",
        "Defaulting max_num_seqs to {max_num_seqs}",
        "Setting max_num_seqs to {max_num_seqs}",
        "vLLM API server version {vllm_version:word}",
        "LLM engine (v{vllm_version:word}) with config",
        "█ version {vllm_version:word}",
        "with config: model='{model:word}'",
        "with config: model={model:word},",
        "max_seq_len={config_length},",
        "max_model_len={argument_length}",
        "--max-model-len{ |=}{argument_length}",
        "--tensor-parallel-size{ |=}{tensor_parallel_size}",
        "--gpu-memory-utilization {gpu_memory_utilization}",
        "--gpu-memory-utilization from {gpu_memory_utilization} to",
        "gpu_memory_utilization={gpu_memory_utilization}",
        "max_num_seqs={max_num_seqs}",
        "max_num_batched_tokens={max_num_batched_tokens}",
        "tensor_parallel_size={tensor_parallel_size}",
        "pipeline_parallel_size={pipeline_parallel_size}",
        "'model': '{model:word}'",
        "'max_model_len': {argument_length}",
        "'tensor_parallel_size': {tensor_parallel_size}",
        "'pipeline_parallel_size': {pipeline_parallel_size}",
        "'gpu_memory_utilization': {gpu_memory_utilization}",
        "'max_num_seqs': {max_num_seqs}",
        "'max_num_batched_tokens': {max_num_batched_tokens}",
        "'block_size': {block_size}",
    )
)
