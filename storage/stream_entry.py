"""One element of the segment stream: readable fields, frame keys end to end, and the data.

Guarantees: whatever stands in the stream becomes a `StoredEntry`; one whose fields do not read
comes with empty `data`, so that its reader refuses it as damaged and goes on.
"""

from collections.abc import Mapping
from typing import Any

from storage.protocol import StoredEntry

FRAME_KEY_LENGTH = 16
ENTRY_OVERHEAD_BYTES = 400
"""Redis memory of an entry beyond data and frame keys, as the write script counts it."""
FRAME_OVERHEAD_BYTES = 200
"""Redis memory of a frame beyond its payload."""


def entry_number(entry_id: bytes | str) -> int:
    """ENTRY of a stream id ENTRY-0."""
    text = entry_id.decode() if isinstance(entry_id, bytes) else entry_id
    return int(text.partition("-")[0])


def split_frame_keys(joined: bytes) -> tuple[str, ...]:
    """Frame keys laid end to end. Raises ValueError where the length does not fit."""
    if len(joined) % FRAME_KEY_LENGTH:
        raise ValueError(f"{len(joined)} bytes of frame keys, not a multiple of {FRAME_KEY_LENGTH}")
    text = joined.decode("ascii")
    return tuple(text[at : at + FRAME_KEY_LENGTH] for at in range(0, len(text), FRAME_KEY_LENGTH))


def entry_bytes(fields: Mapping[bytes, bytes]) -> int:
    """What the write script counted for an entry without its frames."""
    return len(fields.get(b"data", b"")) + len(fields.get(b"frames", b"")) + ENTRY_OVERHEAD_BYTES


def to_stored_entry(shard: int, entry_id: bytes, fields: Mapping[Any, Any] | None) -> StoredEntry:
    """Never raises: what cannot be read is 0 or empty, and `data` then is empty too."""
    fields = fields or {}
    damaged = False

    def text(name: bytes) -> str:
        nonlocal damaged
        value = fields.get(name)
        try:
            if value is not None:
                return bytes(value).decode()
        except UnicodeDecodeError:
            pass
        damaged = True
        return ""

    def integer(name: bytes) -> int:
        nonlocal damaged
        try:
            return int(fields[name])
        except (KeyError, ValueError):
            damaged = True
            return 0

    try:
        frame_keys = split_frame_keys(fields.get(b"frames", b""))
    except (ValueError, UnicodeDecodeError):
        frame_keys, damaged = (), True
    stored = StoredEntry(
        shard,
        entry_number(entry_id),
        text(b"nonce"),
        text(b"previous"),
        text(b"agent"),
        integer(b"incarnation"),
        integer(b"sequence"),
        text(b"learner"),
        integer(b"fence"),
        integer(b"version"),
        integer(b"segments"),
        integer(b"steps"),
        integer(b"episodes"),
        integer(b"total_steps"),
        frame_keys,
        b"",
    )
    if damaged:
        return stored
    return StoredEntry(**{**stored.__dict__, "data": bytes(fields.get(b"data", b""))})
