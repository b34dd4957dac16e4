"""A progress bar for work that compiles programs in its first step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from cspd_jax._utils.compilation import compile_seconds

_SECONDS = 3.0  # between two lines where the output is no terminal


class Bar(tqdm):
    """A bar that says "compiling" until the first step is done. The speed that it shows
    leaves out that step, and the seconds in which later steps compile. Where the output
    is no terminal, it prints a line every few seconds."""

    def __init__(self, **options: Any):
        if not sys.stderr.isatty():
            options["mininterval"] = max(options.get("mininterval", 0), _SECONDS)
        super().__init__(**options, postfix="compiling")
        self._compiled: float | None = None  # seconds, up to the last step

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        if file.isatty():
            return tqdm.status_printer(file)
        return lambda text: print(text, file=file, flush=True)

    def update(self, n: float | None = 1) -> bool | None:
        if self.disable:
            return super().update(n)
        before = self._compiled
        self._compiled = compile_seconds()
        if before is not None:
            self.start_t += self._compiled - before
            self.last_print_t += self._compiled - before
            return super().update(n)
        self.n: float = self.n + (n or 0)
        self.initial = self.last_print_n = self.n
        self.start_t: float = time.time()
        self.last_print_t: float = self.start_t
        self.set_postfix_str("")
        return True
