"""Takes batches from the replay on this host, ahead of the learner, as tensors on its device.

Guarantees: a batch is copied out of the shared memory before its slot is given back; the queue is
bounded; batches of a replay that is gone are never handed out once another one is there.
"""

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.contract import Transitions
from pipeline.transport import BatchClient, Ready, TransportClosedError, Turn, host_id
from storage.errors import UnavailableError
from storage.protocol import Storage

logger = structlog.get_logger()

AHEAD = 2
"""Batches copied out and not yet used: one that is used next, one that is being copied."""
LOOK_S = 0.2


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch, on the learner's device, and which parameters its steps were acted with."""

    number: int
    transitions: Transitions
    version: NDArray[np.int64]
    """(B,)"""
    fence: NDArray[np.int64]
    """(B,)"""


class Prefetch:
    """Batches of one learner's replay; a thread does the waiting and copying."""

    def __init__(
        self, storage: Storage, experiment: str, learner: str, device: torch.device
    ) -> None:
        self._storage = storage
        self._experiment = experiment
        self._learner = learner
        self._device = device
        self._queue: queue.Queue[tuple[int, Batch | Turn]] = queue.Queue(AHEAD)
        self._replays = 0
        """Counts the replays that there have been: what came from an older one is thrown away."""
        self.discarded = 0
        self.waiting = "a replay on this host"
        self._error: BaseException | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def next(self, timeout_s: float) -> Batch | Turn | None:
        """The next batch or turn, None after `timeout_s`. Raises what ended the thread."""
        if self._error is not None:
            raise self._error
        try:
            replay, item = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if replay != self._replays:
            self.discarded += isinstance(item, Batch)
            return None
        return item

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(3.0)

    # ------------------------------------------------------------------ the thread's side

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                client = self._find()
                if client is None:
                    self._stopping.wait(LOOK_S)
                    continue
                self._replays += 1
                logger.info("replay found", number=self._replays)
                try:
                    self._receive(client)
                except TransportClosedError as error:
                    self.waiting = "a replay on this host"
                    logger.warning("replay lost", reason=str(error))
                finally:
                    client.close()
        except BaseException as error:
            self._error = error

    def _find(self) -> BatchClient | None:
        """Connect to this learner's replay, as its heartbeat says where."""
        try:
            members = self._storage.members(self._experiment)
        except UnavailableError:
            return None
        elsewhere = ""
        for fields in members.values():
            if fields.get("role") != "replay" or fields.get("learner") != self._learner:
                continue
            if not fields.get("batches"):
                continue
            if fields.get("host") != host_id():
                elsewhere = fields.get("hostname", "another host")
                continue
            try:
                return BatchClient(fields["batches"])
            except TransportClosedError:
                continue
        self.waiting = "a replay on this host" + (
            f" (there is one on {elsewhere})" * bool(elsewhere)
        )
        return None

    def _receive(self, client: BatchClient) -> None:
        while not self._stopping.is_set():
            message = client.receive(LOOK_S)
            if message is None:
                continue
            self.waiting = ""
            item: Batch | Turn = message if isinstance(message, Turn) else self._copied(message)
            if isinstance(message, Ready):
                client.release(message.slot, message.number)
            while not self._stopping.is_set():
                try:
                    self._queue.put((self._replays, item), timeout=LOOK_S)
                    break
                except queue.Full:
                    continue

    def _copied(self, ready: Ready) -> Batch:
        views = ready.views
        return Batch(
            ready.number,
            transitions(views, self._device),
            views["version"].copy(),
            views["fence"].copy(),
        )


def transitions(views: Mapping[str, NDArray], device: torch.device) -> Transitions:
    """The fields of `transport.transitions_layout` as an algorithm takes them: private copies."""
    tensors = {
        name: _copy(view, device)
        for name, view in views.items()
        if name not in ("version", "fence", "shard", "entry", "step")
    }
    joint = _part(tensors, "joint/")
    if joint:
        # The two overlap and are only read; a writer would need its own copy of one of them.
        observation = {name: rows[:, :-1] for name, rows in joint.items()}
        following = {name: rows[:, 1:] for name, rows in joint.items()}
    else:
        observation = _part(tensors, "observation/")
        following = _part(tensors, "next_observation/")
    return Transitions(
        observation=observation,
        action=tensors["action"],
        n_step_return=tensors["n_step_return"],
        discount=tensors["discount"],
        next_observation=following,
        weight=tensors["weight"],
    )


def _copy(view: NDArray, device: torch.device) -> Tensor:
    own = torch.from_numpy(np.array(view))
    if device.type == "cuda":
        return own.pin_memory().to(device, non_blocking=True)
    return own


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
