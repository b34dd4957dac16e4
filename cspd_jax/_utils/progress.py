"""A progress bar for work that compiles programs in its first step."""

from __future__ import annotations

import time

from tqdm import tqdm


class Bar(tqdm):
    """A bar that says "compiling" until the first step is done. The speed that it shows
    leaves out that step."""

    def __init__(self, **options: object):
        super().__init__(**options, postfix="compiling")
        self._compiling = not self.disable

    def update(self, n: float | None = 1) -> bool | None:
        if not self._compiling:
            return super().update(n)
        self._compiling = False
        self.n: float = self.n + (n or 0)
        self.initial = self.last_print_n = self.n
        self.start_t = self.last_print_t = time.time()
        self.set_postfix_str("")
        return True
