"""The Python API as a user imports it: instant, typed, and the same answers as the command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
from fake_engine import Scenario, make_engine, write_model
from row_makers import a_row

import prober
from prober import api
from prober.records import NotReady
from prober.results.query import Grade
from prober.results.store import Store


def run_python(script: str, folder: Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=folder,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_of_it(tmp_path: Path) -> None:
    heavy = {"pandas", "numpy", "click", "rich", "filelock", "prober.api", "prober.records", "jinja2"}
    script = "import sys, prober; print(prober.__version__, *sorted(set(sys.modules) & set(sys.argv[1:])))"
    done = subprocess.run([sys.executable, "-c", script, *heavy], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 1


def test_names_are_functions_also_after_their_modules_were_loaded(tmp_path: Path) -> None:
    script = """
import prober
from prober.results.lookup import look_up
from prober.measure.request import Request
print(prober.lookup("Qwen3-8B").command, callable(prober.probe), callable(prober.read_matrix))
import prober.results.lookup
print(prober.lookup("Qwen3-8B").command)
try:
    prober.nothing_like_it
except AttributeError as error:
    print(error)
"""
    assert run_python(script, tmp_path).splitlines() == [
        "prober probe Qwen3-8B True True",
        "prober probe Qwen3-8B",
        "module 'prober' has no attribute 'nothing_like_it'",
    ]


def test_lookup_answers_what_the_folder_knows(tmp_path: Path) -> None:
    Store(tmp_path).put([a_row(), a_row(tensor_parallel_size=2, gpu_count=2, max_model_len=9000)])
    found = api.lookup("qwen3-8b", results=tmp_path, gpu="L4", tensor_parallel_size=2)
    assert [(hit.grade, hit.row.max_model_len) for hit in found.hits] == [(Grade.EXACT, 9000)]
    served = api.lookup(results=str(tmp_path), need=3000)
    assert [hit.row.tensor_parallel_size for hit in served.hits] == [1, 2]
    assert not api.lookup("nobody/knows", results=tmp_path).is_found


def test_matrix_has_nullable_types(tmp_path: Path) -> None:
    Store(tmp_path).put([a_row(), a_row(machine="m2", max_model_len=None)])
    frame = api.read_matrix(tmp_path)
    assert isinstance(frame, pandas.DataFrame)
    assert str(frame.dtypes["max_model_len"]) == "Int64"
    assert frame["max_model_len"].isna().tolist() == [False, True]
    assert len(api.read_matrix(tmp_path / "not there yet")) == 0


def test_foreign_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "matrix.csv").write_text("a,b\n1,2\n")
    with pytest.raises(NotReady, match="is not a matrix of the prober"):
        api.read_matrix(tmp_path)
    with pytest.raises(NotReady, match="is not a matrix of the prober"):
        api.lookup("x", results=tmp_path)


def test_probe_proves_and_records_a_ceiling(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "engine", Scenario(kv_blocks=32, block_size=128, bytes_per_token=2048))
    model = write_model(tmp_path / "model", 131_072)
    script = f"""
import prober
seen = []
ceiling = prober.probe({str(model)!r}, vllm_flags=["--max-num-seqs", "16"], on_trial=seen.append)
print(ceiling.max_model_len, ceiling.status, [trial.length for trial in seen])
print(prober.read_matrix()["max_model_len"].tolist())
"""
    told = run_python(script, tmp_path, engine.environment | {"ENGINE_PYTHON": sys.executable})
    assert told.splitlines() == ["3968 exact [131072, 3968, 3969]", "[3968]"]
    assert engine.alive() == ()


def test_the_calls_that_its_own_page_shows_exist() -> None:
    shown = re.findall(r"= prober\.([\w.]+)\(", api.__doc__ or "")
    assert shown == ["lookup", "read_matrix", "probe"]


def test_the_three_functions_are_listed() -> None:
    assert {"lookup", "probe", "read_matrix"} <= set(dir(prober))
