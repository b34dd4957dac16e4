"""Look-up where the text repeats itself, and another drafter elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp

from cspd_jax.errors import check_whole
from cspd_jax.text.checks import require
from cspd_jax.text.drafters import (
    Drafter,
    DrafterLike,
    Drafting,
    DraftRequest,
    Drafts,
    PromptLookup,
    entering_of,
    resolve_drafter,
)
from cspd_jax.text.prompts import Prompts
from cspd_jax.text.sampling import point_mass

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class LookUpOr:
    """Copies where look-up finds something, and drafts of `other` in the rows where it does not.

    Which of them drafts is decided by the text alone, so the drafts may be verified as any. A copy goes on
    for as many tokens as are wanted, the other drafter for `most` of them at most.
    """

    other: Any
    lookup: PromptLookup = dataclasses.field(default_factory=PromptLookup)
    most: int = 3

    def __post_init__(self) -> None:
        check_whole("most", self.most, 1, 1024)

    @property
    def entering(self) -> tuple[int, ...]:
        return entering_of(self.other)

    def lacks(self, gamma: int) -> int:
        return gamma + 3 if self._falls_behind(gamma) else self.other.lacks(gamma)

    def _falls_behind(self, gamma: int) -> bool:
        """Whether a round of copies may add more tokens than the other drafter reads by itself."""
        return self.other.lacks(gamma) <= gamma

    def begin(self, params: Any, prompts: Prompts, max_len: int) -> Any:
        return self.other.begin(params, prompts, max_len)

    def begin_with(self, params: Any, prompts: Prompts, max_len: int, states: Array) -> Any:
        return self.other.begin_with(params, prompts, max_len, states)

    def read_on(
        self, params: Any, state: Any, texts: Prompts, read: Array, count: int, *states: Array
    ) -> Any:
        return self.other.read_on(params, state, texts, read, count, *states)

    def draft(self, params: Any, state: Any, request: DraftRequest) -> tuple[Drafts, Any]:
        copies, _ = self.lookup.draft(None, None, request)
        if self._falls_behind(request.max_gamma):
            texts = Prompts(request.tokens, request.length)
            first = request.length - request.max_gamma - 3
            state = self.read_on(params, state, texts, first, request.max_gamma + 1)
        copied = copies.count > 0
        wanted = jnp.where(copied, 0, jnp.minimum(request.count, self.most))
        drafts, state = self.other.draft(params, state, request._replace(count=wanted))
        tokens = jnp.where(copied[:, None], copies.tokens, drafts.tokens)
        log_q = drafts.log_q
        if log_q is not None:
            certain = point_mass(copies.tokens, request.num_ids, log_q.dtype)
            log_q = jnp.where(copied[:, None, None], certain, log_q)
        count = jnp.where(copied, copies.count, drafts.count)
        return drafts._replace(tokens=tokens, count=count, log_q=log_q), state


def look_up_or(drafter: DrafterLike, most: int = 3) -> Drafting:
    """Makes a drafter that copies where the text repeats itself, and elsewhere drafts up to `most` tokens
    with a model or a head (`draft_from_states`)."""
    other, params = resolve_drafter(drafter)
    require(
        hasattr(other, "read_on") and hasattr(other, "lacks"),
        f"look_up_or goes with a draft model or a head, not with {type(other).__name__}",
    )
    return Drafting(cast(Drafter, LookUpOr(other, most=most)), params)
