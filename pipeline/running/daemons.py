"""The four programs of an experiment: each finds it by URL and name, waits for what it needs, runs.

Guarantees: a daemon may start before anything else is there and says once what it waits for; what
a user can mend ends it with exit code 2; SIGTERM ends it cleanly with 0, Ctrl-C with 130.
"""

import contextlib
import dataclasses
import os
import re
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import structlog

from pipeline.running.logging_setup import PendingLines, configure
from pipeline.running.loop import Member, Role, Stop, end_with_parent, run
from storage.errors import (
    InvalidNameError,
    StorageError,
    UnavailableError,
    UnsuitableServerError,
)
from storage.keys import checked_experiment, checked_member
from storage.protocol import Lease, Storage

if TYPE_CHECKING:  # both load much; `--help` and wrong options are answered without them
    from algorithms.contract import ActionSpec, ObservationSpec
    from pipeline.configuration import Configuration
    from pipeline.experiment import Experiment

logger = structlog.get_logger()
T = TypeVar("T")

USAGE_ERROR = 2
WAIT_POLL_S = 0.25
LEASE_S = 10.0
"""How long a learner that was killed keeps others of its name out; many times its renewals."""


class _StoppedError(Exception):
    """A signal came while the daemon still waited for what it needs."""


@dataclass(frozen=True)
class Process:
    """This process's way to one experiment."""

    storage: Storage
    experiment: str
    stop: Stop
    lines: PendingLines


def agent_daemon(redis: str, experiment: str, *, name: str | None, learner: str | None) -> int:
    """Step environments and write segments, until stopped. Returns the exit code."""
    agent_id = checked_member("agent", name or f"{_host()}-{os.getpid()}")
    with _process(f"agent-{agent_id}", redis, experiment) as here:
        member_id = f"agent-{agent_id}"
        while True:
            joined, configuration = _wait_for_learner(here, learner)
            _wait(
                here.stop,
                lambda: None if member_id in here.storage.members(experiment) else True,
                f"the agent {agent_id!r} that lives already to be gone",
            )
            _use_threads(configuration.agent.threads)
            from pipeline.acting.agent import AgentRole

            role = AgentRole(here.storage, joined, configuration, agent_id)
            code = _run(here, role, "agent", member_id)
            if not role.experiment_gone or here.stop:
                return code
            logger.warning("the experiment is gone: joining again as a newcomer")


def replay_daemon(redis: str, experiment: str, *, learner: str | None) -> int:
    """Mirror the stream and make a learner's batches, until stopped. Returns the exit code."""
    with _process("replay", redis, experiment) as here:
        joined, configuration = _wait_for_learner(here, learner)
        from pipeline.replaying.replay import ReplayRole

        member_id = _member_id("replay")
        role = ReplayRole(here.storage, joined, configuration, member_id)
        return _run(here, role, "replay", member_id)


def learner_daemon(
    redis: str,
    experiment: str,
    *,
    preset: str | None,
    file: Path | None,
    settings: Iterable[str],
) -> int:
    """Train and publish, until stopped or `learner.total_updates` is reached; creates the
    experiment where there is none. Returns the exit code."""
    from pipeline.experiment import publish_learner
    from pipeline.running.configuring import build

    settings = tuple(settings)
    asked = build(preset, file, settings) if preset or file or settings else None
    with _process("learner", redis, experiment) as here:
        joined, configuration = _published(here) if asked is None else _created(here, asked)
        name = checked_member("learner", configuration.experiment.learner)
        member_id = _member_id("learner")
        lease = _wait(
            here.stop,
            lambda: here.storage.acquire(experiment, f"learner-{name}", member_id, LEASE_S),
            f"the role of learner {name!r}, which another process holds",
        )
        try:
            publish_learner(here.storage, joined, configuration, lease)
            _use_threads(configuration.learner.threads)
            from pipeline.learning.learner import LearnerRole

            role = LearnerRole(here.storage, joined, configuration, lease, member_id)
            return _run(here, role, "learner", member_id)
        finally:
            _release(here, lease)


def evaluator_daemon(
    redis: str, experiment: str, *, learner: str | None, run_folder: Path | None
) -> int:
    """Play greedily with the newest parameters, until stopped. Returns the exit code."""
    with _process("evaluator", redis, experiment) as here:
        joined, configuration = _wait_for_learner(here, learner)
        _use_threads(configuration.agent.threads)
        from pipeline.acting.evaluator import EvaluatorRole

        role = EvaluatorRole(here.storage, joined, configuration, run_folder)
        return _run(here, role, "evaluator", _member_id("evaluator"))


def exit_code(error: BaseException) -> int | None:
    """2 for what the user can mend on the command line, 1 for what went wrong, None for a bug."""
    from pipeline.acting.environment import UnsupportedEnvironmentError
    from pipeline.configuration_codec import ConfigurationError
    from pipeline.running.supervisor import RunFailedError

    if isinstance(
        error,
        ConfigurationError | InvalidNameError | UnsuitableServerError | UnsupportedEnvironmentError,
    ):
        return USAGE_ERROR
    if isinstance(error, StorageError | RunFailedError):
        return 1
    return None


def check_algorithm(
    configuration: "Configuration", observations: "ObservationSpec", actions: "ActionSpec"
) -> None:
    """Raise ConfigurationError where the algorithm does not support the environment's spaces."""
    from algorithms.catalog import load_algorithm
    from pipeline.configuration_codec import ConfigurationError

    algorithm = load_algorithm(configuration.algorithm_name)
    try:
        algorithm.make_policy(configuration.algorithm, observations, actions)
    except ValueError as error:
        raise ConfigurationError(
            f"algorithm {algorithm.name!r} on {configuration.experiment.environment.id}: {error}"
        ) from error


# ---------------------------------------------------------------------- beginning and ending


@contextlib.contextmanager
def _process(who: str, redis: str, experiment: str) -> Iterator[Process]:
    """Signals, messages and the server of a daemon; ends it quietly when stopped while waiting."""
    checked_experiment(experiment)
    lines = configure(who)
    stop = Stop().install()
    if parent := os.environ.get("REDREEL_PARENT_PID"):
        end_with_parent(int(parent))
    from storage.url import open_storage

    storage = open_storage(redis)
    try:
        for warning in _wait(stop, storage.check_server, "the server"):
            logger.warning("server", warning=warning)
        yield Process(storage, experiment, stop, lines)
    except _StoppedError:
        raise SystemExit(_stopped_code(stop)) from None
    finally:
        storage.close()


def _run(here: Process, role: Role, kind: str, member_id: str) -> int:
    logger.info("started", role=kind, experiment=here.experiment, member=member_id)
    lost = run(role, Member(here.experiment, member_id, kind), here.storage, here.stop, here.lines)
    if lost:
        return 1  # a supervisor starts it again, and it waits for the role
    return _stopped_code(here.stop)


def _stopped_code(stop: Stop) -> int:
    return 130 if stop.signal_number == signal.SIGINT else 0


def _use_threads(count: int) -> None:
    """Processes of one machine share its cores: none takes more than it is told."""
    import torch

    torch.set_num_threads(count)
    logger.info("torch threads", count=count)


def _release(here: Process, lease: Lease) -> None:
    with contextlib.suppress(StorageError):  # else it runs out by itself
        here.storage.release(here.experiment, lease)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:40] or "host"


def _member_id(role: str) -> str:
    return f"{role}-{_host()}-{os.getpid()}"


# ---------------------------------------------------------------------- waiting for the others


def _wait(stop: Stop, find: Callable[[], T | None], what: str) -> T:
    """Ask `find` until it finds; what is waited for is said once, an unreachable server too."""
    said: set[str] = set()
    while not stop:
        try:
            found = find()
            waiting = f"waiting for {what}"
        except UnavailableError as error:
            found, waiting = None, f"server unreachable: waiting for it ({error})"
        if found is not None:
            if said:
                logger.info("no longer waiting", was=what)
            return found
        if waiting not in said:
            said.add(waiting)
            logger.info(waiting)
        stop.sleep(WAIT_POLL_S)
    raise _StoppedError


def _wait_for_experiment(here: Process) -> "Experiment":
    from pipeline.experiment import join

    return _wait(
        here.stop,
        lambda: join(here.storage, here.experiment),
        f"the experiment {here.experiment!r}: its learner creates it",
    )


def _wait_for_learner(here: Process, learner: str | None) -> tuple["Experiment", "Configuration"]:
    """The experiment and what its learner has published of itself."""
    from pipeline.experiment import read_learner

    if learner is not None:
        checked_member("learner", learner)
    joined = _wait_for_experiment(here)
    name = learner or joined.config.learner
    configuration = _wait(
        here.stop,
        lambda: read_learner(here.storage, joined, name),
        f"the configuration of learner {name!r}",
    )
    return joined, configuration


def _published(here: Process) -> tuple["Experiment", "Configuration"]:
    """What the experiment's learner published before. Raises ConfigurationError if nothing."""
    from pipeline.configuration_codec import ConfigurationError
    from pipeline.experiment import join, read_learner

    def read() -> tuple["Experiment", "Configuration"]:
        joined = join(here.storage, here.experiment)
        if joined is None:
            raise ConfigurationError(
                f"there is no experiment {here.experiment!r} to go on with: create it with "
                "--preset, --config or --set, such as --preset cartpole-dqn"
            )
        configuration = read_learner(here.storage, joined, joined.config.learner)
        if configuration is None:
            raise ConfigurationError(
                f"learner {joined.config.learner!r} of experiment {here.experiment!r} has "
                "published no configuration yet: give it with --preset, --config or --set"
            )
        return joined, configuration

    return _wait(here.stop, read, "the experiment")


def _created(here: Process, asked: "Configuration") -> tuple["Experiment", "Configuration"]:
    """The experiment as `asked`, made or found. Raises ConfigurationError where it differs."""
    from pipeline.acting.environment import describe_environment
    from pipeline.configuration_codec import ConfigurationError
    from pipeline.experiment import create, differences

    observations, actions = describe_environment(asked.experiment)
    check_algorithm(asked, observations, actions)
    joined = _wait(
        here.stop,
        lambda: create(here.storage, here.experiment, asked, observations, actions),
        "the server",
    )
    # Another learner of the same experiment has another name, and agents act for the first.
    wanted = dataclasses.replace(asked.experiment, learner=joined.config.learner)
    wrong = differences(joined, wanted)
    if joined.observations != observations:
        wrong.append(f"observations are {joined.observations}, here {observations}")
    if joined.actions != actions:
        wrong.append(f"actions are {joined.actions}, here {actions}")
    if wrong:
        raise ConfigurationError(
            f"experiment {here.experiment!r} stands and never changes: {'; '.join(wrong)}; "
            "ask for what stands, or take another name"
        )
    return joined, asked
