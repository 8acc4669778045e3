"""The fake engine starts, serves, refuses and exits as the version it plays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_engine import Asked, FakeEngine, Fault, FaultKind, Scenario, make_engine, wait_until, write_model
from hypothesis import given
from hypothesis import strategies as st
from started import Started, length_flag, started

# --- capacity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.6.3", 32 * 16),  # V0: blocks × block size
        ("0.8.2", 32 * 16),  # V1 without a null block
        ("0.28.0", 31 * 16 + 1),  # starts up to 512; the null block is never granted, the last token needs no slot
        ("0.29.0", 31 * 16),  # the null block is in the check
    ],
)
def test_ceiling_follows_the_version(version: str, expected: int) -> None:
    assert Scenario(version=version).ceiling() == expected


@given(
    blocks=st.integers(0, 40),
    page=st.integers(1, 9),
    limit=st.integers(1, 200),
    version=st.sampled_from(["0.6.3", "0.8.2", "0.28.0", "0.33.0"]),
    change=st.tuples(st.integers(1, 200), st.integers(0, 40)),
    fault_from=st.integers(1, 250),
    tensor_parallel_size=st.integers(1, 3),
)
def test_ceiling_is_the_longest_that_serves(
    blocks: int,
    page: int,
    limit: int,
    version: str,
    change: tuple[int, int],
    fault_from: int,
    tensor_parallel_size: int,
) -> None:
    fault = Fault(FaultKind.DEVICE_OOM, "capture", from_length=fault_from)
    asked = Asked(tensor_parallel_size=tensor_parallel_size)
    played = Scenario(
        version=version, kv_blocks=blocks, block_size=page, model_limit=limit, blocks_from=(change,), faults=(fault,)
    )
    serving = [length for length in range(1, limit + 1) if played.serves(length, asked=asked)]
    assert played.ceiling(asked=asked) == max(serving, default=None)


@pytest.mark.parametrize("version", ["0.6.3", "0.8.2", "0.10.2", "0.28.0", "0.32.0"])
def test_engine_serves_at_the_ceiling(version: str, tmp_path: Path) -> None:
    scenario = Scenario(version=version)
    ceiling = scenario.ceiling()
    assert ceiling
    with started(tmp_path, scenario, *length_flag(ceiling)) as run:
        status, body = run.wait_ready().complete(ceiling - 1)
        assert (status, body["usage"]["completion_tokens"]) == (200, 1)
        assert "Application startup complete." in run.log


def test_start_that_never_grants_the_last_block(tmp_path: Path) -> None:
    with started(tmp_path, Scenario(version="0.28.0"), *length_flag(512)) as run:
        run.wait_ready()
        with pytest.raises(TimeoutError):
            run.complete(511, timeout=0.5)
        assert (_gauge(run, "num_requests_running"), _gauge(run, "num_requests_waiting")) == (0, 1)
        assert "1.00x" in run.log


def test_stuck_request_may_start_over_and_over(tmp_path: Path) -> None:
    with started(tmp_path, Scenario(version="0.28.0", stuck_thrashes=True), *length_flag(512)) as run:
        run.wait_ready()
        with pytest.raises(TimeoutError):
            run.complete(511, timeout=0.3)
        wait_until(lambda: _gauge(run, "num_requests_running") == 1)
        wait_until(lambda: _gauge(run, "num_requests_running") == 0)


def _gauge(run: Started, name: str) -> float:
    lines = str(run.ask("GET", "/metrics")[1]).splitlines()
    return float(next(line for line in lines if line.startswith(f"vllm:{name}{{")).split()[-1])


def test_tensor_parallel_multiplies_blocks_and_has_a_worker_a_rank(tmp_path: Path) -> None:
    with started(tmp_path, Scenario(), *length_flag(63 * 16), "--tensor-parallel-size", "2") as run:
        assert run.wait_ready().complete(63 * 16 - 1)[0] == 200
        assert {role for role, _ in run.engine.alive()} == {"front", "EngineCore", "Worker_TP0", "Worker_TP1"}
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0
        wait_until(lambda: not run.engine.alive(), what="everything dead")


@pytest.mark.parametrize(
    ("flags", "blocks"),
    [
        (("--kv-cache-dtype", "fp8"), 64),
        (("--kv-cache-memory-bytes", str(10 * 16 * 131_072)), 10),
        (("--block-size", "32"), 16),
        (("--num-gpu-blocks-override", "40"), 40),
        (("--gpu_memory_utilization", "0.45"), 16),
        (("--enforce-eager", "--max-num-seqs=8", "--seed", "1", "--swap-space", "0"), 32),
    ],
)
def test_flags_change_the_blocks(flags: tuple[str, ...], blocks: int, tmp_path: Path) -> None:
    with started(tmp_path, Scenario(blocks_follow_utilization=True), *length_flag(64), *flags) as run:
        metrics = run.wait_ready().ask("GET", "/metrics")[1]
        assert f'num_gpu_blocks="{blocks}"' in metrics


def test_blocks_depend_on_length_and_launch(tmp_path: Path) -> None:
    scenario = Scenario(blocks_from=((300, 20),), launch_jitter=(0, -30))
    assert scenario.starts(299)
    assert not scenario.starts(16 * 20)
    assert not scenario.starts(32, launch=2)
    with started(tmp_path, scenario, *length_flag(299)) as run:
        run.wait_ready()
    with started(tmp_path, scenario, *length_flag(299)) as run:
        assert run.wait() == 1
    assert [launch.number for launch in run.engine.launches()] == [1, 2]


# --- refusals and exits ---------------------------------------------------------------------------------------------

V0_REFUSAL = "The model's max seq len (5000) is larger than the maximum number of tokens"
V1_REFUSAL = "To serve at least one request with the models's max seq len (5000)"


@pytest.mark.parametrize(
    ("version", "generation", "status", "texts"),
    [
        ("0.5.3", "", 1, [f"ValueError: {V0_REFUSAL}"]),
        ("0.5.5", "", 0, [V0_REFUSAL, "RPCServer process died before responding to readiness probe"]),
        ("0.6.1", "", 0, [V0_REFUSAL, "RPCServer process died before responding to readiness probe"]),
        ("0.6.2", "", 1, [V0_REFUSAL, "RuntimeError: Engine process failed to start\n"]),
        ("0.7.3", "", 1, [V0_REFUSAL, "RuntimeError: Engine process failed to start. See stack trace"]),
        ("0.7.2", "V1", -9, [V1_REFUSAL, "GB KV cache", "EngineCore hit an exception", "Got fatal signal from worker"]),
        ("0.8.4", "", -9, [V1_REFUSAL, "GiB KV cache", "Based on the available memory, Try increasing"]),
        ("0.8.5", "", 1, [V1_REFUSAL, "RuntimeError: Engine core initialization failed. See root cause above.\n"]),
        ("0.9.2", "", 1, [V1_REFUSAL, "estimated maximum model length is 512. Try", "{'EngineCore_0': 1}"]),
        ("0.10.2", "", 1, ["(EngineCore_DP0 pid=", V1_REFUSAL, "{'EngineCore_DP0': 1}"]),
        (
            "0.33.0",
            "",
            1,
            ["model's max seq len (5000)", "estimated maximum model length is 496.", "{'EngineCore': 1}"],
        ),
    ],
)
def test_refusal_reads_and_exits_as_the_version(
    version: str, generation: str, status: int, texts: list[str], tmp_path: Path
) -> None:
    with started(tmp_path, Scenario(version=version, generation=generation), *length_flag(5000)) as run:
        assert run.wait() == status
        for text in texts:
            assert text in run.log
        wait_until(lambda: not run.engine.alive(), what="everything dead")


def test_version_0_5_4_hangs_after_its_refusal(tmp_path: Path) -> None:
    with started(tmp_path, Scenario(version="0.5.4"), *length_flag(5000)) as run:
        wait_until(lambda: V0_REFUSAL in run.log)
        wait_until(lambda: [role for role, _ in run.engine.alive()] == ["front"], what="the engine dead")
        assert run.process.poll() is None


def test_child_raises_and_parent_says_only_that_it_failed(tmp_path: Path) -> None:
    with started(tmp_path, Scenario(version="0.32.0"), *length_flag(5000)) as run:
        run.wait()
        assert run.log.count("To serve at least one request") == 2  # logged with a prefix, and again on stderr
        engine_lines = [line for line in run.log.splitlines() if line.startswith("(EngineCore pid=")]
        assert any("ERROR" in line and "To serve at least one request" in line for line in engine_lines)
        assert run.log.rstrip().splitlines()[-1].startswith("RuntimeError: Engine core initialization failed.")


def test_over_the_model_limit_is_a_config_error(tmp_path: Path) -> None:
    with started(tmp_path, Scenario(model_limit=400), *length_flag(401)) as run:
        assert run.wait() == 1
        expected = (
            "User-specified max_model_len (401) is greater than the derived max_model_len (max_position_embeddings"
        )
        assert f"Value error, {expected}=400 or model_max_length=None in model's config.json)" in run.log
        assert [launch.length for launch in run.engine.launches()] == [401]


def test_without_a_length_the_model_limit_is_tried(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "short", max_position_embeddings=256))
    with started(tmp_path, Scenario(), model=model) as run:
        card = run.wait_ready().ask("GET", "/v1/models")[1]["data"][0]
        assert (card["id"], card["max_model_len"]) == (model, 256)
        (launch,) = run.engine.launches()
        assert (launch.length, launch.is_default_length) == (256, True)


def test_auto_fit_promises_what_a_full_request_never_gets(tmp_path: Path) -> None:
    with started(tmp_path, Scenario(version="0.28.0"), "--max-model-len", "auto") as run:
        assert run.wait_ready().ask("GET", "/v1/models")[1]["data"][0]["max_model_len"] == 512
        assert "Auto-fit max_model_len: reduced from 131072 to 512" in run.log


def test_directory_without_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with started(tmp_path, Scenario(), model=str(tmp_path / "empty")) as run:
        assert run.wait() == 1
        assert "Invalid repository ID or local directory specified" in run.log


def test_unknown_flag_exits_2(tmp_path: Path) -> None:
    with started(tmp_path, Scenario(), "--no-such-flag", "1") as run:
        assert run.wait() == 2
        assert "unrecognized arguments: --no-such-flag" in run.log


# --- the server -----------------------------------------------------------------------------------------------------


def test_server_wants_its_key_and_its_model_name(tmp_path: Path) -> None:
    with started(tmp_path, Scenario(), *length_flag(64), "--served-model-name", "mine") as run:
        run.wait_ready()
        assert run.ask("GET", "/v1/models", key="wrong")[0] == 401
        assert run.ask("GET", "/v1/models")[1]["data"][0]["id"] == "mine"
        assert run.complete(5, model="other")[0] == 404
        assert run.complete(5, model="mine")[0] == 200
        status, body = run.complete(64)
        assert (status, body["error"]["code"]) == (400, 400)
        assert "This model's maximum context length is 64 tokens" in body["error"]["message"]
        assert run.ask("POST", "/v1/completions", {"prompt": [5000], "max_tokens": 1})[0] == 400
        assert run.engine.launches()[0].environment["VLLM_API_KEY"] == "(set)"
        assert "sesame" not in run.engine.journal_path.read_text(encoding="utf-8")


def test_v0_answers_a_prompt_it_ignored_without_a_token(tmp_path: Path) -> None:
    scenario = Scenario(version="0.6.3", kv_blocks=200)  # a watermark of 2 blocks
    with started(tmp_path, scenario, *length_flag(200 * 16)) as run:
        status, body = run.wait_ready().complete(200 * 16 - 1)
        assert (status, body["usage"]["completion_tokens"]) == (200, 0)
        assert "exceeds the capacity of block_manager" in run.log


def test_pooling_model_has_no_completions(tmp_path: Path) -> None:
    with started(tmp_path, Scenario(pooling=True), *length_flag(64)) as run:
        assert run.wait_ready().complete(5)[0] == 404
        assert run.ask("POST", "/v1/embeddings", {"input": [7] * 64})[0] == 200


def test_installed_version_is_the_scenario_s(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, Scenario(version="0.11.2"))
    code = "import importlib.metadata as m, vllm; print(m.version('vllm'), vllm.__version__)"
    assert _python(engine, code).stdout.split() == ["0.11.2", "0.11.2"]
    assert engine.launches() == ()


# --- vllm.LLM -------------------------------------------------------------------------------------------------------


def _python(engine: FakeEngine, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    added = {**os.environ, **engine.environment, **environment}
    return subprocess.run([sys.executable, "-c", code], env=added, capture_output=True, text=True, timeout=20)


BUILD = """
from vllm import LLM, SamplingParams
llm = LLM(model={model!r}, max_model_len={length}, tensor_parallel_size={tp}, enforce_eager=True)
cache = llm.llm_engine.vllm_config.cache_config
answer, = llm.generate([{{"prompt_token_ids": [7] * ({length} - 1)}}], SamplingParams(max_tokens=1, ignore_eos=True))
print("FITS", llm.llm_engine.model_config.max_model_len, cache.num_gpu_blocks, len(answer.outputs[0].token_ids))
"""


@pytest.mark.parametrize(("tp", "blocks"), [(1, 32), (2, 64)])
def test_llm_answers_and_tells_its_blocks(tp: int, blocks: int, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, Scenario())
    done = _python(engine, BUILD.format(model=str(write_model(tmp_path / "m")), length=496, tp=tp))
    assert f"FITS 496 {blocks} 1" in done.stdout
    assert done.returncode == 0
    wait_until(lambda: not engine.alive(), what="everything dead")
    assert engine.launches()[0].requests == (495,)


@pytest.mark.parametrize(
    ("version", "environment", "status", "text"),
    [
        ("0.6.3", {}, 1, "ValueError: The model's max seq len (5000)"),
        ("0.8.2", {}, -9, "models's max seq len (5000)"),
        ("0.32.0", {}, 1, "RuntimeError: Engine core initialization failed."),
        ("0.32.0", {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, 1, "ValueError: To serve at least one request"),
    ],
)
def test_llm_raises_as_the_version(
    version: str, environment: dict[str, str], status: int, text: str, tmp_path: Path
) -> None:
    engine = make_engine(tmp_path, Scenario(version=version))
    code = BUILD.format(model=str(write_model(tmp_path / "m")), length=5000, tp=1)
    done = _python(engine, code, **environment)
    assert done.returncode == status
    assert text in done.stdout + done.stderr
    assert "FITS" not in done.stdout


def test_llm_refuses_an_unknown_argument(tmp_path: Path) -> None:
    done = _python(make_engine(tmp_path, Scenario()), "from vllm import LLM; LLM(model='a/b', no_such_thing=1)")
    assert "TypeError: EngineArgs.__init__() got an unexpected keyword argument 'no_such_thing'" in done.stderr
