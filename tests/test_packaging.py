"""What is published: the files of both archives, and a `prober` that works from the wheel with nothing around it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest
from fake_engine import write_model
from packaging.requirements import Requirement

import prober

ROOT = Path(__file__).parents[1]
MADE_BY_SETUPTOOLS = re.compile(r"PKG-INFO|setup\.cfg|prober\.egg-info/.*")
pytestmark = [
    pytest.mark.xdist_group("packaging"),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git says which files are ours; this is no clone"),
]


@dataclass(frozen=True)
class Built:
    """Both archives, and the files that lay there when they were built."""

    sources: frozenset[str]
    sdist: Path
    wheel: Path


@dataclass(frozen=True)
class Bare:
    """An environment that holds the wheel and what it requires: no extra, no engine, no development tool."""

    folder: Path

    def run(self, *words: str | Path, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.folder / "bin" / "prober"), *map(str, words)],
            input=stdin,
            env={"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "HOME": str(self.folder), **environment},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


def attempt(*words: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run(*words: str | Path, cwd: Path = ROOT) -> str:
    done = attempt(*words, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build from a copy: what else lies in this folder stays out, and nothing is left in it."""
    copy = tmp_path_factory.mktemp("source")
    tracked = run("git", "ls-files").splitlines()
    new = [name for name in run("git", "ls-files", "--others", "--exclude-standard").splitlines() if "/" in name]
    sources = frozenset(name for name in (*tracked, *new) if (ROOT / name).is_file())
    for name in sources:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    left_by_a_run = ("results/logs/one.log", "results/report.html", "results/.matrix.lock", "prober/__pycache__/x.pyc")
    for name in left_by_a_run:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("left by a run")
    run(sys.executable, "-m", "build", "--no-isolation", copy)
    (sdist,), (wheel,) = copy.glob("dist/*.tar.gz"), copy.glob("dist/*.whl")
    return Built(sources, sdist, wheel)


def required() -> Iterator[str]:
    """The distributions that `prober` without extras needs, all the way down, the prober's own left out."""
    seen, waiting = set(), ["prober"]
    while waiting:
        for line in distribution(waiting.pop()).requires or ():
            wanted = Requirement(line)
            is_wanted = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            if is_wanted and wanted.name not in seen:
                seen.add(wanted.name)
                waiting.append(wanted.name)
                yield wanted.name


@pytest.fixture(scope="session")
def bare(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Bare:
    """Install the wheel as pipx would, but with links to what is installed here instead of a download."""
    folder = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (site,) = folder.glob("lib/python3*/site-packages")
    for name in required():
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", built.wheel)
    run(*pip, "check")
    return Bare(folder)


def test_the_source_release_is_what_is_committed_and_nothing_else(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
    assert {name for name in names if not MADE_BY_SETUPTOOLS.fullmatch(name)} == built.sources
    assert "results/matrix.csv" in names


def test_the_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    names = set(zipfile.ZipFile(built.wheel).namelist())
    package = {name for name in names if not name.startswith("prober-")}
    assert package == {name for name in built.sources if name.startswith("prober/")}
    assert {"prober/py.typed", "prober/models/tiny-llama/config.json"} <= package
    assert "prober/report/templates/report.html.j2" in package
    written = {name.partition("/")[2] for name in names - package}
    assert written == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}


def test_the_archives_pass_for_every_linux_and_name_the_version(built: Built) -> None:
    assert built.wheel.name == f"prober-{prober.__version__}-py3-none-any.whl"
    assert built.sdist.name == f"prober-{prober.__version__}.tar.gz"


def test_help_of_every_command_needs_neither_engine_nor_extras(bare: Bare) -> None:
    done = bare.run("--help")
    assert done.returncode == 0, done.stderr
    names = re.findall(r"^  ([a-z]+)  ", done.stdout.partition("Commands:")[2], re.MULTILINE)
    assert {"probe", "lookup", "explain", "doctor", "import", "merge", "diff", "report", "fleet"} == set(names)
    for name in names:
        told = bare.run(name, "--help")
        assert told.returncode == 0, told.stderr
        assert re.search(rf"^    prober {name} ?", told.stdout, re.MULTILINE), f"{name} --help has no example"


def test_the_wheel_looks_up_and_explains_without_an_engine(bare: Bare) -> None:
    found = bare.run("lookup", "tiny-llama", "--flags", "--results", ROOT / "results")
    assert found.returncode == 0, found.stderr
    assert "--max-model-len 32640" in found.stdout
    log = next(ROOT.glob("tests/logs/v1-parent-wraps*")).read_text()
    explained = bare.run("explain", stdin=log)
    assert explained.returncode == 0, explained.stderr
    assert "needs more KV cache than there is: 5.25 GiB against 4.37 GiB" in explained.stdout


def test_a_probe_without_an_engine_says_how_to_get_one(bare: Bare) -> None:
    done = bare.run("probe", write_model(bare.folder / "model"))
    assert done.returncode == 3
    assert "has no vLLM; install one with `make engine` in a clone, or name another with --python" in done.stderr


@pytest.mark.parametrize(("command", "packages"), [("report", "jinja2"), ("fleet plan.toml --dry-run", "ray")])
def test_a_missing_extra_is_named_with_its_command(bare: Bare, command: str, packages: str) -> None:
    """Never by our own name: what PyPI has under it is somebody else's program."""
    shutil.copytree(ROOT / "results", bare.folder / "results", dirs_exist_ok=True)
    (bare.folder / "plan.toml").write_text('[[engine]]\npython = "python3"\n[[model]]\nname = "m"\n')
    done = bare.run(*command.split())
    assert done.returncode == 3
    assert done.stderr.endswith(f": pip install {packages}.\n")
    assert len(done.stderr.splitlines()) == 1
    assert "pip install" not in bare.run("report", "--markdown").stderr  # needs no extra


def test_version_tells_the_versions_that_matter(bare: Bare, tmp_path: Path) -> None:
    own = f"prober {prober.__version__}\nPython {sys.version.split()[0]}\n"
    assert bare.run("--version").stdout == own
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "lib/python3.12/site-packages/vllm-0.31.0.dist-info").mkdir(parents=True)
    engine = tmp_path / "bin" / "python"
    assert bare.run("--version", ENGINE_PYTHON=str(engine)).stdout == f"{own}vLLM 0.31.0 ({engine})\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_a_completion_script(bare: Bare, shell: str) -> None:
    done = bare.run(_PROBER_COMPLETE=f"{shell}_source")
    assert done.returncode == 0, done.stderr
    assert f"_PROBER_COMPLETE={shell}_complete" in done.stdout


def test_bash_completes_commands_and_options(bare: Bare) -> None:
    def completed(line: str) -> set[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_PROBER_COMPLETE": "bash_complete"}
        return {found.partition(",")[2] for found in bare.run(**words).stdout.splitlines()}

    assert completed("prober lo") == {"lookup"}
    assert completed("prober probe --budget-l") == {"--budget-launches"}
    assert completed("prober probe --verify f") == {"full"}


@pytest.fixture(scope="session")
def clone(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone whose last commit is what lies in this folder, with a dated section in its changelog."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.unpack_archive(built.sdist, folder)
    (copy,) = folder.iterdir()
    for left in ("PKG-INFO", "setup.cfg"):
        (copy / left).unlink()
    shutil.rmtree(copy / "prober.egg-info")
    log = copy / "CHANGELOG.md"
    log.write_text(
        re.sub(r"^## .*", f"## {prober.__version__} (2026-01-31)", log.read_text(), count=1, flags=re.MULTILINE)
    )
    run("git", "init", "--quiet", cwd=copy)
    run("git", "add", "--all", cwd=copy)
    run("git", "-c", "user.name=n", "-c", "user.email=n@n.example", "commit", "--quiet", "-m", "All", cwd=copy)
    (copy / ".venv").symlink_to(Path(sys.executable).parents[1])
    (copy / ".git" / "info" / "exclude").write_text(".venv\n")
    return copy


def test_a_release_is_built_and_summed_from_what_is_committed(clone: Path) -> None:
    done = attempt("scripts/release.sh", prober.__version__, "--dry-run", cwd=clone)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 2
    run("sha256sum", "--check", "--quiet", "SHA256SUMS", cwd=clone / "dist")
    assert run("git", "tag", cwd=clone) == ""


@pytest.mark.parametrize(
    ("version", "reason"),
    [("9.9.9", "prober/__init__.py does not say 9.9.9"), ("next", "next is not a version of the form 1.2.3")],
)
def test_a_release_of_another_version_is_refused(clone: Path, version: str, reason: str) -> None:
    done = attempt("scripts/release.sh", version, "--dry-run", cwd=clone)
    assert done.returncode == 1
    assert done.stderr == f"release: {reason}\n"


def test_a_release_of_what_is_not_committed_is_refused(clone: Path) -> None:
    new = clone / "prober" / "new.py"
    new.touch()
    done = attempt("scripts/release.sh", prober.__version__, "--dry-run", cwd=clone)
    new.unlink()
    assert done.returncode == 1
    assert done.stderr == "release: there are uncommitted changes\n"


def test_pre_commit_looks_at_the_changed_files(clone: Path, tmp_path: Path) -> None:
    def pre_commit(file: str) -> subprocess.CompletedProcess[str]:
        tool = Path(sys.executable).with_name("pre-commit")
        return attempt(tool, "run", "ruff", "--files", file, cwd=clone, PRE_COMMIT_HOME=str(tmp_path))

    assert pre_commit("prober/records.py").returncode == 0
    bad = clone / "prober" / "bad.py"
    bad.write_text("import os\n")
    refused = pre_commit("prober/bad.py")
    bad.unlink()
    assert refused.returncode == 1
    assert "F401" in refused.stdout
