"""A trained policy as a folder: policy.safetensors, and policy.json for people.

Guarantees: a folder holds one whole policy, the old or the new one, whenever the writer is killed;
what is torn, damaged or of another format is refused in one line; nothing in it is ever executed.

The weights file carries its description in its own header, so one rename replaces both at once, and
`load_policy` needs no other file. policy.json repeats the description where people can read it.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from algorithms.catalog import load_algorithm
from algorithms.contract import ActionSpec, Leaf, ObservationSpec, Policy

FORMAT = 1
WEIGHTS = "policy.safetensors"
DESCRIPTION = "policy.json"


class PolicyFileError(ValueError):
    """A policy that cannot be loaded; the message is one line for people."""


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy ready to act, and what it expects."""

    policy: Policy
    algorithm_name: str
    config: dict[str, Any]
    """The algorithm's configuration, plain."""
    observations: ObservationSpec
    actions: ActionSpec
    about: dict[str, Any]
    """What the writer noted: score, seeds, steps…"""


def save_policy(
    folder: Path,
    *,
    algorithm_name: str,
    config: Mapping[str, Any],
    observations: ObservationSpec,
    actions: ActionSpec,
    parameters: Mapping[str, NDArray],
    about: Mapping[str, Any],
) -> None:
    """Write a policy into `folder`, over an older one; one writer a folder at a time.

    `config` is the algorithm's configuration as plain JSON values, `about` likewise. Raises OSError
    where the disk refuses; the older policy is then still there.
    """
    description = {
        "format": FORMAT,
        "algorithm": algorithm_name,
        "config": dict(config),
        "observations": _finite(asdict(observations)),
        "actions": _finite(asdict(actions)),
        "about": dict(about),
    }
    text = json.dumps(description, allow_nan=False)
    arrays = {name: np.ascontiguousarray(array) for name, array in parameters.items()}
    metadata = {"policy": text, "sha256": _content_hash(text, arrays)}
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / WEIGHTS, save_tensors(arrays, metadata))
    _replace(folder / DESCRIPTION, (json.dumps(description, indent=2) + "\n").encode())


def load_policy(folder: Path) -> LoadedPolicy:
    """Read what `save_policy` wrote; `folder` may be the weights file too. Raises PolicyFileError."""
    path = folder if folder.is_file() else folder / WEIGHTS
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PolicyFileError(f"{path}: no policy can be read: {error.strerror}") from None
    try:
        arrays = load_tensors(data)
        header_bytes = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + header_bytes]).get("__metadata__", {})
        text, written_hash = metadata["policy"], metadata["sha256"]
        description = json.loads(text)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        raise PolicyFileError(f"{path}: not a whole policy file") from None
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        found = description.get("format") if isinstance(description, dict) else None
        raise PolicyFileError(f"{path}: format {found}, but this version reads format {FORMAT}")
    if written_hash != _content_hash(text, arrays):
        raise PolicyFileError(f"{path}: damaged: its content does not have the hash it states")
    try:
        return _loaded(description, arrays)
    except (ValidationError, ValueError, KeyError, TypeError) as error:
        raise PolicyFileError(f"{path}: {' '.join(str(error).split())}") from None


def _loaded(description: Mapping[str, Any], arrays: Mapping[str, NDArray]) -> LoadedPolicy:
    algorithm = load_algorithm(description["algorithm"])
    config: Any = TypeAdapter(algorithm.configuration).validate_python(description["config"])
    observations = _observations(description["observations"])
    actions = _actions(description["actions"])
    policy = algorithm.make_policy(config, observations, actions)
    policy.load(arrays)
    return LoadedPolicy(
        policy,
        algorithm.name,
        dict(description["config"]),
        observations,
        actions,
        dict(description["about"]),
    )


def _content_hash(text: str, arrays: Mapping[str, NDArray]) -> str:
    """SHA-256 over the description and every array's name, dtype, shape and bytes."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _replace(path: Path, data: bytes) -> None:
    """Write and sync beside `path`, then rename: a name that is left over is used again."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the rename itself
    finally:
        os.close(descriptor)


def _finite(value: Any) -> Any:
    """JSON has no infinity: a bound that is not there is null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def _bound(value: float | None, missing: float) -> float:
    return missing if value is None else float(value)


def _observations(plain: Mapping[str, Any]) -> ObservationSpec:
    leaves = tuple(
        Leaf(
            name=str(leaf["name"]),
            dtype=str(leaf["dtype"]),
            shape=tuple(leaf["shape"]),
            low=_bound(leaf["low"], -math.inf),
            high=_bound(leaf["high"], math.inf),
        )
        for leaf in plain["leaves"]
    )
    return ObservationSpec(leaves, stack=int(plain["stack"]))


def _actions(plain: Mapping[str, Any]) -> ActionSpec:
    return ActionSpec(
        kind=plain["kind"],
        shape=tuple(plain["shape"]),
        dtype=str(plain["dtype"]),
        choices=tuple(plain["choices"]),
        low=tuple(_bound(value, -math.inf) for value in plain["low"]),
        high=tuple(_bound(value, math.inf) for value in plain["high"]),
    )
