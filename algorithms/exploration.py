"""How much a policy explores, as plain functions of agent and time.

Guarantees: pure; every value lies in [0, 1] when the epsilons given do.
"""


def linear_epsilon(start: float, end: float, over_steps: int, steps: int) -> float:
    """Epsilon after `steps` environment steps: a line from `start` to `end`, then `end`."""
    if steps >= over_steps:
        return end
    return start + (end - start) * (max(steps, 0) / over_steps)


def agent_epsilon(epsilon: float, spread: float, agent_index: int, agents: int) -> float:
    """Epsilon of one of several agents: epsilon^(1 + i / (N - 1) * spread).

    Agent 0 explores with `epsilon` itself, the last one with epsilon^(1 + spread); `spread` 0 makes
    all alike. An index of N or more (an agent beyond those configured) counts as the last.
    Source: Horgan 2018 (Ape-X), section 4, with epsilon 0.4 and spread 7.
    """
    if agents < 2:
        return epsilon
    share = min(max(agent_index, 0), agents - 1) / (agents - 1)
    exponent = 1.0 + share * spread
    return float(epsilon**exponent)
