"""Shows a run's progress: a table that renews itself on a terminal, a line now and then elsewhere.

Guarantees: what is shown never stops what is run.
"""

import sys
import time

import structlog
from rich.console import Console
from rich.live import Live
from rich.table import Table

from pipeline.running.progress import Progress

logger = structlog.get_logger()

LINE_S = 10.0
"""Between two lines where there is no terminal."""


class Display:
    """Use it as a context; call `show` often."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._began = self._said = time.monotonic()
        console = Console(stderr=True)
        self._live = (
            Live(console=console, auto_refresh=False, transient=True)
            if sys.stderr.isatty()
            else None
        )

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if self._live is not None:
            table = Table(title=f"{self._title}, {now - self._began:.0f} s", show_header=False)
            for name, value in progress.rows():
                table.add_row(name, value)
            self._live.update(table, refresh=True)
        elif now - self._said >= LINE_S:
            self._said = now
            rows = {name.replace(" ", "_"): value for name, value in progress.rows()}
            logger.info("progress", seconds=round(now - self._began), **rows)
