"""The most that a file may declare: beyond every published model, within what a machine survives.

A file says how large the thing is that it describes, and saying so costs it a few bytes. These numbers are
checked before anything of that size is built. Weights need none: they are as large as their file.
"""

from __future__ import annotations

import os
import stat

from cspd_jax.errors import UserError

LAYERS = 1024
WIDTH = 2**17  # of hidden states, tokens, heads
HIDDEN = 2**20  # of a layer within a block
HEADS = 2**12
IDS = 2**22  # of a vocabulary; classes
POSITIONS = 2**24
IMAGE_TOKENS = 2**20
PATCH = 2**10  # pixels or latents along a side
LEVELS = 12  # of resolution
IMAGES = 2**22  # of one call in Python
PROMPTS = 2**16  # of one call in Python
PROMPT_IDS = 2**28  # of all prompts of a call, padded
LISTED = 2**10  # entries of a list in a configuration
TEXT = 2**12  # characters of a text in a configuration


NAME = 200  # characters of a tensor's name
SHARDS = 2**12
PIXELS = 2**26  # of a picture

_POINTER = b"version https://git-lfs."
_POINTER_BYTES = 1024  # that it has at most


def is_there(path: str | os.PathLike) -> bool:
    """Whether an optional file is there; UserError if something stands in its place that is no file."""
    if not os.path.lexists(path):
        return False
    file_size(path)
    return True


def file_size(path: str | os.PathLike) -> int:
    """The bytes of a regular file; UserError if it is something else, such as a pipe, which may never end, or
    a pointer of Git LFS."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is not a regular file")
    if status.st_size < _POINTER_BYTES and _starts_with(path, _POINTER):
        raise UserError(f"{path} is a pointer of Git LFS; fetch the file itself by git lfs pull")
    return status.st_size


def _starts_with(path: str | os.PathLike, start: bytes) -> bool:
    """Of a file that cannot be read no: its reader says why."""
    try:
        with open(path, "rb") as file:
            return file.read(len(start)) == start
    except OSError:
        return False
