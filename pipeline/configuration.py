"""The configuration of a run: a tree of frozen dataclasses, one sentence and a unit a field.

Guarantees: a tree that pipeline/configuration_codec.py made is valid; ranges stand in the types
here, what must fit together stands there, and both refuse in one line. `experiment` never changes
once an experiment exists; `learner`, `replay` and `algorithm` belong to one named learner; `run` to
one machine.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class EnvironmentConfig:
    id: str = "CartPole-v1"
    """Gymnasium id, `gym:ID` for the old gym, or `module:Class` for your own."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the environment's constructor."""
    max_episode_steps: NonNegativeInt = 0
    """Time limit in steps; 0 keeps the environment's own."""


@dataclass(frozen=True)
class ExperimentConfig:
    environment: EnvironmentConfig = EnvironmentConfig()
    seed: NonNegativeInt = 1
    """Every random stream of the experiment derives from it."""
    shards: PositiveInt = 1
    """Segment streams; an agent writes to the one of its index modulo this."""
    agents: PositiveInt = 2
    """Agents that exploration and seeds are spread over."""
    copies: PositiveInt = 8
    """Environment copies that each agent steps as one vector."""
    segment_steps: PositiveInt = 16
    """Steps of a segment at most (T)."""
    stack: PositiveInt = 1
    """Time steps that a policy sees at once."""
    synchronous: bool = False
    """Agent and learner take turns; with one agent a run repeats exactly."""
    learner: str = "main"
    """The learner that agents act for."""
    entry_bytes: PositiveInt = 1 << 20
    """An entry is cut earlier when it would pass this, payloads included."""
    entry_max_age_s: Positive = 5.0
    """An entry is cut earlier when its first step is this old; for slow simulators."""
    frame_min_bytes: PositiveInt = 512
    """Leaves of at least this many bytes are stored as frames, each once."""
    shard_bytes: PositiveInt = 2 << 30
    """Redis memory for one shard; the oldest entries go beyond it."""


@dataclass(frozen=True)
class AgentConfig:
    buffer_bytes: PositiveInt = 64 << 20
    """Unanswered entries an agent holds before it stops stepping."""
    when_full: Literal["wait", "drop"] = "wait"
    """At that bound: wait, or drop the newest entry and count it."""
    keep_answered_s: NonNegative = 3.0
    """Seconds that answered entries are kept, against a server killed before it synced."""
    threads: PositiveInt = 1
    """torch threads of an agent process."""


@dataclass(frozen=True)
class ReplayConfig:
    capacity_steps: PositiveInt = 50_000
    """Window size over all shards."""
    minimum_steps: PositiveInt = 1_000
    """Steps written before the first batch."""
    samples_per_insert: Positive = 64.0
    """Samples drawn for each step written, at most."""
    slab_bytes: PositiveInt = 1 << 30
    """Decoded frames kept in memory; the rest is fetched on a miss."""
    prefetch_batches: PositiveInt = 4
    """Batches ready ahead of the learner, at most."""


@dataclass(frozen=True)
class LearnerConfig:
    batch_size: PositiveInt = 128
    """Samples an update."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it learns; "auto" takes a GPU when there is one."""
    threads: PositiveInt = 1
    """torch threads of the learner process."""
    publish_interval_s: NonNegative = 0.25
    """Shortest time between two publications of parameters."""
    keep_versions: PositiveInt = 4
    """Parameter sets kept in Redis."""
    total_updates: NonNegativeInt = 0
    """Stop after this many updates; 0 goes on."""


@dataclass(frozen=True)
class EvaluationConfig:
    episodes: PositiveInt = 20
    """Episodes of one evaluation, all at once as one vector."""
    interval_s: NonNegative = 2.0
    """Shortest time between the starts of two evaluations."""
    target_return: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Solved when a mean return of this is confirmed by a second evaluation of other seeds."""
    seed: NonNegativeInt = 10_000
    """First evaluation seed; the confirming one takes the next `episodes` seeds."""


@dataclass(frozen=True)
class RunConfig:
    max_env_steps: PositiveInt = 1_000_000
    """End the run, unsolved, after this many environment steps."""
    max_wall_s: Positive = 3_600.0
    """End the run, unsolved, after this many seconds."""
    restarts: NonNegativeInt = 5
    """Restarts of one role before the run is given up."""


@dataclass(frozen=True)
class Configuration:
    experiment: ExperimentConfig = ExperimentConfig()
    agent: AgentConfig = AgentConfig()
    replay: ReplayConfig = ReplayConfig()
    algorithm_name: str = "dqn"
    """Built-in name (algorithms/catalog.py)."""
    algorithm: Any = None
    """The algorithm's own configuration dataclass; in YAML `algorithm: {name: …, …}`."""
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    run: RunConfig = RunConfig()
