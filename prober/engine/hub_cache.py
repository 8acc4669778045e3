"""Which model this is, as far as the files at hand tell: the commit on the Hub, or a hash of a local configuration."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def revision_of(model: str, asked: str | None = None) -> str | None:
    """Return what pins the model: ``config-`` and a hash for a directory, else the cached Hub commit; None: unknown.

    The Hub is not asked: until vLLM has downloaded a model, its commit is unknown.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _config_hash(folder / "config.json")
    reference = _hub_cache() / f"models--{model.replace('/', '--')}" / "refs" / (asked or "main")
    try:
        return reference.read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return asked


def attention_heads(model: str) -> int | None:
    """Return the number of attention heads that tensor parallelism must divide; None: no configuration at hand."""
    config = _config(model)
    for part in (config, config.get("text_config")):
        heads = part.get("num_attention_heads") if isinstance(part, dict) else None
        if isinstance(heads, int) and heads > 0:
            return heads
    return None


def limit_beyond_default(model: str, revision: str | None = None) -> int | None:
    """Return what a LongRoPE model allows; without --max-model-len it starts at its short length. None: others."""
    config = _config(model, revision)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") if isinstance(scaling, dict) else None
    longest = config.get("max_position_embeddings")
    return longest if kind in ("longrope", "su") and isinstance(longest, int) else None


def _config(model: str, revision: str | None = None) -> dict[str, Any]:
    """The model's config.json, from its directory or from the Hub's cache; empty where there is none."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        folder = (
            _hub_cache()
            / f"models--{model.replace('/', '--')}"
            / "snapshots"
            / (revision_of(model, revision) or "none")
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def is_directory(model: str) -> bool:
    return Path(model).expanduser().is_dir()


def _config_hash(path: Path) -> str | None:
    try:
        return f"config-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    except OSError:
        return None


def _hub_cache() -> Path:
    """Where huggingface_hub keeps models (its environment variables, in its order)."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache)
    if home := os.environ.get("HF_HOME"):
        return Path(home) / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"
