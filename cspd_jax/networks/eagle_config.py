"""Sizes of a head that drafts from its target's states: the static argument of its jitted calls."""

from __future__ import annotations

import dataclasses

from cspd_jax._utils import limits
from cspd_jax._utils.typed import check_kinds
from cspd_jax.errors import UserError, check_whole
from cspd_jax.networks.lm_config import LMConfig

MOST_STATES = 16  # layers whose states are read


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """A drafting head in the form of EAGLE-3.

    layer: its one decoder layer, and how many ids it has of its own.
    entering: layers of the target, counted from 0; what enters them is read, side by side. Without any they
        are those of `published_layers`, for whatever target it is bound to.
    state_width: numbers of one such state, the target's width.
    target_ids: ids of the target.
    own_embedding: it has a table of the target's ids; otherwise it reads the target's.
    norm_before_residual: the state is normalised before it is added to what the layer makes of it.
    """

    layer: LMConfig
    entering: tuple[int, ...]
    state_width: int
    target_ids: int
    own_embedding: bool = False
    norm_before_residual: bool = False

    def __post_init__(self):
        check_whole("the head's state_width", self.state_width, 1, limits.WIDTH)
        check_whole("the head's target_ids", self.target_ids, 1, limits.IDS)
        check_kinds(self)
        layer, ids = self.layer, self.target_ids
        if len(self.entering) > MOST_STATES or min(self.entering, default=0) < 0:
            raise UserError(
                f"the head's entering is {self.entering!r:.80}; it must name at most {MOST_STATES} layers,"
                " counted from 0"
            )
        if layer.depth != 1 or not layer.causal or layer.tie_embeddings or layer.parallel_residual:
            raise UserError("the head's layer must be one causal layer with a table of logits of its own")
        if layer.vocab_size > ids:
            raise UserError(f"the head has {layer.vocab_size} ids, more than the target's {ids}")
        if not self.own_embedding and layer.width != self.state_width:
            raise UserError(
                f"the head is {layer.width} wide and reads a table of embeddings of width {self.state_width};"
                " one of another width needs a table of its own"
            )

    @property
    def blocks(self) -> int:
        """Each has parameters."""
        return 1

    @property
    def states(self) -> int:
        """How many layers' states it reads."""
        return len(self.entering) or len(published_layers(6))

    def bound_to(self, depth: int | None) -> EagleConfig:
        """The configuration for a target of so many layers; None is a target that does not say."""
        if self.entering:
            return self
        if depth is None:
            raise UserError("the head names no layers, and the target does not say how many it has")
        return dataclasses.replace(self, entering=published_layers(depth))

    @property
    def ids(self) -> int:
        """Of its own."""
        return self.layer.vocab_size


def published_layers(depth: int) -> tuple[int, int, int]:
    """The low, middle and high layer of a target of `depth` layers that EAGLE-3's heads read."""
    low, high = (2, depth - 3) if depth >= 6 else (0, depth - 1)
    return low, depth // 2, high
