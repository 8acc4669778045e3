"""Plans: what they may say, and that every mistake is told with its line and key."""

from __future__ import annotations

import pytest

from prober.fleet.plan import EngineSpec, read_plan
from prober.fleet.toml_table import PlanError
from prober.records import CompileState, Verify

PLAN = """\
name = "nightly"
deadline_hours = 6
fresh_days = 7
verify = "short"
[defaults]
gpus = ["H100", "L4"]
priority = 1
[[engine]]
version = "0.28.0"
[[engine]]
python = "/opt/vllm/bin/python"
[[model]]
name = "Qwen/Qwen3-8B"
revision = "abc"
tp = [1, 2]
gpu_memory_utilization = [0.9, "default"]
kv_cache_dtype = ["auto", "fp8"]
flags = ["", "--max-num-seqs 8"]
[[model]]
name = "/models/own"
gpus = "all"
tp = 4
priority = 10
host_memory_gib = 40
"""


def test_everything_a_plan_may_say_is_read() -> None:
    plan = read_plan(PLAN)
    assert (plan.name, plan.deadline_hours, plan.fresh_days, plan.verify) == ("nightly", 6.0, 7.0, Verify.SHORT)
    assert plan.compile_state is CompileState.COLD
    assert plan.engines == (EngineSpec(version="0.28.0"), EngineSpec(python="/opt/vllm/bin/python"))
    first, second = plan.models
    assert (first.revision, first.tensor_parallel_sizes, first.utilizations) == ("abc", (1, 2), (0.9, None))
    assert first.kv_cache_dtypes == (None, "fp8")
    assert first.flags == ((), ("--max-num-seqs", "8"))
    assert (second.gpus, second.tensor_parallel_sizes, second.host_memory_gib) == (("all",), (4,), 40.0)


def test_defaults_stand_behind_each_model() -> None:
    first, second = read_plan(PLAN).models
    assert (first.gpus, first.priority) == (("H100", "L4"), 1)
    assert (second.gpus, second.priority) == (("all",), 10)


@pytest.mark.parametrize(
    ("good", "bad", "told"),
    [
        ("tp = [1, 2]", "tp = [1, 0]", "line 15: model.tp: takes whole numbers from 1"),
        ("tp = [1, 2]", "tp = []", "line 15: model.tp: is empty"),
        ("tp = 4", "tps = 4", "line 22: model.tps: is unknown here (tp?)"),
        ("tp = 4", "tp = true", "line 22: model.tp: takes whole numbers"),
        ('gpus = "all"', "gpus = 7", "line 21: model.gpus: takes names of GPU types"),
        ('gpus = ["H100", "L4"]', "gpus = 7", "line 6: defaults.gpus: takes names of GPU types"),
        ('name = "/models/own"', "", "line 19: model.name: every model needs one"),
        ('name = "/models/own"', 'name = "./own"', "line 20: model.name: './own' depends on who runs it"),
        ("deadline_hours = 6", "deadline_hours = -6", "line 2: deadline_hours: takes a number above 0"),
        ("deadline_hours = 6", 'deadline_hours = "6"', "line 2: deadline_hours: takes a number above 0"),
        ("fresh_days = 7", "fresh_day = 7", "line 3: fresh_day: is unknown here (fresh_days?)"),
        ('verify = "short"', 'verify = "long"', "line 4: verify: takes one of none, short, full, not 'long'"),
        ("[0.9,", "[90,", "line 16: model.gpu_memory_utilization: takes shares of the memory such as 0.9"),
        ('"--max-num-seqs 8"', '"--port 8"', "line 18: model.flags: --port is not for you to set here"),
        ('"--max-num-seqs 8"', '"--kv-cache-dtype fp8"', "line 18: model.flags: give it as kv_cache_dtype"),
        (
            '"--max-num-seqs 8"',
            '"--distributed-executor-backend ray"',
            "line 18: model.flags: must not start Ray inside a task",
        ),
        ('"--max-num-seqs 8"', '"-pp x"', "line 18: model.flags: --pipeline-parallel-size takes a whole number"),
        ('version = "0.28.0"', 'version = "latest"', "line 9: engine.version: 'latest' is no version"),
        ('version = "0.28.0"', 'version = "0.28.0"\npython = "x"', "line 8: engine: an engine has either python"),
        ('python = "/opt/vllm/bin/python"', 'version = "0.28.0"', "engine: vllm==0.28.0 is there twice"),
        ("[[model]]", "[[models]]", "model: a plan needs at least one [[model]]"),
        ("tp = 4", "tp = ", "is no TOML"),
        ("fresh_days = 7", "low = 1", "line 3: low: is at least 2 tokens"),
        ("tp = [1, 2]", "priority = true", "line 15: model.priority: takes a whole number, not True"),
        ('revision = "abc"', "revision = 7", "line 14: model.revision: takes a text in quotes, not 7"),
        ('["auto", "fp8"]', "8", 'line 17: model.kv_cache_dtype: takes names such as "fp8", or "default"'),
        ('"--max-num-seqs 8"', "8", 'line 18: model.flags: takes command lines such as "--max-num-seqs 8"'),
        ("[defaults]", "defaults = 5\n[defaultz]", "defaults: is a table: write [defaults]"),
        ("fresh_days = 7", "low = 100\nhigh = 50", "line 4: high: 50 is below low, 100"),
    ],
)
def test_a_mistake_is_told_with_its_line_and_key(good: str, bad: str, told: str) -> None:
    assert good in PLAN
    with pytest.raises(PlanError) as error:
        read_plan(PLAN.replace(good, bad), "plan.toml")
    assert told in str(error.value)
    assert str(error.value).startswith("plan.toml")
    assert error.value.exit_code == 2
