"""Remove each entry of the rule tables in turn and name those that no message in tests/data/messages.csv needs.

Each removal runs in a forked process that imports the readers anew, so the tables need no patching. Exit status 1:
an entry survived its removal, or the table fails without one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prober.advice import causes
from prober.logs import messages, rules, template  # noqa: F401 - compiles once, before the fork

TABLES = (
    *((rules, name) for name in ("RULES", "WRAPPERS")),
    *(
        (messages, name)
        for name in (
            *("STAGES", "READY", "SERVING", "FRAMES", "OUTER_FRAMES", "SERVER_STARTS", "ENGINE_STARTS"),
            *("EXCEPTIONS", "FIGURES"),
        )
    ),
    *((causes, name) for name in ("CONFIG", "CRASHES", "SAID")),
)


def is_noticed() -> bool:
    """Whether the table of messages fails with the tables as they are now."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from message_table import misread

    return next(misread(), None) is not None


def run_forked(check: Any) -> bool:
    """Run the check in a child; a child that dies noticed the removal, too."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(1 if check() else 0)
        except BaseException:  # any failure is a failing test
            os._exit(1)
    return os.waitpid(child, 0)[1] != 0


def survivors() -> Iterator[tuple[str, object]]:
    """Yield the table's name and the entry whose removal changed nothing."""
    for module, name in TABLES:
        table = getattr(module, name)
        for entry in table:
            left = (one for one in table if one is not entry)
            setattr(module, name, {key: table[key] for key in left} if isinstance(table, dict) else tuple(left))
            if not run_forked(is_noticed):
                yield name, entry
        setattr(module, name, table)


def main() -> int:
    if run_forked(is_noticed):
        print("tests/data/messages.csv fails without any removal")
        return 1
    survived = list(survivors())
    for name, entry in survived:
        print(f"{name}: {entry}")
    print(f"{sum(len(getattr(module, name)) for module, name in TABLES)} entries removed, {len(survived)} survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
