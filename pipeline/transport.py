"""Batches from a replay to the learner on its host, through shared memory and a unix socket.

Guarantees: a batch is written once and never serialised; both ends notice at once when the other is
gone, and nothing is left of either, in the file system or in memory; a slot that a lost learner may
still write to is never used again; only processes of the same user get in; whatever a learner sends,
the replay lives on.

One memfd holds `slots` equal slots. The replay fills a free slot and sends its number; the learner
copies the batch out and returns the slot. Messages are msgpack lists, one a packet:
replay to learner: ["layout", slots, [[name, dtype, shape], …]] with the memfd, ["ready", slot,
number], ["turn", entry]; learner to replay: ["return", slot, number, priorities or nil].
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import select
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import structlog
from numpy.typing import NDArray

from algorithms.contract import ActionSpec, ObservationSpec

logger = structlog.get_logger()

ALIGNMENT_BYTES = 64
"""Fields begin on cache lines, so that vector copies run at full speed."""
MESSAGE_BYTES = 1 << 18
"""Longest packet read: priorities of 32,000 samples."""
HANDSHAKE_S = 2.0
"""Longest wait for a replay to answer a new learner; it looks several times a second."""


class TransportClosedError(Exception):
    """The other end of the batch socket is gone, or was never there."""


@dataclass(frozen=True)
class FieldLayout:
    """One array of a batch; `shape` includes the batch axis."""

    name: str
    dtype: str
    """numpy's `dtype.str`, such as "<f4"."""
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * prod(self.shape)


@dataclass(frozen=True)
class BatchLayout:
    """What lies in a slot, field after field, each at the next multiple of 64 bytes."""

    fields: tuple[FieldLayout, ...]

    @property
    def slot_bytes(self) -> int:
        return sum(_aligned(field.size_bytes) for field in self.fields)

    def views(self, memory: mmap.mmap, slot: int) -> dict[str, NDArray]:
        """Name to array over `memory`, written in place; a view keeps the memory mapped."""
        views = {}
        offset = slot * self.slot_bytes
        for field in self.fields:
            flat = np.frombuffer(memory, np.dtype(field.dtype), prod(field.shape), offset)
            views[field.name] = flat.reshape(field.shape)
            offset += _aligned(field.size_bytes)
        return views


def _aligned(size_bytes: int) -> int:
    return -(-max(size_bytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def transitions_layout(
    observations: ObservationSpec, actions: ActionSpec, n_step: int, batch_size: int
) -> BatchLayout:
    """Layout of a batch of n-step transitions.

    With n = 1 an observation and its successor share all rows but two, so both lie in one field:
    `joint/LEAF` (B, stack + 1, *shape), observation [:, :-1], successor [:, 1:] (5 frames instead
    of 8 for a stack of 4). Else `observation/LEAF` and `next_observation/LEAF` (B, stack, *shape).
    """
    fields = []
    parts = {"joint": 1} if n_step == 1 else {"observation": 0, "next_observation": 0}
    for part, more_rows in parts.items():
        for leaf in observations.leaves:
            shape = (batch_size, observations.stack + more_rows, *leaf.shape)
            fields.append(FieldLayout(f"{part}/{leaf.name}", np.dtype(leaf.dtype).str, shape))
    action = (batch_size, *actions.shape)
    fields.append(FieldLayout("action", np.dtype(actions.dtype).str, action))
    scalars = {
        "n_step_return": "<f4",
        "discount": "<f4",
        "weight": "<f4",
        "version": "<i8",
        "fence": "<i8",
        "shard": "<i4",
        "entry": "<i8",
        "step": "<i4",
    }
    fields += [FieldLayout(name, dtype, (batch_size,)) for name, dtype in scalars.items()]
    return BatchLayout(tuple(fields))


def host_id() -> str:
    """Equal for two processes exactly when they can share an abstract unix socket: same boot of the
    same kernel, same network namespace. "" where there are none (not Linux)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


@dataclass(frozen=True, eq=False)
class Returned:
    """A slot that the learner has given back."""

    slot: int
    number: int
    priorities: NDArray[np.float64] | None


class BatchServer:
    """The replay's end: one learner at a time. Belongs to one thread.

    What it says of slots changes only inside `poll` and, when the learner is found gone, `send`.
    """

    def __init__(self, layout: BatchLayout, slots: int) -> None:
        self.layout = layout
        self.slots = slots
        name = f"redreel-batches-{secrets.token_hex(8)}"
        self.address = f"@{name}"
        """How the learner finds it; "@" stands for the abstract name's leading zero byte."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(f"\0{name}")
        self._listener.listen(4)
        self._client: socket.socket | None = None
        self._memory: mmap.mmap | None = None
        self._free: list[int] = []
        self._filling: set[int] = set()
        self._sent: dict[int, int] = {}
        """Slot to the number of the batch that the learner has in it."""
        self.connections = 0
        """Learners that have come so far."""

    @property
    def connected(self) -> bool:
        return self._client is not None

    def free_slot(self) -> int | None:
        """A slot to fill and send; None while all are out, or there is no learner."""
        if not self._free:
            return None
        slot = self._free.pop(0)
        self._filling.add(slot)
        return slot

    def views(self, slot: int) -> dict[str, NDArray]:
        """Arrays to write the batch into; ask again for each batch: memory changes with the
        learner."""
        if self._memory is None:
            raise TransportClosedError(f"slot {slot}: no learner is connected")
        return self.layout.views(self._memory, slot)

    def give_up(self, slot: int) -> None:
        """A slot that was not filled after all."""
        if slot in self._filling:
            self._filling.remove(slot)
            self._free.append(slot)

    def send(self, slot: int, number: int) -> bool:
        """Hand batch `number` over. False when the learner that the slot belonged to is gone: the
        batch is lost, as are all that it had not returned."""
        if slot not in self._filling:
            return False
        self._filling.remove(slot)
        self._sent[slot] = number
        return self._send(["ready", slot, number])

    def send_turn(self, entry: int) -> bool:
        """Say that all batches due up to `entry` are sent (synchronous mode); False as in `send`."""
        return self._send(["turn", entry])

    def poll(self, timeout_s: float) -> list[Returned]:
        """Wait for the learner, at most `timeout_s`; take in what it sent, and a new one if it
        asks. A lost learner's slots are free again when the next one comes."""
        waiting = select.poll()
        waiting.register(self._listener, select.POLLIN)
        if self._client is not None:
            waiting.register(self._client, select.POLLIN)
        waiting.poll(max(0.0, timeout_s) * 1000)
        returned = self._receive()
        self._accept()
        return returned

    def close(self) -> None:
        self._lose_client("")
        self._listener.close()

    def _receive(self) -> list[Returned]:
        returned = []
        while self._client is not None:
            try:
                packet = self._client.recv(MESSAGE_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                self._lose_client(str(error))
                break
            if not packet:
                self._lose_client("it closed the connection")
                break
            message = _decode_return(packet)
            # A number is returned once: a repeated or invented one must not free a slot that the
            # learner still reads.
            if message is None or self._sent.get(message.slot) != message.number:
                logger.warning("message from the learner ignored", message=repr(packet[:80]))
                continue
            del self._sent[message.slot]
            self._free.append(message.slot)
            returned.append(message)
        return returned

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                return
            user = _peer_user(client)
            if user != os.getuid():
                logger.warning("learner refused: another user", user=user, wanted=os.getuid())
                client.close()
                continue
            self._lose_client("another learner came")
            client.setblocking(False)
            self._client = client
            self.connections += 1
            # The one before may still write to its memory, so each learner gets memory of its own.
            descriptor, self._memory = _new_memory(self.layout.slot_bytes * self.slots)
            self._free = list(range(self.slots))
            fields = [[field.name, field.dtype, field.shape] for field in self.layout.fields]
            try:
                self._send(["layout", self.slots, fields], descriptor)
            finally:
                os.close(descriptor)

    def _send(self, message: list[Any], descriptor: int | None = None) -> bool:
        if self._client is None:
            return False
        try:
            packet = msgpack.packb(message)
            socket.send_fds(self._client, [packet], [] if descriptor is None else [descriptor])
            return True
        except OSError as error:
            # A full queue counts as well: a learner with all its slots has few packets unread.
            self._lose_client(str(error))
            return False

    def _lose_client(self, reason: str) -> None:
        if self._client is None:
            return
        if reason:
            logger.info("learner disconnected", reason=reason, batches_out=len(self._sent))
        self._client.close()
        self._client = None
        self._memory = None
        self._free.clear()
        self._filling.clear()
        self._sent.clear()


@dataclass(frozen=True, eq=False)
class Ready:
    """A batch. The views are the replay's memory: copy, then release the slot."""

    slot: int
    number: int
    views: Mapping[str, NDArray]


@dataclass(frozen=True)
class Turn:
    """Synchronous mode: all batches due up to this entry have been sent."""

    entry: int


class BatchClient:
    """The learner's end. Belongs to one thread. After TransportClosedError make another."""

    def __init__(self, address: str, timeout_s: float = HANDSHAKE_S) -> None:
        """Connect to `BatchServer.address`; raises TransportClosedError."""
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect("\0" + address.removeprefix("@"))
            packet, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1)
            try:
                self.layout, self._memory, self._slots = _decode_layout(packet, descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        except (OSError, ValueError) as error:
            self._socket.close()
            raise TransportClosedError(f"replay at {address}: {error}") from error

    def receive(self, timeout_s: float) -> Ready | Turn | None:
        """The next message in order, None after `timeout_s`; raises TransportClosedError."""
        try:
            self._socket.settimeout(max(0.0, timeout_s))
            packet = self._socket.recv(MESSAGE_BYTES)
        except (TimeoutError, BlockingIOError):
            return None
        except OSError as error:
            raise TransportClosedError(f"replay at {self._address}: {error}") from error
        if not packet:
            raise TransportClosedError(f"replay at {self._address} is gone")
        match _unpacked(packet):
            case ["ready", int(slot), int(number)] if 0 <= slot < self._slots:
                return Ready(slot, number, self.layout.views(self._memory, slot))
            case ["turn", int(entry)]:
                return Turn(entry)
        raise TransportClosedError(f"replay at {self._address} sent {packet[:80]!r}")

    def release(
        self, slot: int, number: int, priorities: NDArray[np.floating] | None = None
    ) -> None:
        """Give a slot back, with new priorities (B,) where there are; raises TransportClosedError."""
        data = None if priorities is None else np.ascontiguousarray(priorities, "<f8").tobytes()
        try:
            self._socket.settimeout(HANDSHAKE_S)
            self._socket.send(msgpack.packb(["return", slot, number, data]))
        except OSError as error:
            raise TransportClosedError(f"replay at {self._address}: {error}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


def _new_memory(size_bytes: int) -> tuple[int, mmap.mmap]:
    """Memory that both ends can map, all of it touched: a first write page by page would cost the
    first batches three times their copy."""
    descriptor = os.memfd_create("redreel-batches", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Reserving raises an error where there is too little memory; touching alone would kill.
        os.posix_fallocate(descriptor, 0, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return descriptor, _mapped(descriptor, size_bytes)
    except BaseException:
        os.close(descriptor)
        raise


def _mapped(descriptor: int, size_bytes: int) -> mmap.mmap:
    return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _peer_user(client: socket.socket) -> int:
    """User id of the process that connected; the kernel's word, not the peer's."""
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return user


def _unpacked(packet: bytes) -> Any:
    """The message, None where the bytes are none."""
    try:
        return msgpack.unpackb(packet)
    except (ValueError, msgpack.UnpackException):
        return None


def _decode_return(packet: bytes) -> Returned | None:
    match _unpacked(packet):
        case ["return", int(slot), int(number), None]:
            return Returned(slot, number, None)
        case ["return", int(slot), int(number), bytes(data)] if len(data) % 8 == 0:
            return Returned(slot, number, np.frombuffer(data, "<f8").astype(np.float64))
    return None


def _decode_layout(packet: bytes, descriptors: list[int]) -> tuple[BatchLayout, mmap.mmap, int]:
    """Raises ValueError when the first packet is no layout with its memory."""
    match _unpacked(packet):
        case ["layout", int(slots), [*fields]] if descriptors:
            layout = BatchLayout(tuple(FieldLayout(n, d, tuple(shape)) for n, d, shape in fields))
            return layout, _mapped(descriptors[0], layout.slot_bytes * slots), slots
    raise ValueError("it closed the connection" if not packet else "it does not speak our format")
