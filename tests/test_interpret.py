"""What a trial says to the search, and what it is a trial of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prober.engine.flags import parse
from prober.engine.versions import length_regimes
from prober.measure.monitor import unless_held
from prober.measure.search_loop import combination_key, state_key
from prober.records import Combination, Figures, Machine, Outcome, Stage, Trial, UsageError, Verdict, Verify
from prober.search.interpret import interpret, served_figures
from prober.search.next_length import Answer, Observation

MACHINE = Machine("GPU", "cuda", "m")


def trial(outcome: Outcome, stage: Stage = Stage.SERVE, verify: Verify = Verify.FULL, **facts: Any) -> Trial:
    figures = Figures(**facts)
    return Trial("t", "c", "s", 4096, False, verify, Verdict(outcome, stage, figures=figures), 1.0, "2026-01-01")


def seen(one: Trial, verify: Verify = Verify.FULL) -> Observation:
    found = interpret(one, verify)
    assert found is not None
    return found


def reading(one: Trial, verify: Verify = Verify.FULL) -> Answer | None:
    found = interpret(one, verify)
    return None if found is None else found.reading


@pytest.mark.parametrize("outcome", [Outcome.CRASH, Outcome.TIMEOUT, Outcome.DEVICE_BUSY, Outcome.SEQUENCE_SLOTS])
def test_what_could_not_tell_never_moves_the_bracket(outcome: Outcome) -> None:
    assert reading(trial(outcome)) is Answer.UNKNOWN


def test_host_out_of_memory_is_too_long_only_where_the_trial_took_it() -> None:
    one = trial(Outcome.HOST_OOM)
    assert reading(one) is Answer.UNKNOWN
    assert reading(replace(one, verdict=replace(one.verdict, rule="guard"))) is Answer.TOO_LONG
    assert reading(replace(one, verdict=replace(one.verdict, rule="guard_shared"))) is Answer.UNKNOWN


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ((Stage.CONFIG, Stage.DOWNLOAD, Stage.COMPILE), Answer.UNKNOWN),  # not where lengths take memory
        ((Stage.LOAD,), Answer.NO_LENGTH),
        ((Stage.PROFILE, Stage.KV_CACHE, Stage.CAPTURE, Stage.SERVE), Answer.TOO_LONG),
    ],
)
def test_device_out_of_memory_depends_on_the_stage(stages: tuple[Stage, ...], expected: Answer) -> None:
    assert {reading(trial(Outcome.DEVICE_OOM, stage)) for stage in stages} == {expected}


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome.KV_TOO_SMALL, Answer.TOO_LONG),
        (Outcome.NO_KV_MEMORY, Answer.TOO_LONG),
        (Outcome.TOO_SHORT, Answer.TOO_SHORT),
        (Outcome.BAD_CONFIG, Answer.WRONG),
    ],
)
def test_refusal_counts_whatever_proof_was_asked_for(outcome: Outcome, expected: Answer) -> None:
    """A start that fails shows as much with no request to follow as with one of full length."""
    assert {reading(trial(outcome, verify=done), asked) for done in Verify for asked in Verify} == {expected}


def test_weaker_proof_says_nothing_and_a_stronger_demand_that_failed_still_started() -> None:
    weakest_first = (Verify.NONE, Verify.SHORT, Verify.FULL)
    for rank, done in enumerate(weakest_first):
        for asked_rank, asked in enumerate(weakest_first):
            fits = Answer.SERVES if rank >= asked_rank else None
            stuck = Answer.SERVES if rank > asked_rank else Answer.TOO_LONG
            assert reading(trial(Outcome.FITS, verify=done), asked) is fits
            assert reading(trial(Outcome.UNSERVABLE, verify=done), asked) is stuck


def test_limit_of_the_model_is_what_a_refusal_for_it_names_and_nothing_else() -> None:
    refused = trial(Outcome.OVER_MODEL_LIMIT, model_limit=2048)
    assert (reading(refused), seen(refused).limit) == (Answer.OVER_LIMIT, 2048)
    assert reading(trial(Outcome.OVER_MODEL_LIMIT)) is Answer.UNKNOWN, "a limit without a number bounds nothing"
    assert seen(trial(Outcome.KV_TOO_SMALL, model_limit=2048)).limit is None, "a draft model's, perhaps"


def test_start_without_a_length_shows_the_limit_unless_a_refusal_names_a_lower_one() -> None:
    by_default = replace(trial(Outcome.KV_TOO_SMALL), is_default_length=True)
    assert seen(by_default).limit == by_default.length
    assert seen(replace(trial(Outcome.OVER_MODEL_LIMIT, model_limit=2048), is_default_length=True)).limit == 2048
    assert seen(trial(Outcome.FITS)).limit is None


def test_length_that_leaves_less_memory_free_than_was_demanded_is_too_long() -> None:
    demanded = replace(trial(Outcome.FITS, gpu_blocks=32, block_size=128), reserve_mib=1000)
    assert reading(replace(demanded, least_free_mib=1000)) is Answer.SERVES
    assert reading(replace(demanded, least_free_mib=999)) is Answer.TOO_LONG
    assert seen(replace(demanded, least_free_mib=999)).hints == (0,), "blocks say nothing of memory left free"
    assert reading(demanded) is Answer.UNKNOWN, "nobody saw what stayed free"
    freely = seen(replace(demanded, reserve_mib=None, least_free_mib=0))
    assert (freely.reading, freely.hints[0]) == (Answer.SERVES, 3968)


def test_refusal_stays_one_whatever_memory_was_to_stay_free() -> None:
    refused = replace(trial(Outcome.KV_TOO_SMALL, estimated_max_len=2048), reserve_mib=1000)
    for free in (None, 0, 5000):
        one = seen(replace(refused, least_free_mib=free))
        assert (one.reading, one.hints) == (Answer.TOO_LONG, (2048,))


@pytest.mark.parametrize(
    ("figures", "hints"),
    [
        ({"estimated_max_len": 3000, "max_tokens_in_cache": 3200}, (3000, 3200)),
        ({"max_tokens_in_cache": 3200}, (3200,)),  # V0
        ({"estimated_max_len": 0, "max_tokens_in_cache": 3200}, (3200,)),
        # Every token needs the same: three quarters of the memory hold three quarters of the length.
        ({"requested_max_model_len": 4096, "needed_gib": 4.0, "available_gib": 3.0}, (3072,)),
        ({"requested_max_model_len": 4096, "needed_gib": 1.0, "available_gib": 0.75}, (3072,)),
        ({"requested_max_model_len": 4096, "needed_gib": 4.0, "available_gib": -0.5}, ()),
        ({"requested_max_model_len": 4096, "needed_gib": 4.0, "available_gib": 4.0}, ()),  # it was refused all the same
        ({"requested_max_model_len": 4096, "needed_gib": 4.0}, ()),
        ({"requested_max_model_len": 4096, "available_gib": 3.0}, ()),
        ({"needed_gib": 4.0, "available_gib": 3.0}, ()),
        ({}, ()),
    ],
)
def test_figures_of_a_refusal_suggest_the_ceiling(figures: dict[str, Any], hints: tuple[int, ...]) -> None:
    assert seen(trial(Outcome.KV_TOO_SMALL, **figures)).hints == hints


def test_no_memory_for_the_cache_suggests_that_nothing_fits() -> None:
    assert seen(trial(Outcome.NO_KV_MEMORY, estimated_max_len=3000)).hints == (0,)


@pytest.mark.parametrize(("outcome", "hints"), [(Outcome.FITS, (3968, 3969, 4096)), (Outcome.UNSERVABLE, (3969, 3968))])
def test_blocks_of_a_start_suggest_the_ceiling(outcome: Outcome, hints: tuple[int, ...]) -> None:
    """Without the null block, with the token that needs no room, and (V0) with every block."""
    assert seen(trial(outcome, gpu_blocks=32, block_size=128)).hints == hints


def test_start_that_printed_too_little_suggests_nothing() -> None:
    assert seen(trial(Outcome.FITS, gpu_blocks=32)).hints == ()
    assert seen(trial(Outcome.FITS, block_size=128)).hints == ()
    assert seen(trial(Outcome.FITS, gpu_blocks=1, block_size=128)).hints == (128,), "no length of 0 or 1"


@pytest.mark.parametrize(
    ("blocks", "asked", "tokens", "hints"),
    [
        (512, None, 49_504, (49_408,)),  # groups share the blocks: what the log counts, in whole blocks
        (512, None, 511 * 128, (511 * 128,)),  # so does one block less
        (
            8192,
            4097,
            1_017_068,
            (8191 * 128, 8191 * 128 + 1, 8192 * 128),
        ),  # a last block that is not full makes no hybrid
        (
            8192,
            4097,
            8192 * 128,
            (8191 * 128, 8191 * 128 + 1, 8192 * 128),
        ),  # nor where the log counts blocks (before 0.20.1)
    ],
)
def test_hybrid_is_known_by_tokens_that_its_blocks_do_not_explain(
    blocks: int, asked: int | None, tokens: int, hints: tuple[int, ...]
) -> None:
    one = trial(Outcome.FITS, gpu_blocks=blocks, block_size=128, kv_cache_tokens=tokens, requested_max_model_len=asked)
    assert seen(one).hints == hints


def test_figures_of_a_length_are_those_of_its_last_start_that_served() -> None:
    def of(length: int, outcome: Outcome, blocks: int) -> Trial:
        return replace(trial(outcome, gpu_blocks=blocks), length=length)

    trials = [of(4096, Outcome.FITS, 30), of(4096, Outcome.FITS, 31), of(4096, Outcome.FITS, 32)]
    others = [of(4096, Outcome.UNSERVABLE, 40), of(8192, Outcome.FITS, 41)]
    assert served_figures([*trials, *others], 4096).gpu_blocks == 32
    assert served_figures(others, 4096) == Figures()


@pytest.mark.parametrize(
    ("version", "flags", "expected"),
    [
        ("0.5.2", (), ()),
        ("0.5.3", (), (32_768,)),
        ("0.5.3.post1", (), (32_768,)),
        ("0.6.3", (), (32_768,)),
        ("0.10.2rc1", (), (32_768,)),
        ("0.10.3", (), ()),
        ("0.6.3", ("--enforce-eager",), (32_768,)),
        ("0.6.3", ("--enforce-eager", "--enable-chunked-prefill"), ()),
        ("0.6.3", ("--max-num-batched-tokens=2048",), ()),
        ("0.4.3", (), ()),
        ("0.11.0", (), ()),
        (None, (), ()),
    ],
)
def test_regimes_of_v0(version: str | None, flags: tuple[str, ...], expected: tuple[int, ...]) -> None:
    assert length_regimes(version, flags) == expected


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


def test_block_that_is_counted_and_never_granted_is_one_less() -> None:
    waits = trial(
        Outcome.UNSERVABLE, gpu_blocks=512, block_size=128, kv_cache_tokens=49_632, requested_max_model_len=49_536
    )
    assert seen(waits).hints == (49_409, 49_408)


def test_free_memory_that_nobody_told_proves_no_reserve() -> None:
    served = replace(trial(Outcome.FITS), reserve_mib=512)
    assert reading(served) is Answer.UNKNOWN
    assert reading(replace(served, least_free_mib=511)) is Answer.TOO_LONG
    assert reading(replace(served, least_free_mib=512)) is Answer.SERVES


def test_a_length_that_is_too_short_is_its_own_reading() -> None:
    assert reading(trial(Outcome.TOO_SHORT, Stage.CONFIG)) is Answer.TOO_SHORT


def test_a_version_that_forgets_the_null_block_serves_one_token_more() -> None:
    older = trial(Outcome.FITS, gpu_blocks=32, block_size=128, vllm_version="0.28.0")
    assert seen(older).hints == (3969, 3968, 4096)
