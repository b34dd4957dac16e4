"""The Inception score, from logits that come a few at a time.

The score of a split is exp(E KL(p(y | x) || p(y))), p(y) the average over that split. ADM's evaluator takes
splits of 5000 images in their order and averages their scores, and so does this. The original and
torch-fidelity take ten splits of a shuffled set, which at 50,000 images are of the same size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SPLIT = 5000  # images


class Score(NamedTuple):
    """The Inception score.

    value: average of the splits' scores.
    deviation: their standard deviation; None of one split.
    splits: their number.
    per_split: images in each but the last, which may have fewer.
    """

    value: float
    deviation: float | None
    splits: int
    per_split: int


class InceptionScore:
    """Adds up what the score of each split needs: averages of p and of sum p log p, in float64."""

    def __init__(self, classes: int, per_split: int = SPLIT):
        self.per_split, self._scores = per_split, list[float]()
        self._total, self._negative_entropy, self._count = np.zeros(classes), 0.0, 0

    def add(self, logits: np.ndarray) -> None:
        """logits: [N, classes]."""
        while len(logits):
            taken = logits[: self.per_split - self._count]
            logits = logits[len(taken) :]
            self._add(np.asarray(taken, np.float64))
            if self._count == self.per_split:
                self._close()

    def _add(self, logits: np.ndarray) -> None:
        logits = logits - logits.max(axis=1, keepdims=True)
        exponentials = np.exp(logits)
        total = exponentials.sum(axis=1, keepdims=True)
        probability = exponentials / total
        self._total += probability.sum(axis=0)
        self._negative_entropy += float((probability * (logits - np.log(total))).sum())
        self._count += len(logits)

    def _close(self) -> None:
        mean = self._total / self._count
        entropy = -float((mean * np.log(np.maximum(mean, np.finfo(np.float64).tiny))).sum())
        self._scores.append(float(np.exp(self._negative_entropy / self._count + entropy)))
        self._total, self._negative_entropy, self._count = np.zeros_like(self._total), 0.0, 0

    def score(self) -> Score:
        """Of everything that was added, at least one image; the last split is closed."""
        if self._count:
            self._close()
        deviation = float(np.std(self._scores)) if len(self._scores) > 1 else None
        return Score(float(np.mean(self._scores)), deviation, len(self._scores), self.per_split)
