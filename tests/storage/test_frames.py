"""Frames keep content exactly under keys of their own; what is no longer a frame is refused."""

import base64
import gc
import struct
from collections.abc import Callable

import numpy as np
import psutil
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from storage.codec import (
    FRAME_ENTRY_DIGITS,
    FRAME_KEY,
    decode_frame,
    encode_frame,
    frame_header,
    frame_key,
)
from storage.errors import DamagedError, InvalidEntryError

CUBE = np.arange(4 * 6 * 5, dtype=np.int16).reshape(4, 6, 5)
DTYPES = ["?", "u1", "i1", "<u2", ">i2", "<i4", ">u4", "<i8", ">i8", "<f2", ">f4", "<f4", "<f8"]


# ---------------------------------------------------------------------- frames

LAYOUTS: dict[str, Callable[[], NDArray]] = {
    "sliced": lambda: CUBE[1:, ::2, 1:4],
    "reversed": lambda: CUBE[::-1, :, ::-1],
    "transposed": lambda: CUBE.T,
    "Fortran order": lambda: np.asfortranarray(CUBE),
    "broadcast": lambda: np.broadcast_to(CUBE[:, :1], (4, 6, 5)),
    "read-only": lambda: np.frombuffer(CUBE.tobytes(), CUBE.dtype).reshape(CUBE.shape),
    "no axis": lambda: np.array(-71, np.int16),
    "no element": lambda: CUBE[:, 2:2],
    "big-endian": lambda: CUBE.astype(">i2")[:, ::3],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layout_changes_neither_key_nor_bytes_nor_what_comes_back(layout: str) -> None:
    given_array = LAYOUTS[layout]()
    plain = np.array(given_array.tolist(), given_array.dtype).reshape(given_array.shape)
    assert frame_key(given_array) == frame_key(plain)
    assert encode_frame(given_array) == encode_frame(plain)
    decoded = decode_frame(encode_frame(given_array))
    assert (decoded.dtype.str, decoded.shape) == (plain.dtype.str, plain.shape)
    assert decoded.tolist() == plain.tolist()


def test_key_tells_shape_dtype_and_content_apart() -> None:
    content = bytes(range(24))
    alike = [
        np.frombuffer(content, dtype).reshape(shape)
        for dtype, shapes in {
            "u1": [(24,), (2, 12), (12, 2), (4, 6), (1, 24), (24, 1)],
            "i1": [(24,)],
            "<u2": [(12,), (3, 4), (4, 3)],
            ">u2": [(12,), (3, 4)],
            "<f4": [(6,), (6, 1)],
        }.items()
        for shape in shapes
    ]
    assert len({frame_key(array) for array in alike}) == len(alike)
    nothing = [np.zeros(shape, np.uint8) for shape in [(0,), (0, 3), (3, 0), (0, 0)]]
    assert len({frame_key(array) for array in [*nothing, np.zeros((), np.uint8)]}) == 5
    changed = alike[3].copy()
    changed[3, 5] ^= 1
    assert frame_key(changed) != frame_key(alike[3])


def test_key_is_96_bits_of_content_and_never_the_same_for_many_similar_frames() -> None:
    grey = np.zeros((20, 20), np.uint8)
    keys = set()
    for row in range(20):
        for column in range(20):
            for value in range(1, 26):
                grey[row, column] = value
                keys.add(frame_key(grey))
            grey[row, column] = 0
    assert len(keys) == 20 * 20 * 25
    assert all(FRAME_KEY.fullmatch(key) for key in keys)


def test_key_is_the_one_that_other_programs_compute() -> None:
    """dtype and shape, each after its length, then C-order bytes."""
    array = np.array([[1, 2, 3]], "<u2")
    text = b"\x03<u2" + b"\x02" + struct.pack("<II", 1, 3) + b"\x01\x00\x02\x00\x03\x00"
    wanted = base64.urlsafe_b64encode(xxhash.xxh3_128_digest(text)[:12]).decode()
    assert frame_key(array) == wanted


@given(
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=7))
    )
)
@settings(max_examples=150, deadline=None)
def test_any_array_comes_back_bit_for_bit(array: NDArray) -> None:
    decoded = decode_frame(encode_frame(array))
    assert decoded.dtype.str == array.dtype.str
    assert decoded.shape == array.shape
    assert decoded.tobytes() == array.tobytes()
    assert decoded.flags.writeable


def test_decoded_frames_are_the_callers_own() -> None:
    payload = encode_frame(CUBE)
    one, other = decode_frame(payload), decode_frame(payload)
    one += 1
    assert (other == CUBE).all()
    out = np.zeros_like(CUBE)
    assert decode_frame(payload, out) is out
    assert (out == CUBE).all()


@pytest.mark.parametrize("out", [np.zeros((4, 6, 5), np.uint16), np.zeros((4, 30), np.int16)])
def test_decoding_into_an_array_of_other_shape_or_dtype_is_refused(out: NDArray) -> None:
    with pytest.raises(DamagedError, match=r"int16 \(4, 6, 5\), expected"):
        decode_frame(encode_frame(CUBE), out)
    assert not out.any()


def test_images_shrink_and_noise_hardly_grows() -> None:
    plain = np.zeros((84, 84), np.uint8)
    noise = np.random.default_rng(5).integers(256, size=(84, 84), dtype=np.uint8)
    assert len(encode_frame(plain)) < 100
    assert len(encode_frame(noise)) <= 84 * 84 + 40


@pytest.mark.parametrize(
    "array",
    [
        np.array([{"a": 1}, None], object),
        np.zeros(3, [("x", "<i4"), ("y", "<f4")]),
        np.array(["left", "right"]),
        np.array([b"ab"]),
        np.zeros(2, np.complex64),
        np.zeros(2, "datetime64[s]"),
        np.zeros(2, np.longdouble),
        np.zeros(2, "V4"),
    ],
)
def test_dtypes_that_are_no_plain_numbers_are_refused_at_writing(array: NDArray) -> None:
    for write in (frame_key, encode_frame):
        with pytest.raises(InvalidEntryError, match="must be bool, integer or float"):
            write(array)


# ---------------------------------------------------------------------- damage


def flipped(payload: bytes, at: int, bit: int) -> bytes:
    damaged = bytearray(payload)
    damaged[at] ^= 1 << bit
    return bytes(damaged)


@pytest.mark.parametrize("content", ["compressed", "raw", "empty"])
def test_any_flipped_bit_behind_the_digits_is_an_error(content: str) -> None:
    array = {
        "compressed": np.zeros((9, 9), np.uint8),
        "raw": np.random.default_rng(2).random(4),
        "empty": np.zeros((0, 3), np.float32),
    }[content]
    payload = encode_frame(array)
    for at in range(FRAME_ENTRY_DIGITS, len(payload)):
        for bit in range(8):
            with pytest.raises(DamagedError):
                decode_frame(flipped(payload, at, bit))
    for at in range(FRAME_ENTRY_DIGITS):  # they change with each entry: no part of the frame
        damaged = flipped(payload, at, 7)
        with pytest.raises(DamagedError, match="not digits"):
            decode_frame(damaged)


@pytest.mark.parametrize("content", ["compressed", "raw"])
def test_thousands_of_damaged_frames_are_as_many_errors_and_no_memory(content: str) -> None:
    rng = np.random.default_rng(11)
    array = rng.integers(256, size=(84, 84), dtype=np.uint8)
    array = array // 64 * 64 if content == "compressed" else array
    payload = encode_frame(array)
    process = psutil.Process()
    errors = 0
    for round_number in range(6_000):
        if round_number == 1_000:
            gc.collect()
            before = process.memory_info().rss
        at = int(rng.integers(FRAME_ENTRY_DIGITS, len(payload)))
        try:
            decode_frame(flipped(payload, at, int(rng.integers(8))))
        except DamagedError:
            errors += 1
    gc.collect()
    assert errors == 6_000
    assert process.memory_info().rss - before < 3 << 20


def test_damage_that_passes_the_checksum_allocates_no_more_than_the_bytes_can_hold() -> None:
    """A frame that claims 16 GiB in 20 bytes is refused before anything is allocated."""
    payload = encode_frame(np.zeros((64, 64), np.uint8))
    header = frame_header(payload)
    shape_at = header.start - 8
    body = bytearray(payload[FRAME_ENTRY_DIGITS + 4 :])
    body[shape_at - 16 : shape_at - 8] = struct.pack("<II", 1 << 17, 1 << 17)
    checksum = xxhash.xxh3_64_digest(bytes(body))[:4]
    hostile = payload[:FRAME_ENTRY_DIGITS] + checksum + bytes(body)
    assert frame_header(hostile).shape == (1 << 17, 1 << 17)
    with pytest.raises(DamagedError, match="cannot hold"):
        decode_frame(hostile)


@given(st.binary(max_size=80), st.booleans())
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_are_a_frame_or_damage(tail: bytes, with_checksum: bool) -> None:
    start = b"0" * FRAME_ENTRY_DIGITS + xxhash.xxh3_64_digest(tail)[:4] if with_checksum else b""
    try:
        frame = decode_frame(start + tail)
    except DamagedError:
        return
    assert frame.nbytes <= 256 * len(tail)


def test_frames_cut_short_anywhere_are_damage() -> None:
    payload = encode_frame(CUBE)
    for length in range(len(payload)):
        with pytest.raises(DamagedError):
            decode_frame(payload[:length])
