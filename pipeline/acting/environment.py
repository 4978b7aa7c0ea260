"""Finds and makes an environment by its id, as one vector of copies.

Guarantees: an id that cannot be made is answered in one line that says what was tried; the copies
get the seeds given, one each; what is in effect stands in `description`.

Ids: a Gymnasium id; `ALE/…`, with the standard Atari preprocessing; `gym:ID`, of the old gym;
`module:Class`, your own (Gymnasium, vector, or old gym interface); `catch`, the built-in image game.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.wrappers import TimeLimit

from algorithms.contract import ActionSpec, ObservationSpec
from pipeline.acting.atari import PREPROCESSING, make_atari
from pipeline.acting.catch import Catch
from pipeline.acting.copies import Copies
from pipeline.acting.gym_adapter import OldGym, make_old_gym
from pipeline.acting.native_vector import NativeVector
from pipeline.acting.spaces import action_spec, observation_spec
from pipeline.acting.vector_environment import UnsupportedEnvironmentError, VectorEnvironment
from pipeline.configuration import EnvironmentConfig, ExperimentConfig

__all__ = [
    "UnsupportedEnvironmentError",
    "VectorEnvironment",
    "describe_environment",
    "make_environment",
]


def make_environment(
    config: ExperimentConfig, copies: int, seeds: Sequence[int]
) -> VectorEnvironment:
    """Make `copies` of the environment. Raises UnsupportedEnvironmentError."""
    environment = config.environment
    description = {"id": environment.id, "copies": str(copies)}
    maker = _maker(environment)
    if isinstance(maker, type) and issubclass(maker, gymnasium.vector.VectorEnv):
        if environment.max_episode_steps:
            raise UnsupportedEnvironmentError(
                "experiment.environment.max_episode_steps: a vector environment keeps its own "
                "time limit; set it by experiment.environment.options"
            )
        vector = _called(environment.id, maker, {"num_envs": copies, **environment.options})
        return NativeVector(vector, seeds, config.stack, description)
    made = [_single(environment, maker) for _ in range(copies)]
    if made[0].spec is not None and made[0].spec.max_episode_steps:
        description["time limit"] = f"{made[0].spec.max_episode_steps} steps"
    if environment.max_episode_steps:
        description["time limit"] = f"{environment.max_episode_steps} steps"
    if environment.id.startswith("ALE/"):
        description |= PREPROCESSING
    return Copies(made, seeds, config.stack, description)


def describe_environment(config: ExperimentConfig) -> tuple[ObservationSpec, ActionSpec]:
    """What the environment shows and what it takes. Raises UnsupportedEnvironmentError."""
    maker = _maker(config.environment)
    if isinstance(maker, type) and issubclass(maker, gymnasium.vector.VectorEnv):
        vector = make_environment(config, 1, [0])
        try:
            return vector.observations, vector.actions
        finally:
            vector.close()
    environment = _single(config.environment, maker)
    try:
        return (
            observation_spec(environment.observation_space, config.stack),
            action_spec(environment.action_space),
        )
    finally:
        environment.close()


def _maker(config: EnvironmentConfig) -> Callable[..., Any]:
    """What makes one environment (or, a VectorEnv class, many) from `config.options`."""
    env_id = config.id
    if env_id == "catch":
        return Catch
    if env_id.startswith("gym:"):
        return lambda **options: make_old_gym(env_id.removeprefix("gym:"), options)
    if env_id.startswith("ALE/"):
        return lambda **options: make_atari(env_id, options)
    if ":" in env_id:
        return _own(env_id)
    return lambda **options: gymnasium.make(env_id, disable_env_checker=True, **options)


def _own(env_id: str) -> Callable[..., Any]:
    """The class (or function) that `module:Class` names."""
    module_name, _, name = env_id.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UnsupportedEnvironmentError(
            f"environment {env_id!r}: cannot import {module_name!r} ({error}); "
            f"modules are looked for in {here} and in PYTHONPATH"
        ) from error
    except ValueError as error:
        raise UnsupportedEnvironmentError(f"environment {env_id!r}: {error}") from error
    own = getattr(module, name, None)
    if callable(own):
        return own
    if name in gymnasium.registry:  # `module:Id`: the module has registered it
        return lambda **options: gymnasium.make(name, disable_env_checker=True, **options)
    raise UnsupportedEnvironmentError(
        f"environment {env_id!r}: module {module_name!r} has no class {name!r} and registers no "
        "id of that name"
    )


def _single(config: EnvironmentConfig, maker: Callable[..., Any]) -> gymnasium.Env:
    environment = _called(config.id, maker, config.options)
    if not isinstance(environment, gymnasium.Env):
        missing = [
            name
            for name in ("reset", "step", "observation_space", "action_space")
            if not hasattr(environment, name)
        ]
        if missing:
            raise UnsupportedEnvironmentError(
                f"environment {config.id!r}: {type(environment).__name__} has no "
                f"{missing[0]!r}: it should be a gymnasium.Env"
            )
        environment = OldGym(environment)
    if config.max_episode_steps:
        environment = TimeLimit(_without_time_limit(environment), config.max_episode_steps)
    return environment


def _without_time_limit(environment: gymnasium.Env) -> gymnasium.Env:
    """The limit asked for replaces the registered one, be it shorter or longer."""
    return environment.env if isinstance(environment, TimeLimit) else environment


def _called(env_id: str, maker: Callable[..., Any], options: dict[str, Any]) -> Any:
    try:
        return maker(**options)
    except UnsupportedEnvironmentError:
        raise
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        message = " ".join(str(error).split()).replace("`", "'")
        raise UnsupportedEnvironmentError(f"environment {env_id!r}: {message}") from error
