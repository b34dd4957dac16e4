"""What `cspd-jax masked` reports, and the picture of the order in which places were filled."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from cspd_jax.masked import least_passes
from cspd_jax.masked.comparison import Found
from cspd_jax.models import TextModel
from cspd_jax.reports.image import device, rates, versions

_MARGIN, _LEFT = 28, 44
_ROWS, _PLACES = 4, 400  # shown at most
_CELL, _SIDE = 10, 1600  # pixels of a place at most, and of all places and rounds
_PAPER, _INK, _LINE = (255, 255, 255), (40, 40, 40), (225, 225, 225)
_EARLY, _LATE = np.array((27, 58, 102)), np.array((242, 170, 76))


def make_report(found: Found, model: TextModel, *, seed: int) -> dict[str, Any]:
    result, generation = found.result, found.generation
    options = generation.options
    lossless, why = judgement(found)
    rows, places = np.shape(result.text)
    passes = result.passes + result.block_passes
    cached, block = bool(options.get("cached")), min(options["block"], places)
    drafted = result.tested is not None
    tested, accepted = (int(np.sum(a)) if drafted else None for a in (result.tested, result.accepted))
    return {
        "method": generation.method,
        "accept": "top-k" if options.get("top_k") else "exact",
        "cached": cached,
        "lossless": lossless,
        "why": why,
        "target": {"name": model.name, "source_sha256": model.metadata.get("source_sha256")},
        "prompts": rows,
        "tokens": rows * places,
        "seconds": round(found.seconds, 4),
        "tokens_per_second": round(rows * places / found.seconds, 2),
        "steps": places if generation.method != "schedule" else passes,
        "rounds": float(np.mean(result.row_rounds)) if drafted else None,
        "passes": {"whole": result.passes, "block": result.block_passes},
        "rows_evaluated": result.rows,
        "tokens_per_pass": places / passes,
        "tested": tested,
        "accepted": accepted,
        "acceptance": accepted / tested if tested else None,
        "acceptance_by_position": rates(result.accepted, result.tested) if drafted else None,
        "least_passes": least_passes(places, block, options["draft_len"], cached) if drafted else None,
        "compared_to_stepwise": _compared(found),
        "plan": {name: value for name, value in options.items() if name != "keys"},
        "versions": versions(),
        "device": device(),
        "config": dataclasses.asdict(model.config),
        "seed": seed,
    }


def judgement(found: Found) -> tuple[bool, str]:
    """Whether the text is that of stepwise decoding, and why."""
    generation = found.generation
    if generation.method == "schedule":
        return False, "places that are filled in one step do not see each other"
    if generation.options.get("top_k"):
        return False, "moves are accepted that the stepwise rule would not take next"
    with_cache = ""
    if generation.options.get("cached"):
        with_cache = "; the block cache makes it another sampler than the one without, with its own reference"
    if generation.method == "stepwise":
        return True, "stepwise decoding is the reference itself" + with_cache
    return True, "every move is the one that stepwise decoding takes, place and token" + with_cache


def _compared(found: Found) -> dict[str, Any] | None:
    if found.stepwise is None:
        return None
    ours, theirs = (r.passes + r.block_passes for r in (found.result, found.stepwise))
    return {
        "stepwise_seconds": round(found.stepwise_seconds, 4),
        "faster": found.stepwise_seconds / found.seconds,
        "passes": theirs,
        "fewer_passes": theirs / ours,
        "identical_rows": found.identical,
    }


def in_words(report: dict[str, Any]) -> str:
    """A few lines for people."""
    passes = sum(report["passes"].values())
    lines = [
        f"{report['tokens']} tokens in {report['seconds']:.2f} s, {passes} passes one after the other"
        f" ({report['tokens_per_pass']:.2f} tokens of a row per pass)"
    ]
    if report["acceptance"] is not None:
        lines[0] += f"; acceptance {report['acceptance']:.2f}; {report['least_passes']} passes at least"
    beside = report["compared_to_stepwise"]
    if beside is not None:
        ratio = beside["faster"]
        words = f"{ratio:.2f} times faster" if ratio >= 1 else f"{1 / ratio:.2f} times slower"
        lines.append(
            f"beside stepwise decoding: {beside['fewer_passes']:.2f} times fewer passes, {words};"
            f" identical: {beside['identical_rows']} of {report['prompts']} rows"
        )
        if report["lossless"] and beside["identical_rows"] < report["prompts"]:
            lines.append(
                "rows differ: passes of other shapes round otherwise, and where two moves are equally likely"
                " up to rounding, either may be taken; --dtype float64 tells"
            )
    if not report["lossless"]:
        lines.append(f"lossy: {report['why']}")
    return "\n".join(lines)


def order_picture(rounds: np.ndarray, block: int) -> Image.Image:
    """When each of the first places of the first rows was filled: rounds [B, G]. Later rounds are lower and
    lighter, and lines part the blocks."""
    rounds = np.asarray(rounds)[:_ROWS, :_PLACES]
    last = int(rounds.max())
    cell = min(_CELL, _SIDE // max(rounds.shape[1], last + 1))
    width = _LEFT + rounds.shape[1] * cell + 8
    height = _MARGIN + (last + 1) * cell + 8
    page = Image.new("RGB", (width, height * len(rounds)), _PAPER)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default()
    for row, filled in enumerate(rounds):
        top = row * height + _MARGIN
        draw.text((_LEFT, top - 20), f"text {row + 1}: round in which each place was filled", _INK, font)
        for x in range(0, rounds.shape[1] + 1, block):
            draw.line((_LEFT + x * cell, top, _LEFT + x * cell, top + (last + 1) * cell), _LINE)
        for number in range(0, last + 1, max(1, (last + 1) // 8)):
            draw.text((8, top + number * cell - 2), str(number), _INK, font)
        for place, number in enumerate(filled):
            x, y = _LEFT + place * cell, top + int(number) * cell
            share = number / max(1, last)
            colour = tuple(int(c) for c in np.round(_EARLY + share * (_LATE - _EARLY)))
            draw.rectangle((x + 1, y + 1, x + cell - 1, y + cell - 1), fill=colour)
    return page
