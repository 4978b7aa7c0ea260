"""Follows one shard's stream into its window, whatever becomes of the stream.

Guarantees: the window holds live entries only, each once and in order; where the server lost its
tail and the stream went on differently, the window forgets what is no longer there; an entry that
does not decode is kept aside once, counted, and stepped over.
"""

from collections.abc import Sequence

import structlog

from pipeline.replaying.window import ShardWindow
from storage.codec import decode_entry
from storage.errors import DamagedError
from storage.protocol import Position, Storage, StoredEntry

logger = structlog.get_logger()


class StreamReader:
    """One shard's reader; `window` is what it fills."""

    def __init__(self, storage: Storage, experiment: str, shard: int, window: ShardWindow) -> None:
        self._storage = storage
        self._experiment = experiment
        self._shard = shard
        self.window = window
        self.entries_damaged = 0
        self.tails_lost = 0
        self._cursor = max(0, self.position().first_entry - 1)

    @property
    def cursor(self) -> int:
        """The last entry read."""
        return self._cursor

    def position(self) -> Position:
        return self._storage.position(self._experiment, self._shard)

    def take(self, entries: Sequence[StoredEntry]) -> None:
        """Ingest what `Storage.read` gave for `cursor`."""
        for stored in entries:
            last = self.window.last
            follows = last is not None and stored.data and stored.entry == last.entry + 1
            if last is not None and follows and last.nonce not in ("", stored.previous):
                # Not the entry that we read before this one: the server lost it.
                self.check(self.position())
                return
            self._ingest(stored)
            self._cursor = stored.entry

    def check(self, position: Position) -> None:
        """Compare with where the stream stands: forget what was dropped, and what was lost."""
        self.window.evict_before(position.first_entry)
        last = self.window.last
        if last is None:
            self._cursor = max(min(self._cursor, position.last_entry), position.first_entry - 1)
            return
        if last.entry > position.last_entry or not self._is_live(last.entry, last.nonce):
            self._forget_lost_tail(position)

    def _is_live(self, entry: int, nonce: str) -> bool:
        return not nonce or self._storage.nonce(self._experiment, self._shard, entry) == nonce

    def _forget_lost_tail(self, position: Position) -> None:
        """Back to the newest entry that is still the same."""
        entries = [one for one in self.window.entries if one.entry <= position.last_entry]
        while entries and not self._is_live(entries[-1].entry, entries[-1].nonce):
            entries.pop()
        keep = entries[-1].entry if entries else position.first_entry - 1
        lost = len(self.window.entries) - len(entries)
        self.window.cut_after(keep)
        self._cursor = keep
        self.tails_lost += 1
        logger.warning("the server lost entries", shard=self._shard, entries=lost, after=keep)

    def _ingest(self, stored: StoredEntry) -> None:
        try:
            if not stored.data:
                raise DamagedError("its fields do not read")
            self.window.ingest(stored, decode_entry(stored.data, stored.frame_keys))
        except DamagedError as error:
            self.entries_damaged += 1
            logger.warning(
                "entry refused", shard=self._shard, entry=stored.entry, reason=str(error)
            )
            self.window.skip(stored)
            self._storage.quarantine(self._experiment, self._shard, stored, str(error))
