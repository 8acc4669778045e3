"""The fake engine fails as it is told: what the fault table of other tests concludes rests on this."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from fake_engine import Fault, FaultKind, Scenario, wait_until
from fake_nvml import MIB
from started import length_flag, started

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


@pytest.mark.parametrize("stage", ["config", "load", "kv_cache", "capture", "ready"])
def test_hang_stays_in_its_stage(stage: str, tmp_path: Path) -> None:
    with started(tmp_path, Scenario(faults=(Fault(FaultKind.HANG, stage),)), *length_flag(64)) as run:
        if stage == "ready":
            wait_until(lambda: "Graph capturing finished" in run.log, what="everything before the stage")
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(0.3)
        if stage == "ready":  # as far as it comes; on a busy machine later than that
            wait_until(lambda: "Graph capturing finished" in run.log)
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
        wait_until(lambda: any(_most_resident_mib(pid) > 40 for _, pid in run.engine.alive()), what="growth")
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


def _most_resident_mib(pid: int) -> int:
    """The most it ever held, as the kernel remembers it: the moment itself is short and easily missed."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


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
    scenario = Scenario(lifetime_seconds=0.5, faults=tuple(Fault(kind) for kind in GRANDCHILDREN))
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
