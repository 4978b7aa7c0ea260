"""Synchronous mode repeats exactly, with every role a process of its own."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from storage import keys
from storage.connection import connect
from storage.embedded import start_embedded
from tests.end_to_end.conftest import ROOT

Start = Callable[..., "subprocess.Popen[str]"]

CONFIG = """
experiment: {agents: 1, synchronous: true, copies: 4, stack: 2, seed: 11, environment: {id: catch}}
replay: {minimum_steps: 96, capacity_steps: 4000, samples_per_insert: 3}
algorithm: {network: small_cnn, hidden: [24], epsilon_steps: 900}
learner: {batch_size: 24, total_updates: 120}
run: {max_wall_s: 60}
"""


def test_two_runs_of_one_seed_have_the_same_data_frames_and_weights(
    run_name: str, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    names = [f"{run_name}-a", f"{run_name}-b"]
    for name in names:
        train = start("train", "--config", str(tmp_path / "run.yaml"), "--name", name)
        output, _ = train.communicate(timeout=90)
        assert train.returncode == 0, output  # no target: ending by total_updates is success
    first, second = (stored(name) for name in names)
    assert first["updates"] > 60
    assert len(first["data"]) > 10
    assert len(first["frame"]) > 100
    assert first == second


def stored(run: str) -> dict[str, object]:
    """What must repeat, out of the run's own Redis files."""
    with start_embedded(ROOT / "runs" / run / "redis") as server:
        client = connect(server.url)
        entries = [fields for _, fields in client.xrange(keys.segments(run, 0))]
        prefix = keys.frame_prefix(run, 0).encode()
        frames = client.keys(prefix.replace(b"{", b"[{]") + b"*")
        head = client.hgetall(keys.parameters(run, "main"))
        value = f"{head[b'fence'].decode()}.{head[b'version'].decode()}"
        return {
            "data": [fields[b"data"] for fields in entries],
            "frames": [fields[b"frames"] for fields in entries],
            "versions": [fields[b"version"] for fields in entries],
            "frame": {name.removeprefix(prefix): client.get(name) for name in frames},
            "weights": client.get(f"{keys.parameters(run, 'main')}:{value}"),
            "updates": int(head[b"iteration"]),
        }
