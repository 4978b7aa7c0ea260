"""What must hold for the code as text: linter, types, import directions, what may not appear."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOP_LEVEL = {
    "pipeline", "storage", "algorithms", "bin", "tests", "docs", "Pipfile", "README.md",
    "pyproject.toml", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", ".ci", ".gitignore",
    "benchmarks", "deploy", "examples", "SECURITY.md",
}  # fmt: skip


def tracked() -> list[Path]:
    """Files of the project; of the checkout where there is no git (a downloaded archive)."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name.decode() for name in listed.stdout.split(b"\0") if name]
    return [path for path in paths if path.exists()]


def passes(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_linter_finds_nothing() -> None:
    passes("ruff", "check", ".")


def test_formatter_would_change_nothing() -> None:
    passes("ruff", "format", "--check", ".")


def test_types_fit() -> None:
    passes("mypy")


def test_import_directions_hold() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kept, 0 broken" in done.stdout


def test_nothing_unpickles() -> None:
    # weights_only and safetensors aside, these are the ways by which data becomes code
    forbidden = re.compile(
        r"\b(import pickle|from pickle|cloudpickle|import dill|import shelve|import marshal"
        r"|torch\.load|torch\.save|allow_pickle=True|yaml\.load\()"
    )
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in tracked()
        if path.suffix == ".py" and path.name != "test_code.py"
        for match in forbidden.finditer(path.read_text())
    ]
    assert found == []


def test_storage_loads_without_torch() -> None:
    script = (
        "import sys, storage.url, storage.redis_store, storage.codec; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_top_level_holds_what_it_should_and_no_more() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in tracked()} <= TOP_LEVEL


def test_pins_are_exact_and_name_no_source() -> None:
    lines = (ROOT / "Pipfile").read_text().splitlines()
    packages = [line for line in lines if "=" in line and not line.startswith("#")]
    assert packages
    assert [line for line in packages if not re.fullmatch(r'[a-z0-9-]+ = "==[0-9.]+"', line)] == []
    assert not any(line.startswith("[[source]]") for line in lines)
    assert (
        not (ROOT / "Pipfile.lock").exists() or "Pipfile.lock" in (ROOT / ".gitignore").read_text()
    )


def test_programs_of_bin_can_be_started() -> None:
    for path in (ROOT / "bin").iterdir():
        assert path.stat().st_mode & 0o111, path.name
        assert path.read_text().startswith("#!/bin/sh"), path.name
