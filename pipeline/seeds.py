"""Where every random stream of an experiment gets its seed from.

Guarantees: pure, the same on every machine; two different index tuples of one stream never get the
same seed; every seed lies in [0, 2^31), so that any environment's own generator takes it.
"""

import xxhash

SEED_BITS = 31
"""Signed 32-bit seeds are what emulators and numpy's older generators still ask for."""
_FIRST_BITS, _LAST_BITS = 15, 16
_ROUNDS = 6


def derived_seed(experiment_seed: int, stream: str, *indices: int) -> int:
    """Seed of one random stream, such as `derived_seed(1, "environment", agent, copy)`.

    At most two indices, counted from 0: below 2^31 for one, below 2^15 and 2^16 for two. Seeds of
    different streams or experiments are unrelated; they may coincide, by chance 2^-31. Raises
    ValueError.

    The indices are numbered, and the number permuted by a Feistel network keyed with everything
    else: a hash to 31 bits would give two of 6,400 copies the same seed in one run of a hundred.
    """
    number = _number(stream, indices)
    key = f"{experiment_seed}/{stream}/{len(indices)}"
    number = _permuted(number, key)
    while (
        number >> SEED_BITS
    ):  # walks along a cycle of the permutation of 32 bits: still one to one
        number = _permuted(number, key)
    return number


def _number(stream: str, indices: tuple[int, ...]) -> int:
    limits = {0: (), 1: (SEED_BITS,), 2: (_FIRST_BITS, _LAST_BITS)}.get(len(indices))
    if limits is None:
        raise ValueError(f"seed of {stream!r}: {len(indices)} indices, at most 2 are possible")
    number = 0
    for index, bits in zip(indices, limits, strict=True):
        if not 0 <= index < 1 << bits:
            raise ValueError(f"seed of {stream!r}: index {index}, should be 0 to {(1 << bits) - 1}")
        number = number << bits | index
    return number


def _permuted(number: int, key: str) -> int:
    """One of the 2^32! orders of 32-bit numbers (Luby and Rackoff 1988)."""
    left, right = number >> 16, number & 0xFFFF
    for turn in range(_ROUNDS):
        left, right = right, left ^ _hashed(f"{key}/{turn}/{right}")
    return left << 16 | right


def _hashed(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode()) & 0xFFFF
