"""The command line: what each program of bin/ takes, and how mistakes are answered.

Guarantees: `--help` and wrong options answer without loading torch; a wrong name is answered with
the nearest right one; a mistake of the user's is one line and exit code 2, never a traceback.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rich_click as click

click.rich_click.TEXT_PARAGRAPH_LINEBREAKS = "\n\n"  # paragraphs stay apart
USAGE_ERROR = 2
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
EXAMPLES = {
    "start-agent": "bin/start-agent --redis redis://localhost:6379 --experiment my-run",
    "start-replay": "bin/start-replay --redis redis://localhost:6379 --experiment my-run",
    "start-learner": (
        "bin/start-learner --redis redis://localhost:6379 --experiment my-run --preset cartpole-dqn"
    ),
    "start-evaluator": "bin/start-evaluator --redis redis://localhost:6379 --experiment my-run",
    "inspect": "bin/inspect --run my-run check",
}


def where_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The two options by which every process finds the others."""
    for decorate in (
        click.option(
            "--experiment", metavar="NAME", help="The experiment's name: a-z, 0-9 and '-'."
        ),
        click.option(
            "--redis",
            metavar="URL",
            help="The server: redis://HOST:PORT, rediss://HOST:PORT (TLS) or unix:///PATH.",
        ),
    ):
        function = decorate(function)
    return function


def configuration_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for decorate in (
        click.option(
            "--set",
            "settings",
            metavar="A.B=VALUE",
            multiple=True,
            help="One field, such as learner.batch_size=64; wins over preset and file. Repeatable.",
        ),
        click.option(
            "--config",
            "file",
            metavar="FILE",
            type=click.Path(path_type=Path, dir_okay=False),
            help="A YAML file of fields; wins over the preset.",
        ),
        click.option("--preset", metavar="NAME", help=f"One of: {', '.join(_presets())}."),
    ):
        function = decorate(function)
    return function


def _presets() -> list[str]:
    folder = Path(__file__).parents[2] / "algorithms" / "presets"
    return sorted(path.stem for path in folder.glob("*.yaml"))


@click.command(context_settings=CONTEXT)
@configuration_options
@click.option("--name", help="The run's name, and its folder's under runs/.  [default: PRESET-N]")
@click.option("--env", metavar="ID", help="Gymnasium id, gym:ID, or module:Class for your own.")
@click.option("--algorithm", metavar="NAME", help="What learns, such as dqn.")
@click.option("--seed", type=int, help="Every random stream of the run derives from it.")
@click.option("--agents", type=int, help="Agent processes.")
def train(
    preset: str | None,
    file: Path | None,
    settings: tuple[str, ...],
    name: str | None,
    env: str | None,
    algorithm: str | None,
    seed: int | None,
    agents: int | None,
) -> None:
    """Train on this machine until the task is solved, then say what was reached.

    Starts a private redis-server, one replay, one learner, the agents and one evaluator, and stops
    them all at the end. What it made lies in runs/NAME. Ctrl-C stops it cleanly at any moment.

    Without arguments it solves CartPole-v1 with the preset cartpole-dqn. With --env and no --preset
    it begins from the defaults, and ends after run.max_env_steps.

    \b
    bin/train
    bin/train --preset catch-dqn --name my-run
    bin/train --env my_module:MyEnv --seed 7 --set learner.batch_size=64
    """
    chosen = {
        "experiment.environment.id": env,
        "algorithm.name": algorithm,
        "experiment.seed": seed,
        "experiment.agents": agents,
    }
    shortcuts = [f"{field}={value}" for field, value in chosen.items() if value is not None]
    if preset is None and file is None and env is None:
        preset = "cartpole-dqn"
    with user_errors("train"):
        from pipeline.running.train import train_here

        code = train_here(name, preset, file, [*shortcuts, *settings])
    sys.exit(code)


@click.command("start-agent", context_settings=CONTEXT)
@where_options
@click.option("--name", help="Keeps index and seed over restarts.  [default: HOST-PID]")
@click.option("--learner", metavar="NAME", help="Whose parameters to act with.")
def start_agent(
    redis: str | None, experiment: str | None, name: str | None, learner: str | None
) -> None:
    """Step environments, and write what happens into Redis.

    Everything but the two options comes from the experiment. Each option is an environment variable
    too: REDREEL_REDIS, REDREEL_EXPERIMENT, and so on.
    """
    where = _where("start-agent", redis, experiment)
    with user_errors("start-agent"):
        from pipeline.running.daemons import agent_daemon

        code = agent_daemon(*where, name=name, learner=learner)
    sys.exit(code)


@click.command("start-replay", context_settings=CONTEXT)
@where_options
@click.option("--learner", metavar="NAME", help="Whose replay to be.")
def start_replay(redis: str | None, experiment: str | None, learner: str | None) -> None:
    """Mirror the live window of the stream, and make a learner's batches on its host.

    Everything but the two options comes from the experiment. Each option is an environment variable
    too: REDREEL_REDIS, REDREEL_EXPERIMENT, and so on.
    """
    where = _where("start-replay", redis, experiment)
    with user_errors("start-replay"):
        from pipeline.running.daemons import replay_daemon

        code = replay_daemon(*where, learner=learner)
    sys.exit(code)


@click.command("start-learner", context_settings=CONTEXT)
@where_options
@configuration_options
def start_learner(
    redis: str | None,
    experiment: str | None,
    preset: str | None,
    file: Path | None,
    settings: tuple[str, ...],
) -> None:
    """Train, and publish parameters. The first learner of a name creates the experiment.

    Without preset, file and settings it goes on with the configuration that it published before.
    Each option is an environment variable too: REDREEL_REDIS, REDREEL_EXPERIMENT, and so on.
    """
    where = _where("start-learner", redis, experiment)
    with user_errors("start-learner"):
        from pipeline.running.daemons import learner_daemon

        code = learner_daemon(*where, preset=preset, file=file, settings=settings)
    sys.exit(code)


@click.command("start-evaluator", context_settings=CONTEXT)
@where_options
@click.option("--learner", metavar="NAME", help="Whose parameters to evaluate.")
@click.option(
    "--run-folder",
    metavar="DIRECTORY",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the best policy here, in policy/.",
)
def start_evaluator(
    redis: str | None, experiment: str | None, learner: str | None, run_folder: Path | None
) -> None:
    """Follow the parameters, play greedily, and report the returns.

    Everything but the two options comes from the experiment. Each option is an environment variable
    too: REDREEL_REDIS, REDREEL_EXPERIMENT, and so on.
    """
    where = _where("start-evaluator", redis, experiment)
    with user_errors("start-evaluator"):
        from pipeline.running.daemons import evaluator_daemon

        code = evaluator_daemon(*where, learner=learner, run_folder=run_folder)
    sys.exit(code)


@click.command(context_settings=CONTEXT)
@where_options
@click.option("--run", metavar="NAME", help="A run on this machine: the folder runs/NAME.")
@click.argument("what", type=click.Choice(["check", "status"]), default="check")
def inspect(redis: str | None, experiment: str | None, run: str | None, what: str) -> None:
    """Look into an experiment; only reads.

    check: recompute the account from what lies in Redis, and exit 1 when anything is wrong.
    status: who is there, what they wait for, where the stream stands.

    With --run it attaches to the run's server, or starts the server of a run that has ended, looks,
    and stops it again.

    \b
    bin/inspect --run my-run check
    bin/inspect --redis redis://localhost:6379 --experiment my-run status
    """
    if run is None:
        redis, experiment = _where("inspect", redis, experiment)
    with user_errors("inspect"):
        from pipeline.running.inspecting import inspect_experiment, inspect_run

        code = (
            inspect_run(run, what)
            if run is not None
            else inspect_experiment(str(redis), str(experiment), what)
        )
    sys.exit(code)


def _where(program: str, redis: str | None, experiment: str | None) -> tuple[str, str]:
    """Both options, or the usage with an example that works."""
    if redis and experiment:
        return redis, experiment
    context = click.get_current_context(silent=True)
    missing = [
        option
        for option, value in (("--redis URL", redis), ("--experiment NAME", experiment))
        if not value
    ]
    click.echo(context.get_usage() if context else "", err=True)
    click.echo(f"{program} needs {' and '.join(missing)}. For example:", err=True)
    click.echo(f"  {EXAMPLES[program]}", err=True)
    sys.exit(USAGE_ERROR)


@contextlib.contextmanager
def user_errors(program: str) -> Iterator[None]:
    """Turn the errors that a user can mend into one line and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        from pipeline.running.daemons import exit_code

        code = exit_code(error)
        if code is None:
            raise
        click.echo(f"{program}: {error}", err=True)
        sys.exit(code)


COMMANDS: dict[str, click.Command] = {
    str(command.name): command
    for command in (train, start_agent, start_replay, start_learner, start_evaluator, inspect)
}


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] not in COMMANDS:
        click.echo(f"programs: {', '.join(COMMANDS)}", err=True)
        sys.exit(USAGE_ERROR)
    program, *rest = arguments
    COMMANDS[program].main(rest, prog_name=f"bin/{program}", auto_envvar_prefix="REDREEL")


if __name__ == "__main__":
    main(sys.argv[1:])
