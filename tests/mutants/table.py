"""Small mistakes that tests must notice: a file, what stands there, what it becomes, which tests see it.

Each is one that somebody could make. `run.py` applies them to a copy, one at a time.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A mistake.

    name: for people, and for `--only`.
    file: from the root of the repository.
    old: a text that stands there exactly once.
    new: what it becomes.
    tests: of the default tests, as pytest takes them; one of them must fail.
    why_it_survives: of one that no default test can notice, the reason; it is not counted as a hole.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why_it_survives: str = ""


def _table(file: str, tests: tuple[str, ...], *rows: tuple) -> list[Mutant]:
    """Rows of (name, old, new) or (name, old, new, tests)."""
    return [Mutant(row[0], file, row[1], row[2], row[3] if len(row) > 3 else tests) for row in rows]


CHAIN = "tests/image/test_chain_speculation.py"
TOKENS = "tests/image/test_token_speculation.py"
PROTOCOL = "tests/image/test_protocol_image.py"
PLAIN = "tests/image/test_plain.py"
RELEASED = "tests/image/test_released.py"
HASHES = "tests/repository/test_token_hashes.py"

COMMITS = f"{CHAIN}::test_what_a_call_commits"
CHAIN_KEYS = f"{CHAIN}::test_nothing_random_of_a_call_is_used_twice"

CHAINS = _table(
    "cspd_jax/image/chain/speculation.py",
    (CHAIN,),
    (
        "chain: the drafter's q without the temperature",
        "q = Gaussian(q.mean, q.log_var + inputs.log_scale)",
        "q = Gaussian(q.mean, q.log_var)",
        (f"{CHAIN}::test_drafts_are_drawn_from_what_is_reported",),
    ),
    (
        "chain: p without the temperature",
        "p = Gaussian(p.mean, p.log_var + inputs.log_scale)",
        "p = Gaussian(p.mean, p.log_var)",
        (f"{CHAIN}::test_path_and_its_density",),
    ),
    (
        "chain: temperature taken for the variance",
        "log_scale=2 * jnp.log(",
        "log_scale=jnp.log(",
        (f"{CHAIN}::test_drafts_are_drawn_from_what_is_reported",),
    ),
    (
        "chain: noise and coins have the same key",
        "coins = jax.vmap(jax.random.fold_in, (0, None))(keys, 1)",
        "coins = jax.vmap(jax.random.fold_in, (0, None))(keys, 0)",
        (CHAIN_KEYS,),
    ),
    (
        "chain: random numbers of every call are the same",
        "keys = jax.vmap(jax.random.fold_in)(inputs.keys, chain.left)",
        "keys = jax.vmap(jax.random.fold_in)(inputs.keys, 0 * chain.left)",
        (CHAIN_KEYS,),
    ),
    (
        "chain: noise in the last step although it is off",
        "to_end = active & ~replaced & (chain.left == end) & (not inputs.final_noise)",
        "to_end = active & (chain.left < 0)",
        (COMMITS,),
    ),
    (
        "chain: the last state is the mean although it has noise",
        "(chain.left == end) & (not inputs.final_noise)",
        "(chain.left == end)",
        (COMMITS,),
    ),
    (
        "chain: the last step is tested although it has no noise",
        "tested = draft.valid & (inputs.final_noise | (draft.steps > 0))",
        "tested = draft.valid & (draft.steps >= 0)",
        (f"{CHAIN}::test_counts", f"{CHAIN}::test_a_perfect_guess_takes_the_fewest_calls"),
    ),
    (
        "chain: steps that are left over of a window are tested",
        "(coins, p, draft.q, draft.after, tested)",
        "(coins, p, draft.q, draft.after, tested | ~draft.valid)",
        (f"{CHAIN}::test_counts", f"{CHAIN}::test_a_perfect_guess_takes_the_fewest_calls"),
    ),
    (
        "chain: the state after the kept drafts is counted as accepted",
        "accepted=_count(jnp.where(active, kept, 0)),",
        "accepted=_count(jnp.where(active, kept + replaced, 0)),",
        (COMMITS,),
    ),
    (
        "chain: what is replaced is not counted as tested",
        "tested=_count(jnp.where(active, kept + replaced, 0)),",
        "tested=_count(jnp.where(active, kept, 0)),",
        (COMMITS,),
    ),
    (
        "chain: a truncated draw is not reported",
        "truncated=_count(replaced & block.truncated),",
        "truncated=_count(~active & block.truncated),",
        (COMMITS,),
    ),
    (
        "chain: truncation of rows that needed no draw is reported",
        "truncated=_count(replaced & block.truncated),",
        "truncated=_count(block.truncated),",
        (COMMITS,),
    ),
    (
        "chain: one draft more is kept",
        "kept = jnp.where(replaced, block.kept, end - to_end)",
        "kept = jnp.where(replaced, block.kept + 1, end - to_end)",
        (COMMITS,),
    ),
    (
        "chain: the draft in place of the residual",
        "x = _where_row(replaced, block.value.astype(chain.x.dtype), _where_row(",
        "x = _where_row(replaced, pick(draft.after), _where_row(",
        (COMMITS,),
    ),
    (
        "chain: finished rows go on",
        "jax.tree.map(functools.partial(_where_row, active), moved, chain._replace(path=None))",
        "moved",
        (COMMITS,),
    ),
    (
        "chain: the path keeps the dropped draft",
        "drafted = drafted.at[last, jnp.arange(rows), : x.shape[-1]].set(x)",
        "drafted = drafted.at[last, jnp.arange(rows), : x.shape[-1]].add(0)",
        (COMMITS,),
    ),
    (
        "chain: the path has drafts that were dropped",
        "jnp.where((index < taken) & active, draft.steps, len(path))",
        "jnp.where((index < length) & active, draft.steps, len(path))",
        (COMMITS,),
    ),
    (
        "chain: the guess is that of the drafter, not the head's",
        "inputs.drafter.advance(step, pick(verdict.predicted), pick(draft.before), x - p.mean)",
        "inputs.drafter.advance(step, chain.guess, pick(draft.before), x - p.mean)",
        (COMMITS,),
    ),
    (
        "chain: the guess is advanced by the draft's deviation of the wrong sign",
        "x - p.mean)\n    here",
        "p.mean - x)\n    here",
        (COMMITS,),
    ),
    (
        "chain: rows of the head without those that a drafter asks for",
        "rows=jnp.int32(verdict.states * rows * inputs.halves),",
        "rows=jnp.int32(length * rows * inputs.halves),",
        (COMMITS,),
    ),
    (
        "chain: unwanted rows are run",
        "left = jnp.where(active, left, 0)",
        "left = left",
        (f"{CHAIN}::test_inactive_rows_cost_no_call",),
    ),
    (
        "chain: the first draft lengths hold for one call less",
        "(carry[1].calls < until)",
        "(carry[1].calls < until - 1)",
        (f"{CHAIN}::test_a_perfect_guess_takes_the_fewest_calls",),
    ),
)

HEADS = _table(
    "cspd_jax/image/chain/head.py",
    (PROTOCOL,),
    (
        "chain: the guidance scale of the first row for all",
        "scale[lane]",
        "scale[jnp.zeros_like(lane)]",
    ),
)

GAUSSIAN_BLOCK = "tests/coupling/test_coupling_gaussian_block.py"

BLOCKS = _table(
    "cspd_jax/coupling/block.py",
    (GAUSSIAN_BLOCK,),
    (
        "block of Gaussians: pi is not limited to 1",
        "return sums - jax.lax.cummax(sums)",
        "return sums",
    ),
    (
        "block of Gaussians: pi is limited once, at its end",
        "return sums - jax.lax.cummax(sums)",
        "return jnp.minimum(sums, 0)",
    ),
    (
        "block of Gaussians: pi begins anew with each transition",
        "sums = jnp.concatenate([jnp.zeros_like(ratios[:1]), jnp.cumsum(ratios)])",
        "sums = jnp.concatenate([jnp.zeros_like(ratios[:1]), ratios])",
    ),
    (
        "block of Gaussians: drafts behind what is no number are kept",
        "jnp.where(jnp.isnan(log_ratios), -_HUGE,",
        "jnp.where(jnp.isnan(log_ratios), 0,",
    ),
    (
        "block of Gaussians: the residual of the single transition",
        "log_accept(bound, z, log_ratio(p, q, x) + log_pi)",
        "log_accept(bound, z, log_ratio(p, q, x))",
    ),
    (
        "block of Gaussians: proposing weighs as if pi were 1",
        "proposing, tails = weight * jnp.exp(log_pi), -jnp.expm1(log_pi)",
        "proposing, tails = weight, -jnp.expm1(log_pi)",
    ),
    (
        "block of Gaussians: a proposal's bound may weigh more than 1",
        "weights = jnp.where(finite, jnp.minimum(bound.mean, 1), 1)",
        "weights = jnp.where(finite, bound.mean, 1)",
    ),
    (
        "block of Gaussians: the first coin that falls heads, not the last",
        "best = jnp.argmax(jnp.where(side == _HEADS, at, -1))",
        "best = jnp.argmin(jnp.where((side == _HEADS) & (at >= 0), at, most))",
    ),
    (
        "block of Gaussians: the value of an earlier coin is taken",
        "better = heads > coins.last\n        return _Coins(\n            coins.open & ~fallen"
        " & (index > heads),",
        "better = heads >= 0\n        return _Coins(\n            coins.open & ~fallen,",
    ),
    (
        "block of Gaussians: an undecided coin has fallen",
        "fallen = jnp.zeros(most, bool).at[jnp.where(side != _UNDECIDED, at, most)]",
        "fallen = jnp.zeros(most, bool).at[jnp.where(at >= 0, at, most)]",
    ),
    (
        "block of Gaussians: every trip has the same random numbers",
        "jax.random.bits(jax.random.fold_in(key_trials, coins.trips), shape, jnp.uint32)",
        "jax.random.bits(jax.random.fold_in(key_trials, 0), shape, jnp.uint32)",
        (f"{GAUSSIAN_BLOCK}::test_the_coin_of_a_prefix",),
    ),
    (
        "block of Gaussians: the last proposal, not the one that decides",
        "return side[first], x[first]",
        "return side[first], x[-1]",
    ),
    (
        "block of Gaussians: the end coin always falls heads",
        "all_kept = accepts(u[-1], log_pi[-1])",
        "all_kept = accepts(u[-1], 0 * log_pi[-1])",
    ),
    (
        "block of Gaussians: the end coin never falls heads",
        "all_kept = accepts(u[-1], log_pi[-1])",
        "all_kept = u[-1] < 0",
    ),
    (
        "block of Gaussians: the end coin has the number of another",
        "all_kept = accepts(u[-1], log_pi[-1])",
        "all_kept = accepts(u[-2], log_pi[-1])",
    ),
    (
        "block of Gaussians: drafts that are not there are tested",
        "begun = valid & ~all_kept &",
        "begun = ~all_kept &",
    ),
    (
        "block of Gaussians: ratios of drafts that are not there count",
        "prefix_log_pi(jnp.where(valid, log_ratio(p, q, drafts), 0))",
        "prefix_log_pi(log_ratio(p, q, drafts))",
    ),
    (
        "block of Gaussians: what is given up is not reported",
        "jnp.where(better, given_up[best] | ~finite[row[best]], coins.truncated),",
        "coins.truncated,",
    ),
    (
        "block of Gaussians: the first coin is tried in place of one that there is not",
        "side = jnp.where(at >= 0, jnp.where(given_up, _HEADS, side), _UNDECIDED)",
        "side = jnp.where(given_up, _HEADS, side)",
        (f"{GAUSSIAN_BLOCK}::test_a_coin_is_tossed_until_it_falls",),
    ),
)
BLOCKS += [
    Mutant(
        name,
        "cspd_jax/coupling/block.py",
        old,
        new,
        (GAUSSIAN_BLOCK,),
        why_it_survives=why,
    )
    for name, old, new, why in (
        (
            "block of Gaussians: coins before one that fell heads go on",
            "coins.open & ~fallen & (index > heads),",
            "coins.open & ~fallen,",
            "only trips: what they say is not better",
        ),
        (
            "block of Gaussians: an earlier coin that falls heads is better",
            "better = heads > coins.last",
            "better = heads >= 0",
            "earlier coins are no longer open",
        ),
        (
            "block of Gaussians: coins from the first forwards",
            "behind = jnp.cumsum(open[::-1])[::-1] - open",
            "behind = jnp.cumsum(open) - open",
            "only trips: the last that falls heads is found all the same",
        ),
        (
            "block of Gaussians: the last trial, not the first that decides",
            "first = jnp.where(jnp.any(decided), jnp.argmax(decided), len(bits) - 1)",
            "first = len(bits) - 1",
            "only trips: one trial is as good as another",
        ),
    )
]

STATES = "tests/text/test_text_states.py"
STATES_TRAINING = "tests/training/test_states_training.py"

STATES_READ = [
    *_table(
        "cspd_jax/text/states.py",
        (f"{STATES}::test_drafts_are_those_without_a_cache",),
        (
            "head: a state goes with its own token, not with the next one",
            "jnp.take_along_axis(texts.tokens, jnp.minimum(index + 1, last), axis=1)",
            "jnp.take_along_axis(texts.tokens, index, axis=1)",
        ),
        (
            "head: a draft lies where its token does",
            "position < request.tokens.shape[1], position - 1, request.tokens.shape[1]",
            "position < request.tokens.shape[1], position, request.tokens.shape[1]",
        ),
        (
            "head: a round reads one place too few again",
            "count = request.max_gamma + 1\n",
            "count = request.max_gamma\n",
        ),
        (
            "head: what it made of the last draft is not fed back",
            "_Newest(state[:, 0], cache)",
            "_Newest(newest.state, cache)",
        ),
        (
            "head: drafts without a state",
            "jnp.where(request.length > 1, request.count, 0)",
            "request.count",
        ),
    ),
    *_table(
        "cspd_jax/text/drafters.py",
        (STATES,),
        ("head: a draft is its own id, not the target's", "own[drawn]", "drawn"),
        (
            "head: q of the target's ids in another order",
            ".at[..., own].max(log_q)",
            ".at[..., own[::-1]].max(log_q)",
            ("tests/text/test_text_distribution.py::test_texts_have_the_target_s_distribution",),
        ),
    ),
    *_table(
        "cspd_jax/text/either.py",
        (
            f"{STATES}::test_look_up_before_another_drafter",
            "tests/text/test_text_distribution.py::test_texts_have_the_target_s_distribution",
        ),
        (
            "either: copies are drawn from the other drafter's q",
            "log_q = jnp.where(copied[:, None, None], certain, log_q)",
            "log_q = jnp.where(copied[:, None, None], log_q, log_q)",
        ),
        (
            "either: the other drafter drafts where a copy is",
            "jnp.where(copied, 0, ",
            "jnp.where(copied, 1, ",
        ),
        (
            "either: a model never reads what was copied",
            "return self.other.lacks(gamma) <= gamma",
            "return False",
            (f"{STATES}::test_a_model_behind_look_up_knows_what_was_copied",),
        ),
    ),
    *_table(
        "cspd_jax/training/text/states.py",
        (STATES_TRAINING,),
        (
            "head training: a turn sees one state too many",
            "visible = own | ((turn == 0) & (slot <= places[:, None] - k))",
            "visible = own | ((turn == 0) & (slot <= places[:, None]))",
        ),
        (
            "head training: the state that is fed back is not shifted",
            "state = jnp.roll(state, 1, axis=1)",
            "state = jnp.roll(state, 0, axis=1)",
        ),
        (
            "head training: the target's opinion of the next token",
            "after_next(rows.hidden, 1).astype",
            "after_next(rows.hidden, 0).astype",
        ),
    ),
    *_table(
        "converters/eagle.py",
        ("tests/converters/test_eagle.py",),
        ("head: d2t is an id, not an offset", "own = own + offsets.numpy()", "own = offsets.numpy()"),
        (
            "head: layers by what enters them in every file",
            "return tuple(i + by_leaving",
            "return tuple(i + 0",
        ),
    ),
]

DRAFTERS = _table(
    "cspd_jax/image/chain/drafters.py",
    (CHAIN, HASHES),
    (
        "chain drafter: the gain of the step before",
        "for a in (self.gain[step],",
        "for a in (self.gain[step - 1],",
    ),
    ("chain drafter: typical v moves the other way", "guess.v + after - before", "guess.v + before - after"),
    (
        "chain drafter: x_0-hat is not limited",
        "return transition_from_x0(c, x, self._limited(guess.x0), guess.v)",
        "return transition_from_x0(c, x, guess.x0, guess.v)",
    ),
    (
        "chain drafter: x_0-hat is not limited in a window",
        "u = at_steps(c, steps).mean_x0 * self._limited(x0) + deviation",
        "u = at_steps(c, steps).mean_x0 * x0 + deviation",
        (f"{CHAIN}::test_drafts_are_drawn_from_what_is_reported",),
    ),
    (
        "chain drafter: a window's q without the temperature",
        "at.log_posterior + log_scale",
        "at.log_posterior",
    ),
    (
        "chain drafter: a window's x_0-hat moves with its own deviation",
        "self.states(c, steps, x, guess.x0 + sum_before(moves), deviation)",
        "self.states(c, steps, x, guess.x0 + sum_before(moves) + moves, deviation)",
        (f"{CHAIN}::test_drafts_are_drawn_from_what_is_reported",),
    ),
    (
        "chain drafter: a window forgets the state it starts from in the last step",
        "jnp.concatenate([jnp.full_like(h[:1], jnp.inf), h[:-1]])",
        "jnp.concatenate([h[:1], h[:-1]])",
    ),
    (
        "chain drafter: a class that drafts differently inherits the window",
        'return drafter.window if "window" in vars(type(drafter)) else None',
        'return getattr(drafter, "window", None)',
    ),
)

JACOBIAN = "tests/image/test_jacobian_drafter.py"

JACOBIANS = _table(
    "cspd_jax/image/chain/jacobian.py",
    (JACOBIAN,),
    (
        "jacobian: C with lambda of the step after",
        "found = Curvature(covariance, self.precision[at].astype(x.dtype))",
        "found = Curvature(covariance, self.precision[jnp.maximum(at - 1, 0)].astype(x.dtype))",
    ),
    (
        "jacobian: C with the slope of the step after",
        "covariance = gain / jnp.maximum(self.slope[at].astype(x.dtype), 1e-6)",
        "covariance = gain / jnp.maximum(self.slope[jnp.maximum(at - 1, 0)].astype(x.dtype), 1e-6)",
    ),
    (
        "jacobian: the covariance at the step, not after it",
        "later = self.precision[jnp.maximum(steps - 1, 0)].astype(news.dtype) - axes.precision",
        "later = self.precision[steps].astype(news.dtype) - axes.precision",
    ),
    (
        "jacobian: the covariance where C was found",
        "variance = axes.variance / (1 + jnp.maximum(later, 0)[..., None] * axes.variance)",
        "variance = axes.variance + 0 * later[..., None]",
    ),
    (
        "jacobian: a deviation's news with the slope of its own step",
        "return self.slope[jnp.maximum(steps - 1, 0)].astype(deviation.dtype)[..., None] * deviation",
        "return self.slope[steps].astype(deviation.dtype)[..., None] * deviation",
    ),
    (
        "jacobian: x_0-hat moves along the rows of the axes",
        'jnp.einsum("...ri,rij->...rj", news, axes.along, precision="highest")',
        'jnp.einsum("...ri,rji->...rj", news, axes.along, precision="highest")',
    ),
    (
        "jacobian: differences with the size of another state",
        "gain = jnp.moveaxis(moved - x0[::_EVERY, None], 1, -1) / size[..., None]",
        "gain = jnp.moveaxis(moved - x0[::_EVERY, None], 1, -1) / size[:1, ..., None]",
    ),
    (
        "jacobian: the states beside have the steps of others",
        "all_steps = jnp.concatenate([steps, jnp.repeat(at, dim, axis=0)])",
        "all_steps = jnp.concatenate([steps, jnp.tile(at, (dim, 1))])",
    ),
    (
        "jacobian: rows beside the states are not counted",
        "return Prediction(x0, seen.v[:length], found), states",
        "return Prediction(x0, seen.v[:length], found), length",
    ),
    (
        "jacobian: a flow's news without the state",
        "there - column(of.slope[step]) * x",
        "there - column(of.slope[later]) * x",
    ),
    (
        "jacobian: a flow's news without x_0-hat",
        "news -= column(of.precision[later] - of.precision[step]) * guess.x0",
        "news -= 0 * guess.x0",
    ),
    (
        "jacobian: a flow's C is used while x_0 is far from Gaussian",
        "jnp.where(t < _FROM, -1, (t / left) ** 2)",
        "(t / left) ** 2",
        (f"{JACOBIAN}::test_a_flow_has_no_c_at_first",),
    ),
    (
        "jacobian: variances are not limited",
        "jnp.clip(variance, 0, _LARGEST)",
        "variance",
    ),
    (
        "jacobian: what is no number stays",
        "jnp.linalg.eigh(jnp.nan_to_num(found.covariance))",
        "jnp.linalg.eigh(found.covariance)",
    ),
)
JACOBIANS.append(
    Mutant(
        "jacobian: C is not made symmetric",
        "cspd_jax/image/chain/jacobian.py",
        "covariance = 0.5 * (covariance + jnp.swapaxes(covariance, -1, -2))",
        "covariance = covariance",
        (JACOBIAN,),
        why_it_survives="it is read by eigh alone, which makes it symmetric itself",
    )
)

PLAINS = _table(
    "cspd_jax/image/sampler.py",
    (PLAIN, PROTOCOL, HASHES),
    (
        "plain: the guidance scale of the first image for all",
        "return jnp.repeat(scale, width)[:, None] if",
        "return jnp.full((len(scale) * width, 1), scale[0]) if",
    ),
    (
        "plain: guidance scales in the order of another layout",
        "return jnp.repeat(scale, width)[:, None] if",
        "return jnp.tile(scale, width)[:, None] if",
    ),
    (
        "plain: the known tokens include the group's first",
        "known = jnp.full(rows, first)",
        "known = jnp.full(rows, first + 1)",
    ),
    (
        "plain: images that only fill the batch are counted",
        "(jnp.arange(segment.width) < group.size[..., None]) & bound.active[:, None]",
        "jnp.broadcast_to(jnp.arange(segment.width) < group.size, positions.shape)",
    ),
    (
        "plain: the cache is not carried on",
        "return PlainState(put_back(bound.kept, tokens), cache, first), seen",
        "return PlainState(put_back(bound.kept, tokens), state.cache, first), seen",
    ),
    (
        "plain: an image that is complete is written over",
        "index = index if used is None else jnp.where(used, index, tokens.shape[1])",
        "index = jnp.minimum(index, tokens.shape[1] - 1)",
        (f"{PLAIN}::test_an_image_that_is_complete_is_not_written_over",),
    ),
    (
        "plain: every piece of a stream begins anew",
        "state, counts = _ar_steps(bound, segment, state, group_arrays(some, options))",
        "state, counts = _ar_steps(bound, segment, empty_state(bound), group_arrays(some, options))",
        (PROTOCOL,),
    ),
) + _table(
    "cspd_jax/image/bound.py",
    (PLAIN, PROTOCOL, HASHES),
    ("plain: the unconditional half has the class", "jnp.ones_like(unconditional)])", "unconditional])"),
    (
        "plain: tokens are returned in the order of generation",
        "return jnp.take_along_axis(tokens, jnp.argsort(order, axis=1)[:, :, None], axis=1)",
        "return tokens",
    ),
    (
        "plain: the order applied instead of undone",
        "jnp.argsort(order, axis=1)[:, :, None]",
        "order[:, :, None]",
    ),
    (
        "plain: noise in the last step although it is off",
        '"final_noise": bool(self.options.final_noise)',
        '"final_noise": True',
    ),
)

KEYS = _table(
    "cspd_jax/keys.py",
    (HASHES, PROTOCOL),
    (
        "keys: all images share the first key",
        "jax.random.fold_in(key, i))(first + jnp.arange(count))",
        "jax.random.fold_in(key, 0 * i))(first + jnp.arange(count))",
    ),
    ("keys: the first image is ignored", "(first + jnp.arange(count))", "(jnp.arange(count))"),
    ("keys: tests share what windows draw with", "TEST = 4", "TEST = 2"),
    ("keys: proposals share the noise of the chain", "PROPOSAL = 5", "PROPOSAL = 1"),
    (
        "keys: the position is not in the noise",
        "jax.random.normal(jax.random.fold_in(key, position), (steps + 1, dim), jnp.float32)",
        "jax.random.normal(jax.random.fold_in(key, 0 * position), (steps + 1, dim), jnp.float32)",
    ),
    (
        "keys: speculated chains of an image share their keys",
        "jax.vmap(jax.random.fold_in)(rows.reshape(-1), positions.reshape(-1))",
        "jax.vmap(jax.random.fold_in)(rows.reshape(-1), 0 * positions.reshape(-1))",
        (f"{TOKENS}::test_every_position_has_keys_of_its_own",),
    ),
)

ROUND = f"{TOKENS}::test_what_a_round_keeps_and_what_it_draws"
NEVER_TWICE = f"{TOKENS}::test_nothing_random_is_used_twice"

PATHS = (
    _table(
        "cspd_jax/image/rounds/path_criterion.py",
        (ROUND,),
        (
            "path: p and q swapped",
            "return jax.vmap(verify_gaussian_block)(keys, p, q, after, valid)",
            "return jax.vmap(verify_gaussian_block)(keys, q, p, after, valid)",
            (TOKENS,),
        ),
        (
            "path: p at the guidance scale of the group in work",
            "laws(inputs, inputs.target, drafts.states, z, scales(inputs, drafted.groups))",
            "laws(inputs, inputs.target, drafts.states, z, scales(inputs, 0 * drafted.groups))",
            (f"{TOKENS}::test_joint_law",),
        ),
        (
            "path: p of each group in the context that shows it",
            "z = drafted.z[:, :gamma, 0]",
            "z = drafted.z[:, 1:, 0]",
            (f"{TOKENS}::test_joint_law",),
        ),
        (
            "path: a block begins with the last step",
            "jnp.flip(a, axis=3).reshape(",
            "a.reshape(",
        ),
        (
            "path: coins used again after a drop",
            "keys = round_keys(inputs, state.group, Purpose.TEST)",
            "keys = round_keys(inputs, 0 * state.group, Purpose.TEST)",
        ),
        (
            "path: noise used again after a drop",
            "keys = round_keys(inputs, state.group, Purpose.PASS)",
            "keys = round_keys(inputs, 0 * state.group, Purpose.PASS)",
        ),
        (
            "path: coins and noise have the same key",
            "keys = round_keys(inputs, state.group, Purpose.TEST)",
            "keys = round_keys(inputs, state.group, Purpose.PASS)",
        ),
        (
            "path: noise of a draft model used again after a drop",
            "return round_keys(inputs, state.group, Purpose.DRAFT)",
            "return round_keys(inputs, 0 * state.group, Purpose.DRAFT)",
            (NEVER_TWICE,),
        ),
        (
            "path: a draft model has the noise of the pass",
            "return round_keys(inputs, state.group, Purpose.DRAFT)",
            "return round_keys(inputs, state.group, Purpose.PASS)",
            (NEVER_TWICE,),
        ),
        (
            "path: drafts that there are not are tested",
            "valid = jnp.repeat(drafted.to_test.reshape(len(lanes), -1), steps, axis=1)",
            "valid = jnp.ones((len(lanes), gamma * width * steps), bool)",
        ),
        (
            "path: the prefix is one token too long",
            "real & (index < token_of)",
            "real & (index <= token_of)",
        ),
        (
            "path: the prefix is one token too short",
            "real & (index < token_of)",
            "real & (index + 1 < token_of)",
        ),
        (
            "path: a group in which the block ended counts as whole",
            "whole = jnp.all(index < token_of, axis=2)",
            "whole = jnp.any(index < token_of, axis=2)",
        ),
        (
            "path: tokens behind the end count as tested",
            "real & (index <= token_of),",
            "real,",
        ),
        (
            "path: the token in which the block ended goes on one step late",
            "step, x = steps - 1 - taken, block.value",
            "step, x = jnp.maximum(steps - 2 - taken, 0), block.value",
        ),
        (
            "path: the token in which the block ended goes on one step early",
            "step, x = steps - 1 - taken, block.value",
            "step, x = steps - taken, block.value",
        ),
        (
            "path: the token in which the block ended goes on from the draft",
            "step, x = steps - 1 - taken, block.value.astype(after.dtype)",
            "step, x = steps - 1 - taken, after[lanes, at]",
        ),
        (
            "path: the first token goes on, not that in which the block ended",
            "(jnp.arange(width) == (token % width)[:, None])",
            "(jnp.arange(width) == 0 * token[:, None])",
        ),
        (
            "path: it goes on in the context that shows its draft",
            "z=drafted.z[lanes, prefix.n, :1],",
            "z=drafted.z[lanes, jnp.minimum(prefix.n + 1, inputs.speculation.gamma), :1],",
        ),
        (
            "path: tokens behind the end stay as drafted",
            "kept = prefix.kept[lanes, at] & jnp.any(ended.inside, axis=1, keepdims=True)",
            "kept = prefix.kept[lanes, at] | ~ended.inside & jnp.any(ended.inside, axis=1, keepdims=True)",
        ),
        (
            "path: kept tokens of the group in work are drawn anew",
            "kept = prefix.kept[lanes, at] & jnp.any(ended.inside, axis=1, keepdims=True)",
            "kept = prefix.kept[lanes, at] & False",
        ),
        (
            "path: behind a block that is kept whole no token is drawn",
            "kept = prefix.kept[lanes, at] & jnp.any(ended.inside, axis=1, keepdims=True)",
            "kept = prefix.kept[lanes, at]",
        ),
        (
            "path: what is given up is not reported",
            "lost = self.block.truncated & jnp.any(self.inside, axis=1)",
            "lost = self.block.truncated & False",
        ),
        (
            "path: what is given up of a block that is kept whole is reported",
            "lost = self.block.truncated & jnp.any(self.inside, axis=1)",
            "lost = self.block.truncated",
        ),
        (
            "path: an image that is complete goes on",
            "group=state.group + (state.group < inputs.groups),",
            "group=state.group + 1,",
        ),
        (
            "path: drafts of the next groups begin where the block ended",
            "anew = anew._replace(left=jnp.full(shape, inputs.steps, now.begun.left.dtype))",
            "anew = anew._replace(left=jnp.broadcast_to(now.begun.left, shape))",
        ),
        (
            "path: the group in work is kept as a draft of the next",
            "drafts=jax.tree.map(lambda a: a[:, 1:], paths) if ahead else state.drafts,",
            "drafts=jax.tree.map(lambda a: a[:, :-1], paths) if ahead else state.drafts,",
            (ROUND, f"{TOKENS}::test_joint_law"),
        ),
    )
    + _table(
        "cspd_jax/image/rounds/paths.py",
        (f"{TOKENS}::test_recorded_laws_are_those_drawn_from", f"{TOKENS}::test_joint_law"),
        (
            "path: the noise of the image in place of the round's",
            "bound = dataclasses.replace(bound, keys=request.keys)",
            "bound = dataclasses.replace(bound)",
        ),
        (
            "path: all tokens begin at their own x_T",
            "x=jnp.where((start.left < inputs.steps)[:, None], start.x, end)",
            "x=end",
        ),
        (
            "path: tokens that begin anew begin at 0",
            "x=jnp.where((start.left < inputs.steps)[:, None], start.x, end)",
            "x=start.x",
        ),
        (
            "path: with noise in the last step, but verified without",
            "temperature=temperature, final_noise=True)",
            "temperature=temperature, final_noise=False)",
        ),
        (
            "path: the state behind x_T is not x_T",
            "states = jnp.concatenate([path.x[None], path.states[1:], end[None]])",
            "states = jnp.concatenate([path.x[None], path.states[1:], 0 * end[None]])",
        ),
    )
    + _table(
        "cspd_jax/diffusion/chain.py",
        (f"{TOKENS}::test_recorded_laws_are_those_drawn_from",),
        (
            "path: q without the temperature",
            "return x, (x, chains.widened(p)) if record else None",
            "return x, (x, p) if record else None",
        ),
        (
            "path: p without the temperature",
            "return chains.widened(jax.vmap(chains.transition)(x, chains.modulations(times), c))",
            "return jax.vmap(chains.transition)(x, chains.modulations(times), c)",
        ),
        (
            "path: the temperature twice",
            "return Gaussian(p.mean, p.log_var + 2 * jnp.log(",
            "return Gaussian(p.mean, p.log_var + 4 * jnp.log(",
        ),
        (
            "path: q without the guidance scale",
            "return x, (x, chains.widened(p)) if record else None",
            "q = chains._replace(scale=jnp.ones_like(chains.scale)).transition(x, modulations, c)\n"
            "        return x, (x, chains.widened(q)) if record else None",
        ),
        (
            "path: tokens begun go on one step late",
            "jnp.where((index < start.left)[:, None], drawn, x)",
            "jnp.where((index < start.left - 1)[:, None], drawn, x)",
            (f"{TOKENS}::test_recorded_laws_are_those_drawn_from",),
        ),
    )
    + _table(
        "cspd_jax/image/rounds/groups.py",
        (NEVER_TWICE,),
        (
            "path: nothing random belongs to the round",
            "return jax.vmap(jax.random.fold_in)(purpose_keys(inputs.keys, purpose), group)",
            "return jax.vmap(jax.random.fold_in)(purpose_keys(inputs.keys, purpose), 0 * group)",
        ),
        (
            "path: coins, noise and drafts of a round share their key",
            "return jax.vmap(jax.random.fold_in)(purpose_keys(inputs.keys, purpose), group)",
            "return jax.vmap(jax.random.fold_in)(inputs.keys, group)",
        ),
    )
)

VERIFICATION = _table(
    "cspd_jax/image/rounds/verification.py",
    (ROUND, f"{TOKENS}::test_groups_are_accepted_up_to_the_first_rejection", f"{TOKENS}::test_joint_law"),
    (
        "rounds: groups behind a rejection are kept",
        "n = jnp.sum(jnp.cumprod(whole, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)",
        "n = jnp.sum(whole, axis=1, dtype=jnp.int32)",
    ),
    (
        "rounds: tests behind the rejection count",
        "(jnp.arange(inputs.speculation.gamma) <= n[:, None])[..., None]",
        "(jnp.arange(inputs.speculation.gamma) >= 0)[None, :, None]",
    ),
    (
        "rounds: drafts of the prefill are used",
        "used &= (state.group >= inputs.prefilled)[:, None]",
        "used &= True",
        (ROUND,),
    ),
    (
        "rounds: more drafts are used than there are",
        "used = testing[:, None] & (jnp.arange(gamma) < state.num_drafts[:, None])",
        "used = testing[:, None] & (jnp.arange(gamma) >= 0)",
        (ROUND,),
    ),
    (
        "rounds: groups that are whole are not passed",
        "group=state.group + jnp.where(drafted.testing, prefix.n, 0),",
        "group=state.group + jnp.where(drafted.testing, jnp.minimum(prefix.n, 1), 0),",
        (ROUND,),
    ),
    (
        "rounds: each context shows its own draft",
        "known = state.group[:, None] + jnp.arange(gamma + 1)",
        "known = state.group[:, None] + jnp.minimum(jnp.arange(gamma + 1) + 1, gamma)",
    ),
    (
        "rounds: accepted drafts are not marked",
        "accepted=put(inputs, state.accepted, groups, kept, kept),",
        "accepted=state.accepted,",
    ),
)

PAPER = _table(
    "cspd_jax/image/rounds/paper_criterion.py",
    (TOKENS, HASHES),
    (
        "paper: Sigma upside down",
        "narrower = (q.log_var - p.log_var) if",
        "narrower = (p.log_var - q.log_var) if",
        (f"{TOKENS}::test_sigma_of_the_paper",),
    ),
    (
        "paper: a truncated draw is not reported",
        "truncated=jnp.sum(found.truncated & rejected, dtype=jnp.int32),",
        "truncated=jnp.int32(0),",
        ("tests/image/test_methods.py", TOKENS),
    ),
    (
        "paper: the target's own token instead of the residual",
        "value = jnp.where(undrafted[:, None, None], own.states[lanes, n, :, 0], found.value)",
        "value = own.states[lanes, n, :, 0]",
    ),
    (
        "paper: chains always share their noise",
        "keys=inputs.keys if criterion.align else unaligned,",
        "keys=inputs.keys,",
        (f"{TOKENS}::test_draft_and_target_share_noise_only_as_the_paper_does",),
    ),
    (
        "paper: speculated chains share all that is random",
        "window_keys=unaligned,",
        "window_keys=inputs.keys if criterion.align else unaligned,",
        (f"{TOKENS}::test_draft_and_target_share_noise_only_as_the_paper_does",),
    ),
    (
        "paper: a widened test is called exact",
        "if self.inner_temperature != 1:",
        "if self.inner_temperature < 1:",
        ("tests/image/test_methods.py",),
    ),
    (
        "paper: the factor Sigma is called exact",
        "        if self.sigma:\n            return Exactness(",
        "        if self.sigma and info is None:\n            return Exactness(",
        ("tests/image/test_methods.py",),
    ),
)

DRAFTING = _table(
    "cspd_jax/image/rounds/drafting.py",
    (TOKENS, HASHES),
    (
        "drafting: adaptation from tests that were dropped is not possible, from none at all is wrong too",
        "of_tokens = (accepted + _ACCEPTED) / (tested + _TESTED)",
        "of_tokens = (tested + _ACCEPTED) / (tested + _TESTED)",
    ),
    (
        "drafting: truncated draws in a draft's chains are not reported",
        "truncated=jnp.int32(0) if chains is None else chains.truncated,",
        "truncated=jnp.int32(0),",
        (f"{TOKENS}::test_truncated_draws_of_every_draft_are_counted",),
    ),
    (
        "drafting: a draft sees itself",
        "z=contexts(inputs, model, tokens, jnp.minimum(here, inputs.groups))[:, :, 0],",
        "z=contexts(inputs, model, tokens, jnp.minimum(here + 1, inputs.groups))[:, :, 0],",
        (f"{TOKENS}::test_a_draft_like_the_target_is_always_accepted",),
    ),
    (
        "drafting: a draft does not see those before it",
        "tokens = with_drafts(inputs, state, count=j)",
        "tokens = with_drafts(inputs, state, count=0 * j)",
        (f"{TOKENS}::test_a_draft_like_the_target_is_always_accepted",),
    ),
    (
        "drafting: the context does not show the dropped draft",
        "newest = drafted.z[lanes, prefix.n + shown]",
        "newest = drafted.z[lanes, prefix.n]",
        (ROUND,),
    ),
    (
        "drafting: a group ahead has the context of the one before",
        "jnp.where(shown, 0, 1)[:, None] + jnp.arange(gamma)",
        "jnp.where(shown, 0, 0)[:, None] + jnp.arange(gamma)",
        (ROUND,),
    ),
    (
        "drafting: the stale context of the group in work",
        "groups = state.group[:, None] + 1 + jnp.arange(gamma)",
        "groups = state.group[:, None] + jnp.arange(gamma)",
    ),
)

REVEAL = _table(
    "cspd_jax/image/order.py",
    ("tests/image/test_order.py", "tests/image/test_golden_mar.py"),
    (
        "reveal: groups start one token late",
        "groups.append(Group(known, until - known,",
        "groups.append(Group(known + 1, until - known,",
    ),
    ("reveal: guidance before the step instead of after", "(length - masked) / length))", "known / length))"),
    ("reveal: linear guidance forgets the one", "return 1 + (cfg - 1) *", "return (cfg - 1) *"),
)

BOARD = "tests/image/test_shortcuts.py::test_a_checkerboard_comes_one_colour_after_the_other"
STEPS_FALL = "tests/image/test_shortcuts.py::test_steps_fall_from_the_first_to_the_last"
SHORTCUTS = [
    *_table(
        "cspd_jax/image/lossy/shortcuts.py",
        (BOARD,),
        (
            "shortcuts: rows in place of a checkerboard",
            "(positions // side + positions % side) % 2",
            "(positions // side) % 2",
        ),
        (
            "shortcuts: the colours are not apart",
            "order[jnp.argsort(_colour(order, length), stable=True)]",
            "order",
        ),
        ("shortcuts: the second stage begins anew", "Group(start + g.start, g.size", "Group(g.start, g.size"),
        (
            "shortcuts: the last number of steps is never reached",
            "level / max(1, levels - 1)",
            "level / levels",
            (STEPS_FALL,),
        ),
    ),
    Mutant(
        "shortcuts: they are called lossless",
        "cspd_jax/image/methods.py",
        'return Exactness(False, "; and "',
        'return Exactness(True, "; and "',
        ("tests/image/test_shortcuts.py::test_exactness_names_every_shortcut",),
    ),
]

RUNNER = _table(
    "cspd_jax/image/released/acceptance.py",
    (RELEASED,),
    (
        "released: the factor the other way round",
        "return jnp.sum(p.log_std - q.log_std, axis=-1)",
        "return jnp.sum(q.log_std - p.log_std, axis=-1)",
    ),
    (
        "released: the inner temperature multiplies",
        "jnp.exp(-0.5 * p.last.log_var) / inner_temperature",
        "jnp.exp(-0.5 * p.last.log_var) * inner_temperature",
    ),
    (
        "released: the first taken proposal stays",
        "value = jnp.where(good[..., None], x, found.value)",
        "value = jnp.where((good & ~found.taken)[..., None], x, found.value)",
    ),
) + _table(
    "cspd_jax/image/released/schedule.py",
    (RELEASED,),
    (
        "released: prefill ends a step early",
        "drafted = number > num_iter * options.prefill",
        "drafted = number >= num_iter * options.prefill",
    ),
)

GAUSSIANS = "tests/coupling/test_coupling_gaussian.py"
EXTREMES = "tests/coupling/test_coupling_extremes.py"

COUPLING = (
    _table(
        "cspd_jax/coupling/residual.py",
        (GAUSSIANS, EXTREMES),
        (
            "residual: a term is missing in the bound",
            "jnp.abs(self.b) * (z**2 + 1)) + self.k",
            "jnp.abs(self.b) * z**2) + self.k",
        ),
        ("residual: the divergence is missing in the bound", "(z**2 + 1)) + self.k", "(z**2 + 1))"),
        (
            "residual: half of a mass",
            "return self.slope * math.sqrt(2 / math.pi)",
            "return self.slope * math.sqrt(1 / math.pi)",
        ),
        (
            "residual: the quadratic part is drawn with two normals",
            "square = jnp.where(here, jnp.copysign(three, z), z)",
            "square = jnp.where(here, jnp.copysign(two, z), z)",
        ),
        (
            "residual: the linear part keeps its length",
            "linear = z + (jnp.copysign(two, along) - along) * bound.direction",
            "linear = z",
        ),
        (
            "residual: the height is not divided out",
            "return log_residual_acceptance(log_ratio) - log_height",
            "return log_residual_acceptance(log_ratio)",
        ),
        (
            "residual: the ratio with q's width twice",
            "step = jnp.expm1(log_r) * z +",
            "step = jnp.expm1(2 * log_r) * z +",
        ),
        (
            "residual: the masses of all pairs together",
            "return self.linear_mass + jnp.sum(self.square_masses, axis=-1) + self.k",
            "return self.linear_mass + jnp.sum(self.square_masses) + self.k",
            (f"{GAUSSIAN_BLOCK}::test_the_coin_of_a_prefix",),
        ),
        (
            "residual: where there is none nobody is told",
            "return end._replace(truncated=end.truncated | missing)",
            "return end",
        ),
        (
            "residual: every trip repeats the proposals",
            "jax.vmap(one)(trip * proposals + jnp.arange(proposals))",
            "jax.vmap(one)(jnp.arange(proposals))",
        ),
        (
            "residual: the last accepted proposal",
            "first = jnp.where(found, jnp.argmax(accepted), proposals - 1)",
            "first = jnp.where(found, proposals - 1 - jnp.argmax(accepted[::-1]), proposals - 1)",
        ),
        (
            "residual: the test has the number that chose the part",
            "return jnp.where(bound.mean < 1, biased, z), u",
            "return jnp.where(bound.mean < 1, biased, z), part / bound.mean",
        ),
        (
            "residual: what is left for the constant goes to the last coordinate",
            "(part <= until) & (coin < 0.5)",
            "((part <= until) | (jnp.arange(dim) == dim - 1)) & (coin < 0.5)",
        ),
    )
    + _table(
        "cspd_jax/coupling/acceptance.py",
        ("tests/coupling/test_coupling_categorical.py", GAUSSIANS, EXTREMES),
        (
            "acceptance: nan is accepted",
            "return jnp.where(jnp.isnan(log_ratio), -jnp.inf, jnp.minimum(log_ratio, 0.0))",
            "return jnp.where(jnp.isnan(log_ratio), 0.0, jnp.minimum(log_ratio, 0.0))",
        ),
        (
            "acceptance: the test is turned around",
            "return jnp.log(u) <= log_accept",
            "return jnp.log(u) >= log_accept",
        ),
        (
            "acceptance: uniforms of 8 bits",
            "return (bits.astype(dtype) + 0.5) * 2.0**-32",
            "return ((bits >> 24).astype(dtype) + 0.5) * 2.0**-8",
        ),
    )
    + _table(
        "cspd_jax/coupling/resample.py",
        (GAUSSIANS, "tests/coupling/test_coupling_path.py"),
        (
            "resample: the last accepted proposal",
            "first = jnp.where(found, jnp.argmax(accepted), proposals - 1)",
            "first = jnp.where(found, proposals - 1 - jnp.argmax(accepted[::-1]), proposals - 1)",
        ),
        (
            "resample: every trip repeats the proposals",
            "index = loop.trips * proposals + jnp.arange(proposals)",
            "index = jnp.arange(proposals)",
        ),
        (
            "resample: giving up is not reported",
            "return Resampled(end.value, end.trips, ~end.settled)",
            "return Resampled(end.value, end.trips, end.settled & False)",
        ),
    )
    + _table(
        "cspd_jax/coupling/categorical.py",
        ("tests/coupling/test_coupling_block.py", "tests/coupling/test_coupling_categorical.py"),
        (
            "block: the first failure ends it",
            "tau = jnp.max(jnp.where(accepts(u,",
            "tau = jnp.min(jnp.where(accepts(u,",
        ),
        (
            "block: the token after the last draft is from the residual",
            "jnp.pad(log_q, ((0, 1), (0, 0))), -jnp.inf)",
            "jnp.pad(log_q, ((0, 1), (0, 0)), mode='edge'), -jnp.inf)",
        ),
        (
            "block: 1 - pi is left out",
            "log_total = jnp.logaddexp(log_s, log1mexp(-log_pi))",
            "log_total = log_s",
        ),
    )
)

TEXT = "tests/text/test_text_distribution.py"
TEXT_PROTOCOL = "tests/text/test_protocol_text.py"

TEXTS = _table(
    "cspd_jax/text/rules.py",
    (TEXT,),
    (
        "text: p and q swapped in google",
        "lambda r, log_p, log_q: accepts(r, log_p - log_q))",
        "lambda r, log_p, log_q: accepts(r, log_q - log_p))",
    ),
    ("text: the residual of another place", "p = _take(log_p, tau)", "p = _take(log_p, last)"),
    ("text: a residual after all drafts", "jnp.where(rejected[:, None], q, -jnp.inf))", "q)"),
    (
        "text: the noise of the residual belongs to the position",
        "noise = gumbel(round_keys(keys, Purpose.RESIDUAL, length), num_ids, p.dtype)",
        "noise = gumbel(round_keys(keys, Purpose.TEST, length), num_ids, p.dtype)",
    ),
    (
        "text: drafts behind a failure are kept",
        "jnp.cumprod(passed.astype(jnp.int32), axis=1)",
        "passed.astype(jnp.int32)",
    ),
    (
        "text: match reads noise one place ahead",
        "positions = length[:, None] + jnp.arange(log_p.shape[1])",
        "positions = length[:, None] + 1 + jnp.arange(log_p.shape[1])",
        (TEXT, "tests/text/test_text_generate.py"),
    ),
) + _table(
    "cspd_jax/text/rounds.py",
    (TEXT_PROTOCOL, "tests/text/test_text_generate.py"),
    (
        "text: positions of the pass are one late",
        "jnp.where(used, state.length[:, None] - 1 + index, max_len)",
        "jnp.where(used, state.length[:, None] + index, max_len)",
    ),
    (
        "text: a round may write past the limit",
        "room = inputs.limit - state.length - 1",
        "room = inputs.limit - state.length",
    ),
    (
        "text: a stop id does not end a row",
        "size = jnp.where(state.done, 0, jnp.minimum(verdict.tau, first_end) + 1)",
        "size = jnp.where(state.done, 0, verdict.tau + 1)",
    ),
    (
        "text: truncation is not reported",
        "truncated=number(verdict.truncated & (size > verdict.tau)),",
        "truncated=number(verdict.truncated & False),",
        (TEXT, "tests/text/test_text_generate.py", TEXT_PROTOCOL),
    ),
    ("text: finished rows go on", "done=stopped | (length >= inputs.limit),", "done=length >= inputs.limit,"),
    (
        "text: drafts are drawn with the noise of their position",
        "keys = round_keys(inputs.keys, Purpose.DRAFT, state.length)",
        "keys = purpose_keys(inputs.keys, Purpose.TOKEN)",
        (TEXT, HASHES),
    ),
)

MASKED = (
    "tests/masked/test_masked_generate.py",
    "tests/masked/test_masked_reference.py",
    "tests/masked/test_masked.py",
)

MASKEDS = (
    _table(
        "cspd_jax/masked/rule.py",
        MASKED,
        (
            "masked: the last of several equally sure places",
            "index = jnp.argmax(jnp.where(open_places, _finite(offered.confidence), -jnp.inf), axis=-1)",
            "index = open_places.shape[-1] - 1 - jnp.argmax(jnp.where(open_places, offered.confidence,"
            " -jnp.inf)[..., ::-1], axis=-1)",
        ),
        (
            "masked: the mask may be written",
            "allowed = (ids < config.known_ids) & (ids != canvas.mask_id)",
            "allowed = ids < config.known_ids",
        ),
        ("masked: noise without the step", "fold(fold(key, s), q)", "fold(fold(key, 0 * s), q)"),
        (
            "masked: any block may be filled",
            "return masked & (blocks == first)",
            "return masked & (blocks >= first)",
        ),
    )
    + _table(
        "cspd_jax/masked/confidence.py",
        MASKED,
        (
            "masked: confidence of the likeliest token instead of the sampled",
            "chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]",
            "chosen = jnp.max(logits, axis=-1)",
        ),
    )
    + _table(
        "cspd_jax/masked/speculative.py",
        MASKED,
        (
            "masked: the token alone decides",
            "here = (moves.place[:, None] == place[..., None]) & moves.exists[:, None]",
            "here = (moves.place[:, None] >= 0 * place[..., None]) & moves.exists[:, None]",
        ),
        (
            "masked: a walk goes on from the first text",
            "then = after[rows, at]",
            "then = after[rows, 0 * at]",
        ),
        (
            "masked: the noise of the step before",
            "steps = state.step[:, None] + 1 + sizes",
            "steps = state.step[:, None] + sizes",
        ),
        (
            "masked: drafts have the noise of the first step",
            "drawn_from(canvas, known, window.places, step + k)",
            "drawn_from(canvas, known, window.places, step + 0 * k)",
        ),
        (
            "masked: the window is too narrow",
            "blocks = 1 + -(-(2 * speculation.sets.ranks + 1) // canvas.block)",
            "blocks = 1 + -(-speculation.sets.ranks // canvas.block)",
        ),
        (
            "masked: rows do not wait for their block",
            "return jax.lax.cond(jnp.all(waiting), refresh,",
            "return jax.lax.cond(jnp.all(waiting) & False, refresh,",
        ),
    )
    + _table(
        "cspd_jax/masked/speculative.py",
        ("tests/masked/test_sets.py",),
        (
            "sets: any token of the right place leads on",
            "same = here[..., None] & (moves.tokens[:, None] == choice.token[..., None, None])",
            "same = here[..., None] & (moves.tokens[:, None] >= 0 * choice.token[..., None, None])",
        ),
        (
            "sets: texts have the most probable token everywhere",
            "jnp.maximum(members, 0)]",
            "0 * members]",
        ),
        (
            "sets: the certain move is found again from its logits",
            "step, certain=certain)",
            "step)",
        ),
    )
    + _table(
        "cspd_jax/image/rounds/pool.py",
        ("tests/apps/test_service.py::test_rows_whose_groups_are_known_in_part",),
        (
            "pool: a row keeps the known tokens of the image before",
            "kept=by_image(rows, new.kept, old.kept),",
            "kept=old.kept,",
        ),
    )
    + _table(
        "cspd_jax/training/image/autoencoder.py",
        ("tests/training/test_svae_training.py",),
        (
            "svae: the critic learns from what it makes of the autoencoder",
            'judge(jax.lax.stop_gradient(params["critic"]), made)',
            'judge(params["critic"], made)',
        ),
        (
            "svae: the critic's loss reaches the autoencoder",
            "jax.lax.stop_gradient(made))",
            "made)",
        ),
    )
)

CONVERTERS = _table(
    "converters/_tables.py",
    ("tests/converters/test_converters.py", "tests/image/test_golden_mar.py"),
    (
        "converters: matrices are not transposed",
        "return array.T if array.ndim == 2 else",
        "return array if array.ndim == 2 else",
    ),
    (
        "converters: unknown tensors are let through",
        '_list("unknown", [name for name in shapes if name not in names]),',
        '_list("unknown", []),',
    ),
    (
        "converters: NaN is let through",
        "if not np.isfinite(array).all():",
        "if np.isfinite(array).any() is None:",
    ),
) + _table(
    "converters/mar.py",
    ("tests/converters/test_converters.py",),
    (
        "converters: a patch size is guessed where none fits",
        "if side < 1 or token_dim != 16 * side * side:",
        "if side < 1:",
    ),
)

RUN_FOLDER = "tests/training/test_run_folder.py"
FAILURES = "tests/cli/test_cli_failures.py"
RUNS = (
    _table(
        "cspd_jax/training/checkpointing.py",
        (RUN_FOLDER,),
        (
            "runs: sums of checkpoints are not compared",
            "if self._read_sums().get(str(step), found := _sum(state)) != found:",
            "if self._read_sums().get(str(step)) == 0:",
        ),
        (
            "runs: without a whole checkpoint a run begins anew",
            "        if problems:\n",
            "        if problems and not self._folder.exists():\n",
        ),
        (
            "runs: a damaged checkpoint stays where it is",
            "(self._folder / str(step)).rename(place)",
            "import shutil; shutil.copytree(self._folder / str(step), place); raise UserError('damaged')",
        ),
    )
    + _table(
        "cspd_jax/training/provenance.py",
        (RUN_FOLDER,),
        (
            "runs: other weights under the same name are taken",
            "if self.weights.get(name, value) != value:",
            "if self.weights.get(name, value) is None:",
        ),
        (
            "runs: what was not asked for at first can be added",
            "if wanted is not None and not _same(was, wanted):",
            "if wanted is not None and was is not None and not _same(was, wanted):",
        ),
    )
    + _table(
        "cspd_jax/training/run_folder.py",
        (RUN_FOLDER,),
        ("runs: two writers", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB"),
    )
    + _table(
        "cspd_jax/_utils/files.py",
        (FAILURES, "tests/cli/test_files.py"),
        ("files: what a live process writes is swept", "if found and not alive(", "if found and alive("),
        ("files: nothing is swept", "if found and not alive(int(found[1])):", "if not entry.name:"),
    )
    + _table(
        "cspd_jax/cli/generate.py",
        (FAILURES,),
        (
            "generate: the comparison comes first",
            "    report, pictures = report_with(None), _charts(info, captions)\n",
            "    beside = _compare(args, key, decided, shown, Path('.'))\n"
            "    report, pictures = report_with(None), _charts(info, captions)\n",
        ),
    )
)

SERVICE = _table(
    "cspd_jax/image/rounds/pool.py",
    ("tests/apps/test_service.py",),
    (
        "service: a new image keeps the scale of the row's last one",
        "scale=jnp.where(rows, fresh.scale, inputs.scale))",
        "scale=inputs.scale)",
    ),
    (
        "service: a new image keeps the order of the row's last one",
        "order=by_image(halves, new.order, old.order),",
        "order=old.order,",
    ),
    (
        "service: a new image empties the other rows",
        "return inputs, by_image(rows, nothing, state)",
        "return inputs, nothing",
    ),
    (
        "service: a row that is left goes on",
        "self._replace(unfinished, {})",
        "pass",
    ),
) + _table(
    "cspd_jax/apps/service/engine.py",
    ("tests/apps/test_service.py",),
    (
        "service: the queue is not bounded",
        "            if len(self._waiting) >= self.queue:\n                self.metrics",
        "            if False:\n                self.metrics",
    ),
    (
        "service: those who come last are served first",
        "for job in self._waiting:\n                if free",
        "for job in reversed(self._waiting):\n                if free",
    ),
    (
        "service: a failed round leaves its images in the batch",
        "        lane.reset()\n",
        "",
    ),
    (
        "service: who is there at the end waits for a round that does not end",
        "            self._thread.join(timeout)\n        self._fail_all()",
        "            self._thread.join(timeout)",
    ),
)

SAMPLES = (
    _table(
        "cspd_jax/apps/bulk/folder.py",
        ("tests/apps/test_samples.py",),
        (
            "samples: a shard of any size counts",
            "return shard_path(folder, index).stat().st_size == read_record(folder, manifest, index).bytes",
            "return read_record(folder, manifest, index).bytes > 0",
        ),
        (
            "samples: a damaged shard is read",
            "record.bytes and file_sha256(path) == record.sha256",
            "record.bytes",
        ),
    )
    + _table(
        "cspd_jax/apps/bulk/claims.py",
        ("tests/apps/test_samples.py::test_a_claim_is_of_one_alone",),
        (
            "samples: two claim the same shard",
            "                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
            "                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        ),
    )
    + _table(
        "cspd_jax/apps/bulk/job.py",
        ("tests/apps/test_samples.py",),
        (
            "samples: a part begins with the first label",
            "[numbers % len(self.turn)]",
            "[(numbers - self.first) % len(self.turn)]",
        ),
    )
    + _table(
        "cspd_jax/image/exactness.py",
        ("tests/image/test_methods.py::test_what_is_lossless",),
        ("samples: truncated draws are lossless", "if not (self.lossless and truncated):", "if True:"),
    )
    + _table(
        "cspd_jax/apps/bulk/workers.py",
        ("tests/apps/test_samples.py",),
        ("samples: any job continues any other", "        manifest.check_same(stored, folder)\n", ""),
        (
            "samples: gains of this machine",
            "        plan = _with_stored_gains(plan, stored, folder)\n",
            "",
        ),
    )
)

FRECHET = "tests/apps/test_frechet.py"
JUDGED = "tests/apps/test_evaluation_samples.py"
INCEPTION = "tests/networks/test_inception.py"

EVALUATION = (
    _table(
        "cspd_jax/networks/inception.py",
        (INCEPTION,),
        ("inception: averages count padding", "count_include_pad=False", "count_include_pad=True"),
        ("inception: the last block averages", '"Mixed_7c": _at_8("max")', '"Mixed_7c": _at_8("average")'),
        ("inception: sFID of the next block", '_SPATIAL_BLOCK = "Mixed_6d"', '_SPATIAL_BLOCK = "Mixed_6e"'),
        ("inception: another epsilon", "_EPS = 1e-3", "_EPS = 1e-5"),
        ("inception: one way of resizing", 'if how == "tf1" else np.maximum', "if True else np.maximum"),
        (
            "inception: the score's logits have the bias",
            "return product, product + bias",
            "return product + bias, product + bias",
        ),
    )
    + _table(
        "cspd_jax/apps/evaluation/frechet.py",
        (FRECHET,),
        ("frechet: portions joined without their gap", "self._squares += np.outer(", "0 * np.outer("),
        ("frechet: the divisor is N", "self._squares / (self.count - 1)", "self._squares / self.count"),
        ("frechet: the root once", "- 2 * np.sqrt(mixed).sum()", "- np.sqrt(mixed).sum()"),
        (
            "frechet: jackknife taken for a deviation",
            "(len(without) - 1) / len(without)",
            "1 / (len(without) - 1)",
        ),
    )
    + _table(
        "cspd_jax/apps/evaluation/manifold.py",
        (FRECHET,),
        ("precision: itself counts as a neighbour", "axis=1)[:, k]", "axis=1)[:, k - 1]"),
        (
            "precision: the radii of the other set",
            "_count_within(samples, reference, reach, progress)",
            "_count_within(samples, reference, radii(samples, k)[:1], progress)",
        ),
    )
    + _table(
        "cspd_jax/apps/evaluation/inception_score.py",
        (FRECHET,),
        (
            "score: the last split is forgotten",
            "        if self._count:\n            self._close()\n",
            "        if self._count and not self._scores:\n            self._close()\n",
        ),
    )
    + _table(
        "cspd_jax/apps/evaluation/features.py",
        (JUDGED,),
        (
            "FID: any weights may be called so",
            "return self.exact and self.sha256 == PUBLISHED_SHA256",
            "return self.exact",
        ),
        ("features: the filling counts", "np.asarray(part)[: len(some)]", "np.asarray(part)"),
    )
    + _table(
        "cspd_jax/apps/evaluation/fid.py",
        (JUDGED,),
        (
            "samples: parts depend on the batch",
            "found.pool[(number - seen) % PARTS :: PARTS]",
            "found.pool[number::PARTS]",
        ),
        (
            "samples: statistics of any network",
            "if stored.network and stored.network != network",
            "if False and stored.network != network",
        ),
    )
)

FLOWS = "tests/diffusion/test_flow.py"
MASKED_SAMPLING = "tests/masked/test_masked_sampling.py"
MASKED_NOISE = f"{MASKED_SAMPLING}::test_places_and_tokens_have_noise_of_their_own"
BITS = tuple(
    f"{EXTREMES}::{name}"
    for name in ("test_every_bit_of_a_uniform_counts", "test_nothing_is_decided_by_coarser_numbers")
)
LIKES_BETTER = "test_a_path_that_the_target_likes_better_is_accepted_for_certain"
TREES = "tests/text/test_text_tree.py"
MASKED_CALLS = "tests/masked/test_masked_generate.py::test_calls_are_counted_as_they_are_made"
SAMPLES_TEST, SERVICE_TEST = "tests/apps/test_samples.py", "tests/apps/test_service.py"
CATEGORICAL = "tests/coupling/test_coupling_categorical.py"

# Of every row its own: numbers of the first row, or in another order, for all.
ROWS = (
    _table(
        "cspd_jax/diffusion/gaussian.py",
        (PROTOCOL, PLAIN),
        (
            "rows: the guidance scale of the first chain for all",
            "return unconditional + scale * (conditional - unconditional)",
            "return unconditional + jnp.ravel(scale)[0] * (conditional - unconditional)",
        ),
    )
    + _table(
        "cspd_jax/image/order.py",
        ("tests/image/test_order.py::test_every_image_has_its_own_guidance",),
        (
            "rows: a linear guidance scale of the first image for all",
            "return 1 + (cfg - 1) * shares.reshape(",
            "return 1 + (jnp.ravel(cfg)[0] + 0 * cfg - 1) * shares.reshape(",
        ),
        (
            "rows: a constant guidance scale of the first image for all",
            "return jnp.broadcast_to(cfg, (len(groups), *cfg.shape))",
            "return jnp.broadcast_to(jnp.ravel(cfg)[0], (len(groups), *cfg.shape))",
        ),
    )
    + _table(
        "cspd_jax/image/rounds/groups.py",
        (f"{TOKENS}::test_every_path_has_the_guidance_of_its_image_and_group",),
        (
            "rows: the guidance scale of the first image in all paths",
            "inputs.scale[groups, image]",
            "inputs.scale[groups, 0 * image]",
        ),
        (
            "rows: known tokens of a context in another order",
            "jnp.tile(n_known.reshape(-1), halves),",
            "jnp.repeat(n_known.reshape(-1), halves),",
        ),
        (
            "rows: tokens of a context in another order",
            "return jnp.repeat(a, many, axis=0)",
            "return jnp.tile(a, (many, *[1] * (a.ndim - 1)))",
        ),
    )
    + _table(
        "cspd_jax/image/rounds/paths.py",
        (f"{TOKENS}::test_every_path_has_the_guidance_of_its_image_and_group",),
        (
            "rows: the guidance scale of the first token for all paths",
            "return bound.chains(rows, scale.reshape(-1, 1), temperature",
            "return bound.chains(rows, jnp.full((scale.size, 1), scale.ravel()[0]), temperature",
        ),
    )
    + _table(
        "cspd_jax/image/rounds/pool.py",
        (SERVICE_TEST,),
        (
            "rows: the guidance scale of the first row of the service",
            "inputs.scale[state.group, lanes]",
            "inputs.scale[state.group, 0 * lanes]",
        ),
    )
    + _table(
        "cspd_jax/image/bound.py",
        (PLAIN, PROTOCOL, HASHES),
        (
            "rows: labels of the halves of guidance mixed",
            "labels, order = jnp.tile(labels, 2), jnp.tile(order, (2, 1))",
            "labels, order = jnp.repeat(labels, 2), jnp.tile(order, (2, 1))",
        ),
        (
            "rows: orders of the halves of guidance mixed",
            "labels, order = jnp.tile(labels, 2), jnp.tile(order, (2, 1))",
            "labels, order = jnp.tile(labels, 2), jnp.repeat(order, 2, axis=0)",
        ),
    )
    + _table(
        "cspd_jax/image/sampler.py",
        (SERVICE_TEST,),
        (
            "rows: known tokens of the first row of the service",
            "known = jnp.tile(jnp.minimum(first, network.seq_len - 1), rows // images)",
            "known = jnp.full(rows, jnp.minimum(first[0], network.seq_len - 1))",
        ),
        (
            "rows: known tokens of the service's halves of guidance mixed",
            "known = jnp.tile(jnp.minimum(first, network.seq_len - 1), rows // images)",
            "known = jnp.repeat(jnp.minimum(first, network.seq_len - 1), rows // images)",
        ),
    )
    + _table(
        "cspd_jax/text/sampling.py",
        ("tests/text/test_text_sampling.py",),
        (
            "rows: numbers of text of the first row for all",
            "return jnp.reshape(jnp.asarray(number), (-1,) + (1,) * (x.ndim - 1))",
            "return jnp.reshape(jnp.asarray(number), (-1,) + (1,) * (x.ndim - 1))[:1]",
        ),
    )
    + _table(
        "cspd_jax/text/rules.py",
        (TEXT, TEXT_PROTOCOL),
        (
            "rows: the number of drafts of the first text for all",
            "passed = passed & (jnp.arange(passed.shape[1]) < count[:, None])",
            "passed = passed & (jnp.arange(passed.shape[1]) < count[:1, None])",
        ),
    )
    + _table(
        "cspd_jax/masked/confidence.py",
        (f"{MASKED_SAMPLING}::test_every_row_has_numbers_of_its_own",),
        (
            "rows: the temperature of the first masked text for all",
            "(-1,) + (1,) * (x.ndim - 1)).astype(x.dtype)",
            "(-1,) + (1,) * (x.ndim - 1)).astype(x.dtype)[:1]",
        ),
    )
    + _table(
        "cspd_jax/masked/rule.py",
        (f"{MASKED_SAMPLING}::test_every_row_has_numbers_of_its_own", MASKED_NOISE),
        (
            "rows: the place temperature of the first masked text for all",
            "scale = by_row(options.place_temperature, confidence)",
            "scale = by_row(options.place_temperature, confidence)[:1]",
        ),
        (
            "rows: the noise of the first masked text for all",
            "made = jax.vmap(of_row)(keys, steps, places)",
            "made = jax.vmap(of_row)(keys[jnp.zeros(len(keys), int)], steps, places)",
        ),
    )
    + _table(
        "cspd_jax/masked/speculative.py",
        (MASKED_CALLS,),
        (
            "rows: gamma of the first masked text for all",
            "(depth < speculation.gamma)",
            "(depth < speculation.gamma[:1])",
        ),
    )
)

SHARED_NUMBERS = (
    _table(
        "cspd_jax/masked/rule.py",
        (MASKED_NOISE,),
        (
            "masked: a place is drawn with the bits of its first token",
            "of_places = jax.vmap(lambda key: jax.random.fold_in(key, _PLACES))(keys)",
            "of_places = keys",
        ),
    )
    + _table(
        "cspd_jax/coupling/block.py",
        (
            f"{GAUSSIAN_BLOCK}::test_every_coin_is_tossed_for_itself",
            f"{GAUSSIAN_BLOCK}::test_trials_of_a_coin_are_its_own",
        ),
        (
            "block of Gaussians: all coins have one number",
            "u = unit_interval(jax.random.bits(key_choice, (most + 1,), jnp.uint32), log_pi.dtype)",
            "u = jnp.tile(unit_interval(jax.random.bits(key_choice, (1,), jnp.uint32), log_pi.dtype),"
            " most + 1)",
        ),
        (
            "block of Gaussians: all coins but that of the end have one number",
            "~_gives_up(u[:-1], weights, log_pi[:-1])",
            "~_gives_up(u[0], weights, log_pi[:-1])",
        ),
        (
            "block of Gaussians: trials of all coins have the same numbers",
            "bits = jax.random.bits(jax.random.fold_in(key_trials, coins.trips), shape, jnp.uint32)",
            "bits = jax.random.bits(jax.random.fold_in(key_trials, coins.trips), shape[1:], jnp.uint32)\n"
            "        bits = jnp.broadcast_to(bits, shape)",
        ),
        (
            "block of Gaussians: both decisions of a trial have the same number",
            "tails = _gives_up(unit_interval(bits[-1], log_pi.dtype), weight, log_pi)",
            "tails = _gives_up(unit_interval(bits[-2], log_pi.dtype), weight, log_pi)",
        ),
    )
    + _table(
        "cspd_jax/coupling/categorical.py",
        ("tests/coupling/test_coupling_block.py",),
        (
            "block: all tests have one number",
            "uniform(jax.random.fold_in(for_tests, i), dtype=log_p.dtype))(index)",
            "uniform(jax.random.fold_in(for_tests, 0 * i), dtype=log_p.dtype))(index)",
        ),
    )
    + _table(
        "cspd_jax/coupling/siblings.py",
        ("tests/coupling/test_coupling_siblings.py",),
        (
            "siblings: all tests have one number",
            "u = uniform(for_tests, drafts.shape, jnp.result_type(jnp.float32, log_p, log_q))",
            "u = uniform(for_tests, (), jnp.result_type(jnp.float32, log_p, log_q))",
        ),
    )
    + _table(
        "cspd_jax/text/rules.py",
        (TEXT, TEXT_PROTOCOL),
        (
            "text: all tests of a round have one number",
            "uniform(key, (gamma,), p.dtype)",
            "jnp.tile(uniform(key, (1,), p.dtype), gamma)",
        ),
    )
)

FEW_BITS = (
    _table(
        "cspd_jax/coupling/acceptance.py",
        BITS,
        (
            "uniforms of 20 bits",
            "return (bits.astype(dtype) + 0.5) * 2.0**-32",
            "return ((bits >> 12).astype(dtype) + 0.5) * 2.0**-20",
        ),
        (
            "uniforms of 23 bits",
            "return unit_interval(jax.random.bits(key, shape, jnp.uint32), dtype)",
            "return 1 - jax.random.uniform(key, shape, dtype)",
        ),
    )
    + _table(
        "cspd_jax/coupling/block.py",
        BITS,
        (
            "uniforms of a block of 23 bits",
            "u = unit_interval(jax.random.bits(key_choice, (most + 1,), jnp.uint32), log_pi.dtype)",
            "u = 1 - jax.random.uniform(key_choice, (most + 1,), log_pi.dtype)",
        ),
    )
    + _table(
        "cspd_jax/text/rules.py",
        BITS,
        (
            "uniforms of text of 23 bits",
            "uniform(key, (gamma,), p.dtype)",
            "1 - jax.random.uniform(key, (gamma,), p.dtype)",
        ),
    )
    + _table(
        "cspd_jax/coupling/residual.py",
        BITS,
        (
            "normals of 20 bits",
            "jax.lax.bitcast_convert_type(bits, jnp.int32).astype(dtype) + 0.5",
            "(jax.lax.bitcast_convert_type(bits, jnp.int32) >> 12 << 12).astype(dtype) + 0.5",
        ),
    )
)

# min(1, p / q) without the 1.
CLIPS = (
    _table(
        "cspd_jax/coupling/acceptance.py",
        (EXTREMES, CATEGORICAL),
        (
            "clip: the acceptance of two densities",
            "return jnp.where(valid, jnp.minimum(log_ratio, 0.0), -jnp.inf)",
            "return jnp.where(valid, log_ratio, -jnp.inf)",
        ),
        (
            "clip: the acceptance of a ratio",
            "return jnp.where(jnp.isnan(log_ratio), -jnp.inf, jnp.minimum(log_ratio, 0.0))",
            "return jnp.where(jnp.isnan(log_ratio), -jnp.inf, log_ratio)",
        ),
    )
    + _table(
        "cspd_jax/coupling/categorical.py",
        (CATEGORICAL, "tests/coupling/test_coupling_block.py"),
        (
            "clip: pi of a block of tokens",
            "log_acceptance(log_pi + log_p, log_q))",
            "log_pi + log_p - log_q)",
        ),
        (
            "clip: the acceptance that is reported of a token",
            "log_a = log_acceptance(log_p[draft], log_q[draft])",
            "log_a = log_p[draft] - log_q[draft]",
        ),
    )
    + _table(
        "cspd_jax/coupling/siblings.py",
        ("tests/coupling/test_coupling_siblings.py",),
        (
            "clip: the acceptance of siblings",
            "log_acceptance(log_p[draft], log_q[draft])",
            "log_p[draft] - log_q[draft]",
        ),
    )
    + _table(
        "cspd_jax/coupling/gaussian.py",
        (GAUSSIANS, EXTREMES),
        (
            "clip: the acceptance that is reported of Gaussians",
            "log_a = log_acceptance_of_ratio(log_ratio(p, q, draft))",
            "log_a = log_ratio(p, q, draft)",
        ),
    )
    + _table(
        "cspd_jax/coupling/resample.py",
        (f"tests/coupling/test_coupling_path.py::{LIKES_BETTER}",),
        (
            "clip: the acceptance that is reported of a path",
            "log_a = log_acceptance_of_ratio(log_ratio)",
            "(log_a,) = at_least_float32(log_ratio)",
        ),
    )
    + _table(
        "cspd_jax/text/rules.py",
        (f"{TEXT}::test_a_draft_that_is_certain_is_accepted_by_every_number",),
        (
            "clip: a certain draft may be rejected by deepmind's test",
            "jnp.log(jnp.minimum(r, 1 - 2.0**-24))",
            "jnp.log(r)",
        ),
    )
)
CLIPS += [
    Mutant(
        "clip: the paper's test",
        "cspd_jax/image/rounds/paper_criterion.py",
        "accepts(u, log_acceptance_of_ratio(ratio))",
        "accepts(u, ratio)",
        (f"{TOKENS}::test_sigma_of_the_paper",),
        why_it_survives="a uniform is at most 1, and accepts nothing that is no number",
    ),
    Mutant(
        "clip: deepmind's test",
        "cspd_jax/text/rules.py",
        "< log_acceptance(log_p, log_q)",
        "< log_p - log_q",
        (TEXT,),
        why_it_survives="its numbers are below 1; drafts have q above 0",
    ),
]

LOSSY_CHAINS = _table(
    "cspd_jax/image/methods.py",
    (
        "tests/image/test_shortcuts.py::test_speculation_along_the_chains_of_a_checkerboard_is_lossy",
        "tests/image/test_methods.py::test_what_is_lossless",
    ),
    (
        "shortcuts: lossless with speculation along the chains",
        "        if options.shortcuts:\n",
        "        if options.shortcuts and options.chain is None:\n",
    ),
    (
        "joint: lossless with speculation along the chains",
        "        if self.joint:\n",
        "        if self.joint and options.chain is None:\n",
    ),
) + _table(
    "cspd_jax/image/options.py",
    ("tests/image/test_shortcuts.py::test_speculation_along_the_chains_of_a_checkerboard_is_lossy",),
    (
        "shortcuts: no checkerboard with speculation along the chains",
        "for s in (self.anneal, self.order) if",
        "for s in (self.anneal, self.order if self.chain is None else None) if",
    ),
)

UNUSED_DRAFTS = _table(
    "cspd_jax/image/rounds/verification.py",
    (f"{TOKENS}::test_what_is_drawn_is_what_is_tested",),
    (
        "rounds: more drafts are used than there are, of speculated chains",
        "used = testing[:, None] & (jnp.arange(gamma) < state.num_drafts[:, None])",
        "used = testing[:, None] & (jnp.arange(gamma) < state.num_drafts[:, None]"
        " + gamma * (inputs.options.chain is not None))",
    ),
    (
        "rounds: more drafts are used than there are, of a draft model",
        "used = testing[:, None] & (jnp.arange(gamma) < state.num_drafts[:, None])",
        "used = testing[:, None] & (jnp.arange(gamma) < state.num_drafts[:, None]"
        " + gamma * (inputs.draft is not None))",
    ),
) + _table(
    "cspd_jax/image/rounds/drafting.py",
    (f"{TOKENS}::test_what_is_drawn_is_what_is_tested",),
    (
        "drafting: groups are drawn that nobody asked for",
        "wanted = (jnp.arange(gamma) < state.num_drafts[:, None]) &",
        "wanted = (jnp.arange(gamma) < state.num_drafts[:, None] + gamma) &",
    ),
    (
        "drafting: the last group that is tested is not drawn",
        "wanted = (jnp.arange(gamma) < state.num_drafts[:, None]) &",
        "wanted = (jnp.arange(gamma) < state.num_drafts[:, None] - 1) &",
    ),
    (
        "drafting: a draft model draws groups that nobody asked for",
        "asked = (jnp.arange(gamma) < state.num_drafts[:, None]) &",
        "asked = (jnp.arange(gamma) < state.num_drafts[:, None] + gamma) &",
    ),
    (
        "drafting: the last group of a draft model that is tested is not drawn",
        "asked = (jnp.arange(gamma) < state.num_drafts[:, None]) &",
        "asked = (jnp.arange(gamma) < state.num_drafts[:, None] - 1) &",
    ),
)

TWICE = _table(
    "cspd_jax/apps/bulk/workers.py",
    (
        f"{SAMPLES_TEST}::test_what_others_make_is_not_made_twice",
        f"{SAMPLES_TEST}::test_a_damaged_shard_that_another_makes_anew_stays",
    ),
    (
        "samples: what another has finished before the claim is made again",
        "if not mine or folders.is_done(folder, manifest, index):",
        "if not mine:",
    ),
    (
        "samples: an export that another has finished before the claim is made again",
        "if mine and not finished():",
        "if mine:",
    ),
    (
        "samples: what another is making is made as well",
        "if not mine or folders.is_done(folder, manifest, index):",
        "if folders.is_done(folder, manifest, index):",
    ),
    (
        "samples: the record of what another makes anew is removed",
        "if mine and folders.is_done(folder, manifest, index):",
        "if folders.is_done(folder, manifest, index):",
    ),
)

ON_FLOWS = (
    _table(
        "cspd_jax/diffusion/gaussian.py",
        (f"{FLOWS}::test_a_window_is_what_the_steps_make",),
        (
            "flow: a window has the factors of the steps after",
            "to_one = np.append(1.0, schedule.mean_x[1:])",
            "to_one = np.append(1.0, schedule.mean_x[:-1])",
        ),
        (
            "flow: a window has the factors added up from the other end",
            "np.cumprod(to_one)",
            "np.cumprod(to_one[::-1])[::-1]",
        ),
        (
            "flow: x_0-hat on the other side",
            "of_flow = (*schedule[1:], schedule.log_var,",
            "of_flow = (schedule[1], -schedule[2], *schedule[3:], schedule.log_var,",
            (f"{FLOWS}::test_the_plain_chain_has_the_closed_form_law",),
        ),
    )
    + _table(
        "cspd_jax/image/chain/drafters.py",
        (f"{FLOWS}::test_a_window_is_what_the_steps_make",),
        (
            "flow: the last step of a window has noise left over of the steps before",
            "jnp.concatenate([jnp.full_like(h[:1], jnp.inf), h[:-1]])",
            "jnp.concatenate([h[:1], h[:-1]])",
        ),
    )
    + _table(
        "cspd_jax/image/chain/jacobian.py",
        (f"{JACOBIAN}::test_a_window_is_what_its_steps_make",),
        (
            "flow: x_0-hat of a window stays where it was",
            "moved = self._moved(axes, t, here, x, deviation)",
            "moved = self._moved(axes, t, guess, x, deviation)",
        ),
        (
            "flow: a window moves x_0-hat by the state after the step",
            "moved = self._moved(axes, t, here, x, deviation)",
            "moved = self._moved(axes, t, here, mean + deviation, deviation)",
        ),
    )
)

PASSES = (
    _table(
        "cspd_jax/masked/stepwise.py",
        (MASKED_CALLS,),
        (
            "passes: rows of the hidden prompts are not counted",
            "calls = count_calls(whole=1, rows=len(canvas.base))",
            "calls = count_calls(whole=1, rows=len(canvas.start))",
        ),
        (
            "passes: passes over a block taken for those over everything",
            "count_calls(whole=begins, block=~begins, rows=len(canvas.base))",
            "count_calls(whole=~begins, block=begins, rows=len(canvas.base))",
        ),
        (
            "passes: rows of the hidden prompts are not counted beside a cache",
            "count_calls(whole=begins, block=~begins, rows=len(canvas.base))",
            "count_calls(whole=begins, block=~begins, rows=len(canvas.start))",
        ),
        (
            "passes: rows of the hidden prompts are not counted in a schedule",
            "RoundInfo(None, count_calls(whole=1, rows=len(canvas.base)))",
            "RoundInfo(None, count_calls(whole=1, rows=len(canvas.start)))",
        ),
        (
            "passes: a schedule has a pass for each row",
            "RoundInfo(None, count_calls(whole=1, rows=len(canvas.base)))",
            "RoundInfo(None, count_calls(whole=len(canvas.start), rows=len(canvas.base)))",
        ),
    )
    + _table(
        "cspd_jax/masked/speculative.py",
        (MASKED_CALLS,),
        (
            "passes: the first one is not counted",
            "calls = count_calls(whole=1, rows=len(canvas.base))",
            "calls = count_calls()",
        ),
        (
            "passes: rows of the hidden prompts are not counted in the first one",
            "calls = count_calls(whole=1, rows=len(canvas.base))",
            "calls = count_calls(whole=1, rows=len(canvas.start))",
        ),
        (
            "passes: those that fill the cache are not counted",
            "return next_state, RoundInfo(drafts, add(calls, verdict.calls))",
            "return next_state, RoundInfo(drafts, verdict.calls)",
        ),
        (
            "passes: rows of the hidden prompts are not counted in those that fill the cache",
            "return state._replace(moves=moves, cache=cache), count_calls(whole=1, rows=len(canvas.base))",
            "return state._replace(moves=moves, cache=cache), count_calls(whole=1, rows=len(canvas.start))",
        ),
        (
            "passes: rows of the hidden prompts are not counted in those that verify",
            "rows = texts.shape[0] * texts.shape[1] * canvas.halves",
            "rows = texts.shape[0] * texts.shape[1]",
        ),
        (
            "passes: a row for each text, whatever the number of its versions",
            "rows = texts.shape[0] * texts.shape[1] * canvas.halves",
            "rows = texts.shape[0] * canvas.halves",
        ),
        (
            "passes: those over a block are taken for those over everything",
            'kind = {"block": 1} if canvas.cached else {"whole": 1}',
            'kind = {"whole": 1}',
        ),
        (
            "passes: one is counted where there is none",
            "return Verdict(stays, jax.tree.map(jnp.zeros_like, state.moves), count_calls())",
            "return Verdict(stays, jax.tree.map(jnp.zeros_like, state.moves), count_calls(whole=1))",
        ),
        (
            "passes: moves that were not asked for count as tested",
            "walking & offers[rows, at], passed)",
            "(depth == jnp.asarray(sets.sizes)[at]) & offers[rows, at], passed)",
        ),
        (
            "passes: moves behind a failure count as tested",
            "walking & offers[rows, at], passed)",
            "(depth < speculation.gamma) & offers[rows, at], passed)",
        ),
    )
    + _table(
        "cspd_jax/masked/info.py",
        (MASKED_CALLS,),
        (
            "passes: those over a block are left out of the sum",
            "return int(self.calls.whole_passes) + int(self.calls.block_passes)",
            "return int(self.calls.whole_passes)",
        ),
    )
    + _table(
        "cspd_jax/masked/passes.py",
        (MASKED_CALLS,),
        (
            "masked: guidance of s in place of s + 1",
            "(scale + 1) * (conditional",
            "scale * (conditional",
        ),
        (
            "masked: the halves of guidance the other way round",
            "conditional, unconditional = logits",
            "unconditional, conditional = logits",
        ),
        (
            "masked: versions of a text beside the hidden prompts of others",
            "filled = jnp.tile(texts.reshape(-1, canvas.places), (halves, 1))",
            "filled = jnp.repeat(texts.reshape(-1, canvas.places), halves, axis=0)",
        ),
    )
)

# What is drawn for one purpose, drawn again for another.
DRAWN_TWICE = (
    _table(
        "cspd_jax/coupling/categorical.py",
        (CATEGORICAL,),
        (
            "categorical: the test and the draw have the same key",
            "for_test, for_residual = jax.random.split(key)",
            "for_test = for_residual = key",
        ),
    )
    + _table(
        "cspd_jax/coupling/siblings.py",
        ("tests/coupling/test_coupling_siblings.py",),
        (
            "siblings: the tests and the draw have the same key",
            "for_tests, for_value = jax.random.split(key)",
            "for_tests = for_value = key",
        ),
    )
    + _table(
        "cspd_jax/coupling/resample.py",
        ("tests/coupling/test_coupling_path.py", GAUSSIANS),
        (
            "resample: a proposal and its test have the same key",
            "for_value, for_test = jax.random.split(key)",
            "for_value = for_test = key",
        ),
    )
    + _table(
        "cspd_jax/image/released/acceptance.py",
        (f"{RELEASED}::test_nothing_random_of_a_block_is_used_twice",),
        (
            "released: a proposal and its test have the same key",
            "return normal, _uniforms(keys_for(Purpose.PROPOSAL_TEST), positions)",
            "return normal, _uniforms(keys_for(Purpose.PROPOSAL), positions)",
        ),
        (
            "released: every try has the same random numbers",
            "return jax.vmap(jax.random.fold_in, (0, None))(purpose_keys(keys, purpose), number)",
            "return jax.vmap(jax.random.fold_in, (0, None))(purpose_keys(keys, purpose), 0 * number)",
        ),
        (
            "released: the first try has the numbers of the tests",
            "return _uniforms(purpose_keys(keys, Purpose.TEST), positions)",
            "return _uniforms(jax.vmap(jax.random.fold_in, (0, None))(purpose_keys(keys,"
            " Purpose.PROPOSAL_TEST), 0), positions)",
        ),
    )
    + _table(
        "cspd_jax/image/rounds/paper_criterion.py",
        (f"{TOKENS}::test_nothing_random_is_used_twice", f"{TOKENS}::test_joint_law", HASHES),
        (
            "paper: proposals have the keys of the tests",
            "keys = token_keys(inputs, here, Purpose.PROPOSAL)[:, 0]",
            "keys = token_keys(inputs, here, Purpose.TEST)[:, 0]",
        ),
    )
    + _table(
        "cspd_jax/image/sampler.py",
        (f"{PLAIN}::test_halves_of_guidance_have_first_tokens_of_their_own",),
        (
            "causal: both halves' first tokens have the same noise",
            "jnp.concatenate([bound.keys, purpose_keys(bound.keys, Purpose.UNCONDITIONAL)])",
            "jnp.concatenate([bound.keys, bound.keys])",
        ),
        (
            "causal: both halves have the same first token",
            "tokens = tokens.at[images:, 0].set(state.uncond_first)",
            "tokens = tokens.at[images:, 0].add(0)",
        ),
    )
    + _table(
        "cspd_jax/text/trees/rounds.py",
        (
            f"{TREES}::test_every_level_has_uniforms_of_its_own_and_no_drafts_beyond_its_row_s",
            f"{TREES}::test_drafts_tests_and_residuals_of_a_tree_have_purposes_of_their_own",
        ),
        (
            "tree: all levels are tested with the same numbers",
            "index, law = rule(u[depth, :count], p, q, drafts)",
            "index, law = rule(u[0, :count], p, q, drafts)",
        ),
        (
            "tree: the tests and the residual have the same key",
            "gumbel(round_keys(inputs.keys, Purpose.RESIDUAL, state.length)",
            "gumbel(round_keys(inputs.keys, Purpose.TEST, state.length)",
        ),
        (
            "tree: children beyond the levels of their row are accepted",
            "q = jnp.where(depth < levels, q, -jnp.inf)  # beyond them there are no drafts",
            "q = jnp.where(depth < levels + 1, q, -jnp.inf)",
        ),
    )
)

SHIFTED = (
    _table(
        "cspd_jax/masked/passes.py",
        (MASKED_CALLS,),
        (
            "masked: shifted logits beside a cache stay where they were",
            "logits = jnp.concatenate([logits[:, :, :1], logits[:, :, :-1]], axis=2)",
            "logits = logits",
        ),
        (
            "masked: shifted logits at the beginning of a block stay where they were",
            "at = jnp.maximum(at - canvas.network.config.shifted, 0)",
            "at = at",
        ),
    )
    + _table(
        "cspd_jax/masked/stepwise.py",
        (MASKED_CALLS,),
        (
            "masked: any place may be filled where a shifted model's block begins",
            "to_fill &= ~begins | (jnp.arange(canvas.block) == 0)",
            "to_fill &= True",
        ),
    )
    + _table(
        "cspd_jax/masked/speculative.py",
        (MASKED_CALLS,),
        (
            "masked: any first move may be drafted where a shifted model's block begins",
            "now = free & ((k > 0) | (jnp.arange(free.shape[1]) == 0))",
            "now = free",
        ),
        (
            "masked: a row that waits for its block has moves",
            "exists = verdict.moves.exists & (certain & ~finished)[:, None]",
            "exists = verdict.moves.exists & ~finished[:, None]",
        ),
        (
            "masked: the steps of places are those of the round",
            "order=fill(state.order, place, steps, taken),",
            "order=fill(state.order, place, state.info.drafts.rounds[:, None], taken),",
        ),
    )
)

DRAWN_TWICE.append(
    Mutant(
        "gaussians: the test and the residual have the same key",
        "cspd_jax/coupling/gaussian.py",
        "for_test, for_residual = jax.random.split(key)",
        "for_test = for_residual = key",
        (GAUSSIANS,),
        why_it_survives="the residual folds the number of a trial into its key",
    )
)

FACE = "tests/repository/test_python_face.py"

SURPRISES = [
    *_table(
        "cspd_jax/keys.py",
        ("tests/repository/test_process.py",),
        (
            "keys: of any generator",
            "(found := str(jax.random.key_impl(key))) != _GENERATOR",
            "not (found := _GENERATOR)",
        ),
        (
            "keys: of seeds by the default generator",
            "    return jax.random.key(seed, impl=_GENERATOR)",
            "    return jax.random.key(seed)",
        ),
    ),
    *_table(
        "cspd_jax/weights/chat.py",
        ("tests/training/test_states_training.py",),
        ("chats: the tokenizer's own special tokens", "begin=False)", "begin=True)"),
    ),
    *_table(
        "cspd_jax/training/provenance.py",
        ("tests/training/test_run_folder.py",),
        (
            "resumed: on other data",
            '        if was.get("sha256") != told["sha256"]:\n',
            "        if False:\n",
        ),
    ),
    *_table(
        "cspd_jax/training/run_folder.py",
        ("tests/training/test_run_folder.py",),
        (
            "resumed: a model without its checkpoints",
            'if resume and (out / "model").exists() and not newest_step(out):',
            "if False:",
        ),
    ),
    *_table(
        "cspd_jax/_utils/files.py",
        ("tests/training/test_data.py", "tests/apps/test_evaluation_samples.py"),
        ("pictures: those of hidden folders", "if below and not is_hidden(name)]", "if below]"),
    ),
    *_table(
        "cspd_jax/apps/evaluation/image_files.py",
        ("tests/apps/test_evaluation_samples.py",),
        ("pictures: 16 bits are clipped", "eight_bits(opened).convert", "opened.convert"),
    ),
    *_table(
        "cspd_jax/apps/bulk/workers.py",
        ("tests/apps/test_samples.py",),
        (
            "samples: PNGs that are there are not looked at",
            "    png = png or (verify and",
            "    png = png or (False and",
        ),
    ),
    *_table(
        "cspd_jax/image/pictures.py",
        ("tests/image/test_regions.py",),
        ("masks: of any grey", "    if neither >= _MOST_GREY:\n", "    if neither > 1:\n"),
        ("masks: colours are black or white", "pixels.max(axis=-1)\n", "pixels.min(axis=-1)\n"),
    ),
    *_table(
        "cspd_jax/cli/_failures.py",
        (f"{FAILURES}::test_a_signal_is_not_lost",),
        (
            "signals: Ctrl-C in a destructor is lost",
            "        numbers.append(signal.SIGINT)\n",
            "        pass\n",
        ),
        ("signals: Ctrl-C ends as SIGTERM does", "number == signal.SIGINT else", "False else"),
        (
            "environment: JAX's variables are not named",
            "    if blamed := _blamed(error):\n",
            "    if blamed := None:\n",
            (f"{FAILURES}::test_what_the_environment_tells_jax",),
        ),
    ),
    *_table(
        "cspd_jax/apps/service/hosts.py",
        ("tests/apps/test_service.py::test_hosts",),
        ("hosts: any name", 'return host == "localhost" or _matches(host, allowed)', "return True"),
        ("hosts: pages of any origin", "if page != host and not", "if not page and not"),
        ("hosts: an address of another page", "if page != host and", "if not _is_known(page, ()) and"),
    ),
    *_table(
        "cspd_jax/text/sampling.py",
        (
            f"{FACE}::test_logits_that_are_not_finite",
            f"{FACE}::test_logits_of_masked_text_that_are_not_finite",
        ),
        (
            "text: a token of logits that are NaN",
            "    return jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), best, NO_TOKEN)",
            "    return best",
        ),
    ),
    *_table(
        "cspd_jax/text/rounds.py",
        (f"{FACE}::test_logits_that_are_not_finite",),
        (
            "text: a drawn token of logits that are NaN",
            "jnp.where(lost, NO_TOKEN, verdict.token)",
            "verdict.token",
        ),
        ("text: a row goes on after no token", " | (tokens == NO_TOKEN))", ")"),
    ),
    *_table(
        "cspd_jax/image/chain/calibration.py",
        ("tests/image/test_calibration.py::test_calibrate_refuses",),
        (
            "calibration: a fit that is not finite is kept",
            "    if not all(bool(jnp.isfinite(a).all()) for a in jax.tree.leaves(found)):\n",
            "    if not found:\n",
        ),
    ),
    *_table(
        "cspd_jax/apps/bulk/workers.py",
        ("tests/apps/test_samples.py::test_more_images",),
        ("samples: more images are not written down", "            _write_manifest(folder, stored)\n", ""),
    ),
    *_table(
        "cspd_jax/image/plan.py",
        (f"{FACE}::test_guidance_of_each_image",),
        (
            "plan: the mean guidance for every image",
            "            options = dataclasses.replace(options, cfg=jnp.asarray(self.scales[index]))\n",
            "",
        ),
    ),
    *_table(
        "cspd_jax/masked/passes.py",
        ("tests/masked/test_masked_sampling.py::test_guidance_is_of_the_row",),
        (
            "masked: the guidance of the first row for all",
            "by_row(canvas.options.guidance, conditional)",
            "jnp.reshape(canvas.options.guidance, -1)[0]",
        ),
    ),
]

KNOWN = [
    *_table(
        "cspd_jax/image/known.py",
        ("tests/image/test_known.py",),
        (
            "known: the order is as it was drawn",
            "    drawn = ~jnp.take_along_axis(mask, order, axis=1)\n",
            "    drawn = jnp.zeros_like(order)\n",
        ),
        (
            "known: one step too many is left out",
            "group.start + group.size > least)",
            "group.start > least)",
        ),
    ),
    *_table(
        "cspd_jax/image/sampler.py",
        ("tests/image/test_known.py",),
        (
            "known: plain contexts do not show all of it",
            "        known = jnp.maximum(known, jnp.tile(bound.kept.number, rows // images))\n",
            "        pass\n",
        ),
        (
            "known: what the padding wrote stays",
            "    return PlainState(put_back(bound.kept, tokens), cache, first), seen\n",
            "    return PlainState(tokens, cache, first), seen\n",
        ),
        (
            "known: steps are made that nobody needs",
            "        needed = jnp.any(bound.active & (kept.number < group.first + group.size))\n",
            "        needed = jnp.bool_(True)\n",
        ),
    ),
    *_table(
        "cspd_jax/image/rounds/groups.py",
        ("tests/image/test_known.py",),
        (
            "known: contexts of rounds do not show all of it",
            "        n_known = jnp.maximum(n_known, bound.kept.number[:, None])\n",
            "        pass\n",
        ),
        (
            "known: rounds draft and test it",
            "    return there & (places(inputs, group) >= kept.number.reshape(-1, *[1] * group.ndim))\n",
            "    return there\n",
        ),
    ),
]

MUTANTS: list[Mutant] = [
    *CHAINS, *HEADS, *STATES_READ, *DRAFTERS,
    *JACOBIANS, *PLAINS, *KEYS, *PATHS, *VERIFICATION, *PAPER, *DRAFTING, *REVEAL,
    *RUNNER, *SHORTCUTS, *BLOCKS, *COUPLING, *TEXTS, *MASKEDS, *CONVERTERS, *RUNS, *SERVICE, *SAMPLES,
    *EVALUATION, *ROWS, *SHARED_NUMBERS, *FEW_BITS, *CLIPS, *LOSSY_CHAINS, *UNUSED_DRAFTS, *TWICE, *ON_FLOWS,
    *PASSES, *DRAWN_TWICE, *SHIFTED, *SURPRISES, *KNOWN,
]  # fmt: skip
