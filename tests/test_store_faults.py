"""The results folder on a bad day: crashes, full disks, many writers. Nothing is torn, nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from row_makers import a_row, a_trial

from prober.results.store import Store
from prober.results.trial_json import dump_trial

TESTS = Path(__file__).parent


def start(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    """Run Python code in a process of its own, with the tests' makers at hand."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, stderr=subprocess.PIPE)


def test_a_torn_last_line_is_not_a_trial_and_is_kept_aside(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(a_trial(1))
    torn = dump_trial(a_trial(2))[:50]
    with store.trials_path.open("a") as file:
        file.write(torn)
    assert store.trials() == [a_trial(1)]
    assert store.unreadable() == []
    store.append(a_trial(3))
    assert store.trials() == [a_trial(1), a_trial(3)]
    assert (tmp_path / "trials.jsonl.torn").read_text() == torn + "\n"
    assert len(store.trials_path.read_text().splitlines()) == 2


def test_a_torn_line_longer_than_one_read_is_cut_at_its_start(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(a_trial(1))
    with store.trials_path.open("ab") as file:
        file.write(b"\xff" * 200_000)
    store.append(a_trial(3))
    assert store.trials() == [a_trial(1), a_trial(3)]


def test_a_whole_last_line_without_its_end_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.trials_path.write_text(dump_trial(a_trial(1)))
    assert store.trials() == [a_trial(1)]
    store.append(a_trial(2))
    assert store.trials() == [a_trial(1), a_trial(2)]
    assert not (tmp_path / "trials.jsonl.torn").exists()


def test_an_unreadable_line_in_the_middle_is_reported_and_stays(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(a_trial(1))
    with store.trials_path.open("ab") as file:
        file.write(b"{broken\n\xff\xfe\n\n")
    store.append(a_trial(2))
    assert store.trials() == [a_trial(1), a_trial(2)]
    assert [problem.line for problem in store.unreadable()] == [2, 3]
    assert b"{broken\n\xff\xfe\n" in store.trials_path.read_bytes()


# A limit on file size stands in for a full disk: the kernel writes what still fits, then refuses.
FULL_DISK = """
import resource, sys
from pathlib import Path
from row_makers import a_row, a_trial
from prober.records import NotReady
from prober.results.store import Store
store = Store(Path(sys.argv[1]))
store.append(a_trial(1)); store.put([a_row()])
before = store.trials_path.read_bytes(), store.matrix_path.read_bytes()
room = max(len(b) for b in before) + 100
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
failed = 0
for attempt in (lambda: store.append(a_trial(2, evidence="x" * 500)), lambda: store.put([a_row(model="x" * 5000)])):
    try:
        attempt()
    except NotReady as error:
        assert "cannot be written" in str(error) and "intact" in str(error), error
        failed += 1
assert failed == 2, failed
assert before == (store.trials_path.read_bytes(), store.matrix_path.read_bytes())
assert not list(store.folder.glob("*.draft"))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
store.append(a_trial(3))
assert store.trials() == [a_trial(1), a_trial(3)]
"""


def test_a_full_disk_leaves_both_files_as_they_were(tmp_path: Path) -> None:
    process = start(FULL_DISK, tmp_path)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr.decode()


WRITER = """
import sys
from pathlib import Path
from row_makers import a_row, a_trial
from prober.results.store import Store
store, number = Store(Path(sys.argv[1])), int(sys.argv[2])
for batch in range(20):
    store.put([a_row(model=f"model-{number}", machine=f"{batch}-{i}") for i in range(10)])
    for i in range(10):
        store.append(a_trial(batch * 10 + i, id=f"{number}-{batch}-{i}"))
"""


def test_sixteen_writers_of_two_hundred_rows_each_lose_none(tmp_path: Path) -> None:
    writers = [start(WRITER, tmp_path, number) for number in range(16)]
    for writer in writers:
        _, stderr = writer.communicate(timeout=120)
        assert writer.returncode == 0, stderr.decode()
    store = Store(tmp_path)
    about = [(row.model, row.machine) for row in store.rows()]
    assert len(about) == len(set(about)) == 16 * 200
    ids = [trial.id for trial in store.trials()]
    assert len(ids) == len(set(ids)) == 16 * 200
    assert store.unreadable() == []


REPLACER = """
import itertools, sys
from pathlib import Path
from row_makers import a_row
from prober.results.store import Store
store = Store(Path(sys.argv[1]))
print("ready", file=sys.stderr, flush=True)
for number in itertools.count():
    store.put([a_row(model=f"model-{number % 50}", notes="x" * 2000, measured_at=f"{number:09}")])
"""


# Forked from a process without threads: a killed writer every few milliseconds, as starting Python would not allow.
KILLER = """
import itertools, os, signal, sys, time
from pathlib import Path
from row_makers import a_row
from prober.results.csv_format import HEADER_LINE
from prober.results.store import Store
store = Store(Path(sys.argv[1]))
drafts = 0
for kill in range(200):
    child = os.fork()
    if child == 0:
        for number in itertools.count():
            store.put([a_row(model=f"model-{number % 50}", notes="x" * 2000, measured_at=f"{kill:04}-{number:09}")])
    time.sleep(0.0005 * (kill % 29))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    drafts += store.matrix_path.with_name("matrix.csv.draft").exists()
    assert store.matrix_path.read_text().startswith(HEADER_LINE)
    assert len(store.rows()) == 50, kill
assert drafts > 0, "no kill fell between draft and exchange: the test shows nothing"
"""


def test_killed_while_replacing_the_file_is_never_torn(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(a_row(model=f"model-{i}", notes="x" * 2000) for i in range(50))
    process = start(KILLER, tmp_path)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr.decode()
    store.put([a_row(model="after")])  # the lock of the dead is free, and their drafts are in nobody's way
    assert len(store.rows()) == 51
    assert not list(tmp_path.glob("*.draft"))


def test_readers_see_a_whole_file_while_writers_replace_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(a_row(model=f"model-{i}", notes="x" * 2000) for i in range(50))
    process = start(REPLACER, tmp_path)
    assert process.stderr is not None
    process.stderr.readline()
    try:
        for _ in range(200):
            assert len(store.rows()) == 50
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere, so no folder is read-only for it")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    from prober.records import NotReady

    tmp_path.chmod(0o500)
    try:
        with pytest.raises(NotReady, match="cannot be written"):
            Store(tmp_path).check_writable()
    finally:
        tmp_path.chmod(0o700)
