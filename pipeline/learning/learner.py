"""The learner: takes batches, updates, publishes parameters.

Guarantees: parameters are published under the role's lease only; a batch whose loss is not finite
changes nothing and is counted; in synchronous mode the set published for entry n has learned from
every batch due up to n, and from no later one.
"""

import time
from collections import Counter, deque

import numpy as np
import structlog

from algorithms.catalog import load_algorithm
from pipeline.configuration import Configuration
from pipeline.experiment import Experiment
from pipeline.learning.device import choose_device, describe_device
from pipeline.learning.prefetch import Batch, Prefetch
from pipeline.parameters import ParameterPublisher
from pipeline.seeds import derived_seed
from pipeline.transport import Turn
from storage.protocol import Lease, Storage

logger = structlog.get_logger()

LEASE_S = 10.0
RENEW_S = 2.0
STEP_S = 0.1
"""Updates are made for this long before the loop looks at signals again."""
WAIT_S = 0.1
REFUSED_IN_A_ROW = 100
"""So many batches without a finite loss, one after the other: learning is broken."""
METRICS_KEPT = 200
"""Updates that the algorithm's measurements are averaged over."""


class LearnerRole:
    """One learner process's work."""

    def __init__(
        self,
        storage: Storage,
        experiment: Experiment,
        configuration: Configuration,
        lease: Lease,
        member_id: str,
    ) -> None:
        config = configuration.learner
        self._storage = storage
        self._experiment = experiment.name
        self._name = configuration.experiment.learner
        self._config = config
        self._batch_size = config.batch_size
        self._synchronous = experiment.config.synchronous
        self._lease = lease
        self._renewed_at = time.monotonic()
        device = choose_device(config.device)
        logger.info("device", device=describe_device(device))
        algorithm = load_algorithm(configuration.algorithm_name)
        self._learner = algorithm.make_learner(
            configuration.algorithm,
            experiment.observations,
            experiment.actions,
            device,
            derived_seed(experiment.config.seed, "learner"),
        )
        self._publisher = ParameterPublisher(
            storage, experiment.name, self._name, lease, config.keep_versions
        )
        self._updates = 0
        self._published_updates = -1
        self._published_at = -np.inf
        self._due_entry: int | None = 0
        """Entry that a publication is owed for: the first set, and synchronous turns."""
        self._refused_in_a_row = 0
        self._counts: Counter[str] = Counter()
        self._measured: deque[dict[str, float]] = deque(maxlen=METRICS_KEPT)
        self._staleness: deque[tuple[float, float]] = deque(maxlen=METRICS_KEPT)
        self._rate_since = (time.monotonic(), 0)
        self.finished = False
        self._prefetch = Prefetch(storage, experiment.name, self._name, device)

    # ------------------------------------------------------------------ the loop's side

    def step(self) -> bool:
        self._renew()
        self._publish()
        until = time.monotonic() + STEP_S
        worked = False
        while time.monotonic() < until and self._due_entry is None:
            item = self._prefetch.next(0.0 if worked else WAIT_S)
            if item is None:
                break
            worked = True
            if isinstance(item, Turn):
                self._due_entry = item.entry
            else:
                self._update(item)
                if self._config.total_updates and self._updates >= self._config.total_updates:
                    self.finished = True
                    break
        self._publish()
        return worked

    def status(self) -> dict[str, str]:
        return {
            "learner": self._name,
            "version": str(self._publisher.version),
            "waiting": self._prefetch.waiting,
        }

    def metrics(self) -> dict[str, float]:
        now = time.monotonic()
        since, updates = self._rate_since
        self._rate_since = (now, self._updates)
        rate = (self._updates - updates) / max(now - since, 1e-9)
        values = {
            "updates": float(self._updates),
            "updates_per_s": rate,
            "samples_per_s": rate * self._batch_size,
            "version": float(self._publisher.version),
            "batches_refused": float(self._counts["batches_refused"]),
            "batches_discarded": float(self._prefetch.discarded),
        }
        staleness = list(self._staleness)
        if staleness:
            values["staleness_mean"] = float(np.mean([mean for mean, _ in staleness]))
            values["staleness_max"] = float(max(most for _, most in staleness))
        measured = list(self._measured)
        if measured:
            for name in measured[-1]:
                values[name] = float(np.mean([one[name] for one in measured if name in one]))
        return values

    def drain(self) -> None:
        """Publish what was learned last."""
        if self._updates > self._published_updates and not self._synchronous:
            self._due_entry = 0
            self._publish()

    def close(self) -> None:
        self._prefetch.close()

    # ------------------------------------------------------------------

    def _renew(self) -> None:
        """Raises LostRoleError once another learner has taken this role over."""
        if time.monotonic() - self._renewed_at >= RENEW_S:
            self._storage.renew(self._experiment, self._lease, LEASE_S)
            self._renewed_at = time.monotonic()

    def _publish(self) -> None:
        """Publish what is owed, or what is new and due by time. Repeated after an error."""
        now = time.monotonic()
        due = self._due_entry is not None or (
            not self._synchronous
            and self._updates > self._published_updates
            and now - self._published_at >= self._config.publish_interval_s
        )
        if not due:
            return
        self._publisher.publish(
            self._learner.parameters(), iteration=self._updates, entry=self._due_entry or 0
        )
        self._due_entry = None
        self._published_updates = self._updates
        self._published_at = now

    def _update(self, batch: Batch) -> None:
        try:
            update = self._learner.update(batch.transitions)
        except FloatingPointError as error:
            self._counts["batches_refused"] += 1
            self._refused_in_a_row += 1
            if self._refused_in_a_row == 1:
                logger.warning("batch refused", batch=batch.number, error=str(error))
            if self._refused_in_a_row >= REFUSED_IN_A_ROW:
                raise
            return
        self._refused_in_a_row = 0
        self._updates += 1
        self._measured.append(update.metrics)
        # Versions of an older fence count on in this one: the difference is in publications.
        behind = self._publisher.version - batch.version
        self._staleness.append((float(behind.mean()), float(behind.max())))
