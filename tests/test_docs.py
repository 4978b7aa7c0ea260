"""The pages that list keys and fields say what the program does."""

import inspect
import re
from pathlib import Path

from storage import keys
from storage.protocol import ReaderKind, ReaderSettings
from storage.redis_store import RedisStore
from tests.storage.entries import CREATION, EXPERIMENT, create, entry

DOCS = Path(__file__).parents[1] / "docs"


def page_keys() -> set[str]:
    rows = [line for line in (DOCS / "keys.md").read_text().splitlines() if line.startswith("| `")]
    return {row.split("`")[1] for row in rows}


def program_keys() -> set[str]:
    """Every key that storage/keys.py makes, with the page's words in place of the arguments."""
    words = {"experiment": "EXP", "shard": "SHARD", "name": "NAME", "key": "KEY", "agent": "AGENT"}
    words |= {"reader": "READER", "role": "ROLE", "member_id": "ID", "fence": "FENCE"}
    words |= {"version": "VERSION"}
    made = {keys.EXPERIMENTS}
    for name, function in vars(keys).items():
        if inspect.isfunction(function) and not re.search(r"^checked|_tag$|_prefix$", name):
            made.add(function(*[words[one] for one in inspect.signature(function).parameters]))
    return made


def test_the_page_of_keys_lists_every_key_and_no_other() -> None:
    assert page_keys() == program_keys()


def test_the_page_of_keys_names_every_field_of_an_entry_and_of_a_state(
    real_storage: RedisStore,
) -> None:
    create(real_storage)
    real_storage.register_reader(EXPERIMENT, 0, ReaderSettings("main", ReaderKind.WINDOW, 100))
    incarnation = real_storage.register_writer(EXPERIMENT, 0, "ada", CREATION)
    real_storage.write(EXPERIMENT, 0, entry(1, incarnation, frames=[1, 2]))
    text = (DOCS / "keys.md").read_text()
    ((_, fields),) = real_storage.client.xrange(keys.segments(EXPERIMENT, 0))
    state = real_storage.account(EXPERIMENT, 0)
    for field in [name.decode() for name in fields] + list(state):
        shown = field.split(":")[-1] if field.startswith("reader:") else field
        assert f"`{shown}`" in text, field
