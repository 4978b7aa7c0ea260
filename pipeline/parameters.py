"""Parameters on their way back: the learner publishes whole sets, everyone else follows the newest.

Guarantees: a follower sees whole sets only, each with the bytes that were published; it never goes
back, where newer means a higher (fence, version); a version is used for one set only, whatever was
lost on the way.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from storage.errors import DamagedError, StorageError, UnavailableError
from storage.protocol import Lease, ParametersHead, Storage, Subscription
from storage.redis_store import content_hash

logger = structlog.get_logger()

LOOK_S = 1.0
"""The head is read this often where no notice comes: notices may be missed."""
RETRY_S = 0.25
"""Pause before an unreachable server is asked again."""


def encode_parameters(arrays: Mapping[str, NDArray]) -> bytes:
    """safetensors bytes: names, dtypes and shapes exact."""
    data: bytes = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    return data


def decode_parameters(data: bytes) -> dict[str, NDArray]:
    """Raises DamagedError."""
    try:
        arrays: dict[str, NDArray] = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"a parameter set does not decode: {error}") from error
    return arrays


@dataclass(frozen=True, eq=False)
class ParameterSet:
    fence: int
    version: int
    entry: int
    """Synchronous mode: the last entry this set has learned from; else 0."""
    arrays: Mapping[str, NDArray]

    @property
    def order(self) -> tuple[int, int]:
        """Newer is greater: a higher fence always wins."""
        return (self.fence, self.version)


class ParameterPublisher:
    """The learner's side. Belongs to one thread."""

    def __init__(
        self, storage: Storage, experiment_name: str, learner: str, lease: Lease, keep: int
    ) -> None:
        """Goes on after the newest version there is. Raises LostRoleError."""
        self._storage = storage
        self._experiment = experiment_name
        self._learner = learner
        self._lease = lease
        self._keep = keep
        head = storage.claim_parameters(experiment_name, learner, lease)
        self.version = head.version if head else 0
        """The newest version that may be out; 0 while there was none."""

    def publish(self, arrays: Mapping[str, NDArray], *, iteration: int = 0, entry: int = 0) -> None:
        """Make `arrays` the newest set. Raises UnavailableError, after which it may be out or not:
        publish again, under the next version. Raises LostRoleError."""
        value = encode_parameters(arrays)
        # Counted first: an attempt without answer may have arrived, with these bytes.
        self.version += 1
        self._storage.publish(
            self._experiment,
            self._learner,
            self._lease,
            self.version,
            value,
            iteration=iteration,
            entry=entry,
            keep=self._keep,
        )


class ParameterFollower:
    """The newest set of one learner, fetched by a thread of its own as soon as it is out."""

    def __init__(
        self,
        storage: Storage,
        experiment_name: str,
        learner: str,
        on_connected: Callable[[], None] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """The callbacks are called from the thread: when the server answers (first, or again), and
        when it no longer does."""
        self._storage = storage
        self._experiment = experiment_name
        self._learner = learner
        self._on_connected = on_connected or (lambda: None)
        self._on_lost = on_lost or (lambda: None)
        self._connected = False
        self._changed = threading.Condition()
        self._latest: ParameterSet | None = None
        self._refused: tuple[int, int] | None = None
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="parameters", daemon=True)
        self._thread.start()

    @property
    def latest(self) -> ParameterSet | None:
        """None before the first. Raises what ended the thread, if something did."""
        if self._error is not None:
            raise self._error
        return self._latest

    def wait_newer(self, than: ParameterSet | None, timeout_s: float) -> ParameterSet | None:
        """The newest set once it is newer than `than`; None after `timeout_s`."""
        order = than.order if than else (0, 0)
        return self._wait(lambda found: found.order > order, timeout_s)

    def wait_entry(self, entry: int, timeout_s: float) -> ParameterSet | None:
        """The newest set once it has learned from `entry`; None after `timeout_s`."""
        return self._wait(lambda found: found.entry >= entry, timeout_s)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(2.0)  # it may be within a wait for the server; it is a daemon

    def _wait(self, fits: Callable[[ParameterSet], bool], timeout_s: float) -> ParameterSet | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or (self._latest and fits(self._latest)), timeout_s
            )
        latest = self.latest
        return latest if latest and fits(latest) else None

    # ------------------------------------------------------------------ the thread's side

    def _run(self) -> None:
        subscription: Subscription | None = None
        try:
            while not self._stopping.is_set():
                try:
                    # Subscribed before the head is read: what comes between the two is noticed.
                    subscription = subscription or self._storage.subscribe(
                        self._experiment, self._learner
                    )
                    self._look()
                    self._say_connected(True)
                    subscription.wait(LOOK_S)
                except UnavailableError:
                    self._say_connected(False)
                    self._stopping.wait(RETRY_S)
        except BaseException as error:
            if not self._stopping.is_set():
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
        finally:
            if subscription is not None:
                with contextlib.suppress(StorageError):
                    subscription.close()

    def _say_connected(self, connected: bool) -> None:
        if connected != self._connected:
            self._connected = connected
            (self._on_connected if connected else self._on_lost)()

    def _look(self) -> None:
        """Fetch the newest set if it is newer than ours."""
        for _ in range(5):  # a set may be displaced by newer ones between head and value
            head = self._storage.parameters_head(self._experiment, self._learner)
            if head is None or head.order == self._refused:
                return
            if self._latest is not None and head.order <= self._latest.order:
                return
            value = self._storage.parameters(self._experiment, self._learner, head)
            if value is None:
                time.sleep(0.01)
                continue
            self._take(head, value)
            return

    def _take(self, head: ParametersHead, value: bytes) -> None:
        try:
            if content_hash(value) != head.content_hash:
                raise DamagedError("its bytes do not have the hash that its head states")
            arrays = decode_parameters(value)
        except DamagedError as error:
            self._refused = head.order
            logger.warning("parameters refused", version=head.version, error=str(error))
            return
        with self._changed:
            self._latest = ParameterSet(head.fence, head.version, head.entry, arrays)
            self._changed.notify_all()
