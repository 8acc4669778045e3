"""The results folder on a good day: what is written is read back, and a stronger proof is not pushed out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from row_makers import a_ceiling, a_row, a_trial, record, trials

from prober.records import Bracket, Combination, CompileState, NotReady, Outcome, Source, Status, Trial, Verify
from prober.results.csv_format import HEADER_LINE, ForeignMatrix
from prober.results.from_ceiling import public_model, row_of
from prober.results.lookup import Query, look_up
from prober.results.schema import HEADER, CeilingKind, UnreadableRow, from_cells, to_cells
from prober.results.store import Store
from prober.results.text import public_environment, public_flags, public_text
from prober.results.trial_json import dump_trial, load_trial


@given(trials)
def test_any_trial_survives_its_line(trial: Trial) -> None:
    line = dump_trial(trial)
    assert "\n" not in line
    assert load_trial(line) == trial


def test_a_line_of_another_version_is_read() -> None:
    trial = a_trial(available_gib=1.5)
    plain = json.loads(dump_trial(trial))
    plain["verdict"]["figures"]["colour"] = "green"
    plain["later"] = 1
    plain["seconds"] = 12  # whole, as other writers of JSON put it
    del plain["leaked_mib"], plain["length"], plain["verdict"]["figures"]["block_size"]
    read = load_trial(json.dumps(plain))
    assert (read.length, read.seconds) == (None, 12.0)
    assert read.verdict.figures.available_gib == 1.5


@pytest.mark.parametrize(
    "line",
    [
        *("", "{}", "[]", "null", "1", '{"id": 1}', "{" * 5000),
        dump_trial(a_trial()).replace("fits", "new"),
        dump_trial(a_trial()).replace("00:00:00Z", "00:00:00"),
        dump_trial(a_trial()).replace('"seconds":12.5', '"seconds":-1.0'),
        dump_trial(a_trial()).replace('"seconds":12.5', '"seconds":null'),
        dump_trial(a_trial(3968)).replace('"length":3968', '"length":-3968'),
    ],
)
def test_what_is_no_trial_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        load_trial(line)


def test_trials_come_back_in_order(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "results")
    assert store.trials() == []
    assert store.rows() == []
    recorded = [a_trial(length) for length in (5, 3, 4)]
    for trial in recorded:
        store.append(trial)
    assert Store(tmp_path / "new" / "results").trials() == recorded


def test_record_writes_one_row_and_replaces_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = record(store, a_ceiling())
    assert store.rows() == [first]
    second = record(store, a_ceiling(bracket=Bracket(3900, 3901), measured_at="2026-01-02T00:00:00Z"))
    assert store.rows() == [second]
    assert second.max_model_len == 3900
    record(store, a_ceiling(combination=Combination("Qwen/Qwen3-8B", tensor_parallel_size=2)))
    assert len(store.rows()) == 2


def test_an_inconclusive_search_does_not_push_out_a_proof(tmp_path: Path) -> None:
    store = Store(tmp_path)
    proven = record(store, a_ceiling())
    newer = "2026-02-01T00:00:00Z"
    told = record(store, a_ceiling(status=Status.INCONCLUSIVE, bracket=Bracket(), measured_at=newer))
    assert told.status is Status.INCONCLUSIVE
    record(store, a_ceiling(verify=Verify.SHORT, measured_at=newer))
    record(store, a_ceiling(status=Status.AT_LEAST, bracket=Bracket(2000, None), measured_at=newer))
    assert store.rows() == [proven]
    contradicted = record(store, a_ceiling(status=Status.UNSTABLE, measured_at=newer))
    assert store.rows() == [contradicted]


def test_measured_beats_imported_of_the_same_thing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    imported = a_row(source=Source.IMPORTED, measured_at="2026-03-01T00:00:00Z")
    assert store.put([imported]) == []
    measured = a_row()
    assert store.put([measured]) == []
    assert store.put([imported]) == [imported]
    assert store.rows() == [measured]


def test_reports_of_different_addresses_stand_side_by_side(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(a_row(source=Source.REPORTED, source_url=f"https://example.org/{i}", machine=None) for i in range(3))
    assert len(store.rows()) == 3


def test_the_file_has_lf_ends_and_no_draft_is_left(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.check_writable()
    record(store, a_ceiling())
    assert b"\r" not in (tmp_path / "matrix.csv").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "matrix.csv"]


def test_untouched_rows_keep_their_bytes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put([a_row(model="a"), a_row(model="c")])
    path = tmp_path / "matrix.csv"
    path.write_text(path.read_text().replace("23034", '"23034"'))  # valid, but not as we would write it
    store.put([a_row(model="b")])
    lines = path.read_text().splitlines()
    assert [line[0] for line in lines[1:]] == ["a", "b", "c"]
    assert ['"23034"' in line for line in lines[1:]] == [True, False, True]


def test_a_cell_that_a_spreadsheet_spoiled_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put([a_row()])
    path = tmp_path / "matrix.csv"
    path.write_text(path.read_text().replace("3968", "3968.0"))
    with pytest.raises(UnreadableRow, match=r"matrix\.csv.*max_model_len.*3968\.0"):
        store.rows()
    with pytest.raises(UnreadableRow, match=r"3968\.0"):
        look_up(tmp_path, Query(model="qwen3-8b"))
    store.put([a_row(model="another")])
    assert "3968.0" in path.read_text()


def test_log_path_is_in_a_folder_that_exists(tmp_path: Path) -> None:
    path = Store(tmp_path).log_path("t1")
    assert path == tmp_path / "logs" / "t1.log"
    path.write_text("x")


def test_an_unwritable_folder_is_found_before_the_first_launch(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotReady, match="cannot be written"):
        Store(tmp_path / "file" / "results").check_writable()


def test_a_foreign_matrix_is_found_before_the_first_launch(tmp_path: Path) -> None:
    (tmp_path / "matrix.csv").write_text("name,age\nx,1\n")
    store = Store(tmp_path)
    with pytest.raises(ForeignMatrix, match="not a matrix"):
        store.check_writable()
    with pytest.raises(ForeignMatrix):
        store.put([a_row()])
    assert (tmp_path / "matrix.csv").read_text() == "name,age\nx,1\n"


def test_the_figures_are_those_of_the_start_at_the_ceiling() -> None:
    row = row_of(a_ceiling(), model_revision="abc", notes=("a warning",))
    assert (row.max_model_len, row.served_max_model_len) == (3968, 3968)
    assert (row.starts_max_model_len, row.estimated_max_model_len, row.refused_max_model_len) == (4096, 3968, 3969)
    assert (row.num_gpu_blocks, row.block_size, row.kv_cache_tokens, row.kv_cache_gib) == (32, 128, 4096, 0.0078)
    assert (row.status, row.ceiling_kind, row.trials, row.seconds) == (Status.EXACT, CeilingKind.MEMORY, 4, 120.0)
    assert (row.refused_outcome, row.refused_evidence) == (Outcome.KV_TOO_SMALL, "larger than the available KV cache")
    assert (row.model_revision, row.notes, row.prober_version) == ("abc", "a warning", "0.1.0")


@pytest.mark.parametrize("verify", [Verify.NONE, Verify.SHORT])
def test_a_start_alone_fills_only_the_length_that_starts(verify: Verify) -> None:
    row = row_of(a_ceiling(verify=verify, trials=(a_trial(3968),)))
    assert row.max_model_len is None
    assert row.served_max_model_len is None
    assert row.starts_max_model_len == 3968
    assert row.verified is verify


@pytest.mark.parametrize("status", [Status.UNSTABLE, Status.INCONCLUSIVE, Status.BAD_CONFIG, Status.DOES_NOT_FIT])
def test_an_unsettled_search_names_no_ceiling(status: Status) -> None:
    row = row_of(a_ceiling(status=status))
    assert row.max_model_len is None
    assert row.status is status


def test_the_model_limit_shows_no_crash_as_its_refusal() -> None:
    crash, limit = a_trial(9000, Outcome.CRASH), a_trial(8193, Outcome.OVER_MODEL_LIMIT)
    ends = {"status": Status.MODEL_LIMIT, "bracket": Bracket(8192, None)}
    assert row_of(a_ceiling(trials=(a_trial(8192), crash), **ends)).refused_outcome is None
    row = row_of(a_ceiling(trials=(a_trial(8192), limit, crash), **ends))
    assert (row.refused_outcome, row.ceiling_kind) == (Outcome.OVER_MODEL_LIMIT, CeilingKind.MODEL)


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("gpt2", "gpt2"),
        ("/home/bob/models/Qwen3-8B/", "Qwen3-8B"),
        ("./tiny llama", "tiny llama"),
        ("../x/tiny", "tiny"),
        ("~/models/tiny", "tiny"),
        ("a/b/c", "c"),
        (r"C:\models\tiny", "tiny"),
    ],
)
def test_of_a_directory_only_the_last_name_is_kept(model: str, kept: str) -> None:
    assert public_model(model) == kept


def test_flags_keep_their_order_and_lose_paths_and_secrets() -> None:
    flags = ("--chat-template", "/home/bob/a b/c d.jinja", "--hf-token", "hf_abcdefghijklmnop", "--x=/srv/y.json",
             "--speculative-config", '{"model": "/home/bob/eagle", "n": 2}', "--max-num-batched-tokens", "2048",
             "--otlp", "http://u:p@host:1/x/y", "--api-key=abc", "--tokenizer", "org/name",
             "--enforce-eager")  # fmt: skip
    assert public_flags(flags) == (
        "--chat-template 'c d.jinja' --hf-token '***' --x=y.json "
        """--speculative-config '{"model": "eagle", "n": 2}' --max-num-batched-tokens 2048 """
        "--otlp 'http://***@host:1/x/y' '--api-key=***' --tokenizer org/name --enforce-eager"
    )


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('File "/home/bob/venv/lib/x.py", line 3', 'File "x.py", line 3'),
        ("see https://docs.vllm.ai/en/latest/x.html", "see https://docs.vllm.ai/en/latest/x.html"),
        ("Qwen/Qwen3-8B at 3/4 of 16 GiB", "Qwen/Qwen3-8B at 3/4 of 16 GiB"),
        ("a\x1b[31mred\x00", "a�[31mred�"),
        ("token hf_abcdefghijklmnop here", "token hf_*** here"),
    ],
)
def test_text_of_a_log_loses_paths_and_secrets(text: str, kept: str) -> None:
    assert public_text(text) == kept


def test_compile_state_and_machine_are_part_of_what_a_row_is_about(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put([a_row(), a_row(compile_state=CompileState.WARM), a_row(machine="m2"), a_row(vllm_version="0.29.0")])
    assert len(store.rows()) == 4


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.trials_path.mkdir()
    with pytest.raises(NotReady, match=r"trials\.jsonl cannot be read: Is a directory"):
        store.trials()
    store.matrix_path.mkdir()
    with pytest.raises(NotReady, match=r"matrix\.csv cannot be read: Is a directory"):
        store.rows()
    store.matrix_path.rmdir()
    store.matrix_path.write_bytes(HEADER_LINE.encode() + b"\xff\n")
    with pytest.raises(NotReady, match=r"is not UTF-8 text: restore it from git"):
        store.rows()


def test_a_second_header_and_empty_lines_are_no_rows(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put([a_row()])
    store.matrix_path.write_text(store.matrix_path.read_text() + "\n" + HEADER_LINE)
    assert store.rows() == [a_row()]


@pytest.mark.parametrize(
    ("name", "cell"), [("max_model_len", "-1"), ("max_model_len", "9" * 30), ("kv_cache_gib", "nan")]
)
def test_a_number_that_none_could_be_is_refused(name: str, cell: str) -> None:
    cells = to_cells(a_row())
    cells[HEADER.index(name)] = cell
    with pytest.raises(UnreadableRow, match=f"The column {name} does not allow"):
        from_cells(cells)
    with pytest.raises(UnreadableRow, match="cells where"):
        from_cells(cells[:-1])


def test_of_the_environment_what_changes_a_ceiling_is_kept_and_no_place() -> None:
    settings = (
        *("VLLM_CPU_KVCACHE_SPACE=4", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "NCCL_SOCKET_IFNAME=eth0"),
        *("VLLM_HOST_IP=10.1.2.3", "CUDA_HOME=/usr/local/cuda", "VLLM_USE_V1=0", "VLLM_PLUGINS=a b", "VLLM_PORT=1"),
    )
    assert public_environment(settings) == (
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True VLLM_CPU_KVCACHE_SPACE=4 'VLLM_PLUGINS=***' VLLM_USE_V1=0"
    )
