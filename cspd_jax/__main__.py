"""`python -m cspd_jax`, and the program `cspd-jax`."""

import os
import sys


def main() -> None:
    """Runs the program. Ctrl-C is a sentence while it is loaded, too."""
    try:
        from cspd_jax.apps.cli import command
    except KeyboardInterrupt:
        print("cspd-jax: interrupted", file=sys.stderr, flush=True)
        os._exit(130)
    command()


if __name__ == "__main__":
    main()
