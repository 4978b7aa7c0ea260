"""Gymnasium spaces as the specifications that algorithms know, and actions on their way out.

Guarantees: a space is either fully supported or refused in one line that names it and what is
supported; an action that reaches the environment lies in its action space.
"""

from collections.abc import Callable

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from algorithms.contract import ActionSpec, Leaf, ObservationSpec
from pipeline.acting.vector_environment import DamagedStepError, UnsupportedEnvironmentError

SINGLE_LEAF = "observation"
"""Name of the leaf of an observation that is not a Dict."""
OBSERVATION_SPACES = "Box, Discrete, MultiDiscrete, MultiBinary, and Dict of these"
ACTION_SPACES = "Discrete, Box of floats, MultiDiscrete, MultiBinary"

Path = tuple[str, ...]
"""Dict keys from the outermost to a leaf; () where the observation is the leaf."""


def observation_spec(space: Space, stack: int) -> ObservationSpec:
    """Raises UnsupportedEnvironmentError."""
    return ObservationSpec(tuple(leaf(path, part) for path, part in leaf_spaces(space)), stack)


def leaf_spaces(space: Space) -> list[tuple[Path, Space]]:
    """The leaves of a space, in the order of its keys. Raises UnsupportedEnvironmentError."""
    found = _leaf_spaces((), space)
    if not found:
        raise UnsupportedEnvironmentError(f"observation space {space} has no leaf")
    return found


def _leaf_spaces(path: Path, space: Space) -> list[tuple[Path, Space]]:
    if not isinstance(space, spaces.Dict):
        return [(path, space)]
    found = []
    for key, part in space.spaces.items():
        if not isinstance(key, str) or not key or "/" in key:
            raise UnsupportedEnvironmentError(
                f"observation space: Dict key {key!r}: keys are joined with '/', "
                "so each must be a non-empty string without '/'"
            )
        found += _leaf_spaces((*path, key), part)
    return found


def leaf_name(path: Path) -> str:
    return "/".join(path) or SINGLE_LEAF


def leaf(path: Path, space: Space) -> Leaf:
    """One leaf. A Discrete one is its number, bounded by the space's start."""
    name = leaf_name(path)
    if isinstance(space, spaces.Box):
        low, high = _same_everywhere(space.low, -np.inf), _same_everywhere(space.high, np.inf)
    elif isinstance(space, spaces.Discrete):
        low, high = float(space.start), float(space.start + space.n - 1)
    elif isinstance(space, spaces.MultiBinary):
        low, high = 0.0, 1.0
    elif isinstance(space, spaces.MultiDiscrete):
        low = _same_everywhere(space.start, -np.inf)
        high = _same_everywhere(space.start + space.nvec - 1, np.inf)
    else:
        raise UnsupportedEnvironmentError(
            f"observation space {name}: {space} is not supported; there are {OBSERVATION_SPACES}"
        )
    dtype, shape = np.dtype(space.dtype), tuple(int(size) for size in space.shape or ())
    if dtype.kind not in "biuf" or 0 in shape:
        raise UnsupportedEnvironmentError(
            f"observation space {name}: dtype {dtype}, shape {shape} is not supported; "
            "there are arrays of numbers with at least one element"
        )
    return Leaf(name, dtype.name, shape, low, high)


def _same_everywhere(bound: NDArray, missing: float) -> float:
    first = float(bound.flat[0]) if bound.size else missing
    return first if (bound == first).all() else missing


def action_spec(space: Space) -> ActionSpec:
    """Raises UnsupportedEnvironmentError."""
    if isinstance(space, spaces.Discrete):
        return ActionSpec("discrete", choices=(int(space.n),))
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f":
        return ActionSpec(
            "box",
            _shape(space),
            np.dtype(space.dtype).name,
            low=tuple(float(bound) for bound in space.low.flat),
            high=tuple(float(bound) for bound in space.high.flat),
        )
    if isinstance(space, spaces.MultiDiscrete):
        choices = tuple(int(choices) for choices in space.nvec.flat)
        return ActionSpec("multi_discrete", _shape(space), choices=choices)
    if isinstance(space, spaces.MultiBinary):
        shape = _shape(space)
        return ActionSpec("multi_binary", shape, "int8", (2,) * int(np.prod(shape)))
    raise UnsupportedEnvironmentError(
        f"action space {space} is not supported; there are {ACTION_SPACES}"
    )


def _shape(space: Space) -> tuple[int, ...]:
    return tuple(int(size) for size in space.shape or ())


def outgoing_actions(space: Space) -> Callable[[NDArray], NDArray]:
    """The map from policies' actions (N, *shape) to the environment's own, in new memory.

    Adds the start of a Discrete or MultiDiscrete space; clips a Box action to its bounds. The
    function raises ValueError for choices that do not exist, DamagedStepError for NaN.
    """
    spec, dtype = action_spec(space), np.dtype(space.dtype)
    if isinstance(space, spaces.Box):
        low, high = space.low, space.high

        def clipped(action: NDArray) -> NDArray:
            refuse_other_shape(action, spec)
            if np.isnan(action).any():
                copy = int(np.isnan(action).reshape(len(action), -1).any(axis=1).argmax())
                raise DamagedStepError(f"action of copy {copy}: NaN; the policy's weights are bad")
            return np.clip(action, low, high).astype(dtype)

        return clipped

    choices = np.reshape(spec.choices, spec.shape)
    start = getattr(space, "start", 0)

    def started(action: NDArray) -> NDArray:
        refuse_other_shape(action, spec)
        if ((action < 0) | (action >= choices)).any():
            raise ValueError(
                f"{spec.kind} action {action.tolist()}: should be 0 to {choices.tolist()} - 1"
            )
        return (action + start).astype(dtype)

    return started


def refuse_other_shape(action: NDArray, spec: ActionSpec) -> None:
    """Raise ValueError unless each action has the shape that `spec` says."""
    if action.shape[1:] != spec.shape:
        raise ValueError(f"action has shape {action.shape}, should be (copies, *{spec.shape})")
