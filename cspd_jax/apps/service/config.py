"""What a service offers: models, the limits of a request, and the engine that serves them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cspd_jax.apps.service.engine import Engine, Lane
from cspd_jax.apps.service.rows import ImageRequest, ImageRows, lane_name
from cspd_jax.apps.service.streams import ROOMS, MaskedRequest, MaskedStream, TextRequest, TextRows, text_lane
from cspd_jax.errors import UserError, check_range, check_whole
from cspd_jax.image.methods import Plain, SelfSpeculation
from cspd_jax.weights.models import VAE, ImageModel, TextModel

MOST_SEED = 2**32 - 1
MOST_CFG = 20.0
MOST_TEMPERATURE = 5.0
MOST_CHARACTERS = 4000
MOST_NEW = 256
PLACES = (16, 32, 64)
METHODS = ("self", "plain")
SELF = SelfSpeculation(gamma=4)


@dataclasses.dataclass(frozen=True, eq=False)
class ServiceConfig:
    """The models of a service; those that are None are not offered.

    image: makes images.
    vae: of its latents, if it makes latents.
    text, drafter: continues text; the drafter is as `text.generate` takes it.
    masked: fills in masked text.
    method: of self-speculation.
    """

    image: ImageModel | None = None
    vae: VAE | None = None
    text: TextModel | None = None
    drafter: Any = None
    masked: TextModel | None = None
    method: SelfSpeculation = SELF

    def engine(self, rows: int = 8, **options: Any) -> Engine:
        """An engine for these models, not started. options: of `Engine`."""
        check_whole("rows", rows, 1, 1024)
        lanes: dict[str, Lane] = {}
        if self.image is not None:
            for guided in (False, True):
                for method in (self.method, Plain()):
                    lanes[lane_name(method.name, guided)] = ImageRows(self.image, rows, method, guided)
        if self.text is not None:
            for drafter in (self.drafter, None):
                for sampled in (False, True):
                    name = text_lane(drafter is not None, sampled)
                    lanes[name] = TextRows(self.text, drafter, rows, sampled, MOST_NEW)
        if self.masked is not None:
            lanes[MaskedRequest.lane] = MaskedStream(self.masked)
        return Engine(lanes, **options)

    @property
    def cfg(self) -> float:
        """The guidance scale of images that do not ask for another: the model's own."""
        return 1.0 if self.image is None else self.image.sampling.get("cfg", 1.0)

    def image_request(self, label: Any, seed: Any = 0, cfg: Any = None, method: Any = "self") -> ImageRequest:
        """A request within the limits; UserError for any other."""
        if self.image is None:
            raise UserError("this service makes no images")
        cfg = self.cfg if cfg is None else cfg
        check_whole("label", label, -1, self.image.config.num_classes - 1)
        check_whole("seed", seed, 0, MOST_SEED)
        check_range("cfg", cfg, least=0.0, most=MOST_CFG)
        if method not in METHODS:
            raise UserError(f"method is {method!r:.80}; it must be one of {', '.join(METHODS)}")
        return ImageRequest(int(label), int(seed), float(cfg), method)

    def text_request(
        self, tokenizer: Any, prompt: str, new_tokens: int, temperature: float, seed: int, drafting: bool
    ) -> TextRequest:
        """A request within the limits; UserError for any other."""
        if self.text is None:
            raise UserError("this service continues no text")
        check_whole("new tokens", new_tokens, 1, MOST_NEW)
        ids = self._prompt(self.text, tokenizer, prompt, new_tokens)
        self._check_sampling(temperature, seed)
        drafts = {} if drafting and self.drafter is not None else {"drafts": 0}
        return TextRequest(ids, new_tokens, float(temperature), seed, **drafts)

    def masked_request(
        self, tokenizer: Any, prompt: str, new_tokens: int, temperature: float, seed: int, drafting: bool
    ) -> MaskedRequest:
        """A request within the limits; UserError for any other."""
        if self.masked is None:
            raise UserError("this service fills in no masked text")
        if new_tokens not in PLACES:
            raise UserError(f"places is {new_tokens!r:.40}; it must be one of {', '.join(map(str, PLACES))}")
        ids = self._prompt(self.masked, tokenizer, prompt, new_tokens)
        self._check_sampling(temperature, seed)
        drafts = {} if drafting else {"drafts": 0}
        return MaskedRequest(ids, new_tokens, float(temperature), seed, **drafts)

    def limits(self) -> Mapping[str, Any]:
        """What a request for an image may ask for."""
        classes = 0 if self.image is None else self.image.config.num_classes
        return {"label": [-1, classes - 1], "seed": [0, MOST_SEED], "cfg": [0, MOST_CFG], "method": METHODS}

    def _prompt(self, model: TextModel, tokenizer: Any, prompt: str, new_tokens: int) -> tuple[int, ...]:
        if not isinstance(prompt, str) or not prompt:
            raise UserError("the prompt is empty; it needs at least one character to begin with")
        if len(prompt) > MOST_CHARACTERS:
            raise UserError(f"the prompt has {len(prompt)} characters; it may have {MOST_CHARACTERS}")
        ids = tuple(tokenizer.encode(prompt))
        most = min(ROOMS[-1], model.config.max_positions - new_tokens)
        if len(ids) > most:
            raise UserError(
                f"the prompt has {len(ids)} tokens; with {new_tokens} new ones it may have {most}"
            )
        return ids

    def _check_sampling(self, temperature: Any, seed: Any) -> None:
        check_range("temperature", temperature, least=0.0, most=MOST_TEMPERATURE)
        check_whole("seed", seed, 0, MOST_SEED)
