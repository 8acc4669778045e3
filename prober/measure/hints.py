"""Lengths to try first, from known rows of similar combinations. Pure; hints are always verified by a launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prober.records import Combination, Machine
from prober.results.from_ceiling import columns_of, public_model
from prober.results.schema import Row

AXES = ("tensor_parallel_size", "gpu_memory_utilization")  # along which a length can be worked out


def known_lengths(rows: Iterable[Row], combination: Combination, machine: Machine) -> tuple[int, ...]:
    """Return lengths in tokens to try first, best first.

    From the same combination; else interpolated from others on its axes; else from a similar one. Only rows of the
    same model on the same type of device count.
    """
    alike = [row for row in rows if _is_alike(row, combination, machine)]
    asked = {name: value for name, value in columns_of(combination).items() if name not in AXES}
    close = [row for row in alike if all(getattr(row, name) == value for name, value in asked.items())]
    same = [row for row in close if all(getattr(row, name) == getattr(combination, name) for name in AXES)]
    if same:
        best_first = sorted(same, key=lambda row: (_is_of(row, machine), row.measured_at or ""), reverse=True)
        return (_length(best_first[0]),)
    blocks = _from_neighbours([row for row in close if row.num_gpu_blocks and row.block_size], combination)
    if blocks:
        return blocks
    newest_first = sorted(_split(alike, combination), key=lambda row: row.measured_at or "", reverse=True)
    return tuple(_length(row) for row in newest_first[:1])


def _is_alike(row: Row, combination: Combination, machine: Machine) -> bool:
    is_same_device = (row.gpu, row.gpu_memory_mib) == (machine.gpu, machine.gpu_memory_mib)
    return is_same_device and row.model == public_model(combination.model) and _length(row) > 0


def _is_of(row: Row, machine: Machine) -> tuple[bool, bool]:
    return row.vllm_version == machine.vllm_version, row.machine == machine.machine


def _length(row: Row) -> int:
    return row.max_model_len or row.starts_max_model_len or 0


def _split(rows: Iterable[Row], combination: Combination) -> list[Row]:
    return [row for row in rows if row.tensor_parallel_size == combination.tensor_parallel_size]


def _from_neighbours(rows: Sequence[Row], combination: Combination) -> tuple[int, ...]:
    """KV blocks grow linearly with the utilization, and roughly with the number of ranks."""
    size, share = combination.tensor_parallel_size, combination.gpu_memory_utilization
    here = {row.gpu_memory_utilization: row for row in _split(rows, combination)}
    line = sorted((abs(at - share), at) for at in here if at is not None and share is not None)
    if len(line) > 1 and share is not None:
        (_, near), (_, far) = line[:2]
        near_blocks, far_blocks = here[near].num_gpu_blocks or 0, here[far].num_gpu_blocks or 0
        slope = (near_blocks - far_blocks) / (near - far)
        return _whole(round(near_blocks + slope * (share - near)), here[near])
    for other in rows:
        ranks = other.tensor_parallel_size
        if ranks is None or other.gpu_memory_utilization != share:
            continue
        pairs = [(here[row.gpu_memory_utilization], row) for row in rows
                 if row.tensor_parallel_size == ranks and row.gpu_memory_utilization in here]  # fmt: skip
        ratio = (pairs[0][0].num_gpu_blocks or 0) / (pairs[0][1].num_gpu_blocks or 1) if pairs else size / ranks
        return _whole(round((other.num_gpu_blocks or 0) * ratio), other)
    return ()


def _whole(blocks: int, row: Row) -> tuple[int, ...]:
    """Tokens of all blocks except those that the other row's ceiling left unused (the null block)."""
    spare = (row.num_gpu_blocks or 0) - _length(row) // (row.block_size or 1)
    length = (blocks - spare) * (row.block_size or 1) + _length(row) % (row.block_size or 1)
    return (length,) if length > 0 else ()
