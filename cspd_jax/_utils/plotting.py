"""matplotlib, also where MPLBACKEND names no backend: nothing here opens a window."""

from __future__ import annotations

import os
import sys


def prepare() -> None:
    """Imports matplotlib; to be called before anything of it is."""
    try:
        import matplotlib
    except ValueError:
        named = os.environ.pop("MPLBACKEND", None)
        if named is None:
            raise
        for begun in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
            del sys.modules[begun]
        try:
            import matplotlib  # noqa: F401
        finally:
            os.environ["MPLBACKEND"] = named
