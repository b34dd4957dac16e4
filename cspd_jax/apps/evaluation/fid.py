"""The field's own figures of a set of images: FID, sFID, Inception score, precision and recall."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from cspd_jax.apps.evaluation import frechet
from cspd_jax.apps.evaluation.features import FeatureNetwork, features
from cspd_jax.apps.evaluation.frechet import Moments
from cspd_jax.apps.evaluation.image_files import ImageSet
from cspd_jax.apps.evaluation.inception_score import SPLIT, InceptionScore, Score
from cspd_jax.apps.evaluation.manifold import NEIGHBOURS, precision_recall
from cspd_jax.apps.evaluation.reference import Reference, Statistics
from cspd_jax.apps.evaluation.statistics import FRECHET, wilson
from cspd_jax.errors import UserError
from cspd_jax.networks.inception import RESIZE
from cspd_jax.reports.image import device, versions

PARTS = 5  # of the jackknife; image i belongs to part i mod 5
MOST_NEIGHBOURS = 50_000  # images of a set whose features are kept for precision and recall
_OTHER = "(weights not the published file)"

DEFINITIONS = {
    "frechet": f"{FRECHET}; biased upwards by an amount of order 1 / images",
    "standard_error": f"jackknife over {PARTS} parts of the samples, the reference taken as exact",
    "inception_score": f"average over splits of {SPLIT} images in their order, logits without the bias",
    "precision_recall": f"balls to the {NEIGHBOURS}. neighbour in the features of FID, in float32;"
    " intervals count the other set as exact",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """How images are looked at.

    batch: how many at once; the result does not depend on it but for rounding.
    resize: tf1 or pytorch-fid.
    """

    batch: int = 100
    resize: str = "tf1"

    def __post_init__(self):
        if self.resize not in RESIZE:
            raise UserError(f"images are resized as {' or '.join(RESIZE)}, not {self.resize!r}")


class Seen(NamedTuple):
    """What the network saw in a set of images.

    statistics: of all images.
    parts: moments of the features of FID, of each fifth.
    score: the Inception score.
    kept: features of FID of the first `MOST_NEIGHBOURS` images, float32; empty unless asked for.
    """

    statistics: Statistics
    parts: list[Moments]
    score: Score
    kept: np.ndarray


def look(
    images: ImageSet, network: FeatureNetwork, settings: Settings, *, keep: bool, progress: bool = False
) -> Seen:
    """Runs the network over all images once."""
    if images.count < 2:
        raise UserError(f"{images.path} holds one image; distances need at least 2")
    config = network.config
    parts = [Moments(config.features) for _ in range(PARTS)]
    spatial, score = Moments(config.spatial), InceptionScore(config.classes)
    kept = np.empty((min(images.count, MOST_NEIGHBOURS) if keep else 0, config.features), np.float32)
    seen = 0
    found: Any
    for found in features(network, images, settings.batch, settings.resize, progress):
        for number, part in enumerate(parts):
            part.add(found.pool[(number - seen) % PARTS :: PARTS])
        spatial.add(found.spatial)
        score.add(found.unbiased)
        kept[seen : seen + len(found.pool)] = found.pool[: max(0, len(kept) - seen)]
        seen += len(found.pool)
    whole = frechet.joined(parts).gaussian()
    statistics = Statistics(whole, spatial.gaussian(), images.count, network.identity(settings.resize))
    return Seen(statistics, parts, score.score(), kept)


def check_match(against: Reference, network: FeatureNetwork, settings: Settings) -> None:
    """UserError if stored statistics are of other features than the network's."""
    stored = against.statistics
    if stored is None:
        return
    if len(stored.pool.mean) != network.config.features:
        raise UserError(
            f"{against.path} has statistics of {len(stored.pool.mean)} features, and {network.path} gives"
            f" {network.config.features}"
        )
    if stored.spatial is not None and len(stored.spatial.mean) != network.config.spatial:
        raise UserError(
            f"{against.path} has statistics of {len(stored.spatial.mean)} spatial features, and"
            f" {network.path} gives {network.config.spatial}"
        )
    if stored.network and stored.network != network.identity(settings.resize):
        raise UserError(
            f"{against.path} was made by other weights or another --resize ({stored.network}) than these"
            f" ({network.identity(settings.resize)}); make it again with --save-statistics"
        )


def evaluate(
    samples: ImageSet,
    against: Reference | None,
    network: FeatureNetwork,
    settings: Settings = Settings(),
    progress: bool = True,
) -> tuple[dict[str, Any], Statistics]:
    """The report, and the statistics of the samples. Without `against` only the score is reported."""
    if against is not None:
        check_match(against, network, settings)
    compared = against is not None and against.images is not None
    seen = look(samples, network, settings, keep=compared, progress=progress)
    published, name = network.published, _namer(network.published)
    report: dict[str, Any] = {
        "samples": {"path": str(samples.path), "images": samples.count, "shape": list(samples.shape)},
        "network": {
            "path": str(network.path),
            "sha256": network.sha256,
            "published": published,
            "resize": settings.resize,
        },
        "inception_score": {"name": name("Inception score"), **seen.score._asdict()},
    }
    if against is not None:
        report |= _against(samples, against, network, settings, seen, progress)
    notes = _notes(samples, against, network)
    report |= {"notes": notes, "definitions": DEFINITIONS, "versions": versions(), "device": device()}
    return report, seen.statistics


def _against(
    samples: ImageSet,
    against: Reference,
    network: FeatureNetwork,
    settings: Settings,
    seen: Seen,
    progress: bool,
) -> dict[str, Any]:
    """What is measured by comparison."""
    name, other = _namer(network.published), None
    if against.images is not None:
        other = look(against.images, network, settings, keep=True, progress=progress)
    reference = against.statistics
    if reference is None:
        assert other is not None  # a reference without statistics has images, which were looked at
        reference = other.statistics
    root = frechet.rooted(reference.pool)
    report: dict[str, Any] = {
        "against": {
            "path": str(against.path),
            "images": against.count,
            "statistics": "stored" if against.statistics else "computed",
        },
        "frechet": {
            "name": name("FID"),
            "value": frechet.distance(root, seen.statistics.pool),
            "standard_error": frechet.standard_error(seen.parts, root),
        },
        "spatial": None,
        "precision": None,
        "recall": None,
    }
    if reference.spatial is not None and seen.statistics.spatial is not None:
        value = frechet.distance(reference.spatial, seen.statistics.spatial)
        report["spatial"] = {"name": name("sFID"), "value": value}
    if other is not None and min(len(seen.kept), len(other.kept)) > NEIGHBOURS:
        found = precision_recall(seen.kept, other.kept, progress=progress)
        for what, inside, rows in (
            ("precision", found.precise, seen.kept),
            ("recall", found.recalled, other.kept),
        ):
            report[what] = {
                "name": name(what),
                "value": inside / len(rows),
                "interval_95": wilson(inside, len(rows)),
                "images": len(rows),
            }
    return report


_OTHER_NAMES = {
    "FID": f"Fréchet distance of Inception features {_OTHER}",
    "sFID": f"Fréchet distance of spatial Inception features {_OTHER}",
    "Inception score": f"score of Inception logits {_OTHER}",
    "precision": f"precision in Inception features {_OTHER}",
    "recall": f"recall in Inception features {_OTHER}",
}


def _namer(published: bool):
    """What a figure may be called: FID is a figure of the published weights and of no others."""
    return lambda name: name if published else _OTHER_NAMES[name]


def _notes(samples: ImageSet, against: Reference | None, network: FeatureNetwork) -> list[str]:
    """Sentences without which the figures would mislead."""
    notes, least = [], network.config.features + 1
    if not network.published:
        notes.append(
            f"the weights are not those of the published file (SHA-256 {network.sha256[:8]}... in place of"
            " 6726825d...), so no figure can be compared with published ones"
        )
    if against is None:
        return notes
    sides = [("samples", samples.count), ("reference", against.count)]
    for what, count in sides:
        if count is not None and count < least:
            notes.append(
                f"the {what} are {count:,} images, fewer than the {least:,} that a covariance of"
                f" {least - 1:,} features needs: it is singular, and the distance is biased upwards"
            )
    if against.count is None:
        notes.append(f"{against.path} does not say how many images its statistics are of")
    if against.statistics is not None and not against.statistics.network:
        notes.append(f"{against.path} does not say which network its statistics are of")
    if against.images is None:
        notes.append(f"{against.path} has statistics only: precision and recall need its images")
    elif against.images.shape != samples.shape:
        notes.append(
            f"the samples are {_size(samples)} and the reference {_size(against.images)}; both are resized"
        )
    if against.statistics is not None and against.statistics.spatial is None:
        notes.append(f"{against.path} has no statistics of spatial features, which sFID needs")
    if samples.shape[-1] == 1:
        notes.append("the samples are grey; the network sees three equal channels")
    return notes


def _size(images: ImageSet) -> str:
    height, width, channels = images.shape
    return f"{width}x{height} with {channels} channels"
