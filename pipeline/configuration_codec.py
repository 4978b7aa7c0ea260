"""The configuration tree to a plain dict (for YAML and Redis) and back.

Guarantees: `from_plain(to_plain(c)) == c`; every tree that `from_plain` returns is valid, and what
is wrong with any other is said in one line: field, value, and what would be right.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_type_hints

import numpy as np
import yaml
from pydantic import TypeAdapter, ValidationError

from algorithms.catalog import algorithm_names, load_algorithm
from pipeline.configuration import Configuration

T = TypeVar("T")

SECTIONS = ("experiment", "agent", "replay", "learner", "evaluation", "run")
"""The fields of `Configuration` that are plain dataclasses, hence those with one rule for all."""


class ConfigurationError(ValueError):
    """A configuration that cannot be; the message is one line for people."""


def to_plain(configuration: Configuration) -> dict[str, Any]:
    """Return the tree as nested dicts of YAML's own types."""
    plain = {name: section_to_plain(getattr(configuration, name)) for name in SECTIONS}
    algorithm = {"name": configuration.algorithm_name}
    if configuration.algorithm is not None:
        algorithm |= section_to_plain(configuration.algorithm)
    return {
        "algorithm": algorithm,
        **plain,
    }


def section_to_plain(section: Any) -> dict[str, Any]:
    """One dataclass of the tree as nested dicts of YAML's own types: tuples become lists."""
    plain = _plain_value(dataclasses.asdict(section))
    assert isinstance(plain, dict)
    return plain


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def from_plain(plain: Mapping[str, Any]) -> Configuration:
    """Build the tree; what `plain` leaves out has its default. Raises ConfigurationError."""
    refuse_unknown("configuration", plain, (*SECTIONS, "algorithm"))
    types = get_type_hints(Configuration, include_extras=True)
    sections = {
        name: section_from_plain(name, types[name], plain[name])
        for name in SECTIONS
        if name in plain
    }
    algorithm = dict(_mapping("algorithm", plain.get("algorithm", {})))
    name = algorithm.pop("name", Configuration.algorithm_name)
    if name not in algorithm_names():
        raise ConfigurationError(
            f"algorithm.name: there is no algorithm {name!r}{nearest(name, algorithm_names())}"
        )
    settings: Any = section_from_plain("algorithm", load_algorithm(name).configuration, algorithm)
    configuration = Configuration(algorithm_name=name, algorithm=settings, **sections)
    check(configuration)
    return configuration


def section_from_plain(path: str, section: type[T], plain: Any) -> T:
    """Build one dataclass of the tree from nested dicts; `path` names it in errors."""
    _refuse_unknown_fields(path, section, _mapping(path, plain))
    try:
        return TypeAdapter(section).validate_python(plain)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join([path, *map(str, first["loc"])])
        what = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
        raise ConfigurationError(f"{where} = {_shown(first['input'])}: {what}") from None


def _refuse_unknown_fields(path: str, section: type, plain: Mapping[str, Any]) -> None:
    types = get_type_hints(section)
    names = [field.name for field in dataclasses.fields(section)]
    refuse_unknown(path, plain, names)
    for name, value in plain.items():
        if dataclasses.is_dataclass(types[name]):
            _refuse_unknown_fields(f"{path}.{name}", types[name], _mapping(f"{path}.{name}", value))


def refuse_unknown(path: str, plain: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ConfigurationError for the first key of `plain` that `names` does not have."""
    known = list(names)
    for key in plain:
        if key not in known:
            raise ConfigurationError(f"{path}: there is no {str(key)!r}{nearest(key, known)}")


def nearest(name: object, known: Iterable[str]) -> str:
    """The end of an error sentence: the known name most like `name`, or all of them."""
    known = sorted(known)
    matches = difflib.get_close_matches(str(name), known, n=1)
    if matches:
        return f"; did you mean {matches[0]!r}?"
    return f"; there are: {', '.join(known)}"


def _mapping(path: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{path} = {_shown(value)}: should be a mapping of fields")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check(configuration: Configuration) -> None:
    """Raise ConfigurationError where valid fields do not fit together."""
    experiment, replay, learner = (
        configuration.experiment,
        configuration.replay,
        configuration.learner,
    )
    if replay.minimum_steps >= replay.capacity_steps:
        raise ConfigurationError(
            f"replay.minimum_steps = {replay.minimum_steps}: should be less than "
            f"replay.capacity_steps, {replay.capacity_steps}, or no batch is ever made"
        )
    if learner.batch_size > replay.capacity_steps:
        raise ConfigurationError(
            f"learner.batch_size = {learner.batch_size}: should be at most "
            f"replay.capacity_steps, {replay.capacity_steps}"
        )
    if experiment.agents < experiment.shards:
        raise ConfigurationError(
            f"experiment.shards = {experiment.shards}: should be at most experiment.agents, "
            f"{experiment.agents}, or some shards stay empty"
        )
    if replay.capacity_steps < experiment.shards * experiment.segment_steps:
        raise ConfigurationError(
            f"replay.capacity_steps = {replay.capacity_steps}: should hold at least a segment a "
            f"shard, {experiment.shards * experiment.segment_steps} steps"
        )
    if experiment.synchronous and (experiment.agents, experiment.shards) != (1, 1):
        raise ConfigurationError(
            "experiment.synchronous = true: needs experiment.agents = 1 and experiment.shards = 1, "
            f"not {experiment.agents} and {experiment.shards}"
        )
    if experiment.entry_bytes > experiment.shard_bytes:
        raise ConfigurationError(
            f"experiment.entry_bytes = {experiment.entry_bytes}: should be at most "
            f"experiment.shard_bytes, {experiment.shard_bytes}"
        )


def to_yaml(plain: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(plain), sort_keys=False, allow_unicode=True)


def yaml_mapping(text: str, source: str) -> dict[str, Any]:
    """Parse a YAML mapping; `source` names it in errors. Raises ConfigurationError."""
    try:
        plain = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        line = str(error).replace("\n", " ")
        raise ConfigurationError(f"{source}: not YAML: {line}") from None
    if plain is None:
        return {}
    return dict(_mapping(source, plain))
