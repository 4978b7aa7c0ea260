"""Environments of the old gym (up to 0.26), seen as Gymnasium ones: `gym:ID`.

Guarantees: both step forms are taken, five values and the older four, in which
`info["TimeLimit.truncated"]` tells a time limit from an end of the task; both reset forms too.
"""

import inspect
import logging
import warnings
from typing import Any

import gymnasium
import numpy as np

from pipeline.acting.vector_environment import UnsupportedEnvironmentError


def make_old_gym(gym_id: str, options: dict[str, Any]) -> gymnasium.Env:
    """Make `gym_id` with the package gym. Raises UnsupportedEnvironmentError."""
    # Its notice that it is unmaintained would greet every process.
    logging.getLogger("gym").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import contextlib
        import io

        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            import gym
        try:
            # Its checker uses names that numpy 2 no longer has.
            made = gym.make(gym_id, disable_env_checker=True, **options)
        except (gym.error.Error, ImportError, TypeError) as error:
            message = " ".join(str(error).split())
            raise UnsupportedEnvironmentError(f"environment 'gym:{gym_id}': {message}") from error
    return OldGym(made)


class OldGym(gymnasium.Env):
    """One environment with the old interface."""

    def __init__(self, old: Any) -> None:
        self._old = old
        self.observation_space = new_space(old.observation_space)
        self.action_space = new_space(old.action_space)
        self._reset_takes_seed = "seed" in inspect.signature(old.reset).parameters or any(
            one.kind is inspect.Parameter.VAR_KEYWORD
            for one in inspect.signature(old.reset).parameters.values()
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is not None and not self._reset_takes_seed and hasattr(self._old, "seed"):
            self._old.seed(seed)
            seed = None
        given = self._old.reset(seed=seed) if self._reset_takes_seed else self._old.reset()
        if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], dict):
            return given
        return given, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        with warnings.catch_warnings():
            # Wrappers of gym 0.26 check with np.bool8, which numpy 2 does not have.
            warnings.simplefilter("ignore")
            given = self._old.step(action)
        if len(given) == 5:
            return given
        observation, reward, done, info = given
        truncated = bool(done) and bool(info.get("TimeLimit.truncated", False))
        return observation, reward, bool(done) and not truncated, truncated, info

    def close(self) -> None:
        self._old.close()


def new_space(space: Any) -> gymnasium.Space:
    """The Gymnasium space that is like an old one. Raises UnsupportedEnvironmentError."""
    if isinstance(space, gymnasium.Space):
        return space
    kind = type(space).__name__
    if kind == "Box":
        return gymnasium.spaces.Box(space.low, space.high, space.shape, space.dtype)
    if kind == "Discrete":
        return gymnasium.spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0)))
    if kind == "MultiDiscrete":
        return gymnasium.spaces.MultiDiscrete(np.asarray(space.nvec))
    if kind == "MultiBinary":
        shape = tuple(int(size) for size in space.shape)
        return gymnasium.spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)
    if kind == "Dict":
        return gymnasium.spaces.Dict({key: new_space(part) for key, part in space.spaces.items()})
    raise UnsupportedEnvironmentError(f"space {space} of the old gym is not supported")
