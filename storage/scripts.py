"""The Lua scripts of storage/lua, each ready to run on a client.

Guarantees: a script that the server has forgotten (it was restarted, or flushed) is loaded again by
the call that misses it; a fragment stands in one file and is included by `--#include FILE`.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import redis

FOLDER = Path(__file__).parent / "lua"
_INCLUDE = re.compile(r"^--#include (\S+)$", re.MULTILINE)


@cache
def script_text(name: str) -> str:
    """The text of storage/lua/NAME.lua with its fragments in place."""
    text = (FOLDER / f"{name}.lua").read_text()
    return _INCLUDE.sub(lambda found: (FOLDER / found[1]).read_text(), text)


class Scripts:
    """Scripts by name, on one client."""

    def __init__(self, client: redis.Redis) -> None:
        self._scripts = {
            path.stem: client.register_script(script_text(path.stem))
            for path in FOLDER.glob("*.lua")
        }

    def run(self, name: str, keys: list[str], arguments: list[Any]) -> Any:
        """What the script returns; bytes, integers and lists of them."""
        return self._scripts[name](keys=keys, args=arguments)
