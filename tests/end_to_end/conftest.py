"""Runs whole programs: every run gets a name of its own, and must leave no process behind."""

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_name() -> Iterator[str]:
    name = f"e2e-{secrets.token_hex(4)}"
    yield name
    left = processes_of(name)
    for process in left:
        process.kill()
    for folder in (ROOT / "runs").glob(f"{name}*"):
        shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"left behind: {[p.info['cmdline'] for p in left]}"


def processes_of(name: str) -> list[psutil.Process]:
    """Every living process whose command line, or working directory, speaks of the run."""
    mine = os.getpid()
    found = []
    for process in psutil.process_iter(["cmdline", "pid", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if name in line and alive and process.info["pid"] != mine and "pytest" not in line:
            found.append(process)
    return found


def program(name: str, *arguments: str) -> list[str]:
    """The command line of a program of bin/, in this test's own interpreter."""
    return [sys.executable, "-m", "pipeline.running.commands", name, *arguments]


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a program of bin/; whatever still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(name: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            program(name, *arguments),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_until(condition: Callable[[], bool], within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.1)
