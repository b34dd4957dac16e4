"""A bar for work whose programs are compiled on the way."""

from __future__ import annotations

import time
from typing import Any

from tqdm import tqdm

from cspd_jax._utils.compilation import compile_seconds

_NOTHING = 0.1  # seconds of compilation that a step may have and be counted


class Bar(tqdm):
    """Says "compiling" until the first step has come. Its speed is that of steps that compiled nothing."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._first, self._since, self._compiled = True, time.time(), compile_seconds()
        if not self.disable:
            self.set_postfix_str("compiling")

    def update(self, n: float | None = 1) -> bool | None:
        since, self._since = self._since, time.time()
        before, self._compiled = self._compiled, compile_seconds()
        first, self._first = self._first, False
        if self.disable or not (first or self._compiled - before > _NOTHING):
            return super().update(n)
        self.start_t += self._since - since
        self.n: float = self.n + (n or 0)
        self.initial += n or 0
        self.last_print_n, self.last_print_t = self.n, self._since
        if first:
            self.set_postfix_str("")
        return True
