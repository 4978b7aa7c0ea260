"""Entries keep their content exactly; what does not fit together is refused at writing, and what
does not decode at reading."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.codec import check_entry, decode_entry, encode_entry, frame_key
from storage.errors import DamagedError, InvalidEntryError
from storage.segment import Entry, SegmentTable

KEYS = tuple(frame_key(np.full((4, 4), grey, np.uint8)) for grey in range(3))


def entry(**changes: Any) -> Entry:
    """Two segments: three steps of copy 0 with one row before, two of copy 1 at its start."""
    table = SegmentTable(
        copy=np.array([0, 1], np.int32),
        episode=np.array([4, 0], np.int64),
        first_step=np.array([30, 0], np.int64),
        steps=np.array([3, 2], np.int32),
        history=np.array([1, 0], np.int32),
        ending=np.array([0, 2], np.int8),
    )
    rows = 1 + 3 + 1 + 0 + 2 + 1
    made = Entry(
        table,
        {
            "speed": np.linspace(-1, 1, rows * 2, dtype=np.float32).reshape(rows, 2),
            "camera": np.array([0, 1, 1, 2, 0, 2, 2, 1], np.uint32),
        },
        np.array([2, 0, 1, 1, 0], np.int64),
        np.array([0.5, -1, 0, 0, 7], np.float32),
        ("camera",),
        KEYS,
        {"log_probability": np.zeros((5, 1), np.float32)},
        {"memory": np.ones((2, 6), np.float32)},
        {"mean": np.array([1.5, 2.5])},
    )
    return dataclasses.replace(made, **changes)


def flipped(data: bytes, at: int, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[at] ^= 1 << bit
    return bytes(damaged)


def same(one: Entry, other: Entry) -> None:
    for name in ("frame_leaves", "frame_keys"):
        assert getattr(one, name) == getattr(other, name)
    for name in ("observations", "step_fields", "segment_fields", "entry_fields"):
        ours, theirs = getattr(one, name), getattr(other, name)
        assert list(ours) == list(theirs)
        for key in ours:
            np.testing.assert_array_equal(ours[key], theirs[key], strict=True)
    for field in dataclasses.fields(SegmentTable):
        ours, theirs = getattr(one.segments, field.name), getattr(other.segments, field.name)
        np.testing.assert_array_equal(ours, theirs, strict=True)
    np.testing.assert_array_equal(one.actions, other.actions, strict=True)
    np.testing.assert_array_equal(one.rewards, other.rewards, strict=True)


def test_an_entry_comes_back_whole() -> None:
    decoded = decode_entry(encode_entry(entry()), KEYS)
    same(decoded, entry())
    assert not decoded.rewards.flags.writeable
    assert (decoded.steps, decoded.episodes_ended) == (5, 1)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (
            {"observations": {"speed": np.array([[None]] * 8, object)}, "frame_leaves": ()},
            "observation leaf 'speed': dtype object",
        ),
        (
            {"observations": {"pose": np.zeros(8, [("x", "f4")])}, "frame_leaves": ()},
            r"observation leaf 'pose': dtype \[\('x', '<f4'\)\]",
        ),
        ({"actions": np.array(["a"] * 5)}, "actions: dtype <U1"),
        ({"step_fields": {"hint": np.zeros(5, object)}}, "step field 'hint': dtype object"),
        ({"observations": {"speed": [1.0] * 8}, "frame_leaves": ()}, "'speed': list, must be"),
        ({"rewards": np.zeros(5)}, "rewards: dtype float64, must be float32"),
        ({"rewards": np.zeros(4, np.float32)}, r"rewards: shape \(4,\), must have 5 rows"),
        ({"actions": np.zeros((), np.int64)}, r"actions: shape \(\), must have 5 rows"),
        ({"observations": {}, "frame_leaves": ()}, "there is no leaf"),
        ({"frame_leaves": ("lidar",)}, "frame leaf 'lidar'"),
        ({"frame_keys": KEYS[:2]}, "'camera': frame index 2, there are 2 frames"),
        ({"frame_keys": (*KEYS[:2], KEYS[0])}, "one stands there twice"),
        ({"frame_keys": (*KEYS[:2], "a:b" + "c" * 13)}, "frame key 'a:bc"),
        ({"segment_fields": {"memory": np.ones((5, 6))}}, "must have 2 rows"),
    ],
)
def test_an_entry_that_does_not_fit_together_is_refused_naming_what(
    changes: dict[str, Any], names: str
) -> None:
    with pytest.raises(InvalidEntryError, match=names):
        encode_entry(entry(**changes))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"steps": np.array([3, 0], np.int32)}, "a segment without steps"),
        ({"steps": np.array([-3, 8], np.int32)}, "'steps': holds a negative"),
        ({"history": np.array([1, 1], np.int32)}, "'history': more rows"),
        ({"ending": np.array([0, 3], np.int8)}, "'ending': 3, must be 0, 1 or 2"),
        ({"episode": np.array([4, 0], np.int32)}, "episode: dtype int32, must be int64"),
        ({"copy": np.zeros(0, np.int32)}, "holds no segment"),
        ({"steps": np.array([2**31 - 1, 2**31 - 1], np.int32)}, "must have"),
    ],
)
def test_a_segment_table_that_cannot_be_is_refused(changes: dict[str, Any], names: str) -> None:
    table = dataclasses.replace(entry().segments, **changes)
    with pytest.raises(InvalidEntryError, match=names):
        check_entry(entry(segments=table))


def test_a_number_that_is_none_is_named_with_leaf_step_and_copy() -> None:
    """Rows of segment 0: history (step 29), steps 30 to 32, the one after; then segment 1."""
    speed = entry().observations["speed"].copy()
    speed[3, 1] = math.nan
    observations = {**entry().observations, "speed": speed}
    with pytest.raises(InvalidEntryError, match=r"'speed': .* step 32 of episode 4 of copy 0"):
        check_entry(entry(observations=observations))
    speed[3, 1], speed[7, 0] = 0, math.inf
    with pytest.raises(InvalidEntryError, match=r"step 2 of episode 0 of copy 1"):
        check_entry(entry(observations=observations))
    rewards = np.array([0, 0, 0, 0, math.nan], np.float32)
    with pytest.raises(InvalidEntryError, match=r"rewards: .* step 1 of episode 0 of copy 1"):
        check_entry(entry(rewards=rewards))


def test_any_flipped_bit_of_an_entry_is_an_error() -> None:
    data = encode_entry(entry())
    for at in range(len(data)):
        for bit in (0, 3, 7):
            with pytest.raises(DamagedError):
                decode_entry(flipped(data, at, bit), KEYS)
    for length in range(0, len(data), 7):
        with pytest.raises(DamagedError):
            decode_entry(data[:length], KEYS)


def sealed(columns: Any) -> bytes:
    body = msgpack.packb(columns)
    return msgpack.packb([1, xxhash.xxh3_64_digest(body)[:4], body])


def listed() -> list[list[Any]]:
    _, _, body = msgpack.unpackb(encode_entry(entry()))
    return msgpack.unpackb(body)


def test_sealing_what_was_unpacked_is_the_entry_itself() -> None:
    assert sealed(listed()) == encode_entry(entry())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda columns: columns.pop(0),
        lambda columns: columns.append(columns[0]),
        lambda columns: columns.append(["frame/speed", "<u4", [8], bytes(32)]),
        lambda columns: columns.append(["weights/x", "<u4", [1], bytes(4)]),
        lambda columns: columns.append(["entry/x", "|O", [1], bytes(8)]),
        lambda columns: columns.append(["entry/x", "<M8", [1], bytes(8)]),
        lambda columns: columns.append(["entry/x", "<f4", [2**31, 2**31], b""]),
        lambda columns: columns.append(["entry/x", "<f4", [-1], b""]),
        lambda columns: columns.append(["entry/x", "<f4", [1] * 70, bytes(4)]),
        lambda columns: columns.append(["entry/x", "<f4", [True], bytes(4)]),
        lambda columns: columns.append(["step/x", "<f4", [4], bytes(16)]),
        lambda columns: columns.append("entry/x"),
    ],
)
def test_sealed_columns_that_make_no_entry_are_damage(
    spoil: Callable[[list[Any]], object],
) -> None:
    columns = listed()
    spoil(columns)
    with pytest.raises(DamagedError):
        decode_entry(sealed(columns), KEYS)


@given(st.recursive(st.integers(-9, 1 << 40) | st.binary() | st.text() | st.none(), st.lists))
@settings(max_examples=150, deadline=None)
def test_anything_else_that_is_sealed_is_damage(body: Any) -> None:
    with pytest.raises(DamagedError):
        decode_entry(sealed(body) if isinstance(body, list) else b"\x93" + bytes(3), KEYS)
