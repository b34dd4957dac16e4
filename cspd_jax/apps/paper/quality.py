"""Table 2: the quality of the images, whether they have the target's distribution, and what that
test sees."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from cspd_jax.apps.evaluation.equality import FALSE_ALARM, p_values
from cspd_jax.apps.paper import published
from cspd_jax.apps.paper.cells import Cell
from cspd_jax.apps.paper.experiment import Experiment, Results, Table, Value
from cspd_jax.apps.paper.figures_of_merit import fid, fid_names, of_the_domain
from cspd_jax.apps.paper.images import ALONE
from cspd_jax.apps.paper.setup import Setup
from cspd_jax.apps.paper.variants import OFFICIAL, PAPER, PATH, PLAIN, SELF, available
from cspd_jax.image.pixels import to_images
from cspd_jax.reports.charts import lines, stacked

_IMAGES = {1.0: 100, 3.0: 50}  # by guidance
_BATCH = 50
# Few drafts take the least arithmetic, and exactness does not depend on how many there are.
_WAYS: dict[str, dict[str, Any]] = {
    "plain (control)": PLAIN,
    "official: the released runner": {**OFFICIAL, "gamma": 8},
    "paper: Algorithm 1": {**PAPER, "gamma": 1},
    "path, by the draft model": {**PATH, "gamma": 1},
    "self": {**SELF, "gamma": 2},
}
# Of the power of the tests: shares of the images that are replaced by the draft's, and noise on the tokens.
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
_NOISE = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
_TESTS = ("moments", "energy", "classifier")


def _batches(setup: Setup, options: dict[str, Any], number: int, scale: float, **more: Any) -> list[Cell]:
    """The images of a way; `number` tells the keys of ways apart, so that no two share their noise."""
    wanted = setup.images or _IMAGES[scale]
    size = min(wanted, max(_BATCH, setup.side))
    return [
        setup.cell(
            options,
            images=min(size, wanted - first),
            first=first,
            seed=setup.seed + number,
            cfg=scale,
            **more,
        )
        for first in range(0, wanted, size)
    ]


def _rows(setup: Setup, scale: float) -> dict[str, list[Cell]]:
    ways = available(_WAYS, setup.draft is not None)
    rows = {name: _batches(setup, way, 1001 + i, scale) for i, (name, way) in enumerate(ways.items())}
    if setup.draft is not None:
        rows[ALONE] = _batches(setup, PLAIN, 2001, scale, by_draft=True)
    return rows


def _reference(setup: Setup, scale: float) -> list[Cell]:
    return _batches(setup, PLAIN, 1000, scale)


def _cells(setup: Setup) -> list[Cell]:
    found = []
    for scale in _IMAGES:
        rows = _rows(setup, scale)
        found += [*_reference(setup, scale), *(cell for cells in rows.values() for cell in cells)]
    return found


def _tokens(results: Results, cells: list[Cell]) -> np.ndarray:
    """[N, L d]"""
    tokens = results.arrays_of(cells, "tokens")
    return tokens.reshape(len(tokens), -1)


def _key(results: Results, *several: list[Cell]) -> str:
    keys = [cell.key(results.setup.models) for cells in several for cell in cells]
    return keys[0] + "-" + "".join(key[:3] for key in keys)[:60]


def _tested(results: Results, cells: list[Cell], reference: list[Cell]) -> dict[str, float]:
    labels = _labels(results.setup, cells)

    def make():
        return p_values(_tokens(results, cells), _tokens(results, reference), labels)

    return results.store.derived(f"equal-{_key(results, cells, reference)}", make)


def _labels(setup: Setup, cells: list[Cell]) -> np.ndarray:
    return np.concatenate([cell.first + np.arange(cell.images) for cell in cells]) % (
        setup.target.config.num_classes
    )


def _tables(results: Results) -> list[Table]:
    setup = results.setup
    rows: list[list[Value]] = []
    for scale in _IMAGES:
        reference = _reference(setup, scale)
        for name, cells in _rows(setup, scale).items():
            rows.append(_line(results, name, scale, cells, reference))
    columns = (
        "way",
        "exact or lossy",
        "guidance",
        "images",
        "right class (words: spelt right)",
        "Fréchet, own features",
        "p, moments",
        "p, energy",
        "p, classifier",
        "refuted",
        *fid_names(results.setup),
    )
    note = (
        "Each way against as many plain images of other keys, all with noise in the last denoising step (the"
        f" released runner: without); a p of at most {FALSE_ALARM:g} refutes that both have one distribution."
        " Fréchet: distance to held-out images in the features of a small classifier; for equally many images"
        " only. FID and IS need --inception and --against, and are biased at few images."
    )
    whole: list[list[Value]] = [list(line) for line in published.TABLE2]
    names = ("", "FID, no guidance", "IS, no guidance", "FID, guidance", "IS, guidance")
    return [
        Table(f"{setup.pair}: quality, and equality of the distributions", columns, rows, note),
        *_power(results),
        Table("The paper's table 2 (ImageNet, 256 x 256)", names, whole),
    ]


def _line(results: Results, name: str, scale: float, cells: list[Cell], reference: list[Cell]) -> list[Value]:
    setup, found = results.setup, results.joined(cells)
    test = _tested(results, cells, reference)
    images = None
    if setup.target.config.vae_stride == 1 or setup.vae is not None:
        images = to_images(setup.target, results.arrays_of(cells, "tokens"), setup.vae)
    right = distance = distance_of_inception = score = None
    labels = _labels(setup, cells)
    if images is not None:
        right, distance = of_the_domain(results, _key(results, cells), images, labels)
        distance_of_inception, score = fid(results, _key(results, cells), images)
    refuted = min(test[one] for one in _TESTS) <= FALSE_ALARM
    return [
        name,
        "lossy" if name == ALONE else found.verdict,
        scale,
        found.images,
        right,
        distance,
        *(test[one] for one in _TESTS),
        "yes" if refuted else "no",
        distance_of_inception,
        score,
    ]


def _power(results: Results) -> list[Table]:
    """How small a difference the tests see: plain images, damaged more and more, against the reference."""
    columns = (
        "guidance",
        "images",
        "difference",
        "size",
        "p, moments",
        "p, energy",
        "p, classifier",
        "refuted",
    )
    rows: list[list[Value]] = []
    for scale in _IMAGES:
        for what, size, test, images in _damaged(results, scale):
            refuted = min(test[one] for one in _TESTS) <= FALSE_ALARM
            rows.append(
                [scale, images, what, size, *(test[one] for one in _TESTS), "yes" if refuted else "no"]
            )
    note = (
        "Plain images of which a share is the draft's, or with Gaussian noise of so much standard deviation"
        " on every number of every token (pixels are between -1 and 1). The smallest size that is refuted"
        " is the smallest difference that these tests see at this number of images."
    )
    return [Table("The power of the tests of equality", columns, rows, note)]


def _damaged(results: Results, scale: float) -> list[tuple[str, float, dict[str, float], int]]:
    setup = results.setup
    rows, reference = _rows(setup, scale), _reference(setup, scale)
    control, labels = rows["plain (control)"], _labels(setup, reference)
    plain, other = _tokens(results, control), _tokens(results, reference)
    found = []
    random = np.random.default_rng(setup.seed)
    order, noise = random.permutation(len(plain)), random.standard_normal(plain.shape)

    def tested(name: str, x: np.ndarray, *more: list[Cell]) -> dict[str, float]:
        key = f"power-{name}-{_key(results, control, reference, *more)}"
        return results.store.derived(key, lambda: p_values(x, other, labels))

    if ALONE in rows:
        drafts = _tokens(results, rows[ALONE])
        for share in _SHARES:
            some = order[: round(share * len(plain))]
            x = plain.copy()
            x[some] = drafts[some]
            test = tested(f"share-{share:g}", x, rows[ALONE])
            found.append(("share of the draft's images", share, test, len(plain)))
    for size in _NOISE:
        found.append(("noise", size, tested(f"noise-{size:g}", plain + size * noise), len(plain)))
    return found


def _picture(results: Results) -> Image.Image:
    charts = []
    for scale in _IMAGES:
        for what in dict.fromkeys(line[0] for line in _damaged(results, scale)):
            lines_of = [line for line in _damaged(results, scale) if line[0] == what]
            series: dict[str, list[float | None]] = {
                one: [-float(np.log10(max(line[2][one], 1e-12))) for line in lines_of] for one in _TESTS
            }
            series["refuted above"] = [-float(np.log10(FALSE_ALARM))] * len(lines_of)
            title = f"power: {what}, guidance {scale:g}, {lines_of[0][3]} images: -log10 p"
            charts.append(lines(series, title, "size of the difference", [f"{s[1]:g}" for s in lines_of]))
    return stacked(charts)


EXPERIMENTS = (
    Experiment(
        "table2",
        "Quality of the images, without and with guidance",
        "FID and IS of images by speculation stay within the noise of the plain sampler's.",
        "The embedded pair makes glyphs, for which there is no FID of the literature; equality of the"
        " distributions is tested in its place. The second table says how little that sees at so few images.",
        False,
        _cells,
        _tables,
        _picture,
    ),
)
