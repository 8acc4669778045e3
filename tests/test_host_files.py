"""Atomic file replacement, and private directories that go with their prober."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from prober.host.files import replace_file
from prober.host.tempdir import SETTLED_SECONDS, remove_left_over

HOLD = """
import subprocess, sys, time
from pathlib import Path
from prober.host.tempdir import private_folder
with private_folder(Path(sys.argv[1])) as folder:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
    print(folder, child.pid, flush=True)
    time.sleep(60)
"""


def test_killed_prober_loses_its_folder_though_its_child_lives(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as prober:
        assert prober.stdout is not None
        folder, child = prober.stdout.readline().split()
        try:
            long_ago = time.time() - 2 * SETTLED_SECONDS
            os.utime(folder, (long_ago, long_ago))
            remove_left_over(tmp_path)
            assert Path(folder).exists()
            prober.kill()
            prober.wait()
            assert psutil.pid_exists(int(child))
            remove_left_over(tmp_path)
            assert not Path(folder).exists()
        finally:
            prober.kill()
            psutil.Process(int(child)).kill()


def test_replaced_file_keeps_its_link_and_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    replace_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_failed_replacement_keeps_the_old_content(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").write_text("kept")
    with pytest.raises(OSError, match="directory"):
        replace_file(tmp_path / "folder", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder" / "kept").read_text() == "kept"
