"""FID's mathematics in closed form: the distance, moments, the Inception score,
precision and recall."""

import numpy as np
import pytest

from cspd_jax.tools.evaluation import fid

RNG = np.random.default_rng(0)


def test_inception_score_in_closed_form():
    """Certain of one of k classes, equally often: k. Never certain: 1."""
    certain = np.where(np.arange(10) == np.arange(200)[:, None] % 4, 50.0, -50.0)
    assert fid.inception_score(certain) == pytest.approx(4)
    assert fid.inception_score(np.zeros((30, 8))) == pytest.approx(1)
    extreme = np.where(np.arange(10) == np.arange(200)[:, None] % 10, 1e4, -1e4)
    assert fid.inception_score(extreme) == pytest.approx(10)


def test_precision_and_recall_by_definition(monkeypatch):
    samples = RNG.standard_normal((60, 5)).astype(np.float32)
    reference = (RNG.standard_normal((45, 5)) * 0.6 + 0.4).astype(np.float32)

    def by_hand(rows, others, k):
        among = np.sort(np.linalg.norm(others[:, None] - others, axis=2), axis=1)[:, k]
        return int(
            (np.linalg.norm(rows[:, None] - others, axis=2) <= among).any(axis=1).sum()
        )

    for k in (1, 3, 10):
        expected = by_hand(samples, reference, k), by_hand(reference, samples, k)
        assert fid.precision_recall(samples, reference, k) == expected
        monkeypatch.setattr(fid, "MOST_DISTANCES", 100)  # one or two rows at a time
        assert fid.precision_recall(samples, reference, k) == expected
        monkeypatch.undo()
    assert by_hand(samples, reference, 1) != by_hand(samples, reference, 10)


def test_frechet_distance_of_two_gaussians():
    """Of rows with other means and covariances that do not commute: by the eigenvalues
    of C1 C2, which are not symmetric."""
    a = np.array([[1.0, 0.0, 0.0], [0.5, 1.2, 0.0], [-0.3, 0.2, 0.7]])
    b = np.array([[0.6, 0.9, 0.1], [0.0, 0.8, -0.4], [0.0, 0.0, 1.5]])
    first = RNG.standard_normal((50, 3)) @ a
    second = RNG.standard_normal((50, 3)) @ b + [0.7, -0.2, 0.4]
    c1, c2 = (np.cov(rows.T) for rows in (first, second))
    gap = first.mean(axis=0) - second.mean(axis=0)
    roots = np.sqrt(np.linalg.eigvals(c1 @ c2).real)
    exact = gap @ gap + np.trace(c1) + np.trace(c2) - 2 * roots.sum()
    found = fid.distance(fid.fitted(first), fid.fitted(second))
    assert found == pytest.approx(exact, rel=1e-9)
    # Negative control: another formula.
    assert abs(found - gap @ gap - np.square(c1 - c2).sum()) > 0.1
    same = fid.fitted(first.astype(np.float32))
    assert abs(fid.distance(same, same)) < 1e-9
