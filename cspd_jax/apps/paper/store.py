"""What is done already: a file for each finished cell, so that whatever was interrupted continues."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cspd_jax._utils.files import write_arrays, write_errors, write_text
from cspd_jax._utils.json_files import read_json, read_object
from cspd_jax._utils.zip_files import read_arrays
from cspd_jax.apps.paper.cells import Cell
from cspd_jax.errors import UserError

MARK = "reproduction.json"
_ARRAYS = ("tokens", "tested", "accepted")


def check_folder(folder: Path) -> None:
    """UserError unless results can go into the folder: new, empty, or of an earlier reproduction."""
    if not os.fspath(folder):
        raise UserError("the name of the folder for the results is empty")
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"{folder} is a file; the results need a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise UserError(f"{folder} is not empty and holds no reproduction; choose another --out")


class Store:
    """The folder OUT/cells: KEY.json is the row of a cell, KEY.npz its arrays, written before the row.

    Both are written beside their names and renamed. A file that cannot be read counts as missing.
    """

    def __init__(self, out: Path):
        check_folder(out)
        self.folder = out / "cells"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{out} cannot be made: {error.strerror or error}") from None
        with write_errors(out):
            write_text(out / MARK, json.dumps({"kind": "reproduction", "format_version": 1}) + "\n")

    def row(self, key: str) -> dict[str, Any] | None:
        """The row of a finished cell; None if there is none."""
        path = self.folder / f"{key}.json"
        try:
            return read_object(path)["row"] if path.is_file() else None
        except (UserError, KeyError):
            return None

    def arrays(self, key: str) -> dict[str, np.ndarray]:
        """tokens [N, L, d], tested [N, L] and accepted [N, L] of a finished cell."""
        return read_arrays(self.folder / f"{key}.npz", dict.fromkeys(_ARRAYS))

    def finished(self, cell: Cell, key: str) -> bool:
        if self.row(key) is None:
            return False
        if cell.by_round:
            return True
        try:
            self.arrays(key)
        except UserError:
            return False
        return True

    def keep(self, cell: Cell, key: str, row: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        with write_errors(self.folder):
            if arrays:
                write_arrays(self.folder / f"{key}.npz", **arrays)
            text = json.dumps({"cell": cell.to_json(), "row": row}, indent=1)
            write_text(self.folder / f"{key}.json", text + "\n")

    def derived(self, key: str, make: Callable[[], Any]) -> Any:
        """What follows from cells and takes long: made once, then read. JSON."""
        path = self.folder / f"derived-{key}.json"
        if path.is_file():
            try:
                return read_json(path)
            except UserError:
                pass
        value = json.loads(json.dumps(make()))
        with write_errors(path):
            write_text(path, json.dumps(value) + "\n")
        return value
