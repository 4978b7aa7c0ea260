"""The built-in algorithms by name.

Guarantees: listing names loads nothing; an algorithm's file, and torch with it, is imported when it
is asked for by name.
"""

import difflib
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from algorithms.contract import Algorithm

BUILT_IN = {"dqn": "algorithms.dqn"}
"""Name to the module whose ALGORITHM it is."""


def algorithm_names() -> tuple[str, ...]:
    return tuple(sorted(BUILT_IN))


def load_algorithm(name: str) -> "Algorithm":
    """Import a built-in algorithm. Raises ValueError, naming the nearest name there is."""
    if name not in BUILT_IN:
        near = difflib.get_close_matches(str(name), BUILT_IN, n=1, cutoff=0.3)
        hint = (
            f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(algorithm_names())}"
        )
        raise ValueError(f"there is no algorithm {name!r}; {hint}")
    algorithm: Algorithm = importlib.import_module(BUILT_IN[name]).ALGORITHM
    return algorithm
