"""Match spellings of models and GPU types, and compare vLLM versions.

Pure. Tolerates case, separators and a missing organisation, but nothing that changes what is measured: "-Instruct",
"-FP8", "Ti" or "Laptop" make a different name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from prober.engine.versions import version_order

_SEPARATORS = re.compile(r"[\s_.\-]+")
_GPU_SEPARATORS = re.compile(r"[^0-9a-z]+")
_VENDORS = {"nvidia", "amd", "intel", "geforce", "tesla", "quadro", "instinct", "radeon", "gpu", "graphics", "r", "tm"}
# Words that name a different device: a longer name that adds one of them does not match.
_QUALIFIERS = {
    "ti", "super", "laptop", "mobile", "max", "d", "mig", "ada", "blackwell", "nvl", "grid", "vgpu", "pro", "se",
}  # fmt: skip


@lru_cache(maxsize=4096)
def plain_model(model: str) -> tuple[str, str]:
    """Split a model's name into organisation and name, normalised in case and separators."""
    org, _, name = model.strip().rstrip("/").rpartition("/")
    return org.casefold(), _SEPARATORS.sub("-", name.casefold()).strip("-")


def same_model(asked: str, known: str) -> bool:
    """Whether both name the same model; if one has no organisation, only the names count."""
    (asked_org, asked_name), (known_org, known_name) = plain_model(asked), plain_model(known)
    return asked_name == known_name and (asked_org == known_org or not asked_org or not known_org)


def near_models(asked: str, known: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """Suggest known models with similar names, best first."""
    import difflib  # only where nothing was found

    by_name: dict[str, str] = {}
    for model in sorted(known):
        by_name.setdefault(plain_model(model)[1], model)
    name = plain_model(asked)[1]
    close = difflib.get_close_matches(name, by_name, n=limit, cutoff=0.6)
    longer = sorted((n for n in by_name if name and name in n and n not in close), key=len)
    return tuple(by_name[n] for n in [*close, *longer][:limit])


@lru_cache(maxsize=4096)
def _gpu_words(name: str) -> tuple[str, ...]:
    return tuple(w for w in _GPU_SEPARATORS.split(name.casefold()) if w and w not in _VENDORS)


def same_gpu(asked: str, known: str) -> bool:
    """Whether ``known`` is the GPU type that ``asked`` names ("L4" is not "L40S", nor "4090" the laptop's).

    Details missing from ``asked`` (form factor, "80GB") match anything: "A100" matches each variant.
    """
    asked_words, known_words = _gpu_words(asked), _gpu_words(known)
    if not asked_words:
        return False
    runs = {"".join(known_words[i:j]) for i in range(len(known_words)) for j in range(i + 1, len(known_words) + 1)}
    if not all(word in runs for word in asked_words):
        return False
    asked_text = "".join(asked_words)
    return not any(word in _QUALIFIERS and word not in asked_words and not asked_text.endswith(word)
                   for word in known_words)  # fmt: skip


def version_distance(version: str | None, reference: str | None) -> str:
    """Describe how far a vLLM version is from the reference: "same version", "3 minor versions older", …"""
    if not version:
        return "version unknown"
    if not reference:
        return ""
    ours, theirs = version_order(version), version_order(reference)
    if version == reference:
        return "same version"
    if ours[0] < 0 or theirs[0] < 0:
        return f"another version than {reference}"
    which = "older" if ours < theirs else "newer"
    for part, a, b in zip(("major", "minor", "patch"), ours[:3], theirs[:3], strict=True):
        steps = abs(a - b)
        if steps:
            return f"{steps} {part} version{'s' if steps > 1 else ''} {which}"
    return "another build of the same version"
