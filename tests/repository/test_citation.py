"""What is cited is what is used."""

import re

import cspd_jax
from cspd_jax import hub, masked, text
from cspd_jax.image import Released
from cspd_jax.image.lossy import Annealing
from cspd_jax.models import ImageModel


def keys_of(*used):
    return re.findall(r"^@\w+\{(?:\w+?20\d\d)?(\w+),", cspd_jax.citation(*used), re.M)


def test_what_is_used_is_cited():
    model = hub.describe("words")
    draft = ImageModel("draft", model.network, None)
    assert keys_of() == ["cspd_jax"]
    assert keys_of(model, cspd_jax.Plain()) == ["cspd_jax", "mar"]
    assert keys_of(
        cspd_jax.SelfSpeculation(), cspd_jax.Options(denoise="speculative")
    ) == [
        "cspd_jax",
        "block",
        "diffusions",
    ]
    assert keys_of(Released(draft)) == ["cspd_jax", "cspd", "mar"]
    assert keys_of(cspd_jax.Options(anneal=Annealing())) == ["cspd_jax", "disa"]
    assert keys_of(cspd_jax.SelfSpeculation(coupled=True)) == [
        "cspd_jax",
        "block",
        "coupled",
        "diffusions",
    ]
    by_token = text.Speculation(text.PromptLookup(), rule="google")
    assert keys_of(by_token) == ["cspd_jax", "leviathan"]
    by_token = text.Speculation(text.PromptLookup(), rule="deepmind")
    assert keys_of(by_token) == ["cspd_jax", "chen"]
    assert keys_of(masked.SelfSpeculation()) == ["cspd_jax", "ssd"]
    assert cspd_jax.citation(model).count("eprint = {2406.11838}") == 1
