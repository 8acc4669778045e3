"""Tables as text and as Markdown."""

from __future__ import annotations

from prober.results.table import markdown_table, markdown_text, text_table


def test_columns_align_by_terminal_width_and_numbers_right() -> None:
    lines = [("name", "tokens", ""), ("模型", "1,024", "e\u0301"), ("a\nb\x1b", "8", "")]
    assert text_table(lines, numbers={1}).splitlines() == [
        "name  tokens",
        "模型   1,024  e\u0301",
        "a b\ufffd       8",
    ]


def test_markdown_marks_number_columns() -> None:
    assert markdown_table(("a", "b"), [("x", "1")], numbers={1}) == "| a | b |\n|---|---:|\n| x | 1 |"


def test_text_cannot_become_markup_or_end_a_cell() -> None:
    assert markdown_text("a|b [x](y) `c` *d* <e> \\|") == r"a\|b \[x\](y) \`c\` \*d\* &lt;e> \\\|"
