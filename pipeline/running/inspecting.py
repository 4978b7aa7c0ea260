"""`bin/inspect`: the account recomputed, and who is there. Only reads.

Guarantees: attaches to a run that lives, else starts its server and stops it again; exit code 1
exactly when something does not add up.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import rich_click as click

from pipeline.configuration_codec import ConfigurationError
from pipeline.experiment import Experiment, join
from pipeline.running.summary import account_totals, read_summary
from pipeline.running.train import RUNS, URL_FILE
from storage.embedded import start_embedded
from storage.errors import StorageError, UnknownExperimentError
from storage.protocol import Storage
from storage.url import open_storage

PROBLEMS_SHOWN = 20


def inspect_experiment(redis: str, experiment: str, what: str) -> int:
    """Look into an experiment on a server. Returns the exit code."""
    with contextlib.closing(open_storage(redis)) as storage:
        return _look(storage, experiment, what, None)


def inspect_run(run: str, what: str) -> int:
    """Look into a run of this machine, living or ended. Returns the exit code."""
    folder = RUNS / run
    if not (folder / "redis").is_dir():
        there = sorted(path.name for path in RUNS.glob("*") if path.is_dir())
        raise ConfigurationError(
            f"--run {run}: no such run in {RUNS.absolute()}; there are: {', '.join(there) or 'none'}"
        )
    with _server_of(folder) as (url, living), contextlib.closing(open_storage(url)) as storage:
        return _look(storage, run, what, None if living else read_summary(folder))


@contextlib.contextmanager
def _server_of(folder: Path) -> Iterator[tuple[str, bool]]:
    """URL of the run's server, and whether the run itself keeps it."""
    url_file = folder / URL_FILE
    if url_file.exists():
        url = url_file.read_text().strip()
        with contextlib.closing(open_storage(url)) as storage:
            try:
                storage.check_server()
                living = True
            except StorageError:
                living = False  # the run was killed before it could remove the file
        if living:
            yield url, True
            return
    with start_embedded(folder / "redis") as server:
        yield server.url, False


def _look(storage: Storage, name: str, what: str, summary: dict[str, object] | None) -> int:
    experiment = join(storage, name)
    if experiment is None:
        known = ", ".join(sorted(storage.experiments())) or "none"
        raise UnknownExperimentError(f"there is no experiment {name!r}; there are: {known}")
    if what == "status":
        return _status(storage, experiment)
    return _check(storage, experiment, summary)


def _check(storage: Storage, experiment: Experiment, summary: dict[str, object] | None) -> int:
    report = storage.audit(experiment.name)
    totals = account_totals(storage, experiment.name, experiment.config.shards)
    problems = list(report.problems)
    for field, value in totals.items():
        if summary is not None and summary.get(field) != value:
            problems.append(
                f"summary.json: {field} is {summary.get(field)}, the store says {value}"
            )
    click.echo(
        f"entries  {report.written:,} written = {report.live:,} live + {report.dropped:,} dropped"
    )
    for reason, count in sorted(report.dropped_by_reason.items()):
        click.echo(f"         {count:,} dropped: {reason}")
    click.echo(f"frames   {report.frames:,} live")
    for field, value in totals.items():
        click.echo(f"{field} {value}")
    for problem in problems[:PROBLEMS_SHOWN]:
        click.echo(f"WRONG: {problem}")
    if len(problems) > PROBLEMS_SHOWN:
        click.echo(f"… and {len(problems) - PROBLEMS_SHOWN} more")
    if problems:
        return 1
    agrees = " and agrees with summary.json" if summary is not None else ""
    click.echo(f"sound: everything adds up{agrees}")
    if report.moving:
        click.echo("(written to meanwhile: sums over live entries were not compared)")
    return 0


def _status(storage: Storage, experiment: Experiment) -> int:
    config = experiment.config
    click.echo(
        f"{experiment.name}: {config.environment.id}, created as {experiment.creation_id}, "
        f"wire version {experiment.wire_version}"
    )
    for shard in range(config.shards):
        position = storage.position(experiment.name, shard)
        click.echo(
            f"shard {shard}: entries {position.first_entry} to {position.last_entry} live, "
            f"{position.total_steps:,} steps written"
        )
    members = storage.members(experiment.name)
    for member, fields in sorted(members.items()):
        waiting = fields.get("waiting", "")
        click.echo(
            f"{member}: pid {fields.get('pid')} on {fields.get('hostname')}"
            + (f", version {fields['version']}" if fields.get("version") else "")
            + (f", waiting for {waiting}" if waiting else "")
        )
    if not members:
        click.echo("no member lives")
    return 0
