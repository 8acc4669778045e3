"""Each message of tests/data/messages.csv is read as stated, bare and with the prefixes of its versions.

A larger table, with every message of 81 releases, is compared as well where it lies beside the repository.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from message_table import Message, misread
from message_table import messages as table

from prober.logs.classify import classify
from prober.records import Outcome, Stage

MESSAGES = Path(__file__).parents[1].parent / "shared" / "facts" / "vllm-messages.csv"

# What a message means that is raised. Messages that are only logged never are a failure.
RAISED: dict[str, tuple[Outcome, Stage]] = {
    "KV_LT_MAXLEN": (Outcome.KV_TOO_SMALL, Stage.KV_CACHE),
    "KV_NONE": (Outcome.NO_KV_MEMORY, Stage.KV_CACHE),
    "KV_ATTN_FREE": (Outcome.BAD_CONFIG, Stage.KV_CACHE),
    "KV_AUTOFIT": (Outcome.NO_KV_MEMORY, Stage.KV_CACHE),
    "MEM_FREE_AT_STARTUP": (Outcome.DEVICE_BUSY, Stage.CONFIG),
    "MEM_PROFILE_ASSERT": (Outcome.DEVICE_BUSY, Stage.PROFILE),
    "MEM_OOM_WARMUP": (Outcome.DEVICE_OOM, Stage.CAPTURE),
    "MEM_OOM_RAW": (Outcome.DEVICE_OOM, Stage.PROFILE),
    "MEM_MM_IPC": (Outcome.BAD_CONFIG, Stage.KV_CACHE),
    "MEM_CPU": (Outcome.DEVICE_BUSY, Stage.CONFIG),
    "CFG_MNBT": (Outcome.BAD_CONFIG, Stage.CONFIG),
    "CFG_MAXLEN_DERIVED": (Outcome.OVER_MODEL_LIMIT, Stage.CONFIG),
    "CFG_MM_BUDGET": (Outcome.TOO_SHORT, Stage.CONFIG),
    "HYBRID_MAMBA": (Outcome.BAD_CONFIG, Stage.KV_CACHE),
    "BLOCK_SIZE": (Outcome.BAD_CONFIG, Stage.CONFIG),
    "TP_PP": (Outcome.BAD_CONFIG, Stage.CONFIG),
    "DTYPE_CC": (Outcome.BAD_CONFIG, Stage.CONFIG),
    "ENGINE_SELECT": (Outcome.BAD_CONFIG, Stage.CONFIG),
    "CONFIG_WRAP": (Outcome.BAD_CONFIG, Stage.CONFIG),
    "PARENT_FAIL": (Outcome.CRASH, Stage.CONFIG),
    "CHILD_FAIL": (Outcome.CRASH, Stage.CONFIG),
}

# Messages that mean something else than their family does.
OTHERWISE: tuple[tuple[str, str, Outcome, Stage], ...] = (
    ("MEM_CPU", "The worker already uses", Outcome.NO_KV_MEMORY, Stage.KV_CACHE),
    ("MEM_CPU", "NUMA nodes", Outcome.BAD_CONFIG, Stage.CONFIG),
    ("MEM_CPU", "Invalid environment variable", Outcome.BAD_CONFIG, Stage.CONFIG),
    ("MEM_CPU", "--block-size", Outcome.BAD_CONFIG, Stage.CONFIG),
    ("CFG_MNBT", "is smaller than max_model_len", Outcome.OVER_MODEL_LIMIT, Stage.CONFIG),
    ("CFG_MNBT", "long_prefill_token_threshold", Outcome.TOO_SHORT, Stage.CONFIG),
    ("CFG_MAXLEN_DERIVED", "Disabling sliding window", Outcome.BAD_CONFIG, Stage.CONFIG),
    ("CFG_MAXLEN_DERIVED", "vLLM cannot currently support", Outcome.BAD_CONFIG, Stage.CONFIG),
    ("CFG_MAXLEN_DERIVED", "max_model_len must be", Outcome.BAD_CONFIG, Stage.CONFIG),
    ("HYBRID_MAMBA", "exceeds available Mamba cache blocks", Outcome.SEQUENCE_SLOTS, Stage.CAPTURE),
    ("HYBRID_MAMBA", "DCP not support", Outcome.BAD_CONFIG, Stage.CONFIG),
    ("HYBRID_MAMBA", "PCP not support", Outcome.BAD_CONFIG, Stage.CONFIG),
    ("HYBRID_MAMBA", "In Mamba cache align mode", Outcome.BAD_CONFIG, Stage.CONFIG),
    ("PARENT_FAIL", "Timed out waiting", Outcome.TIMEOUT, Stage.CONFIG),
    ("PARENT_FAIL", "Did not receive response", Outcome.TIMEOUT, Stage.CONFIG),
    ("PARENT_FAIL", "RPCServer didn't reply", Outcome.TIMEOUT, Stage.CONFIG),
    ("PARENT_FAIL", "SIGUSR1 handler not installed", Outcome.UNFINISHED, Stage.CONFIG),
    ("CHILD_FAIL", "WorkerProc was terminated", Outcome.UNFINISHED, Stage.CONFIG),
)

# Holes of the format strings that are other messages, or must look like what they are.
HOLES = {
    "estimated_msg": "Based on the available memory, the estimated maximum model length is 20512. ",
    "msg": "User-specified max_model_len (131072) is greater than the derived max_model_len "
    "(max_position_embeddings=32768.0 or model_max_length=None in model's config.json).",
    "warning": "VLLM_ALLOW_LONG_MAX_MODEL_LEN must be used with extreme caution.",
    "max_len_key": "max_position_embeddings",
    "derived_max_model_len": "32768.0",
    "model_max_length": "None",
    "proc.name": "EngineCore_DP0",
    "self.proc.name": "EngineCore_0",
    "process_name": "EngineCore",
    "finished": "{'EngineCore_DP0': 1}",
    "device_str": "GPU",
    "cls.device_name": "cuda",
}


def hole(expression: str) -> str:
    """What stands in the place of one ``{expression}``."""
    name = expression.split(":")[0].strip()
    if name in HOLES:
        return HOLES[name]
    if "|" in name:
        return name.split("|")[0]
    if re.search(r"device_\b|\.device_$", name):
        return "cuda:0"
    if "gib" in name.lower() or expression.endswith(".2f"):
        return "17.25"
    return "4096"


def render(message: str) -> str:
    """Fill a format string, f-string or %-style, with figures of our own."""
    message = re.sub(r"\s*\[test: .*\]$", "", message)
    out, depth, start = "", 0, 0
    for place, character in enumerate(message):
        if character == "{":
            start = place if depth == 0 else start
            depth += 1
        elif character == "}" and depth:
            depth -= 1
            out += hole(message[start + 1 : place]) if depth == 0 else ""
        elif depth == 0:
            out += character
    out = re.sub(r"%\.\d+f", "17.25", out)
    out = re.sub(r"%(?:0\d)?d", "4096", out)
    return re.sub(r"%[sr]", "131,072", out).replace("%%", "%").replace("\\n", "\n")


def version_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3]) or (0, 9, 1)


def with_prefixes(line: str, version: tuple[int, ...], level: str) -> str:
    """Put the prefixes of that version's logger before one line."""
    place = "[core.py:700]" if version >= (0, 8, 0) else "core.py:700]"
    header = f"{level} 04-15 06:30:01 {place} "
    if version < (0, 9, 1):
        return header + line
    if version < (0, 16, 0):
        return f"\x1b[1;36m(EngineCore_DP0 pid=187)\x1b[0;0m {header}{line}"
    return f"(EngineCore pid=187) {header}{line}"


def log_of(row: dict[str, str]) -> bytes:
    """The message as its version puts it into a log: raised ones as the last line of a traceback."""
    version = version_of(row["version_first"])
    severity = row["severity"]
    text = render(row["format_string"])
    raised = re.match(r"(?:raise|assert) (\S+)", severity)
    if not raised:
        level = severity.split()[0].split("+")[0]
        return ("\r\n".join(with_prefixes(line, version, level) for line in text.split("\n")) + "\n").encode()
    lines = ["Traceback (most recent call last):", f"{raised[1]}: {text}"]
    return ("\r\n".join(with_prefixes(line, version, "ERROR") for line in lines) + "\n").encode()


def expected(row: dict[str, str]) -> tuple[Outcome, Stage] | None:
    """The stated outcome and stage; None: the message must not be a failure."""
    family, severity = row["family"], row["severity"]
    for name, text, outcome, stage in OTHERWISE:
        if name == family and text in row["format_string"]:
            return (outcome, stage) if outcome is not Outcome.UNFINISHED else None
    is_raised = severity.startswith(("raise", "assert", "ERROR", "CRITICAL"))
    return RAISED[family] if is_raised else None


def messages() -> list[dict[str, str]]:
    if not MESSAGES.exists():
        return []
    with MESSAGES.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


PRINTED_BY_VLLM = [message for message in table() if message.table == "RULES" and message.versions]


def test_every_message_of_the_table_is_read_as_stated() -> None:
    assert not list(misread())


@pytest.mark.parametrize("message", PRINTED_BY_VLLM, ids=lambda message: f"{message.name}: {message.log[:40]}")
def test_prefixes_of_its_versions_change_nothing(message: Message) -> None:
    for version in message.versions.split(" to "):
        lines = [with_prefixes(line, version_of(version), "ERROR") for line in message.log.split("\n")]
        found = classify(("\r\n".join(lines) + "\n").encode())
        assert (found.outcome, found.rule) == (message.outcome, message.rule), version


needs_table = pytest.mark.skipif(
    not MESSAGES.exists(), reason="the table of vLLM's messages is not beside the repository"
)


@needs_table
def test_every_message_of_81_releases_has_its_stated_outcome_and_stage() -> None:
    wrong: list[str] = []
    for row in messages():
        found = classify(log_of(row))
        wanted = expected(row)
        if row["severity"].startswith("message fragment"):
            continue  # printed only as a part of another message
        is_right = (
            (found.outcome, found.stage) == wanted
            if wanted is not None
            else found.outcome in (Outcome.UNFINISHED, Outcome.READY)
        )
        if not is_right:
            wrong.append(f"{row['family']} {row['version_first']}: {log_of(row)!r} is {found.outcome}, {found.stage}")
    assert len(messages()) > 600
    assert not wrong, "\n".join(wrong)


@needs_table
def test_families_are_all_stated() -> None:
    raised = {row["family"] for row in messages() if row["severity"].startswith(("raise", "assert"))}
    assert raised <= RAISED.keys()
