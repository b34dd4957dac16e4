"""The report of `cspd-jax text`, as a dictionary and in words."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cspd_jax.reports.image import device, rates, versions
from cspd_jax.text import ACCEPTED, BONUS, CORRECTED, PLAIN, expected_tokens, speedup
from cspd_jax.text.comparison import Measured, Request
from cspd_jax.text.protocol import bound
from cspd_jax.weights.models import TextModel

_MARKS = {"plain": PLAIN, "accepted": ACCEPTED, "corrected": CORRECTED, "bonus": BONUS}
_WHY = {
    "google": "accepted drafts and draws from the residual together have the target's distribution",
    "block": "the accepted part of each draft and the token after it together have the target's distribution",
    "tree": "accepted branches and draws from what the others leave have together the target's distribution",
    "match": "every token is the target's own draw; drafts only decide how many are drawn in one pass",
}
ROWS_DIFFER = (
    "some rows differ: passes of different shapes round differently, so where two tokens are almost equally"
    " probable either may be taken; --dtype float64 rules this out in practice"
)


def make_report(
    found: Measured, target: TextModel, method: str, draft: str | None, *, seed: int
) -> dict[str, Any]:
    """Everything worth knowing about a generation, ready for JSON. draft: the drafter's name."""
    info, request, calls = found.info, found.request, found.info.calls
    lossless, why = judgement(found)
    count = int(info.new_tokens.sum())
    return {
        "method": method,
        "draft": draft,
        "lossless": lossless,
        "why": why,
        "target": {"name": target.name, "source_sha256": target.metadata.get("source_sha256")},
        "prompts": len(request.prompts),
        "tokens": count,
        "seconds": round(found.seconds, 4),
        "tokens_per_second": round(count / found.seconds, 2),
        "acceptance": info.acceptance,
        "acceptance_by_position": rates(info.accepted_at, info.tested_at),
        "rounds": float(np.mean(info.rounds)),
        "tokens_per_target_pass": info.tokens_per_pass,
        "expected_tokens_per_target_pass": _expected(found),
        "tokens_from": {name: sum(row.count(mark) for row in found.marks) for name, mark in _MARKS.items()},
        "truncated": int(info.truncated.sum()),
        "sequential": {"target": int(calls.target_passes), "draft": int(calls.draft_passes)},
        "total": {"target": int(calls.target_rows), "draft": int(calls.draft_rows)},
        "compared_to_plain": _compared(found),
        "choice": _choice(found),
        "reference": {
            "method": "plain",
            "dtype": np.dtype(bound(target)[0].dtype).name,
            **request.sampling._asdict(),
        },
        "plan": {
            "gamma": request.gamma if request.drafter is not None and _is_fixed(request) else None,
            "gammas": None if request.gammas is None else list(request.gammas),
            "rows": request.rows,
            "tree": None if request.tree is None else list(request.tree.widths),
            "adapt": request.adapt,
            "confidence": request.confidence,
            "max_new_tokens": request.max_new_tokens,
        },
        "versions": versions(),
        "device": device(),
        "config": dataclasses.asdict(target.config),
        "seed": seed,
    }


def judgement(found: Measured) -> tuple[bool, str]:
    """Whether the text has the distribution of plain decoding, and why."""
    request = found.request
    if request.drafter is None:
        return True, "plain decoding is the reference itself"
    if found.info.truncated.any():
        return False, "rounding left nothing of some residuals, and those tokens were drawn from the target"
    if not request.sampling.temperature:
        return (
            True,
            "up to rounding, every token is the target's most probable one, as in plain decoding",
        )
    rule = request.rule or ("block" if request.tree is None else "tree")
    return True, _WHY["google" if rule == "deepmind" else rule]


def _choice(found: Measured) -> str | None:
    """Why so many tokens were drafted, if that was chosen as rounds went by; what it gained, unless that was
    measured by a comparison."""
    if found.scheduler is None or len(found.scheduler.gammas) == 1:
        return None
    return found.scheduler.in_words(found.seconds if found.plain_seconds is None else None)


def _is_fixed(request: Request) -> bool:
    """Whether every round wants the same number of drafts, one after the other."""
    return not request.adapt and request.tree is None and request.gammas is None


def _expected(found: Measured) -> float | None:
    """Tokens per target pass by the formula for a constant acceptance."""
    if found.info.acceptance is None or not _is_fixed(found.request):
        return None
    return float(expected_tokens(found.info.acceptance, found.request.gamma))


def _compared(found: Measured) -> dict[str, Any] | None:
    if found.plain_seconds is None:
        return None
    acceptance, formula = found.info.acceptance, None
    if acceptance is not None and found.cost is not None and _is_fixed(found.request):
        formula = float(speedup(acceptance, found.request.gamma, found.cost))
    return {
        "plain_seconds": round(found.plain_seconds, 4),
        "faster": found.plain_seconds / found.seconds,
        "faster_by_formula": formula,
        "cost_of_a_draft": found.cost,
        "fewer_target_passes": found.plain_passes / max(1, int(found.info.calls.target_passes)),
        "identical_rows": found.same,
    }


def in_words(report: dict[str, Any]) -> str:
    """A few lines for people."""
    speed = f"{report['tokens_per_second']:.0f} per s"
    lines = [f"{report['tokens']} tokens in {report['seconds']:.2f} s ({speed})"]
    if report["acceptance"] is not None:
        lines[0] += (
            f"; {report['method']} with {report['draft']}: acceptance {report['acceptance']:.2f},"
            f" {report['tokens_per_target_pass']:.2f} tokens per target pass"
        )
        if report["expected_tokens_per_target_pass"] is not None:
            lines[0] += f" ({report['expected_tokens_per_target_pass']:.2f} by the formula)"
    if report["choice"] is not None:
        lines.append(report["choice"])
    beside = report["compared_to_plain"]
    if beside is not None:
        ratio = beside["faster"]
        words = f"{ratio:.2f} times as fast" if ratio >= 1 else f"{1 / ratio:.2f} times slower"
        formula = beside["faster_by_formula"]
        by_formula = "" if formula is None else f" ({formula:.2f} by the formula)"
        lines.append(
            f"compared with plain decoding: {words}{by_formula}, {beside['fewer_target_passes']:.2f} times"
            f" fewer target passes; a draft costs {beside['cost_of_a_draft']:.2f} of one"
        )
        if not report["reference"]["temperature"] or report["method"] == "match":
            same = f"{beside['identical_rows']} of {report['prompts']} rows"
            lines.append(f"identical to plain decoding: {same}")
            if beside["identical_rows"] < report["prompts"]:
                lines.append(ROWS_DIFFER)
    return "\n".join(lines)
