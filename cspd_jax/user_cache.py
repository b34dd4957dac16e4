"""The user's cache folder: compiled programs, gains, choices. All of it can be deleted at any time."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cspd-jax"
