"""The program `cspd-jax`, which is `python -m cspd_jax` too."""

from __future__ import annotations

import os
import signal
import threading

from cspd_jax.cli import main


def command() -> None:
    """Runs the command of this process and ends it. SIGTERM ends it as Ctrl-C does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _end)
    if code := main():
        # Threads in the middle of something only add to what has been said.
        os._exit(code)


def _end(number: int, _: object) -> None:
    """Ends the command. The signal comes again as long as the process lives, because
    Python ignores what is raised in a callback of its garbage collector."""
    threading.Timer(2, os.kill, (os.getpid(), number)).start()
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    command()
