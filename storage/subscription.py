"""Notices of new parameters, over Redis pub/sub.

Guarantees: a subscription that had to be made again counts as a notice, so what was published in
between is looked for; nothing is ever learned from a notice but that it is time to look.
"""

import contextlib
import time

import redis

from storage.connection import storage_errors

SLICE_S = 1.0
"""A wait is cut in slices, so that a dead connection is noticed between them."""


class ChannelSubscription:
    """One channel, on a connection of its own."""

    def __init__(self, client: redis.Redis, channel: str, where: str) -> None:
        self._where = where
        self._channel = channel
        self._pubsub = client.pubsub()
        self._subscribed = False

    def wait(self, timeout_s: float) -> bool:
        """See `storage.protocol.Subscription`; the first subscription is a notice too."""
        limit = time.monotonic() + timeout_s
        with storage_errors(self._where):
            try:
                if not self._subscribed:
                    self._pubsub.subscribe(self._channel)
                    self._subscribed = True
                while True:
                    left = limit - time.monotonic()
                    message = self._pubsub.get_message(timeout=max(0.0, min(left, SLICE_S)))
                    if message is not None and message["type"] in ("subscribe", "message"):
                        return True
                    if message is None and left <= 0:
                        return False
            except redis.RedisError:
                self._subscribed = False
                with contextlib.suppress(redis.RedisError, OSError):
                    self._pubsub.reset()
                raise

    def close(self) -> None:
        with contextlib.suppress(redis.RedisError, OSError):
            self._pubsub.close()
