"""Write the files that describe a results folder (datapackage.json, README.md, LICENSE) from the schema.

python scripts/describe_results.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

from prober.results.datapackage import pages

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "results")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_bytes(text.encode())
