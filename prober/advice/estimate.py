"""Arithmetic on a log's figures: what fits, what a wanted length needs. All of it is an estimate that a trial proves.

Facts about versions: vLLM's sources 0.4 to 0.33 (``kv_cache_utils.py``, ``block_manager.py``, ``CacheConfig``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prober.engine.versions import default_gpu_memory_utilization, ungranted_blocks
from prober.records import Figures

HIGHEST_UTILIZATION = 0.95  # above it the driver's own memory, graphs and any neighbour end the start in an OOM
_DEFAULT_BLOCK = 16
_WATERMARK = 0.01  # V0 keeps this share of its blocks free and never admits a prompt that would touch it


def utilization(figures: Figures) -> float:
    """The fraction in force: as logged, else the version's default."""
    if figures.gpu_memory_utilization is not None:
        return figures.gpu_memory_utilization
    return default_gpu_memory_utilization(figures.vllm_version)


@dataclass(frozen=True, slots=True)
class Room:
    """KV memory per token and what there is of it, on the rank that binds."""

    gib_per_token: float
    available_gib: float
    block: int
    is_v0: bool
    spare_blocks: int  # blocks that the version keeps for itself, or never grants

    def length(self, extra_gib: float = 0.0, gib_per_token: float | None = None) -> int:
        """The length that this much more memory would serve, whole blocks."""
        tokens = max(0.0, self.available_gib + extra_gib) / (gib_per_token or self.gib_per_token)
        blocks = math.floor(tokens / self.block + 1e-6)
        return max(0, self.servable(blocks)) * self.block

    def servable(self, blocks: int) -> int:
        """Blocks that one request can really have."""
        return blocks - int(blocks * _WATERMARK) if self.is_v0 else blocks - self.spare_blocks


def room(figures: Figures) -> Room | None:
    """From GiB needed and available (V1), or from tokens and the cache's GiB (V0). None: the log does not say."""
    length, block = figures.requested_max_model_len, figures.block_size or _DEFAULT_BLOCK
    if figures.available_gib is not None and figures.needed_gib and length:
        return Room(
            figures.needed_gib / length, figures.available_gib, block, False, ungranted_blocks(figures.vllm_version)
        )
    tokens = figures.max_tokens_in_cache
    if tokens and figures.available_gib is not None and figures.available_gib > 0:
        return Room(figures.available_gib / tokens, figures.available_gib, block, True, 0)
    return None


def length_that_fits(figures: Figures) -> int | None:
    """The longest length that this run's memory serves: vLLM's estimate or its cache, less what is never granted."""
    block = figures.block_size or _DEFAULT_BLOCK
    if figures.estimated_max_len is not None:
        return max(0, figures.estimated_max_len - ungranted_blocks(figures.vllm_version) * block) or None
    if figures.max_tokens_in_cache is not None:
        blocks = figures.max_tokens_in_cache // block
        return (blocks - int(blocks * _WATERMARK)) * block or None
    known = room(figures)
    return known.length() or None if known is not None else None


def utilization_for(figures: Figures, missing_gib: float) -> float | None:
    """The fraction that gives this much more KV memory, rounded up to 0.01. None: the device's size is not known."""
    if figures.total_gib is None or figures.total_gib <= 0:
        return None
    return math.ceil((utilization(figures) + missing_gib / figures.total_gib) * 100 - 1e-9) / 100


def missing_gib(figures: Figures) -> float | None:
    """KV memory that the requested length lacks."""
    if figures.needed_gib is not None and figures.available_gib is not None:
        return figures.needed_gib - figures.available_gib
    known = room(figures)
    if known is not None and figures.requested_max_model_len:
        return known.gib_per_token * figures.requested_max_model_len - known.available_gib
    return None


def divisors(heads: int, highest: int = 64) -> tuple[int, ...]:
    """Tensor-parallel sizes that a number of attention heads allows."""
    return tuple(size for size in range(1, min(heads, highest) + 1) if heads % size == 0)
