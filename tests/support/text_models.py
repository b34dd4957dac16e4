"""Tiny random language models, and their plain decoding in numpy, without a cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from cspd_jax.networks import eagle
from cspd_jax.networks.eagle import EagleConfig
from cspd_jax.networks.lm import LM, LMConfig, abstract_params
from cspd_jax.text import Prompts

CONFIG = LMConfig(
    family="llama",
    vocab_size=11,
    known_ids=11,
    width=16,
    depth=1,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp_width=24,
    max_positions=256,
)


def model(ids=11, padding=0, dtype=jnp.float64, **sizes):
    return LM(
        dataclasses.replace(CONFIG, vocab_size=ids + padding, known_ids=ids, **sizes),
        dtype,
    )


def params(lm, seed=0, scale=1.0):
    """Weights so large that the distributions of two contexts differ much, and greedy
    text varies."""
    tree = tiny.params(abstract_params(lm.config), seed, scale)
    return jax.tree.map(lambda x: np.asarray(x, lm.dtype), tree)


def near(tree, scale=0.3):
    """Parameters not far from these: of a draft that is often right."""
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: x + (scale * random.standard_normal(x.shape)).astype(x.dtype), tree
    )


def with_distribution(lm, probs):
    """Parameters that give every token this distribution [ids], whatever comes before
    it."""
    tree = jax.tree.map(
        lambda s: np.zeros(s.shape, lm.dtype), abstract_params(lm.config)
    )
    tree["embed"]["embedding"] += 1
    tree["norm"]["scale"] += 1
    tree["head"]["kernel"] += np.log(probs) / lm.config.width
    return tree


def prompts(batch, longest, seed=0):
    """Ids [batch, longest] of lengths [batch] from 1 to longest, followed by numbers
    that are not ids."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, longest + 1, batch)
    tokens = random.integers(0, 11, (batch, longest))
    return Prompts(np.where(np.arange(longest) < lengths[:, None], tokens, -7), lengths)


@functools.partial(jax.jit, static_argnums=0)
def _forward(lm, tree, tokens):
    return lm.forward(tree, tokens)


def logits(lm, tree, tokens):
    """Of the model's ids after each of the tokens [N, L]: [N, L, ids]."""
    return np.asarray(_forward(lm, tree, np.maximum(tokens, 0)))[
        ..., : lm.config.known_ids
    ]


def probabilities(logits, temperature=1.0, top_k=None, top_p=None):
    """Probabilities [V] from logits [V], by sorting."""
    x = np.asarray(logits, np.float64)
    if temperature == 0:
        return np.eye(len(x))[np.argmax(x)]
    order = np.argsort(-x, kind="stable")[:top_k]
    kept = np.exp((x[order] - x[order[0]]) / temperature)
    kept /= kept.sum()
    if top_p is not None:
        kept[1 + np.searchsorted(np.cumsum(kept), top_p) :] = 0
    out = np.zeros(len(x))
    out[order] = kept / kept.sum()
    return out


def decode(
    lm, tree, tokens, lengths, new, choose=lambda row, at, logits: np.argmax(logits)
):
    """[N, L + new]: each row with `new` tokens more, then zeros. choose(row, position,
    logits [ids])."""
    width = tokens.shape[1] + new
    out = np.zeros((len(tokens), width), int)
    out[:, : tokens.shape[1]] = np.where(
        np.arange(tokens.shape[1]) < lengths[:, None], tokens, 0
    )
    for i in range(new):
        found = logits(lm, tree, out)
        for row, n in enumerate(lengths):
            out[row, n + i] = choose(row, n + i, found[row, n + i - 1])
    return out


def head(lm, params, ids, entering=(0, 1), seed=4, scale=0.5):
    """(network, params) of a head over some of a model's ids that reads its states;
    neither right nor wrong as a rule."""
    layer = dataclasses.replace(
        lm.config,
        depth=1,
        vocab_size=len(ids),
        known_ids=len(ids),
        tie_embeddings=False,
        parallel_residual=False,
        bos_ids=(),
        eos_ids=(),
    )
    config = EagleConfig(layer, entering, lm.config.width, lm.config.vocab_size)
    random = np.random.default_rng(seed)
    fill = lambda leaf: (scale * random.standard_normal(leaf.shape)).astype(lm.dtype)
    made = jax.tree.map(
        fill, {k: v for k, v in eagle.abstract_params(config).items() if k != "ids"}
    )
    return eagle.Eagle(config, lm.dtype), {**made, "ids": np.asarray(ids, np.int32)}
