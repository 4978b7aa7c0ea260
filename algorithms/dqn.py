"""Deep Q-learning for discrete actions: double, dueling, n-step, with a Huber loss.

Guarantees: one `update` is one Adam step on one batch, in float32; no weight ever becomes NaN or
infinite by it; `state` and `restore` carry everything, so that a restored learner's next update is
bit-equal on the same device.

Sources: Mnih 2015 (DQN), van Hasselt 2016 (double), Wang 2016 (dueling), Sutton 1988 (n-step),
Horgan 2018 (Ape-X, exploration by agent).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from algorithms.contract import (
    Acted,
    ActionSpec,
    Algorithm,
    ObservationSpec,
    Reads,
    Transitions,
    Update,
)
from algorithms.exploration import agent_epsilon, linear_epsilon
from algorithms.networks import Encoder, NetworkKind, mlp

Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class DQNConfig:
    network: NetworkKind = "auto"
    """Layers that read images: "auto" chooses by their size, "mlp" flattens them."""
    hidden: tuple[PositiveInt, ...] = (128, 128)
    """Widths of the hidden layers; the last is that of each dueling stream."""
    dueling: bool = True
    """Value and advantages by streams of their own (Wang 2016, eq. 9)."""
    double: bool = True
    """The online network chooses the next action, the target network values it."""
    n_step: PositiveInt = 3
    """Rewards summed before bootstrapping."""
    gamma: Share = 0.99
    """Discount a step."""
    learning_rate: PositiveFloat = 5e-4
    """Adam's step size."""
    adam_epsilon: PositiveFloat = 1e-8
    """Adam's term against division by zero."""
    huber_delta: PositiveFloat = 1.0
    """The loss is quadratic below this TD error, linear above."""
    max_gradient_norm: NonNegativeFloat = 10.0
    """Longer gradients are scaled to this norm over all weights; 0 leaves them."""
    target_every_updates: PositiveInt = 100
    """Updates between two moves of the target network."""
    target_mix: PositiveShare = 1.0
    """How far the target network moves: 1 copies the weights (hard), 0.005 is a usual soft one."""
    epsilon_start: Share = 1.0
    """Chance of a random action at step 0."""
    epsilon_end: Share = 0.05
    """Chance of a random action from `epsilon_steps` on."""
    epsilon_steps: NonNegativeInt = 10_000
    """Environment steps, of all agents together, over which epsilon falls in a line."""
    epsilon_spread: NonNegativeFloat = 0.0
    """Agent i of N explores with epsilon^(1 + i / (N - 1) * spread): 0 all alike, 7 as in Ape-X."""


class QNetwork(nn.Module):
    """Action values of an observation."""

    def __init__(self, config: DQNConfig, observations: ObservationSpec, choices: int) -> None:
        super().__init__()
        shared, stream = config.hidden[:-1], config.hidden[-1:]
        self.encoder = Encoder(observations, config.network)
        self.torso = mlp(self.encoder.features, shared)
        width = shared[-1] if shared else self.encoder.features
        self.advantage = mlp(width, stream, choices)
        self.value = mlp(width, stream, 1) if config.dueling else None

    def forward(self, observation: Mapping[str, Tensor]) -> Tensor:
        """Leaves (B, stack, *shape) to Q(s, .), (B, choices) float32."""
        features = self.torso(self.encoder(observation))
        advantage: Tensor = self.advantage(features)
        return advantage if self.value is None else dueling(self.value(features), advantage)


def dueling(value: Tensor, advantage: Tensor) -> Tensor:
    """Q = V + A - mean A over actions, (B, 1) and (B, choices). Wang 2016, eq. 9."""
    return value + advantage - advantage.mean(dim=1, keepdim=True)


def q_target(batch: Transitions, next_online: Tensor | None, next_target: Tensor) -> Tensor:
    """What Q(s, a) should be: R + discount * Q_target(s', a'), (B,).

    a' maximises `next_online` (van Hasselt 2016, eq. 4), or `next_target` where that is None; both
    (B, choices). The discount is gamma^k for the k rewards summed, 0 where the task terminated; a
    truncated episode bootstraps from its final observation.
    """
    chooser = next_target if next_online is None else next_online
    best = next_target.gather(1, chooser.argmax(dim=1, keepdim=True)).squeeze(1)
    return batch.n_step_return + batch.discount * best


def huber(error: Tensor, delta: float) -> Tensor:
    """e^2 / 2 up to |e| = delta, then delta * (|e| - delta / 2). Huber 1964."""
    return functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=delta)


class DQNPolicy:
    """Acts greedily, or at random with chance `exploration` in each copy by itself."""

    def __init__(
        self, config: DQNConfig, observations: ObservationSpec, actions: ActionSpec
    ) -> None:
        self._choices = discrete_choices(actions)
        self._dtype = np.dtype(actions.dtype)
        self._names = [leaf.name for leaf in observations.leaves]
        self._network = QNetwork(config, observations, self._choices).requires_grad_(False)

    def load(self, parameters: Mapping[str, NDArray]) -> None:
        own = self._network.state_dict()
        refuse_other_shapes("parameters", own, parameters)
        for name, tensor in own.items():
            tensor.copy_(torch.tensor(parameters[name]))

    def initial_state(self, copies: int) -> dict[str, NDArray]:
        return {}

    def act(
        self,
        observation: Mapping[str, NDArray],
        state: Mapping[str, NDArray],
        rng: np.random.Generator,
        exploration: float,
    ) -> Acted:
        action = self.values(observation).argmax(axis=1)
        if exploration > 0:
            at_random = rng.random(len(action)) < exploration
            action = np.where(at_random, rng.integers(self._choices, size=len(action)), action)
        return Acted(action.astype(self._dtype, copy=False))

    def values(self, observation: Mapping[str, NDArray]) -> NDArray[np.float32]:
        """Q(s, .), (N, choices)."""
        with torch.inference_mode():
            leaves = {name: _tensor(observation[name]) for name in self._names}
            return self._network(leaves).numpy()


def _tensor(array: NDArray) -> Tensor:
    # torch takes no read-only and no negatively strided memory; what is fit is not copied
    return torch.from_numpy(np.require(array, requirements=("C", "W")))


class DQNLearner:
    """Minimises the Huber loss between Q(s, a) and its target by Adam."""

    def __init__(
        self,
        config: DQNConfig,
        observations: ObservationSpec,
        actions: ActionSpec,
        device: torch.device,
        seed: int,
    ) -> None:
        self._config = config
        choices = discrete_choices(actions)
        with torch.random.fork_rng(devices=[]):  # the same first weights on every device
            torch.manual_seed(seed)
            online = QNetwork(config, observations, choices)
        target = QNetwork(config, observations, choices)
        target.load_state_dict(online.state_dict())
        self._online = online.to(device)
        self._target = target.to(device).requires_grad_(False)
        self._weights = dict(self._online.named_parameters())
        self._pairs = list(zip(self._target.parameters(), self._weights.values(), strict=True))
        self._optimizer = torch.optim.Adam(
            self._weights.values(), lr=config.learning_rate, eps=config.adam_epsilon, fused=True
        )
        for weight in self._weights.values():  # there from the start: `state` knows no other case
            self._optimizer.state[weight] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }
        self._updates = 0

    def update(self, batch: Transitions) -> Update:
        """One step. Raises FloatingPointError, and changes nothing, where the loss or its gradient
        is not finite."""
        config = self._config
        with torch.no_grad():
            next_online = self._online(batch.next_observation) if config.double else None
            wanted = q_target(batch, next_online, self._target(batch.next_observation))
        values = self._online(batch.observation)
        chosen = values.gather(1, batch.action.long().unsqueeze(1)).squeeze(1)
        error = chosen - wanted
        loss = (batch.weight * huber(error, config.huber_delta)).mean()

        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(
            self._weights.values(), config.max_gradient_norm or math.inf
        )
        measured = torch.stack([loss.detach(), norm, chosen.detach().mean(), wanted.mean()])
        metrics = dict(
            zip(("loss", "gradient_norm", "q_mean", "target_mean"), measured.tolist(), strict=True)
        )
        if not math.isfinite(metrics["loss"]) or not math.isfinite(metrics["gradient_norm"]):
            raise FloatingPointError(
                f"update {self._updates + 1}: the loss is {metrics['loss']} and its gradient's norm "
                f"{metrics['gradient_norm']}; the weights are kept as they were"
            )
        self._optimizer.step()
        self._updates += 1
        if self._updates % config.target_every_updates == 0:
            self._move_target()
        return Update(metrics)

    @torch.no_grad()
    def _move_target(self) -> None:
        for target, online in self._pairs:
            if self._config.target_mix == 1.0:
                target.copy_(online)
            else:
                target.lerp_(online, self._config.target_mix)

    def parameters(self) -> dict[str, NDArray]:
        return {
            name: tensor.to("cpu", copy=True).numpy()
            for name, tensor in self._online.state_dict().items()
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Private copies on the CPU: weights, target weights, Adam's moments; and the counter."""
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self._live().items()}
        return tensors, {"updates": self._updates}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Take over what `state` gave. Raises ValueError, and changes nothing, where names or
        shapes differ."""
        live = self._live()
        refuse_other_shapes("state", live, tensors)
        updates = values.get("updates")
        if not isinstance(updates, int) or updates < 0:
            raise ValueError(f"state: updates = {updates!r}: should be a count of updates")
        for name, tensor in live.items():
            tensor.copy_(tensors[name])
        self._updates = updates

    def _live(self) -> dict[str, Tensor]:
        """Every tensor that adapts, by name, itself and not a copy."""
        live = {f"online.{name}": tensor for name, tensor in self._online.state_dict().items()}
        live |= {f"target.{name}": tensor for name, tensor in self._target.state_dict().items()}
        for name, weight in self._weights.items():
            live |= {
                f"adam.{moment}.{name}": tensor
                for moment, tensor in self._optimizer.state[weight].items()
            }
        return live


def refuse_other_shapes(
    what: str, own: Mapping[str, Tensor], given: Mapping[str, NDArray] | Mapping[str, Tensor]
) -> None:
    """Raise ValueError, one line, unless `given` has the names and shapes of `own`."""
    if missing := sorted(set(own) - set(given)):
        raise ValueError(f"{what}: {missing[0]!r} is missing ({len(missing)} in all)")
    if unknown := sorted(set(given) - set(own)):
        raise ValueError(f"{what}: {unknown[0]!r} is unknown ({len(unknown)} in all)")
    for name, tensor in own.items():
        if tuple(given[name].shape) != tuple(tensor.shape):
            raise ValueError(
                f"{what}: {name!r} has shape {tuple(given[name].shape)}, should be "
                f"{tuple(tensor.shape)}"
            )


def discrete_choices(actions: ActionSpec) -> int:
    """How many actions there are. Raises ValueError where they are not discrete."""
    if actions.kind != "discrete":
        raise ValueError(
            f"dqn supports discrete actions only, not {actions.kind} of shape {actions.shape}"
        )
    return actions.choices[0]


def reads(config: DQNConfig) -> Reads:
    return Reads("transitions", n_step=config.n_step, gamma=config.gamma)


def exploration(config: DQNConfig, agent_index: int, agents: int, steps: int) -> float:
    """Epsilon that an agent acts with, after `steps` environment steps of all agents."""
    epsilon = linear_epsilon(config.epsilon_start, config.epsilon_end, config.epsilon_steps, steps)
    return agent_epsilon(epsilon, config.epsilon_spread, agent_index, agents)


ALGORITHM = Algorithm(
    name="dqn",
    configuration=DQNConfig,
    reads=reads,
    make_policy=DQNPolicy,
    make_learner=DQNLearner,
    exploration=exploration,
)
