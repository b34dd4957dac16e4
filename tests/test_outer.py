"""Speculation over AR steps: the joint law of all tokens, against closed forms; and what it reports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import FALSE_ALARM, ks_p_value
from linear_tokens import LinearTokens
from scipy.stats import chi2, norm

from cspd_jax.decoders import inner, outer, plain
from cspd_jax.decoders.order import guidance_scale, reveal_groups
from cspd_jax.keys import Purpose, image_keys, purpose_keys

MODEL, IMAGES = LinearTokens(), 4000


def in_reveal_order(tokens, keys):
    reveal = jax.vmap(plain.random_reveal, (0, None))(purpose_keys(keys, Purpose.ORDER), MODEL.seq_len)
    return np.take_along_axis(np.asarray(tokens), np.asarray(reveal)[:, :, None], axis=1)


def noise_of(sampler, *, num_iter=6, cfg=1.0, temperature=1.0, images=IMAGES, seed=0, inside=None, **options):
    """The standardised noise of all tokens, [N, L, d]; and what the sampler returned."""
    settings = plain.PlainSettings(
        num_iter=num_iter,
        respacing=MODEL.spec,
        guided=cfg != 1,
        final_noise=True,
        encoder_sizes=1,
        speculation=inside,
    )
    keys = image_keys(jax.random.key(seed), images)
    labels = jnp.zeros(images, jnp.int32)
    found = sampler(MODEL, None, keys, labels, settings=settings, cfg=cfg, temperature=temperature, **options)
    groups = reveal_groups(MODEL.seq_len, num_iter)
    scales = np.asarray(guidance_scale(groups, cfg, "linear"))
    tokens = in_reveal_order(found.tokens, keys)
    return MODEL.noise_of(tokens, groups, scales, temperature), found


def p_value(noise):
    """Of all coordinates, their sums over the image, differences of neighbours, and squared norms: those of
    independent standard normals. Every failure of the joint law is a failure of this independence."""
    count, length, dim = noise.shape
    flat = noise.reshape(count, -1)
    found = [ks_p_value(noise[:, i], norm.cdf) for i in range(length)]
    found += [ks_p_value(flat.sum(1) / np.sqrt(length * dim), norm.cdf)]
    found += [
        ks_p_value((noise[:, 1:] - noise[:, :-1])[:, i] / np.sqrt(2), norm.cdf) for i in range(length - 1)
    ]
    found += [ks_p_value((flat**2).sum(1), chi2(length * dim).cdf)]
    return min(1.0, len(found) * min(found))


CASES = [
    {"ahead": outer.Ahead(gamma=3)},
    {"ahead": outer.Ahead(gamma=1, proposals=2), "temperature": 0.8},
    {"ahead": outer.Ahead(gamma=2), "num_iter": 3},
    {"ahead": outer.Ahead(gamma=8), "cfg": 1.5},
    {"ahead": outer.Ahead(gamma=3, proposals=4), "inside": inner.Speculation((4,)), "images": 600},
]


@pytest.mark.parametrize(
    "options", CASES, ids=["one by one", "K = 2, cold", "groups", "guided", "both levels"]
)
def test_joint_law(options):
    """4000 images of 6 tokens of dimension 2 (600 where both levels speculate): false alarm 1e-4. Rows
    advance at their own speed."""
    noise, found = noise_of(outer.sample, **options)
    assert p_value(noise) > FALSE_ALARM
    counts = found.counts
    assert counts.truncated == 0 and len(np.unique(counts.rounds)) > 1
    assert 0.05 < counts.accepted.sum() / counts.tested.sum() < 0.95
    assert np.asarray(found.accepted).sum() == counts.accepted.sum()


def test_the_plain_sampler_has_the_same_law():
    noise, _ = noise_of(plain.sample, cfg=1.5)
    assert p_value(noise) > FALSE_ALARM


WRONG = {
    "everything accepted": ("log_acceptance_of_ratio", jnp.zeros_like),
    "p and q swapped": ("log_acceptance_of_ratio", lambda r: jnp.minimum(-r, 0.0)),
    "a fresh draw in place of the residual": ("log_residual_acceptance", jnp.zeros_like),
}


@pytest.mark.parametrize("name", WRONG)
def test_negative_controls(name, monkeypatch):
    what, wrong = WRONG[name]
    monkeypatch.setattr(outer, what, wrong)
    jax.clear_caches()
    noise, _ = noise_of(outer.sample, ahead=outer.Ahead(gamma=3))
    jax.clear_caches()
    assert p_value(noise) <= FALSE_ALARM
