"""A mixture of experts by plain torch, to compare with.

Every expert sees every token, times zero where it wasn't chosen.

No code of the package is used; attention and norm are those of oracle.py.
"""

import math

import torch
from oracle import attention, rms
from torch.nn import functional


def gated(h, gate, up, down):
    return (functional.silu(h @ gate.T) * (h @ up.T)) @ down.T


def choose(scores, bias, experts):
    """Return the experts of one token, best first: of equal scores the lower number."""
    scores = (scores + bias).tolist()
    open_ = range(len(scores))
    if experts["groups_active"] < experts["groups"]:
        size = len(scores) // experts["groups"]
        groups = [range(g * size, (g + 1) * size) for g in range(experts["groups"])]
        best = sorted(
            groups, key=lambda group: (-sum(sorted((scores[e] for e in group), reverse=True)[:2]), group[0])
        )
        open_ = [e for group in best[: experts["groups_active"]] for e in group]
    return sorted(open_, key=lambda e: (-scores[e], e))[: experts["active"]]


def mixture(p, h, experts, losses, loads):
    """Return what the experts make of h [B, T, D], a microbatch; add to `losses` and `loads`."""
    logits = h @ p["router.weight"].T
    softmax = experts["score"] == "softmax"
    scores = logits.softmax(-1) if softmax else logits.sigmoid()
    count = scores.shape[-1]
    bias = p.get("router.bias", torch.zeros(scores.shape[-1])).detach()
    hits = torch.zeros_like(scores)
    for b in range(h.shape[0]):
        for t in range(h.shape[1]):
            hits[b, t, choose(scores[b, t].detach(), bias, experts)] = 1
    weights = scores * hits  # every expert makes something of every token, most of it times zero
    if experts["normalised"]:
        weights = weights / weights.sum(-1, keepdim=True)
    if experts["capacity"]:  # an expert takes the first tokens of a microbatch that want it
        most = math.ceil(experts["capacity"] * hits.sum().item() / count)
        taken = hits.flatten(0, 1).cumsum(0) <= most
        weights = weights * taken.view_as(weights)
        losses["dropped"] = losses.get("dropped", 0.0) + (hits.flatten(0, 1) * ~taken).sum()
    made = torch.stack(
        [
            gated(h, *(p[f"experts.{name}.weight"][e] for name in ("gate", "up", "down")))
            for e in range(count)
        ],
        -1,
    )
    out = (made * (experts["scale"] * weights).unsqueeze(-2)).sum(-1)
    if experts["shared"]:
        out = out + gated(h, *(p[f"shared.{name}.weight"] for name in ("gate", "up", "down")))
    hits = hits.sum(1)
    loads += hits.sum(0)
    parts = scores if softmax else scores / scores.sum(-1, keepdim=True)
    tokens = h.shape[0] * h.shape[1]
    kind = experts["balance"]
    if kind == "microbatch":
        losses["balance"] += tokens * count * (hits.sum(0) / hits.sum() * parts.mean((0, 1))).sum()
    elif kind == "global":
        losses["balance"] += tokens * count * (p["router.load"].detach() * parts.mean((0, 1))).sum()
    elif kind in ("sequence", "bias"):
        losses["balance"] += h.shape[1] * count * (hits / hits.sum(-1, keepdim=True) * parts.mean(1)).sum()
    losses["z"] += logits.logsumexp(-1).pow(2).sum()
    return out


def microbatch_loss(w, rows, layers, heads, kv_heads, experts, loads):
    """Return (cross entropy, all losses), summed over the tokens of a microbatch [B, T + 1].

    Add to loads, by layer.
    """
    tokens = rows[:, :-1]
    losses = {"balance": 0.0, "z": 0.0}
    x = w["embedding.weight"][tokens]
    for i in range(layers):
        p = {
            name.removeprefix(f"blocks.{i}."): value
            for name, value in w.items()
            if name.startswith(f"blocks.{i}.")
        }
        x = x + attention(p, rms(x, p["attention.norm.weight"]), heads, kv_heads)
        h = rms(x, p["ffn.norm.weight"])
        own = {name.removeprefix("ffn."): value for name, value in p.items()}
        if "router.weight" in own:
            x = x + mixture(
                own,
                h,
                experts,
                losses,
                loads.setdefault(i, torch.zeros(len(own["router.load"]), dtype=x.dtype)),
            )
        else:
            x = x + gated(h, own["gate.weight"], own["up.weight"], own["down.weight"])
    logits = rms(x, w["head.norm.weight"]) @ w.get("head.weight", w["embedding.weight"]).T
    plain = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
    return plain, plain + experts["balance_weight"] * losses["balance"] + experts["z_weight"] * losses["z"]
