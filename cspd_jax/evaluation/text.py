"""How well a language model predicts held-out text, beside n-gram models of the same data."""

from __future__ import annotations

from typing import Any

from cspd_jax.data.text import Texts
from cspd_jax.errors import UserError
from cspd_jax.evaluation import ngram
from cspd_jax.models import TextModel
from cspd_jax.training import presets
from cspd_jax.training.config import TextTrainConfig
from cspd_jax.training.held_out import bits_per_byte


def evaluate(model: TextModel) -> dict[str, Any]:
    """Bits per byte of the model (of a masked-diffusion model: a bound) and of n-grams, by n; and which texts
    this Python has and which the model was trained on."""
    config = training_config(model)
    texts = Texts(config.data)
    train, held_out = texts.streams["train"], texts.streams["held-out"]
    found = bits_per_byte(model.model, model.params, held_out, config.data.length)
    return {
        "bits_per_byte": round(found, 4),
        "ngrams": {n: round(bits, 4) for n, bits in ngram.bits_per_byte(train, held_out).items()},
        "bytes": len(held_out),
        "corpus": texts.describe(),
        "trained_on": model.metadata["extra"].get("corpus"),
    }


def training_config(model: TextModel) -> TextTrainConfig:
    """The run that made a model; UserError if it was not trained on text here."""
    extra = model.metadata.get("extra")
    told = extra.get("training") if isinstance(extra, dict) else None
    try:
        config = presets.from_json(told) if told else None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{model.name} does not describe its training correctly ({error})") from None
    if not isinstance(config, TextTrainConfig):
        raise UserError(
            f"{model.name} does not say which text it was trained on; evaluate is for models made by"
            " cspd-jax train or distill"
        )
    return config
