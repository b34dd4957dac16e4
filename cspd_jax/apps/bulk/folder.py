"""The shards of a folder of samples: written whole, recorded with their SHA-256, and read as a stranger's."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cspd_jax._utils.files import as_path, file_sha256
from cspd_jax._utils.json_files import read_object
from cspd_jax._utils.typed import read_fields
from cspd_jax._utils.zip_files import read_arrays
from cspd_jax.apps.bulk.manifest import Manifest, read_manifest
from cspd_jax.errors import UserError

SHARDS = "shards"
_RECORD = re.compile(r"(\d{5,10})\.json")
_RECORD_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class Record:
    """What is known of a shard that is there. Counts are of the whole shard.

    first: number of its first image.
    images: how many it has.
    bytes: of its file.
    sha256: of its file.
    seconds: that it took, compilation aside.
    compile_seconds: of them that were compilation.
    non_finite: images that hold NaN or infinity; they are black there.
    rounds: until an image was complete, summed over the images.
    target_backbone, target_head, draft_backbone, draft_head: network calls one after the other.
    tested, accepted: drafted tokens.
    chain_tested, chain_accepted: drafted denoising steps.
    truncated: draws from a residual that were given up.
    process: which made it: host and number.
    device: which made it.
    jax: the version that made it.
    """

    first: int
    images: int
    bytes: int
    sha256: str
    seconds: float
    compile_seconds: float
    non_finite: int
    rounds: float
    target_backbone: int
    target_head: int
    draft_backbone: int
    draft_head: int
    tested: int
    accepted: int
    chain_tested: int
    chain_accepted: int
    truncated: int
    process: str
    device: str
    jax: str


class Shard(NamedTuple):
    """Images of a folder, k of them.

    first: number of the first one.
    images: uint8 [k, H, W, C]; None where only tokens are stored.
    labels: int32 [k]; -1 is "no class".
    finite: bool [k], whether the model gave neither NaN nor infinity.
    tokens: float32 [k, L, d]; None where they are not stored.
    """

    first: int
    images: np.ndarray | None
    labels: np.ndarray
    finite: np.ndarray
    tokens: np.ndarray | None


def shard_path(folder: Path, index: int) -> Path:
    return folder / SHARDS / f"{index:05d}.npz"


def record_path(folder: Path, index: int) -> Path:
    return folder / SHARDS / f"{index:05d}.json"


def write_shard(folder: Path, index: int, scratch: Path, shard: Shard, facts: Mapping[str, Any]) -> Record:
    """The arrays, and after them the record that makes them count. scratch: a path to write at first.

    facts: the fields of the record that the file itself does not tell.
    """
    arrays: dict[str, Any] = {"labels": shard.labels, "finite": shard.finite}
    if shard.images is not None:
        arrays = {"arr_0": shard.images, **arrays}
    if shard.tokens is not None:
        arrays["tokens"] = shard.tokens
    with open(scratch, "wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    record = Record(
        first=shard.first,
        images=len(shard.labels),
        bytes=scratch.stat().st_size,
        sha256=file_sha256(scratch),
        **facts,
    )
    scratch.replace(shard_path(folder, index))
    scratch.write_text(json.dumps(dataclasses.asdict(record)) + "\n", encoding="utf-8")
    scratch.replace(record_path(folder, index))
    return record


def read_record(folder: Path, manifest: Manifest, index: int) -> Record:
    """The record of a shard; UserError if it is absent, or not of this shard."""
    path = record_path(folder, index)
    values = read_object(path, _RECORD_BYTES)
    record = Record(**read_fields(Record, values, f"{path}: the record"))
    first, end = manifest.bounds_of(index)
    if (record.first, record.images) != (first, end - first):
        raise UserError(f"{path} is of {record.images} images from {record.first}, not of shard {index}")
    counts = [v for v in dataclasses.astuple(record) if isinstance(v, int | float)]
    if min(counts) < 0 or not re.fullmatch("[0-9a-f]{64}", record.sha256):
        raise UserError(f"{path} holds numbers that no shard has")
    return record


def is_done(folder: Path, manifest: Manifest, index: int) -> bool:
    """Whether a shard counts: its record is there, and its file has the size that the record says."""
    try:
        return shard_path(folder, index).stat().st_size == read_record(folder, manifest, index).bytes
    except (UserError, OSError):
        return False


def done_shards(folder: Path, manifest: Manifest, known: frozenset[int] | set[int] = frozenset()) -> set[int]:
    """The shards that count; those `known` to are not looked at again."""
    try:
        names = os.listdir(folder / SHARDS)
    except OSError:
        return set()
    found = {int(match[1]) for match in map(_RECORD.fullmatch, names) if match}
    new = (i for i in found - known if i < manifest.shards and is_done(folder, manifest, i))
    return {*known, *new}


def images_in(manifest: Manifest, shards: set[int]) -> int:
    return sum(end - first for first, end in map(manifest.bounds_of, shards))


def is_damaged(folder: Path, manifest: Manifest, index: int) -> bool:
    """Whether the file of a shard with a record is not the one that was written."""
    return file_sha256(shard_path(folder, index)) != read_record(folder, manifest, index).sha256


def read_shard(folder: Path, manifest: Manifest, index: int) -> Shard:
    """A shard as it was written; UserError if it is absent or anything about it is not as its record says."""
    path = shard_path(folder, index)
    record = read_record(folder, manifest, index)
    count = record.images
    wanted: dict[str, tuple[tuple[int, ...], Any]] = {"labels": ((count,), np.int32)}
    wanted["finite"] = ((count,), np.bool_)
    if manifest.image_shape:
        wanted["arr_0"] = ((count, *manifest.image_shape), np.uint8)
    if manifest.tokens:
        wanted["tokens"] = ((count, *manifest.token_shape), np.float32)
    most = {name: math.prod(shape) * np.dtype(dtype).itemsize for name, (shape, dtype) in wanted.items()}
    again = "cspd-jax sample with --verify-files makes it again"
    if sum(most.values()) > record.bytes:  # nothing in it is compressed
        raise UserError(f"{path} is too small for {count} images; {again}")
    try:
        whole = path.stat().st_size == record.bytes and file_sha256(path) == record.sha256
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); {again}") from None
    if not whole:
        raise UserError(f"{path} is damaged: it has another SHA-256 than when it was written; {again}")
    arrays = read_arrays(path, most)
    for name, (shape, dtype) in wanted.items():
        if arrays[name].shape != shape or arrays[name].dtype != dtype:
            told = f"{arrays[name].dtype} {list(arrays[name].shape)}"
            raise UserError(f"{path}: {name} is {told}; it must be {np.dtype(dtype)} {list(shape)}")
    return Shard(record.first, arrays.get("arr_0"), arrays["labels"], arrays["finite"], arrays.get("tokens"))


def read(folder: str | os.PathLike) -> Iterator[Shard]:
    """The shards of a finished job, in the order of the images, each verified as it is read.

    UserError for a folder that is not of samples, is unfinished or is damaged. One shard is held at a time.
    """
    folder = as_path(folder)
    manifest = read_manifest(folder)
    for index in range(manifest.shards):
        if not record_path(folder, index).exists():
            done = images_in(manifest, done_shards(folder, manifest))
            raise UserError(
                f"{folder} holds {done} of {manifest.images} images; repeat the cspd-jax sample command that"
                " began it, and it makes the rest"
            )
        yield read_shard(folder, manifest, index)
