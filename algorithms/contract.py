"""What an algorithm gives, and what it is given. The pipeline knows nothing else of it.

An algorithm is one file that ends in `ALGORITHM = Algorithm(...)`. It sees torch and numpy only.

Observations. Everywhere in this package an observation is a dict of leaves, each an array
(B, stack, *leaf shape) with the oldest row first and the stack axis always there (length 1 without
stacking). Images stay uint8 until a network scales them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Leaf:
    """One array of an observation, unstacked."""

    name: str
    """Dict keys joined with '/'; "observation" where the space is not a Dict."""
    dtype: str
    """numpy name, such as "uint8"."""
    shape: tuple[int, ...]
    low: float = -np.inf
    high: float = np.inf
    """Bounds where they are the same for every element, else infinite."""


@dataclass(frozen=True)
class ObservationSpec:
    leaves: tuple[Leaf, ...]
    stack: int = 1
    """Time steps that a policy sees at once."""


@dataclass(frozen=True)
class ActionSpec:
    """What a policy chooses from. The environment adapter maps it to the environment's own action:
    adds a Discrete space's start, clips a Box action to its bounds."""

    kind: Literal["discrete", "box", "multi_discrete", "multi_binary"]
    shape: tuple[int, ...] = ()
    """Shape of one action; () for discrete."""
    dtype: str = "int64"
    choices: tuple[int, ...] = ()
    """discrete: (n,); multi_discrete: one number a component; multi_binary: (2,) * n."""
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    """box: bounds, flattened."""


@dataclass(frozen=True)
class Reads:
    """What an algorithm wants from the stream."""

    kind: Literal["transitions"]
    """"transitions": n-step transitions drawn from a window."""
    n_step: int = 1
    gamma: float = 0.99
    """Discount a step."""
    prioritized: bool = False


@dataclass
class Transitions:
    """A batch of n-step transitions. Tensors on the learner's device, private and writable."""

    observation: dict[str, Tensor]
    """Leaf name to (B, stack, *shape)."""
    action: Tensor
    """(B, *action shape)."""
    n_step_return: Tensor
    """(B,) float32: sum of gamma^i r_i over the k <= n steps really taken."""
    discount: Tensor
    """(B,) float32: gamma^k, or 0 where the task terminated."""
    next_observation: dict[str, Tensor]
    """Observation k steps later; the final one where the episode ended."""
    weight: Tensor
    """(B,) float32: importance weights, largest 1; ones when uniform."""


@dataclass
class Update:
    """What one update did."""

    metrics: dict[str, float]
    priorities: NDArray[np.float64] | None = None
    """(B,) new priorities, before any exponent."""


@dataclass(frozen=True)
class Acted:
    """What a policy chose for N copies."""

    action: NDArray
    """(N, *action shape)."""
    recorded: dict[str, NDArray] = field(default_factory=dict)
    """Step fields that the algorithm wants back in its batches: each (N, ...)."""
    state: dict[str, NDArray] = field(default_factory=dict)
    """Recurrent state after this step: each (N, ...)."""


class Policy(Protocol):
    """Acts; lives in agents, evaluators and exported files, always on the CPU unless moved."""

    def load(self, parameters: Mapping[str, NDArray]) -> None:
        """Take over a whole parameter set; raises ValueError, and changes nothing, when names or
        shapes differ."""
        ...

    def initial_state(self, copies: int) -> dict[str, NDArray]:
        """Recurrent state at an episode's first step: each (copies, ...); {} without recurrence."""
        ...

    def act(
        self,
        observation: Mapping[str, NDArray],
        state: Mapping[str, NDArray],
        rng: np.random.Generator,
        exploration: float,
    ) -> Acted:
        """Choose for N copies. `exploration` 0 is greedy; what else it means is the algorithm's
        (epsilon for DQN). All randomness comes from `rng`."""
        ...


class Learner(Protocol):
    """Learns; lives in the learner process, on its device."""

    def update(self, batch: Transitions) -> Update: ...

    def parameters(self) -> dict[str, NDArray]:
        """What agents need, on the CPU: the argument of `Policy.load`."""
        ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that adapts: tensors, and plain JSON values."""
        ...

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Algorithm:
    """One algorithm, as the pipeline uses it. `config` is an instance of `configuration`."""

    name: str
    configuration: type
    """Frozen dataclass; each field has a docstring that says what it is, with its unit."""
    reads: Callable[[Any], Reads]
    make_policy: Callable[[Any, ObservationSpec, ActionSpec], Policy]
    """Raises ValueError, one line, for spaces that the algorithm does not support."""
    make_learner: Callable[[Any, ObservationSpec, ActionSpec, torch.device, int], Learner]
    """(config, observations, actions, device, seed)."""
    exploration: Callable[[Any, int, int, int], float]
    """(config, agent index, number of agents, steps this agent's experiment has taken) to the
    `exploration` that agent acts with now."""
