"""The report of `cspd-jax text`, as a dictionary and in words."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cspd_jax.coupling.draft_length import expected_tokens, speedup
from cspd_jax.reports.image import device, rates, versions
from cspd_jax.text.comparison import Measured
from cspd_jax.text.info import ACCEPTED, BONUS, CORRECTED, PLAIN
from cspd_jax.text.protocol import bound
from cspd_jax.text.sampling import Sampling
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
    measured: Measured, target: TextModel, method: str, draft: str | None, *, rows: int | None, seed: int
) -> dict[str, Any]:
    """Returns everything worth knowing about a generation, ready for JSON.

    draft: the drafter's name.
    rows: prompts at a time, if they were not all at once.
    """
    info, request, calls = measured.info, measured.request, measured.info.calls
    options = request.options
    lossless, why = judgement(measured)
    count = int(info.new_tokens.sum())
    return {
        "method": method,
        "draft": draft,
        "lossless": lossless,
        "why": why,
        "target": {"name": target.name, "source_sha256": target.metadata.get("source_sha256")},
        "prompts": len(request.prompts),
        "tokens": count,
        "seconds": round(measured.seconds, 4),
        "tokens_per_second": round(count / measured.seconds, 2),
        "acceptance": info.acceptance,
        "acceptance_by_position": rates(info.accepted_at, info.tested_at),
        "rounds": float(np.mean(info.rounds)),
        "tokens_per_target_pass": info.tokens_per_pass,
        "expected_tokens_per_target_pass": _expected(measured),
        "tokens_from": {
            name: sum(row.count(mark) for row in measured.marks) for name, mark in _MARKS.items()
        },
        "truncated": int(info.truncated.sum()),
        "sequential": {"target": int(calls.target_passes), "draft": int(calls.draft_passes)},
        "total": {"target": int(calls.target_rows), "draft": int(calls.draft_rows)},
        "compared_to_plain": _compared(measured),
        "reference": {
            "method": "plain",
            "dtype": np.dtype(bound(target)[0].dtype).name,
            **{name: getattr(options, name) for name in Sampling._fields},
        },
        "plan": {
            "gamma": options.gamma if request.drafter is not None and _is_fixed(measured) else None,
            "rows": rows,
            "tree": None if request.tree is None else list(request.tree.widths),
            "adapt": options.draft_cost is not None,
            "confidence": options.confidence,
            "max_new_tokens": options.max_new_tokens,
        },
        "versions": versions(),
        "device": device(),
        "config": dataclasses.asdict(target.config),
        "seed": seed,
    }


def judgement(measured: Measured) -> tuple[bool, str]:
    """Returns whether the text has the distribution of plain decoding, and why."""
    request = measured.request
    if request.drafter is None:
        return True, "plain decoding is the reference itself"
    if measured.info.truncated.any():
        return False, "rounding left nothing of some residuals, and those tokens were drawn from the target"
    if not request.options.temperature:
        return (
            True,
            "up to rounding, every token is the target's most probable one, as in plain decoding",
        )
    rule = request.options.rule or ("block" if request.tree is None else "tree")
    return True, _WHY["google" if rule == "deepmind" else rule]


def _is_fixed(measured: Measured) -> bool:
    """Returns whether every round wants the same number of drafts, one after the other."""
    adapts = measured.request.options.draft_cost is not None
    return not adapts and measured.request.tree is None


def _expected(measured: Measured) -> float | None:
    """Returns the tokens per target pass by the formula for a constant acceptance."""
    if measured.info.acceptance is None or not _is_fixed(measured):
        return None
    return float(expected_tokens(measured.info.acceptance, _drafts(measured)))


def _drafts(measured: Measured) -> int:
    """Returns how many tokens a round drafts: no more than are to be made."""
    options = measured.request.options
    return min(int(options.gamma), int(options.max_new_tokens))


def _compared(measured: Measured) -> dict[str, Any] | None:
    if measured.plain_seconds is None or measured.plain_passes is None:
        return None
    acceptance, formula = measured.info.acceptance, None
    if acceptance is not None and measured.draft_cost is not None and _is_fixed(measured):
        formula = float(speedup(acceptance, _drafts(measured), measured.draft_cost))
    return {
        "plain_seconds": round(measured.plain_seconds, 4),
        "faster": measured.plain_seconds / measured.seconds,
        "faster_by_formula": formula,
        "cost_of_a_draft": measured.draft_cost,
        "fewer_target_passes": measured.plain_passes / max(1, int(measured.info.calls.target_passes)),
        "identical_rows": measured.same,
    }


def in_words(report: dict[str, Any]) -> str:
    """Says it in a few lines for people."""
    speed = f"{report['tokens_per_second']:.0f} per s"
    lines = [f"{report['tokens']} tokens in {report['seconds']:.2f} s ({speed})"]
    if report["acceptance"] is not None:
        lines[0] += (
            f"; {report['method']} with {report['draft']}: acceptance {report['acceptance']:.2f},"
            f" {report['tokens_per_target_pass']:.2f} tokens per target pass"
        )
        if report["expected_tokens_per_target_pass"] is not None:
            lines[0] += f" ({report['expected_tokens_per_target_pass']:.2f} by the formula)"
    beside = report["compared_to_plain"]
    if beside is not None:
        ratio = beside["faster"]
        words = f"{ratio:.2f} times as fast" if ratio >= 1 else f"{1 / ratio:.2f} times slower"
        formula = beside["faster_by_formula"]
        by_formula = "" if formula is None else f" ({formula:.2f} by the formula)"
        cost = beside["cost_of_a_draft"]
        lines.append(
            f"compared with plain decoding: {words}{by_formula}, {beside['fewer_target_passes']:.2f} times"
            f" fewer target passes{'' if cost is None else f'; a draft costs {cost:.2f} of one'}"
        )
        if not report["reference"]["temperature"] or report["method"] == "match":
            same = f"{beside['identical_rows']} of {report['prompts']} rows"
            lines.append(f"identical to plain decoding: {same}")
            if beside["identical_rows"] < report["prompts"]:
                lines.append(ROWS_DIFFER)
    return "\n".join(lines)
