"""What an interpreter answers when it is asked for its vLLM, and what is around a start of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from prober.engine.install import Engine, environment, inspect, why_not_imported
from prober.records import Combination, NotReady

PYTHON = Path("/opt/engine/bin/python")


@pytest.mark.parametrize(
    ("status", "text", "reason"),
    [
        (0, "Welcome!\nnot JSON\n", "not JSON"),
        (0, "", "no answer"),
        (None, "", "no answer"),
        (127, "cannot run it: No such file or directory", "No such file or directory"),
    ],
)
def test_what_does_not_answer_is_no_engine(status: int | None, text: str, reason: str) -> None:
    with pytest.raises(NotReady, match=f"does not run .*{reason}.*--python"):
        inspect(PYTHON, lambda command, seconds: (status, text))


def test_an_import_that_fails_is_told_by_its_last_line() -> None:
    assert why_not_imported(PYTHON, lambda command, seconds: (0, "a warning")) is None
    said = "Traceback …\nImportError: libcudart.so.12: cannot open shared object file\n"
    assert why_not_imported(PYTHON, lambda command, seconds: (1, said)) == said.splitlines()[-1]
    assert why_not_imported(PYTHON, lambda command, seconds: (None, "")) == "it took too long"


def test_several_ranks_on_a_cpu_are_not_bound_unless_the_user_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = "VLLM_CPU_OMP_THREADS_BIND"
    monkeypatch.delenv(bind, raising=False)
    on_cpu, on_gpu = (Engine(PYTHON, "0.32.0", "2.13.0", is_cpu_build=is_cpu) for is_cpu in (True, False))
    two = Combination("a/b", tensor_parallel_size=2)
    assert environment(on_cpu, two, tmp_path)[bind] == "nobind"
    assert bind not in environment(on_cpu, Combination("a/b"), tmp_path)
    assert bind not in environment(on_gpu, two, tmp_path)
    monkeypatch.setenv(bind, "0-3|4-7")
    assert environment(on_cpu, two, tmp_path)[bind] == "0-3|4-7"
