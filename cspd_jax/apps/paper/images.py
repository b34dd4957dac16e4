"""Figures 7, 9, 12 and 16: images beside each other, and where in them drafts were accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from cspd_jax.apps.paper import published
from cspd_jax.apps.paper.ablations import prefilled, ways
from cspd_jax.apps.paper.cells import Cell
from cspd_jax.apps.paper.experiment import Experiment, Results, Table, Value
from cspd_jax.apps.paper.running import labels_of
from cspd_jax.apps.paper.setup import Setup
from cspd_jax.apps.paper.variants import PLAIN
from cspd_jax.image.pixels import to_images
from cspd_jax.reports.charts import acceptance_maps
from cspd_jax.reports.pictures import marked, picture, titled

ALONE = "draft model alone"  # exact for the draft, not for the target
_SHOWN = 8  # images of a row
_MAPS = 5  # images of a row of maps, after their mean
_FIGURE9 = ("official: the released runner", "path, by the draft model")


def pixels_of(results: Results, cells: Sequence[Cell], images: int | None = None) -> np.ndarray | None:
    """uint8 [N, H, W, C] of cells; None where nothing decodes their latents."""
    setup = results.setup
    if setup.target.config.vae_stride != 1 and setup.vae is None:
        return None
    return to_images(setup.target, results.arrays_of(cells, "tokens", images), setup.vae)


def _sheet(results: Results, rows: Mapping[str, Sequence[Cell]]) -> Image.Image | None:
    """A titled row of images for each way."""
    pages = []
    for name, cells in rows.items():
        images = pixels_of(results, cells, _SHOWN)
        if images is None:
            return None
        pages.append((f"{name} ({results.joined(cells).verdict})", picture(images, columns=len(images))))
    return titled(pages)


def _table(results: Results, title: str, rows: Mapping[str, Sequence[Cell]], note: str = "") -> Table:
    """What the images of a figure cost."""
    plain = results.joined(next(iter(rows.values())))
    lines: list[list[Value]] = []
    for name, cells in rows.items():
        found = results.joined(cells)
        verdict = "lossy" if name == ALONE else found.verdict
        lines.append([name, verdict, found.images, found.acceptance, plain.calls / found.calls])
    columns = ("way", "exact or lossy", "images", "acceptance", "fewer calls in sequence")
    if results.setup.target.config.vae_stride != 1 and results.setup.vae is None:
        note = f"{note} No picture: latents need an autoencoder (--vae).".strip()
    return Table(f"{results.setup.pair}: {title}", columns, lines, note)


def _figure7_rows(setup: Setup) -> dict[str, list[Cell]]:
    rows = {"plain sampler": setup.cells(PLAIN, _SHOWN)}
    for name, way in ways(setup).items():
        for gamma in setup.gammas_of(way):
            rows[f"{name}, gamma {gamma}"] = setup.cells({**way, "gamma": gamma}, _SHOWN)
    return rows


def _figure12_rows(setup: Setup) -> dict[str, list[Cell]]:
    rows = {"plain sampler": setup.cells(PLAIN, _SHOWN)}
    for name, way in ways(setup).items():
        for share in published.PREFILL:
            rows[f"{name}, gamma {setup.least}, prefill {share:.0%}"] = prefilled(setup, way, share)
    return rows


def _all(rows: Mapping[str, Sequence[Cell]]) -> list[Cell]:
    return [cell for cells in rows.values() for cell in cells]


def _verified(setup: Setup) -> dict[str, list[Cell]]:
    options = {name: {**way, "gamma": setup.middle} for name, way in ways(setup).items()}
    return {name: setup.cells(one, _SHOWN) for name, one in options.items() if name in _FIGURE9}


def _figure9_rows(setup: Setup) -> dict[str, list[Cell]]:
    plain = {"plain sampler": setup.cells(PLAIN, _SHOWN)}
    return {**plain, ALONE: setup.cells(PLAIN, _SHOWN, by_draft=True), **_verified(setup)}


def _figure9(results: Results) -> list[Table]:
    note = "The draft alone is exact for the draft's distribution, not for the target's."
    return [_table(results, "the draft alone, and verified", _figure9_rows(results.setup), note)]


def _figure9_picture(results: Results) -> Image.Image | None:
    setup = results.setup
    alone = pixels_of(results, _figure9_rows(setup)[ALONE], _SHOWN)
    if alone is None:
        return None
    pages = [(f"{ALONE} (lossy)", picture(alone, columns=len(alone)))]
    for name, cells in _verified(setup).items():
        images = pixels_of(results, cells, _SHOWN)
        assert images is not None
        tested, accepted = (results.arrays_of(cells, what, _SHOWN) for what in ("tested", "accepted"))
        page = marked(images, tested & ~accepted)
        verdict = results.joined(cells).verdict
        pages.append((f"{name}, gamma {setup.middle} ({verdict}); rejected drafts framed", page))
    return titled(pages)


def _figure16_rows(setup: Setup) -> dict[str, list[Cell]]:
    options: dict[str, dict[str, Any]] = {
        name: {**way, "gamma": setup.middle} for name, way in ways(setup).items()
    }
    return {name: setup.cells(one, _SHOWN) for name, one in options.items()}


def _figure16(results: Results) -> list[Table]:
    rows: list[list[Value]] = []
    for name, cells in _figure16_rows(results.setup).items():
        tested, accepted = (results.arrays_of(cells, what) for what in ("tested", "accepted"))
        side = round(tested.shape[1] ** 0.5)
        inner = np.zeros((side, side), bool)
        inner[side // 4 : side - side // 4, side // 4 : side - side // 4] = True
        found = results.joined(cells)
        shares = [_share(accepted[:, at], tested[:, at]) for at in (inner.ravel(), ~inner.ravel())]
        rows.append([name, found.verdict, found.images, found.acceptance, *shares])
    columns = (
        "way",
        "exact or lossy",
        "images",
        "acceptance",
        "in the inner quarter",
        "in the other three",
    )
    note = f"Gamma {results.setup.middle}. The paper shows maps, without numbers."
    return [Table(f"{results.setup.pair}: acceptance by place in the image", columns, rows, note)]


def _share(accepted: np.ndarray, tested: np.ndarray) -> float | None:
    return float(accepted.sum() / tested.sum()) if tested.any() else None


def _figure16_picture(results: Results) -> Image.Image:
    pages = []
    for name, cells in _figure16_rows(results.setup).items():
        tested, accepted = (results.arrays_of(cells, what) for what in ("tested", "accepted"))
        labels = np.concatenate([labels_of(results.setup, cell) for cell in cells])
        captions = [results.setup.target.class_name(int(label)) for label in labels]
        page = acceptance_maps(tested, accepted, captions, most=_MAPS)
        pages.append((f"{name} ({results.joined(cells).verdict})", page))
    return titled(pages)


EXPERIMENTS = (
    Experiment(
        "figure7",
        "Images by way and gamma",
        "Images of one model at gamma 4 to 32 that look as good as the plain sampler's.",
        "Glyphs in place of photographs. Each image has its own key, which ways use in different ways:"
        " images of one column have the class in common and part of the noise, not the strokes.",
        False,
        lambda setup: _all(_figure7_rows(setup)),
        lambda results: [_table(results, "the images of the picture", _figure7_rows(results.setup))],
        lambda results: _sheet(results, _figure7_rows(results.setup)),
    ),
    Experiment(
        "figure9",
        "The draft alone, and verified by the target",
        "What the target rejects of the draft's image, and what it puts there.",
        "Glyphs in place of photographs; the default draft is distilled from its target and draws well by"
        " itself.",
        True,
        lambda setup: _all(_figure9_rows(setup)),
        _figure9,
        _figure9_picture,
    ),
    Experiment(
        "figure12",
        "Images by prefill",
        "Images are better with 5 % or 15 % of the tokens from the target.",
        "Glyphs in place of photographs. The exact ways have the target's distribution at every prefill.",
        False,
        lambda setup: _all(_figure12_rows(setup)),
        lambda results: [_table(results, "the images of the picture", _figure12_rows(results.setup))],
        lambda results: _sheet(results, _figure12_rows(results.setup)),
    ),
    Experiment(
        "figure16",
        "Where in the image drafts are accepted",
        "Background and simple texture are accepted, details rejected.",
        "Glyphs in place of photographs: background outside, strokes inside. Tokens are revealed in a"
        " random order, so a place is early in one image and late in another.",
        False,
        lambda setup: _all(_figure16_rows(setup)),
        _figure16,
        _figure16_picture,
    ),
)
