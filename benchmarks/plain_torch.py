"""A llama in plain torch, as its trainers write it.

What benchmarks/gpu_steps.py compares mpitrain with on one GPU.

torch.compile of each block and of the loss, torch's attention (flash on a GPU), RMSNorm, rotary
positions with halves rotated, tied embedding or not. Master weights in fp32; autocast is the
caller's.
"""

import torch
from torch import nn
from torch.nn import functional

from mpitrain.config import Model as Sizes


class PlainBlock(nn.Module):
    """Attention and a gated feed-forward, each after a norm and added to its input."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        width = sizes.width
        self.heads = sizes.width // sizes.heads
        self.norms = nn.ModuleList([nn.RMSNorm(width, eps=1e-5) for _ in range(2)])
        self.q, self.output = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, sizes.kv_heads * self.heads, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, sizes.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.ffn, width, bias=False)

    def forward(self, x, cos, sin):
        h = self.norms[0](x)
        q, k, v = (
            made(h).unflatten(-1, (-1, self.heads)).transpose(1, 2) for made in (self.q, self.k, self.v)
        )
        q = turned(q, cos, sin)
        k = turned(k, cos, sin)
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.output(a.transpose(1, 2).flatten(-2))
        h = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


def turned(x, cos, sin):
    """Return heads turned by their positions."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def mean_loss(x, norm, weight, targets):
    """Return the mean cross-entropy of the last norm's logits."""
    return functional.cross_entropy(
        functional.linear(norm(x), weight).float().flatten(0, 1), targets.flatten()
    )


class PlainModel(nn.Module):
    """The whole: from tokens [B, T] and targets to the mean loss."""

    def __init__(self, sizes: Sizes, theta: float):
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.width)
        self.blocks = nn.ModuleList([PlainBlock(sizes) for _ in range(sizes.layers)])
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.head = (
            self.embedding.weight if sizes.tied else nn.Parameter(torch.empty(sizes.vocab, sizes.width))
        )
        self.width = sizes.width // sizes.heads
        self.theta = theta
        self.loss = mean_loss
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.02)

    def compile_blocks(self, backend: str) -> None:
        """Compile each block, and the loss."""
        for block in self.blocks:
            block.compile(backend=backend)
        self.loss = torch.compile(mean_loss, backend=backend)

    def forward(self, tokens, targets):
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * self.theta ** (
            -torch.arange(0, self.width, 2, device=tokens.device) / self.width
        )
        x = self.embedding(tokens)
        cos = angles.cos()
        sin = angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.loss(x, self.norm, self.head, targets)
