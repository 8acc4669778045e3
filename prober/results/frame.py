"""The matrix as a pandas DataFrame. A module of its own, so that nothing else imports pandas."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from prober.results.schema import COLUMNS
from prober.results.store import Store

if TYPE_CHECKING:
    import pandas

_DTYPES: dict[str, Any] = {"integer": "Int64", "number": "Float64", "string": "string"}


def read_matrix(results: Path | str = "results") -> pandas.DataFrame:
    """Read ``matrix.csv`` of a results folder with nullable types: unknown is ``pandas.NA``.

    Token counts, blocks and MiB are Int64, GiB and fractions Float64, everything else strings (without the apostrophes
    that guard against spreadsheet formulas). Raises ``NotReady`` for a file that is not a matrix.
    """
    import pandas

    rows = Store(Path(results)).rows()
    columns = {}
    for column in COLUMNS:
        values = [getattr(row, column.name) for row in rows]
        plain = [str(v) if v is not None and column.kind == "string" else v for v in values]
        columns[column.name] = pandas.Series(plain, dtype=_DTYPES[column.kind])
    return pandas.DataFrame(columns)
