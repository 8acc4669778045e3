"""Advice for failures that are not about memory: by rule, or by the text of an error that no rule matches."""

from __future__ import annotations

import re

from prober.logs.rules import OPENING
from prober.records import Stage, Verdict

Advice = tuple[str, str | None, int | float | str | None, str]  # action, flag, value, why

CONFIG_UNKNOWN: Advice = ("correct the configuration", None, None, "no length can work before this is changed")
_SMALLER_GROUPS = "each device's part of the weights must be whole quantization groups: fewer devices, or other weights"
_NO_KERNELS = "this build of vLLM, PyTorch or Triton has no kernels for this GPU, or is newer than the driver"
CONFIG: dict[str, Advice] = {
    "arguments": ("correct the arguments", None, None, "vLLM did not understand the command line"),
    "architecture": ("use a vLLM that knows this model", None, None, "this version has no implementation of it"),
    "attention_backend": (
        *("let vLLM choose the attention backend", "VLLM_ATTENTION_BACKEND", None),
        "unset it (and --attention-backend): the one asked for cannot serve this model on this GPU",
    ),
    "batched_tokens": ("raise max_num_batched_tokens", "--max-num-batched-tokens", None, "it limits length and batch"),
    "bfloat16": ("use float16", "--dtype", "half", "this device has no bfloat16"),
    "chat_template": ("correct the chat template's path", "--chat-template", None, "there is no such file"),
    "config_format": (
        *("fix the model's config.json, or use newer versions of vLLM and transformers", None, None),
        "the configuration is missing, incomplete, or of a kind that these versions do not know",
    ),
    "device_type": (
        *("install the vLLM that is made for this device", None, None),
        "it found no device that it knows: another build, no driver, or a container without its GPU",
    ),
    "dtype": (
        "choose another dtype",
        "--dtype",
        "auto",
        "this model or device does not work in the one asked for",
    ),
    "forked": (
        *("spawn the workers instead of forking them", "VLLM_WORKER_MULTIPROC_METHOD", "spawn"),
        "something used CUDA before vLLM started its workers",
    ),
    "fp8_architecture": (
        *("choose weights or a KV cache that are not FP8", "--kv-cache-dtype", "auto"),
        "this GPU is older than FP8",
    ),
    "gated_repo": ("get access to the model", "HF_TOKEN", None, "accept the model's terms and log in"),
    "kernel_image": ("use a build for this GPU and driver", None, None, _NO_KERNELS),
    "kernel_resources": (
        *("use another attention backend, quantization or version", None, None),
        "a kernel needs more of the GPU's on-chip memory than it has; that is not device memory, no length helps",
    ),
    "lora": (
        "raise the limit for LoRA",
        "--max-lora-rank",
        None,
        "the adapter's rank is higher than allowed",
    ),
    "lora_adapter": ("correct the adapter's path", "--lora-modules", None, "no adapter is there under this name"),
    "main_guard": (
        *("""put the script's main part under `if __name__ == "__main__":`""", None, None),
        "the workers import the script again when they start",
    ),
    "no_access": ("get access to the model", "HF_TOKEN", None, "the Hub refused the token, or there is none"),
    "no_model": (
        *("correct the model's name or path", "--model", None),
        "nothing is there under this name (a private repository looks like this without HF_TOKEN)",
    ),
    "no_revision": ("correct the revision", "--revision", None, "the repository has no such branch, tag or commit"),
    "no_weights": (
        *("fetch the weights again", "--load-format", None),
        "the folder holds none that vLLM reads, or a file is cut off",
    ),
    "not_divisible": (
        *("use fewer devices", "--tensor-parallel-size", None),
        "a dimension of the model cannot be divided among so many",
    ),
    "quant_groups": ("use fewer devices", "--tensor-parallel-size", None, _SMALLER_GROUPS),
    "quantization": (
        *("use other weights: another quantization of the model, or none", None, None),
        "this GPU, this version or the model's own configuration does not go with the one asked for",
    ),
    "ray_devices": (
        *("start vLLM on a node that has GPUs", None, None),
        "Ray placed no worker beside the driver; compare `ray status`, VLLM_HOST_IP and the nodes' GPUs",
    ),
    "remote_code": ("allow the model's own code", "--trust-remote-code", None, "read it first: it runs here"),
    "swap_space": ("use less swap space", "--swap-space", 0, "it is taken from the host's memory, for every device"),
    "tokenizer_files": ("name a tokenizer", "--tokenizer", None, "the model's folder holds no tokenizer files"),
    "tokenizer": ("use a newer transformers, or name a tokenizer", "--tokenizer", None, "it has no such class"),
    "too_few_devices": (
        *("use fewer devices", "--tensor-parallel-size", None),
        "more are asked for than are visible (see CUDA_VISIBLE_DEVICES and the container's GPUs)",
    ),
    "tool_parser": ("name a parser that exists", "--tool-call-parser", None, "vllm serve --help lists them"),
    "validation": ("correct the setting that vLLM rejects", None, None, "its message names it; no length helps"),
    "weights_names": (
        *("use a vLLM that fits this checkpoint", None, None),
        "its tensors have other names than this version's implementation of the model expects, or some are missing",
    ),
    "weights_shape": (
        *("use a vLLM that fits this checkpoint", None, None),
        "its tensors have other shapes than config.json or this version's implementation of the model says",
    ),
}

CRASHES: dict[str, Advice] = {
    "broken_memory": ("replace or reset the GPU", None, None, "its memory has errors; nvidia-smi -q -d ECC says more"),
    "collective": (
        *("fix the collective communication", "NCCL_DEBUG", "INFO"),
        "NCCL failed: its own log says why; often /dev/shm (--ipc=host), the network interface, or a version",
    ),
    "compiler": (
        *("install a C compiler, Python's headers and, for FlashInfer, the CUDA toolkit", None, None),
        "kernels are compiled when the server starts; --enforce-eager avoids most of it",
    ),
    "disk_full": ("free disk space", None, None, "the disk, or /dev/shm, is full"),
    "download": ("remove the broken file and download again", None, None, "what came is not what the Hub has"),
    "driver": (
        *("fix the driver, or give the container its GPU", None, None),
        "CUDA or ROCm does not see a device; nvidia-smi (rocm-smi) inside the container says more",
    ),
    "exit_status": ("provide the whole log", None, None, "the process ended and its log holds no cause"),
    "illegal_access": (
        *("try another attention backend or version", "CUDA_LAUNCH_BLOCKING", 1),
        "a kernel read outside its memory; with this setting the traceback shows which",
    ),
    "killed": (
        *("find out what killed it: dmesg, docker inspect (OOMKilled), kubectl describe pod", None, None),
        "status 137 is SIGKILL: most often the host's memory or the container's limit ran out, else a time limit",
    ),
    "no_network": (
        *("fix the network, or use what is downloaded already", "HF_HUB_OFFLINE", 1),
        "the Hub was not reached, or it limits the request rate; a mirror is set with HF_ENDPOINT",
    ),
    "port_taken": ("use another port", "--port", None, "another server listens on this one"),
    "probe": (
        *("give the container longer to start (startupProbe: failureThreshold × periodSeconds)", None, None),
        "Kubernetes ended it while it loaded or compiled; that says nothing about the model",
    ),
    "signal": (
        *("try another version or build, without compilation first", "--enforce-eager", None),
        "native code crashed; the lines above, with PYTHONFAULTHANDLER=1, show where",
    ),
    "traceback": (
        *("provide the end of this traceback", None, None),
        "the log stops before the line that names the error (…Error: …). If that line says only that the engine or a "
        "worker failed, the cause stands above, in the lines of EngineCore or Worker",
    ),
}

# Advice for errors that no rule matches, by their text.
SAID: tuple[tuple[re.Pattern[str], Advice], ...] = tuple(
    (re.compile(pattern), way)
    for pattern, way in (
        (
            r"undefined symbol|cannot open shared object|DLL load failed|No module named|cannot import name|"
            r"ModuleNotFoundError|ImportError|torchvision::|GLIBCXX",
            (
                *("fix the installation", None, None),
                "a part is missing, or was built for another PyTorch or CUDA: install vLLM with its own PyTorch "
                "in a fresh environment",
            ),
        ),
        (
            r"InductorError|BackendCompilerFailed|torch\._dynamo|torch\._inductor|triton\.",
            (
                *("start without compilation", "--enforce-eager", None),
                "the compiler failed, not the model; try it with an empty compile cache, too",
            ),
        ),
        (
            r"No such file or directory|NotADirectoryError|Permission denied",
            ("correct the path or its permissions", None, None, "the process cannot read what the error names"),
        ),
    )
)
_IN_LOAD: Advice = (
    *("check that this version of vLLM fits this checkpoint", None, None),
    "it failed over the weights themselves: other names, shapes or a quantization that it does not expect",
)
_ELSEWHERE: Advice = (
    *("search for this error and your version of vLLM", None, None),
    "no known cause; it says nothing about memory or length. Another version, and --enforce-eager, are worth a try",
)
_BEFORE: Advice = (
    *("provide the part of the log before this line", None, None),
    "this only says that another process failed; its own ERROR lines or traceback (EngineCore, Worker) stand "
    "above, on stderr as well as on stdout",
)
_AFTER: Advice = (
    *("provide the part of the log after this line", None, None),
    "this only begins the report: the traceback follows, and its last line (…Error: …) names the cause",
)


def of_crash(verdict: Verdict) -> Advice:
    """Return the advice for a crash, or which part of the log is missing."""
    if verdict.rule in CRASHES:
        return CRASHES[verdict.rule]
    if verdict.rule == "exception":
        said = next((way for pattern, way in SAID if pattern.search(verdict.evidence)), None)
        return said or (_IN_LOAD if verdict.stage is Stage.LOAD else _ELSEWHERE)
    return _AFTER if OPENING.search(verdict.evidence) else _BEFORE
