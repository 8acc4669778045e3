"""What a look-up answers: exact, dominating, reported, or how to measure it; and never another thing's number."""

from __future__ import annotations

import dataclasses
import json
import random
from datetime import UTC, datetime
from pathlib import Path

import pytest
from conftest import Run
from row_makers import HOSTILE, a_row

from prober.engine.versions import version_order
from prober.records import CompileState, Entrypoint, NotReady, Source, Status, Verify
from prober.results.csv_format import ForeignMatrix, record_of, render
from prober.results.lookup import Grade, LookupResult, Query, answer, look_up, render_table, to_json, utilization
from prober.results.naming import near_models, same_gpu, same_model, version_distance
from prober.results.schema import Row, from_values

NOW = datetime(2026, 1, 11, tzinfo=UTC)


def ask(*rows: Row, **question: object) -> LookupResult:
    return answer(rows, Query(**({"model": "Qwen/Qwen3-8B"} | question)), NOW)  # type: ignore[arg-type]


def grades(found: LookupResult) -> list[Grade]:
    return [hit.grade for hit in found.hits]


@pytest.mark.parametrize(
    ("asked", "known", "same"),
    [
        ("qwen/qwen3-8b", "Qwen/Qwen3-8B", True),
        ("Qwen3-8B", "Qwen/Qwen3-8B", True),
        ("qwen3_8b", "Qwen/Qwen3-8B", True),
        ("Llama 3.1 8B", "meta-llama/Llama-3.1-8B", True),
        ("Qwen/Qwen3-8B", "Qwen3-8B", True),
        ("unsloth/Qwen3-8B", "Qwen/Qwen3-8B", False),
        ("Qwen3-8B", "Qwen/Qwen3-8B-Instruct", False),
        ("Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B", False),
        ("Qwen3-8B", "Qwen/Qwen3-8B-FP8", False),
        ("Qwen-38B", "Qwen3-8B", False),
    ],
)
def test_spelling_of_a_model(asked: str, known: str, same: bool) -> None:
    assert same_model(asked, known) is same


@pytest.mark.parametrize(
    ("asked", "known", "same"),
    [
        ("L4", "NVIDIA L4", True),
        ("l4", "NVIDIA L40S", False),
        ("L40", "NVIDIA L40S", False),
        ("rtx4090", "NVIDIA GeForce RTX 4090", True),
        ("RTX 4090", "NVIDIA GeForce RTX 4090 Laptop GPU", False),
        ("4090", "NVIDIA GeForce RTX 4090 D", False),
        ("3080", "NVIDIA GeForce RTX 3080 Ti", False),
        ("3080ti", "NVIDIA GeForce RTX 3080 Ti", True),
        ("NVIDIA GeForce RTX 3090", "RTX 3090", True),
        ("A100", "NVIDIA A100-SXM4-80GB", True),
        ("A100-80GB", "NVIDIA A100-SXM4-80GB", True),
        ("A100 40GB", "NVIDIA A100-SXM4-80GB", False),
        ("A100", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", False),
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("H200", "NVIDIA H100 80GB HBM3", False),
        ("A10", "NVIDIA A100-PCIE-40GB", False),
        ("NVIDIA", "NVIDIA L4", False),
    ],
)
def test_spelling_of_a_gpu(asked: str, known: str, same: bool) -> None:
    assert same_gpu(asked, known) is same


def test_versions_are_ordered_as_numbers_and_their_distance_is_said() -> None:
    versions = ["0.9.2", "0.10.0", "0.8.5.post1", "0.8.5", "dev"]
    assert sorted(versions, key=version_order) == ["dev", "0.8.5", "0.8.5.post1", "0.9.2", "0.10.0"]
    assert version_distance("0.28.0", "0.28.0") == "same version"
    assert version_distance("0.25.1", "0.28.0") == "3 minor versions older"
    assert version_distance("0.28.1", "0.28.0") == "1 patch version newer"
    assert version_distance("0.28.0rc1", "0.28.0").startswith("another build")
    assert version_distance("dev", "0.28.0") == "another version than 0.28.0"
    assert version_distance("0.28.0", None) == ""
    assert version_distance(None, "0.28.0") == "version unknown"


def test_near_names_are_offered() -> None:
    known = ["Qwen/Qwen3-8B", "Qwen/Qwen3-8B-FP8", "meta-llama/Llama-3.1-8B"]
    assert near_models("qwen3-8", known)[0] == "Qwen/Qwen3-8B"
    assert near_models("llama", known) == ("meta-llama/Llama-3.1-8B",)
    assert near_models("bert", known) == ()


def test_an_exact_row_is_exact() -> None:
    found = ask(a_row(), a_row(model="other"), gpu="L4", tensor_parallel_size=1, vllm_version="0.28.0")
    assert grades(found) == [Grade.EXACT]
    assert found.hits[0].row == a_row()
    assert found.hits[0].age_days == 10
    assert found.hits[0].version_distance == "same version"


@pytest.mark.parametrize(
    "question",
    [
        {"model": "Qwen/Qwen3-8B-FP8"},
        {"gpu": "L40S"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"kv_cache_dtype": "fp8"},
        {"dtype": "float16"},
        {"quantization": "awq"},
        {"entrypoint": Entrypoint.LLM},
        {"compile_state": CompileState.EAGER},
        {"gpu_memory_mib": 16000},
        {"gpu_memory_utilization": 0.8},
        {"max_num_seqs": 512},
        {"max_num_batched_tokens": 16384},
    ],
)
def test_a_row_of_something_easier_or_other_never_answers(question: dict[str, object]) -> None:
    row = a_row(
        max_num_seqs=256, max_num_batched_tokens=8192, entrypoint=Entrypoint.SERVE, compile_state=CompileState.COLD
    )
    found = ask(row, **question)
    assert not found.is_found
    assert found.command is not None


@pytest.mark.parametrize(
    "question",
    [
        {"gpu_memory_mib": 24000},
        {"gpu_memory_utilization": 0.95},
        {"max_num_seqs": 16},
        {"max_num_batched_tokens": 2048},
        {"vllm_version": "0.29.0"},
    ],
)
def test_a_row_of_something_harder_bounds_the_answer(question: dict[str, object]) -> None:
    found = ask(a_row(max_num_seqs=256, max_num_batched_tokens=8192), **question)
    assert grades(found) == [Grade.BOUND]
    assert next(iter(question)).removesuffix("_version").casefold() in " ".join(found.hits[0].differs).casefold()


def test_an_exact_row_is_preferred_to_a_bound() -> None:
    found = ask(a_row(vllm_version="0.27.0"), a_row(), vllm_version="0.28.0")
    assert [(hit.grade, hit.row.vllm_version) for hit in found.hits] == [(Grade.EXACT, "0.28.0")]


def test_that_it_does_not_fit_under_harder_conditions_says_nothing_here() -> None:
    row = a_row(status=Status.DOES_NOT_FIT, max_model_len=None, starts_max_model_len=None)
    assert grades(ask(row)) == [Grade.EXACT]
    assert not ask(row, gpu_memory_utilization=0.99).is_found


def test_an_unsettled_row_is_shown_with_what_bounds_it() -> None:
    unsettled = a_row(status=Status.INCONCLUSIVE, max_model_len=None)
    found = ask(unsettled, a_row(vllm_version="0.27.0"), vllm_version="0.28.0")
    assert grades(found) == [Grade.EXACT, Grade.BOUND]


def test_the_default_fraction_is_that_of_the_version() -> None:
    assert utilization(a_row(vllm_version="0.19.1")) == 0.9
    assert utilization(a_row(vllm_version="0.20.0")) == 0.92
    assert utilization(a_row(vllm_version=None)) is None
    assert grades(ask(a_row(vllm_version="0.19.1"), gpu_memory_utilization=0.9)) == [Grade.EXACT]
    assert not ask(a_row(vllm_version="0.28.0"), gpu_memory_utilization=0.9).is_found


def test_of_several_machines_the_lowest_is_shown_and_the_spread() -> None:
    lengths = {"m1": 4000, "m2": 3000, "m3": 5000}
    found = ask(*(a_row(machine=machine, max_model_len=length) for machine, length in lengths.items()))
    (hit,) = found.hits
    assert (hit.row.max_model_len, hit.highest, hit.machines) == (3000, 5000, 3)
    assert "3,000 to 5,000" in render_table(found)
    found = ask(a_row(), a_row(machine="m2", status=Status.DOES_NOT_FIT, max_model_len=None, starts_max_model_len=None))
    assert found.hits[0].row.status is Status.DOES_NOT_FIT


def test_reports_are_second_class() -> None:
    report = a_row(source=Source.REPORTED, source_url="https://example.org/1", machine=None, max_model_len=None,
                   status=None, verified=None, starts_max_model_len=9000)  # fmt: skip
    assert grades(ask(report)) == [Grade.REPORTED]
    text = render_table(ask(report))
    assert "only reported" in text
    assert "https://example.org/1" in text
    assert grades(ask(report, a_row())) == [Grade.EXACT]


def test_a_needed_length_is_served_by_the_cheapest_first() -> None:
    rows = [
        a_row(model="big", gpu="NVIDIA H100 80GB HBM3", gpu_memory_mib=81559, max_model_len=99000),
        a_row(model="two", gpu_count=2, tensor_parallel_size=2, max_model_len=50000),
        a_row(model="one", max_model_len=33000),
        a_row(model="short", max_model_len=32767),
        a_row(model="starts", max_model_len=None, starts_max_model_len=40000, verified=Verify.SHORT),
    ]
    found = ask(*rows, model=None, need=32768)
    assert [hit.row.model for hit in found.hits] == ["one", "two", "big"]
    found = ask(*rows[3:], model=None, need=32768)
    assert [(hit.row.model, hit.grade) for hit in found.hits] == [("starts", Grade.UNPROVEN)]


@pytest.mark.parametrize("asked", [None, "0.28.0", "0.30.0"])
def test_of_many_that_serve_the_cheapest_are_shown(monkeypatch: pytest.MonkeyPatch, asked: str | None) -> None:
    chance = random.Random(20_261_201)
    rows = [
        a_row(
            model=f"m{number}",
            gpu_memory_mib=chance.choice([None, 23_034, 81_559]),
            gpu_count=chance.choice([1, 2, 4]),
            vllm_version=chance.choice(["0.28.0", "0.29.0"]),
            max_model_len=chance.choice([None, chance.randint(1000, 9000)]),
            environment=chance.choice([None, None, "VLLM_USE_V1=0"]),
        )
        for number in range(400)
    ]
    shown = ask(*rows, model=None, need=2000, vllm_version=asked).hits
    monkeypatch.setattr("prober.results.lookup.MOST_OF_NEED", len(rows))
    every = ask(*rows, model=None, need=2000, vllm_version=asked).hits
    assert len(shown) == 50 < len(every)
    costs = [(hit.row.gpu_memory_mib or 10**9) * (hit.row.gpu_count or 1) for hit in every]
    assert costs[:9] == [23_034] * 9
    assert [hit.row.max_model_len for hit in shown] == [hit.row.max_model_len for hit in every[:50]]


def test_one_machine_that_cannot_serve_the_length_takes_its_combination_out() -> None:
    rows = [a_row(max_model_len=40000), a_row(machine="m2", max_model_len=20000)]
    assert not ask(*rows, need=32768).is_found
    assert ask(*rows, need=20000).is_found


@pytest.mark.parametrize(
    ("figures", "serves"),
    [
        ({"kv_cache_tokens": 8 * 32768 + 16, "block_size": 16}, True),
        ({"kv_cache_tokens": 8 * 32768, "block_size": 16}, False),  # one block is reserved
        ({"num_gpu_blocks": 8 * 2048 + 1, "block_size": 16}, True),
        ({"kv_cache_tokens": 10**6, "block_size": 16, "max_num_seqs": 4}, False),
        ({}, False),  # unknown is not enough
    ],
)
def test_needed_requests_at_once(figures: dict[str, int], serves: bool) -> None:
    row = a_row(max_model_len=40000, **figures)
    assert ask(row, need=32768, concurrency=8).is_found is serves
    assert ask(row, need=32768).is_found


def test_nothing_known_says_how_to_measure_it() -> None:
    found = ask(
        a_row(), model="Qwen/Qwen3-9B", tensor_parallel_size=2, kv_cache_dtype="fp8", gpu_memory_utilization=0.95
    )
    assert not found.is_found
    assert found.did_you_mean == ("Qwen/Qwen3-8B",)
    assert found.command == "prober probe Qwen/Qwen3-9B --tp 2 --gpu-memory-utilization 0.95 -- --kv-cache-dtype fp8"
    text = render_table(found)
    assert "Did you mean Qwen/Qwen3-8B?" in text
    assert found.command in text


def test_json_carries_whole_rows() -> None:
    plain = json.loads(to_json(ask(a_row())))
    (hit,) = plain["hits"]
    assert from_values(hit["row"]) == a_row()
    assert hit["grade"] == "exact"
    assert hit["serve_flags"].startswith("Qwen/Qwen3-8B --max-model-len 3968")
    assert json.loads(to_json(ask(model="x"))) == {
        "found": False, "hits": [], "did_you_mean": [], "known_gpus": [], "command": "prober probe x",
    }  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_moves_no_cursor_and_breaks_no_line(name: str) -> None:
    found = answer([a_row(model=name, notes=name)], Query(), NOW)
    lines = render_table(found).splitlines()
    assert len(lines) == 4, "a title, the headings, the row, its note"
    assert all(character.isprintable() for line in lines for character in line)
    assert from_values(json.loads(to_json(found))["hits"][0]["row"]).model == name


def test_the_table_shows_age_and_version_distance() -> None:
    text = render_table(ask(a_row(vllm_version="0.26.0"), a_row(model="newer", vllm_version="0.28.0")))
    assert "10 days old" in text
    assert "2 minor versions older" in text
    assert "3,968" in text


def test_a_folder_is_read_and_no_folder_knows_nothing(tmp_path: Path) -> None:
    question = Query(model="qwen3-8b")
    assert not look_up(tmp_path / "none", question).is_found
    (tmp_path / "matrix.csv").write_text(render([record_of(a_row())]))
    assert look_up(tmp_path, question, NOW).hits == ask(a_row()).hits
    assert look_up(tmp_path / "matrix.csv", question, NOW).hits == ask(a_row()).hits


def test_a_foreign_or_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "matrix.csv").write_text("a,b\n")
    with pytest.raises(ForeignMatrix):
        look_up(tmp_path, Query(model="x"))
    (tmp_path / "matrix.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(NotReady):
        look_up(tmp_path, Query(model="x"))


def test_a_known_model_on_another_gpu_is_said_and_no_other_model_is_offered() -> None:
    found = ask(a_row(gpu="NVIDIA L4"), a_row(model="Qwen/Qwen3-8B-FP8", gpu="NVIDIA A10"), gpu="H100")
    assert (found.known_gpus, found.did_you_mean) == (("NVIDIA L4",), ())
    assert "There are rows of Qwen/Qwen3-8B on NVIDIA L4." in render_table(found)


def test_rows_that_look_alike_show_their_settings_and_others_do_not() -> None:
    small, large = a_row(other_flags="--block-size 16"), a_row(other_flags="--block-size 32")
    assert "--block-size" not in render_table(ask(small))
    lines = render_table(ask(small, large)).splitlines()[2:4]
    assert [line.rpartition("--block-size ")[2] for line in lines] == ["16", "32"]


def test_an_empty_matrix_is_no_answer_about_the_model(run_prober: Run, tmp_path: Path) -> None:
    done = run_prober("lookup", "Qwen3-8B", "--results", tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"prober: {tmp_path} holds no rows. Name a folder that has some with --results.\n"
    assert "Nothing is known about Qwen3-8B" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [(["m", "--json", "--flags"], "--json and --flags exclude each other"), (["", "--gpu", "L4"], "Give a MODEL")],
)
def test_a_question_that_is_none_is_refused(run_prober: Run, words: list[str], said: str) -> None:
    done = run_prober("lookup", *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_nothing_known_of_a_needed_length_says_which() -> None:
    assert "Nothing is known that serves 9,000 tokens with Qwen/Qwen3-8B." in render_table(ask(a_row(), need=9000))
    several = render_table(ask(a_row(), model=None, need=9000, concurrency=4))
    assert "Nothing is known that serves 9,000 tokens, 4 requests at once with any model." in several


def test_what_only_starts_or_was_only_refused_is_shown_as_that() -> None:
    imported = a_row(status=None, max_model_len=None, verified=None, source=Source.IMPORTED, measured_at=None)
    started = ask(imported)
    assert "starts" in render_table(started)
    assert "age unknown" in render_table(started)
    assert json.loads(to_json(started))["hits"][0]["serve_flags"] is None, "nothing proven, so nothing to paste"
    refused = dataclasses.replace(imported, starts_max_model_len=None, refused_max_model_len=65_536)
    assert "refused at 65,536" in render_table(ask(refused))
    assert not ask(refused, need=1024).is_found


def test_a_bound_says_what_it_was_measured_with() -> None:
    text = render_table(ask(a_row(vllm_version="0.27.0"), vllm_version="0.28.0"))
    assert "Qwen/Qwen3-8B on NVIDIA L4: measured with vLLM 0.27.0 where 0.28.0 is asked." in text


def test_a_date_that_is_none_has_no_age() -> None:
    assert ask(a_row(measured_at="last summer")).hits[0].age_days is None
