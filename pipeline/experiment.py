"""An experiment as its members know it: made once by a learner, joined by all others by name.

Guarantees: what `create` and `join` return is what stands in the storage, whoever wrote it and
however many did so at once; a learner's readers are known to retention before its configuration can
be read.
"""

import secrets
from dataclasses import dataclass

from algorithms.contract import ActionSpec, ObservationSpec
from pipeline.configuration import Configuration, ExperimentConfig
from pipeline.configuration_codec import (
    ConfigurationError,
    from_plain,
    section_from_plain,
    section_to_plain,
    to_plain,
    to_yaml,
    yaml_mapping,
)
from storage.errors import DamagedError
from storage.protocol import Lease, ReaderKind, ReaderSettings, Storage

WIRE_VERSION = 1
"""Format of entries, frames and parameters; members of another version are refused."""


@dataclass(frozen=True)
class Experiment:
    """What never changes while the experiment lives."""

    name: str
    creation_id: str
    """16 random characters: tells this experiment from an earlier one of the same name."""
    config: ExperimentConfig
    observations: ObservationSpec
    actions: ActionSpec
    wire_version: int = WIRE_VERSION


class WireVersionError(ConfigurationError):
    """The experiment was made by a program that writes another format."""


def create(
    storage: Storage,
    name: str,
    configuration: Configuration,
    observations: ObservationSpec,
    actions: ActionSpec,
) -> Experiment:
    """Make the experiment, or complete and return the one that stands under this name."""
    standing = join(storage, name)
    while True:
        asked = standing or Experiment(
            name, secrets.token_hex(8), configuration.experiment, observations, actions
        )
        text = storage.create_experiment(
            name,
            _to_text(asked),
            asked.creation_id,
            asked.config.shards,
            asked.config.shard_bytes,
        )
        standing = _from_text(name, text)
        if standing.creation_id == asked.creation_id:
            return standing
        # Another learner was first: shards must be completed with its id, not with ours.


def join(storage: Storage, name: str) -> Experiment | None:
    """Return the experiment; None while no learner has created it. Raises DamagedError."""
    text = storage.read_config(name)
    return None if text is None else _from_text(name, text)


def differences(experiment: Experiment, config: ExperimentConfig) -> list[str]:
    """ "experiment.seed is 1, asked for 2", one a field in which `config` is not what stands."""
    stands, asked = section_to_plain(experiment.config), section_to_plain(config)
    return [
        f"experiment.{field} is {stands[field]}, asked for {asked[field]}"
        for field in stands
        if stands[field] != asked[field]
    ]


def publish_learner(
    storage: Storage, experiment: Experiment, configuration: Configuration, lease: Lease
) -> None:
    """Make the learner's readers and then its configuration known; repeating it is harmless.

    A reader's share of a shard is fixed: capacity / shards, rounded up.
    """
    shards = experiment.config.shards
    share = -(-configuration.replay.capacity_steps // shards)
    name = configuration.experiment.learner
    for shard in range(shards):
        storage.register_reader(
            experiment.name, shard, ReaderSettings(name, ReaderKind.WINDOW, capacity_steps=share)
        )
    storage.write_learner(experiment.name, name, to_yaml(to_plain(configuration)), lease)


def read_learner(storage: Storage, experiment: Experiment, name: str) -> Configuration | None:
    """Return a learner's configuration, None while there is none. Raises DamagedError."""
    text = storage.read_learner(experiment.name, name)
    if text is None:
        return None
    try:
        return from_plain(yaml_mapping(text, f"learner {name!r}"))
    except ConfigurationError as error:
        raise DamagedError(f"configuration of learner {name!r} in Redis: {error}") from error


def _to_text(experiment: Experiment) -> str:
    return to_yaml(
        {
            "creation_id": experiment.creation_id,
            "wire_version": experiment.wire_version,
            "experiment": section_to_plain(experiment.config),
            "observations": section_to_plain(experiment.observations),
            "actions": section_to_plain(experiment.actions),
        }
    )


def _from_text(name: str, text: str) -> Experiment:
    try:
        plain = yaml_mapping(text, f"experiment {name!r}")
        version = plain.get("wire_version")
        if version != WIRE_VERSION:
            raise WireVersionError(
                f"experiment {name!r} has wire version {version}, this program {WIRE_VERSION}: "
                "use the release that made it, or another name"
            )
        return Experiment(
            name,
            str(plain["creation_id"]),
            section_from_plain("experiment", ExperimentConfig, plain["experiment"]),
            section_from_plain("observations", ObservationSpec, plain["observations"]),
            section_from_plain("actions", ActionSpec, plain["actions"]),
            version,
        )
    except WireVersionError:
        raise
    except (ConfigurationError, KeyError, TypeError) as error:
        raise DamagedError(f"configuration of experiment {name!r} in Redis: {error}") from error
