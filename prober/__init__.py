"""The proven ceiling of vLLM's ``max_model_len``.

``lookup``, ``read_matrix`` and ``probe`` (see ``prober.api``) are loaded on first use.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from prober.api import lookup as lookup
    from prober.api import probe as probe
    from prober.api import read_matrix as read_matrix

_API = ("lookup", "probe", "read_matrix")


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from prober import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
