"""Options of token speculation in one call, for tests."""

from cspd_jax.image.rounds import PaperCriterion, PathCriterion, TokenSpeculation


def ahead(gamma=4, criterion="path", draft_cost=None, prefill=0.0, joint=False, **of_criterion):
    kind = {"path": PathCriterion, "paper": PaperCriterion}[criterion]
    return TokenSpeculation(kind(**of_criterion), gamma, draft_cost, prefill, joint)
