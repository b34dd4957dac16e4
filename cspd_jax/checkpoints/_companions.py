"""Checkpoint folders that also hold files which are copied as they are, such as a tokenizer's."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cspd_jax.checkpoints.folder import check_destination, save
from cspd_jax.errors import UserError


def save_with(companions: Mapping[str, Path], path: str | os.PathLike, *args, **options) -> dict[str, Any]:
    """`save`, with a copy of every file of `companions` (place in the folder -> file). All or nothing."""
    if not companions:
        return save(path, *args, **options)
    path = Path(os.path.abspath(path))
    check_destination(path)
    try:
        with tempfile.TemporaryDirectory(
            prefix=f".{path.name}.", suffix=".partial", dir=path.parent
        ) as beside:
            made = Path(beside) / path.name
            description = save(made, *args, **options)
            for place, file in companions.items():
                (made / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, made / place)
            check_destination(path)
            made.rename(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
    return description
