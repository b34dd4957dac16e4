"""The report of `cspd-jax masked`, and a picture of the order in which places were filled."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from cspd_jax.masked.comparison import Measured, Request
from cspd_jax.masked.methods import Schedule, SelfSpeculation, Stepwise
from cspd_jax.masked.sets import MoveSets
from cspd_jax.masked.speculative import least_passes
from cspd_jax.reports.image import device, rates, versions
from cspd_jax.weights.models import TextModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_ROWS, _MAX_PLACES = 4, 400  # shown in the picture at most
_DPI, _WIDTH, _MAX_HEIGHT = 100, 12.0, 8.0  # inches; the height is of one row
_EARLY, _LATE = "#1b3a66", "#f2aa4c"


def make_report(measured: Measured, model: TextModel, *, seed: int) -> dict[str, Any]:
    """Returns everything worth knowing about a generation, ready for JSON."""
    request, (tokens, info) = measured.request, measured.output
    lossless, why = judgement(request)
    rows, places = tokens.shape
    drafts = info.drafts
    return {
        "method": request.method.name,
        "accept": "top-k" if _accept_top_k(request) else "exact",
        "cached": request.options.cached,
        "lossless": lossless,
        "why": why,
        "target": {"name": model.name, "source_sha256": model.metadata.get("source_sha256")},
        "prompts": rows,
        "tokens": rows * places,
        "seconds": round(measured.seconds, 4),
        "tokens_per_second": round(rows * places / measured.seconds, 2),
        "steps": places if not isinstance(request.method, Schedule) else info.passes,
        "rounds": None if drafts is None else float(np.mean(drafts.rounds)),
        "passes": {"whole": int(info.calls.whole_passes), "block": int(info.calls.block_passes)},
        "rows_evaluated": int(info.calls.rows),
        "tokens_per_pass": info.tokens_per_pass,
        "tested": None if drafts is None else int(np.sum(drafts.tested)),
        "accepted": None if drafts is None else int(np.sum(drafts.accepted)),
        "acceptance": info.acceptance,
        "acceptance_by_position": None if drafts is None else rates(info.accepted_at, info.tested_at),
        "least_passes": None if drafts is None else _least_passes(measured),
        "compared_to_stepwise": _compared(measured),
        "plan": _plan(measured),
        "versions": versions(),
        "device": device(),
        "config": dataclasses.asdict(model.config),
        "seed": seed,
    }


def _plan(measured: Measured) -> dict[str, Any]:
    """The options of the generation; new_tokens, draft_len and sampling_top_k are older names, kept for
    readers, as is top_k, which is another number here."""
    request = measured.request
    plan = dataclasses.asdict(request.options)
    gamma = _gamma(measured)
    plan |= {"new_tokens": plan["max_new_tokens"], "sampling_top_k": plan.pop("top_k")}
    plan |= {"gamma": gamma, "draft_len": gamma}
    accept_top_k = _accept_top_k(request)
    if accept_top_k is not None:
        plan |= {"accept_top_k": accept_top_k, "top_k": accept_top_k}
    if isinstance(request.method, SelfSpeculation) and (sets := request.method.texts) is not None:
        plan["texts"] = len(sets.texts) if isinstance(sets, MoveSets) else int(sets)
    if isinstance(request.method, Schedule):
        plan["steps"] = request.method.steps
    return plan


def _gamma(measured: Measured) -> int:
    """Most moves after the certain one."""
    method, drafts = measured.request.method, measured.output.info.drafts
    if isinstance(method, SelfSpeculation) and method.texts is not None and drafts is not None:
        return drafts.tested.shape[1]
    return int(method.gamma if isinstance(method, SelfSpeculation) else SelfSpeculation().gamma)


def _accept_top_k(request: Request) -> Any:
    return request.method.accept_top_k if isinstance(request.method, SelfSpeculation) else None


def _least_passes(measured: Measured) -> int:
    options = measured.request.options
    return least_passes(options.max_new_tokens, options.block, _gamma(measured), options.cached)


def judgement(request: Request) -> tuple[bool, str]:
    """Returns whether the text is that of stepwise decoding, and why."""
    if isinstance(request.method, Schedule):
        return False, "places that are filled in one step do not see each other"
    if _accept_top_k(request):
        return False, "it accepts moves that the stepwise rule would not make next"
    note = "; with the block cache this is a different sampler, with a reference of its own"
    with_cache = note if request.options.cached else ""
    if isinstance(request.method, Stepwise):
        return True, "stepwise decoding is the reference itself" + with_cache
    return True, "every move, place and token, is the one that stepwise decoding makes" + with_cache


def _compared(measured: Measured) -> dict[str, Any] | None:
    if measured.stepwise is None or measured.stepwise_seconds is None:
        return None
    return {
        "stepwise_seconds": round(measured.stepwise_seconds, 4),
        "faster": measured.stepwise_seconds / measured.seconds,
        "passes": measured.stepwise.info.passes,
        "fewer_passes": measured.stepwise.info.passes / measured.output.info.passes,
        "identical_rows": measured.identical,
    }


def in_words(report: dict[str, Any]) -> str:
    """Says it in a few lines for people."""
    passes = sum(report["passes"].values())
    lines = [
        f"{report['tokens']} tokens in {report['seconds']:.2f} s, {passes} sequential passes"
        f" ({report['tokens_per_pass']:.2f} tokens of a row per pass)"
    ]
    if report["acceptance"] is not None:
        lines[0] += f"; acceptance {report['acceptance']:.2f}; {report['least_passes']} passes at best"
    beside = report["compared_to_stepwise"]
    if beside is not None:
        ratio = beside["faster"]
        words = f"{ratio:.2f} times as fast" if ratio >= 1 else f"{1 / ratio:.2f} times slower"
        lines.append(
            f"compared with stepwise decoding: {beside['fewer_passes']:.2f} times fewer passes, {words};"
            f" identical: {beside['identical_rows']} of {report['prompts']} rows"
        )
        if report["lossless"] and beside["identical_rows"] < report["prompts"]:
            lines.append(
                "some rows differ: passes of different shapes round differently, so where two moves are"
                " almost equally probable either may be taken; --dtype float64 rules this out in practice"
            )
    if not report["lossless"]:
        lines.append(f"lossy: {report['why']}")
    return "\n".join(lines)


def order_picture(rounds: np.ndarray, block: int) -> Figure:
    """Draws when each of the first places of the first rows was filled: rounds [B, G].

    Later rounds are lower and lighter. Vertical lines separate the blocks.
    """
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rounds = np.asarray(rounds)[:_MAX_ROWS, :_MAX_PLACES]
    (rows, places), count = rounds.shape, int(rounds.max()) + 1
    height = min(_MAX_HEIGHT, 1.2 + _WIDTH * count / max(places, 16))
    figure = Figure(figsize=(_WIDTH, height * rows), dpi=_DPI, layout="constrained")
    colours = LinearSegmentedColormap.from_list("rounds", [_EARLY, _LATE])
    for row, axes in enumerate(figure.subplots(rows, 1, squeeze=False)[:, 0]):
        cells = np.full((count, places), np.nan)
        cells[rounds[row], np.arange(places)] = rounds[row]
        axes.imshow(
            cells, cmap=colours, vmin=0, vmax=max(1, count - 1), aspect="auto", interpolation="nearest"
        )
        for edge in range(block, places, block):
            axes.axvline(edge - 0.5, color="0.88", linewidth=0.8, zorder=0)
        axes.set_title(f"row {row + 1}: the round in which each place was filled", loc="left")
        axes.set_ylabel("round")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("place after the prompt")
    return figure
