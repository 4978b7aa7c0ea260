"""Entries for tests of the store: small, and with every number in sight."""

from collections.abc import Mapping, Sequence

from storage.protocol import EntryWrite, Storage

EXPERIMENT = "maze"
CREATION = "c0ffee0000000001"


def create(storage: Storage, *, shards: int = 1, capacity_bytes: int = 0) -> None:
    config = f"creation_id: {CREATION}\n"
    assert storage.create_experiment(EXPERIMENT, config, CREATION, shards, capacity_bytes) == config


def key(number: int) -> str:
    """A frame key: 16 characters."""
    return f"frame-{number:010d}"


def payload(size_bytes: int = 40) -> bytes:
    """A frame as the store sees it: 12 digits, then anything."""
    return b"0" * 12 + b"p" * (size_bytes - 12)


def nonce(sequence: int) -> str:
    return f"nonce-{sequence:010d}"


def entry(
    sequence: int,
    incarnation: int,
    *,
    agent: str = "ada",
    frames: Sequence[int] = (),
    payloads: Mapping[int, bytes] | None = None,
    steps: int = 10,
    segments: int = 2,
    episodes: int = 1,
    data: bytes = b"data",
    accept_gap: bool = False,
    creation_id: str = CREATION,
) -> EntryWrite:
    """`payloads` None sends one for every frame."""
    sent = {number: payload() for number in frames} if payloads is None else payloads
    return EntryWrite(
        creation_id=creation_id,
        agent=agent,
        incarnation=incarnation,
        sequence=sequence,
        nonce=nonce(sequence),
        learner="main",
        fence=3,
        version=7,
        segments=segments,
        steps=steps,
        episodes=episodes,
        frame_keys=tuple(key(number) for number in frames),
        data=data,
        payloads={key(number): value for number, value in sent.items()},
        accept_gap=accept_gap,
    )
