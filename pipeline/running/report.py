"""The last words of a run: what was reached, where it lies, what to try next. Pure."""

import os
from pathlib import Path

from pipeline.running.summary import Summary


def report_lines(why: str, summary: Summary, folder: Path) -> list[str]:
    """Lines for the terminal."""
    shown = os.path.relpath(folder)
    mean, std = summary.eval_return_mean, summary.eval_return_std
    evaluated = "no evaluation" if mean is None else f"evaluation return {mean:.4g} ± {std:.3g}"
    state = "solved" if summary.solved else f"ended, not solved ({why or 'failed'})"
    files = [
        ("policy", folder / "policy", "weights (safetensors) and what they are (JSON)"),
        ("curves", folder / "curves.png", ""),
        ("summary", folder / "summary.json", ""),
        ("logs", folder / "logs", "one file a process"),
    ]
    there = [
        f"  {name:<8} {os.path.relpath(path)}" + (f"   {what}" if what else "")
        for name, path, what in files
        if path.exists()
    ]
    return [
        f"{summary.experiment}: {state} after {summary.wall_s:.0f} s, {evaluated}",
        f"  {summary.env_steps:,} environment steps ({summary.env_steps_per_s:,.0f}/s), "
        f"{summary.learner_updates:,} updates ({summary.updates_per_s:,.0f}/s)",
        f"  {summary.segments_written:,} segments written, {summary.segments_sampled_from:,} sampled "
        f"from; {summary.frames_written:,} frames stored, {summary.frames_deduplicated:,} "
        "that were there already",
        *there,
        f"next: bin/inspect --run {Path(shown).name} check",
    ]
