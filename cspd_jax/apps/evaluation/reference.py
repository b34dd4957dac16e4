"""What samples are compared with: images, or the mean and covariance of their features in an .npz file.

pytorch-fid writes `mu` and `sigma`; ADM's reference batches have `mu_s` and `sigma_s` of the spatial features
besides, and images in `arr_0`. Files written here add how many images there were and which network saw them.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np

from cspd_jax._utils.files import write_arrays, write_errors
from cspd_jax._utils.zip_files import array_names, read_arrays
from cspd_jax.apps.evaluation.frechet import Gaussian
from cspd_jax.apps.evaluation.image_files import ARRAY, ImageSet, open_images
from cspd_jax.errors import UserError

_MOST_FEATURES = 4096
_NUMBERS = 8  # bytes
_TEXT = 1024  # bytes
_ASYMMETRY = 1e-4  # relative to the largest entry; float32 statistics are off by less


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The features of a set of images.

    pool: of the 2048 features of FID.
    spatial: of the 2023 features of sFID; None if the file has none.
    images: how many there were; None if the file does not say.
    network: the SHA-256 of the weights and how images were resized, or empty.
    """

    pool: Gaussian
    spatial: Gaussian | None = None
    images: int | None = None
    network: str = ""


@dataclasses.dataclass(frozen=True)
class Reference:
    """What samples are compared with. At least one of the two is there.

    path: the file or folder.
    statistics: stored ones.
    images: from which statistics and neighbours can be computed.
    """

    path: Path
    statistics: Statistics | None
    images: ImageSet | None

    @property
    def count(self) -> int | None:
        """How many images the statistics are of; None if nothing says so."""
        if self.statistics is not None:
            return self.statistics.images
        return self.images.count if self.images else None


def open_reference(path: str | os.PathLike) -> Reference:
    """A set of images, a file of statistics, or a file that has both."""
    path = Path(path)
    if not (path.is_file() and path.suffix == ".npz"):
        return Reference(path, None, open_images(path))
    names = array_names(path)
    statistics = read_statistics(path) if "mu" in names else None
    images = open_images(path) if ARRAY in names or statistics is None else None
    return Reference(path, statistics, images)


def read_statistics(path: str | os.PathLike) -> Statistics:
    """The statistics in an .npz file, checked, as float64."""
    names = array_names(path)
    spatial = _read_gaussian(path, "mu_s", "sigma_s") if "mu_s" in names else None
    told = {"images": _NUMBERS, "network": _TEXT}
    stored = read_arrays(path, {name: most for name, most in told.items() if name in names})
    images, network = stored.get("images"), stored.get("network")
    if images is not None and (images.shape != () or images.dtype.kind not in "iu" or images < 1):
        raise UserError(f"{path}: images must be one positive whole number")
    if network is not None and (network.shape != () or network.dtype.kind != "U"):
        raise UserError(f"{path}: network must be one text")
    return Statistics(
        _read_gaussian(path, "mu", "sigma"),
        spatial,
        None if images is None else int(images),
        "" if network is None else str(network),
    )


def _read_gaussian(path: str | os.PathLike, mean_name: str, covariance_name: str) -> Gaussian:
    most = {mean_name: _NUMBERS * _MOST_FEATURES, covariance_name: _NUMBERS * _MOST_FEATURES**2}
    mean, covariance = read_arrays(path, most).values()
    where = f"{path}: {mean_name} and {covariance_name}"
    if mean.dtype.kind != "f" or covariance.dtype.kind != "f":
        raise UserError(f"{where} are {mean.dtype} and {covariance.dtype}; they must be floating point")
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)) or not len(mean):
        raise UserError(
            f"{where} have shapes {list(mean.shape)} and {list(covariance.shape)}, not [F] and [F, F]"
        )
    mean, covariance = mean.astype(np.float64), covariance.astype(np.float64)
    if not np.isfinite(mean).all() or not np.isfinite(covariance).all():
        raise UserError(f"{where} hold NaN or infinity")
    largest = np.abs(covariance).max()
    if np.abs(covariance - covariance.T).max() > _ASYMMETRY * largest or covariance.diagonal().min() < 0:
        raise UserError(
            f"{path}: {covariance_name} is no covariance: not symmetric, or a variance is negative"
        )
    return Gaussian(mean, (covariance + covariance.T) / 2)


def write_statistics(path: str | os.PathLike, statistics: Statistics) -> None:
    """A file that pytorch-fid and, if the spatial features are there, ADM's evaluator read too."""
    arrays: dict = {"mu": statistics.pool.mean, "sigma": statistics.pool.covariance}
    if statistics.spatial is not None:
        arrays |= {"mu_s": statistics.spatial.mean, "sigma_s": statistics.spatial.covariance}
    if statistics.images is not None:
        arrays["images"] = np.int64(statistics.images)
    with write_errors(path):
        write_arrays(path, **arrays, network=statistics.network)
