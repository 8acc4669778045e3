"""No token, key or password reaches what is kept, no stranger reaches the server, and no flag a shell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench import running_probe
from fake_engine import Fault, FaultKind, Scenario, make_engine, wait_until, write_model

TOKEN = "hf_correctHorseBatteryStaple"
SECRETS = {
    "HF_TOKEN": TOKEN,
    "OPENAI_API_KEY": "plain-looking-value-1",
    "AWS_SECRET_ACCESS_KEY": "plain/looking/value+2",
    "HTTPS_PROXY": "http://somebody:plain-looking-value-3@proxy.invalid:3128",
    "DATABASE_PASSWORD": "plain looking value 4",
}
VALUES = (TOKEN, *(f"plain-looking-value-{n}" for n in (1, 3, 5)), "plain/looking/value+2", "plain looking value 4")
SAID = "\n".join(
    (
        f"INFO 12-01 12:00:00 [x.py:1] environment: {SECRETS}",
        "INFO 12-01 12:00:00 [x.py:1] args: {'hf_token': 'plain-looking-value-5', 'api_key': 'unknown-to-anybody'}",
        f"requests.exceptions.HTTPError: 401 for url: https://me:plain-looking-value-3@host/x Bearer {TOKEN}",
    )
)


def everything_kept(folder: Path) -> str:
    files = [path for path in (folder / "results").rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"trials.jsonl", "matrix.csv"}
    assert len(list((folder / "results" / "logs").iterdir())) > 0
    return "\n".join(path.read_text(errors="replace") for path in files)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(FaultKind.SAYS, "config", text=SAID),
        Fault(FaultKind.CRASH, text=f"huggingface_hub.errors.HfHubHTTPError: 500 with {TOKEN} plain-looking-value-1"),
        Fault(FaultKind.BAD_CONFIG, "config", text=f"token {TOKEN} and plain looking value 4 are no good"),
        Fault(FaultKind.COMPLETION_FAILS, text="failed with plain/looking/value+2 and plain-looking-value-5"),
    ],
    ids=lambda fault: str(fault.kind),
)
def test_no_secret_is_kept(tmp_path: Path, fault: Fault) -> None:
    engine = make_engine(tmp_path / "engine", Scenario(faults=(fault,)))
    words: tuple[str, ...] = ("--high", "64", "--json", "--", "--hf-overrides", "{}")
    if fault.kind is FaultKind.COMPLETION_FAILS:
        words = (*words, "--hf-token", "plain-looking-value-5")
    with running_probe(tmp_path, engine, *words, environment=SECRETS) as prober:
        prober.wait(60)
    assert engine.launches()
    kept = everything_kept(tmp_path) + (tmp_path / "out").read_text()
    assert "***" in kept, "the words were there, and were masked"
    for value in (*VALUES, "unknown-to-anybody"):
        assert value not in kept, value
    if fault.kind is FaultKind.SAYS:
        assert "GPU KV cache size: 512 tokens, Maximum concurrency for 64 tokens" in kept


def environment_of(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_text()
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def test_server_is_for_us_alone(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "engine", Scenario(faults=(Fault(FaultKind.HANG, "ready"),)))
    given = {"VLLM_API_KEY": "the-user's-own", "VLLM_PORT": "1"}
    keys = []
    with running_probe(tmp_path, engine, "--high", "64", "--stage-limit", "capture=2", environment=given) as prober:
        for number in (1, 2):
            wait_until(lambda number=number: len(engine.launches()) == number, what="a launch")  # type: ignore[misc]
            launch = engine.launches()[-1]
            environment = environment_of(launch.pid)
            keys.append(environment["VLLM_API_KEY"])
            assert launch.argv[launch.argv.index("--host") + 1] == "127.0.0.1"
            assert int(launch.argv[launch.argv.index("--port") + 1]) > 1023
            assert "VLLM_PORT" not in environment
            assert environment["VLLM_NO_USAGE_STATS"] == environment["DO_NOT_TRACK"] == "1"
            assert environment["VLLM_ENABLE_STARTUP_PLAN"] == "0"
        prober.terminate()
        prober.wait(10)
    assert len({*keys, "the-user's-own"}) == 3
    assert all(len(key) >= 32 for key in keys)
    assert not [key for key in keys if key in everything_logged(tmp_path)]


def everything_logged(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in (folder / "results").rglob("*") if path.is_file())


@pytest.mark.parametrize("entrypoint", ["serve", "llm"])
def test_flags_never_meet_a_shell(fake_probe: Any, tmp_path: Path, entrypoint: str) -> None:
    hostile = "$(touch pwned); touch pwned # `touch pwned` a\nb | tee pwned ${HOME} * ' \""
    words = ("--entrypoint", entrypoint, "--high", "64")
    done, engine = fake_probe(Scenario(), *words, vllm=["--tokenizer", hostile], limit=512)
    assert done.returncode == 0, done.stderr
    argv = engine.launches()[-1].argv
    assert hostile in argv or f"tokenizer={hostile!r}" in argv
    assert not list(tmp_path.rglob("pwned"))


def test_a_hostile_model_name_is_only_a_name(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "engine", Scenario())
    folder = write_model(tmp_path / "a; touch pwned")
    with running_probe(tmp_path, engine, "--high", "64", model=folder) as prober:
        assert prober.wait(30) == 0
    assert str(folder) in engine.launches()[0].argv
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("asked", [(), ("--trust-remote-code",)])
def test_remote_code_is_trusted_only_where_the_user_says_so(fake_probe: Any, asked: tuple[str, ...]) -> None:
    done, engine = fake_probe(Scenario(), "--high", "64", vllm=asked)
    assert done.returncode == 0, done.stderr
    given = [word for launch in engine.launches() for word in launch.argv if word.startswith("--trust")]
    assert given == list(asked)
    assert json.dumps([launch.environment for launch in engine.launches()]).count("TRUST") == 0
