"""Files that are complete under their names, and the folder of an evaluation."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from cspd_jax.errors import UserError

SETTINGS = "settings.json"


def replace_file(path: Path, content: bytes) -> None:
    """Writes `path` in one go: at any moment it is the old file, or the new one."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, values: Any) -> None:
    replace_file(path, (json.dumps(values, indent=2) + "\n").encode())


def check_folder(folder: Path, what: dict | None = None) -> None:
    """UserError unless `folder` is new, empty, or of an evaluation (of the same images, given `what`)."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; the evaluation needs a folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    try:
        stored = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} is not empty and holds no evaluation; choose another --out") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / SETTINGS} is not readable JSON ({error})") from None
    if what is not None and stored != what:
        names = [k for k in what if not isinstance(stored, dict) or stored.get(k) != what[k]]
        raise UserError(
            f"{folder} holds the evaluation of other images ({', '.join(names) or 'settings'} differ);"
            " choose another --out"
        )


def open_folder(folder: Path, what: dict) -> None:
    """Makes the folder of the evaluation of the images that `what` (JSON) decides, or goes back to it."""
    check_folder(folder, what)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror or error}") from None
    write_json(folder / SETTINGS, what)
