"""Takes an environment's observations into arrays of our own, leaf by leaf.

Guarantees: nothing of the environment's memory is kept, so it may use its buffers again; what it
gives has the dtype and shape of its space, and no NaN or infinity, or is refused by name.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from pipeline.acting.spaces import leaf, leaf_name, leaf_spaces
from pipeline.acting.vector_environment import DamagedStepError

Where = Callable[[int], str]
"""Copy to "copy 2, step 7 of episode 0", for errors."""


class ObservationReader:
    """Reads the observations of one space."""

    def __init__(self, space: Space) -> None:
        leaves = [(path, leaf(path, part)) for path, part in leaf_spaces(space)]
        self._leaves = [(one.name, path, np.dtype(one.dtype), one.shape) for path, one in leaves]
        self._float_names = [name for name, _, dtype, _ in self._leaves if dtype.kind == "f"]

    def empty(self, copies: int) -> dict[str, NDArray]:
        """New arrays, leaf name to (copies, *shape)."""
        return {name: np.empty((copies, *shape), dtype) for name, _, dtype, shape in self._leaves}

    def store(self, arrays: Mapping[str, NDArray], copy: int, given: Any, where: Where) -> None:
        """Copy one copy's observation into its row. Raises DamagedStepError."""
        for name, path, dtype, shape in self._leaves:
            value = np.asarray(_descend(given, path, lambda: where(copy)))
            if value.shape != shape:
                raise DamagedStepError(
                    f"{name}: shape {value.shape} at {where(copy)}, its space says {shape}"
                )
            if value.dtype != dtype:
                value = _converted(name, value, dtype, lambda: where(copy))
            arrays[name][copy] = value

    def take(self, copies: int, given: Any) -> dict[str, NDArray]:
        """Copy all copies' observations, given as batched leaves. Raises DamagedStepError."""
        taken = {}
        for name, path, dtype, shape in self._leaves:
            value = np.asarray(_descend(given, path, lambda: "some copy"))
            if value.shape != (copies, *shape):
                raise DamagedStepError(
                    f"{name}: shape {value.shape} of all copies, its space says {(copies, *shape)}"
                )
            if value.dtype != dtype:
                value = _converted(name, value, dtype, lambda: "some copy")
            taken[name] = np.array(value)
        return taken

    def refuse_damage(self, arrays: Mapping[str, NDArray], where: Where) -> None:
        """Raise DamagedStepError where a leaf has NaN or infinity."""
        for name in self._float_names:
            refuse_not_finite(name, arrays[name], where)


def refuse_not_finite(name: str, values: NDArray, where: Where) -> None:
    """Raise DamagedStepError, naming the copy, where `values` (N, ...) has NaN or infinity."""
    if np.isfinite(values).all():
        return
    copy = int((~np.isfinite(values)).reshape(len(values), -1).any(axis=1).argmax())
    raise DamagedStepError(f"{name}: NaN or infinity at {where(copy)}: the environment gave it")


def _descend(given: Any, path: tuple[str, ...], where: Callable[[], str]) -> Any:
    for depth, key in enumerate(path):
        try:
            given = given[key]
        except (KeyError, IndexError, TypeError):
            raise DamagedStepError(
                f"{leaf_name(path[: depth + 1])}: missing at {where()}, the space has it"
            ) from None
    return given


def _converted(name: str, value: NDArray, dtype: np.dtype, where: Callable[[], str]) -> NDArray:
    """Another float may lose precision, as the space declares; all else must keep its value."""
    if value.dtype.kind in "biuf":
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity are refused later
            converted = value.astype(dtype)
        if (dtype.kind == "f" and value.dtype.kind == "f") or np.array_equal(converted, value):
            return converted
    raise DamagedStepError(
        f"{name}: {value.dtype} at {where()} does not fit the {dtype} of its space"
    )
