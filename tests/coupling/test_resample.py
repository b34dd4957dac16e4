"""The resampler, on proposals that are taken with a known probability."""

import functools

import chex
import jax
import numpy as np

from cspd_jax.coupling.resample import resample

KEYS = jax.random.split(jax.random.key(0), 200)


def draw(key):
    """A weakly typed value in a tree, accepted with probability 1 / 20."""
    return {
        "x": jax.random.normal(key, (2,)),
        "n": jax.random.randint(key, (), 0, 100) * 1.0,
    }


@functools.partial(jax.jit, static_argnames="proposals")
def search(log_accept=-2.995732, *, proposals, max_trips):
    how = {"proposals": proposals, "max_trips": max_trips}
    return jax.vmap(lambda key: resample(key, draw, lambda value: log_accept, **how))(
        KEYS
    )


def test_the_result_does_not_depend_on_how_many_are_proposed_at_once():
    """K = 1, 8, 32 for 200 keys: the same proposal wins, bit for bit; mean number of
    proposals 20 (5 standard errors). Different keys give different values."""
    one, *others = (search(proposals=k, max_trips=1000) for k in (1, 8, 32))
    for k, found in zip((8, 32), others):
        chex.assert_trees_all_equal(found.value, one.value)
        chex.assert_trees_all_equal(found.trips, -(-one.trips // k))
        assert not found.truncated.any()
    assert abs(float(one.trips.mean()) - 20) < 5 * 20 / np.sqrt(200)
    assert len(np.unique(one.value["x"])) == 400


def test_the_trip_limit_is_reported():
    """The last proposal is returned, and said not to be accepted; log probability 0
    takes one trip."""
    found = search(-np.inf, proposals=8, max_trips=4)
    assert found.truncated.all() and (found.trips == 4).all()
    last = jax.vmap(lambda key: draw(jax.random.split(jax.random.fold_in(key, 31))[0]))(
        KEYS
    )
    chex.assert_trees_all_close(found.value, last, atol=1e-6)
    found = search(0.0, proposals=8, max_trips=4)
    assert not found.truncated.any() and (found.trips == 1).all()
    assert 0 < search(proposals=1, max_trips=1).truncated.sum() < 200
