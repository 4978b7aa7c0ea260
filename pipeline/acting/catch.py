"""The built-in image game: catch the falling ball. Small enough to be learned in a minute on a CPU.

Guarantees: every ball can be caught; the picture alone says everything, so nothing has to be
remembered; an episode has `CELLS - 1` steps, and its last one alone is rewarded.
"""

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

CELLS = 12
"""The field is 12 x 12 cells."""
CELL_PIXELS = 2
"""A cell is drawn as 2 x 2 pixels: the picture is 24 x 24."""
BALL, PADDLE = 255, 128
LEFT, STAY, RIGHT = 0, 1, 2


class Catch(gymnasium.Env[NDArray[np.uint8], np.int64]):
    """A ball falls straight down, one cell a step, from a random column of the top row. The paddle,
    one cell of the bottom row, starts in the middle and moves one cell left, stays, or moves one
    right. When the ball arrives: +1 if the paddle is under it, else -1, and the episode terminates.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (Gymnasium's own declaration)

    def __init__(self) -> None:
        side = CELLS * CELL_PIXELS
        self.observation_space = gymnasium.spaces.Box(0, 255, (side, side), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(3)
        self._ball_row = CELLS - 1
        self._ball_column = 0
        self._paddle = CELLS // 2

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        super().reset(seed=seed)
        self._ball_row = 0
        self._ball_column = int(self.np_random.integers(CELLS))
        self._paddle = CELLS // 2
        return self._picture(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Raises ValueError for an action that is none, or after the episode's end."""
        if not self.action_space.contains(action):
            raise ValueError(f"catch: action {action!r}, should be 0 (left), 1 (stay) or 2 (right)")
        if self._ball_row == CELLS - 1:
            raise ValueError("catch: the episode has ended, call reset() first")
        self._paddle = min(max(self._paddle + int(action) - STAY, 0), CELLS - 1)
        self._ball_row += 1
        arrived = self._ball_row == CELLS - 1
        reward = (1.0 if self._ball_column == self._paddle else -1.0) if arrived else 0.0
        return self._picture(), reward, arrived, False, {}

    def _picture(self) -> NDArray[np.uint8]:
        """(24, 24): the ball is drawn last, so it is seen on the paddle too."""
        field = np.zeros((CELLS, CELLS), np.uint8)
        field[CELLS - 1, self._paddle] = PADDLE
        field[self._ball_row, self._ball_column] = BALL
        return field.repeat(CELL_PIXELS, axis=0).repeat(CELL_PIXELS, axis=1)
