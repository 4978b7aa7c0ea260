"""Measurements of every process on their way into Redis, and back out of it.

Guarantees: measuring never stops what is measured. A value that is no number is left out with one
warning; an unreachable server loses the record, not the process.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from storage.errors import DamagedError, StorageError
from storage.protocol import Storage

logger = structlog.get_logger()


@dataclass(frozen=True)
class Record:
    """What one member measured since its last record."""

    member: str
    role: str
    time_s: float
    """Unix time, on the member's clock: for people, never for deciding."""
    values: dict[str, float]


class MetricsSink:
    """Where one member leaves its measurements."""

    def __init__(self, storage: Storage, experiment: str, member: str, role: str) -> None:
        self._storage = storage
        self._experiment = experiment
        self._member = member
        self._role = role
        self._refused: set[str] = set()

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one record; int, float, numpy and tensor scalars are numbers."""
        numbers = {}
        for name, value in values.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError, RuntimeError, OverflowError):
                if name not in self._refused:
                    self._refused.add(name)
                    logger.warning("metric left out: not a number", metric=name, value=repr(value))
        if not numbers:
            return
        record = Record(self._member, self._role, time.time(), numbers)
        try:
            self._storage.append_metrics(self._experiment, encode_record(record))
        except StorageError as error:
            logger.debug("measurements lost", error=str(error))


def encode_record(record: Record) -> bytes:
    """One JSON object. JSON has no NaN and no infinity: those become null."""
    values = {
        name: value if math.isfinite(value) else None for name, value in record.values.items()
    }
    fields = {
        "member": record.member,
        "role": record.role,
        "time_s": round(record.time_s, 3),
        "values": values,
    }
    return json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()


def decode_record(data: bytes) -> Record:
    """Raises DamagedError."""
    try:
        fields = json.loads(data)
        values = {
            str(name): math.nan if value is None else float(value)
            for name, value in fields["values"].items()
        }
        return Record(str(fields["member"]), str(fields["role"]), float(fields["time_s"]), values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"a metrics record does not decode: {error}") from error
