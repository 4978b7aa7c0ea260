"""Atari games (`ALE/…`) with the standard preprocessing, applied once.

Guarantees: what is in effect is said (`PREPROCESSING`), and no wrapper does it a second time. The
stack of frames is not made here: agents and replay stack alike, from single frames.
"""

from typing import Any

import gymnasium

PREPROCESSING = {
    "frame skip": "4, maximum of the last two frames",
    "frames": "84x84 grey, uint8",
    "no-op start": "up to 30 steps",
    "sticky actions": "0.25",
    "loss of a life": "goes on",
    "rewards": "as the game gives them",
}
"""Machado 2018, section 5, with the frames of Mnih 2015."""


def make_atari(game_id: str, options: dict[str, Any]) -> gymnasium.Env:
    """Make `ALE/…` with `PREPROCESSING`; `options` go to the emulator."""
    import ale_py  # only who plays Atari needs the emulator

    gymnasium.register_envs(ale_py)
    # Skipped once, by the wrapper: the emulator's own frame skip is switched off.
    raw = gymnasium.make(game_id, **{"repeat_action_probability": 0.25, **options, "frameskip": 1})
    return gymnasium.wrappers.AtariPreprocessing(
        raw, noop_max=30, frame_skip=4, screen_size=84, terminal_on_life_loss=False
    )
