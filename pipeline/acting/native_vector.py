"""A Gymnasium vector environment, in whichever autoreset mode it declares.

Guarantees: those of `VectorEnvironment`. SAME_STEP: the final observation is taken from
`info["final_obs"]`. NEXT_STEP: the step that only resets a copy is marked as not valid. DISABLED:
ended copies are reset here, with `options={"reset_mask": …}`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from pipeline.acting.copies import EpisodeClock
from pipeline.acting.observation_reader import ObservationReader, refuse_not_finite
from pipeline.acting.spaces import action_spec, observation_spec, outgoing_actions
from pipeline.acting.vector_environment import (
    DamagedStepError,
    StepResult,
    UnsupportedEnvironmentError,
)


class NativeVector:
    """A `VectorEnvironment` over a `gymnasium.vector.VectorEnv`."""

    def __init__(
        self,
        environment: gymnasium.vector.VectorEnv,
        seeds: Sequence[int],
        stack: int,
        description: dict[str, str],
    ) -> None:
        """Raises UnsupportedEnvironmentError."""
        mode = (environment.metadata or {}).get("autoreset_mode")
        try:
            self._mode = AutoresetMode(mode)
        except ValueError:
            raise UnsupportedEnvironmentError(
                f"vector environment {type(environment).__name__}: "
                f"metadata['autoreset_mode'] is {mode!r}, should be an AutoresetMode"
            ) from None
        self.observations = observation_spec(environment.single_observation_space, stack)
        self.actions = action_spec(environment.single_action_space)
        self.copies = int(environment.num_envs)
        self.description = description | {"autoreset": self._mode.value}
        self._environment = environment
        self._seeds = list(seeds)
        self._reader = ObservationReader(environment.single_observation_space)
        self._outgoing = outgoing_actions(environment.single_action_space)
        self._clock = EpisodeClock(self.copies)
        self._resets_next = np.zeros(self.copies, bool)

    def reset(self, seeds: Sequence[int] | None = None) -> dict[str, NDArray]:
        self._clock = EpisodeClock(self.copies)
        self._resets_next[:] = False
        chosen = [int(seed) for seed in (self._seeds if seeds is None else seeds)]
        given, _ = self._environment.reset(seed=chosen)  # type: ignore[arg-type]  # takes lists
        return self._taken(given)

    def step(self, action: NDArray) -> StepResult:
        given, reward, terminated, truncated, info = self._environment.step(self._outgoing(action))
        valid = ~self._resets_next
        terminated = np.array(terminated, bool) & valid
        truncated = np.array(truncated, bool) & valid & ~terminated
        reward = np.where(valid, np.asarray(reward, np.float32), np.float32(0))
        refuse_not_finite("reward", reward, self._clock.where)
        observation = self._taken(given)
        ended = terminated | truncated
        final = observation
        if ended.any():
            if self._mode is AutoresetMode.SAME_STEP:
                final = self._finals(observation, info, ended)
            elif self._mode is AutoresetMode.DISABLED:
                fresh, _ = self._environment.reset(options={"reset_mask": ended})
                taken = self._taken(fresh)
                observation = {
                    name: np.where(_wide(ended, rows), taken[name], rows)
                    for name, rows in final.items()
                }
        if self._mode is AutoresetMode.NEXT_STEP:
            self._resets_next = ended
        self._clock.advance(ended)
        return StepResult(observation, final, reward, terminated, truncated, valid)

    def close(self) -> None:
        self._environment.close()

    def _taken(self, given: Any) -> dict[str, NDArray]:
        taken = self._reader.take(self.copies, given)
        self._reader.refuse_damage(taken, self._clock.where)
        return taken

    def _finals(
        self, observation: Mapping[str, NDArray], info: Mapping[str, Any], ended: NDArray
    ) -> dict[str, NDArray]:
        finals = info.get("final_obs")
        if finals is None:
            raise DamagedStepError(
                "info['final_obs'] is missing though an episode ended: the environment declares "
                "the autoreset mode SameStep"
            )
        rows = {name: values.copy() for name, values in observation.items()}
        for copy in np.flatnonzero(ended).tolist():
            given = (
                {key: part[copy] for key, part in finals.items()}
                if isinstance(finals, Mapping)
                else finals[copy]
            )
            self._reader.store(rows, copy, given, self._clock.where)
        self._reader.refuse_damage(rows, self._clock.where)
        return rows


def _wide(mask: NDArray, rows: NDArray) -> NDArray:
    return mask.reshape(-1, *(1,) * (rows.ndim - 1))
