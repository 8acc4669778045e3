"""The description of the results folder, written from the schema: datapackage.json (Frictionless), README, licence.

Pure: each function returns the whole text of a file. What is committed is checked against it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from prober.results.schema import COLUMNS, SCHEMA_VERSION, Column

_LICENCE = {
    "name": "CC0-1.0",
    "path": "https://creativecommons.org/publicdomain/zero/1.0/",
    "title": "Creative Commons Zero v1.0 Universal",
}


def pages() -> Mapping[str, str]:
    """Name -> text of every file that describes the folder."""
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
    """Explain the folder to somebody who found it: the files, how to read a row, every column."""
    return _README.format(version=SCHEMA_VERSION, columns="\n".join(map(_line, COLUMNS)))


def _line(column: Column) -> str:
    notes = [column.meaning]
    if column.allowed:
        notes.append("One of " + ", ".join(f"`{value}`" for value in column.allowed))
    name = f"**{column.name}**" if column.is_key else column.name
    return f"| {name} | {column.kind} | {column.unit or ''} | {'. '.join(notes)} |"


def licence() -> str:
    """Give the data away: CC0-1.0."""
    return _LICENSE_TEXT


_README = """\
# Proven ceilings of vLLM's `max_model_len`

The data in this folder is in the public domain (CC0-1.0, see LICENSE). Schema version {version}.
This page, `datapackage.json` and LICENSE are generated from the prober's code: do not edit them by hand.

| file | content |
|---|---|
| `matrix.csv` | the answers: one row per combination and machine |
| `trials.jsonl` | the evidence: one line per launch, append-only |
| `datapackage.json` | a machine-readable description of every column (Frictionless Table Schema) |
| `logs/` | the log of each trial; stays on the machine |

## Reading a row

- An empty cell means unknown, never 0 or none.
- `max_model_len` is set only if a request of that full length was answered and one more token is refused, not allowed
  by the model, or was not tried. `starts_max_model_len` is the longest length at which the server started, which proves
  no service. `estimated_max_model_len` is vLLM's own estimate.
- `source` is `measured` (by the prober), `imported` (from a log) or `reported` (in public, at `source_url`). Only
  `measured` rows carry proof.
- A row describes one machine. The same card in another machine can have another ceiling.
- A text cell that a spreadsheet would run as a formula is prefixed with an apostrophe, and so is one that already
  starts with an apostrophe. `prober.read_matrix()` removes the prefix.

```python
import pandas as pd

matrix = pd.read_csv("matrix.csv", dtype_backend="numpy_nullable", keep_default_na=False, na_values=[""])
```

## Columns

The columns in bold form the key: two rows with the same key describe the same combination and machine.

| column | type | unit | meaning |
|---|---|---|---|
{columns}
"""

_LICENSE_TEXT = """\
CC0 1.0 Universal

To the extent possible under law, the people who contributed to the data in this folder have waived all copyright and
related or neighbouring rights to it. You can copy, modify, distribute and use the data, even for commercial purposes,
all without asking permission.

The full legal text: https://creativecommons.org/publicdomain/zero/1.0/legalcode
"""
