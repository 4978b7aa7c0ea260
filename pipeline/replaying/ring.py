"""Columns that grow at one end and go at both, in arrays that are written round and round.

Guarantees: a row keeps its position for as long as it lives, whatever is added or dropped; nothing is
allocated while the live rows fit the capacity; reading many positions is one `take` a column.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Column = tuple[np.dtype | type, tuple[int, ...]]
"""Dtype and the shape of one row."""


class Ring:
    """Live rows have the positions [first, end), which only count up (except after `drop_last`)."""

    def __init__(self, columns: Mapping[str, Column], capacity: int) -> None:
        self.capacity = max(1, capacity)
        self.first = 0
        self.end = 0
        self._columns: dict[str, NDArray] = {
            name: np.zeros((self.capacity, *shape), dtype)
            for name, (dtype, shape) in columns.items()
        }

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def size_bytes(self) -> int:
        return sum(column.nbytes for column in self._columns.values())

    def append(self, values: Mapping[str, NDArray | int], count: int) -> int:
        """Add `count` rows, each column an array (count, …) or one value for all; returns the
        position of the first."""
        if len(self) + count > self.capacity:
            self._grow(len(self) + count)
        start, at = self.end, self.end % self.capacity
        until_end = min(count, self.capacity - at)
        for name, column in self._columns.items():
            rows = values[name]
            if isinstance(rows, np.ndarray):
                column[at : at + until_end] = rows[:until_end]
                column[: count - until_end] = rows[until_end:]
            else:
                column[at : at + until_end] = rows
                column[: count - until_end] = rows
        self.end += count
        return start

    def drop_first(self, count: int) -> None:
        self.first += count

    def drop_last(self, count: int) -> None:
        """The positions of these rows are given again."""
        self.end -= count

    def take(self, name: str, positions: NDArray, out: NDArray | None = None) -> NDArray:
        """Rows at `positions` (any shape), which must be live: (*positions.shape, *row shape),
        written into `out` (contiguous) where given."""
        # The default mode would copy `out` to be able to leave it as it was: three times slower.
        return np.take(self._columns[name], positions % self.capacity, axis=0, out=out, mode="clip")

    def put(self, name: str, positions: NDArray | int, values: NDArray | int | bool) -> None:
        self._columns[name][np.asarray(positions) % self.capacity] = values

    def _grow(self, needed: int) -> None:
        """Happens only where an entry is larger, or episodes are shorter, than was planned for."""
        live = np.arange(self.first, self.end)
        old, capacity = live % self.capacity, max(needed, self.capacity + self.capacity // 2)
        new = live % capacity
        for name, column in self._columns.items():
            larger = np.zeros((capacity, *column.shape[1:]), column.dtype)
            larger[new] = column[old]
            self._columns[name] = larger
        self.capacity = capacity
