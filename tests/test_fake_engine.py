"""The fake engine keeps its promises: what other tests conclude from it rests on these."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Asked, FakeEngine, Fault, FaultKind, Scenario, make_engine, wait_until, write_model
from fake_nvml import MIB, build_stub, gpus, load_stub, nvml_environment, write_state
from hypothesis import given
from hypothesis import strategies as st

ENTRYPOINT = "vllm.entrypoints.openai.api_server"


class Started:
    """A running `python -m vllm.entrypoints.openai.api_server` and its log."""

    def __init__(self, engine: FakeEngine, directory: Path, *flags: str, model: str | None = None) -> None:
        self.engine = engine
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        model = model or str(write_model(directory / "model"))
        self.log_path = directory / "engine.log"
        command = [sys.executable, "-m", ENTRYPOINT, "--model", model, "--host", "127.0.0.1"]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *flags],
                env={**os.environ, **engine.environment, "VLLM_API_KEY": "sesame"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def ask(
        self, method: str, path: str, body: Any = None, key: str = "sesame", timeout: float = 10
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, json.dumps(body), {"Authorization": f"Bearer {key}"})
            answer = connection.getresponse()
            text = answer.read().decode()
            return answer.status, json.loads(text) if text.startswith(("{", "[")) else text
        finally:
            connection.close()

    def complete(self, tokens: int, timeout: float = 10, **more: Any) -> tuple[int, Any]:
        body = {"prompt": [7] * tokens, "max_tokens": 1, "ignore_eos": True, **more}
        return self.ask("POST", "/v1/completions", body, timeout=timeout)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log
        try:
            return self.ask("GET", "/health", timeout=0.5)[0] == 200
        except OSError:
            return False

    def wait_ready(self) -> Started:
        wait_until(self.is_ready, what="readiness")
        return self

    def wait(self) -> int:
        return self.process.wait(timeout=10)


@contextmanager
def started(directory: Path, scenario: Scenario, *flags: str, **more: Any) -> Iterator[Started]:
    environment = more.pop("environment", None)
    engine = make_engine(directory, scenario, environment)
    run = Started(engine, directory, *flags, **more)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()
        engine.end_all()


def length_flag(length: int) -> tuple[str, str]:
    return "--max-model-len", str(length)


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
        assert [role for role, _ in run.engine.alive()] == ["front", "EngineCore", "Worker_TP0", "Worker_TP1"]
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


# --- faults ---------------------------------------------------------------------------------------------------------

START_FAULTS = {
    FaultKind.CRASH: (1, "NCCL error"),
    FaultKind.EXIT: (1, "Engine core initialization failed"),
    FaultKind.SEGFAULT: (1, "{'EngineCore': -11}"),
    FaultKind.KILLED: (1, "{'EngineCore': -9}"),
    FaultKind.DEVICE_OOM: (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"),
    FaultKind.NO_KV_MEMORY: (1, "ValueError: No available memory for the cache blocks."),
    FaultKind.DEVICE_BUSY: (1, "on startup is less than desired GPU memory utilization (0.92"),
    FaultKind.PROFILE_ASSERT: (1, "AssertionError: Error in memory profiling."),
    FaultKind.SEQUENCE_SLOTS: (1, "max_num_seqs (256) exceeds available Mamba cache blocks (134)"),
    FaultKind.TOO_SHORT: (1, "Chunked MM input disabled"),
    FaultKind.BAD_CONFIG: (1, "must be divisible by tensor parallel size"),
    FaultKind.PORT_TAKEN: (1, "Address already in use"),
    FaultKind.NO_NEWLINE: (1, "Initializing a V1 LLM eng"),
    FaultKind.EXIT_ZERO: (0, ""),
}
AMOUNTS = {FaultKind.SEQUENCE_SLOTS: 134.0, FaultKind.EXIT: 7.0}


@pytest.mark.parametrize("kind", START_FAULTS)
def test_start_fault_ends_the_start(kind: FaultKind, tmp_path: Path) -> None:
    fault = Fault(kind, amount=AMOUNTS.get(kind, 0.0))
    status, text = START_FAULTS[kind]
    with started(tmp_path, Scenario(faults=(fault,)), *length_flag(64)) as run:
        assert run.wait() == status
        assert text in run.log
        left = [role for role, _ in run.engine.alive()]
        assert left == (["EngineCore"] if kind is FaultKind.EXIT_ZERO else [])


GRANDCHILDREN = (FaultKind.SETSID_GRANDCHILD, FaultKind.DOUBLE_FORK, FaultKind.CLEAN_ENV_GRANDCHILD)


@pytest.mark.parametrize("kind", GRANDCHILDREN)
def test_grandchild_outlives_the_group(kind: FaultKind, tmp_path: Path) -> None:
    with started(tmp_path, Scenario(faults=(Fault(kind),)), *length_flag(64)) as run:
        run.wait_ready()
        os.killpg(run.process.pid, signal.SIGKILL)
        run.wait()
        wait_until(lambda: [role for role, _ in run.engine.alive()] == [kind.value], what="only the grandchild alive")
        environ = Path(f"/proc/{run.engine.alive()[0][1]}/environ").read_bytes()
        assert (b"VLLM_API_KEY" in environ) == (kind is not FaultKind.CLEAN_ENV_GRANDCHILD)


SERVE_FAULTS = {
    FaultKind.COMPLETION_TOO_LONG: 400,
    FaultKind.COMPLETION_FAILS: 500,
    FaultKind.DIES_SERVING: 500,
    FaultKind.COMPLETION_EMPTY: 200,
}


@pytest.mark.parametrize("kind", SERVE_FAULTS)
def test_serve_fault_strikes_the_request(kind: FaultKind, tmp_path: Path) -> None:
    with started(tmp_path, Scenario(faults=(Fault(kind),)), *length_flag(64)) as run:
        status, body = run.wait_ready().complete(63)
        assert status == SERVE_FAULTS[kind]
        if kind is FaultKind.COMPLETION_EMPTY:
            assert body["usage"]["completion_tokens"] == 0
        if kind is FaultKind.DIES_SERVING:
            assert run.ask("GET", "/health")[0] == 503
            assert "EngineCore encountered a fatal error." in run.log
            run.wait()
            assert not run.engine.alive()


def test_completion_hangs_while_health_is_good(tmp_path: Path) -> None:
    with started(tmp_path, Scenario(faults=(Fault(FaultKind.COMPLETION_HANGS),)), *length_flag(64)) as run:
        run.wait_ready()
        with pytest.raises(TimeoutError):
            run.complete(5, timeout=0.3)
        assert run.ask("GET", "/health")[0] == 200


def test_health_fails_for_ever(tmp_path: Path) -> None:
    with started(tmp_path, Scenario(faults=(Fault(FaultKind.HEALTH_FAILS),)), *length_flag(64)) as run:
        wait_until(lambda: "Application startup complete." in run.log)
        assert run.ask("GET", "/health")[0] == 503


@pytest.mark.parametrize("stage", ["config", "download", "load", "compile", "profile", "kv_cache", "capture", "ready"])
def test_hang_stays_in_its_stage(stage: str, tmp_path: Path) -> None:
    with started(tmp_path, Scenario(faults=(Fault(FaultKind.HANG, stage),)), *length_flag(64)) as run:
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(0.3)
        assert "Application startup complete." not in run.log
        assert ("Graph capturing finished" in run.log) == (stage == "ready")


def test_worker_of_the_named_rank_is_struck(tmp_path: Path) -> None:
    fault = Fault(FaultKind.DEVICE_OOM, "profile", rank=1)
    with started(tmp_path, Scenario(faults=(fault,)), *length_flag(64), "-tp", "2") as run:
        assert run.wait() == 1
        struck = [line for line in run.log.splitlines() if "torch.OutOfMemoryError" in line and "Worker" in line]
        assert struck
        assert all(line.startswith("(Worker_TP1 pid=") for line in struck)
        assert "RuntimeError: Worker failed with error 'CUDA out of memory." in run.log
        wait_until(lambda: not run.engine.alive(), what="everything dead")


def test_fault_strikes_only_its_launches_and_lengths(tmp_path: Path) -> None:
    faults = (Fault(FaultKind.CRASH, launches=(2,)), Fault(FaultKind.TOO_SHORT, below_length=32))
    for length, status in ((64, None), (64, 1), (31, 1), (64, None)):
        with started(tmp_path, Scenario(faults=faults), *length_flag(length)) as run:
            if status is None:
                run.wait_ready()
            else:
                assert run.wait() == status


def test_ignored_sigterm_needs_sigkill(tmp_path: Path) -> None:
    with started(tmp_path, Scenario(faults=(Fault(FaultKind.IGNORE_SIGTERM),)), *length_flag(64)) as run:
        run.wait_ready()
        os.killpg(run.process.pid, signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(0.5)
        assert len(run.engine.alive()) == 2


def test_slow_death_takes_its_time(tmp_path: Path) -> None:
    with started(tmp_path, Scenario(faults=(Fault(FaultKind.SLOW_DEATH, amount=0.6),)), *length_flag(64)) as run:
        run.wait_ready()
        os.killpg(run.process.pid, signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(0.3)
        run.wait()
        wait_until(lambda: not run.engine.alive(), what="everything dead")


def test_refused_start_lingers(tmp_path: Path) -> None:
    with started(tmp_path, Scenario(faults=(Fault(FaultKind.LINGER, amount=30),)), *length_flag(5000)) as run:
        wait_until(lambda: "ValueError: To serve at least one request" in run.log)
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(0.3)


@pytest.mark.parametrize(
    ("kind", "least_bytes"), [(FaultKind.LOG_FLOOD, 3 * MIB), (FaultKind.GARBAGE, 16_384), (FaultKind.SLOW_DEATH, 0)]
)
def test_noise_does_not_stop_the_start(kind: FaultKind, least_bytes: int, tmp_path: Path) -> None:
    with started(tmp_path, Scenario(faults=(Fault(kind, amount=3),)), *length_flag(64)) as run:
        assert run.wait_ready().complete(63)[0] == 200
        assert run.log_path.stat().st_size > least_bytes


def test_host_memory_grows_to_its_cap(tmp_path: Path) -> None:
    fault = Fault(FaultKind.GROW_HOST_MEMORY, amount=40, rate=400)
    with started(tmp_path, Scenario(faults=(fault,)), *length_flag(64)) as run:
        wait_until(lambda: any(_resident_mib(pid) > 40 for _, pid in run.engine.alive()), what="growth")
        run.wait_ready()


def test_disk_fills_and_is_freed_with_the_process(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    fault = Fault(FaultKind.FILL_DISK, amount=4, rate=40, text=str(folder))
    with started(tmp_path, Scenario(faults=(fault,)), *length_flag(64)) as run:
        run.wait_ready()
        held = [link.stat().st_size for _, pid in run.engine.alive() for link in _open_files(pid, folder)]
        assert held == [4 * MIB]
        assert list(folder.iterdir()) == []


def _open_files(pid: int, folder: Path) -> list[Path]:
    links = Path(f"/proc/{pid}/fd").iterdir()
    return [link for link in links if os.readlink(link).startswith(str(folder))]


def test_crash_may_name_its_exception_and_words_may_precede_it(tmp_path: Path) -> None:
    faults = (
        Fault(FaultKind.SAYS, text="first line\nsecond line"),
        Fault(FaultKind.CRASH, text="torch.AcceleratorError: CUDA error: unspecified launch failure"),
    )
    with started(tmp_path, Scenario(faults=faults), *length_flag(64)) as run:
        assert run.wait() == 1
        assert "\nfirst line\nsecond line\n" in run.log
        assert "\ntorch.AcceleratorError: CUDA error: unspecified launch failure\n" in run.log


def test_length_may_be_lowered_in_silence(tmp_path: Path) -> None:
    with started(tmp_path, Scenario(silently_lowered_to=100), *length_flag(200)) as run:
        assert run.wait_ready().ask("GET", "/v1/models")[1]["data"][0]["max_model_len"] == 100


def _resident_mib(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") // MIB


def test_every_fault_is_shown_here() -> None:
    alone = {
        FaultKind.HANG,
        FaultKind.IGNORE_SIGTERM,
        FaultKind.SLOW_DEATH,
        FaultKind.LINGER,
        FaultKind.LOG_FLOOD,
        FaultKind.GARBAGE,
        FaultKind.GROW_HOST_MEMORY,
        FaultKind.FILL_DISK,
        FaultKind.SAYS,
        FaultKind.COMPLETION_HANGS,
        FaultKind.HEALTH_FAILS,
    }
    assert {*START_FAULTS, *GRANDCHILDREN, *SERVE_FAULTS, *alone} == set(FaultKind)


def test_no_process_outlives_the_scenario_s_lifetime(tmp_path: Path) -> None:
    scenario = Scenario(lifetime_seconds=0.7, faults=tuple(Fault(kind) for kind in GRANDCHILDREN))
    with started(tmp_path, scenario, *length_flag(64)) as run:
        wait_until(lambda: len(run.engine.alive()) == 5, what="front, engine and three grandchildren")
        wait_until(lambda: not run.engine.alive(), what="everything dead")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (FaultKind.CRASH, "NCCL error"),
        (FaultKind.SEGFAULT, "Worker proc Worker_TP0 died unexpectedly (exit code: -11), shutting down executor."),
        (FaultKind.DEVICE_OOM, "CUDA out of memory. Tried to allocate"),
    ],
)
def test_worker_ends_while_a_request_runs(kind: FaultKind, text: str, tmp_path: Path) -> None:
    with started(tmp_path, Scenario(faults=(Fault(kind, "serve"),)), *length_flag(64), "-tp", "2") as run:
        assert run.wait_ready().complete(63)[0] == 500
        assert text in run.log
        assert "EngineCore encountered a fatal error." in run.log


def test_slow_stages_show_their_progress(tmp_path: Path) -> None:
    seconds = {"download": 0.2, "load": 0.2, "capture": 0.1, "profile": 0.1}
    with started(tmp_path, Scenario(stage_seconds=seconds), *length_flag(64)) as run:
        run.wait_ready()
        assert "\rLoading safetensors checkpoint shards:  50%|" in run.log_path.read_bytes().decode()


def test_warm_cache_changes_the_blocks(tmp_path: Path) -> None:
    environment = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    found = []
    for _ in range(2):
        with started(tmp_path, Scenario(warm_blocks=3), *length_flag(64), environment=environment) as run:
            found.append('num_gpu_blocks="35"' in run.wait_ready().ask("GET", "/metrics")[1])
    assert found == [False, True]


def test_prefix_is_coloured_even_into_a_file(tmp_path: Path) -> None:
    for version, environment, is_coloured in (
        ("0.11.0", {"NO_COLOR": "1"}, True),
        ("0.15.0", {"NO_COLOR": "1"}, False),
        ("0.16.0", {}, False),
    ):
        directory = tmp_path / version
        with started(directory, Scenario(version=version), *length_flag(64), environment=environment) as run:
            run.wait_ready()
            assert ("\x1b[1;36m(EngineCore" in run.log) == is_coloured


def test_good_log_holds_decoys(tmp_path: Path) -> None:
    with started(tmp_path, Scenario(), *length_flag(64)) as run:
        run.wait_ready()
        assert "ValueError: Tokenizer not available" in run.log
        assert "out of memory" in run.log


# --- memory on made-up GPUs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_stub(tmp_path_factory.getbasetemp())
    load_stub(folder)
    return folder


def _used_mib(state: Path) -> list[int]:
    import pynvml

    os.environ["FAKE_NVML_STATE"] = str(state)
    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        return [pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2).used // MIB for handle in handles]
    finally:
        pynvml.nvmlShutdown()
        del os.environ["FAKE_NVML_STATE"]


def test_engine_holds_gpu_memory_while_it_lives(stub: Path, tmp_path: Path) -> None:
    state = write_state(tmp_path / "gpus", gpus(3, used_mib=5))
    scenario = Scenario(gpu_mib=70_000, gpu_hold_seconds=0.5)
    environment = {**nvml_environment(stub, state), "CUDA_VISIBLE_DEVICES": "2,0"}
    with started(tmp_path, scenario, *length_flag(64), "-tp", "2", environment=environment) as run:
        run.wait_ready()
        assert _used_mib(state) == [70_005, 5, 70_005]
        run.engine.end_all()
        run.wait()
        assert _used_mib(state) == [70_005, 5, 70_005]  # dead, and the driver takes its time
        wait_until(lambda: _used_mib(state) == [5, 5, 5], what="memory back")


def test_engine_refuses_a_gpu_that_others_use(stub: Path, tmp_path: Path) -> None:
    state = write_state(tmp_path / "gpus", gpus(1, used_mib=90_000))
    environment = nvml_environment(stub, state)
    with started(tmp_path, Scenario(gpu_mib=1000), *length_flag(64), environment=environment) as run:
        assert run.wait() == 1
        assert "Free memory on device cuda:0 (51.92/140.40 GiB) on startup is less than desired" in run.log
