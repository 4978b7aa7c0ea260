"""What a run has reached, put together from the measurements of its processes.

Guarantees: pure; the newest record of each member counts, and an evaluation counts once however
often its record came.
"""

import math
from dataclasses import dataclass, field

from pipeline.metrics import Record


@dataclass
class Progress:
    """Filled by `take`; read by the display, the summary and the end of the run."""

    newest: dict[str, Record] = field(default_factory=dict)
    """Member to its newest record."""
    waiting: dict[str, str] = field(default_factory=dict)
    """Living member to what it waits for; "" where it does not."""
    env_steps: int = 0
    """Steps written, as the account says."""
    eval_return_mean: float = math.nan
    """Of the newest evaluation."""
    eval_return_std: float = math.nan
    eval_best: float = -math.inf
    confirmed: bool = False
    _evaluations: set[tuple[object, ...]] = field(default_factory=set)

    def take(self, record: Record) -> bool:
        """Whether it says something that no record before it said."""
        self.newest[record.member] = record
        if record.role != "evaluator":
            return True
        values = record.values
        if "eval_return_mean" not in values or self.confirmed:
            return False
        self.eval_return_mean = values["eval_return_mean"]
        self.eval_return_std = values.get("eval_return_std", math.nan)
        self.eval_best = max(self.eval_best, self.eval_return_mean)
        self.confirmed = values.get("eval_confirmed", 0.0) == 1.0
        key = (record.member, values.get("eval_version", math.nan), *self._confirmation(record))
        is_new = key not in self._evaluations
        self._evaluations.add(key)
        return is_new

    @staticmethod
    def _confirmation(record: Record) -> tuple[float, ...]:
        mean = record.values.get("eval_confirm_mean")
        return () if mean is None else (mean,)

    def total(self, role: str, name: str) -> float:
        """Sum over all members that a role has had: for what each counts from its start."""
        return sum(
            record.values.get(name, 0.0) for record in self.newest.values() if record.role == role
        )

    def living(self, role: str, name: str) -> list[float]:
        """What the living members of a role say: for rates and states."""
        return [
            record.values[name]
            for member, record in self.newest.items()
            if member in self.waiting and record.role == role and name in record.values
        ]

    def rows(self) -> list[tuple[str, str]]:
        """What to show while the run lives: (name, value), always the same rows."""
        waits = [f"{member}: {what}" for member, what in sorted(self.waiting.items()) if what]
        best = "" if self.eval_best == -math.inf else f"  (best {self.eval_best:.4g})"
        evaluated = (
            "none yet"
            if math.isnan(self.eval_return_mean)
            else f"{self.eval_return_mean:.4g} ± {self.eval_return_std:.3g}{best}"
        )
        staleness = max(self.living("learner", "staleness_mean"), default=math.nan)
        epsilon = max(self.living("agent", "exploration"), default=0.0)
        return [
            ("evaluation return", evaluated),
            (
                "environment",
                f"{self.env_steps:,} steps, {sum(self.living('agent', 'env_steps_per_s')):,.0f}/s, "
                f"exploration {epsilon:.2f}",
            ),
            (
                "learner",
                f"{self.total('learner', 'updates'):,.0f} updates, "
                f"{sum(self.living('learner', 'updates_per_s')):,.0f}/s, "
                f"{sum(self.living('learner', 'samples_per_s')):,.0f} samples/s",
            ),
            ("window", f"{sum(self.living('replay', 'window_steps')):,.0f} steps"),
            (
                "staleness",
                "none yet" if math.isnan(staleness) else f"{staleness:.0f} versions behind, mean",
            ),
            ("waiting", "; ".join(waits) or "nobody"),
        ]
