"""Documentation of the results folder, generated from the schema: datapackage.json (Frictionless), README, licence.

Pure: each function returns the whole text of a file. Tests compare the committed files with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from prober.results.schema import COLUMNS, SCHEMA_VERSION, Column
from prober.results.table import markdown_table

_LICENCE = {
    "name": "CC0-1.0",
    "path": "https://creativecommons.org/publicdomain/zero/1.0/",
    "title": "Creative Commons Zero v1.0 Universal",
}


def pages() -> Mapping[str, str]:
    """Return the name and text of every generated file."""
    return {"datapackage.json": datapackage(), "README.md": readme(), "LICENSE": licence()}


def datapackage() -> str:
    """Describe matrix.csv as a Frictionless data package (Table Schema)."""
    package = {
        "name": "vllm-max-model-len",
        "title": "Proven ceilings of vLLM's max_model_len",
        "version": f"{SCHEMA_VERSION}.0.0",
        "licenses": [_LICENCE],
        "resources": [
            {
                "name": "matrix",
                "path": "matrix.csv",
                "format": "csv",
                "mediatype": "text/csv",
                "encoding": "utf-8",
                "dialect": {"delimiter": ",", "quoteChar": '"', "doubleQuote": True, "lineTerminator": "\n"},
                "schema": {"fields": [_field(column) for column in COLUMNS], "missingValues": [""]},
            }
        ],
    }
    return json.dumps(package, indent=2, ensure_ascii=False) + "\n"


def _field(column: Column) -> dict[str, Any]:
    field: dict[str, Any] = {"name": column.name, "type": column.kind, "description": column.meaning}
    if column.unit:
        field["unit"] = column.unit
    constraints: dict[str, Any] = {}
    if column.is_required:
        constraints["required"] = True
    if column.allowed:
        constraints["enum"] = list(column.allowed)
    return field | ({"constraints": constraints} if constraints else {})


def readme() -> str:
    """Describe the files of the folder, how to read a row, and every column."""
    return _README.format(
        version=SCHEMA_VERSION, columns=markdown_table(("column", "type", "unit", "meaning"), map(_line, COLUMNS))
    )


def _line(column: Column) -> tuple[str, ...]:
    notes = [column.meaning]
    if column.allowed:
        notes.append("One of " + ", ".join(f"`{value}`" for value in column.allowed))
    name = f"**{column.name}**" if column.is_key else column.name
    return name, column.kind, column.unit or "", ". ".join(notes)


def licence() -> str:
    """Return the licence text: CC0-1.0."""
    return _LICENSE_TEXT


_README = """\
# Proven ceilings of vLLM's `max_model_len`

The data in this folder is in the public domain (CC0-1.0, see LICENSE). Schema version {version}.
This page, `datapackage.json` and LICENSE are generated from the prober's code: do not edit them by hand.

| file | content |
|---|---|
| `matrix.csv` | the answers: one row per combination and machine |
| `trials.jsonl` | the evidence: one line per launch, append-only |
| `datapackage.json` | machine-readable description of every column (Frictionless Table Schema) |
| `logs/` | the log of each trial; stays on the machine |

## Reading a row

- An empty cell means unknown. It never means 0 or none.
- `max_model_len` is filled only if a request of that full length was answered and one token more is refused (or the
  model allows no more, or no longer length was tried). `starts_max_model_len` is the longest length at which the server
  started, which does not prove that it serves. `estimated_max_model_len` is vLLM's own estimate.
- `source` is `measured` (by the prober), `imported` (from a log) or `reported` (in public, at `source_url`).
  Only `measured` rows carry proof.
- A row is about one machine. The same card in another machine can have another ceiling.
- A text cell that a spreadsheet would read as a formula is prefixed with an apostrophe (and so is one that starts with
  an apostrophe). `prober.read_matrix()` removes it.

```python
import pandas as pd

matrix = pd.read_csv("matrix.csv", dtype_backend="numpy_nullable", keep_default_na=False, na_values=[""])
```

## Columns

The columns in bold are the key: rows that agree in all of them describe the same combination on the same machine.

{columns}
"""

_LICENSE_TEXT = """\
CC0 1.0 Universal

To the extent possible under law, the people who contributed to the data in this folder have waived all copyright and
related or neighbouring rights to it. You can copy, modify, distribute and use the data, even for commercial purposes,
all without asking permission.

The full legal text: https://creativecommons.org/publicdomain/zero/1.0/legalcode
"""
