"""What `cspd-jax text` reports."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cspd_jax.models import TextModel
from cspd_jax.reports.image import device, rates, versions
from cspd_jax.text import ACCEPTED, BONUS, CORRECTED, PLAIN, expected_tokens, speedup
from cspd_jax.text.comparison import Found

_MARKS = {"plain": PLAIN, "accepted": ACCEPTED, "corrected": CORRECTED, "bonus": BONUS}
_WHY = {
    "google": "every token is an accepted draft or a draw from the residual, which together have the target's"
    " law",
    "block": "the longest accepted part of each draft and the token behind it have together the target's law",
    "match": "every token is the target's own draw; drafts only decide how many are drawn in one pass",
}
ROWS_DIFFER = (
    "rows differ: passes of other shapes round otherwise, and where two tokens are equally likely up to"
    " rounding, either may be taken; --dtype float64 tells"
)


def make_report(
    found: Found, target: TextModel, method: str, draft: str | None, *, seed: int
) -> dict[str, Any]:
    """The report. `draft`: the drafter's name."""
    info, generation = found.info, found.generation
    lossless, why = judgement(found)
    count, options = int(info.new_tokens.sum()), generation.options
    return {
        "method": method,
        "draft": draft,
        "lossless": lossless,
        "why": why,
        "target": {"name": target.name, "source_sha256": target.metadata.get("source_sha256")},
        "prompts": len(generation.prompts),
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
        "sequential": {"target": info.target_passes, "draft": info.draft_passes},
        "total": {"target": info.target_rows, "draft": info.draft_rows},
        "compared_to_plain": _compared(found),
        "reference": {
            "method": "plain",
            "dtype": np.dtype(target.model.dtype).name,
            **{name: options[name] for name in ("temperature", "top_k", "top_p")},
        },
        "plan": {
            "gamma": None if generation.draft is None else generation.gamma,
            "adapt": generation.adapt,
            "confidence": generation.confidence,
            "max_new_tokens": options["max_new_tokens"],
        },
        "versions": versions(),
        "device": device(),
        "config": dataclasses.asdict(target.config),
        "seed": seed,
    }


def judgement(found: Found) -> tuple[bool, str]:
    """Whether the text has the law of plain decoding, and why."""
    draft = found.generation.draft
    if draft is None:
        return True, "plain decoding is the reference itself"
    if found.info.truncated.any():
        return False, "rounding left nothing of some residuals, and those tokens were drawn from the target"
    if not found.generation.options["temperature"]:
        return True, "every token is the target's likeliest, as in plain greedy decoding (up to rounding)"
    return True, _WHY["google" if draft.rule == "deepmind" else draft.rule]


def _expected(found: Found) -> float | None:
    """By the formula for a constant acceptance."""
    if found.info.acceptance is None or found.generation.adapt:
        return None
    return float(expected_tokens(found.info.acceptance, found.generation.gamma))


def _compared(found: Found) -> dict[str, Any] | None:
    if found.plain_seconds is None:
        return None
    a, gamma = found.info.acceptance, found.generation.gamma
    formula = None
    if a is not None and found.cost is not None and not found.generation.adapt:
        formula = float(speedup(a, gamma, found.cost))
    return {
        "plain_seconds": round(found.plain_seconds, 4),
        "faster": found.plain_seconds / found.seconds,
        "faster_by_formula": formula,
        "cost_of_a_draft": found.cost,
        "fewer_target_passes": found.plain_passes / max(1, found.info.target_passes),
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
    beside = report["compared_to_plain"]
    if beside is not None:
        ratio = beside["faster"]
        words = f"{ratio:.2f} times faster" if ratio >= 1 else f"{1 / ratio:.2f} times slower"
        formula = beside["faster_by_formula"]
        by_formula = "" if formula is None else f" (by the formula {formula:.2f})"
        lines.append(
            f"beside plain decoding: {words}{by_formula}, {beside['fewer_target_passes']:.2f} times fewer"
            f" target passes; a draft costs {beside['cost_of_a_draft']:.2f} of one"
        )
        if not report["reference"]["temperature"] or report["method"] == "match":
            same = f"{beside['identical_rows']} of {report['prompts']} rows"
            lines.append(f"identical to plain decoding: {same}")
            if beside["identical_rows"] < report["prompts"]:
                lines.append(ROWS_DIFFER)
    return "\n".join(lines)
