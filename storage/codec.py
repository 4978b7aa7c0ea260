"""Frames and entries to bytes and back, and the names of frames (docs/wire-format.md).

Guarantees: the same logical array has the same key and bytes, whatever its memory layout; what was
encoded comes back exact in dtype, shape and values; whatever bytes come in, decoding gives a sound
result or raises DamagedError, and allocates no more than a few hundred times what came in.
"""

import base64
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import lz4.block
import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from storage.errors import DamagedError, InvalidEntryError
from storage.segment import Ending, Entry, SegmentTable

FORMAT = 1
"""First byte of a frame after its checksum, first value of an entry."""
FRAME_ENTRY_DIGITS = 12
"""A frame begins with the last entry that names it, in so many ASCII digits. Writers send zeros;
the write script sets them in place, so they lie outside the checksum."""
FRAME_KEY = re.compile(r"[A-Za-z0-9_-]{16}")
RAW, LZ4 = 0, 1
"""Codecs of a frame."""

_DIGITS = re.compile(rb"[0-9]{%d}" % FRAME_ENTRY_DIGITS)
_BODY = FRAME_ENTRY_DIGITS + 4
_DTYPE = re.compile(r"[<>|][biuf][1248]")
_LZ4_LARGEST_RATIO = 256
"""A run of one byte costs one byte for each 255 that it stands for."""
_MOST_COLUMNS = 4096
_TABLE: dict[str, np.dtype] = {
    "copy": np.dtype(np.int32),
    "episode": np.dtype(np.int64),
    "first_step": np.dtype(np.int64),
    "steps": np.dtype(np.int32),
    "history": np.dtype(np.int32),
    "ending": np.dtype(np.int8),
}


@dataclass(frozen=True)
class FrameHeader:
    """What stands before a frame's bytes."""

    last_entry: int
    codec: int
    dtype: np.dtype
    shape: tuple[int, ...]
    raw_bytes: int
    """Size of the decoded frame."""
    start: int
    """Where the frame's bytes begin in the payload."""


# ------------------------------------------------------------------ frames


def frame_key(array: NDArray) -> str:
    """Name a frame by its content: URL-safe base64 of the first 96 bits of XXH3-128 over dtype,
    shape and C-order bytes. Chance that any two of 1e9 frames collide: about 6e-12."""
    digest = xxhash.xxh3_128_digest(_description(array.dtype, array.shape) + array.tobytes())
    return base64.urlsafe_b64encode(digest[:12]).decode()


def encode_frame(array: NDArray) -> bytes:
    """Digits, checksum, format, codec, dtype, shape, then an LZ4 block, or raw bytes where those
    are not longer."""
    raw = array.tobytes()
    packed = lz4.block.compress(raw, store_size=False) if raw else raw
    codec, content = (LZ4, packed) if len(packed) < len(raw) else (RAW, raw)
    body = bytes((FORMAT, codec)) + _description(array.dtype, array.shape) + content
    return b"0" * FRAME_ENTRY_DIGITS + _checksum(body) + body


def frame_header(payload: bytes) -> FrameHeader:
    """Read a frame's header without decoding the frame, nor checking its sum."""
    try:
        digits = payload[:FRAME_ENTRY_DIGITS]
        if not _DIGITS.fullmatch(digits):
            raise DamagedError(f"frame: its first {FRAME_ENTRY_DIGITS} bytes are not digits")
        version, codec, length = payload[_BODY], payload[_BODY + 1], payload[_BODY + 2]
        if version != FORMAT:
            raise DamagedError(f"frame: format {version}, this program reads {FORMAT}")
        if codec not in (RAW, LZ4):
            raise DamagedError(f"frame: codec {codec}, must be {RAW} or {LZ4}")
        at = _BODY + 3
        dtype = _readable_dtype(payload[at : at + length].decode("ascii"))
        at += length
        shape = struct.unpack_from(f"<{payload[at]}I", payload, at + 1)
        start = at + 1 + 4 * len(shape)
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise DamagedError(f"frame: header cut short or unreadable ({error})") from error
    raw_bytes = dtype.itemsize * math.prod(shape)
    return FrameHeader(int(digits), codec, dtype, shape, raw_bytes, start)


def decode_frame(payload: bytes, out: NDArray | None = None) -> NDArray:
    """Decode into `out` (same dtype and shape, else DamagedError) or into a new array that is the
    caller's own and writable. Raises DamagedError."""
    header = frame_header(payload)
    if payload[FRAME_ENTRY_DIGITS:_BODY] != _checksum(memoryview(payload)[_BODY:]):
        raise DamagedError("frame: checksum does not match")
    if out is not None and (out.dtype != header.dtype or out.shape != header.shape):
        raise DamagedError(
            f"frame: {header.dtype} {header.shape}, expected {out.dtype} {out.shape}"
        )
    content: Any = memoryview(payload)[header.start :]
    if header.codec == LZ4:
        if header.raw_bytes > _LZ4_LARGEST_RATIO * len(content):
            raise DamagedError(f"frame: {len(content)} bytes cannot hold {header.raw_bytes}")
        try:
            content = lz4.block.decompress(
                content, uncompressed_size=header.raw_bytes, return_bytearray=True
            )
        except (lz4.block.LZ4BlockError, ValueError, OverflowError) as error:
            raise DamagedError(f"frame: {error}") from error
    elif out is None:
        content = bytearray(content)
    if len(content) != header.raw_bytes:
        raise DamagedError(f"frame: {len(content)} bytes, its shape needs {header.raw_bytes}")
    try:
        frame: NDArray = np.ndarray(header.shape, header.dtype, content)
    except ValueError as error:
        raise DamagedError(f"frame: shape {header.shape}: {error}") from error
    if out is None:
        return frame
    out[...] = frame
    return out


@lru_cache(maxsize=256)
def _description(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Length and name of the dtype, number and lengths of the axes. Raises InvalidEntryError."""
    text = dtype.str
    if not _storable(dtype):
        raise InvalidEntryError(f"frame: dtype {dtype}, must be bool, integer or float")
    return struct.pack(
        f"<B{len(text)}sB{len(shape)}I", len(text), text.encode(), len(shape), *shape
    )


def _checksum(body: bytes | memoryview) -> bytes:
    return xxhash.xxh3_64_digest(body)[:4]


def _storable(dtype: np.dtype) -> bool:
    return _DTYPE.fullmatch(dtype.str) is not None


@lru_cache(maxsize=256)
def _readable_dtype(text: str) -> np.dtype:
    try:
        if _DTYPE.fullmatch(text):
            dtype = np.dtype(text)
            if dtype.str == text:
                return dtype
    except TypeError:
        pass
    raise DamagedError(f"dtype {text!r}: must be a bool, integer or float of at most 8 bytes")


# ------------------------------------------------------------------ entries


def encode_entry(entry: Entry) -> bytes:
    """msgpack `[format, checksum, body]`; body is msgpack `[column…]` in bytes of its own, a column
    `[name, dtype, shape, bytes]`. Raises InvalidEntryError."""
    check_entry(entry)
    table = entry.segments
    columns = {name: getattr(table, name) for name in _TABLE}
    for name, values in entry.observations.items():
        columns[("frame/" if name in entry.frame_leaves else "observation/") + name] = values
    columns["action"] = entry.actions
    columns["reward"] = entry.rewards
    for prefix, fields in _fields_of(entry).items():
        for name, values in fields.items():
            columns[f"{prefix}/{name}"] = values
    body = msgpack.packb(
        [
            [name, values.dtype.str, values.shape, values.tobytes()]
            for name, values in columns.items()
        ]
    )
    data: bytes = msgpack.packb([FORMAT, _checksum(body), body])
    return data


def decode_entry(data: bytes, frame_keys: tuple[str, ...]) -> Entry:
    """The entry that `data` and the stream's frame keys describe, its columns read-only views.

    Raises DamagedError, and nothing else, for whatever does not make a sound entry.
    """
    columns = _columns(data)
    try:
        table = SegmentTable(**{name: columns.pop(name) for name in _TABLE})
        actions, rewards = columns.pop("action"), columns.pop("reward")
    except KeyError as error:
        raise DamagedError(f"entry: column {error} is missing") from error
    observations: dict[str, NDArray] = {}
    frame_leaves: list[str] = []
    fields: dict[str, dict[str, NDArray]] = {"step": {}, "segment": {}, "entry": {}}
    for full_name, values in columns.items():
        prefix, _, name = full_name.partition("/")
        if prefix in ("observation", "frame"):
            if name in observations:
                raise DamagedError(f"entry: observation leaf {name!r} stands there twice")
            observations[name] = values
            if prefix == "frame":
                frame_leaves.append(name)
        elif prefix in fields:
            fields[prefix][name] = values
        else:
            raise DamagedError(f"entry: unknown column {full_name!r}")
    entry = Entry(
        table,
        observations,
        actions,
        rewards,
        tuple(frame_leaves),
        frame_keys,
        fields["step"],
        fields["segment"],
        fields["entry"],
    )
    try:
        check_entry(entry)
    except InvalidEntryError as error:
        raise DamagedError(f"entry: {error}") from error
    return entry


def check_entry(entry: Entry) -> None:
    """Raise InvalidEntryError, naming the column, and the step where one is wrong, unless the entry
    may be written."""
    table = entry.segments
    segments = np.shape(table.copy)[0] if np.ndim(table.copy) else 0
    if segments == 0:
        raise InvalidEntryError("column 'copy': holds no segment, must hold one or more")
    for name, dtype in _TABLE.items():
        _check_column(name, getattr(table, name), segments, dtype, ())
        if getattr(table, name).min() < 0:
            raise InvalidEntryError(f"column {name!r}: holds a negative number")
    if table.steps.min() < 1:
        raise InvalidEntryError("column 'steps': a segment without steps")
    if table.ending.max() > max(Ending):
        raise InvalidEntryError(f"column 'ending': {table.ending.max()}, must be 0, 1 or 2")
    if np.any(table.history > table.first_step):
        raise InvalidEntryError("column 'history': more rows than the episode had steps before")
    # Sums of hostile int32 columns must not wrap around.
    steps = int(table.steps.sum(dtype=np.int64))
    rows = steps + int(table.history.sum(dtype=np.int64)) + segments
    _check_frame_keys(entry.frame_keys)
    if not entry.observations:
        raise InvalidEntryError("observations: there is no leaf")
    for leaf in entry.frame_leaves:
        if leaf not in entry.observations:
            raise InvalidEntryError(f"frame leaf {leaf!r}: not among the observations")
    for leaf, values in entry.observations.items():
        name = f"observation leaf {leaf!r}"
        if leaf in entry.frame_leaves:
            _check_column(name, values, rows, np.dtype(np.uint32), ())
            if values.max() >= len(entry.frame_keys):
                raise InvalidEntryError(
                    f"{name}: frame index {values.max()}, there are {len(entry.frame_keys)} frames"
                )
        else:
            _check_column(name, values, rows)
            _check_finite(name, values, table, table.history + 1)
    _check_column("rewards", entry.rewards, steps, np.dtype(np.float32), ())
    _check_finite("rewards", entry.rewards, table)
    _check_column("actions", entry.actions, steps)
    _check_finite("actions", entry.actions, table)
    lengths = {"step": steps, "segment": segments, "entry": None}
    for prefix, fields in _fields_of(entry).items():
        for field_name, values in fields.items():
            _check_column(f"{prefix} field {field_name!r}", values, lengths[prefix])


def _fields_of(entry: Entry) -> dict[str, Mapping[str, NDArray]]:
    return {
        "step": entry.step_fields,
        "segment": entry.segment_fields,
        "entry": entry.entry_fields,
    }


def _columns(data: bytes) -> dict[str, NDArray]:
    outer = _unpack(data)
    if not isinstance(outer, list) or len(outer) != 3 or not isinstance(outer[2], bytes):
        raise DamagedError("entry: not [format, checksum, body]")
    version, checksum, body = outer
    if version != FORMAT or isinstance(version, bool):
        raise DamagedError(f"entry: format {version!r}, this program reads {FORMAT}")
    if checksum != _checksum(body):
        raise DamagedError("entry: checksum does not match")
    listed = _unpack(body)
    if not isinstance(listed, list):
        raise DamagedError("entry: its body is no list of columns")
    columns: dict[str, NDArray] = {}
    for item in listed:
        match item:
            case [str(name), str(dtype_text), list(shape), bytes(raw)]:
                if name in columns:
                    raise DamagedError(f"entry: column {name!r} stands there twice")
                columns[name] = _array(name, dtype_text, shape, raw)
            case _:
                raise DamagedError("entry: a column is not [name, dtype, shape, bytes]")
    return columns


def _unpack(data: bytes) -> Any:
    try:
        # Lists are allocated by the length they claim: the limits keep nested claims small.
        return msgpack.unpackb(
            data, max_array_len=_MOST_COLUMNS, max_str_len=4096, max_map_len=0, max_ext_len=0
        )
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise DamagedError(f"entry: not msgpack ({error})") from error
    except msgpack.UnpackException as error:
        raise DamagedError(f"entry: not msgpack ({error})") from error


def _array(name: str, dtype_text: str, shape: list[Any], raw: bytes) -> NDArray:
    dtype = _readable_dtype(dtype_text)
    if not all(type(length) is int and 0 <= length < 2**32 for length in shape):
        raise DamagedError(f"entry: column {name!r}: shape {shape[:8]}")
    if dtype.itemsize * math.prod(shape) != len(raw):
        raise DamagedError(f"entry: column {name!r}: {len(raw)} bytes do not fill {dtype} {shape}")
    try:
        return np.ndarray(tuple(shape), dtype, raw)
    except ValueError as error:
        raise DamagedError(f"entry: column {name!r}: shape {shape[:8]}: {error}") from error


def _check_frame_keys(keys: tuple[str, ...]) -> None:
    if len(set(keys)) != len(keys):
        raise InvalidEntryError("frame keys: one stands there twice")
    for key in keys:
        if not FRAME_KEY.fullmatch(key):
            raise InvalidEntryError(f"frame key {key!r}: must be 16 of A-Z, a-z, 0-9, '-', '_'")


def _check_column(
    name: str,
    values: NDArray,
    length: int | None,
    dtype: np.dtype | None = None,
    shape: tuple[int, ...] | None = None,
) -> None:
    if not isinstance(values, np.ndarray):
        raise InvalidEntryError(f"{name}: {type(values).__name__}, must be a numpy array")
    if dtype is not None and values.dtype != dtype:
        raise InvalidEntryError(f"{name}: dtype {values.dtype}, must be {dtype}")
    if not _storable(values.dtype):
        raise InvalidEntryError(f"{name}: dtype {values.dtype}, must be bool, integer or float")
    if length is None:
        return
    if values.ndim == 0 or values.shape[0] != length:
        raise InvalidEntryError(f"{name}: shape {values.shape}, must have {length} rows")
    if shape is not None and values.shape[1:] != shape:
        raise InvalidEntryError(f"{name}: rows of shape {values.shape[1:]}, must be {shape}")


def _check_finite(
    name: str, values: NDArray, table: SegmentTable, extra_rows: NDArray | None = None
) -> None:
    """`extra_rows` (G,): history and the row after the last step; None for step columns."""
    if values.dtype.kind != "f" or np.isfinite(values).all():
        return
    sound = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
    row = int(np.argmin(sound))
    history = np.zeros_like(table.history) if extra_rows is None else table.history
    counts = table.steps.astype(np.int64) + (0 if extra_rows is None else extra_rows)
    segment = int(np.searchsorted(np.cumsum(counts), row, side="right"))
    offset = row - int(counts[:segment].sum())
    step = int(table.first_step[segment]) - int(history[segment]) + offset
    raise InvalidEntryError(
        f"{name}: NaN or infinity at step {step} of episode {table.episode[segment]} "
        f"of copy {table.copy[segment]}, must be finite"
    )
