"""`bin/train`: a whole run on this machine, from its server to its summary.

Guarantees: whatever ends the run, the processes are stopped in the order of the data (agents, then
replay and learner, then Redis), and what was reached is written down; a redis-server that dies is
started again on its files.
"""

import contextlib
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from pipeline.acting.environment import describe_environment
from pipeline.configuration import Configuration
from pipeline.configuration_codec import ConfigurationError, to_plain, to_yaml
from pipeline.metrics import decode_record
from pipeline.running.configuring import build
from pipeline.running.curves import draw_curves
from pipeline.running.daemons import check_algorithm
from pipeline.running.display import Display
from pipeline.running.logging_setup import configure
from pipeline.running.loop import Stop
from pipeline.running.progress import Progress
from pipeline.running.summary import Summary, account_totals, number, write_summary
from pipeline.running.supervisor import RunFailedError, Spec, Supervisor
from storage.embedded import start_embedded
from storage.errors import DamagedError, StorageError, UnavailableError
from storage.keys import checked_experiment
from storage.protocol import Storage
from storage.url import open_storage

logger = structlog.get_logger()

RUNS = Path("runs")
URL_FILE = "redis-url"
"""In the run folder while the run lives: where its server is."""
POLL_S = 0.25
SERVER_RESTARTS = 5
NOT_SOLVED = 1
ACT, SERVE = 0, 1
"""Stop orders: agents and evaluator first, so that what they still write is read and learned."""


def train_here(
    name: str | None, preset: str | None, file: Path | None, settings: Sequence[str]
) -> int:
    """Run until solved, stopped or given up. Returns the exit code: 0, 1 (not solved), 130 (Ctrl-C).

    Raises ConfigurationError and its like before anything is started, RunFailedError where a
    process cannot live.
    """
    configuration = build(preset, file, settings)
    observations, actions = describe_environment(configuration.experiment)
    check_algorithm(configuration, observations, actions)
    name = checked_experiment(name or _free_name(preset or "run"))
    configure("train")
    folder = _new_folder(name)
    (folder / "config.yaml").write_text(to_yaml(to_plain(configuration)))
    stop = Stop().install()
    run = Run(name, folder.absolute(), configuration, stop)
    return run.run()


@dataclass
class _Ending:
    """How the run ended."""

    solved: bool = False
    why: str = ""


class Run:
    """One run, from start to end."""

    def __init__(self, name: str, folder: Path, configuration: Configuration, stop: Stop) -> None:
        self._name = name
        self._folder = folder
        self._configuration = configuration
        self._stop = stop
        self._began = time.monotonic()
        self._progress = Progress()
        self._server = start_embedded(folder / "redis")
        self._server_restarts = 0
        self._storage: Storage = open_storage(self._server.url)
        self._say_where()
        self._cursor = "0"
        self._supervisor = Supervisor(
            folder / "logs", configuration.run.restarts, {"OMP_NUM_THREADS": "1"}
        )
        self._wall_s = 0.0
        self._disk_refuses = False
        self._metrics_file = folder / "metrics.jsonl"
        self._metrics_file.touch()

    def run(self) -> int:
        ending = _Ending()
        try:
            try:
                self._start()
                with Display(f"{self._name}: {self._about()}") as display:
                    while not ending.why:
                        ending = self._poll()
                        display.show(self._progress)
                        self._stop.sleep(POLL_S)
                        if self._stop and not ending.why:
                            ending = _Ending(False, "interrupted")
            finally:
                self._wall_s = time.monotonic() - self._began
                self._stop_children()
            self._finish(ending)
        finally:
            # Redis last: until here everything that the others had to say has reached it.
            with contextlib.suppress(OSError):
                (self._folder / URL_FILE).unlink()
            self._storage.close()
            self._server.stop()
        if self._stop:
            return 130
        target = self._configuration.evaluation.target_return
        return 0 if ending.solved or target is None else NOT_SOLVED

    # ------------------------------------------------------------------ starting

    def _start(self) -> None:
        experiment = self._configuration.experiment
        limited = self._configuration.learner.total_updates > 0
        self._launch("learner", SERVE, limited, "--config", str(self._folder / "config.yaml"))
        self._launch("replay", SERVE, False)
        self._launch("evaluator", ACT, False, "--run-folder", str(self._folder))
        for index in range(experiment.agents):
            self._launch(f"agent-{index}", ACT, True, "--name", str(index))
        logger.info(
            "started",
            run=self._name,
            environment=experiment.environment.id,
            algorithm=self._configuration.algorithm_name,
            agents=experiment.agents,
            folder=str(self._folder),
        )

    def _launch(self, name: str, order: int, may_leave: bool, *more: str) -> None:
        program = f"start-{name.partition('-')[0]}"
        command = (
            *(sys.executable, "-m", "pipeline.running.commands", program),
            *("--redis", self._server.url, "--experiment", self._name, *more),
        )
        self._supervisor.start(Spec(name, command, order, may_leave))

    def _about(self) -> str:
        return (
            f"{self._configuration.algorithm_name} on "
            f"{self._configuration.experiment.environment.id}"
        )

    def _say_where(self) -> None:
        (self._folder / URL_FILE).write_text(self._server.url + "\n")
        logger.info("redis-server", version=self._server.version, url=self._server.url)

    # ------------------------------------------------------------------ while it lives

    def _poll(self) -> _Ending:
        self._supervisor.poll()
        self._keep_server()
        try:
            self._read_metrics()
            self._read_members()
        except UnavailableError as error:
            logger.debug("server not reached", error=str(error))
        return self._ending()

    def _keep_server(self) -> None:
        if self._server.running:
            return
        if self._server_restarts >= SERVER_RESTARTS:
            raise RunFailedError(f"redis-server ended again and again: see {self._server.log}")
        self._server_restarts += 1
        logger.warning("redis-server ended: starting it again", log=str(self._server.log))
        self._server = start_embedded(self._folder / "redis")
        self._say_where()

    def _read_metrics(self) -> None:
        while True:
            records = self._storage.read_metrics(self._name, self._cursor, 500)
            new = []
            for cursor, data in records:
                self._cursor = cursor
                try:
                    record = decode_record(data)
                except DamagedError as error:
                    logger.warning("metrics record left out", error=str(error))
                    continue
                if self._progress.take(record):
                    new.append(data + b"\n")
            self._keep(b"".join(new))
            if len(records) < 500:
                return

    def _keep(self, lines: bytes) -> None:
        """A disk that refuses costs the run its curves, no more; that is said once."""
        try:
            with self._metrics_file.open("ab") as file:
                file.write(lines)
        except OSError as error:
            if not self._disk_refuses:
                logger.warning("metrics not kept", file=str(self._metrics_file), error=str(error))
            self._disk_refuses = True

    def _read_members(self) -> None:
        members = self._storage.members(self._name)
        self._progress.waiting = {
            member: fields.get("waiting", "") for member, fields in members.items()
        }
        shards = self._configuration.experiment.shards
        totals = account_totals(self._storage, self._name, shards)
        self._progress.env_steps = totals["env_steps"]

    def _ending(self) -> _Ending:
        run, left = self._configuration.run, self._supervisor.left
        if self._progress.confirmed:
            return _Ending(True, "solved")
        if "learner" in left:
            return _Ending(False, "learner.total_updates reached")
        agents = {f"agent-{index}" for index in range(self._configuration.experiment.agents)}
        if agents <= left:
            words = self._supervisor.last_words(min(agents))
            raise RunFailedError(f"every agent left{words}")
        if self._progress.env_steps >= run.max_env_steps:
            return _Ending(False, f"run.max_env_steps reached: {self._progress.env_steps}")
        if time.monotonic() - self._began >= run.max_wall_s:
            return _Ending(False, f"run.max_wall_s reached: {run.max_wall_s:g}")
        return _Ending()

    # ------------------------------------------------------------------ ending

    def _stop_children(self) -> None:
        signals = self._stop.signal_number
        logger.info("stopping")
        # A second Ctrl-C ends this process at once; its children then end by themselves.
        self._supervisor.stop(hurry=lambda: self._stop.signal_number != signals and signals == 0)

    def _finish(self, ending: _Ending) -> None:
        """Write what was reached, and say it. A disk that refuses is said, no more."""
        try:
            self._read_metrics()
        except StorageError as error:
            logger.warning("the last measurements could not be read", error=str(error))
        try:
            totals = account_totals(
                self._storage, self._name, self._configuration.experiment.shards
            )
        except StorageError as error:
            logger.warning("the account could not be read", error=str(error))
            totals = {}
        summary = self._summary(ending, totals)
        try:
            write_summary(self._folder, summary)
            draw_curves(self._metrics_file, self._folder / "curves.png")
        except OSError as error:
            logger.warning("not everything was written", error=str(error))
        self._say(ending, summary)

    def _summary(self, ending: _Ending, totals: dict[str, int]) -> Summary:
        progress = self._progress
        updates = progress.total("learner", "updates")
        samples = updates * self._configuration.learner.batch_size
        env_steps = totals.get("env_steps", 0)
        return Summary(
            experiment=self._name,
            algorithm=self._configuration.algorithm_name,
            environment=self._configuration.experiment.environment.id,
            solved=ending.solved,
            env_steps=env_steps,
            learner_updates=int(updates),
            eval_return_mean=number(progress.eval_return_mean),
            eval_return_std=number(progress.eval_return_std),
            wall_s=round(self._wall_s, 2),
            env_steps_per_s=round(env_steps / self._wall_s, 1),
            updates_per_s=round(updates / self._wall_s, 1),
            samples_per_s=round(samples / self._wall_s, 1),
            segments_written=totals.get("segments_written", 0),
            segments_sampled_from=int(progress.total("replay", "segments_sampled_from")),
            segments_dropped=totals.get("segments_dropped", 0),
            frames_written=totals.get("frames_written", 0),
            frames_deduplicated=totals.get("frames_deduplicated", 0),
            restarts=self._supervisor.restarts + self._server_restarts,
        )

    def _say(self, ending: _Ending, summary: Summary) -> None:
        import rich_click as click

        from pipeline.running.report import report_lines

        for line in report_lines(ending.why, summary, self._folder):
            click.echo(line)


def _free_name(stem: str) -> str:
    """`stem`-1, or the first number that no folder has."""
    return next(
        name
        for name in (f"{stem}-{count}" for count in itertools.count(1))
        if not (RUNS / name).exists()
    )


def _new_folder(name: str) -> Path:
    folder = RUNS / name
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigurationError(
            f"--name {name}: {folder} is there already; take another name, or remove that folder"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"run folder {folder}: {error.strerror}") from error
    return folder
