"""The evaluator: plays greedily with the newest parameters, and says how well.

Guarantees: it never writes into the stream and touches no statistics; an evaluation is the same
episodes each time (the seeds stated), one from each copy, with one parameter set; "solved" is said
only of a set whose second evaluation, of other seeds, reached the target as well.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from algorithms.catalog import load_algorithm
from algorithms.policy_file import PolicyFileError, load_policy, save_policy
from pipeline.acting.environment import make_environment
from pipeline.acting.frame_stacker import FrameStacker
from pipeline.configuration import Configuration
from pipeline.configuration_codec import section_to_plain
from pipeline.experiment import Experiment
from pipeline.parameters import ParameterFollower, ParameterSet
from pipeline.seeds import derived_seed
from storage.protocol import Storage

logger = structlog.get_logger()

STEP_S = 0.1
WAIT_S = 0.1


@dataclass(frozen=True)
class Evaluation:
    """Returns of one evaluation's episodes."""

    parameters: ParameterSet
    mean: float
    std: float
    episodes: int
    first_seed: int


class EvaluatorRole:
    """One evaluator process's work."""

    def __init__(
        self,
        storage: Storage,
        experiment: Experiment,
        configuration: Configuration,
        run_folder: Path | None,
    ) -> None:
        config = configuration.evaluation
        self._experiment = experiment
        self._configuration = configuration
        self._config = config
        self._policy_folder = run_folder / "policy" if run_folder else None
        self._learner = configuration.experiment.learner
        self._policy = load_algorithm(configuration.algorithm_name).make_policy(
            configuration.algorithm, experiment.observations, experiment.actions
        )
        # Greedy, but a policy that samples anyway does so alike each time.
        self._rng_seed = derived_seed(experiment.config.seed, "evaluation")
        self._environment = make_environment(
            experiment.config, config.episodes, self._seeds(config.seed)
        )
        self._playing: _Episodes | None = None
        self._first: Evaluation | None = None
        """Reached the target; its confirmation is being played."""
        self._evaluated: ParameterSet | None = None
        self._began_at = -np.inf
        self._best = self._kept_return()
        self._metrics: dict[str, float] = {}
        self._confirmed = False
        self._waiting = "the first parameters: the learner publishes them"
        self._follower = ParameterFollower(
            storage,
            experiment.name,
            self._learner,
            on_connected=lambda: logger.info("parameters: connected", learner=self._learner),
            on_lost=lambda: logger.warning("parameters: connection lost", learner=self._learner),
        )

    def step(self) -> bool:
        if self._playing is None:
            return self._begin()
        if self._playing.play(STEP_S):
            evaluation = self._playing.evaluation()
            self._playing = None
            self._judge(evaluation)
        return True

    def status(self) -> dict[str, str]:
        return {
            "learner": self._learner,
            "waiting": self._waiting,
            "confirmed": "1" if self._confirmed else "",
        }

    def metrics(self) -> dict[str, float]:
        """Of the newest evaluation, repeated until there is another (`eval_version` tells)."""
        return dict(self._metrics)

    def drain(self) -> None:
        """Nothing is owed: an evaluation that was begun is not finished."""

    def close(self) -> None:
        self._follower.close()
        self._environment.close()

    # ------------------------------------------------------------------

    def _seeds(self, first: int) -> list[int]:
        return list(range(first, first + self._config.episodes))

    def _begin(self) -> bool:
        """Start the next evaluation when there is something new to evaluate."""
        pause_s = self._began_at + self._config.interval_s - time.monotonic()
        if pause_s > 0:
            time.sleep(min(pause_s, WAIT_S))
            return False
        newest = self._follower.wait_newer(self._evaluated, WAIT_S)
        if newest is None:
            return False
        self._waiting = ""
        self._began_at = time.monotonic()
        self._evaluated = newest
        self._play(newest, self._config.seed)
        return True

    def _play(self, parameters: ParameterSet, first_seed: int) -> None:
        self._policy.load(parameters.arrays)
        self._playing = _Episodes(self, parameters, first_seed)

    def _judge(self, evaluation: Evaluation) -> None:
        if self._first is not None:
            self._judge_confirmation(self._first, evaluation)
            self._first = None
            return
        target = self._config.target_return
        logger.info(
            "evaluation",
            return_mean=round(evaluation.mean, 3),
            return_std=round(evaluation.std, 3),
            episodes=evaluation.episodes,
            version=evaluation.parameters.version,
        )
        self._metrics = {
            "eval_return_mean": evaluation.mean,
            "eval_return_std": evaluation.std,
            "eval_episodes": float(evaluation.episodes),
            "eval_version": float(evaluation.parameters.version),
            "eval_confirmed": 0.0,
        }
        if evaluation.mean > self._best and not self._confirmed:
            self._best = evaluation.mean
            self._keep(evaluation, None)
        if target is not None and evaluation.mean >= target and not self._confirmed:
            self._first = evaluation
            self._play(evaluation.parameters, self._config.seed + self._config.episodes)

    def _judge_confirmation(self, first: Evaluation, second: Evaluation) -> None:
        target = self._config.target_return
        confirmed = target is not None and second.mean >= target
        logger.info(
            "confirmation",
            return_mean=round(second.mean, 3),
            first_seed=second.first_seed,
            confirmed=confirmed,
        )
        if confirmed:
            self._keep(first, second)
        self._confirmed = self._confirmed or confirmed
        self._metrics = {
            **self._metrics,
            "eval_confirmed": float(confirmed),
            "eval_confirm_mean": second.mean,
            "eval_confirm_std": second.std,
        }

    def _kept_return(self) -> float:
        """Mean return of the policy that an evaluator before this one has kept, else -inf."""
        if self._policy_folder is None:
            return -np.inf
        try:
            return float(load_policy(self._policy_folder).about["return_mean"])
        except (PolicyFileError, KeyError, TypeError, ValueError):
            return -np.inf

    def _keep(self, evaluation: Evaluation, confirmation: Evaluation | None) -> None:
        """Write the policy file; a disk that refuses is said, and the older file stays."""
        if self._policy_folder is None:
            return
        about: dict[str, Any] = {
            "experiment": self._experiment.name,
            "environment": section_to_plain(self._experiment.config.environment),
            "seed": self._experiment.config.seed,
            "version": evaluation.parameters.version,
            "return_mean": evaluation.mean,
            "return_std": evaluation.std,
            "episodes": evaluation.episodes,
            "first_seed": evaluation.first_seed,
        }
        if confirmation is not None:
            about |= {
                "confirmed_return_mean": confirmation.mean,
                "confirmed_first_seed": confirmation.first_seed,
            }
        try:
            save_policy(
                self._policy_folder,
                algorithm_name=self._configuration.algorithm_name,
                config=section_to_plain(self._configuration.algorithm),
                observations=self._experiment.observations,
                actions=self._experiment.actions,
                parameters=evaluation.parameters.arrays,
                about=about,
            )
        except OSError as error:
            logger.warning("policy not written", folder=str(self._policy_folder), error=str(error))


class _Episodes:
    """One episode in each copy, played to its end."""

    def __init__(self, role: EvaluatorRole, parameters: ParameterSet, first_seed: int) -> None:
        self._parameters = parameters
        self._first_seed = first_seed
        self._environment = role._environment
        self._policy = role._policy
        copies = self._environment.copies
        self._rng = np.random.Generator(np.random.Philox(key=[role._rng_seed, first_seed]))
        self._stacker = FrameStacker(role._experiment.observations, copies)
        observation = self._environment.reset(role._seeds(first_seed))
        self._stacked = self._stacker.reset(np.ones(copies, bool), observation)
        self._state = self._policy.initial_state(copies)
        self._returns = np.zeros(copies)
        self._going = np.ones(copies, bool)

    def play(self, limit_s: float) -> bool:
        """Step on for `limit_s`; True once every copy's first episode has ended."""
        until = time.monotonic() + limit_s
        while self._going.any() and time.monotonic() < until:
            acted = self._policy.act(self._stacked, self._state, self._rng, 0.0)
            result = self._environment.step(acted.action)
            self._returns += np.where(self._going & result.valid, result.reward, 0.0)
            self._going &= ~(result.terminated | result.truncated)
            self._stacked = self._stacker.push(result.observation, result.starts)
            self._state = acted.state  # a copy that began again no longer counts
        return not self._going.any()

    def evaluation(self) -> Evaluation:
        return Evaluation(
            self._parameters,
            float(self._returns.mean()),
            float(self._returns.std()),
            len(self._returns),
            self._first_seed,
        )
