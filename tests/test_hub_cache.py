"""Where models are cached: huggingface_hub's variables, in its order, everywhere in the prober."""

from __future__ import annotations

from pathlib import Path

import pytest

from prober.engine.hub_cache import hf_home, hub_cache, revision_of
from prober.engine.install import Engine
from prober.host.gpu import Inventory
from prober.measure.doctor import Places, checks

# In the order in which huggingface_hub looks: each one hides those below it.
PRECEDENCE = (
    ("HF_HUB_CACHE", "/a", "/a"),
    ("HUGGINGFACE_HUB_CACHE", "/b", "/b"),
    ("HF_HOME", "/c", "/c/hub"),
    ("XDG_CACHE_HOME", "/d", "/d/huggingface/hub"),
    ("HOME", "/e", "/e/.cache/huggingface/hub"),
)


@pytest.mark.parametrize("first", range(len(PRECEDENCE)))
def test_first_variable_that_is_set_decides(first: int) -> None:
    environment = {name: value for name, value, _ in PRECEDENCE[first:]}
    assert hub_cache(environment) == Path(PRECEDENCE[first][2])
    assert hub_cache({**environment, "HF_HUB_CACHE": ""} if first else environment) == Path(PRECEDENCE[first][2])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("HF_HUB_CACHE", "/e/x"), ("HF_HOME", "/e/x/hub"), ("XDG_CACHE_HOME", "/e/x/huggingface/hub")],
)
def test_home_directory_is_expanded(name: str, expected: str) -> None:
    assert hub_cache({"HOME": "/e", name: "~/x"}) == Path(expected)


def test_home_holds_the_token_wherever_the_cache_is() -> None:
    assert hf_home({"HF_HOME": "/c", "HF_HUB_CACHE": "/a", "HOME": "/e"}) == Path("/c")


@pytest.mark.parametrize("name", [name for name, _, _ in PRECEDENCE])
def test_doctor_and_revision_look_in_the_same_folder(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other, _, _ in PRECEDENCE:
        monkeypatch.delenv(other, raising=False)
    environment = {"HOME": str(tmp_path / "home"), name: str(tmp_path / "cache")}
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    reference = hub_cache(environment) / "models--acme--otter" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    reference.write_text("a" * 40)
    assert revision_of("acme/otter") == "a" * 40
    engine = Engine(Path("/opt/python"), "0.32.0", None, is_cpu_build=False)
    findings = checks(tmp_path, Inventory(), lambda: engine, places=Places(tmp_path, environment, tmp_path))
    weights = next(finding for finding in findings if finding.name == "weights")
    assert str(hub_cache(environment)) in weights.what
