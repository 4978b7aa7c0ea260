"""The replay: mirrors the live window of its shards and makes a learner's batches.

Guarantees: a batch holds live steps only, drawn as `sampling` says; at most `prefetch_batches` lie
ahead of the learner; after a restart the window is rebuilt from the store and sampling goes on
where the published parameters say that learning stands.
"""

import time
from collections import Counter

import numpy as np
import structlog
from numpy.typing import NDArray

from algorithms.catalog import load_algorithm
from pipeline.configuration import Configuration
from pipeline.configuration_codec import ConfigurationError
from pipeline.experiment import Experiment
from pipeline.replaying.assembling import Plan, frames_of, plan, write
from pipeline.replaying.frame_slab import FrameSlab, LostFrame, load
from pipeline.replaying.sampling import Pacing, batch_generator, draw
from pipeline.replaying.stream_reader import StreamReader
from pipeline.replaying.window import ShardWindow, frame_leaves, leaf_bytes, planned_steps
from pipeline.seeds import derived_seed
from pipeline.transport import BatchServer, host_id, transitions_layout
from storage.protocol import Lease, Storage

logger = structlog.get_logger()

LEASE_S = 10.0
RENEW_S = 2.0
CHECK_S = 1.0
"""How often the window is compared with where the stream stands."""
READ_ENTRIES = 64
WAIT_S = 0.05
STEP_S = 0.1
REDRAWS = 20
"""Times that samples without their frames are replaced before the batch is given up."""


class ReplayRole:
    """One replay process's work: all shards of one learner."""

    def __init__(
        self,
        storage: Storage,
        experiment: Experiment,
        configuration: Configuration,
        member_id: str,
    ) -> None:
        config, replay = experiment.config, configuration.replay
        self._storage = storage
        self._experiment = experiment.name
        self._member_id = member_id
        self._learner = configuration.experiment.learner
        self._stack = experiment.observations.stack
        self._synchronous = config.synchronous
        reads = load_algorithm(configuration.algorithm_name).reads(configuration.algorithm)
        self._n_step, self._gamma = reads.n_step, reads.gamma
        self._batch_size = configuration.learner.batch_size
        self._seed = derived_seed(config.seed, "replay")
        self._readers: dict[int, StreamReader] = {}
        self._leases: dict[int, Lease] = {}
        self._renewed_at = self._checked_at = time.monotonic()
        share = -(-replay.capacity_steps // config.shards)
        for shard in range(config.shards):
            slabs = _slabs(experiment, configuration, share)
            window = ShardWindow(experiment.observations, experiment.actions, config, share, slabs)
            self._readers[shard] = StreamReader(storage, experiment.name, shard, window)
        head = storage.parameters_head(experiment.name, self._learner)
        self._batches = head.iteration if head else 0
        """Batches drawn in all; also the number of the next one."""
        self._pacing = Pacing(
            replay.samples_per_insert,
            replay.minimum_steps,
            self._batch_size,
            samples=self._batches * self._batch_size,
        )
        self._total_steps = 0
        self._rebuilt = False
        self._turn = (0, 0)
        """Synchronous mode: the last turn handed over, as connection of a learner and entry."""
        self._connections = 0
        self._counts: Counter[str] = Counter()
        self._rate_since = (time.monotonic(), 0)
        self._waiting = "its window to be read from the store"
        layout = transitions_layout(
            experiment.observations, experiment.actions, self._n_step, self._batch_size
        )
        self._server = BatchServer(layout, replay.prefetch_batches)

    # ------------------------------------------------------------------ the loop's side

    def step(self) -> bool:
        if not self._hold_leases():
            time.sleep(WAIT_S)
            return False
        self._check()
        worked = self._read()
        if not self._rebuilt:
            return worked
        until = time.monotonic() + STEP_S
        made = self._make_batch()
        while made and time.monotonic() < until:
            made = self._make_batch()
            worked = True
        if not made and self._synchronous:
            self._hand_turn_over()
        # While nothing is to be done it is the learner, or the next entry, that is waited for.
        self._server.poll(0.0 if worked else WAIT_S / 5)
        self._see_learner()
        return worked

    def status(self) -> dict[str, str]:
        return {
            "learner": self._learner,
            "shards": ",".join(str(shard) for shard in self._readers),
            "batches": self._server.address,
            "host": host_id(),
            "waiting": self._waiting,
        }

    def metrics(self) -> dict[str, float]:
        now = time.monotonic()
        since, samples = self._rate_since
        self._rate_since = (now, self._pacing.samples)
        windows = [reader.window for reader in self._readers.values()]
        slabs = [slab for window in windows for slab in window.slabs.values()]
        return {
            "window_steps": float(sum(len(window.steps) for window in windows)),
            "window_entries": float(sum(len(window.entries) for window in windows)),
            "total_steps": float(self._total_steps),
            "samples": float(self._pacing.samples),
            "samples_per_s": (self._pacing.samples - samples) / max(now - since, 1e-9),
            "batches": float(self._batches),
            "segments_sampled_from": float(self._counts["segments_sampled_from"]),
            "missing_samples": float(self._counts["missing_samples"]),
            "entries_damaged": float(sum(one.entries_damaged for one in self._readers.values())),
            "tails_lost": float(sum(one.tails_lost for one in self._readers.values())),
            "column_bytes": float(sum(window.size_bytes for window in windows)),
            "slab_bytes": float(sum(slab.held_bytes for slab in slabs)),
            "slab_misses": float(self._counts["slab_misses"]),
        }

    def drain(self) -> None:
        """Nothing is owed: everything lies in the store."""

    def close(self) -> None:
        self._server.close()
        for shard, lease in self._leases.items():
            try:
                self._storage.release_reader(self._experiment, shard, self._learner, lease)
            except Exception as error:  # it runs out by itself
                logger.debug("lease not given back", error=str(error))

    # ------------------------------------------------------------------ reading

    def _hold_leases(self) -> bool:
        """Hold every shard's reader. Raises LostRoleError once another replay has it."""
        now = time.monotonic()
        for shard in self._readers:
            if shard in self._leases:
                continue
            lease = self._storage.acquire_reader(
                self._experiment, shard, self._learner, self._member_id, LEASE_S
            )
            if lease is None:
                self._waiting = f"the reader {self._learner!r} of shard {shard}: another holds it"
                return False
            self._leases[shard] = lease
        if now - self._renewed_at >= RENEW_S:
            for shard, lease in self._leases.items():
                self._storage.renew_reader(self._experiment, shard, self._learner, lease, LEASE_S)
            self._renewed_at = now
        return True

    def _check(self) -> None:
        if time.monotonic() - self._checked_at < CHECK_S:
            return
        for reader in self._readers.values():
            reader.check(reader.position())
        self._checked_at = time.monotonic()

    def _read(self) -> bool:
        """Ingest what there is, a bounded number of entries; False when there was nothing new."""
        cursors = {shard: reader.cursor for shard, reader in self._readers.items()}
        entries = self._storage.read(self._experiment, cursors, READ_ENTRIES, 0.0)
        for shard, reader in self._readers.items():
            reader.take([one for one in entries if one.shard == shard])
        self._total_steps = sum(one.window.total_steps for one in self._readers.values())
        if not entries and not self._rebuilt:
            self._rebuilt = True
            steps = sum(len(one.window.steps) for one in self._readers.values())
            logger.info("window read", steps=steps, batches_before=self._batches)
        return bool(entries)

    # ------------------------------------------------------------------ making batches

    def _make_batch(self) -> bool:
        """Make and hand over the next batch where one is due, there is room and a learner."""
        self._server.poll(0.0)
        self._waiting = self._pacing.waiting(self._total_steps)
        if self._waiting:
            return False
        slot = self._server.free_slot() if self._server.connected else None
        if slot is None:
            self._waiting = "" if self._server.connected else "a learner on this host"
            return False
        plans = self._draw()
        if plans is None:
            self._waiting = "steps whose frames are in the store"
            self._server.give_up(slot)
            return False
        views = self._server.views(slot)
        first = 0
        for shard, planned in plans.items():
            end = first + len(planned)
            part = {name: view[first:end] for name, view in views.items()}
            write(self._readers[shard].window, shard, planned, part)
            first = end
        if self._server.send(slot, self._batches):
            self._batches += 1
            self._pacing.samples += self._batch_size
            self._count_segments(plans)
        return True

    def _draw(self) -> dict[int, Plan] | None:
        """Plans of one batch, by shard, with every frame in memory; None where that cannot be."""
        generator = batch_generator(self._seed, self._batches)
        steps = self._drawn(generator, self._batch_size)
        for _ in range(REDRAWS):
            plans = {
                shard: plan(
                    self._readers[shard].window, chosen, self._n_step, self._gamma, self._stack
                )
                for shard, chosen in steps.items()
                if len(chosen)
            }
            lost = {shard: self._load(shard, planned) for shard, planned in plans.items()}
            missing = sum(int(mask.sum()) for mask in lost.values())
            if not missing:
                return plans if plans else None
            self._counts["missing_samples"] += missing
            more = self._drawn(generator, missing)
            kept = {shard: plans[shard].steps[~mask] for shard, mask in lost.items()}
            empty = np.empty(0, np.int64)
            steps = {
                shard: np.concatenate([kept.get(shard, empty), more[shard]])
                for shard in self._readers
            }
        return None

    def _drawn(self, generator: np.random.Generator, count: int) -> dict[int, NDArray[np.int64]]:
        """Shard to positions of drawn steps."""
        windows = [reader.window for reader in self._readers.values()]
        drawn = draw(generator, [len(window.steps) for window in windows], count)
        return {
            shard: offsets + window.steps.first
            for shard, window, offsets in zip(self._readers, windows, drawn, strict=True)
        }

    def _load(self, shard: int, planned: Plan) -> NDArray[np.bool_]:
        """Bring a plan's frames into memory; returns which samples (B,) cannot be had."""
        window = self._readers[shard].window
        numbers = frames_of(window, planned)
        lost = np.zeros(len(planned), bool)
        if not numbers:
            return lost
        wanted = {leaf: window.slabs[leaf].want(many) for leaf, many in numbers.items()}
        self._counts["slab_misses"] += sum(len(many) for many in wanted.values())
        for frame in load(
            window.slabs,
            wanted,
            lambda keys: self._storage.fetch_frames(self._experiment, shard, keys),
        ):
            self._report(shard, frame)
        for leaf, many in numbers.items():
            lost |= window.slabs[leaf].lost(many).any(axis=1)
        return lost

    def _report(self, shard: int, frame: LostFrame) -> None:
        """A damaged frame is deleted, so that the next write that names it sends it again."""
        logger.warning("frame refused", shard=shard, frame=frame.key, reason=frame.reason)
        if frame.seen is not None:
            self._storage.delete_damaged_frame(self._experiment, shard, frame.key, frame.seen)

    def _count_segments(self, plans: dict[int, Plan]) -> None:
        for shard, planned in plans.items():
            segments = self._readers[shard].window.segments
            new = np.unique(planned.segments[~segments.take("sampled", planned.segments)])
            segments.put("sampled", new, True)
            self._counts["segments_sampled_from"] += len(new)

    # ------------------------------------------------------------------ the learner's turn

    def _hand_turn_over(self) -> None:
        """Synchronous mode: all batches due are with the learner; say so once an entry."""
        (reader,) = self._readers.values()
        turn = (self._server.connections, reader.cursor)
        if not self._server.connected or not reader.cursor or turn == self._turn:
            return
        if self._pacing.allows(self._total_steps):
            return  # a batch is due and waits for a free slot
        if self._server.send_turn(reader.cursor):
            self._turn = turn

    def _see_learner(self) -> None:
        if self._server.connections != self._connections:
            self._connections = self._server.connections
            logger.info("learner connected", connections=self._connections)


def _slabs(
    experiment: Experiment, configuration: Configuration, share: int
) -> dict[str, FrameSlab]:
    """One slab a frame leaf, within this shard's part of `replay.slab_bytes`."""
    config = experiment.config
    leaves = frame_leaves(experiment.observations, config)
    if not leaves:
        return {}
    budget = configuration.replay.slab_bytes // config.shards
    stacked = 2 * (experiment.observations.stack + 1)
    needed = configuration.learner.batch_size * stacked
    most = max(needed, 2 * planned_steps(config, share))
    frame_bytes = sum(leaf_bytes(leaf) for leaf in leaves)
    slots = min(most, budget // frame_bytes)
    if slots < needed:
        raise ConfigurationError(
            f"replay.slab_bytes = {configuration.replay.slab_bytes}: should be at least "
            f"{needed * frame_bytes * config.shards}, the frames of one batch in each shard"
        )
    return {leaf.name: FrameSlab(np.dtype(leaf.dtype), leaf.shape, slots, most) for leaf in leaves}
