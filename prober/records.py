"""The nouns: what is measured, on what, what one launch showed, and what came out of it.

Plain frozen values, no behaviour beyond looking at themselves. Every other module imports from here and this one
imports nothing of ours. Unknown is ``None``, never 0; units stand in names (``_gib``: 2**30 bytes, ``_mib``: 2**20).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

AUTO = -1  # in place of a length: vLLM chooses it (--max-model-len auto)


class ProberError(Exception):
    """We could not measure or answer. The message is one sentence for the person at the terminal: what, what next."""

    exit_code = 1


class UsageError(ProberError):
    """The command asks for something that makes no sense; nothing was started."""

    exit_code = 2


class NotReady(ProberError):
    """The machine cannot measure now: a GPU is busy, the engine does not import, the disk is full."""

    exit_code = 3


class Outcome(StrEnum):
    """What one launch (or one log) showed. Only ``fits`` and the too-long ones may move the bracket."""

    FITS = "fits"  # ready, and the request that was asked for was answered
    KV_TOO_SMALL = "kv_too_small"
    NO_KV_MEMORY = "no_kv_memory"
    DEVICE_OOM = "device_oom"
    HOST_OOM = "host_oom"
    UNSERVABLE = "unservable"
    SEQUENCE_SLOTS = "sequence_slots"
    OVER_MODEL_LIMIT = "over_model_limit"
    TOO_SHORT = "too_short"
    DEVICE_BUSY = "device_busy"
    BAD_CONFIG = "bad_config"
    TIMEOUT = "timeout"
    CRASH = "crash"
    # Of a log alone, where nobody asked the server anything:
    READY = "ready"  # the log claims readiness and holds no failure after it
    UNFINISHED = "unfinished"  # neither a failure nor readiness


class Stage(StrEnum):
    """How far a start-up had come, in order."""

    CONFIG = "config"  # arguments, the model's and the engine's configuration
    DOWNLOAD = "download"
    LOAD = "load"  # weights onto the device
    COMPILE = "compile"
    PROFILE = "profile"  # the dummy run that measures memory
    KV_CACHE = "kv_cache"  # the check and the allocation of KV blocks
    CAPTURE = "capture"  # CUDA graphs, sampler warm-up
    READY = "ready"
    SERVE = "serve"  # a request is being answered


class Status(StrEnum):
    """How the search for one combination ended."""

    EXACT = "exact"  # serves at C, refused at C + 1
    MODEL_LIMIT = "model_limit"  # serves at the longest length the model allows
    AT_LEAST = "at_least"  # serves at the upper end the user asked for; longer was not tried
    DOES_NOT_FIT = "does_not_fit"
    UNSTABLE = "unstable"  # trials contradict each other: an interval, never one number
    INCONCLUSIVE = "inconclusive"
    BAD_CONFIG = "bad_config"


class Verify(StrEnum):
    """How a start is proven: not at all, by a short request, or by one of full length."""

    NONE = "none"
    SHORT = "short"
    FULL = "full"


class Entrypoint(StrEnum):
    """How vLLM is started: its OpenAI-compatible server, or ``vllm.LLM`` in a child."""

    SERVE = "serve"
    LLM = "llm"


class CompileState(StrEnum):
    """What torch.compile and CUDA graphs find: an empty private cache, a filled one, or ``--enforce-eager``."""

    COLD = "cold"
    WARM = "warm"
    EAGER = "eager"


class Source(StrEnum):
    """Where a row comes from, best first."""

    MEASURED = "measured"
    IMPORTED = "imported"
    REPORTED = "reported"


Report = Callable[[Stage, float], None]  # whom to tell the running trial's stage and its age in seconds


@dataclass(frozen=True, slots=True)
class Figures:
    """What vLLM logged. With several ranks the smallest binds. Token counts are tokens, memory is GiB."""

    requested_max_model_len: int | None = None
    needed_gib: float | None = None  # KV memory one request of the requested length needs
    available_gib: float | None = None  # KV memory the rank has
    estimated_max_len: int | None = None  # vLLM's own estimate in the refusal, or what auto-fit chose
    max_tokens_in_cache: int | None = None  # V0's refusal
    model_limit: int | None = None  # the length derived from the model's config
    gpu_blocks: int | None = None
    cpu_blocks: int | None = None
    block_size: int | None = None
    kv_cache_tokens: int | None = None
    concurrency: float | None = None
    sequence_slots: int | None = None  # the max_num_seqs that the Mamba cache allows
    weights_gib: float | None = None
    activation_gib: float | None = None
    non_torch_gib: float | None = None
    cuda_graph_gib: float | None = None
    total_gib: float | None = None  # of one device
    free_gib: float | None = None  # of one device, at start-up or at the failure
    gpu_memory_utilization: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    vllm_version: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one log, or one launch, showed: the outcome, where, and the line that says so."""

    outcome: Outcome
    stage: Stage
    evidence: str = ""  # the line, cleaned of prefixes and colours
    line: int | None = None  # its number in the log, from 1
    process: str | None = None  # "EngineCore", "Worker_TP1", … as the log names it; None: the main process
    rank: int | None = None
    rule: str | None = None  # the name of the rule that matched
    figures: Figures = field(default_factory=Figures)


@dataclass(frozen=True, slots=True)
class Combination:
    """What a ceiling belongs to, as the user asked for it. ``None`` means vLLM's own default."""

    model: str  # a Hub name or a directory, as given
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    model_revision: str | None = None
    entrypoint: Entrypoint = Entrypoint.SERVE
    compile_state: CompileState = CompileState.COLD
    other_flags: tuple[str, ...] = ()  # every further vLLM flag, untouched and in the user's order

    @property
    def world_size(self) -> int:
        """Number of devices vLLM uses: tensor times pipeline parallel size (ParallelConfig.world_size)."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, slots=True)
class Machine:
    """What a combination was measured on. No user, host name or path."""

    gpu: str  # the device's name; on the CPU backend the CPU's
    device: str  # "cuda" or "cpu"
    machine: str  # a salted hash, stable for one machine
    gpu_memory_mib: int | None = None  # of one device
    driver: str | None = None
    cuda: str | None = None
    vllm_version: str | None = None
    torch_version: str | None = None
    host_memory_mib: int | None = None
    ecc: bool | None = None
    mig: bool | None = None  # the device is a MIG slice
    power_limit_watts: float | None = None
    gpu_hash: str | None = None  # salted, of the devices' UUIDs: the same cards again, without naming them


@dataclass(frozen=True, slots=True)
class Trial:
    """One length, launched once.

    ``length`` is None only when the model's own limit was asked for and never became known.
    ``combination_key`` and ``state_key`` say what it may be reused for: same combination, and same machine,
    versions and driver.
    """

    id: str
    combination_key: str
    state_key: str
    length: int | None
    is_default_length: bool  # started without --max-model-len
    verify: Verify
    verdict: Verdict
    seconds: float
    started_at: str  # ISO 8601, UTC
    exit_status: int | None = None  # negative: the signal; None: ended by us
    leaked_mib: int | None = None  # device memory not back at its baseline
    least_free_mib: int | None = None  # of one device, the least seen while it ran; None: not told
    reserve_mib: int | None = None  # device memory that had to stay free
    at_rest_mib: int | None = None  # device memory in use before it, on all its devices; None: not told
    prober_version: str = ""
    model_revision: str | None = None  # Hub commit or config hash of the model's files; None: not known


@dataclass(frozen=True, slots=True)
class Bracket:
    """Largest length that serves, smallest length refused for capacity. None: not known."""

    serves: int | None = None
    refused: int | None = None


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The answer for one combination on one machine."""

    combination: Combination
    machine: Machine
    status: Status
    bracket: Bracket
    verify: Verify
    why: str  # one sentence
    trials: tuple[Trial, ...]
    seconds: float
    launches: int
    measured_at: str  # ISO 8601, UTC
    reserve_mib: int | None = None  # device memory that had to stay free for a length to count
    settings: tuple[str, ...] = ()  # NAME=value of the environment that vLLM read
    is_quick: bool = False  # ended at the first length that served: nobody knows yet what ends it
    lowered_sequences: int | None = None  # the --max-num-seqs that vLLM allowed, where it is fewer than was asked for

    @property
    def max_model_len(self) -> int | None:
        """The proven ceiling in tokens; None unless a full-length request was answered at it and the search is done."""
        if self.verify is not Verify.FULL or self.status not in (Status.EXACT, Status.MODEL_LIMIT, Status.AT_LEAST):
            return None
        return self.bracket.serves
