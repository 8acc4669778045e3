"""The matrix's columns, defined once by `Row`, and conversion of rows to CSV cells and back.

The CSV header, datapackage.json and the README of the results folder are derived from ``Row``. An empty cell means
unknown, never 0; there is no other spelling of unknown.
"""
# ruff: noqa: RUF009 - column() is dataclasses.field() with the column's description, and as immutable

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, get_args, get_type_hints

from prober.records import Combination, CompileState, Entrypoint, Outcome, ProberError, Source, Status, Verify

# What each version renamed in the columns of the one before: old name -> new name. To add a column, add a field to
# `Row` and an empty entry here: rows of older files leave it empty. Then run scripts/describe_results.py.
MIGRATIONS: Mapping[int, Mapping[str, str]] = {
    2: {},  # added environment, reserve_mib, least_free_mib, launch_command
}
SCHEMA_VERSION = max(MIGRATIONS)

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
_GUARD = "'"


class CeilingKind(StrEnum):
    """What limits the length."""

    MEMORY = "memory"  # one token more is refused for capacity
    MODEL = "model"  # the longest length the model allows
    CONFIG = "config"  # another setting, or the requested upper end


class UnreadableRow(ProberError):
    """A row has a value that its column does not allow."""


MOST = 2**63  # upper bound of any number in a cell


def column(meaning: str, unit: str | None = None, *, key: bool = False, default: Any = dataclasses.MISSING) -> Any:
    """Describe one field of ``Row``; the ``key`` columns together identify a combination and machine."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, "unit": unit, "key": key})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One combination on one machine. ``None`` is unknown; no column allows an empty string."""

    model: str = column("Hub name of the model; for a local directory its last name only", key=True)
    model_revision: str | None = column(
        "Commit of the model on the Hub; of a local directory config- and a hash of its config.json",
        key=True,
        default=None,
    )
    gpu: str = column("Name of one device as the driver says it; with the CPU engine the CPU's name", key=True)
    gpu_memory_mib: int | None = column("Memory of one device", "MiB", key=True, default=None)
    gpu_count: int | None = column("Devices used: tensor times pipeline parallel size", key=True, default=None)
    tensor_parallel_size: int | None = column("--tensor-parallel-size", key=True, default=None)
    pipeline_parallel_size: int | None = column("--pipeline-parallel-size", key=True, default=None)
    gpu_memory_utilization: float | None = column(
        "--gpu-memory-utilization as asked for; empty: the default of that vLLM version", key=True, default=None
    )
    dtype: str | None = column("--dtype as asked for; empty: vLLM's default", key=True, default=None)
    quantization: str | None = column("--quantization as asked for; empty: vLLM's default", key=True, default=None)
    kv_cache_dtype: str | None = column("--kv-cache-dtype as asked for; empty: vLLM's default", key=True, default=None)
    entrypoint: Entrypoint | None = column(
        "How vLLM was started: its server, or vllm.LLM in a process", key=True, default=None
    )
    compile_state: CompileState | None = column(
        "What torch.compile found: an empty cache, a filled one, or --enforce-eager", key=True, default=None
    )
    vllm_version: str | None = column("vLLM's version", key=True, default=None)
    other_flags: str | None = column(
        "Every further vLLM flag, in order, quoted as for a POSIX shell; of paths only the last name",
        key=True,
        default=None,
    )
    environment: str | None = column(
        "Settings of the environment that vLLM read, NAME=value, quoted as for a POSIX shell; no paths, no addresses",
        key=True,
        default=None,
    )
    reserve_mib: int | None = column(
        "Device memory that had to stay free for a length to count", "MiB", key=True, default=None
    )
    status: Status | None = column("How the search ended", default=None)
    ceiling_kind: CeilingKind | None = column("What limits the length", default=None)
    max_model_len: int | None = column(
        "A request of this full length was answered, and nothing longer can be (status at_least: was not tried)",
        "tokens",
        default=None,
    )
    recommended_max_model_len: int | None = column(
        "A length with some headroom below the ceiling, where one was worked out", "tokens", default=None
    )
    served_max_model_len: int | None = column(
        "Longest length at which a full-length request was answered, also where the search did not end",
        "tokens",
        default=None,
    )
    starts_max_model_len: int | None = column(
        "Longest length at which the server was seen to start; alone it proves no service", "tokens", default=None
    )
    estimated_max_model_len: int | None = column("What vLLM itself estimated or chose", "tokens", default=None)
    refused_max_model_len: int | None = column("Smallest length refused for capacity", "tokens", default=None)
    num_gpu_blocks: int | None = column("KV cache blocks of the start at the ceiling", "blocks", default=None)
    block_size: int | None = column("Tokens in one KV cache block", "tokens", default=None)
    kv_cache_tokens: int | None = column("Size of the KV cache as vLLM logs it", "tokens", default=None)
    kv_cache_gib: float | None = column("Memory of one rank for the KV cache", "GiB", default=None)
    weights_gib: float | None = column("Memory of one rank for the weights", "GiB", default=None)
    max_num_seqs: int | None = column("Sequences that may run at once", "requests", default=None)
    max_num_batched_tokens: int | None = column("Tokens of one scheduler step", "tokens", default=None)
    least_free_mib: int | None = column(
        "Least memory free on any device while the start at the ceiling ran and answered", "MiB", default=None
    )
    verified: Verify | None = column(
        "How a start was proven: by no request, a short one, one of full length", default=None
    )
    trials: int | None = column("Launches that the answer took", "launches", default=None)
    seconds: float | None = column("Time that the answer took", "s", default=None)
    why: str | None = column("One sentence: why this is the answer", default=None)
    launch_command: str | None = column(
        "What starts vLLM at the ceiling, for a POSIX shell; of paths only the last name", default=None
    )
    served_trial: str | None = column("Trial that served at the ceiling (trials.jsonl, logs/)", default=None)
    served_evidence: str | None = column("What that trial's log or answer says", default=None)
    refused_trial: str | None = column("Trial that was refused, or that ended the search", default=None)
    refused_outcome: Outcome | None = column("How it ended", default=None)
    refused_evidence: str | None = column("The line of that trial's log that says so", default=None)
    source: Source = column(
        "measured by the prober, imported from a log, or reported in public", default=Source.MEASURED
    )
    source_url: str | None = column("Public address of a reported row", default=None)
    machine: str | None = column("Salted hash, stable for one machine", key=True, default=None)
    device: str | None = column("Kind of device: cuda or cpu", default=None)
    driver: str | None = column("Version of the device driver", default=None)
    cuda: str | None = column("Version of CUDA", default=None)
    torch_version: str | None = column("Version of PyTorch", default=None)
    host_memory_mib: int | None = column("Memory of the host", "MiB", default=None)
    ecc: str | None = column("Error correction of the device memory: on or off", default=None)
    mig: str | None = column("Whether the device is a MIG slice: on or off", default=None)
    power_limit_watts: float | None = column("Power limit of one device", "W", default=None)
    gpu_hash: str | None = column("Salted hash of the devices' UUIDs: the same cards again", default=None)
    notes: str | None = column("Warnings", default=None)
    measured_at: str | None = column("When, in UTC (ISO 8601); a reported row may know only the day", default=None)
    prober_version: str | None = column("Version of the prober", default=None)
    schema_version: int = column("Version of these columns", default=SCHEMA_VERSION)


@dataclass(frozen=True, slots=True)
class Column:
    """Description of one column. ``kind`` is a Frictionless type: string, integer or number."""

    name: str
    kind: str
    meaning: str
    unit: str | None
    is_key: bool
    is_required: bool
    allowed: tuple[str, ...]
    parse: Callable[[str], Any]


def _columns() -> tuple[Column, ...]:
    hints = get_type_hints(Row)
    return tuple(_column_of(spec, hints[spec.name]) for spec in dataclasses.fields(Row))


def _column_of(spec: dataclasses.Field[Any], hint: Any) -> Column:
    options = get_args(hint)
    value_type = next((option for option in options if option is not type(None)), hint)
    return Column(
        name=spec.name,
        kind={int: "integer", float: "number"}.get(value_type, "string"),
        meaning=spec.metadata["meaning"],
        unit=spec.metadata["unit"],
        is_key=spec.metadata["key"],
        is_required=not options,
        allowed=tuple(value_type) if issubclass(value_type, StrEnum) else (),
        parse=value_type,
    )


COLUMNS: tuple[Column, ...] = _columns()
HEADER: tuple[str, ...] = tuple(c.name for c in COLUMNS)
KEY: tuple[str, ...] = tuple(c.name for c in COLUMNS if c.is_key)
SHARED_KEY: tuple[str, ...] = tuple(name for name in KEY if name != "machine")  # what rows of several machines share
# What the user asked for: the columns that are fields of `Combination` too. The model's revision is found, not asked.
COMBINATION: tuple[str, ...] = tuple(
    name for name in KEY if name in Combination.__dataclass_fields__ and name != "model_revision"
)
POSITION: dict[str, int] = {name: index for index, name in enumerate(HEADER)}


def guard(text: str) -> str:
    """Prefix an apostrophe if a spreadsheet would read the cell as a formula. ``unguard`` removes it."""
    if text.startswith(_GUARD) or text.lstrip(" ").startswith(_FORMULA_STARTS):
        return _GUARD + text
    return text


def unguard(cell: str) -> str:
    """Undo ``guard``."""
    return cell[1:] if cell.startswith(_GUARD) else cell


def to_cells(row: Row) -> list[str]:
    """Write a row as the cells of one CSV record, in the order of ``HEADER``."""
    return [_to_cell(getattr(row, name)) for name in HEADER]


def _to_cell(value: object) -> str:
    if value is None:
        return ""
    return guard(str(value)) if isinstance(value, str) else repr(value)


def from_cells(cells: Sequence[str]) -> Row:
    """Read the cells of one record, in the order of ``HEADER``.

    Raises ``UnreadableRow``, naming the column, if a cell has a value that its column does not allow.
    """
    if len(cells) != len(COLUMNS):
        raise UnreadableRow(f"A row has {len(cells)} cells where {len(COLUMNS)} are expected.")
    return Row(**{c.name: _from_cell(c, cell) for c, cell in zip(COLUMNS, cells, strict=True)})


def _from_cell(spec: Column, cell: str) -> Any:
    if not cell:
        if spec.is_required:
            raise UnreadableRow(f"The column {spec.name} is empty in a row.")
        return None
    try:
        value = spec.parse(unguard(cell))
        if spec.kind != "string" and not 0 <= value < MOST:
            raise ValueError(cell)
        return value
    except ValueError as error:
        raise UnreadableRow(f"The column {spec.name} does not allow {cell!r}.") from error


def current_names(names: Iterable[str], migrations: Mapping[int, Mapping[str, str]] = MIGRATIONS) -> list[str]:
    """Translate column names of any earlier version to those of this version; unknown names stay as they are."""
    current = list(names)
    for version in sorted(migrations):
        current = [migrations[version].get(name, name) for name in current]
    return current


def to_strings(row: Row) -> dict[str, str]:
    """Write a row as column name -> cell."""
    return dict(zip(HEADER, to_cells(row), strict=True))


def from_strings(cells: Mapping[str, str]) -> Row:
    """Read column name -> cell; a missing column is unknown. Raises ``UnreadableRow`` as `from_cells` does."""
    return from_cells([cells.get(name, "") for name in HEADER])


def from_values(values: Mapping[str, object]) -> Row:
    """Build a row from plain values, such as JSON's. Raises ``UnreadableRow``, also for an unknown name."""
    values = dict(zip(current_names(values), values.values(), strict=True))
    foreign = sorted(set(values) - set(HEADER))
    if foreign:
        raise UnreadableRow(f"No column of the matrix is called {', '.join(foreign)}.")
    return from_strings({name: _to_cell(value) for name, value in values.items()})


def to_values(row: Row) -> dict[str, str | int | float | None]:
    """Write a row as plain values for JSON: enums become their text, unknown ``None``."""
    values = {name: getattr(row, name) for name in HEADER}
    return {name: str(value) if isinstance(value, StrEnum) else value for name, value in values.items()}
