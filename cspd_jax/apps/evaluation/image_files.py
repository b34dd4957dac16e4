"""Sets of 8-bit images on disk, read a batch at a time: an .npz file, a folder of PNG or JPEG files, or what
`cspd-jax sample` made.

Another form of a set is a function path -> ImageSet and a row of `_FORMS`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from cspd_jax._utils import limits
from cspd_jax._utils.files import files_in
from cspd_jax._utils.zip_files import stream_array
from cspd_jax.apps.bulk.folder import read as read_shards
from cspd_jax.apps.bulk.manifest import is_folder_of_samples, read_manifest
from cspd_jax.errors import UserError
from cspd_jax.training.data.folder import eight_bits

ARRAY = "arr_0"  # what ADM's evaluator calls the images of an .npz file
SUFFIXES = (".png", ".jpg", ".jpeg")
_FORMATS = ("PNG", "JPEG")  # without this Pillow goes by the content, and may start programs
_MOST_PIXELS = 2**22  # of one image
_MOST_FILES = 2**24
_MOST_BYTES = 2**28  # of the images that are in memory at once


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """Images of one size, in a fixed order.

    path: where they are.
    count: how many there are.
    shape: height, width and channels (1 or 3).
    read: size -> batches of that many images, the last one smaller.
    """

    path: Path
    count: int
    shape: tuple[int, int, int]
    read: Callable[[int], Iterator[np.ndarray]]

    def batches(self, size: int) -> Iterator[np.ndarray]:
        """uint8 [k, H, W, C], k up to `size`, or fewer where that would be very much memory."""
        return self.read(max(1, min(size, _MOST_BYTES // int(np.prod(self.shape)))))


def open_images(path: str | os.PathLike) -> ImageSet:
    """The images at a path; UserError if there are none."""
    path = Path(path)
    for recognise, opened in _FORMS:
        if recognise(path):
            return opened(path)
    problem = "is neither an .npz file nor a folder of images" if path.exists() else "does not exist"
    raise UserError(
        f"{path} {problem}; give an .npz file with an array {ARRAY}, or a folder of PNG or JPEG"
        " files, or of cspd-jax sample"
    )


def _open_npz(path: Path) -> ImageSet:
    """An .npz file with uint8 images [N, H, W, C]."""
    with stream_array(path, ARRAY) as stream:
        shape, dtype = stream.shape, stream.dtype
    if len(shape) != 4 or dtype != np.uint8:
        raise UserError(f"{path}: {ARRAY} is {dtype} {list(shape)}; images are uint8 [N, height, width, 3]")
    _check_shape(shape[1:], path)
    if not shape[0]:
        raise UserError(f"{path}: {ARRAY} holds no images")

    def read(size: int) -> Iterator[np.ndarray]:
        with stream_array(path, ARRAY) as stream:
            if stream.shape != shape:
                raise UserError(f"{path} changed while it was being read")
            for start in range(0, shape[0], size):
                yield stream.read(min(size, shape[0] - start))

    return ImageSet(path, shape[0], shape[1:], read)


def _open_samples(folder: Path) -> ImageSet:
    """What `cspd-jax sample` made, verified as it is read."""
    manifest = read_manifest(folder)
    if len(manifest.image_shape) != 3:
        raise UserError(f"{folder} holds tokens without images; make them again with --vae")
    height, width, channels = manifest.image_shape
    _check_shape((height, width, channels), folder)

    def read(size: int) -> Iterator[np.ndarray]:
        pending = np.empty((0, height, width, channels), np.uint8)
        for shard in read_shards(folder):
            assert shard.images is not None
            pending = np.concatenate([pending, shard.images])
            whole = len(pending) // size * size
            yield from (pending[start : start + size] for start in range(0, whole, size))
            pending = pending[whole:]
        if len(pending):
            yield pending

    return ImageSet(folder, manifest.images, (height, width, channels), read)


def _open_pictures(folder: Path) -> ImageSet:
    """A folder of pictures of one size, also in folders below it, in the order of their names, as RGB."""
    files = files_in(folder, SUFFIXES)
    if not files:
        raise UserError(f"{folder} holds no {', '.join(SUFFIXES)} files")
    if len(files) > _MOST_FILES:
        raise UserError(f"{folder} holds {len(files)} pictures; at most {_MOST_FILES} are read")
    shape = _read_picture(files[0], None).shape

    def read(size: int) -> Iterator[np.ndarray]:
        for start in range(0, len(files), size):
            yield np.stack([_read_picture(file, shape) for file in files[start : start + size]])

    return ImageSet(folder, len(files), shape, read)


def _read_picture(file: Path, shape: tuple[int, ...] | None) -> np.ndarray:
    """uint8 [H, W, 3]; UserError unless that is `shape`, if it is given."""
    limits.file_size(file)
    try:
        with Image.open(file, formats=_FORMATS) as opened:
            found = (opened.height, opened.width, 3)
            _check_shape(found, file)
            if shape is not None and found != shape:
                raise UserError(
                    f"{file} is {found[1]}x{found[0]}, but the first picture of the folder is"
                    f" {shape[1]}x{shape[0]}; all must be of one size"
                )
            return np.asarray(eight_bits(opened).convert("RGB"), np.uint8)
    except UserError:
        raise
    except Exception as error:  # Pillow's decoders raise many types
        raise UserError(f"{file} is unreadable ({type(error).__name__})") from None


def _check_shape(shape: tuple[int, ...], where: Path) -> None:
    height, width, channels = shape
    if channels not in (1, 3) or not (height and width) or height * width > _MOST_PIXELS:
        raise UserError(
            f"{where} has images of {width}x{height} pixels and {channels} channels; up to {_MOST_PIXELS}"
            " pixels and 1 or 3 channels are read"
        )


_FORMS: tuple[tuple[Callable[[Path], bool], Callable[[Path], ImageSet]], ...] = (
    (lambda path: path.is_file() and path.suffix == ".npz", _open_npz),
    (is_folder_of_samples, _open_samples),
    (lambda path: path.is_dir(), _open_pictures),
)
