"""The matrix as one self-contained HTML page, readable without network, server or scripts.

Pure: rows in, text out. All values from rows are escaped, and the page's Content-Security-Policy allows its own script
and style only. Needs Jinja2 (the extra ``report``).
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from prober.records import NotReady
from prober.report import charts
from prober.report.heatmap import STEPS, heatmap_of
from prober.report.rows import HEADINGS, Line, choices, lines_of
from prober.results.schema import Row

if TYPE_CHECKING:
    from jinja2 import Environment

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_AGES = (("30", "the last 30 days"), ("90", "the last 90 days"), ("365", "the last year"))
_FILTERS = (("gpu", "GPU"), ("tp", "TP"), ("kv", "KV dtype"), ("vllm", "vLLM"), ("source", "Source"))


def page_of(rows: Sequence[Row], made_at: datetime) -> str:
    """Render the page. ``made_at`` is the time in the footer. Raises NotReady when Jinja2 is missing."""
    environment = _environment()
    style, script = _package_text("report.css"), _package_text("report.js")
    lines = lines_of(rows)
    curves = charts.charts_of(lines)
    return environment.get_template("report.html.j2").render(
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        made_at=made_at,
        counts=_counts(lines),
        headings=HEADINGS,
        filters=[(key, label, choices(lines, key)) for key, label in _FILTERS],
        ages=_AGES,
        plot=charts,
        heat=heatmap_of(lines),
        steps=[(step, _step_label(step)) for step in range(STEPS)],
        lines=lines,
        curves=curves,
        curve_places={(one.model, one.gpu): index for index, one in enumerate(curves)},
    )


def _environment() -> Environment:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise NotReady("The page needs Jinja2: pip install jinja2.") from error
    return Environment(
        loader=PackageLoader("prober.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )


def _visible(value: Any) -> Any:
    """Escape a text so that a browser shows it unchanged, carriage returns included.

    Characters not allowed in HTML (control characters, lone surrogates) become the replacement character.
    """
    from markupsafe import Markup, escape

    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return Markup(str(escape(_CONTROL.sub("\ufffd", value))).replace("\r", "&#13;"))  # noqa: S704 - escaped above


def _package_text(name: str) -> str:
    return files("prober.report").joinpath("templates", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _counts(lines: Sequence[Line]) -> dict[str, int]:
    return {
        "rows": len(lines),
        "models": len({line.row.model for line in lines}),
        "gpus": len({line.row.gpu for line in lines}),
        "proven": sum(line.kind.is_proven for line in lines),
    }


def _step_label(step: int) -> str:
    if step == 0:
        return "< 4k"
    return f"{2 ** (step + 1)}k" + ("+" if step == STEPS - 1 else "")
