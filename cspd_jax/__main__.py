"""The program `cspd-jax`, which is `python -m cspd_jax` too."""

from __future__ import annotations

import os
import signal

from cspd_jax.cli import main


def command() -> None:
    """Runs the command of this process and ends it. SIGTERM ends it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if code := main():
        # Threads in the middle of something only add to what has been said.
        os._exit(code)


if __name__ == "__main__":
    command()
