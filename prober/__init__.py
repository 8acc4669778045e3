"""The proven ceiling of vLLM's ``max_model_len``.

``lookup``, ``read_matrix`` and ``probe`` (see ``prober.api``) are loaded when they are first used.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from prober.api import lookup as lookup
    from prober.api import probe as probe
    from prober.api import read_matrix as read_matrix

_API = ("lookup", "probe", "read_matrix")


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name not in _API:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        from prober import api

        return getattr(api, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system puts each submodule here; of lookup and probe the function is meant, never the module.
        if not (name in _API and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
