"""How many tokens to draft next, from what rounds have taken here and what became of drafts so far.

A round with g drafts takes the time of g drafts and of a pass over g + 1 tokens, which is measured as rounds
go by, and is expected to give 1 + m (a + a^2 + ... + a^g) tokens, where m is the share of the wanted drafts
that were made and a that of the tested ones that were accepted. Both are forgotten slowly, as texts change.
"""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

PLAIN = 0
_MEMORY = 64.0  # tests, or plain rounds, after which the weight of what came before is 1/e
_PRIOR_ACCEPTED, _PRIOR_TESTED = 1.6, 2.0
_PROBE = 2  # rounds that a way is tried for
_RECENT = 5  # chunks whose median time counts: a busy machine is not busy for ever
_AGAIN = 16  # plain rounds after which drafts are tried again, at first
_CHUNK_SECONDS = 0.5
_LONGEST = 64  # rounds of a chunk
_CLEARLY = 1.03  # another way must promise this much more
_WORTH_A_TRY = 1.15  # ... and one that was never tried, this much


class Chunk(NamedTuple):
    """What some rounds with the same number of drafts took and gave, over all rows.

    gamma: drafts that were wanted in a round.
    rounds: one after the other.
    seconds: of all of them.
    taken: rounds of the rows that were not complete.
    drafted, tested, accepted: drafts.
    cold: whether it was the first run of its program, which takes longer than others.
    """

    gamma: int
    rounds: int
    seconds: float
    taken: int
    drafted: int
    tested: int
    accepted: int
    cold: bool = False


class Pace:
    """Chooses the number of drafts for the next chunk of rounds, and how many rounds that should have.

    It first tries the fewest drafts and plain decoding, and more drafts only where many are accepted. While
    plain decoding is ahead it tries drafts again from time to time, ever more rarely.
    """

    def __init__(self, gammas: Sequence[int]):
        self.gammas = sorted(set(gammas))
        self._tried: set[int] = set()
        self._recent = {g: collections.deque[float](maxlen=_RECENT) for g in self.gammas}
        self._seconds: dict[int, float] = {}  # of a round
        self._rounds = dict.fromkeys(self.gammas, 0)
        self._accepted, self._tested = _PRIOR_ACCEPTED, _PRIOR_TESTED
        self._drafted, self._wanted = 1.0, 1.0
        self._since, self._again = 0, _AGAIN  # plain rounds since drafts were tried; when to try them again

    def next(self) -> tuple[int, int]:
        """(drafts, rounds) of the next chunk."""
        untried = self._untried()
        if untried is not None:
            return untried, _PROBE
        best = self.best()
        if best == PLAIN and len(self.gammas) > 1 and self._since >= self._again:
            self._again *= 2
            return self._fewest(), _PROBE
        most = min(_LONGEST, max(1, int(_CHUNK_SECONDS / self._seconds[best])))
        if best == PLAIN:
            most = max(1, min(most, self._again - self._since))
        return best, most

    def saw(self, chunk: Chunk) -> None:
        """Takes note of a chunk."""
        if not chunk.rounds:
            return
        g = chunk.gamma
        self._rounds[g] += chunk.rounds
        took = chunk.seconds / chunk.rounds
        if chunk.cold:
            self._seconds.setdefault(g, took)
        else:
            self._tried.add(g)
            self._recent[g].append(took)
            self._seconds[g] = statistics.median_low(self._recent[g])
        self._since = self._since + chunk.rounds if g == PLAIN else 0
        age = chunk.rounds if g == PLAIN else max(chunk.tested, chunk.taken)
        kept = math.exp(-age / _MEMORY)
        self._accepted = kept * self._accepted + chunk.accepted
        self._tested = kept * self._tested + chunk.tested
        self._drafted = kept * self._drafted + chunk.drafted
        self._wanted = kept * self._wanted + g * chunk.taken

    @property
    def acceptance(self) -> float:
        return (self._accepted + 0.01) / (self._tested + 0.01)

    def tokens(self, gamma: int) -> float:
        """Expected of a round."""
        made = min(1.0, self._drafted / max(self._wanted, 1e-9))
        return 1 + made * sum(self.acceptance**i for i in range(1, gamma + 1))

    def speed(self, gamma: int) -> float:
        """Expected tokens per second of a row; of a way that was not tried, if its rounds took no longer than
        those of the most drafts that were."""
        tried = max(g for g in self._seconds if g <= gamma)
        return self.tokens(gamma) / self._seconds[tried]

    def best(self) -> int:
        """Of the ways that were tried."""
        handicap = {g: 1.0 if g == min(self._seconds) else _CLEARLY for g in self._seconds}
        return max(self._seconds, key=lambda g: self.speed(g) / handicap[g])

    def in_words(self) -> str:
        """The choice and its reasons, in one line."""
        drafting = {g: n for g, n in self._rounds.items() if g != PLAIN and n}
        if PLAIN not in self._seconds or not drafting:
            return "auto: too few tokens to choose"
        most = max(drafting, key=lambda g: (self.speed(g), g))
        takes, gives = self._seconds[most] / self._seconds[PLAIN], self.tokens(most)
        ratio = gives / takes
        share = sum(drafting.values()) / sum(self._rounds.values())
        verdict = "drafting" if self.best() != PLAIN else "plain"
        return (
            f"auto: {verdict}; a round with {most} drafts takes {takes:.2f} plain passes and gives"
            f" {gives:.2f} tokens (acceptance {self.acceptance:.2f}), {ratio:.2f} times plain's speed;"
            f" {share:.0%} of the rounds drafted"
        )

    def _fewest(self) -> int:
        return next(g for g in self.gammas if g != PLAIN)

    def _untried(self) -> int | None:
        """What to try now: the fewest drafts, then plain decoding, then more drafts if they promise more."""
        if len(self.gammas) == 1:
            return None if self._seconds else self.gammas[0]
        for g in (self._fewest(), PLAIN):
            if g in self.gammas and g not in self._tried:
                return g
        for g in self.gammas:
            begun = g in self._seconds
            if g not in self._tried and (begun or self.speed(g) > _WORTH_A_TRY * self.speed(self.best())):
                return g
        return None
