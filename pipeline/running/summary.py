"""What a run reached, in one file: runs/NAME/summary.json.

Guarantees: the counters are those of the account in the store, so `bin/inspect --run NAME check`
finds the same; the file is there whole or not at all.
"""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from storage.protocol import Storage

FILE = "summary.json"
ACCOUNT = {
    "segments_written": "segments",
    "segments_dropped": "dropped_segments",
    "frames_written": "frames_written",
    "frames_deduplicated": "frames_deduplicated",
}
"""Field of the summary to field of a shard's state."""


@dataclass(frozen=True)
class Summary:
    experiment: str
    algorithm: str
    environment: str
    solved: bool
    env_steps: int
    learner_updates: int
    eval_return_mean: float | None
    """Of the newest evaluation, or of that which was confirmed; None where there was none."""
    eval_return_std: float | None
    wall_s: float
    """From the start of `bin/train` to the decision to end; set-up of .venv apart."""
    env_steps_per_s: float
    updates_per_s: float
    samples_per_s: float
    segments_written: int
    segments_sampled_from: int
    segments_dropped: int
    frames_written: int
    frames_deduplicated: int
    restarts: int


def account_totals(storage: Storage, experiment: str, shards: int) -> dict[str, int]:
    """The summary's counters of the store, and `env_steps`, summed over shards."""
    accounts = [storage.account(experiment, shard) for shard in range(shards)]
    names = {"env_steps": "steps", **ACCOUNT}
    return {
        name: sum(int(account.get(state, 0)) for account in accounts)
        for name, state in names.items()
    }


def number(value: float) -> float | None:
    """JSON has no NaN."""
    return round(value, 4) if math.isfinite(value) else None


def write_summary(folder: Path, summary: Summary) -> None:
    """Raises OSError; an older file is then still there."""
    temporary = folder / f".{FILE}.tmp"
    temporary.write_text(json.dumps(asdict(summary), indent=2) + "\n")
    os.replace(temporary, folder / FILE)


def read_summary(folder: Path) -> dict[str, object] | None:
    """None where there is no summary that reads."""
    try:
        fields = json.loads((folder / FILE).read_text())
    except (OSError, ValueError):
        return None
    return fields if isinstance(fields, dict) else None
