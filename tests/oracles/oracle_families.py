"""Families of models written out in plain torch, to compare with.

scores, masks and probabilities as their papers have them.

Written apart from mpitrain on purpose: no code of the package is used. A model is a dict of weights
and a dict of what they mean.
"""

import math

import torch
from torch.nn import functional


def logits(w, tokens, blocks, has):
    """Return the logits of a decoder whose blocks are attention and a gated feed-forward, or experts.

    has: what these have.
    """
    return head(w, rms(hidden(w, tokens, blocks, has), w["head.norm.weight"], has["eps"]))


def head(w, x):
    return x @ w.get("head.weight", w["embedding.weight"]).T


def hidden(w, tokens, blocks, has):
    """Return what comes from the blocks."""
    x = w["embedding.weight"][tokens]
    for i in range(blocks):
        x = block(under(w, f"blocks.{i}."), x, has, i)
    return x


def under(w, prefix):
    return {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}


def block(p, x, has, i):
    h = rms(x, p["attention.norm.weight"], has["eps"])
    x = x + (latent(p, h, has) if has.get("kv_rank") else standard(p, h, has, i))
    h = rms(x, p["ffn.norm.weight"], has["eps"])
    return x + (
        sparse(p, h, has)
        if "ffn.router.weight" in p
        else gated(h, *(p[f"ffn.{n}.weight"] for n in ("gate", "up", "down")))
    )


def further_loss(w, rows, blocks, has, depths):
    """Return the mean over depths of the cross-entropies, summed over positions, of the tokens
    after the next: DeepSeek-V3's modules.
    """
    length = rows.shape[1] - 1
    total = 0.0
    x = hidden(w, rows[:, :-1], blocks, has)
    for k in range(1, depths + 1):
        p = under(w, f"mtp.{k - 1}.")
        token = rms(w["embedding.weight"][rows[:, k:length]], p["token_norm.weight"], has["eps"])
        x = (
            torch.cat((rms(x[:, : length - k], p["hidden_norm.weight"], has["eps"]), token), -1)
            @ p["projection.weight"].T
        )
        x = block(p, x, has, blocks - 1)
        out = head(w, rms(x, p["head_norm.weight"], has["eps"]))
        total = total + functional.cross_entropy(
            out.flatten(0, 1), rows[:, k + 1 :].flatten(), reduction="sum"
        )
    return total / depths


def loss(w, rows, blocks, has):
    """Return the mean cross-entropy of rows of tokens."""
    return functional.cross_entropy(logits(w, rows[:, :-1], blocks, has).flatten(0, 1), rows[:, 1:].flatten())


def rms(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def gated(h, gate, up, down):
    return (functional.silu(h @ gate.T) * (h @ up.T)) @ down.T


def sparse(p, h, has):
    """Each expert of every token, weighed: by 0 where it isn't chosen.

    With biases, gpt-oss's clamped gate.
    """
    x = h.flatten(0, 1)
    own = has["experts"]
    logits = x @ p["ffn.router.weight"].T + p.get("ffn.router.logit_bias", 0)
    scores = logits.softmax(-1) if own["score"] == "softmax" else logits.sigmoid()
    groups = scores.detach().unflatten(-1, (own["groups"], -1))
    best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1).topk(own["groups_active"], -1).indices
    closed = torch.ones(groups.shape[:2], dtype=torch.bool).scatter(1, best, False)
    chosen = groups.masked_fill(closed[..., None], -1).flatten(1).topk(own["active"], -1).indices
    weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
    weights = own["scale"] * weights / weights.sum(-1, keepdim=True)
    experts = [
        [p[f"ffn.experts.{n}.weight"][e] for n in ("gate", "up", "down")] for e in range(scores.shape[-1])
    ]
    if "ffn.experts.gate.bias" in p:
        biases = [
            [p[f"ffn.experts.{n}.bias"][e] for n in ("gate", "up", "down")] for e in range(scores.shape[-1])
        ]
        made = [clamped(x, *expert, *bias, has["limit"]) for expert, bias in zip(experts, biases)]
    else:
        made = [gated(x, *expert) for expert in experts]
    y = sum(weights[:, e : e + 1] * each for e, each in enumerate(made))
    if own["shared"]:
        y = y + gated(x, *(p[f"ffn.shared.{n}.weight"] for n in ("gate", "up", "down")))
    return y.view_as(h)


def clamped(x, gate, up, down, of_gate, of_up, of_down, limit):
    g = (x @ gate.T + of_gate).clamp(max=limit)
    u = (x @ up.T + of_up).clamp(-limit, limit)
    return (g * torch.sigmoid(1.702 * g) * (u + 1)) @ down.T + of_down


def standard(p, h, has, block):
    """Grouped queries; biases, norms of heads, sinks, and a window in even blocks, where the
    weights or `has` say so.
    """
    q, k, v = (
        heads(h @ p[f"attention.{n}.weight"].T + p.get(f"attention.{n}.bias", 0), has["head_width"])
        for n in "qkv"
    )
    if "attention.q_norm.weight" in p:
        q, k = (rms(x, p[f"attention.{n}_norm.weight"], has["eps"]) for x, n in ((q, "q"), (k, "k")))
    q = rotate(q, has)
    k = rotate(k, has)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    window = has["window"] if has.get("window") and block % 2 == 0 else q.shape[2]
    a = attend(q, k, v, q.shape[-1] ** -0.5, window, p.get("attention.sinks"))
    return a @ p["attention.output.weight"].T + p.get("attention.output.bias", 0)


def latent(p, h, has):
    """Section 2.1 of arXiv:2405.04434, equations 9 to 19, with the factor of YaRN in the scale of scores."""
    nope = has["head_width"]
    value = has["value_width"]
    of_q = (
        rms(h @ p["attention.q_down.weight"].T, p["attention.q_norm.weight"], has["eps"])
        if has["q_rank"]
        else h
    )
    q = heads(of_q @ p["attention.q_up.weight"].T, nope + has["rotary_width"])
    down = h @ p["attention.kv_down.weight"].T
    c = rms(down[..., : has["kv_rank"]], p["attention.kv_norm.weight"], has["eps"])
    turned = down[..., has["kv_rank"] :]
    kv = heads(c @ p["attention.kv_up.weight"].T, nope + value)
    plain = dict(has, yarn_mscale=0.0)
    q = torch.cat((q[..., :nope], rotate(q[..., nope:], plain)), -1)
    k = torch.cat((kv[..., :nope], rotate(turned[:, None], plain).expand(-1, kv.shape[1], -1, -1)), -1)
    a = attend(q, k, kv[..., nope:], q.shape[-1] ** -0.5 * sharper(has) ** 2, q.shape[2])
    return a @ p["attention.output.weight"].T


def attend(q, k, v, scale, window, sinks=None):
    """Softmax of masked scores; a sink is one more column of them, which is then left out.

    Heads side by side.
    """
    T = q.shape[2]
    distance = torch.arange(T)[:, None] - torch.arange(T)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill((distance < 0) | (distance >= window), -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(len(q), -1, T, 1)), -1)
    return (scores.softmax(-1)[..., :T] @ v).transpose(1, 2).flatten(2)


def heads(x, width):
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def sharper(has):
    return 0.1 * has["yarn_mscale"] * math.log(has["yarn_factor"]) + 1 if has["yarn_factor"] > 1 else 1.0


def rotate(x, has):
    """Complex numbers of pairs (i, i + C/2).

    YaRN (arXiv:2309.00071, equations 20 to 24) by the number of turns in what was trained.
    """
    T, C = x.shape[-2:]
    rate = has["theta"] ** (-torch.arange(0, C, 2, dtype=torch.float64) / C)
    if has["yarn_factor"] > 1:
        turns = [
            C * math.log(has["yarn_length"] / (n * 2 * math.pi)) / (2 * math.log(has["theta"]))
            for n in (32, 1)
        ]
        if has.get("rounded", True):
            turns = [math.floor(turns[0]), math.ceil(turns[1])]
        low = max(turns[0], 0)
        high = min(turns[1], C - 1)
        ramp = torch.tensor(
            [min(1.0, max(0.0, (i - low) / max(high - low, 0.001))) for i in range(C // 2)],
            dtype=torch.float64,
        )
        rate = (1 - ramp) * rate + ramp * rate / has["yarn_factor"]
    turn = torch.polar(
        torch.full((T, C // 2), sharper(has), dtype=torch.float64),
        torch.outer(torch.arange(T, dtype=torch.float64), rate),
    )
    z = torch.complex(x[..., : C // 2], x[..., C // 2 :]) * turn
    return torch.cat((z.real, z.imag), -1)
