"""Draws a run's curves from its metrics file.

Guarantees: lines that do not read are left out; a run that measured nothing still gets a picture.
"""

from collections import defaultdict
from pathlib import Path

from pipeline.metrics import Record, decode_record
from storage.errors import DamagedError

CURVES = (
    ("evaluation return", "evaluator", "eval_return_mean"),
    ("episode return while exploring", "agent", "episode_return_mean"),
    ("environment steps/s, each agent", "agent", "env_steps_per_s"),
    ("updates/s", "learner", "updates_per_s"),
    ("loss", "learner", "loss"),
    ("staleness, versions", "learner", "staleness_mean"),
)
"""Title, role, metric."""


def draw_curves(metrics: Path, picture: Path) -> None:
    """Write `picture` (PNG). Raises OSError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = read_records(metrics)
    start = min((record.time_s for record in records), default=0.0)
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 6.5), layout="constrained")
    for axis, (title, role, name) in zip(axes.flat, CURVES, strict=True):
        lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for record in records:
            if record.role == role and name in record.values:
                lines[record.member].append((record.time_s - start, record.values[name]))
        for points in lines.values():
            axis.plot(*zip(*points, strict=True))
        axis.set_title(title)
        axis.set_xlabel("seconds")
        axis.grid(alpha=0.3)
    figure.savefig(picture, dpi=90)
    pyplot.close(figure)


def read_records(metrics: Path) -> list[Record]:
    records = []
    for line in metrics.read_bytes().splitlines() if metrics.exists() else []:
        try:
            records.append(decode_record(line))
        except DamagedError:
            continue  # the last line of a run that was killed
    return records
