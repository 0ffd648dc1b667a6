"""What computes latent attention: down to latent vectors, up to queries, keys and values.

B sequences of a microbatch, T tokens each, D width, L width of all that is gathered, H heads, C
width of a head's queries and keys. Widths are those of a `layer`, the LatentAttention that is
computed (model/layers/latent_attention.py).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from mpitrain.kernels.attention import AttentionRequest
from mpitrain.kernels.attention_one_query import attend_one_query
from mpitrain.model.attention import Core
from mpitrain.model.rotary import Rotary
from mpitrain.model.segment import Segment, Tape
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.zero.parameters import Parameter


@dataclass(eq=False)
class Down(Segment):
    """Of norm(x): what queries are made of, what keys and values are, and rotary keys, side by side."""

    layer: Any
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
        of_kv, rotary = of_kv.split(self.layer.latent_widths[1:], -1)
        return torch.cat((queries, tape.norm(of_kv, self.kv_norm), rotary), -1)


@dataclass(eq=False)
class Up(Segment):
    """Queries, keys and values of the heads that are here, [B, H, T, C]: values padded to the width
    of keys.
    """

    layer: Any
    q_up: Parameter
    kv_up: Parameter
    rotary: Rotary

    def compute(
        self, latent_BTL: torch.Tensor, context: Context, tape: Tape
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layer = self.layer
        of_q, of_kv, k_turned = latent_BTL.split(layer.latent_widths, -1)
        if context.cache is not None:
            turned = self.rotary(k_turned.unsqueeze(1), context.start)
            latents = context.cache.of(self)
            latents.put(context.start, torch.cat((of_kv.unsqueeze(1), turned), -1))
            if context.start:
                return self._absorbed(of_q, *latents.tensors(), context, tape)
        q, q_turned = self._heads(of_q, self.q_up, (layer.head_width, layer.rope.width), tape)
        k, v = self._heads(of_kv, self.kv_up, (layer.head_width, layer.value_width), tape)
        if layer.rope.magnitude != 1:
            q = q * layer.rope.magnitude**2  # as the rotary features of both are
        at = context.start, context.microbatch.order
        k_turned = self.rotary(k_turned.unsqueeze(1), *at).expand(-1, k.shape[1], -1, -1)
        q = torch.cat((q, self.rotary(q_turned, *at)), -1)
        k = torch.cat((k, k_turned), -1)
        return q, k, functional.pad(v, (0, layer.key_width - layer.value_width))

    def kv_weight_by_head(self) -> torch.Tensor:
        """Return the weight that makes keys and values of latent vectors, head by head."""
        return self.kv_up.data.unflatten(0, (-1, self.layer.head_width + self.layer.value_width))

    def _absorbed(
        self, of_q: torch.Tensor, latent_B1SL: torch.Tensor, context: Context, tape: Tape
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the query of one token, for latent vectors as keys, and these as keys and as values.

        q (W c) = (W^T q) c: keys of earlier tokens needn't be made (DeepSeek-V2, section 2.1.2).
        """
        layer = self.layer
        q, q_turned = self._heads(of_q, self.q_up, (layer.head_width, layer.rope.width), tape)
        absorbed = (q * layer.rope.magnitude**2) @ self.kv_weight_by_head()[:, : layer.head_width]
        q = torch.cat((absorbed, self.rotary(q_turned, context.start)), -1)
        return q, latent_B1SL, latent_B1SL[..., : layer.kv_rank]

    def _heads(
        self, x: torch.Tensor, weight: Parameter, widths: tuple[int, int], tape: Tape
    ) -> tuple[torch.Tensor, ...]:
        """Return both parts of each head's product, [B, H, T, width] each."""
        (y,) = tape.linears(x, (weight,))
        return y.unflatten(-1, (-1, sum(widths))).transpose(1, 2).split(widths, -1)


class LatentCore(Core):
    """Attention proper; of a token that is generated, to the latent vectors of all before it."""

    def __init__(self, up: Up):
        super().__init__()
        self.up = up

    def attend_with_cache(self, qkv: tuple[torch.Tensor, ...], context: Context, tape: Tape) -> torch.Tensor:
        """Return attention [B, H, T, C], at a token [B, H, 1, width of values]."""
        layer = self.up.layer
        if context.start == 0:
            return tape.attention(qkv, self.asked(context.visible), None, False)[0]
        latent_BH1L = attend_one_query(
            *qkv, AttentionRequest(scale=layer.key_width**-0.5, mask=context.visible)
        )
        return latent_BH1L @ self.up.kv_weight_by_head()[:, layer.head_width :].transpose(-1, -2)
