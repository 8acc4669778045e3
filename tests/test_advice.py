"""The ways out: each with its own number, the right direction for opposite failures, nothing promised beyond."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prober.advice import causes, estimate
from prober.advice.advise import fixes
from prober.advice.fixes import Fix
from prober.logs.rules import RULES
from prober.records import Figures, Outcome, Stage, Verdict

V1 = Figures(
    requested_max_model_len=65536,
    needed_gib=8.0,
    available_gib=6.0,
    estimated_max_len=49152,
    block_size=16,
    total_gib=24.0,
    gpu_memory_utilization=0.85,
    weights_gib=10.0,
    activation_gib=1.0,
    cuda_graph_gib=0.5,
    max_num_batched_tokens=8192,
    vllm_version="0.30.0",
)


def of(outcome: Outcome, figures: Figures, stage: Stage = Stage.KV_CACHE, **more: str) -> tuple[Fix, ...]:
    return fixes(Verdict(outcome, stage, figures=figures, **more))  # type: ignore[arg-type]


def with_flag(ways: tuple[Fix, ...], flag: str) -> Fix:
    return next(fix for fix in ways if fix.flag == flag)


def changed(**more: object) -> Figures:
    return replace(V1, **more)  # type: ignore[arg-type]


def test_the_length_that_fits_comes_first_and_is_vllm_s_own_estimate_where_that_is_served() -> None:
    assert of(Outcome.KV_TOO_SMALL, V1)[0] == Fix(
        "ask for a shorter length", "--max-model-len", 49152, 49152, "what this run's KV memory holds"
    )


def test_a_version_that_never_grants_the_last_block_gets_one_block_less() -> None:
    for version in ("0.8.3", "0.28.0", None):
        assert of(Outcome.KV_TOO_SMALL, changed(vllm_version=version))[0].value == 49152 - 16
    for version in ("0.29.0", "0.8.2"):
        assert of(Outcome.KV_TOO_SMALL, changed(vllm_version=version))[0].value == 49152


def test_v0_s_watermark_is_left_out() -> None:
    figures = Figures(requested_max_model_len=40000, max_tokens_in_cache=32000, vllm_version="0.6.0")
    assert of(Outcome.KV_TOO_SMALL, figures)[0].value == (2000 - 20) * 16


def test_the_fraction_that_the_wanted_length_needs() -> None:
    fix = with_flag(of(Outcome.KV_TOO_SMALL, V1), "--gpu-memory-utilization")
    assert (fix.value, fix.expected_max_model_len) == (0.94, 65536)  # 0.85 + 2 / 24, rounded up


def test_a_fraction_above_095_is_refused_with_the_reason() -> None:
    ways = of(Outcome.KV_TOO_SMALL, changed(gpu_memory_utilization=0.9))
    assert not [fix for fix in ways if fix.flag == "--gpu-memory-utilization"]
    assert ways[-1].action == "do not raise gpu_memory_utilization"
    assert "0.99" in ways[-1].why


def test_the_default_fraction_is_the_version_s() -> None:
    assert estimate.utilization(Figures(vllm_version="0.19.1")) == 0.90
    assert estimate.utilization(Figures(vllm_version="0.20.0")) == 0.92


def test_every_other_way_has_its_own_length_and_none_promises_more_than_was_asked() -> None:
    ways = of(Outcome.KV_TOO_SMALL, V1)
    assert with_flag(ways, "--kv-cache-dtype").expected_max_model_len == 65536
    assert with_flag(ways, "--max-num-batched-tokens").value == 4096
    assert with_flag(ways, "--max-num-batched-tokens").expected_max_model_len == 53248
    assert with_flag(ways, "--enforce-eager").expected_max_model_len == 53248
    assert with_flag(ways, "--tensor-parallel-size").value == 2
    assert all(fix.expected_max_model_len is None or fix.expected_max_model_len <= 65536 for fix in ways)


def test_no_kv_memory_wants_a_higher_fraction_and_memory_lost_at_capture_a_lower_one() -> None:
    figures = Figures(available_gib=-0.5, total_gib=24.0, gpu_memory_utilization=0.8)
    higher = with_flag(of(Outcome.NO_KV_MEMORY, figures), "--gpu-memory-utilization").value
    lower = with_flag(of(Outcome.DEVICE_OOM, figures, Stage.CAPTURE), "--gpu-memory-utilization").value
    assert isinstance(higher, float)
    assert isinstance(lower, float)
    assert higher > 0.8 > lower


def test_weights_larger_than_the_device_leave_no_setting() -> None:
    ways = of(Outcome.NO_KV_MEMORY, Figures(weights_gib=23.5, total_gib=24.0))
    assert "no setting can work" in ways[0].why
    assert not [fix for fix in ways if fix.flag == "--gpu-memory-utilization"]


def test_weights_that_do_not_load_are_not_cured_by_a_length() -> None:
    ways = of(Outcome.DEVICE_OOM, V1, Stage.LOAD)
    assert not [fix for fix in ways if fix.flag == "--max-model-len"]
    assert with_flag(ways, "--tensor-parallel-size").value == 2


def test_who_holds_the_memory_is_named() -> None:
    evidence = "Process 71 has 20.50 GiB memory in use. Including non-PyTorch memory, this process has 3.00 GiB memory"
    ways = of(Outcome.DEVICE_OOM, Figures(), Stage.LOAD, evidence=evidence)
    assert ways[0].why == "process 71 holds 20.50 GiB"


def test_heads_decide_the_tensor_parallel_size() -> None:
    evidence = "Total number of attention heads (28) must be divisible by tensor parallel size (8)"
    ways = of(Outcome.BAD_CONFIG, Figures(tensor_parallel_size=8), evidence=evidence, rule="attention_heads")
    assert ways[0].value == 4  # not 7: KV heads, the vocabulary and the MLP are multiples of powers of two
    assert "1, 2, 4, 7, 14" in ways[0].why


@pytest.mark.parametrize(("heads", "asked", "best"), [(12, 8, 4), (40, 3, 2), (25, 2, 1), (64, 6, 4), (45, 6, 1)])
def test_no_more_devices_are_advised_than_were_asked_for(heads: int, asked: int, best: int) -> None:
    evidence = f"Total number of attention heads ({heads}) must be divisible by tensor parallel size ({asked})"
    figures = Figures(tensor_parallel_size=asked)
    assert of(Outcome.BAD_CONFIG, figures, evidence=evidence, rule="attention_heads")[0].value == best


def test_a_fraction_that_is_at_the_limit_already_is_not_raised() -> None:
    for outcome in (Outcome.NO_KV_MEMORY, Outcome.KV_TOO_SMALL):
        ways = of(outcome, Figures(gpu_memory_utilization=0.98, available_gib=-1.0))
        assert not [fix for fix in ways if fix.flag == "--gpu-memory-utilization"]
        assert ways[-1].why.startswith("it is 0.98 already")


def test_memory_that_the_process_holds_itself_is_not_to_be_freed() -> None:
    evidence = "GPU 0 has a total capacity of 24.00 GiB of which 9.00 MiB is free. this process has 23.10 GiB memory"
    for stage in (Stage.LOAD, Stage.PROFILE):
        ways = of(Outcome.DEVICE_OOM, Figures(total_gib=24.0), stage, evidence=evidence)
        assert "free device memory" not in [fix.action for fix in ways]
    assert of(Outcome.DEVICE_OOM, Figures(total_gib=48.0), Stage.LOAD, evidence=evidence)[0].action.startswith("free")


def test_a_process_that_lists_itself_is_not_to_be_freed() -> None:
    alone = "Process 71 has 20.50 GiB memory in use."
    torch = "Process 71 has 20.50 GiB memory in use. Of the allocated memory 19.00 GiB is allocated by PyTorch"
    for evidence in (alone, torch):
        ways = of(Outcome.DEVICE_OOM, Figures(total_gib=24.0), Stage.LOAD, evidence=evidence)
        assert "free device memory" not in [fix.action for fix in ways]
    ways = of(
        Outcome.DEVICE_OOM,
        Figures(total_gib=24.0),
        Stage.LOAD,
        evidence=f"Process 5 has 3.00 GiB memory in use. {torch}",
    )
    assert ways[0].why == "process 5 holds 3.00 GiB"


def test_a_cache_of_nothing_promises_no_length() -> None:
    figures = Figures(available_gib=-0.5, total_gib=24.0, gpu_memory_utilization=0.8, requested_max_model_len=4096)
    fix = with_flag(of(Outcome.NO_KV_MEMORY, figures), "--gpu-memory-utilization")
    assert (fix.value, fix.expected_max_model_len) == (0.95, None)
    assert fix.why.startswith("at least 0.51 GiB are missing")


def test_a_gpu_s_capability_is_told() -> None:
    evidence = "x is not supported for the current GPU. Minimum capability: 100. Current capability: 86."
    ways = of(Outcome.BAD_CONFIG, Figures(), evidence=evidence, rule="quantization")
    assert ways[0].why == "this GPU has compute capability 8.6, and it needs 10.0"


def test_memory_that_ran_out_somewhere_is_advised_for_every_step() -> None:
    ways = of(Outcome.DEVICE_OOM, Figures(), Stage.PROFILE, rule="device_oom_somewhere")
    actions = [fix.action for fix in ways]
    assert {"free device memory", "batch fewer tokens", "use quantized weights"} <= set(actions)


def test_host_memory_that_runs_out_over_the_weights_is_not_a_matter_of_sequences() -> None:
    assert of(Outcome.HOST_OOM, Figures(), Stage.LOAD)[0].action == "give the process more host memory"
    assert of(Outcome.HOST_OOM, Figures(), Stage.CAPTURE)[0].flag == "--max-num-seqs"


@pytest.mark.parametrize(
    ("stage", "evidence", "action"),
    [
        (Stage.CONFIG, "ImportError: /opt/x/_C.abi3.so: undefined symbol: _ZN9otter", "fix the installation"),
        (Stage.CONFIG, "ImportError: libotter.so.13: cannot open shared object file", "fix the installation"),
        (
            Stage.LOAD,
            "KeyError: 'layers.0.mlp.otter_proj.weight'",
            "check that this version of vLLM fits this checkpoint",
        ),
        (Stage.COMPILE, "torch._inductor.exc.InductorError: AttributeError: otter", "start without compilation"),
        (Stage.CONFIG, "PermissionError: [Errno 13] Permission denied: '/x'", "correct the path or its permissions"),
        (Stage.PROFILE, "RuntimeError: an otter", "search for this error and your version of vLLM"),
    ],
)
def test_an_error_that_no_rule_knows_is_advised_by_what_it_says(stage: Stage, evidence: str, action: str) -> None:
    ways = of(Outcome.CRASH, Figures(), stage, evidence=evidence, rule="exception")
    assert [fix.action for fix in ways] == [action]


def test_every_rule_that_ends_a_start_has_a_way_out_of_its_own() -> None:
    plain = [rule.name for rule in RULES if rule.outcome is Outcome.CRASH and rule.name not in causes.CRASHES]
    assert not plain


def test_slots_and_limits_are_the_message_s_own_numbers() -> None:
    assert of(Outcome.SEQUENCE_SLOTS, Figures(sequence_slots=134))[0].value == 134
    assert of(Outcome.OVER_MODEL_LIMIT, Figures(model_limit=32768))[0].value == 32768


def test_a_busy_device_s_free_share_is_a_fraction_that_starts() -> None:
    ways = of(Outcome.DEVICE_BUSY, Figures(free_gib=11.03, total_gib=23.52), Stage.CONFIG)
    assert with_flag(ways, "--gpu-memory-utilization").value == 0.46


def test_the_cpu_backend_s_space_is_an_environment_variable() -> None:
    evidence = "… Try increasing `VLLM_CPU_KVCACHE_SPACE` or decreasing `max_model_len`"
    figures = Figures(requested_max_model_len=1_000_000, max_tokens_in_cache=524_288)
    ways = of(Outcome.KV_TOO_SMALL, figures, evidence=evidence)
    assert [fix.flag for fix in ways] == ["--max-model-len", "VLLM_CPU_KVCACHE_SPACE"]


def test_every_failure_has_a_way_out_and_what_did_not_fail_has_none() -> None:
    for outcome in Outcome:
        is_failure = outcome not in (Outcome.FITS, Outcome.READY, Outcome.UNFINISHED)
        assert bool(of(outcome, Figures())) == is_failure, outcome


def test_a_cpu_without_room_for_its_cache_needs_host_memory() -> None:
    verdict = Verdict(Outcome.NO_KV_MEMORY, Stage.KV_CACHE, "Try increasing `VLLM_CPU_KVCACHE_SPACE`", figures=V1)
    assert [fix.flag for fix in fixes(verdict)] == ["VLLM_CPU_KVCACHE_SPACE"]


def test_a_warm_up_that_ran_out_of_memory_wants_fewer_sequences_first() -> None:
    ways = of(Outcome.DEVICE_OOM, V1, Stage.CAPTURE, rule="warmup_oom")
    assert ways[0].flag == "--max-num-seqs"
    assert sum(fix.flag == "--max-num-seqs" for fix in ways) == 1


def test_a_measurement_that_others_disturbed_is_repeated_and_nothing_is_changed() -> None:
    (way,) = of(Outcome.DEVICE_BUSY, V1, Stage.PROFILE)
    assert (way.flag, "quiet device" in way.action) == (None, True)


def test_a_length_below_the_prefill_threshold_is_made_longer() -> None:
    (way,) = of(Outcome.TOO_SHORT, V1, Stage.CONFIG, rule="prefill_threshold")
    assert (way.flag, way.value) == ("--max-model-len", None)


def test_v0_s_missing_memory_follows_from_its_tokens_and_its_cache() -> None:
    figures = Figures(requested_max_model_len=40_000, max_tokens_in_cache=32_000, available_gib=4.0)
    assert estimate.missing_gib(figures) == pytest.approx(1.0)
    assert estimate.missing_gib(replace(figures, available_gib=None)) is None
