"""Secrets never stay, and nothing else is touched."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest
from bench import bench
from fake_engine import Scenario

from prober.redact import CHUNK_BYTES, KEPT_BYTES, LONGEST, Scrubber, secrets_in

TESTS = Path(__file__).parent
CORPUS = TESTS.parents[1] / "shared" / "corpus" / "lines"


@pytest.mark.parametrize(
    ("line", "clean"),
    [
        ("login with hf_aBcDeFgHiJkLmNoP now", "login with hf_*** now"),
        ("key sk-proj_0123456789abcdef.", "key sk-***."),
        ("ghp_0123456789abcdefABCD", "ghp_***"),
        ("github_pat_0123456789abcdefABCD", "github_pat_***"),
        ("AKIAIOSFODNN7EXAMPLE", "AKIA***"),
        ("Authorization: Bearer abc.def-ghi~jkl", "Authorization: Bearer ***"),
        ("authorization: bearer abcdefghijkl", "authorization: bearer ***"),
        ("GET https://user:pa55@host:8000/x", "GET https://***@host:8000/x"),
        ("proxy http://:pa55word@proxy", "proxy http://***@proxy"),
        (
            "non-default args: {'api_key': 'abcdef123', 'port': 8000}",
            "non-default args: {'api_key': '***', 'port': 8000}",
        ),
        ('{"hf_token": "abcdef123"}', '{"hf_token": "***"}'),
        ("API_KEY=abcdef123", "API_KEY=***"),
        ("X-Api-Key: abcdef123", "X-Api-Key: ***"),
        ("Password : hunter22", "Password : ***"),
        ("AWS_SECRET_ACCESS_KEY=/abc+def/", "AWS_SECRET_ACCESS_KEY=***"),
        ("token=abcdef123&x=1", "token=***"),
        ("client_secret: b'abcdef123'", "client_secret: b'***'"),
    ],
)
def test_shapes_of_secrets_are_masked(line: str, clean: str) -> None:
    assert Scrubber({}).text(line) == clean


ORDINARY = (
    "tokens: 4096",
    "max_num_batched_tokens=2048",
    "GPU KV cache size: 4,096 tokens, Maximum concurrency for 4,096 tokens per request: 1.00x",
    "block_size=16, num_gpu_blocks=1234, tokens_per_block: 16",
    "Using max model len 131072, tokenizer='/models/x', tokenizer_mode=auto, skip_tokenizer_init=False",
    "eos_token_id: 151645, pad_token: '<|endoftext|>', eos_token='<|im_end|>'",
    "api_key=None, hf_token=None, token=None, password: ''",
    "revision=0123456789abcdef0123456789abcdef01234567 mask-rcnn task-0123456789abcdef0123",
    "http://127.0.0.1:8000/v1/models and tcp://127.0.0.1:41234 and file:///a:b@c is http://[::1]:80/a@b",
    "Downloading half_precision_hf_models, chf_abcdefghijkl",
)


@pytest.mark.parametrize("line", ORDINARY)
def test_ordinary_lines_stay_as_they_are(line: str) -> None:
    environment = {
        "TOKENIZERS_PARALLELISM": "maximum1", "MAX_TOKENS": "12345678", "TOKENIZER_PATH": "/models/x",
        "GIT_AUTHOR_NAME": "tokenizer", "HF_TOKEN": "", "PASSWORD": "true", "HOME": "/models/x",
    }  # fmt: skip
    assert Scrubber(environment).text(line) == line


def test_no_line_of_any_log_at_hand_is_changed(tmp_path: Path) -> None:
    """Logs of real starts hold no secrets: whatever changed would be damage."""
    trial = bench(tmp_path, Scenario())
    trial.attempt()
    logs = [trial.log(), *(path.read_bytes() for path in (TESTS / "logs").rglob("*") if path.is_file())]
    logs += [path.read_bytes() for path in CORPUS.glob("*.log")]
    changed = [
        (before, after)
        for log in logs
        for before, after in zip(log.split(b"\n"), Scrubber({}).mask(log).split(b"\n"), strict=True)
        if before != after
    ]
    assert changed == []


def test_values_of_secret_variables_are_masked_wherever_they_stand() -> None:
    environment = {
        "HF_TOKEN": "correct-horse",
        "AWS_SECRET_ACCESS_KEY": "/abc+def/(.*)",
        "WANDB_API_KEY": "correct-horse-battery",
        "DB_PASSWORD": "short",
        "HTTPS_PROXY": "http://me:hidden-in-url@proxy:3128",
    }
    scrubber = Scrubber(environment, ["given-by-flag"])
    text = "a correct-horse-battery b correct-horse c /abc+def/(.*) d short e hidden-in-url f given-by-flag"
    assert scrubber.text(text) == "a *** b *** c *** d short e *** f ***"


def test_bytes_that_are_no_text_survive() -> None:
    garbage = bytes(range(256)) * 3
    assert Scrubber({"HF_TOKEN": "correct-horse"}).mask(garbage) == garbage
    assert Scrubber({}).text("a \ud800 \udc80 b") == "a \ud800 \udc80 b"


def test_values_given_to_secret_flags_are_found() -> None:
    flags = ["--hf-token", "abc", "--enforce-eager", "--aws-secret-key=def", "--tokenizer", "x", "--max-tokens", "5"]
    assert list(secrets_in([*flags, "--api-key", "k1", "k2", "--trust-remote-code"])) == ["abc", "def", "k1"]


@pytest.mark.parametrize("offset", range(-40, 41, 8))
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_secret_is_masked_wherever_a_chunk_ends(tmp_path: Path, offset: int, end: bytes) -> None:
    for cut in (CHUNK_BYTES, CHUNK_BYTES - LONGEST):
        log = tmp_path / "log"
        log.write_bytes(b"x" * (cut + offset - 1) + b" hf_0123456789abcdef0123456789abcdef " + b"y" * CHUNK_BYTES + end)
        Scrubber({}).move(log, tmp_path / "kept")
        kept = (tmp_path / "kept").read_bytes()
        assert kept == b"x" * (cut + offset - 1) + b" hf_*** " + b"y" * CHUNK_BYTES + end


def test_move_removes_the_original_and_does_without_one(tmp_path: Path) -> None:
    Scrubber({}).move(tmp_path / "none", tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
    (tmp_path / "log").write_bytes(b"a\npassword=hunter22")
    Scrubber({}).move(tmp_path / "log", tmp_path / "kept")
    assert (tmp_path / "kept").read_bytes() == b"a\npassword=***"
    assert not (tmp_path / "log").exists()


def test_of_a_flood_both_ends_are_kept(tmp_path: Path) -> None:
    lines = [b"line %07d" % number for number in range(100_000)]
    (tmp_path / "log").write_bytes(b"\n".join(lines))
    Scrubber({}).move(tmp_path / "log", tmp_path / "kept", most_bytes=4096)
    kept = (tmp_path / "kept").read_bytes().split(b"\n")
    assert kept[0] == lines[0]
    assert kept[-1] == lines[-1]
    assert len(b"\n".join(kept)) < 4200
    assert any(line.endswith(b"bytes left out here") for line in kept)


@pytest.mark.parametrize("inside", range(1, 24, 3))
def test_secret_that_the_left_out_middle_cuts_is_gone(tmp_path: Path, inside: int) -> None:
    tail = 2048
    secret = b"hf_0123456789abcdef01234"
    rest = b"y" * (tail - (len(secret) - inside) - 1)
    (tmp_path / "log").write_bytes(b"x\n" * 5000 + secret + b"\n" + rest)
    Scrubber({}).move(tmp_path / "log", tmp_path / "kept", most_bytes=2 * tail)
    kept = (tmp_path / "kept").read_bytes()
    assert kept.endswith(b"left out here\n" + rest)


def test_hundred_megabytes_take_seconds_and_little_memory(tmp_path: Path) -> None:
    """Measured on two cores that others used, too: 60 to 80 MB/s. What is kept of one log is bounded anyway."""
    trial = bench(tmp_path, Scenario())
    trial.attempt()
    log = trial.log()
    with (tmp_path / "big").open("wb") as big:
        for _ in range(100_000_000 // len(log)):
            big.write(log)
    scrubber = Scrubber({"HF_TOKEN": "correct-horse", "X_API_KEY": "battery-staple"})
    began = time.process_time()
    scrubber.move(tmp_path / "big", tmp_path / "kept", most_bytes=1 << 40)
    assert time.process_time() - began < 4  # 25 MB/s
    (tmp_path / "more").write_bytes(log * (8_000_000 // len(log)))
    tracemalloc.start()
    scrubber.move(tmp_path / "more", tmp_path / "less", most_bytes=1 << 40)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * CHUNK_BYTES
    assert KEPT_BYTES < 100_000_000
