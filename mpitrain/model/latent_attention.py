"""What computes latent attention.

Down to latent vectors, up to queries, keys and values, the attention proper, output.

B sequences of a microbatch, T tokens each, D width, L width of all that is gathered, H heads, C
width of a head's queries and keys.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from mpitrain.kernels.attention import AttentionRequest
from mpitrain.kernels.attention_one_query import attend_one_query
from mpitrain.model.attention import Core
from mpitrain.model.rotary import Rotary
from mpitrain.model.segment import Segment, Tape
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.zero.parameters import Parameter


class LatentWidths(NamedTuple):
    """Numbers of a position.

    queries, kv, rotary: of what is gathered: what queries are made of, what keys and values are,
    and the rotary part of keys.
    head, value: of a head's queries and keys, without positions; of its values.
    """

    queries: int
    kv: int
    rotary: int
    head: int
    value: int

    @property
    def latent(self) -> tuple[int, int, int]:
        """What is gathered."""
        return self.queries, self.kv, self.rotary

    @property
    def key(self) -> int:
        """Of a head's queries and keys."""
        return self.head + self.rotary


@dataclass(eq=False)
class Down(Segment):
    """Of norm(x): what queries are made of, what keys and values are, and rotary keys, side by side."""

    widths: LatentWidths
    norm: Parameter
    q_down: Parameter | None
    q_norm: Parameter | None
    kv_down: Parameter
    kv_norm: Parameter

    def compute(self, x_BTD: torch.Tensor, context: Context, tape: Tape) -> torch.Tensor:
        h_BTD, recompute = tape.normed(x_BTD, self.norm)
        if self.q_down is None:
            queries, (of_kv,) = h_BTD, tape.linears(h_BTD, (self.kv_down,), recompute)
        else:
            queries, of_kv = tape.linears(h_BTD, (self.q_down, self.kv_down), recompute)
            queries = tape.norm(queries, self.q_norm)
        of_kv, rotary = of_kv.split(self.widths.latent[1:], -1)
        return torch.cat((queries, tape.norm(of_kv, self.kv_norm), rotary), -1)


@dataclass(eq=False)
class Up(Segment):
    """Queries, keys and values of the heads that are here, [B, H, T, C]: values padded to the width
    of keys.

    magnitude: of the rotary features, by which the others are multiplied, too.
    """

    widths: LatentWidths
    q_up: Parameter
    kv_up: Parameter
    rotary: Rotary
    magnitude: float

    def compute(
        self, latent_BTL: torch.Tensor, context: Context, tape: Tape
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        widths = self.widths
        of_q, of_kv, k_turned = latent_BTL.split(widths.latent, -1)
        if context.cache is not None:
            turned = self.rotary(k_turned.unsqueeze(1), context.start)
            latents = context.cache.of(self)
            latents.put(context.start, torch.cat((of_kv.unsqueeze(1), turned), -1))
            if context.start:
                return self._absorbed(of_q, *latents.tensors(), context, tape)
        q = self._heads(of_q, self.q_up, widths.key, tape)
        kv = self._heads(of_kv, self.kv_up, widths.head + widths.value, tape)
        q, q_turned = q.split((widths.head, widths.rotary), -1)
        k, v = kv.split((widths.head, widths.value), -1)
        if self.magnitude != 1:
            q = q * self.magnitude**2  # as the rotary features of both are
        at = context.start, context.microbatch.order
        k_turned = self.rotary(k_turned.unsqueeze(1), *at).expand(-1, k.shape[1], -1, -1)
        q = torch.cat((q, self.rotary(q_turned, *at)), -1)
        k = torch.cat((k, k_turned), -1)
        return q, k, functional.pad(v, (0, widths.key - widths.value))

    def kv_weight_by_head(self) -> torch.Tensor:
        """Return the weight that makes keys and values of latent vectors, head by head."""
        return self.kv_up.data.unflatten(0, (-1, self.widths.head + self.widths.value))

    def _absorbed(
        self, of_q: torch.Tensor, latent_B1SL: torch.Tensor, context: Context, tape: Tape
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the query of one token, for latent vectors as keys, and these as keys and as values.

        q (W c) = (W^T q) c: keys of earlier tokens needn't be made (DeepSeek-V2, section 2.1.2).
        """
        widths = self.widths
        q, q_turned = self._heads(of_q, self.q_up, widths.key, tape).split((widths.head, widths.rotary), -1)
        absorbed = (q * self.magnitude**2) @ self.kv_weight_by_head()[:, : widths.head]
        q = torch.cat((absorbed, self.rotary(q_turned, context.start)), -1)
        return q, latent_B1SL, latent_B1SL[..., : widths.kv]

    def _heads(self, x: torch.Tensor, weight: Parameter, width: int, tape: Tape) -> torch.Tensor:
        return tape.linears(x, (weight,))[0].unflatten(-1, (-1, width)).transpose(1, 2)


class LatentCore(Core):
    """Attention proper; of a token that is generated, to the latent vectors of all before it."""

    def __init__(self, up: Up):
        super().__init__()
        self.up = up

    def attend_with_cache(self, qkv: tuple[torch.Tensor, ...], context: Context, tape: Tape) -> torch.Tensor:
        """Return attention [B, H, T, C], at a token [B, H, 1, width of values]."""
        widths = self.up.widths
        if context.start == 0:
            return tape.attention(qkv, self.asked(context.visible), None, False)[0]
        request = AttentionRequest(scale=widths.key**-0.5, mask=context.visible)
        latent_BH1L = attend_one_query(*qkv, request)
        return latent_BH1L @ self.up.kv_weight_by_head()[:, widths.head :].transpose(-1, -2)
