"""What a service offers: models, the limits of a request, and the engine that serves them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from cspd_jax._utils.typed import check_classes
from cspd_jax.apps.service.causal_rows import CausalRows, most_ids, prompt_of
from cspd_jax.apps.service.engine import Engine, Lane
from cspd_jax.apps.service.rows import ImageRequest, ImageRows, Prompt, lane_name
from cspd_jax.apps.service.streams import (
    PLACES,
    ROOMS,
    MaskedRequest,
    MaskedRows,
    MaskedSize,
    TextKind,
    TextRequest,
    TextRows,
)
from cspd_jax.errors import UserError, check_range, check_whole, shown
from cspd_jax.image.known import Known
from cspd_jax.image.methods import Plain, SelfSpeculation
from cspd_jax.image.pixels import check_vae
from cspd_jax.image.protocol import CausalTokenModel
from cspd_jax.networks.nextstep_config import NextStepConfig
from cspd_jax.text.drafters import resolve_drafter
from cspd_jax.text.states import check_reads
from cspd_jax.text.trees.drafter import tree_of
from cspd_jax.weights.chat import Template, chat_template
from cspd_jax.weights.models import VAE, ImageModel, TextModel
from cspd_jax.weights.tokenizers import Tokenizer, check_unicode, load_tokenizer, read_tokenizer

MOST_SEED = 2**32 - 1
MOST_CFG = 20.0
MOST_TEMPERATURE = 5.0
MOST_CHARACTERS = 4000
MOST_NEW = 256
METHODS = ("self", "plain")
SELF = SelfSpeculation(gamma=4)
_SAMPLING = ((False, False), (True, False), (True, True))  # greedy, sampled, with top_p


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

    def __post_init__(self):
        """UserError for a model that another part of the service would need."""
        check_classes(
            self, image=ImageModel, vae=VAE, text=TextModel, masked=TextModel, method=SelfSpeculation
        )
        if self.text is not None and not self.text.config.causal:
            raise UserError(f"{self.text.name} is a masked-diffusion model; it is the service's masked model")
        if self.masked is not None and not self.masked.config.mask_ids:
            raise UserError(f"{self.masked.name} has no mask, so it fills in no text")
        if self.drafter is not None:
            drafter, params = resolve_drafter(self.drafter)
            if tree_of(drafter) is not None:
                raise UserError("the service's drafter is one of trees; rows that come and go take chains")
            if self.text is not None:
                check_reads(drafter, params, self.text.network)
        if self.vae is not None and self.image is not None:
            check_vae(self.image, self.vae)
        if self.image is not None and isinstance(config := self.image.config, NextStepConfig):
            if self.image_tokenizer is None:
                raise UserError(f"{self.image.name} has no tokenizer.json, which prompts are read with")
            if len(prompt_of("", self.image_tokenizer, self.image).ids) >= most_ids(config):
                raise UserError(
                    f"{config.seq_len} tokens of an image leave no room for a prompt among its"
                    f" {config.lm.max_positions} positions"
                )

    def engine(self, rows: int = 8, **options: Any) -> Engine:
        """An engine for these models, not started. options: of `Engine`."""
        check_whole("rows", rows, 1, 1024)
        lanes: dict[str, Lane] = {}
        if self.image is not None:
            for guided in (False, True):
                for method in (self.method, Plain()):
                    lanes[lane_name(method.name, guided)] = (
                        CausalRows(self.image, rows, method.name, guided)
                        if self.is_causal
                        else ImageRows(self.image, rows, method, guided)
                    )
        if self.text is not None:
            drafting = (False,) if self.drafter is None else (True, False)
            for kind in (TextKind(d, *how) for d in drafting for how in _SAMPLING):
                lanes[kind.lane] = TextRows(self.text, self.drafter, rows, kind, MOST_NEW)
        if self.masked is not None:
            for size in (MaskedSize(room, places) for room in ROOMS for places in PLACES):
                lanes[size.lane] = MaskedRows(self.masked, rows, size)
        return Engine(lanes, **options)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Of the causal model; read once."""
        return None if self.text is None else load_tokenizer(self.text)

    @functools.cached_property
    def template(self) -> Template | None:
        """The chat template of the causal model; read once."""
        return None if self.text is None else chat_template(self.text.folder)

    @property
    def cfg(self) -> float:
        """The guidance scale of images that do not ask for another: the model's own."""
        return 1.0 if self.image is None else self.image.sampling.get("cfg", 1.0)

    @property
    def is_causal(self) -> bool:
        """Whether the image model makes its tokens one after the other, in their order."""
        return self.image is not None and isinstance(self.image.network, CausalTokenModel)

    @property
    def takes_prompts(self) -> bool:
        """Whether images are made of texts, not of classes."""
        return self.image is not None and isinstance(self.image.config, NextStepConfig)

    @functools.cached_property
    def image_tokenizer(self) -> Tokenizer | None:
        """Of the prompts of images; read once."""
        if self.image is None or not isinstance(self.image.config, NextStepConfig):
            return None
        folder = self.image.folder
        return None if folder is None else read_tokenizer(folder, self.image.config.lm.known_ids)

    def image_request(
        self,
        label: Any = None,
        seed: Any = 0,
        cfg: Any = None,
        method: Any = "self",
        known: Known | None = None,
        prompt: Any = None,
    ) -> ImageRequest:
        """A request within the limits; UserError for any other. It has a label, or a prompt if the model
        makes images from text."""
        if self.image is None:
            raise UserError("this service makes no images")
        cfg = self.cfg if cfg is None else cfg
        asked = self._image_prompt(label, prompt)
        if asked is not None:
            label = 0
        elif label is None:
            raise UserError('a request has a label, for example {"label": 3}; -1 is no class')
        else:
            check_whole("label", label, -1, self.image.config.num_classes - 1)
        if known is not None and self.is_causal:
            raise UserError(
                "the service begins an image of a causal model with nothing; cspd-jax generate --image keeps"
                " the beginning of one"
            )
        check_whole("seed", seed, 0, MOST_SEED)
        check_range("cfg", cfg, least=0.0, most=MOST_CFG)
        if method not in METHODS:
            raise UserError(f"method is {method!r:.80}; it must be one of {', '.join(METHODS)}")
        return ImageRequest(int(label), int(seed), float(cfg), method, known, asked)

    def text_request(
        self,
        tokenizer: Any,
        prompt: str | Sequence[int],
        new_tokens: int,
        temperature: float,
        seed: int,
        drafting: bool,
        top_p: float = 1.0,
        logprobs: int | None = None,
    ) -> TextRequest:
        """A request within the limits; UserError for any other. prompt: text or ids."""
        if self.text is None:
            raise UserError("this service continues no text")
        check_whole("new tokens", new_tokens, 1, MOST_NEW)
        ids = self._prompt(self.text, tokenizer, prompt, new_tokens)
        self._check_sampling(temperature, seed)
        check_range("top_p", top_p, above=0.0, most=1.0)
        drafts = {} if drafting and self.drafter is not None else {"drafts": 0}
        return TextRequest(
            ids, new_tokens, float(temperature), seed, top_p=float(top_p), logprobs=logprobs, **drafts
        )

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

    def _image_prompt(self, label: Any, prompt: Any) -> Prompt | None:
        assert self.image is not None
        if not isinstance(self.image.config, NextStepConfig):
            if prompt is not None:
                raise UserError(f"{self.image.name} makes images of classes, not from prompts; send a label")
            return None
        if prompt is None or label is not None:
            raise UserError(
                f"{self.image.name} makes images from text; send a prompt, for example"
                ' {"prompt": "a red bicycle"}, and no label'
            )
        if not isinstance(prompt, str):
            raise UserError(f"prompt is {shown(prompt)}; it must be a text")
        _check_text(prompt)
        assert self.image_tokenizer is not None
        asked = prompt_of(prompt, self.image_tokenizer, self.image)
        if len(asked.ids) > (most := most_ids(self.image.config)):
            raise UserError(f"the prompt has {len(asked.ids)} tokens; it may have {most}")
        return asked

    def _prompt(
        self, model: TextModel, tokenizer: Any, prompt: str | Sequence[int], new_tokens: int
    ) -> tuple[int, ...]:
        if not isinstance(prompt, str | list) or not prompt:
            raise UserError("the prompt is empty; it needs at least one character to begin with")
        _check_text(prompt)
        ids = tuple(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if not ids:
            raise UserError("the prompt has no tokens; it needs at least one to begin with")
        for number in ids:
            check_whole("an id of the prompt", number, 0)
        if mask := set(ids).intersection(model.config.mask_ids):
            raise UserError(f"the prompt has id {mask.pop()}, the mask's; places to be filled come after it")
        if wrong := [i for i in ids if i >= model.config.known_ids]:
            raise UserError(f"the prompt has id {wrong[0]}; {model.name} has {model.config.known_ids} ids")
        if len(ids) > ROOMS[-1] or len(ids) + new_tokens > model.config.max_positions:
            raise UserError(
                f"the prompt has {len(ids)} tokens, and {new_tokens} new ones are asked for; it may have"
                f" {ROOMS[-1]}, and both together {model.config.max_positions}"
            )
        return ids

    def _check_sampling(self, temperature: Any, seed: Any) -> None:
        check_range("temperature", temperature, least=0.0, most=MOST_TEMPERATURE)
        check_whole("seed", seed, 0, MOST_SEED)


def _check_text(prompt: str | Sequence[int]) -> None:
    if len(prompt) > MOST_CHARACTERS:
        unit = "characters" if isinstance(prompt, str) else "ids"
        raise UserError(f"the prompt has {len(prompt)} {unit}; it may have {MOST_CHARACTERS}")
    if isinstance(prompt, str):
        check_unicode(prompt)
