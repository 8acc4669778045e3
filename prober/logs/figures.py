"""The figures of a log: one value each, although ranks, versions and units print them differently."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

from prober.logs.lines import LogRecord, excerpt
from prober.logs.template import Template, numbers
from prober.records import Figures

_LARGEST_BINDS = ("weights_gib", "activation_gib", "peak_gib", "non_torch_gib", "cuda_graph_gib", "needed_gib")
_FIRST_COUNTS = (
    *("vllm_version", "model", "gpu_memory_utilization", "total_gib", "free_gib", "requested_max_model_len"),
    *("argument_length", "using_length", "config_length"),  # of the model; a draft model prints its own after it
)
_WHOLE = frozenset(field.name for field in fields(Figures) if str(field.type).startswith("int"))
# Where a figure is printed in several ways, the first of these that is known is the one.
_LENGTHS = ("requested_max_model_len", "argument_length", "using_length", "config_length", "concurrency_length")
_BETTER = {
    "requested_max_model_len": _LENGTHS,
    "estimated_max_len": ("estimated_max_len", "auto_length"),
    "available_gib": ("refused_gib", "auto_available_gib", "available_gib", "used_gib"),
    "gpu_blocks": ("override_blocks", "gpu_blocks", "lone_cpu_blocks"),
}


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A line that leaves the KV cache nothing, so that vLLM must refuse."""

    evidence: str
    line: int
    process: str | None
    rank: int | None


class FigureCollector:
    """Collects figures line by line; of several ranks the one that binds."""

    def __init__(self) -> None:
        self._found: dict[str, float | str] = {}
        self.no_room: NoRoom | None = None

    def read(
        self, text: str, templates: Sequence[Template], line: int, record: LogRecord | None = None
    ) -> set[Template]:
        """Take every figure in a line; return the templates that matched."""
        known: set[Template] = set()
        for template in templates:
            for match in template.regex.finditer(text):
                known.add(template)
                self.take(match, line, record)
        return known

    def take(self, match: re.Match[str], line: int = 0, record: LogRecord | None = None) -> None:
        """Take the figures of one match."""
        found = numbers(match)
        if "needed_gib" in found and "available_gib" in found:
            found["refused_gib"] = found.pop("available_gib")
        for name, value in found.items():
            self._keep(name, value)
        room = found.get("available_gib", found.get("gpu_blocks"))
        if self.no_room is None and record is not None and isinstance(room, float) and room <= 0:
            evidence = excerpt(record.text, match.start(), match.end())
            self.no_room = NoRoom(evidence, line, record.process, record.rank)

    def _keep(self, name: str, value: float | str) -> None:
        known = self._found.get(name)
        if known is None:
            self._found[name] = value
        elif isinstance(known, float) and isinstance(value, float) and name not in _FIRST_COUNTS:
            self._found[name] = max(known, value) if name in _LARGEST_BINDS else min(known, value)

    def figures(self) -> Figures:
        """Everything known so far, under the names of the record."""
        values: dict[str, object] = {}
        for field in fields(Figures):
            names = _BETTER.get(field.name, (field.name,))
            if names is _LENGTHS and "auto_length" in self._found:
                names = _LENGTHS[:1]  # nobody asked for a length; what is printed further is what vLLM chose
            value = next((self._found[name] for name in names if name in self._found), None)
            if value is not None:
                values[field.name] = round(value) if field.name in _WHOLE and isinstance(value, float) else value
        peak, weights = self._found.get("peak_gib"), values.get("weights_gib")
        if "activation_gib" not in values and isinstance(peak, float) and isinstance(weights, float):
            values["activation_gib"] = round(peak - weights, 4)  # 0.6.4 prints the peak with the weights in it
        return Figures(**values)  # type: ignore[arg-type]
