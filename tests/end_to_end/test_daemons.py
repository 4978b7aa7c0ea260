"""The four programs started by hand, in any order, on a server that somebody else runs."""

import re
import signal
import subprocess
import time
from collections.abc import Callable

from storage.url import open_storage
from tests.end_to_end.conftest import program, wait_until

Start = Callable[..., "subprocess.Popen[str]"]


def test_daemons_started_before_their_learner_wait_and_then_work(
    run_name: str, start: Start, redis_url: str
) -> None:
    where = ("--redis", redis_url, "--experiment", run_name)
    agents = [start("start-agent", *where, "--name", name) for name in ("left", "right")]
    replay = start("start-replay", *where)
    evaluator = start("start-evaluator", *where)
    storage = open_storage(redis_url)
    time.sleep(1.0)
    assert storage.read_config(run_name) is None  # nobody but a learner creates an experiment
    learner = start(
        "start-learner", *where, "--preset", "cartpole-dqn", "--set", "replay.minimum_steps=200"
    )

    def version() -> int:
        head = storage.parameters_head(run_name, "main")
        return head.version if head else 0

    wait_until(lambda: version() > 3, 40, "parameters flow")

    def roles() -> list[str]:
        return sorted(fields["role"] for fields in storage.members(run_name).values())

    all_roles = ["agent", "agent", "evaluator", "learner", "replay"]
    wait_until(lambda: roles() == all_roles, 5, "every member has sent a heartbeat")

    # One killed agent is nobody's concern; started again, its id goes on.
    agents[0].kill()
    agents[0].wait()
    before = storage.position(run_name, 0).total_steps
    wait_until(lambda: storage.position(run_name, 0).total_steps > before + 500, 20, "it goes on")

    # Learner and replay are killed and come back: versions only grow.
    last = version()
    learner.kill()
    replay.kill()
    learner.wait(), replay.wait()
    start("start-replay", *where)
    start("start-learner", *where)
    wait_until(lambda: version() > last + 3, 60, "the new learner publishes beyond the old")

    agents[1].send_signal(signal.SIGTERM)
    output, _ = agents[1].communicate(timeout=30)
    assert agents[1].returncode == 0, output
    assert f"waiting for the experiment '{run_name}'" in output
    evaluator.send_signal(signal.SIGINT)
    assert evaluator.wait(timeout=30) == 130
    assert "Traceback" not in output
    assert storage.audit(run_name).problems == ()
    storage.close()


def test_a_daemon_without_arguments_says_how_it_is_called() -> None:
    for name in ("start-agent", "start-replay", "start-learner", "start-evaluator", "inspect"):
        done = subprocess.run(program(name), capture_output=True, text=True, timeout=30)
        assert done.returncode == 2
        assert re.search(rf"bin/{name} --r", done.stderr), done.stderr
