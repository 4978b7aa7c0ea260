"""An agent: steps environment copies with the newest parameters and writes what happens.

Guarantees: one entry is acted with one parameter version; no step is lost but those that
`agent.when_full: drop` drops and counts; a slow or absent server stops the agent, never its memory.
"""

import time
from collections import deque

import numpy as np
import structlog
from numpy.typing import NDArray

from algorithms.catalog import load_algorithm
from pipeline.acting.environment import make_environment
from pipeline.acting.frame_stacker import FrameStacker
from pipeline.acting.segmenter import CutEntry, Segmenter
from pipeline.acting.sender import UNKNOWN_EXPERIMENT, Sender
from pipeline.acting.vector_environment import StepResult
from pipeline.acting.vector_step import VectorStep
from pipeline.configuration import Configuration
from pipeline.experiment import Experiment
from pipeline.parameters import ParameterFollower, ParameterSet
from pipeline.seeds import derived_seed
from storage.protocol import Storage

logger = structlog.get_logger()

STEP_S = 0.05
"""Environments are stepped for this long before the loop looks at signals again."""
WAIT_S = 0.1
FLUSH_S = 10.0
"""Longest time that a leaving agent takes for entries that are not answered yet."""
RETURNS_KEPT = 100
"""Episodes that `episode_return_mean` is over."""


class AgentRole:
    """One agent process's work; `step` is called over and over."""

    def __init__(
        self,
        storage: Storage,
        experiment: Experiment,
        configuration: Configuration,
        agent_id: str,
    ) -> None:
        config = experiment.config
        self._config = config
        self._when_full = configuration.agent.when_full
        self._algorithm = load_algorithm(configuration.algorithm_name)
        self._algorithm_config = configuration.algorithm
        self._learner = configuration.experiment.learner
        self._index = storage.register_agent(experiment.name, agent_id)
        shard = self._index % config.shards
        incarnation = storage.register_writer(
            experiment.name, shard, agent_id, experiment.creation_id
        )
        self._steps_before = sum(
            storage.position(experiment.name, one).total_steps for one in range(config.shards)
        )
        seeds = [
            derived_seed(config.seed, "environment", self._index, copy)
            for copy in range(config.copies)
        ]
        self._environment = make_environment(config, config.copies, seeds)
        if self._environment.copies != config.copies:
            raise ValueError(f"environment has {self._environment.copies} copies: {config.copies}")
        logger.info(
            "environment",
            **{
                name.replace(" ", "_"): value
                for name, value in self._environment.description.items()
            },
        )
        self._policy = self._algorithm.make_policy(
            self._algorithm_config, experiment.observations, experiment.actions
        )
        # A run that must repeat knows no incarnations; elsewhere a restarted agent explores anew.
        again = 0 if config.synchronous else incarnation
        self._rng = np.random.Generator(
            np.random.Philox(key=[derived_seed(config.seed, "policy", self._index), again])
        )
        self._stacker = FrameStacker(experiment.observations, config.copies)
        self._segmenter = Segmenter(experiment.observations, experiment.actions, config)
        self._observation = self._environment.reset()
        self._stacked = self._stacker.reset(np.ones(config.copies, bool), self._observation)
        self._state = self._policy.initial_state(config.copies)

        self._parameters: ParameterSet | None = None
        self._acting_with = (0, 0)
        self._turn: int | None = None
        """Synchronous mode: the entry whose parameters are waited for."""
        self._first_open_at = 0.0
        self._waiting = "the first parameters: the learner publishes them"
        self._steps = 0
        self._episodes = 0
        self._returns: deque[float] = deque(maxlen=RETURNS_KEPT)
        self._return = np.zeros(config.copies)
        self._rate_since = (time.monotonic(), 0)
        self._exploration = 0.0
        self.finished = False
        self.experiment_gone = False
        """The experiment was deleted, or another stands in its place: join it as a newcomer."""

        self._sender = Sender(
            storage, experiment, shard, agent_id, incarnation, configuration.agent
        )
        self._follower = ParameterFollower(
            storage,
            experiment.name,
            self._learner,
            on_connected=lambda: logger.info("parameters: connected", learner=self._learner),
            on_lost=lambda: logger.warning("parameters: connection lost", learner=self._learner),
        )
        logger.info("agent", index=self._index, shard=shard, incarnation=incarnation)

    # ------------------------------------------------------------------ the loop's side

    def step(self) -> bool:
        """Step for a moment; False when there was nothing to do but wait."""
        self._sender.raise_error()
        if self._sender.ended:
            self.finished = True
            self.experiment_gone = self._sender.ended == UNKNOWN_EXPERIMENT
            logger.warning("leaving", reason=self._sender.ended)
            return False
        if not self._ready():
            return False
        until = time.monotonic() + STEP_S
        while self._turn is None and time.monotonic() < until and not self._held_up():
            self._vector_step()
        return True

    def status(self) -> dict[str, str]:
        waiting = self._waiting or self._sender.status()["waiting"]
        return {
            "index": str(self._index),
            "learner": self._learner,
            "version": str(self._acting_with[1]),
            "waiting": waiting,
        }

    def metrics(self) -> dict[str, float]:
        now = time.monotonic()
        since, steps = self._rate_since
        self._rate_since = (now, self._steps)
        values = {
            "env_steps": float(self._steps),
            "env_steps_per_s": (self._steps - steps) / max(now - since, 1e-9),
            "episodes": float(self._episodes),
            "exploration": self._exploration,
            "version": float(self._acting_with[1]),
            **self._sender.metrics(),
        }
        if self._returns:
            values["episode_return_mean"] = float(np.mean(list(self._returns)))
        return values

    def drain(self) -> None:
        """Write what is open and wait until the server has it."""
        if self._sender.ended:
            return
        for cut in self._segmenter.cut():
            self._send(cut)
        if not self._sender.flush(FLUSH_S):
            logger.warning("left before the server answered for everything")

    def close(self) -> None:
        self._sender.close()
        self._follower.close()
        self._environment.close()

    # ------------------------------------------------------------------ waiting

    def _ready(self) -> bool:
        """Whether the next vector step may be made; waits a moment where not."""
        if self._turn is not None:
            return self._turn_over(self._turn)
        if self._parameters is None:
            if self._follower.wait_newer(None, WAIT_S) is None:
                return False
            self._take_parameters()
            self._waiting = ""
        return not self._held_up()

    def _held_up(self) -> bool:
        return self._when_full == "wait" and self._sender.full

    def _turn_over(self, entry: int) -> bool:
        """Synchronous mode: whether the parameters that have learned from `entry` are here."""
        if entry == 0:
            written = self._sender.wait_written(WAIT_S)
            if written is None:
                self._waiting = "the server's answer for the last entry"
                return False
            self._turn = entry = written
        if self._follower.wait_entry(entry, WAIT_S) is None:
            self._waiting = f"the learner's turn: parameters that have learned from entry {entry}"
            return False
        self._turn = None
        self._waiting = ""
        self._take_parameters()
        return True

    # ------------------------------------------------------------------ acting

    def _vector_step(self) -> None:
        if self._segmenter.open_steps == 0:
            self._first_open_at = time.monotonic()
        self._exploration = self._algorithm.exploration(
            self._algorithm_config,
            self._index,
            self._config.agents,
            self._steps_before + self._steps * self._config.agents,
        )
        acted = self._policy.act(self._stacked, self._state, self._rng, self._exploration)
        result = self._environment.step(acted.action)
        cuts = self._segmenter.add(
            VectorStep(
                self._observation,
                acted.action,
                result.reward,
                result.terminated,
                result.truncated,
                result.final_observation,
                result.valid,
                acted.recorded,
                self._state,
            )
        )
        self._observation = dict(result.observation)
        self._stacked = self._stacker.push(self._observation, result.starts)
        self._state = self._begun(acted.state, result.starts)
        self._count(result)
        if not cuts and not self._config.synchronous:
            age_s = time.monotonic() - self._first_open_at
            if age_s >= self._config.entry_max_age_s:
                cuts = self._segmenter.cut()
        if cuts:
            for cut in cuts:
                self._send(cut)
            self._between_entries()

    def _begun(self, state: dict[str, NDArray], starts: NDArray[np.bool_]) -> dict[str, NDArray]:
        """Recurrent state for the next step: initial where an episode begins."""
        if not state or not starts.any():
            return state
        initial = self._policy.initial_state(self._config.copies)
        return {
            name: np.where(starts.reshape(-1, *(1,) * (rows.ndim - 1)), initial[name], rows)
            for name, rows in state.items()
        }

    def _count(self, result: StepResult) -> None:
        self._steps += int(np.count_nonzero(result.valid))
        self._return += result.reward
        for copy in np.flatnonzero(result.terminated | result.truncated).tolist():
            self._episodes += 1
            self._returns.append(float(self._return[copy]))
            self._return[copy] = 0.0

    def _send(self, cut: CutEntry) -> None:
        fence, version = self._acting_with
        self._sender.send(cut, learner=self._learner, fence=fence, version=version)

    def _between_entries(self) -> None:
        """New parameters are taken over here only: an entry has one version."""
        if self._config.synchronous:
            # A step that was too big for the entry before it was acted before this turn.
            for cut in self._segmenter.cut():
                self._send(cut)
            self._turn = 0
        elif self._segmenter.open_steps == 0:
            self._take_parameters()

    def _take_parameters(self) -> None:
        latest = self._follower.latest
        if latest is None or (self._parameters and latest.order <= self._parameters.order):
            return
        self._policy.load(latest.arrays)
        self._parameters = latest
        self._acting_with = latest.order
