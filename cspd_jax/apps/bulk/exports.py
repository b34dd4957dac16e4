"""Images of a finished folder in the forms that evaluators read: one .npz, or a flat folder of PNGs."""

from __future__ import annotations

import dataclasses
import os
import re
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from cspd_jax._utils.files import scratch_beside, written_beside
from cspd_jax._utils.zip_files import UNREADABLE, open_zip, stream_array
from cspd_jax.apps.bulk import claims
from cspd_jax.apps.bulk.folder import SHARDS, read, read_shard
from cspd_jax.apps.bulk.manifest import Manifest
from cspd_jax.errors import UserError

PNG = "png"
_OWN = ("manifest.json", "report.json", "labels.npy", "gains.npz", SHARDS, claims.FOLDER, PNG)
_ARRAY = "arr_0.npy"


def check_exports(folder: Path, manifest: Manifest, png: bool, npz: Path | None) -> None:
    """UserError for an export that cannot be, before anything is made."""
    if not manifest.image_shape and (png or npz is not None):
        raise UserError("--npz and --png write images, and this job stores tokens alone; add --vae")
    if png and manifest.image_shape[2] not in (1, 3):
        raise UserError(f"a PNG has 1 or 3 channels, and these images have {manifest.image_shape[2]}")
    if npz is not None:
        if not npz.parent.is_dir() and os.path.abspath(npz.parent) != os.path.abspath(folder):
            raise UserError(f"{npz} cannot be written: the folder {npz.parent} does not exist")
        place, inside = Path(os.path.realpath(npz.parent), npz.name), Path(os.path.realpath(folder))
        if own := [name for name in _OWN if place.is_relative_to(inside / name)]:
            there = "is" if place == inside / own[0] else "lies in"
            raise UserError(f"{npz} {there} the folder's own {own[0]}; choose another name for --npz")
        if npz.is_dir() or os.path.abspath(npz) == os.path.abspath(folder):
            raise UserError(f"{npz} is a folder; --npz names a file, for example {npz}.npz")
        if npz.suffix != ".npz":
            raise UserError(f"{npz} is no name of a .npz file; --npz names one, for example {npz}.npz")
        if os.path.lexists(npz) and not (has_npz(manifest, npz) or _has_npz_of_other_size(manifest, npz)):
            raise UserError(f"{npz} exists and holds something else; remove it, or choose another name")


def _has_npz_of_other_size(manifest: Manifest, path: Path) -> bool:
    """Whether the file is this job's from when it asked for fewer images. (The manifest in the folder has
    forgotten that, if an extension was interrupted.)"""
    try:
        with stream_array(path, "arr_0") as array:
            images = array.shape[0]
        return has_npz(dataclasses.replace(manifest, images=images), path)
    except (UserError, OSError, IndexError, KeyError):
        return False


def has_npz(manifest: Manifest, path: Path) -> bool:
    """Whether the file is this job's. It is written whole, with the job's name as the zip file's comment."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return False
        with open_zip(path) as archive:
            return archive.comment == _comment(manifest)
    except UNREADABLE:
        return False


def _comment(manifest: Manifest) -> bytes:
    return f"cspd-jax samples {manifest.job}".encode()


def write_npz(folder: Path, manifest: Manifest, path: Path) -> None:
    """`arr_0`, uint8 [N, H, W, C] in the order of the images. One shard is held at a time."""
    shape = (manifest.images, *manifest.image_shape)
    with written_beside(path) as partial:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            archive.comment = _comment(manifest)
            with archive.open(zipfile.ZipInfo(_ARRAY), "w", force_zip64=True) as member:
                described = {"descr": "|u1", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(member, described)
                for shard in read(folder):
                    assert shard.images is not None
                    member.write(np.ascontiguousarray(shard.images).data)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())


def missing_pngs(folder: Path, manifest: Manifest) -> set[int]:
    """Numbers of the images without a PNG. One that is there is whole: it was renamed when it was."""
    try:
        names = os.listdir(folder / PNG)
    except OSError:
        names = []
    there = {int(found[1]) for found in (re.fullmatch(r"(\d{6,10})\.png", name) for name in names) if found}
    return set(range(manifest.first, manifest.first + manifest.images)) - there


def remove_damaged(folder: Path, manifest: Manifest, png: bool, npz: Path | None) -> int:
    """Removes the PNGs that do not show what the shards hold, and returns how many there were; and the .npz,
    which takes as long to compare as to make."""
    if npz is not None and has_npz(manifest, npz):
        npz.unlink()
    removed = 0
    for index in range(manifest.shards) if png else ():
        shard = read_shard(folder, manifest, index)
        assert shard.images is not None
        for number, image in enumerate(shard.images, shard.first):
            file = folder / PNG / f"{number:06d}.png"
            if file.exists() and not _shows(file, image):
                file.unlink()
                removed += 1
    return removed


def _shows(file: Path, image: np.ndarray) -> bool:
    """Whether a PNG has these pixels [H, W, C]."""
    try:
        with Image.open(file, formats=("PNG",)) as picture:
            same_size = picture.size == image.shape[1::-1]
            return same_size and np.array_equal(np.asarray(picture).reshape(image.shape), image)
    except (OSError, ValueError, SyntaxError):  # what Pillow raises
        return False


def write_pngs(folder: Path, manifest: Manifest) -> None:
    """The PNGs that are not there: DIR/png/000000.png, by the number of the image."""
    missing = missing_pngs(folder, manifest)
    (folder / PNG).mkdir(exist_ok=True)
    with scratch_beside(folder / PNG) as scratch:
        for index in range(manifest.shards):
            numbers = missing.intersection(range(*manifest.bounds_of(index)))
            if not numbers:
                continue
            shard = read_shard(folder, manifest, index)
            assert shard.images is not None
            for number in sorted(numbers):
                image = shard.images[number - shard.first]
                Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(scratch, format="PNG")
                scratch.replace(folder / PNG / f"{number:06d}.png")
