"""What the page and the Markdown say, before any browser: which number stands where, and that nothing gets out."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_makers import hostile, matrix, proven
from row_makers import HOSTILE, a_row, rows

from prober.records import Source, Status, Verify
from prober.report.charts import LEFT, MOST_SERIES, RIGHT, TOP, Chart, Series, charts_of
from prober.report.heatmap import colour_step, heatmap_of
from prober.report.markdown import markdown_of
from prober.report.page import page_of
from prober.report.rows import HEADINGS, RowKind, answer_of, lines_of, serve_command
from prober.results.schema import Row
from prober.results.store import Store

NOW = datetime(2026, 6, 1, tzinfo=UTC)
TAGS = {
    "html", "head", "meta", "title", "link", "style", "body", "a", "header", "div", "h1", "h2", "code", "p", "dl", "dt",
    "dd", "main", "form", "label", "input", "datalist", "option", "select", "button", "output", "section", "ul", "li",
    "span", "table", "thead", "tbody", "tr", "th", "td", "bdi", "details", "summary", "small", "figure", "figcaption",
    "svg", "g", "line", "polyline", "circle", "text", "pre", "footer", "time", "script",
}  # fmt: skip


class Elements(HTMLParser):
    """Every element and attribute of a page, as a browser would see them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def cell(*given: Row) -> tuple[str, str]:
    heat = heatmap_of(lines_of(given))
    assert (len(heat.models), len(heat.columns)) == (1, 1)
    found = heat.cells[0][0]
    assert found is not None
    return found.style, found.text


def test_only_a_measured_full_length_answer_is_proven() -> None:
    assert answer_of(proven(4000)) == (RowKind.PROVEN, 4000)
    assert answer_of(a_row(status=Status.AT_LEAST, max_model_len=5000)) == (RowKind.BOUND, 5000)
    assert answer_of(proven(4000, max_model_len=None, status=Status.INCONCLUSIVE)) == (RowKind.BOUND, 4000)
    start = a_row(max_model_len=None, verified=Verify.NONE, status=Status.INCONCLUSIVE)
    assert answer_of(start) == (RowKind.STARTS, 4096)
    for source in (Source.REPORTED, Source.IMPORTED):
        assert answer_of(a_row(source=source, max_model_len=9000)) == (RowKind.STARTS, 9000)
    assert answer_of(proven(4000, status=Status.UNSTABLE, max_model_len=None)) == (RowKind.UNKNOWN, None)
    assert answer_of(a_row(status=Status.DOES_NOT_FIT, max_model_len=None)) == (RowKind.NO_FIT, None)


def test_cell_is_the_lowest_of_machines_and_the_longest_of_settings() -> None:
    assert cell(proven(4000), proven(3000, machine="m2")) == ("h0", "3,000")
    assert cell(proven(4000), proven(3000, gpu_memory_utilization=0.5)) == ("h0", "4,000")
    does_not_fit = a_row(status=Status.DOES_NOT_FIT, max_model_len=None, starts_max_model_len=None, machine="m2")
    assert cell(proven(4000), does_not_fit) == ("no-fit", "no fit")
    could_not_tell = a_row(status=Status.INCONCLUSIVE, max_model_len=None, starts_max_model_len=None, machine="m2")
    assert cell(proven(4000), could_not_tell) == ("h0", "4,000")


def test_report_never_outweighs_a_proof() -> None:
    reported = a_row(source=Source.REPORTED, source_url="https://example.org", max_model_len=900_000, machine=None)
    assert cell(reported, proven(4000)) == ("h0", "4,000")
    assert cell(reported) == ("starts", "starts 900,000")


def test_colours_follow_doublings() -> None:
    assert [colour_step(n) for n in (1, 4095, 4096, 8191, 8192, 131_072, 524_287, 524_288, 10**8)] == [
        0, 0, 1, 1, 2, 6, 7, 8, 8,
    ]  # fmt: skip


def test_serve_command_only_for_what_is_proven() -> None:
    assert serve_command(proven(4000)) == "vllm serve Qwen/Qwen3-8B --max-model-len 4000 --tensor-parallel-size 1"
    assert serve_command(a_row(source=Source.REPORTED)) is None
    assert serve_command(a_row(max_model_len=None)) is None
    (line,) = lines_of([a_row(max_model_len=None, tensor_parallel_size=2, kv_cache_dtype="fp8")])
    assert line.measure == "prober probe Qwen/Qwen3-8B --tp 2 -- --kv-cache-dtype fp8"


def test_curve_changes_one_setting_only() -> None:
    found = charts_of(
        lines_of(
            [
                proven(1000, gpu_memory_utilization=0.8),
                proven(2000, gpu_memory_utilization=0.9),
                proven(1900, gpu_memory_utilization=0.9, machine="m2"),
                proven(9000, gpu_memory_utilization=0.9, kv_cache_dtype="fp8"),
                a_row(max_model_len=None, gpu_memory_utilization=0.95),
            ]
        )
    )
    (chart,) = found[0].charts
    assert chart.title == "gpu_memory_utilization"
    assert [one.points for one in chart.series] == [((0.8, 1000), (0.9, 1900))]


def test_points_are_drawn_to_scale_from_zero() -> None:
    lengths = {0.8: 1000, 0.85: 1500, 0.9: 2000}
    rows = [proven(tokens, gpu_memory_utilization=share) for share, tokens in lengths.items()]
    (chart,) = charts_of(lines_of(rows))[0].charts
    assert list(chart.y_ticks) == [0, 500, 1000, 1500, 2000]
    assert [chart.x(share) for share in lengths] == [LEFT, (LEFT + RIGHT) / 2, RIGHT]
    assert (chart.y(0), chart.y(1000), chart.y(2000)) == (chart.bottom, (chart.bottom + TOP) / 2, TOP)
    page = page_of(rows, NOW)
    assert f'<polyline points="{chart.x(0.8)},{chart.y(1000)} {chart.x(0.85)},{chart.y(1500)} ' in page
    assert "<title>1,500 at 0.85</title>" in page


@given(st.integers(1, 10**400))
def test_round_numbers_on_the_axis_reach_the_longest(length: int) -> None:
    chart = Chart("", (Series("", (("a", 1), ("b", length))),), 0, ("a", "b"))
    assert 2 <= len(chart.y_ticks) <= 6
    assert chart.y_ticks[-2] < length <= chart.y_ticks[-1]


def test_many_values_share_twelve_labels() -> None:
    versions = [f"0.{minor}.0" for minor in range(30)]
    (chart,) = charts_of(lines_of(proven(1000, vllm_version=version) for version in versions))[0].charts
    assert [label for _, label in chart.x_labels] == versions[::3]
    assert chart.is_tilted


def test_nonsense_on_an_axis_is_not_drawn() -> None:
    shares = (0.8, float("inf"), 0.9)
    found = charts_of(lines_of(proven(1000, gpu_memory_utilization=share) for share in shares))
    assert found[0].charts[0].series[0].points == ((0.8, 1000), (0.9, 1000))


def test_versions_are_ordered_as_versions() -> None:
    found = charts_of(lines_of([proven(1000, vllm_version="0.10.0"), proven(2000, vllm_version="0.9.2")]))
    assert found[0].charts[0].series[0].points == (("0.9.2", 2000), ("0.10.0", 1000))


def test_curves_that_are_not_drawn_are_counted() -> None:
    many = [
        proven(1000 + index, gpu_memory_utilization=share, max_num_seqs=None, dtype=f"type-{index}")
        for index in range(MOST_SERIES + 3)
        for share in (0.8, 0.9)
    ]
    (chart,) = charts_of(lines_of(many))[0].charts
    assert (len(chart.series), chart.left_out) == (MOST_SERIES, 3)
    assert "and 3 more not drawn" in page_of(many, NOW)


def test_page_loads_nothing_and_runs_only_its_own_script() -> None:
    page = page_of(matrix(), NOW)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    for name in ("script", "style"):
        [text] = re.findall(rf"<{name}>(.*?)</{name}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy[1]
    loading = [(n, v) for n, v in Elements(page).attributes if n in ("src", "href", "xlink:href", "srcset", "action")]
    assert {value.partition(":")[0] if ":" in value else value[0] for _, value in loading} == {"data", "https", "#"}
    assert not [name for name, _ in Elements(page).attributes if name.startswith("on") or name == "style"]
    assert "javascript:alert" not in "".join(value for _, value in loading)


def test_hostile_text_adds_no_element() -> None:
    elements = Elements(page_of(hostile(), NOW))
    assert set(elements.tags) <= TAGS
    assert elements.tags.count("script") == 1
    assert elements.tags.count("style") == 1


@settings(max_examples=25, deadline=None)
@given(st.lists(rows, min_size=1, max_size=4))
def test_any_row_has_a_page_and_a_table(given_rows: list[Row]) -> None:
    page = page_of(given_rows, NOW)
    assert set(Elements(page).tags) <= TAGS
    assert page.count("<details><summary>") == len(given_rows)
    assert page.encode()
    table = markdown_of(given_rows).splitlines()
    assert len(table) == 2 + len(given_rows)


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_holds_any_text_in_its_cell(text: str) -> None:
    head, rule, line, *rest = markdown_of([proven(4000, model=text, gpu=text, vllm_version=text)]).split("\n")
    assert rest == [""]
    bars = len(re.findall(r"(?<!\\)\|", line))
    assert bars == len(re.findall(r"(?<!\\)\|", head)) == rule.count("|") == len(HEADINGS) + 1
    assert "<" not in re.sub(r"`[^`]*`", "", line)


def test_markdown_aligns_numbers_and_marks_what_is_not_proven() -> None:
    table = markdown_of([proven(131_072), a_row(source=Source.REPORTED, starts_max_model_len=20272)]).splitlines()
    assert table[1].split("|")[8] == "---:"
    assert "| 131,072 |" in table[2]
    assert "| – | 3,968 | exact | reported |" in table[3]


def run_report(folder: Path, *words: str, before: str = "") -> subprocess.CompletedProcess[str]:
    script = f"import sys; {before}\nfrom prober.cli.report import report\nreport.main(standalone_mode=False)"
    return subprocess.run(
        [sys.executable, "-c", script, *words], cwd=folder, capture_output=True, text=True, check=False
    )


def test_command_writes_the_page_and_says_where(tmp_path: Path) -> None:
    Store(tmp_path / "results").put(matrix())
    done = run_report(tmp_path)
    assert done.stdout == f"{Path('results') / 'report.html'}\n"
    assert (tmp_path / "results" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    elsewhere = run_report(tmp_path, "--output", "page.html")
    assert (elsewhere.stdout, (tmp_path / "page.html").exists()) == ("page.html\n", True)
    assert run_report(tmp_path, "--output", "-").stdout.startswith("<!doctype html>")


def test_command_prints_markdown_without_the_extra_packages(tmp_path: Path) -> None:
    Store(tmp_path / "results").put(matrix())
    missing = "sys.modules['jinja2'] = sys.modules['markupsafe'] = None"
    done = run_report(tmp_path, "--markdown", before=missing)
    assert len(done.stdout.splitlines()) == 2 + len(matrix()), done.stderr


def test_missing_package_is_named_with_how_to_get_it(tmp_path: Path) -> None:
    Store(tmp_path / "results").put(matrix())
    done = run_report(tmp_path, before="sys.modules['jinja2'] = None")
    assert "pip install jinja2" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "results" / "report.html").exists()


def test_nothing_measured_yet_is_said(tmp_path: Path) -> None:
    assert (
        run_report(tmp_path)
        .stderr.splitlines()[-1]
        .endswith("results holds no rows yet: `prober probe MODEL` measures one.")
    )


def test_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    Store(tmp_path / "results").put(matrix())
    done = run_report(tmp_path, "--output", "no/such/folder/page.html")
    assert "no/such/folder/page.html cannot be written: No such file or directory." in done.stderr
