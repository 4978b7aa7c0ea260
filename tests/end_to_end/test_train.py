"""`bin/train` as a user runs it: a real redis-server, real processes, a real score."""

import json
import signal
import subprocess
from collections.abc import Callable

import pytest

from tests.end_to_end.conftest import ROOT, processes_of, program, wait_until

Start = Callable[..., "subprocess.Popen[str]"]

SUMMARY_FIELDS = {
    "experiment", "algorithm", "environment", "solved", "env_steps", "learner_updates",
    "eval_return_mean", "eval_return_std", "wall_s", "env_steps_per_s", "updates_per_s",
    "samples_per_s", "segments_written", "segments_sampled_from", "segments_dropped",
    "frames_written", "frames_deduplicated", "restarts",
}  # fmt: skip


@pytest.mark.learning
def test_a_run_learns_says_what_it_reached_and_leaves_a_sound_store(
    run_name: str, start: Start
) -> None:
    # 60 is far beyond a random policy (22); the full 475 is a benchmark, not a test.
    output, _ = (
        train := start(
            "train",
            "--preset",
            "cartpole-dqn",
            "--name",
            run_name,
            "--set",
            "evaluation.target_return=60",
            "--set",
            "run.max_wall_s=90",
        )
    ).communicate(timeout=110)
    assert train.returncode == 0, output
    folder = ROOT / "runs" / run_name
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) == SUMMARY_FIELDS
    assert summary["solved"] is True
    assert summary["eval_return_mean"] >= 60
    assert summary["env_steps"] >= 1_000  # nothing is learned before minimum_steps
    assert summary["learner_updates"] > 0
    assert summary["restarts"] == 0
    for name in ("config.yaml", "metrics.jsonl", "curves.png", "policy/policy.safetensors"):
        assert (folder / name).stat().st_size > 0, name
    assert not processes_of(run_name)

    check = subprocess.run(
        program("inspect", "--run", run_name, "check"),
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert check.returncode == 0, check.stdout + check.stderr


def test_interrupting_a_run_stops_everything_and_exits_130(run_name: str, start: Start) -> None:
    train = start("train", "--preset", "catch-dqn", "--name", run_name)
    # redis-server, replay, learner, agents, evaluator, and train itself
    wait_until(lambda: len(processes_of(run_name)) >= 5, 30, "the children are up")
    train.send_signal(signal.SIGINT)
    output, _ = train.communicate(timeout=40)
    assert train.returncode == 130, output
    assert "Traceback" not in output
    assert not processes_of(run_name)
    assert (ROOT / "runs" / run_name / "summary.json").exists()


def test_killing_a_run_ends_its_children_within_ten_seconds(run_name: str, start: Start) -> None:
    train = start("train", "--preset", "catch-dqn", "--name", run_name)
    wait_until(lambda: len(processes_of(run_name)) >= 5, 30, "the children are up")
    train.kill()
    train.wait()
    wait_until(lambda: not processes_of(run_name), 10, "the children are gone")
