"""Logs that are cut inside a traceback: where it was raised, and which part of the log to bring."""

from __future__ import annotations

import pytest

from prober.advice.explain import explain, render
from prober.logs.classify import Reader, classify
from prober.records import Outcome, Stage, Verdict

V1 = "(EngineCore_DP0 pid=12) ERROR 04-15 06:30:01 [core.py:700] "
V0 = "ERROR 04-15 06:30:01 engine.py:366] "
OPENS = f"{V1}EngineCore failed to start.\n{V1}Traceback (most recent call last):\n"


def frame(function: str, source: str = "return func(*args, **kwargs)", header: str = V1) -> str:
    return f'{header}  File "/opt/vllm/somewhere.py", line 12, in {function}\n{header}    {source}\n'


def read(*parts: str) -> Verdict:
    return classify("".join(parts).encode())


@pytest.mark.parametrize(
    ("functions", "stage"),
    [
        (("init_device", "initialize_model_parallel"), Stage.CONFIG),
        (("load_model", "get_model", "initialize_model"), Stage.LOAD),
        (("_initialize_kv_caches", "determine_available_memory", "profile_run", "_dummy_run"), Stage.PROFILE),
        (("determine_num_available_blocks", "profile_run", "execute_model"), Stage.PROFILE),
        (("determine_available_memory", "profile_cudagraph_memory", "capture_begin"), Stage.PROFILE),
        (("initialize_from_config", "initialize_kv_cache"), Stage.KV_CACHE),
        (("initialize_cache",), Stage.KV_CACHE),
        (("initialize_from_config", "compile_or_warm_up_model", "capture_model", "_dummy_run"), Stage.CAPTURE),
        (("profile_run", "_dummy_sampler_run"), Stage.PROFILE),
        (("run_busy_loop", "_process_engine_step"), Stage.SERVE),
    ],
)
@pytest.mark.parametrize("header", [V1, V0, "", "[rank0]: ", "vllm-1  | " + V1])
def test_frames_tell_the_stage_where_the_last_line_is_missing(
    functions: tuple[str, ...], stage: Stage, header: str
) -> None:
    found = read(*(frame(function, header=header) for function in functions))
    assert (found.outcome, found.stage, found.rule) == (Outcome.CRASH, stage, "traceback")
    assert found.evidence.endswith(functions[-1])


def test_what_a_frame_calls_tells_the_stage_too() -> None:
    found = read(OPENS, frame("_initialize_kv_caches", "memory = self.model_executor.determine_available_memory()"))
    assert (found.outcome, found.stage) == (Outcome.CRASH, Stage.PROFILE)
    found = read(frame("initialize_from_config", 'self.collective_rpc("compile_or_warm_up_model")'))
    assert found.stage is Stage.CAPTURE


def test_a_notebook_s_frames_tell_the_stage() -> None:
    text = "File ~/env/vllm/otter.py:411, in OtterForCausalLM.load_weights(self, weights)\nKeyError: 'otter.weight'\n"
    assert (read(text).rule, read(text).stage) == ("exception", Stage.LOAD)


@pytest.mark.parametrize("name", ["reload_weights_of", "initialize_model_parallel", "unload_model", "load_models"])
def test_names_that_only_look_alike_tell_nothing(name: str) -> None:
    assert read(frame(name)).stage is not Stage.LOAD


def test_the_frames_below_a_complaint_or_an_error_place_it() -> None:
    assert read(OPENS, frame("load_model")).stage is Stage.LOAD
    error = f'{V0}AttributeError("an otter has no tail")\n{V0}Traceback (most recent call last):\n'
    found = read(error, frame("run_engine_loop", header=V0), frame("engine_step", header=V0))
    assert (found.outcome, found.stage, found.rule) == (Outcome.CRASH, Stage.SERVE, "exception")


def test_a_traceback_that_ends_names_its_error() -> None:
    for error in ("ValueError: an otter", "AssertionError", "NotImplementedError", "torch._x.BackendCompilerFailed: y"):
        found = read(OPENS, frame("profile_run"), f"{V1}{error}\n", "RuntimeError: Engine core initialization failed.")
        assert (found.rule, found.evidence, found.stage) == ("exception", error, Stage.PROFILE)


def test_what_follows_a_failure_does_not_take_its_place() -> None:
    found = read(OPENS, frame("load_model"), f"{V1}KeyError: 'otter'\n", "asyncio.exceptions.CancelledError\n")
    assert found.evidence == "KeyError: 'otter'"


def test_a_start_that_goes_on_after_a_traceback_is_no_failure() -> None:
    text = frame("load_model") + "INFO 04-15 06:30:01 [x.py:1] Available KV cache memory: 4.01 GiB\n"
    assert read(text).outcome is Outcome.UNFINISHED


@pytest.mark.parametrize("level", ["INFO", "WARNING", "DEBUG"])
def test_a_traceback_that_vllm_calls_harmless_is_none(level: str) -> None:
    assert read(frame("load_model", header=V1.replace("ERROR", level))).outcome is Outcome.UNFINISHED


def test_a_dump_of_stacks_is_no_failure() -> None:
    text = 'Thread 0x00007f (most recent call first):\n  File "/opt/vllm/x.py", line 12 in capture_model\n'
    assert read(text).outcome is Outcome.UNFINISHED


def test_a_log_that_grows_is_not_read_as_cut() -> None:
    reader = Reader()
    reader.feed(frame("load_model").encode())
    assert reader.verdict().outcome is Outcome.UNFINISHED


def test_explain_says_which_part_to_bring() -> None:
    parent = '(APIServer pid=1)   File "/opt/vllm/api_server.py", line 5, in run_server\n'
    wrapped = "(EngineCore pid=5) Exception: WorkerProc initialization failed due to an exception\n"
    source = '(APIServer pid=1)     raise RuntimeError("Engine core initialization failed. "\n'
    for text, sentence, action in (
        (OPENS + frame("capture_model"), "inside a traceback, raised while capturing", "the end of this traceback"),
        (f"{V1}EngineCore failed to start.\n", "only wraps a cause", "the part of the log after this line"),
        (wrapped + parent, "only wraps a cause", "the part of the log before this line"),
        (parent + source + "(APIServer pid=1) RuntimeError: Eng", "only wraps", "the part of the log before this line"),
    ):
        shown = render(explain([text.encode()]))
        assert sentence in shown
        assert f"provide {action}" in shown


@pytest.mark.parametrize(
    "text",
    [
        f"{V0}Error in preprocessing prompt inputs\n" + frame("render_completion_request"),
        f"{V0}ValueError: This model's maximum context length is 4096 tokens and your request has 5000 input tokens.\n",
        frame("create_chat_completion", header="(APIServer pid=1) ERROR 04-15 06:30:01 [x.py:1] "),
        "ERROR:    Exception in ASGI application\nTraceback (most recent call last):\n" + frame("run_asgi", header=""),
    ],
)
def test_a_request_s_own_trouble_is_no_failed_start(text: str) -> None:
    assert read(text).outcome is Outcome.READY


def test_a_crash_that_a_request_caused_is_of_serving() -> None:
    found = read("RuntimeError: CUDA error: an illegal memory access was encountered\n", frame("run_asgi", header=""))
    assert (found.rule, found.stage) == ("illegal_access", Stage.SERVE)


def test_memory_that_ran_out_in_warming_up_s_own_dummy_run_is_of_that_step() -> None:
    oom = f"{V1}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    for functions, stage in (
        (("compile_or_warm_up_model", "capture_model", "_dummy_run"), Stage.CAPTURE),
        (("determine_available_memory", "profile_run", "_dummy_run"), Stage.PROFILE),
        (("load_model", "create_weights"), Stage.LOAD),
    ):
        found = read(OPENS, *map(frame, functions), oom)
        assert (found.outcome, found.stage) == (Outcome.DEVICE_OOM, stage)


def test_memory_that_ran_out_in_a_log_without_any_step_is_placed_by_the_traceback_below() -> None:
    oom = f"{V0}CUDA out of memory. Tried to allocate 2.00 GiB.\n{V0}Traceback (most recent call last):\n"
    found = read(oom)
    assert (found.stage, found.rule) == (Stage.PROFILE, "device_oom_somewhere")
    assert "does not show at which step" in render(explain([oom.encode()]))
    found = read(oom, frame("load_model", header=V0))
    assert (found.stage, found.rule) == (Stage.LOAD, "device_oom")


def test_a_request_in_the_log_means_that_it_serves() -> None:
    oom = f"{V0}OutOfMemoryError('CUDA out of memory. Tried to allocate 1.00 GiB.\n"
    for line in (
        "INFO 04-15 06:30:01 engine.py:275] Added request 7e57.",
        'INFO: 10.0.0.1:1 - "POST /v1/completions HTTP/1.1"',
    ):
        assert read(f"{line}\n{oom}").stage is Stage.SERVE


def test_second_traceback_tells_its_own_stage_where_no_prefix_tells_its_header_apart() -> None:
    header = "Traceback (most recent call last):\n"
    first = header + frame("load_weights", header="") + "OtterError: no otter\n"
    assert read(first, header, frame("capture_model", header=""), "CUDA out of memory. x\n").stage is Stage.CAPTURE


def test_what_a_second_logging_error_quotes_is_no_failure() -> None:
    opens, closes = "--- Logging error ---\n", "Arguments: (1,)\n"
    assert read(opens, closes, opens, "CUDA out of memory. Tried to allocate 2.00 GiB\n").outcome is Outcome.UNFINISHED
