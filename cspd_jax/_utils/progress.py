"""A progress bar for work that compiles programs in its first step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

_SECONDS = 3.0  # between two lines where the output is no terminal


class Bar(tqdm):
    """A bar that says "compiling" until the first step is done. The speed that it shows
    leaves out that step. Where the output is no terminal, it prints a line every few
    seconds."""

    def __init__(self, **options: Any):
        if not sys.stderr.isatty():
            options["mininterval"] = max(options.get("mininterval", 0), _SECONDS)
        super().__init__(**options, postfix="compiling")
        self._compiling = not self.disable

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        if file.isatty():
            return tqdm.status_printer(file)
        return lambda text: print(text, file=file, flush=True)

    def update(self, n: float | None = 1) -> bool | None:
        if not self._compiling:
            return super().update(n)
        self._compiling = False
        self.n: float = self.n + (n or 0)
        self.initial = self.last_print_n = self.n
        self.start_t = self.last_print_t = time.time()
        self.set_postfix_str("")
        return True
