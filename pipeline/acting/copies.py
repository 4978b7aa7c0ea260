"""N environments stepped one after the other as one vector, each reset at once when it ends.

Guarantees: those of `VectorEnvironment`; a reset step is never seen, since the ended episode's last
observation and the next one's first come in the same result.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from pipeline.acting.observation_reader import ObservationReader, refuse_not_finite
from pipeline.acting.spaces import action_spec, observation_spec, outgoing_actions
from pipeline.acting.vector_environment import DamagedStepError, StepResult


class Copies:
    """A `VectorEnvironment` over single Gymnasium environments."""

    def __init__(
        self,
        environments: Sequence[gymnasium.Env],
        seeds: Sequence[int],
        stack: int,
        description: dict[str, str],
    ) -> None:
        """Raises UnsupportedEnvironmentError."""
        first = environments[0]
        self.observations = observation_spec(first.observation_space, stack)
        self.actions = action_spec(first.action_space)
        self.copies = len(environments)
        self.description = description
        self._environments = environments
        self._seeds = list(seeds)
        self._reader = ObservationReader(first.observation_space)
        self._outgoing = outgoing_actions(first.action_space)
        self._discrete = isinstance(first.action_space, gymnasium.spaces.Discrete)
        self._clock = EpisodeClock(self.copies)

    def reset(self, seeds: Sequence[int] | None = None) -> dict[str, NDArray]:
        observation = self._reader.empty(self.copies)
        self._clock = EpisodeClock(self.copies)
        for copy, (environment, seed) in enumerate(
            zip(self._environments, self._seeds if seeds is None else seeds, strict=True)
        ):
            given, _ = _noted(environment.reset, copy, self._clock, seed=int(seed))
            self._reader.store(observation, copy, given, self._clock.where)
        self._reader.refuse_damage(observation, self._clock.where)
        return observation

    def step(self, action: NDArray) -> StepResult:
        outgoing = self._outgoing(action)
        if self._discrete:
            outgoing = outgoing.tolist()  # plain ints: some environments index with them
        final = self._reader.empty(self.copies)
        reward = np.zeros(self.copies, np.float32)
        terminated = np.zeros(self.copies, bool)
        truncated = np.zeros(self.copies, bool)
        for copy, environment in enumerate(self._environments):
            given, amount, ends, cut, _ = _noted(
                environment.step, copy, self._clock, outgoing[copy]
            )
            self._reader.store(final, copy, given, self._clock.where)
            reward[copy] = _number(amount, copy, self._clock)
            terminated[copy] = ends
            truncated[copy] = cut and not ends
        refuse_not_finite("reward", reward, self._clock.where)
        self._reader.refuse_damage(final, self._clock.where)
        ended = terminated | truncated
        self._clock.advance(ended)
        observation = final
        if ended.any():
            observation = {name: rows.copy() for name, rows in final.items()}
            for copy in np.flatnonzero(ended).tolist():
                given, _ = _noted(self._environments[copy].reset, copy, self._clock)
                self._reader.store(observation, copy, given, self._clock.where)
            self._reader.refuse_damage(observation, self._clock.where)
        valid = np.ones(self.copies, bool)
        return StepResult(observation, final, reward, terminated, truncated, valid)

    def close(self) -> None:
        for environment in self._environments:
            environment.close()


class EpisodeClock:
    """Which step of which episode each copy is at, for messages."""

    def __init__(self, copies: int) -> None:
        self._step = np.zeros(copies, np.int64)
        self._episode = np.zeros(copies, np.int64)

    def advance(self, ended: NDArray[np.bool_]) -> None:
        self._step += 1
        self._step[ended] = 0
        self._episode += ended

    def where(self, copy: int) -> str:
        return f"copy {copy}, step {self._step[copy]} of episode {self._episode[copy]}"


def _number(reward: Any, copy: int, clock: EpisodeClock) -> float:
    try:
        return float(reward)
    except (TypeError, ValueError):
        raise DamagedStepError(
            f"reward: {reward!r} at {clock.where(copy)}, should be a number"
        ) from None


def _noted(function: Any, copy: int, clock: EpisodeClock, *values: Any, **named: Any) -> Any:
    """Call into an environment; its own exception learns where it happened."""
    try:
        return function(*values, **named)
    except Exception as error:
        error.add_note(f"in the environment, {clock.where(copy)}")
        raise
