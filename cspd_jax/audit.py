"""Tests whether a sampler has the distribution that it claims, for samplers of any
library: functions that return numpy arrays, JAX arrays, torch tensors or lists.

    def verify(seed, p, q, drafts): ...  # your rule
    assert audit.rule(verify)

A test has a law that is known in closed form, and a p-value that holds at the sample's
own size: if the sampler has the law, p <= a has probability at most a. A sampler is
refuted if p <= FALSE_ALARM. A sampler that is not refuted may still be wrong by less
than `Verdict.visible`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cspd_jax.check import UserError

FALSE_ALARM = 1e-4
_MISSED = 0.01  # the probability of missing a deviation as large as `visible`
_MOST_VISIBLE = 0.5  # a test that sees only larger deviations is refused

Array = Any
# A function of a seed, p, q and drafts that returns how many drafts are kept, and what
# follows them.
Rule = Callable[[int, Array, Array, Array], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a test found. It is true if the sampler was not refuted.

    p_value: the probability of a result as extreme if the sampler is right, at most.
    samples: the number of draws.
    visible: if the probability of an event that is tested were off by this much, the
        sampler would have been refuted with probability 0.99.
    sentence: the verdict, for people to read.
    """

    p_value: float
    samples: int
    visible: float
    sentence: str

    @property
    def passed(self) -> bool:
        return self.p_value > FALSE_ALARM

    def __bool__(self) -> bool:
        return self.passed


def rule(
    verify: Rule,
    vocabulary: int = 3,
    drafts: int = 2,
    draws: int = 10_000,
    seed: int = 0,
) -> Verdict:
    """Tests a rule that verifies drafted tokens, with tables of several kinds: p and q
    that are equal, that share no token, that are nearly certain, that have zeros, that
    are sharply peaked, and random ones.

    verify: called as verify(seed, p, q, drafts), with p [n + 1, V] and q [n, V], the
        probabilities of target and drafter after 0, 1, ... drafts, and the drafts [n],
        which were drawn from q. It returns the number of kept drafts and the token
        after them. Every call has another seed.
    draws: the number of calls for each pair of tables.
    """
    random = np.random.default_rng(seed)
    length = drafts + 1
    found = {}
    for name, (p, q) in _tables(vocabulary, random).items():
        law = _of_chain(p, length)
        texts = np.zeros((draws, length), int)
        for i in range(draws):
            drawn = _walk(q, 0, drafts, random)
            before = [0, *drawn]
            kept, token = verify(
                int(random.integers(2**31)), p[before], q[before[:-1]], np.array(drawn)
            )
            kept = _within(kept, length, "drafts kept")
            text = [*drawn[:kept], _within(token, vocabulary, "a token")]
            texts[i] = text + _walk(p, text[-1], drafts - kept, random)
        found[name] = _of_sequences(texts, law)
    visible = _visible(_of_counts(vocabulary**length), draws)
    return _verdict(found, draws * len(found), visible)


def transitions(
    verify: Rule,
    dims: Sequence[int] = (1, 4, 16, 64),
    drafts: int = 3,
    draws: int = 2_000,
    seed: int = 0,
) -> Verdict:
    """Tests a rule that verifies drafted steps of a chain of Gaussians, with equal and
    with unequal variances of target and drafter.

    verify: called as verify(seed, (mean, deviation) of p, (mean, deviation) of q,
        drafts), each [n, d]: the laws of each step given the drafts before it. It
        returns the number of kept drafts and the state after them, which is not read
        if all are kept.
    dims: the numbers d of coordinates.
    draws: the number of calls for each d and each kind of variance.
    """
    random = np.random.default_rng(seed)
    found = {}
    for dim, most in itertools.product(dims, (1.0, 1.6)):
        deviation = 0.7 + 0.3 * random.random(dim)
        wider = random.uniform(1.0, most, dim)
        apart = 0.4 / math.sqrt(dim)  # so that some drafts are kept for every d
        noise = np.zeros((draws, drafts + 1, dim))
        for i in range(draws):
            states = [random.standard_normal(dim)]
            for _ in range(drafts):
                step = wider * deviation * random.standard_normal(dim)
                states.append(0.7 * states[-1] + apart + step)
            before = np.array(states[:-1])
            spread = np.broadcast_to(deviation, before.shape)
            kept, value = verify(
                int(random.integers(2**31)),
                (0.8 * before, spread),
                (0.7 * before + apart, wider * spread),
                np.array(states[1:]),
            )
            kept = _within(kept, drafts + 1, "drafts kept")
            if kept < drafts:
                states[kept + 1] = np.asarray(value, float).reshape(dim)
            for j in range(kept + 2, drafts + 1):
                states[j] = 0.8 * states[j - 1] + deviation * random.standard_normal(
                    dim
                )
            path = np.array(states)
            noise[i, 0] = path[0]
            noise[i, 1:] = (path[1:] - 0.8 * path[:-1]) / deviation
        name = f"d = {dim}, {'equal' if most == 1 else 'unequal'} variances"
        found[name] = normals_p_value(noise)
    tests = len(found) * (2 * drafts + 3)
    visible = _visible(math.log(2 * tests / FALSE_ALARM), draws)
    return _verdict(found, draws * len(found), visible)


def sequences(
    draw: Callable[[int, int], Array],
    log_law: Array,
    draws: int = 20_000,
    seed: int = 0,
) -> Verdict:
    """Tests any generator of sequences of L tokens, as a black box.

    draw: called as draw(seed, n); returns n sequences [n, L].
    log_law: [V, ..., V] the log probability of each sequence, with L axes: of a model
        so small that the law of its sequences is a table.
    """
    law = np.exp(np.asarray(log_law, float))
    if not abs(law.sum() - 1) < 1e-4:
        raise UserError(f"the probabilities of the law sum to {law.sum():g}, not to 1")
    texts = np.asarray(draw(seed, draws))
    if texts.shape != (draws, law.ndim) or texts.dtype.kind not in "iu":
        raise UserError(
            f"the draws are {texts.dtype} {list(texts.shape)}; {draws} sequences of"
            f" {law.ndim} whole numbers were asked for"
        )
    for end in (texts.min(), texts.max()):
        _within(end, law.shape[0], "a token")
    visible = _visible(_of_counts(law.size), draws)
    found = _of_sequences(texts, law / law.sum())
    return _verdict({"sequences": found}, draws, visible)


def greedy(
    plain: Sequence[Sequence[int]],
    fast: Sequence[Sequence[int]],
    margin: Callable[[int, int], float],
    rounding: float = 1e-3,
) -> Verdict:
    """Compares greedy texts token by token. Two texts may part where rounding decides
    between two tokens: where the largest two logits are nearly equal.

    plain, fast: the texts of the reference and of the sampler under test.
    margin: called as margin(row, position), the difference between the largest two
        logits of the reference at the token where a text parts.
    rounding: the largest margin that rounding explains.
    """
    wrong = []
    parted = 0
    if len(plain) != len(fast):
        raise UserError(f"{len(fast)} texts stand beside {len(plain)} plain ones")
    for row, (one, other) in enumerate(zip(plain, fast)):
        one, other = (list(map(operator.index, text)) for text in (one, other))
        if one == other:
            continue
        parted += 1
        same = (a == b for a, b in zip(one, other))
        place = next((i for i, equal in enumerate(same) if not equal), None)
        place = min(len(one), len(other)) if place is None else place
        if not 0 <= (found := float(margin(row, place))) <= rounding:
            wrong.append(f"text {row} at token {place} (margin {found:.2g})")
    if not (tokens := sum(map(len, plain))):
        raise UserError("the texts have no tokens that could be compared")
    sentence = f"{parted} of {len(plain)} texts part, "
    sentence += "none" if not wrong else f"{len(wrong)}"
    sentence += f" where the margin is above {rounding:g}"
    if wrong:
        sentence += f": {', '.join(wrong[:3])}"
    return Verdict(0.0 if wrong else 1.0, tokens, 0.0, sentence)


def _tables(vocabulary: int, random: Any) -> Mapping[str, tuple[Array, Array]]:
    """Returns pairs of tables [V, V] of the next token's probabilities, given the last
    token."""

    def of(weights: Array) -> Array:
        return weights / weights.sum(axis=-1, keepdims=True)

    some, other = (of(random.random((vocabulary, vocabulary))) for _ in range(2))
    half = np.arange(vocabulary) < (vocabulary + 1) // 2
    one = np.eye(vocabulary)[np.roll(np.arange(vocabulary), 1)]
    return {
        "equal": (some, some),
        "random": (some, other),
        "no token in common": (of(some * half), of(other * ~half)),
        "zeros": (of(some * (one == 0)), of(other * (one.T == 0))),
        "nearly certain": (of(one + 1e-3), of(one + 0.3)),
        "sharply peaked": (of(some**8), of(some**2)),
    }


def _walk(table: Array, last: int, count: int, random: Any) -> list[int]:
    text = [last]
    for _ in range(count):
        ends = np.cumsum(table[text[-1]])
        text.append(int(np.searchsorted(ends, ends[-1] * random.random(), "right")))
    return text[1:]


def _of_chain(table: Array, length: int) -> Array:
    """Returns the law [V, ..., V] of the `length` tokens after token 0."""
    law = table[0]
    for _ in range(length - 1):
        law = law[..., None] * table
    return law


def _of_sequences(texts: Array, law: Array) -> float:
    """Returns the p-value of sequences [N, L], by all of their tokens together and by
    each token alone."""
    found = []
    for axes in [tuple(range(law.ndim)), *((i,) for i in range(law.ndim))]:
        rest = tuple(i for i in range(law.ndim) if i not in axes)
        own = law.sum(axis=rest)
        cells = np.ravel_multi_index(tuple(texts[:, i] for i in axes), own.shape)
        found.append(counts_p_value(np.bincount(cells, minlength=own.size), own))
    return min(1.0, len(found) * min(found))


def _within(value: Any, size: int, what: str) -> int:
    """Returns a whole number from 0 to size - 1, of any library's type, as an int."""
    with contextlib.suppress(TypeError):
        if 0 <= operator.index(value) < size:
            return operator.index(value)
    raise UserError(
        f"{what} came out as {value}; it must be a whole number from 0 to {size - 1}"
    )


def _of_counts(cells: int) -> float:
    """Returns the n KL(counts / n | law) from which `counts_p_value` refutes a law of
    this many cells, among a few dozen tests."""
    least = cells - 1.0
    size = np.linspace(least, least + 60 + 12 * math.sqrt(least), 4000)
    log_p = -size + least * (1 + np.log(size / least))
    return float(size[np.argmax(log_p <= math.log(FALSE_ALARM / 40))])


def _visible(threshold: float, draws: int) -> float:
    """Returns the deviation of an event's probability that is refuted with probability
    0.99, if 2 n deviation^2 is refuted from `threshold` on. (The n KL of counts is at
    least as large, by Pinsker.) Raises a UserError if it is too large to be of use."""
    visible = math.sqrt(threshold / (2 * draws)) + math.sqrt(
        math.log(2 / _MISSED) / (2 * draws)
    )
    if visible > _MOST_VISIBLE:
        raise UserError(f"{draws} draws are too few to see anything; give more")
    return visible


def _verdict(found: Mapping[str, float], samples: int, visible: float) -> Verdict:
    worst = min(found, key=lambda name: found[name])
    p = min(1.0, len(found) * found[worst])
    sentence = (
        f"refuted by {samples} draws (p = {p:.2g}), most clearly in: {worst}"
        if p <= FALSE_ALARM
        else f"not refuted by {samples} draws (p = {p:.2g}), which would have shown a"
        f" probability that is off by {visible:.3f}"
    )
    return Verdict(p, samples, visible, sentence)


def counts_p_value(counts: Array, probabilities: Array) -> float:
    """n counts in k cells [k] against their probabilities [k].

    P(KL(counts / n | probabilities) >= e) <= exp(-n e) (n e exp(1) / (k - 1))^(k - 1)
    for n e > k - 1 (Agrawal, 2020): the tail of a chi-square statistic, for any n and
    any rare cell.
    """
    counts = np.asarray(counts, float).ravel()
    probabilities = np.asarray(probabilities, float).ravel()
    assert abs(probabilities.sum() - 1) < 1e-5
    probabilities = probabilities / probabilities.sum()
    if np.any(counts[probabilities == 0] > 0):
        return 0.0
    seen = counts > 0
    divergence = np.sum(
        counts[seen] * np.log(counts[seen] / counts.sum() / probabilities[seen])
    )
    freedom = np.count_nonzero(probabilities) - 1
    if divergence <= freedom:
        return 1.0
    return (
        math.exp(-divergence + freedom * (1 + math.log(divergence / freedom)))
        if freedom
        else 1.0
    )


def share_p_value(share: float, expected: float, count: int) -> float:
    """The mean of `count` independent numbers in [0, 1] against its expectation
    (Hoeffding). If the mean is NaN, so is the p-value, which is then above no limit."""
    return min(2 * math.exp(-2 * count * (share - expected) ** 2), 1.0)


def ks_p_value(sample: Array, cdf: Callable[[Array], Array]) -> float:
    """Kolmogorov-Smirnov: a sample [n] against a continuous distribution function
    (Massart's constant)."""
    u = np.sort(cdf(np.asarray(sample, float).ravel()))
    if not np.all(np.isfinite(u)):
        return 0.0
    n = len(u)
    steps = np.arange(n + 1) / n
    distance = max(np.max(steps[1:] - u), np.max(u - steps[:-1]))
    return min(1.0, 2 * math.exp(-2 * n * distance**2))


def normals_p_value(noise: Array) -> float:
    """Noise [N, L, d] (masked where there is none) against independent standard
    normals: each step's [N, d], differences of neighbouring steps, sums and squared
    norms of rows. What is not finite is refuted.

    Noise is what an output is made of: every failure of a joint law is one of this
    independence.
    """
    from scipy.stats import chi2, norm

    noise = np.ma.asarray(noise)
    if not np.isfinite(noise.compressed()).all():
        return 0.0
    noise = noise.filled(np.nan)
    made = np.sum(~np.isnan(noise), axis=(1, 2))
    some = made > 0
    steps = np.diff(noise, axis=1) / np.sqrt(2)
    total = np.nansum(noise, axis=(1, 2))[some]
    norms = np.nansum(noise**2, axis=(1, 2))[some]
    normals = [
        *np.swapaxes(noise, 0, 1),
        *np.swapaxes(steps, 0, 1),
        total / np.sqrt(made[some]),
    ]
    found = [ks_p_value(one[~np.isnan(one)], norm.cdf) for one in normals]
    found.append(ks_p_value(chi2(made[some]).cdf(norms), lambda u: u))
    return min(1.0, len(found) * min(found))
