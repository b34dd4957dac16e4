"""The released runner: against recorded runs of it, and what is ours in it."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of
from linear_tokens import LinearTokens
from recorded import check
from runner_cases import recorded_ends, runner, runner_generation, runner_units
from samplers import NEAR, TARGET
from scipy.stats import norm

from cspd_jax.image import Released, released
from cspd_jax.image.options import Options
from cspd_jax.image.order import reveal_groups
from cspd_jax.image.recipe import Draft
from cspd_jax.image.released import Numbers
from cspd_jax.keys import row_keys

OPTIONS = Options(num_iter=9, respacing=TARGET.spec, final_noise=False)  # 6 tokens
RUNNER = Released(None, gamma=2, prefill=0.1)
KEYS = row_keys(jax.random.key(5), 4)
LABELS = jnp.zeros(4, jnp.int32)


def test_parity():
    check(runner_units(runner()))


@pytest.mark.slow
@pytest.mark.parametrize("run", runner().runs)
def test_parity_of_runs(run):
    check(runner_generation(runner(), run))


def test_parity_notices_the_factor():
    """With F the other way round, as the density of a path has it, recorded decisions
    are not met."""
    r = runner()
    at = "unit/close42/"
    p, q = recorded_ends(r, at, len(r[at + "uniform"]))
    for swapped, differing in ((False, 0), (True, 5)):
        log_stds = (q.log_std, p.log_std) if swapped else (p.log_std, q.log_std)
        ends = (end._replace(log_std=log_std) for end, log_std in zip((p, q), log_stds))
        ratio = released.log_acceptance_ratio(*ends, float(r[at + "inner"]))[0]
        wrong = (np.log(r[at + "uniform"]) < ratio) != r[at + "accepted"]
        assert wrong.sum() >= differing if swapped else not wrong.any()


def letters(steps):
    """T and D for the calls of both models, blocks apart."""
    return "".join(
        "D" * step.drafted + "T " * bool(step.block) or "T" for step in steps
    ).strip()


@pytest.mark.parametrize(
    "length, num_iter, runner, expected",
    [
        (16, 16, Released(None, 4), "TTTDDT DDDDT DDDDT DDDT"),
        (16, 6, Released(None, 2, 0.05), "TDDT DDT DT"),
        (16, 8, Released(None, 4, 1.0), "TTTTTTTT"),
        (16, 4, Released(None, 9, 0.0), "TDDDT"),
        # Steps 3 to 7 reveal nothing, but a block ends at step 4.
        (4, 9, Released(None, 4, 0.0), "TDDT DT"),
    ],
)
def test_schedule(length, num_iter, runner, expected):
    steps = released.schedule(length, num_iter, runner)
    assert tuple(step.group for step in steps) == reveal_groups(length, num_iter)
    assert letters(steps) == expected
    drafted = [
        i
        for step in steps
        if step.drafted
        for i in range(step.group.start, sum(step.group[:2]))
    ]
    blocks = [step.block for step in steps if step.block]
    assert drafted == [i for first, size in blocks for i in range(first, first + size)]


def draw(draft=NEAR, options=OPTIONS, runner=RUNNER, **of_runner):
    runner = dataclasses.replace(runner, **of_runner)
    batch = batch_of(TARGET, None, KEYS, LABELS, options, Draft(draft))
    return jax.tree.map(np.asarray, released.generate(batch, runner))


@pytest.mark.slow
@pytest.mark.parametrize(
    "runner, draft, cfg_schedule, temperature",
    [
        (Released(None, 1, 0.0), TARGET, "linear", 0.8),
        (Released(None, 3, 1.0), NEAR, "constant", 1.1),
    ],
)
def test_equal_to_the_plain_sampler(runner, draft, cfg_schedule, temperature):
    """A target that judges its own drafts one by one accepts all; or the target
    generates all."""
    options = dataclasses.replace(
        OPTIONS,
        num_iter=3,
        cfg=1.5,
        cfg_schedule=cfg_schedule,
        temperature=temperature,
    )
    plain = batch_of(TARGET, None, KEYS, LABELS, options).generate()
    found, info = draw(draft=draft, options=options, runner=runner)
    chex.assert_trees_all_close(found, plain.tokens, atol=1e-5)
    assert info.truncated.sum() == 0 and (info.trace.marks >= 0).all()


@pytest.mark.slow
def test_tokens_without_a_taken_proposal_are_zero():
    """A draft that is nearly right, but rejected at this inner temperature: proposals
    are rarely taken."""
    found, info = draw(
        draft=LinearTokens(offset=0.4001), inner_temperature=1e-5, max_resamples=1
    )
    zero = ~found.any(-1)
    assert info.truncated.sum() == zero.sum() > 0
    assert (info.trace.marks[zero] < 0).all()


def test_nothing_random_of_a_block_is_used_twice():
    """Tests of drafts, proposals and their tests: of every position and try a number of
    its own, also where some are uniform and others normal."""
    numbers = Numbers(row_keys(jax.random.key(5), 2))
    positions = jnp.array([[0, 1, 3], [2, 1, 0]])

    @jax.jit
    def run():
        tries = [numbers.of_try(positions, 1, jnp.int32(i)) for i in range(2)]
        return numbers.of_test(positions), tries

    tests, tries = jax.device_get(run())
    shares = [tests, *(a for normal, u in tries for a in (norm.cdf(normal[..., 0]), u))]
    assert np.diff(np.sort(np.ravel(shares))).min() > 1e-5
