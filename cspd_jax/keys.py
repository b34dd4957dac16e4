"""Keys, from which all random numbers of an image or a text are derived.

Every row (an image or a text) has one key. A random number for it is drawn with this
key, into which a purpose and the place of use are folded. (The noise of masked texts is
the exception: it belongs to a step and a place, and has one purpose.) So a row depends
on its own key, and never on its neighbours in the batch.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp

from cspd_jax.check import UserError

Array = jax.Array
# With this generator of JAX, a row of a batch draws the same numbers as the row alone.
_GENERATOR = "threefry2x32"


@enum.unique
class Purpose(enum.IntEnum):
    """The use of a random number. Numbers that are drawn for different purposes are
    independent."""

    ORDER = 0
    CHAIN = 1
    WINDOW = 2
    INITIAL_NOISE = 3
    TEST = 4
    PROPOSAL = 5
    PROPOSAL_TEST = 6
    UNALIGNED = 7
    UNCONDITIONAL = 8
    PASS = 9
    DRAFT = 10


def seed_key(seed: int | Array) -> Array:
    """Returns the key of a seed, whatever JAX's default generator is."""
    return jax.random.key(seed, impl=_GENERATOR)


def as_typed(key: Array) -> Array:
    """Returns a key or keys [...] as typed keys (`jax.random.key`), converting the old
    uint32 keys [..., 2].

    Raises UserError if the argument is no key, for example a seed. Raises it for keys
    of another generator, too: under `vmap` such a generator may draw for all rows from
    the first row's key.
    """
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
        # The key is of the old kind, made by jax.random.PRNGKey.
        return jax.random.wrap_key_data(key, impl=_GENERATOR)
    except TypeError:
        raise UserError(
            f"key is uint32 {list(key.shape)}, which is no key of {_GENERATOR}; make it"
            f" by jax.random.key(seed, impl={_GENERATOR!r})"
        ) from None


def row_keys(key: Array, count: int, first: int = 0) -> Array:
    """Returns [count], the keys of the rows (images, texts) with the numbers first,
    ..., first + count - 1 of a run, from its one key."""
    key = as_typed(key)
    if key.ndim:
        raise UserError(
            f"keys have shape {key.shape}; the keys of rows are derived from one key"
        )
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(first + jnp.arange(count))


def independent_key(key: Array) -> Array:
    """Returns a key, or keys [B], whose numbers are independent of all numbers that a
    run with `key` draws. Measurements that decide how to do the run use it."""
    key = as_typed(key)
    if key.ndim > 1:
        raise UserError(
            f"keys have shape {key.shape}; give one key, or one for each row"
        )
    # This number is larger than any row or purpose that a run folds in.
    fold = lambda k: jax.random.fold_in(k, 2**32 - 1)
    return fold(key) if key.ndim == 0 else jax.vmap(fold)(key)


def keys_per_row(key: Array, count: int) -> Array:
    """Returns [count], a typed key for each row, given one key for all rows or one key
    for each."""
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
    """Returns [B], the keys for one purpose, for rows with `keys` [B]."""
    return jax.vmap(lambda k: jax.random.fold_in(k, int(purpose)))(keys)


def chain_noise(keys: Array, positions: Array, steps: int, dim: int) -> Array:
    """Returns [T + 1, B, G, d], the noise of the denoising chains at `positions` [B, G]
    of images with `keys` [B].

    Entry T is x_T, and entry i is the noise of step i. The noise is float32, whatever
    type the networks compute in.
    """

    def one(key: Array, position: Array) -> Array:
        return jax.random.normal(
            jax.random.fold_in(key, position), (steps + 1, dim), jnp.float32
        )

    keys = purpose_keys(keys, Purpose.CHAIN)
    return jax.vmap(jax.vmap(one, (None, 0), 1), (0, 0), 1)(keys, positions)


def at_positions(keys: Array, positions: Array) -> Array:
    """Returns [B, ...], a key for each of the positions [B, ...], from the rows' keys
    [B]."""
    rows = jnp.broadcast_to(
        keys.reshape(-1, *[1] * (positions.ndim - 1)), positions.shape
    )
    return jax.vmap(jax.random.fold_in)(
        rows.reshape(-1), positions.reshape(-1)
    ).reshape(positions.shape)


def initial_noise(keys: Array, positions: Array, dim: int) -> Array:
    """Returns [B, ..., d], the x_T of the speculated chains at `positions` [B, ...]."""
    own = at_positions(purpose_keys(keys, Purpose.INITIAL_NOISE), positions).reshape(-1)
    x = jax.vmap(lambda key: jax.random.normal(key, (dim,), jnp.float32))(own)
    return x.reshape(*positions.shape, dim)


def window_keys(keys: Array, positions: Array) -> Array:
    """Returns [B, ...], a key for each of the speculated chains at `positions` [B,
    ...]. All random numbers of a chain after x_T are drawn with this key, into which
    the number of steps that are left is folded."""
    return at_positions(purpose_keys(keys, Purpose.WINDOW), positions)
