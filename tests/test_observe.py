"""What a trial says to the search, and what it is a trial of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prober.controller import combination_key, state_key
from prober.flags import parse
from prober.observe import observe, switches
from prober.records import Combination, Figures, Machine, Outcome, Stage, Trial, UsageError, Verdict, Verify
from prober.search import Reading
from prober.station import unless_held

MACHINE = Machine("GPU", "cuda", "m")


def trial(outcome: Outcome, stage: Stage = Stage.SERVE, verify: Verify = Verify.FULL, **facts: object) -> Trial:
    figures = Figures(**facts)  # type: ignore[arg-type]  # names of figures
    return Trial("t", "c", "s", 4096, False, verify, Verdict(outcome, stage, figures=figures), 1.0, "2026-01-01")


def reading(one: Trial, verify: Verify = Verify.FULL) -> Reading | None:
    seen = observe(one, verify)
    return None if seen is None else seen.reading


@pytest.mark.parametrize("outcome", [Outcome.CRASH, Outcome.TIMEOUT, Outcome.DEVICE_BUSY, Outcome.SEQUENCE_SLOTS])
def test_what_could_not_tell_never_moves_the_bracket(outcome: Outcome) -> None:
    assert reading(trial(outcome)) is Reading.UNKNOWN


def test_host_out_of_memory_is_too_long_only_where_the_trial_took_it() -> None:
    one = trial(Outcome.HOST_OOM)
    assert reading(one) is Reading.UNKNOWN
    assert reading(replace(one, verdict=replace(one.verdict, rule="guard"))) is Reading.TOO_LONG
    assert reading(replace(one, verdict=replace(one.verdict, rule="guard_shared"))) is Reading.UNKNOWN


def test_device_out_of_memory_depends_on_the_stage() -> None:
    assert reading(trial(Outcome.DEVICE_OOM, Stage.LOAD)) is Reading.NO_LENGTH
    assert reading(trial(Outcome.DEVICE_OOM, Stage.CAPTURE)) is Reading.TOO_LONG
    assert reading(trial(Outcome.DEVICE_OOM, Stage.CONFIG)) is Reading.UNKNOWN


def test_weaker_proof_says_nothing_and_a_stronger_demand_that_failed_still_started() -> None:
    assert reading(trial(Outcome.FITS, verify=Verify.SHORT)) is None
    assert reading(trial(Outcome.UNSERVABLE, verify=Verify.FULL), Verify.NONE) is Reading.SERVES
    assert reading(trial(Outcome.UNSERVABLE, verify=Verify.SHORT), Verify.SHORT) is Reading.TOO_LONG


def test_blocks_of_a_start_suggest_the_ceiling() -> None:
    fitted = observe(trial(Outcome.FITS, gpu_blocks=32, block_size=128), Verify.FULL)
    stuck = observe(trial(Outcome.UNSERVABLE, gpu_blocks=32, block_size=128), Verify.FULL)
    hybrid = observe(trial(Outcome.FITS, gpu_blocks=512, block_size=128, kv_cache_tokens=49_504), Verify.FULL)
    assert fitted is not None
    assert stuck is not None
    assert hybrid is not None
    counted = trial(
        Outcome.FITS, gpu_blocks=8192, block_size=128, kv_cache_tokens=1_017_068, requested_max_model_len=4097
    )
    odd = observe(counted, Verify.FULL)
    assert odd is not None
    assert odd.hints[0] == 8191 * 128, "a last block that is not full makes no hybrid"
    assert (fitted.hints[0], stuck.hints[0], hybrid.hints) == (3968, 3969, (49_408,))
    waits = trial(
        Outcome.UNSERVABLE, gpu_blocks=512, block_size=128, kv_cache_tokens=49_632,
        requested_max_model_len=49_536,
    )  # fmt: skip
    uncounted = observe(waits, Verify.FULL)
    assert uncounted is not None
    assert uncounted.hints == (49_409, 49_408), "its log counts the block that is never granted"


@pytest.mark.parametrize(
    ("version", "flags", "expected"),
    [
        ("0.6.3", (), (32_768,)),
        ("0.6.3", ("--enable-chunked-prefill",), ()),
        ("0.4.3", (), ()),
        ("0.11.0", (), ()),
        (None, (), ()),
    ],
)
def test_regimes_of_v0(version: str | None, flags: tuple[str, ...], expected: tuple[int, ...]) -> None:
    assert switches(version, flags) == expected


def test_other_environment_other_state() -> None:
    assert state_key(MACHINE, ("VLLM_CPU_KVCACHE_SPACE=8",)) != state_key(MACHINE)
    assert combination_key(Combination("/a/m"), "config-1") == combination_key(Combination("/b/m"), "config-1")
    assert combination_key(Combination("/a/m"), "config-1") != combination_key(Combination("/a/m"), "config-2")


def test_refusal_after_which_memory_stays_taken_says_nothing() -> None:
    verdict = Verdict(Outcome.DEVICE_OOM, Stage.LOAD, "CUDA out of memory")
    assert unless_held(verdict, 0) == verdict
    assert unless_held(verdict, None) == verdict
    assert unless_held(verdict, 4096).outcome is Outcome.DEVICE_BUSY
    assert unless_held(replace(verdict, outcome=Outcome.FITS), 4096).outcome is Outcome.FITS


@pytest.mark.parametrize(
    "word", ["--tensor-parallel", "--gpu-memory-util=0.5", "--api-k", "--max_model_l", "--max-model-len"]
)
def test_beginnings_of_our_own_flags_are_refused_too(word: str) -> None:
    with pytest.raises(UsageError):
        parse([word, "2"])


def test_flags_of_others_pass_untouched() -> None:
    words = ["--max-num-seqs", "8", "-O3", "--mm-processor-kwargs", "{}", "--max-num-batched-tokens=2048"]
    assert parse(words).others == tuple(words)
