"""Trains a head that drafts from its target's states. The head's own states are fed
back to it, as in drafting.

When a head drafts several tokens, it has the target's states only for the first one.
For each later token it has the states that it made itself. So a step of training takes
`fed_back` further turns over the same rows. In turn k, every place is drafted as the (k
+ 1)-th token after the last token with a known state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import ArrayTree

from cspd_jax import text
from cspd_jax.check import UserError
from cspd_jax.networks.eagle import Eagle, EagleConfig, init_params, published_layers
from cspd_jax.networks.lm import LM, LMConfig
from cspd_jax.training.config import HeadTrainConfig
from cspd_jax.training.data.source import shuffled
from cspd_jax.training.run import INIT, MEASURE, Learning, descend, run_key
from cspd_jax.training.text.rows import NONE, Taught

Array = jax.Array
_DECLINE = 0.8  # the weight of each turn relative to the turn before it


class Given(NamedTuple):
    """The target's parameters that the training of a head uses.

    embedding: [U, D] the target's table of embeddings for its U ids.
    kernel: [D, V] the matrix that turns the target's hidden states into logits of the
        head's V ids.
    """

    embedding: Array
    kernel: Array


def learning(config: HeadTrainConfig, rows: Taught, given: Given) -> Learning:
    """Returns the `Learning` of a head, which learns from a target's answers. The loss
    is the cross-entropy of the head relative to the target, in bits per id.

    The weight of each turn is `_DECLINE` times the weight of the turn before it. Ids
    that the head does not have are left out of the sum.
    """
    head = Eagle(config.model, jnp.dtype(config.dtype))

    def batch(step: int) -> Taught:
        which = shuffled(
            len(rows.tokens), step, config.batch, seed=config.seed, split="train"
        )
        return rows.rows(which)

    def loss(
        params: ArrayTree, _: Array, batch: Taught, given: Given
    ) -> tuple[Array, Array]:
        log_p, there = wanted(given, batch)
        p = jnp.exp(log_p)
        place = jnp.arange(batch.tokens.shape[1])
        logits = turns(head, params, given, batch, config.fed_back + 1)
        bits = -jnp.sum(p * jax.nn.log_softmax(logits), axis=-1) / jnp.log(2.0)
        turn = jnp.arange(len(bits))
        counts = there & (place >= turn[:, None, None])
        weight = counts * jnp.float32(_DECLINE) ** turn[:, None, None]
        mean = jnp.sum(weight * bits) / (batch.tokens.size * jnp.sum(_DECLINE**turn))
        return mean, jnp.sum(counts[0] * bits[0]) / jnp.maximum(jnp.sum(counts[0]), 1)

    return Learning(
        batch, lambda _, state, batch: descend(config, loss, state, batch, given)
    )


def head_config(target: LMConfig, ids: int) -> EagleConfig:
    """Returns the configuration of a head for a target. The head has one layer, which
    is like a layer of the target. It reads the inputs of a low, a middle and a high
    layer of the target."""
    if not target.causal:
        raise UserError(
            "a head drafts for causal models, and the target is a masked-diffusion"
            " model"
        )
    layer = dataclasses.replace(
        target,
        depth=1,
        vocab_size=ids,
        known_ids=ids,
        tie_embeddings=False,
        parallel_residual=False,
        bos_ids=(),
        eos_ids=(),
    )
    return EagleConfig(
        layer, published_layers(target.depth), target.width, target.vocab_size
    )


def given_by(config: LMConfig, params: ArrayTree, ids: np.ndarray) -> Given:
    """Returns the target's parameters that train a head with these ids [V]."""
    table = params["embed"]["embedding"]
    kernel = table[ids].T if config.tie_embeddings else params["head"]["kernel"][:, ids]
    return Given(table, kernel)


def frequent_ids(
    frequencies: np.ndarray, count: int, always: tuple[int, ...]
) -> np.ndarray:
    """Returns [count], in ascending order, the ids in `always` and the most frequent
    other ids of a target. `frequencies` [U] counts each of the target's U ids."""
    order = np.argsort(-frequencies, kind="stable")
    first = [*always, *(i for i in order[: count + len(always)] if i not in always)]
    return np.sort(np.array(first[:count], np.int32))


def first_params(
    config: EagleConfig, target: ArrayTree, depth: int, given: Given, seed: int
) -> dict[str, ArrayTree]:
    """Returns the parameters with which the training of a head begins. They are copied
    from the target's last layer, its last norm and its logits. The matrix that joins
    the states of several layers begins as the identity for the highest layer's
    state."""
    fresh = init_params(config, run_key(seed, INIT))
    fresh.pop("ids")
    last = target[f"layers_{depth - 1}"]
    width = config.layer.width
    join = fresh["join"]["kernel"].at[-width:].set(jnp.eye(width))
    attention = {
        **fresh["attention"],
        **{n: p for n, p in last["attention"].items() if n not in "qkv"},
    }
    for name in "qkv":
        part = last["attention"][name]
        kernel = fresh["attention"][name]["kernel"].at[width:].set(part["kernel"])
        attention[name] = {**part, "kernel": kernel}
    return {
        **fresh,
        "join": {"kernel": join},
        "attention": attention,
        "state_norm": last["attention_norm"],
        "mlp_norm": last["mlp_norm"],
        "mlp": last["mlp"],
        "norm": target["norm"],
        "head": {"kernel": given.kernel},
    }


def turns(
    head: Eagle, params: ArrayTree, given: Given, rows: Taught, count: int
) -> Array:
    """Returns logits [count, B, L, V] of the token after the next, one array for each
    turn. Each turn is given the states that the turn before it made.

    In turn k, place i sees the target's states up to place i - k. At the k places after
    these it sees the head's own states of turns 1 to k. For example, in turn 2 place 5
    sees the target's states at places 0 to 3, the state of turn 1 at place 4, and the
    state of turn 2 at place 5. In turn k the first k places have no states of the
    target, so their logits have no meaning.
    """
    batch, length = rows.tokens.shape
    params = {**params, "embedding": given.embedding}
    following = jnp.maximum(jnp.roll(rows.tokens, -1, axis=1), 0)
    state = head.joined(params, rows.states.astype(head.dtype))
    cache = head.empty_cache(batch, count * length)
    places = jnp.arange(length)
    made = []
    for k in range(count):
        turn, slot = jnp.divmod(jnp.arange(count * length), length)
        own = (turn >= 1) & (turn <= k) & (slot == places[:, None] - k + turn)
        visible = own | ((turn == 0) & (slot <= places[:, None] - k))
        at = jnp.broadcast_to(places, (batch, length))
        state, cache = head.apply(
            params,
            following,
            state,
            at,
            cache,
            slots=k * length + at,
            visible=visible[None],
        )
        made.append(state)
        state = jnp.roll(state, 1, axis=1)
    return head.logits(params, jnp.stack(made))


def wanted(given: Given, rows: Taught) -> tuple[Array, Array]:
    """Returns the target's log probabilities [B, L, V] of the token after the next; and
    bool [B, L], whether that token belongs to an answer."""
    after_next = lambda a, by: jnp.roll(a, -by, axis=1)
    logits = after_next(rows.hidden, 1).astype(jnp.float32) @ given.kernel
    place = jnp.arange(rows.tokens.shape[1])
    there = (after_next(rows.tokens, 2) != NONE) & (place < len(place) - 2)
    return logits - after_next(rows.total, 1)[..., None], there & (
        place + 2 >= rows.given[:, None]
    )


def measure(
    config: HeadTrainConfig,
    target: tuple[LM, ArrayTree],
    params: ArrayTree,
    prompts: Sequence[Sequence[int]],
) -> dict[str, float]:
    """Generates the target's answers to prompts at temperature 1, with drafts of the
    head. Returns the share of the head's first drafts that are accepted.

    params: the head's parameters, with its ids.
    """
    drafter = text.draft_from_states((Eagle(config.model), params), target)
    new = config.data.length - max(map(len, prompts))
    method = text.Speculation(drafter, gamma=1, confidence=0.0)
    options = text.Options(temperature=1.0, max_new_tokens=new)
    _, info = text.generate(
        run_key(config.seed, MEASURE), target, prompts, method, options
    )
    return {"acceptance": round(float(info.acceptance or 0.0), 4)}
