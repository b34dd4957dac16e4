"""Caches are written where they lie: a pass that copies them costs time by how long
texts may become."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
import text_models

from cspd_jax import text

MAX_LEN = 37


def copies_in_loops(compiled, heads, dim):
    """The lines of a compiled program that copy a cache, but for those before its
    loops."""
    before_the_entry = compiled[: compiled.index("\nENTRY ")]
    shape = rf"\[(\d+,)?{heads},{MAX_LEN},{dim}\]"
    moved = rf"(copy\(|transpose\(|dynamic-update-slice\S*bitcast\S* = \w+{shape})"
    return [
        line
        for line in before_the_entry.splitlines()
        if re.search(rf"= \w+{shape}", line) and re.search(moved, line)
    ]


@pytest.mark.parametrize(
    "rows, method",
    [(1, text.Plain()), (2, text.Speculation(text.PromptLookup(), gamma=3))],
)
def test_no_pass_copies_a_cache(rows, method):
    lm = text_models.model(dtype=jnp.float32, depth=2)
    lm = dataclasses.replace(lm, by_outputs=rows == 1)
    params = text_models.params(lm)

    def run(tokens, lengths):
        prompts = text.Prompts(tokens, lengths)
        options = text.Options(max_new_tokens=20, max_len=MAX_LEN)
        return text.generate(None, (lm, params), prompts, method, options)

    tokens = jnp.ones((rows, 5), jnp.int32)
    lengths = jnp.full(rows, 5)
    compiled = jax.jit(run).lower(tokens, lengths).compile().as_text()
    assert copies_in_loops(compiled, lm.config.kv_heads, lm.config.head_dim) == []
