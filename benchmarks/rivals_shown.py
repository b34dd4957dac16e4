"""The results of rivals.py as a table, a chart, and rows of pages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from words_law import ALL_TESTS

from cspd_jax.reports.charts import scatter, stacked
from cspd_jax.reports.pictures import marked, titled
from cspd_jax.tools.evaluation import words as measures
from cspd_jax.training.data.words import BLANK

BATCH = 8  # images side by side


def calls_of(row: dict) -> float:
    return sum(row["sequential"].values())


def markdown(found: dict) -> str:
    lines = [
        "| way | | AR steps | calls in sequence | head rows / image | s / image | images | words | chi-square"
        " | Fréchet (floor) | p, misspelt | p, frequencies | p, moments | p, energy | p, classifier |",
        "|" + "---|" * 15,
    ]
    for row in found["cells"]:
        kind = row["kind"] if row["kind"] == "lossy" else "**exact**"
        name = "plain (control)" if row["cell"] == "plain" else row["cell"]
        values = [
            name, kind, f"{row['ar_steps']:.0f}", f"{calls_of(row):.0f}",
            f"{row['rows_per_image']['head']:.0f}",
            f"{row['seconds_per_image']:.2f}", row["images"],
            f"{row['words']:.1%} ± {row['words_error']:.1%}", f"{row['chi_square']:.2f}",
            f"{1e3 * row['frechet']:.1f} ({1e3 * row['floor']:.1f})",
            *(f"{p:.2g}" for p in row["p"].values()),
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, values)) + " |")
    if found.get("floors"):
        lines += ["", "| images of either set | least distance | mean | most |", "|---|---|---|---|"]
    for row in found.get("floors", []):
        each = (f"{1e3 * row[k]:.1f}" for k in ("least", "mean", "most"))
        lines.append(f"| {row['images']} | {' | '.join(each)} |")
    if found.get("power"):
        tests = [test for test in ALL_TESTS if test in found["power"][0]]
        lines += ["", f"| wrong images | of | {' | '.join(tests)} |", "|" + "---|" * (2 + len(tests))]
    for row in found.get("power", []):
        shares = (row[test] for test in tests)
        told = ("never" if share is None else f"{share:.0%}" for share in shares)
        lines.append(f"| {row['wrong']} | {row['images']} | {' | '.join(told)} |")
    return "\n".join(lines)


def picture(found: dict):
    """Words read right against calls and against seconds."""
    rows = found["cells"]
    names, kinds = [row["cell"] for row in rows], [row["kind"] for row in rows]
    right = [100 * row["words"] for row in rows]
    axes = (([calls_of(row) for row in rows], f"network calls in sequence, {BATCH} images side by side"),
            ([row["seconds_per_image"] for row in rows], "seconds per image, on this CPU"))  # fmt: skip
    left = "words spelt right, %"
    return stacked([scatter(values, right, names, kinds, below, left) for values, below in axes])


def show(found: dict, made: dict[str, np.ndarray], read: Callable[..., measures.Reading]):
    """A row of pictures of plain, of an exact way, and of the lossy one with the nearest number of calls.

    made: uint8 images of the topics 0, 1, 2, ...; misspelt words are framed in them.
    """
    rows = {row["cell"]: row for row in found["cells"]}
    pages = []
    for name, images in made.items():
        marks = misspelt(read(images, np.arange(len(images))))
        kind = "the reference" if name == "plain" else rows[name]["kind"]
        calls, right = calls_of(rows[name]), rows[name]["words"]
        title = f"{name} ({kind}): {calls:.0f} calls in sequence, {right:.1%} of the words spelt right"
        pages.append((title, marked(images, marks)))
    return titled(pages)


def misspelt(reading: measures.Reading) -> np.ndarray:
    """The letters [N, L] of words that no list has."""
    pages, lines = len(reading.text), len(reading.text[0])
    letters = np.array([[c != BLANK for c in line] for page in reading.text for line in page])
    return (letters.reshape(pages, lines, -1) & ~reading.right[:, :, None]).reshape(pages, -1)


def beside(found: dict) -> tuple[str, str, str]:
    """Plain, the exact way of the fewest calls, and the lossy way that has the nearest number of them."""
    exact = min((row for row in found["cells"] if row["kind"] == "exact"), key=calls_of)
    lossy = [row for row in found["cells"] if row["kind"] == "lossy" and "AR steps" in row["cell"]]
    near = min(lossy, key=lambda row: abs(np.log(calls_of(row) / calls_of(exact))))
    return "plain", exact["cell"], near["cell"]
