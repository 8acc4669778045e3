"""The Hugging Face cache and local model directories: where they are, and what they say about a model.

Reads files only; the Hub itself is never contacted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def revision_of(model: str, asked: str | None = None) -> str | None:
    """Return the model's revision: ``config-`` and a hash for a directory, else the cached Hub commit.

    None (or ``asked``, where given) until the model is in the cache.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _config_hash(folder / "config.json")
    reference = hub_cache() / f"models--{model.replace('/', '--')}" / "refs" / (asked or "main")
    try:
        return reference.read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return asked


def attention_heads(model: str) -> int | None:
    """Return the number of attention heads, which the tensor-parallel size must divide; None: no configuration here."""
    config = _config(model)
    for part in (config, config.get("text_config")):
        heads = part.get("num_attention_heads") if isinstance(part, dict) else None
        if isinstance(heads, int) and heads > 0:
            return heads
    return None


def limit_beyond_default(model: str, revision: str | None = None) -> int | None:
    """Return the longest length of a LongRoPE model; None for other models.

    Without --max-model-len vLLM starts such a model at its short length.
    """
    config = _config(model, revision)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") if isinstance(scaling, dict) else None
    longest = config.get("max_position_embeddings")
    return longest if kind in ("longrope", "su") and isinstance(longest, int) else None


def _config(model: str, revision: str | None = None) -> dict[str, Any]:
    """The model's config.json, from its directory or from the Hub's cache; empty where there is none."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        snapshots = hub_cache() / f"models--{model.replace('/', '--')}" / "snapshots"
        folder = snapshots / (revision_of(model, revision) or "none")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def is_directory(model: str) -> bool:
    """Whether the model is given as a local directory."""
    return Path(model).expanduser().is_dir()


def _config_hash(path: Path) -> str | None:
    try:
        return f"config-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    except OSError:
        return None


def hf_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Return Hugging Face's home, which holds the token and, by default, the cache (huggingface_hub/constants.py)."""
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return _expand(environment.get("HF_HOME") or f"{cache}/huggingface", environment)


def hub_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of downloaded models: the environment's, in huggingface_hub's order, else in its home."""
    cache = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    return _expand(cache, environment) if cache else hf_home(environment) / "hub"


def _expand(path: str, environment: Mapping[str, str]) -> Path:
    """Replace a leading ``~`` by that environment's HOME."""
    home = environment.get("HOME")
    return Path(home, path[2:]) if home and path.startswith("~/") else Path(path).expanduser()
