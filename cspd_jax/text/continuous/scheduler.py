"""How many tokens to draft next, from what rounds have taken here and what became of drafts so far.

A round with g drafts takes the time of g drafts and of a pass over g + 1 tokens, which is measured as rounds
go by, and is expected to give 1 + m (a + a^2 + ... + a^g) tokens, where m is the share of the wanted drafts
that were made and a that of the tested ones that were accepted. Both are forgotten slowly, as texts change.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cspd_jax.errors import check_whole, shown
from cspd_jax.text.checks import require

PLAIN = 0
_MOST_DRAFTS = 1024
_MEMORY = 64.0  # tests, or plain rounds, after which the weight of what came before is 1/e
_PRIOR_ACCEPTED, _PRIOR_TESTED = 1.6, 2.0
_PROBE = 2  # rounds for which a number of drafts is tried
_SHORT_PROBE = 6  # ... and this many more where those took less time than the next constant says
_LONG_PROBE, _NEAR = 8, 1.12  # ... or for so many, where it is less than this much slower than the best
_PROBE_SECONDS = 0.005  # shorter measurements are noise
_RECENT = 5  # chunks, the median of whose rounds counts: a busy machine is not busy for ever
_RETRY = 20  # rounds after which the other kind, plain or drafting, is tried again, at first
_CHUNK_SECONDS = 0.5
_LONGEST = 64  # rounds of a chunk
_CLEARLY = 1.03  # another number of drafts must promise this much more
_WORTH_A_TRY = 1.15  # ... and one that was never tried, this much
# Measurements that a claim can rest on: so many rounds or chunks, and no less time.
_FEWEST_ROUNDS, _FEWEST_CHUNKS, _FEWEST_SECONDS = 8, 3, 0.003
_ALIKE = 1.1  # a ratio of speeds below this is not worth a claim


class Chunk(NamedTuple):
    """What some rounds with the same number of drafts took and gave, over all rows.

    gamma: drafts that were wanted in a round.
    rounds: how many there were, one after the other.
    seconds: what all of them took together, without compilation and without a program's first run.
    taken: rounds of the rows that were not complete.
    drafted, tested, accepted: numbers of drafts.
    overhead: the part of the seconds that no round took: the call of the program, and a drafter that reads
        what was decoded without it.
    """

    gamma: int
    rounds: int
    seconds: float
    taken: int
    drafted: int
    tested: int
    accepted: int
    overhead: float = 0.0


class DraftScheduler:
    """Chooses the number of drafts for the next chunk of rounds, and how many rounds that should have.

    It first tries the fewest drafts and plain decoding, and more drafts only where many are accepted. While
    drafting is ahead it tries plain decoding again from time to time, ever more rarely, and the reverse.
    """

    def __init__(self, gammas: Sequence[int]):
        """gammas: the numbers of drafts to choose from, 0 for plain decoding. With one there is no choice."""
        require(
            isinstance(gammas, Sequence) and len(gammas) and not isinstance(gammas, str),
            f"gammas is {shown(gammas)}; it must be a list of whole numbers, for example [0, 2, 4]",
        )
        for gamma in gammas:
            check_whole("a number of drafts", gamma, 0, _MOST_DRAFTS)
        self.gammas = sorted(set(gammas))
        self._recent = {g: collections.deque[tuple[float, int]](maxlen=_RECENT) for g in self.gammas}
        self._round_seconds: dict[int, float] = {}
        self._spent = dict.fromkeys(self.gammas, 0.0)  # seconds of the rounds with each number of drafts
        self._rounds = dict.fromkeys(self.gammas, 0)
        self._chunks = dict.fromkeys(self.gammas, 0)
        self._seconds, self._plain_rounds = 0.0, 0.0  # so far; plain rounds that would have given as much
        self._accepted, self._tested = _PRIOR_ACCEPTED, _PRIOR_TESTED
        self._drafted, self._wanted = 1.0, 1.0
        self._newest = PLAIN
        self._since, self._retry = 0, _RETRY  # rounds since the other kind was tried; when to try it again

    def next(self) -> tuple[int, int]:
        """Returns (drafts, rounds) of the next chunk."""
        untried = self._untried()
        if untried is not None:
            return untried, self._probe(untried)
        best = self.best()
        max_rounds = min(_LONGEST, max(1, int(_CHUNK_SECONDS / self._round_seconds[best])))
        if PLAIN not in self.gammas or len(self.gammas) == 1:
            return best, max_rounds
        if self._since >= self._retry and (best == PLAIN) == (self._newest == PLAIN):
            self._retry *= 2
            if best != PLAIN:
                return PLAIN, self._probe(PLAIN)
            drafting = max((g for g in self._round_seconds if g != PLAIN), key=self.speed)
            near = _NEAR * self.speed(drafting) > self.speed(PLAIN)
            return drafting, _LONG_PROBE if near else self._probe(drafting)
        return best, max(1, min(max_rounds, self._retry - self._since))

    def record(self, chunk: Chunk) -> None:
        """Takes note of a chunk."""
        require(isinstance(chunk, Chunk), f"a chunk is {shown(chunk)}; it must be a Chunk(...)")
        if not chunk.rounds:
            return
        g = chunk.gamma
        spent = max(chunk.seconds - chunk.overhead, 0.1 * chunk.seconds)
        self._recent[g].append((spent / chunk.rounds, chunk.rounds))
        self._round_seconds[g] = _median(self._recent[g])
        self._spent[g] += spent
        self._rounds[g] += chunk.rounds
        self._chunks[g] += 1
        self._seconds += chunk.seconds
        self._plain_rounds += chunk.rounds * (1 + chunk.accepted / max(1, chunk.taken))
        same_kind = (g == PLAIN) == (self._newest == PLAIN)
        self._since, self._newest = chunk.rounds + (self._since if same_kind else 0), g
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
        """Returns the tokens that a round is expected to give."""
        made = min(1.0, self._drafted / max(self._wanted, 1e-9))
        return 1 + made * sum(self.acceptance**i for i in range(1, gamma + 1))

    def speed(self, gamma: int) -> float:
        """Returns the expected tokens per second of a row; with a number of drafts that was not tried, if its
        rounds took no longer than those of the most drafts that were."""
        tried = [g for g in self._round_seconds if g <= gamma]
        require(tried, f"no rounds with {shown(gamma)} drafts or fewer were measured")
        return self.tokens(gamma) / self._round_seconds[max(tried)]

    def best(self) -> int:
        """Returns the fastest number of drafts of those that were tried."""
        require(self._round_seconds, "no rounds were measured, so no number of drafts is the fastest")
        fewest = min(self._round_seconds)
        handicap = {g: 1.0 if g == fewest else _CLEARLY for g in self._round_seconds}
        return max(self._round_seconds, key=lambda g: self.speed(g) / handicap[g])

    @property
    def saved(self) -> float | None:
        """The seconds by which plain rounds would have taken longer, by those that were measured; None if
        too few were."""
        if not self._is_known(PLAIN):
            return None
        return self._plain_rounds * self._round_seconds[PLAIN] - self._seconds

    def in_words(self, seconds: float | None = None) -> str:
        """Returns the choice and its reasons, in one line.

        seconds: what the whole generation took. With it, and if enough plain rounds were measured, the line
            says what drafting gained.
        """
        drafting = {g: n for g, n in self._rounds.items() if g != PLAIN and n}
        if not self._rounds.get(PLAIN) or not drafting:
            return "auto: too few tokens to choose"
        most = max(drafting, key=lambda g: (self.speed(g), g))
        share = sum(drafting.values()) / sum(self._rounds.values())
        verdict, saved = "drafting" if self.best() != PLAIN else "plain", self.saved
        words = f"auto: {verdict}; {share:.0%} of the rounds drafted; a round with {most} drafts"
        if self._is_known(PLAIN) and self._is_known(most):
            words += f" takes {self._round_seconds[most] / self._round_seconds[PLAIN]:.2f} plain passes and"
        words += f" gives {self.tokens(most):.2f} tokens (acceptance {self.acceptance:.2f})"
        if saved is None or seconds is None:
            return words
        ratio = (seconds + saved) / seconds
        if max(ratio, 1 / ratio) < _ALIKE:
            return f"{words}; all in all about as fast as plain rounds"
        faster = f"{ratio:.2f} times as fast as" if ratio > 1 else f"{1 / ratio:.2f} times slower than"
        return f"{words}; all in all {faster} plain rounds"

    def _fewest(self) -> int:
        return next(g for g in self.gammas if g != PLAIN)

    def _is_known(self, g: int) -> bool:
        """Returns whether so many rounds were measured that a claim can rest on what they take."""
        often = self._rounds[g] >= _FEWEST_ROUNDS or self._chunks[g] >= _FEWEST_CHUNKS
        return often and self._spent[g] >= _FEWEST_SECONDS

    def _probe(self, g: int) -> int:
        """Returns the rounds of a trial: more where they are short."""
        return _SHORT_PROBE if self._round_seconds.get(g, 1.0) * _PROBE < _PROBE_SECONDS else _PROBE

    def _is_tried(self, g: int) -> bool:
        """Returns whether enough rounds were measured to know what they take."""
        return self._rounds[g] > 0 and (
            self._spent[g] >= _PROBE_SECONDS or self._rounds[g] >= _PROBE + _SHORT_PROBE
        )

    def _untried(self) -> int | None:
        """Returns what to try: the fewest drafts, plain decoding, then more drafts if they promise more."""
        if len(self.gammas) == 1:
            return None if self._round_seconds else self.gammas[0]
        for g in (self._fewest(), PLAIN):
            if g in self.gammas and not self._is_tried(g):
                return g
        for g in self.gammas:
            begun = g in self._round_seconds
            promising = begun or self.speed(g) > _WORTH_A_TRY * self.speed(self.best())
            if promising and not self._is_tried(g):
                return g
        return None


def _median(chunks: Iterable[tuple[float, int]]) -> float:
    """Returns the lower median of the seconds of a round, from (seconds, rounds) of chunks."""
    ordered = sorted(chunks)
    before, half = 0, sum(rounds for _, rounds in ordered) / 2
    for seconds, rounds in ordered:
        before += rounds
        if before >= half:
            return seconds
    raise ValueError("there are no chunks")
