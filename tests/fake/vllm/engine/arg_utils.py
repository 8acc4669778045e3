"""The flags of the fake engine: a generous part of vLLM's."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from fake_scenario import Asked

from vllm.launch_record import scenario

SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}

STRINGS = """
    tokenizer dtype quantization kv-cache-dtype load-format revision tokenizer-revision code-revision download-dir
    hf-overrides compilation-config distributed-executor-backend tokenizer-mode config-format runner task convert
    limit-mm-per-prompt speculative-config chat-template attention-backend rope-scaling guided-decoding-backend
    reasoning-parser tool-call-parser uvicorn-log-level api-key performance-mode mamba-cache-mode
"""
INTEGERS = """
    max-num-seqs max-num-batched-tokens block-size seed num-gpu-blocks-override max-logprobs max-num-partial-prefills
    long-prefill-token-threshold data-parallel-size decode-context-parallel-size max-seq-len-to-capture max-lora-rank
    max-loras
"""
FLOATS = "cpu-offload-gb swap-space"
SWITCHES = """
    enforce-eager trust-remote-code enable-prefix-caching enable-chunked-prefill disable-log-stats
    disable-log-requests enable-expert-parallel disable-hybrid-kv-cache-manager skip-mm-profiling async-scheduling
    enable-lora disable-custom-all-reduce enable-auto-tool-choice language-model-only
"""


def length(text: str) -> int:
    """``--max-model-len``: an integer, ``32k`` and the like from 0.8.4, ``auto`` (-1) from 0.14.0."""
    release = scenario().release
    if text == "auto" and release >= (0, 14, 0):
        return -1
    if text and text[-1] in SUFFIXES and release >= (0, 8, 4):
        number = float(text[:-1]) * SUFFIXES[text[-1]]
        if number != int(number) or (text[-1].isupper() and "." in text):
            raise argparse.ArgumentTypeError(f"Decimals are not allowed with binary suffixes like {text[-1]}.")
        return int(number)
    return int(text)


@dataclass
class EngineArgs:
    """The engine's arguments: only what the fake looks at has a name."""

    args: argparse.Namespace

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add the flags to a parser and return it."""
        parser.add_argument("--model", default="facebook/opt-125m")
        parser.add_argument("--max-model-len", type=length, default=None)
        parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
        parser.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1)
        parser.add_argument("--served-model-name", nargs="+", default=None)
        parser.add_argument("--gpu-memory-utilization", type=float, default=None)
        parser.add_argument("--kv-cache-memory-bytes", type=length, default=None)
        for name in STRINGS.split():
            parser.add_argument(f"--{name}", default=None)
        for name in INTEGERS.split():
            parser.add_argument(f"--{name}", type=int, default=None)
        for name in FLOATS.split():
            parser.add_argument(f"--{name}", type=float, default=None)
        for name in SWITCHES.split():
            parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None)
        parser.add_argument("--skip-tokenizer-init", action="store_true")
        return parser

    @classmethod
    def from_keywords(cls, keywords: dict[str, Any]) -> EngineArgs:
        """The arguments of ``LLM(...)``; an unknown name is a TypeError, as vLLM's dataclass makes it."""
        args = cls.add_cli_args(argparse.ArgumentParser()).parse_args([])
        for name, value in keywords.items():
            if not hasattr(args, name):
                raise TypeError(f"EngineArgs.__init__() got an unexpected keyword argument '{name}'")
            setattr(args, name, value)
        return cls(args)

    def asked(self) -> Asked:
        """The settings that change the capacity."""
        args = self.args
        return Asked(
            tensor_parallel_size=args.tensor_parallel_size,
            pipeline_parallel_size=args.pipeline_parallel_size,
            kv_cache_dtype=args.kv_cache_dtype or "auto",
            gpu_memory_utilization=args.gpu_memory_utilization,
            kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            block_size=args.block_size,
            num_gpu_blocks_override=args.num_gpu_blocks_override,
            max_num_seqs=args.max_num_seqs,
        )
