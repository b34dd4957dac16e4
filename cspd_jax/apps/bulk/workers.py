"""Makes the images of a job in a folder, together with whoever else does."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from cspd_jax._utils.files import as_path, file_sha256, scratch_beside, written_beside
from cspd_jax._utils.zip_files import read_arrays
from cspd_jax.apps.bulk import claims as claims_of
from cspd_jax.apps.bulk import exports
from cspd_jax.apps.bulk import folder as folders
from cspd_jax.apps.bulk import manifest as manifests
from cspd_jax.apps.bulk.claims import Claims
from cspd_jax.apps.bulk.folder import Shard
from cspd_jax.apps.bulk.job import Job, drafters, with_drafters
from cspd_jax.apps.bulk.manifest import Manifest, read_manifest
from cspd_jax.apps.bulk.progress import Progress
from cspd_jax.apps.bulk.report import write_report
from cspd_jax.apps.bulk.shard import make_shard, num_steps
from cspd_jax.errors import UserError, check_whole, shown
from cspd_jax.image.generation import PIECES
from cspd_jax.image.plan import Plan

LABELS = "labels.npy"
GAINS = "gains.npz"
_WAIT = 0.5  # seconds between looks at what other processes do
_DIVERGED = 8  # images of a shard that are all NaN: no accident


def check_folder(folder: str | os.PathLike) -> None:
    """UserError unless the folder is new, empty, or of samples."""
    folder = Path(folder)
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"{folder} is a file; samples need a folder")
    if not folder.is_dir() or manifests.is_folder_of_samples(folder):
        return
    ours = {claims_of.FOLDER, LABELS, GAINS}
    others = [p for p in folder.iterdir() if p.name not in ours and not p.name.endswith(".partial")]
    if others and not manifests.is_folder_of_samples(folder):  # which another process may just have begun
        raise UserError(f"{folder} is not empty and holds no samples; choose another --out")


def run(
    job: Job,
    folder: str | os.PathLike,
    *,
    verify: bool = False,
    png: bool = False,
    npz: str | os.PathLike | None = None,
    progress: bool = False,
    tell: Callable[[str], object] | None = None,
    start: int | None = None,
) -> dict[str, Any]:
    """Makes what is missing of a job in `folder`, waits for what others are making, and returns the report.

    It can be interrupted at any time and called again with the same job, by several processes at once; and
    with more images, which extends what is there.

    verify: hash what is there, compare the PNGs with it, and make again what is damaged, and the .npz.
    png: write folder/png/000000.png, ... too.
    npz: write this file too, as the ADM evaluator reads it.
    progress: show a bar.
    tell: is given sentences about what is going on.
    start: the shard to begin with; None is a random one, so that processes rarely meet.
    """
    if not isinstance(job, Job):
        raise UserError(f"job is {shown(job)}; it must be a Job(...)")
    for name, given in (("verify", verify), ("png", png), ("progress", progress)):
        if not isinstance(given, bool):
            raise UserError(f"{name} is {shown(given)}; it must be True or False")
    if tell is not None and not callable(tell):
        raise UserError(f"tell is {shown(tell)}; it must be a function of a sentence")
    if start is not None:
        check_whole("start", start, 0)
    folder, tell = as_path(folder), tell or (lambda sentence: None)
    npz = None if npz is None else as_path(npz, "npz")
    check_folder(folder)
    plan = job.plan()
    manifest = job.manifest(plan)
    exports.check_exports(folder, manifest, png, npz)
    with _telling(folder, manifest), claims_of.opened(folder) as claims:
        with claims.alone():
            manifest, plan = _settled(job, plan, manifest, folder)
        (folder / folders.SHARDS).mkdir(exist_ok=True)
        done = folders.done_shards(folder, manifest)
        if done:
            tell(f"continuing: {len(done)} of {manifest.shards} shards are there")
        if verify:
            done = _verified(folder, manifest, claims, done, tell)
        with Progress(folder, manifest, done, progress) as bar:
            _make_all(job, plan, manifest, folder, claims, start, bar)
        report = write_report(folder, manifest)
        _export(folder, manifest, claims, png, npz, verify, tell)
        return report


def _export(
    folder: Path,
    manifest: Manifest,
    claims: Claims,
    png: bool,
    npz: Path | None,
    verify: bool,
    tell: Callable[[str], object],
) -> None:
    """Writes the PNGs and the .npz that are asked for, and are not there; and with `verify` damaged ones."""
    png = png or (verify and (folder / exports.PNG).is_dir() and bool(manifest.image_shape))
    if verify and (png or npz is not None):
        with claims.alone():
            removed = exports.remove_damaged(folder, manifest, png, npz)
        if removed:
            tell(f"{removed} PNGs did not show what the shards hold; they are written again")
    if png:
        tell(f"writing {folder / exports.PNG}")
        finished = lambda: not exports.missing_pngs(folder, manifest)
        _once(claims, "png", finished, lambda: exports.write_pngs(folder, manifest))
    if npz is not None:
        tell(f"writing {npz}")
        finished = lambda: exports.has_npz(manifest, npz)
        _once(claims, "npz", finished, lambda: exports.write_npz(folder, manifest, npz))


@contextlib.contextmanager
def _telling(folder: Path, manifest: Manifest) -> Iterator[None]:
    """What the system refuses, in a sentence that says what is there and how to go on."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        where = error.filename or folder
        done = folders.images_in(manifest, folders.done_shards(folder, manifest))
        raise UserError(
            f"{where} cannot be written: {error.strerror or error}; {done} of {manifest.images} images are in"
            f" {folder}, and the same command continues"
        ) from error


def _settled(job: Job, plan: Plan, manifest: Manifest, folder: Path) -> tuple[Manifest, Plan]:
    """The manifest of the folder, written if it is new, and the plan with the gains that are kept there."""
    if manifests.is_folder_of_samples(folder):
        stored = read_manifest(folder)
        manifest.check_same(stored, folder)
        plan = _with_stored_gains(plan, stored, folder)
        if stored.images < manifest.images:  # the last shard, if it was short, no longer counts
            stored = dataclasses.replace(stored, images=manifest.images)
            _write_manifest(folder, stored)
        return stored, plan
    check_folder(folder)
    if manifest.labels["listed"]:
        buffer = io.BytesIO()
        np.save(buffer, np.asarray(job.turn, "<i4"))
        _write(folder / LABELS, buffer.getvalue())
    gains = drafters(plan)
    if gains:
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {f"gain_{i}": array for i, array in enumerate(gains)}
        np.savez(buffer, **arrays)
        _write(folder / GAINS, buffer.getvalue())
        fields = {**vars(manifest), "gains_sha256": hashlib.sha256(buffer.getvalue()).hexdigest()}
        manifest = Manifest(**fields)
    _write_manifest(folder, manifest)
    return manifest, plan


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    _write(folder / manifests.NAME, (json.dumps(manifest.to_json(), indent=2) + "\n").encode())


def _write(path: Path, content: bytes) -> None:
    with written_beside(path) as partial, open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _with_stored_gains(plan: Plan, stored: Manifest, folder: Path) -> Plan:
    """Drafters fitted on another machine may have other last bits, so all take the first one's."""
    own = drafters(plan)
    if not own:
        return plan
    path = folder / GAINS
    if not path.is_file() or file_sha256(path) != stored.gains_sha256:
        raise UserError(f"{path} is not the file that the job was begun with; choose another --out")
    arrays = read_arrays(path, {f"gain_{i}": array.nbytes for i, array in enumerate(own)})
    return with_drafters(plan, list(arrays.values()))


def _verified(folder: Path, manifest: Manifest, claims: Claims, done: set[int], tell: Callable) -> set[int]:
    """The shards that are as they were written. The records of the others are removed."""
    sound = set(done)
    for index in tqdm(sorted(done), desc="verifying", unit="shard", mininterval=0.5, disable=len(done) < 50):
        if not folders.is_damaged(folder, manifest, index):
            continue
        tell(f"{folders.shard_path(folder, index)} is damaged; it is made again")
        sound.discard(index)
        with claims.claim(_name(index)) as mine:
            if mine and folders.is_done(folder, manifest, index):
                folders.record_path(folder, index).unlink(missing_ok=True)
    tell(f"{len(sound)} of {len(done)} shards are as they were written")
    return sound


def _name(index: int) -> str:
    return f"{index:05d}"


def _make_all(
    job: Job, plan: Plan, manifest: Manifest, folder: Path, claims: Claims, start: int | None, bar: Progress
) -> None:
    """Makes every shard that nobody has made or is making, until all are there."""
    count = manifest.shards
    start = secrets.randbelow(count) if start is None else start % count
    order = [*range(start, count), *range(start)]
    with scratch_beside(folder / folders.SHARDS) as scratch:
        while left := [index for index in order if index not in bar.done]:
            idle = True
            for index in left:
                if folders.is_done(folder, manifest, index):
                    continue
                with claims.claim(_name(index)) as mine:
                    if not mine or folders.is_done(folder, manifest, index):
                        continue
                    shard, facts = _made(job, plan, manifest, index, bar)
                    _check_finite(shard)
                    folders.write_shard(folder, index, scratch, shard, facts)
                idle = False
                bar.look()
            if idle:
                time.sleep(_WAIT)  # the rest is being made by others
            bar.look()


def _check_finite(shard: Shard) -> None:
    if len(shard.finite) >= _DIVERGED and not shard.finite.any():
        raise UserError(
            f"all {len(shard.finite)} images from number {shard.first} on came out as NaN or infinity: the"
            " model diverged; try a lower --temperature or --cfg, or --steps ddim100"
        )


def _made(job: Job, plan: Plan, manifest: Manifest, index: int, bar: Progress) -> tuple[Shard, dict]:
    first, end = manifest.bounds_of(index)
    steps, known = num_steps(plan, first, end), 0

    def on_step(new: int) -> None:
        nonlocal known
        known += new
        bar.step(index, known, steps)

    return make_shard(job, plan, first, end, on_step, PIECES if bar.watched else 1)


def _once(claims: Claims, name: str, finished: Callable[[], bool], make: Callable[[], object]) -> None:
    """Has one process make something, and the others wait for it."""
    while not finished():
        with claims.claim(name) as mine:
            if mine and not finished():
                make()
        if not mine:
            time.sleep(_WAIT)


def images_done(folder: str | os.PathLike) -> tuple[int, int]:
    """(images that are there, images of the whole job) of a folder; (0, 0) if it is none of samples."""
    if not manifests.is_folder_of_samples(folder):
        return 0, 0
    manifest = read_manifest(folder)
    return folders.images_in(manifest, folders.done_shards(Path(folder), manifest)), manifest.images
