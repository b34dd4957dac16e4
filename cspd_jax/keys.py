"""The random numbers of an image, all derived from its key.

Every image has one key. Everything random about it is derived by folding in a purpose
and the place where the number is used, so an image depends on its own key and never on
its neighbours in the batch.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp

from cspd_jax.check import UserError

Array = jax.Array
# The generator of JAX that draws for a row of a batch what it draws for the row alone.
_GENERATOR = "threefry2x32"


@enum.unique
class Purpose(enum.IntEnum):
    """What a random number is used for. Numbers of different purposes are
    independent."""

    ORDER = 0
    CHAIN = 1
    WINDOW = 2
    CHAIN_END = 3
    TEST = 4
    PROPOSAL = 5
    PROPOSAL_TEST = 6
    UNALIGNED = 7
    UNCONDITIONAL = 8
    PASS = 9
    DRAFT = 10


def seed_key(seed: int | Array) -> Array:
    """The key of a seed, whatever generator JAX is told to use by default."""
    return jax.random.key(seed, impl=_GENERATOR)


def as_typed(key: Array) -> Array:
    """A key, or keys, of the new kind. UserError for what is no key, such as a seed,
    and for keys of another generator, which draw for all rows of a batch from the key
    of the first."""
    dtype = getattr(key, "dtype", None)
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if is_key and isinstance(key, jax.Array):
        if (found := str(jax.random.key_impl(key))) != _GENERATOR:
            raise UserError(
                f"key is of the generator {found}, with which rows of a batch are not"
                f" independent; make it by jax.random.key(seed, impl={_GENERATOR!r})"
            )
        return key
    if is_key or dtype != jnp.uint32 or not key.ndim:
        raise UserError(
            f"key is {key!r:.80}; it must be made by jax.random.key, for example"
            " jax.random.key(0)"
        )
    try:
        # Of the old kind, jax.random.PRNGKey.
        return jax.random.wrap_key_data(key, impl=_GENERATOR)
    except TypeError:
        raise UserError(
            f"key is uint32 {list(key.shape)}, which is no key of {_GENERATOR}; make it"
            f" by jax.random.key(seed, impl={_GENERATOR!r})"
        ) from None


def row_keys(key: Array, count: int, first: int = 0) -> Array:
    """Keys [count] of the rows (images, texts) first, ..., first + count - 1 of a
    run."""
    key = as_typed(key)
    if key.ndim:
        raise UserError(
            f"keys have shape {key.shape}; the keys of rows are derived from one key"
        )
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(first + jnp.arange(count))


def independent_key(key: Array) -> Array:
    """A key, or keys [B], whose numbers are independent of what a run with `key` draws:
    for measurements that decide how it is run."""
    key = as_typed(key)
    if key.ndim > 1:
        raise UserError(
            f"keys have shape {key.shape}; give one key, or one for each row"
        )
    # More than there are rows or purposes.
    fold = lambda k: jax.random.fold_in(k, 2**32 - 1)
    return fold(key) if key.ndim == 0 else jax.vmap(fold)(key)


def keys_per_row(key: Array, count: int) -> Array:
    """One typed key per row [count], from one key for all of them or from one for
    each."""
    key = as_typed(key)
    if key.ndim == 0:
        return row_keys(key, count)
    if key.shape != (count,):
        raise UserError(
            f"there are {count} rows and keys of shape {key.shape}; give one key, or"
            " one each"
        )
    return key


def purpose_keys(keys: Array, purpose: enum.IntEnum) -> Array:
    """Keys [B] of one purpose, for rows with `keys` [B]."""
    return jax.vmap(lambda k: jax.random.fold_in(k, int(purpose)))(keys)


def chain_noise(keys: Array, positions: Array, steps: int, dim: int) -> Array:
    """Noise of the denoising chains at `positions` [B, G] of images with `keys` [B]: [T
    + 1, B, G, d].

    Entry T is x_T, entry i is for step i. Drawn in float32 whatever the networks run
    in.
    """

    def one(key: Array, position: Array) -> Array:
        return jax.random.normal(
            jax.random.fold_in(key, position), (steps + 1, dim), jnp.float32
        )

    keys = purpose_keys(keys, Purpose.CHAIN)
    return jax.vmap(jax.vmap(one, (None, 0), 1), (0, 0), 1)(keys, positions)


def at_positions(keys: Array, positions: Array) -> Array:
    """A key for each position [B, ...], from one for each row [B]."""
    rows = jnp.broadcast_to(
        keys.reshape(-1, *[1] * (positions.ndim - 1)), positions.shape
    )
    return jax.vmap(jax.random.fold_in)(
        rows.reshape(-1), positions.reshape(-1)
    ).reshape(positions.shape)


def chain_ends(keys: Array, positions: Array, dim: int) -> Array:
    """x_T of the speculated chains at `positions` [B, ...]: [B, ..., d]."""
    own = at_positions(purpose_keys(keys, Purpose.CHAIN_END), positions).reshape(-1)
    x = jax.vmap(lambda key: jax.random.normal(key, (dim,), jnp.float32))(own)
    return x.reshape(*positions.shape, dim)


def window_keys(keys: Array, positions: Array) -> Array:
    """Of the speculated chains at `positions` [B, ...], one key each for all that is
    random after x_T: to be folded with the number of steps that are left."""
    return at_positions(purpose_keys(keys, Purpose.WINDOW), positions)
