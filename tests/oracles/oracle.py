"""A plain single-process trainer to compare with.

Torch modules and autograd, one loss.backward() for the whole batch.

Written apart from mpitrain on purpose: no code of the package is used except for the initial
weights, which are handed in.
"""

import torch
from torch.nn import functional


def rotate(x, base=10_000.0):
    """Rotary embedding by complex numbers: pairs (i, i + C/2)."""
    T, C = x.shape[-2:]
    rate = base ** (-torch.arange(0, C, 2, dtype=torch.float64) / C)
    turn = torch.polar(
        torch.ones(T, C // 2, dtype=torch.float64), torch.outer(torch.arange(T, dtype=torch.float64), rate)
    )
    z = torch.complex(x[..., : C // 2], x[..., C // 2 :]) * turn
    return torch.cat((z.real, z.imag), -1)


def rms(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def attention(p, h, heads, kv_heads):
    """Return causal attention of h [B, T, D], its mask written out, with the weights `p` of a block."""
    B, T, D = h.shape
    mask = torch.full((T, T), float("-inf"), dtype=h.dtype).triu(1)
    q = (h @ p["attention.q.weight"].T).view(B, T, heads, -1).transpose(1, 2)
    k = (
        (h @ p["attention.k.weight"].T)
        .view(B, T, kv_heads, -1)
        .transpose(1, 2)
        .repeat_interleave(heads // kv_heads, 1)
    )
    v = (
        (h @ p["attention.v.weight"].T)
        .view(B, T, kv_heads, -1)
        .transpose(1, 2)
        .repeat_interleave(heads // kv_heads, 1)
    )
    scores = rotate(q) @ rotate(k).transpose(-1, -2) / (D // heads) ** 0.5 + mask
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D) @ p["attention.output.weight"].T


def logits(w, tokens, layers, heads, kv_heads):
    """Return the logits of a Llama-style decoder with the weights `w`."""
    x = w["embedding.weight"][tokens]
    for i in range(layers):
        p = {
            name.removeprefix(f"blocks.{i}."): value
            for name, value in w.items()
            if name.startswith(f"blocks.{i}.")
        }
        x = x + attention(p, rms(x, p["attention.norm.weight"]), heads, kv_heads)
        h = rms(x, p["ffn.norm.weight"])
        gate = h @ p["ffn.gate.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (h @ p["ffn.up.weight"].T)) @ p["ffn.down.weight"].T
    head = w.get("head.weight", w["embedding.weight"])
    return rms(x, w["head.norm.weight"]) @ head.T


def loss_and_grads(weights, rows, layers, heads, kv_heads, end_of_text=None):
    """Return the mean loss over all targets of `rows` [B, T+1] and the gradient of every weight.

    end_of_text: each document of each row goes through the model by itself, as if there were no
    other.
    """
    w = {name: value.clone().requires_grad_() for name, value in weights.items()}
    parts = (
        [rows]
        if end_of_text is None
        else [torch.tensor([d]) for row in rows.tolist() for d in documents(row, end_of_text)]
    )
    total, count = 0.0, 0
    for part in parts:
        out = logits(w, part[:, :-1], layers, heads, kv_heads)
        total = total + functional.cross_entropy(out.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
        count += part[:, 1:].numel()
    loss = total / count
    loss.backward()
    return loss.item(), {name: value.grad for name, value in w.items()}


def documents(row, end_of_text):
    """Return the documents of a row of tokens, each with the token that ends it.

    One without a token to predict is left out.
    """
    found = [[]]
    for token in row:
        found[-1].append(token)
        if token == end_of_text:
            found.append([])
    return [document for document in found if len(document) > 1]


def adamw(weights, grads, moments, step, *, lr, betas, eps, decay, clip):
    """Update `weights` and `moments` in place: clip by the global norm, decay matrices only; return
    the norm.
    """
    norm = torch.cat([g.flatten() for g in grads.values()]).norm().item()
    scale = min(1.0, clip / norm) if clip else 1.0
    for name, w in weights.items():
        g = grads[name] * scale
        m, v = moments.setdefault(name, (torch.zeros_like(w), torch.zeros_like(w)))
        m.mul_(betas[0]).add_(g, alpha=1 - betas[0])
        v.mul_(betas[1]).add_(g * g, alpha=1 - betas[1])
        if w.dim() > 1:
            w.mul_(1 - lr * decay)
        w.sub_(lr * (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps))
    return norm


def sgd_step(weights, grads, states, step, lr, *, momentum, nesterov, decay):
    """Update `weights` and `states` in place by gradient descent with momentum; all but vectors decay."""
    for name, w in weights.items():
        g = grads[name]
        m = states[name] = momentum * states.get(name, torch.zeros_like(w)) + g
        if w.dim() > 1:
            w.mul_(1 - lr * decay)
        w.sub_(lr * (g + momentum * m if nesterov else m))


def muon_step(weights, grads, states, step, lr, *, momentum, nesterov, ns_steps, betas, eps, decay):
    """Update `weights` and `states` in place: matrices of blocks by Muon, the rest by AdamW."""
    hidden = [name for name, w in weights.items() if name.startswith("blocks.") and w.dim() == 2]
    others = {name: w for name, w in weights.items() if name not in hidden}
    adamw(
        others,
        {name: grads[name] for name in others},
        states,
        step,
        lr=lr,
        betas=betas,
        eps=eps,
        decay=decay,
        clip=0.0,
    )
    for name in hidden:
        w = weights[name]
        g = grads[name]
        m = states[name] = momentum * states.get(name, torch.zeros_like(w)) + (1 - momentum) * g
        x = (1 - momentum) * g + momentum * m if nesterov else m
        x = x / x.pow(2).sum().sqrt()
        for _ in range(ns_steps):
            square = x @ x.T
            x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
        w.copy_((1 - lr * decay) * w - lr * 0.2 * max(w.shape) ** 0.5 * x)
