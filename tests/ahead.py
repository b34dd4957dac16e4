"""Options of token speculation in one call, for tests."""

from cspd_jax.image.paper import PaperCriterion
from cspd_jax.image.rounds import PathCriterion, Speculation


def ahead(gamma=4, criterion="path", draft_cost=None, prefill=0.0, **of_criterion):
    kind = {"path": PathCriterion, "paper": PaperCriterion}[criterion]
    return Speculation(kind(**of_criterion), gamma, draft_cost, prefill)
