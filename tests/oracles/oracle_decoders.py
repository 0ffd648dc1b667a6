"""Dense families written out in plain torch, by what their papers say: no code of the package is used.

A model is a dict of weights by our names, and a dict of what they mean.
"""

import math

import torch
from torch.nn import functional


def loss(w, rows, has):
    """Return the mean cross-entropy of rows of tokens."""
    return functional.cross_entropy(logits(w, rows[:, :-1], has).flatten(0, 1), rows[:, 1:].flatten())


def logits(w, tokens, has):
    x = hidden(w, tokens, has)
    found = norm(x, w, "head.norm", has, "head") @ w.get("head.weight", w["embedding.weight"]).T
    if cap := has.get("logit_cap"):
        found = cap * torch.tanh(found / cap)
    return found


def loss_of_documents(w, documents, has):
    """Return the mean cross-entropy of documents, one after the other: of those targets that are scored.

    documents: (tokens, whether each carries loss as a target) of each.
    """
    total, count = torch.zeros((), dtype=torch.float64), 0
    for tokens, scored in documents:
        found = logits(w, torch.tensor(tokens[:-1])[None], has)[0]
        for position, (target, counts) in enumerate(zip(tokens[1:], scored[1:], strict=True)):
            if counts:
                total = total + torch.logsumexp(found[position], 0) - found[position, target]
                count += 1
    return total / count


def further_loss(w, documents, has, depths):
    """Return the mean over depths of the cross-entropies of the tokens after the next (arXiv:2412.19437,
    section 2.2), summed over those that are scored. documents: as of loss_of_documents().
    """
    total = torch.zeros((), dtype=torch.float64)
    for tokens, scored in documents:
        row = torch.tensor([tokens])
        x = hidden(w, row[:, :-1], has)
        for k in range(1, min(depths, len(tokens) - 2) + 1):
            p = under(w, f"mtp.{k - 1}.")
            token = norm(w["embedding.weight"][row[:, k:-1]], p, "token_norm", has)
            both = torch.cat((norm(x[:, :-1], p, "hidden_norm", has), token), -1)
            x = block(p, both @ p["projection.weight"].T, has, has["blocks"] - 1)
            found = norm(x, p, "head_norm", has) @ w.get("head.weight", w["embedding.weight"]).T
            targets = row[0, k + 1 :].where(torch.tensor(scored[k + 1 :]), -100)
            total = total + functional.cross_entropy(found[0], targets, reduction="sum")
    return total / depths


def hidden(w, tokens, has):
    """Return what comes from the blocks."""
    x = w["embedding.weight"][tokens] * has.get("scale", 1.0)
    if "embedding.positions" in w:
        x = x + w["embedding.positions"][: x.shape[1]]
    for i in range(has["blocks"]):
        x = block(under(w, f"blocks.{i}."), x, has, i)
    return x


def under(w, start):
    return {name.removeprefix(start): value for name, value in w.items() if name.startswith(start)}


def block(p, x, has, i):
    for name, part in (("attention", attention), ("ffn", feed_forward)):
        y = part(p, norm(x, p, f"{name}.norm", has), has, i)
        x = x + norm(y, p, f"{name}.post_norm", has)
    return x


def norm(x, p, name, has, of="block"):
    """Return the norm of a name; x where there is none."""
    if f"{name}.weight" not in p:
        return x
    weight = p[f"{name}.weight"]
    if f"{name}.bias" in p:
        return functional.layer_norm(x, x.shape[-1:], weight, p[f"{name}.bias"], has["eps"])
    if has.get("plus_one"):
        weight = 1 + weight
    return x / (x.pow(2).mean(-1, keepdim=True) + has["eps"]).sqrt() * weight


def linear(x, p, name):
    return functional.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def feed_forward(p, h, has, i):
    if "ffn.router.weight" in p:
        from oracle_families import sparse

        return sparse(p, h, has)
    if "ffn.gate.weight" not in p:
        return linear(functional.gelu(linear(h, p, "ffn.up"), approximate="tanh"), p, "ffn.down")
    gate = linear(h, p, "ffn.gate")
    gate = functional.gelu(gate, approximate="tanh") if has.get("gelu") else functional.silu(gate)
    return linear(gate * linear(h, p, "ffn.up"), p, "ffn.down")


def attention(p, h, has, i):
    q, k, v = (linear(h, p, f"attention.{n}") for n in "qkv")
    width = has["head_width"]
    if has.get("whole"):  # queries and keys are normed before they are divided into heads
        q, k = (norm(x, p, f"attention.{n}_norm", has) for x, n in ((q, "q"), (k, "k")))
    q, k, v = (x.unflatten(-1, (-1, width)).transpose(1, 2) for x in (q, k, v))
    if not has.get("whole"):
        q, k = (norm(x, p, f"attention.{n}_norm", has) for x, n in ((q, "q"), (k, "k")))
    windowed = bool(has.get("window")) and letter(has.get("window_blocks") or "w", i) == "w"
    if letter(has.get("rotary_blocks") or "r", i) == "r" and has.get("theta"):
        q, k = (rotate(x, has, windowed) for x in (q, k))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (has.get("score_width") or width) ** -0.5
    if cap := has.get("score_cap"):
        scores = cap * torch.tanh(scores / cap)
    length = q.shape[2]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < (has["window"] if windowed else length))
    a = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    return linear(a.transpose(1, 2).flatten(-2), p, "attention.output")


def letter(letters, i):
    return letters[i % len(letters)]


def rotate(x, has, windowed):
    """Turn pairs (i, i + C/2) of the first C features of each head, as complex numbers."""
    width = has.get("rotary_width") or x.shape[-1]
    local = windowed and has.get("window_theta")
    rate, magnitude = rates(width, dict(theta=has["window_theta"]) if local else has)
    angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float64), rate)
    turn = torch.polar(torch.full_like(angles, magnitude), angles)
    z = torch.complex(x[..., : width // 2], x[..., width // 2 : width]) * turn
    return torch.cat((z.real, z.imag, x[..., width:]), -1)


def rates(width, has):
    """Return the angle of each pair from one position to the next, and by what vectors grow.

    Dynamic scaling goes by the whole sequence, also where documents are apart.
    """
    theta = has["theta"]
    length = has.get("sequence", 0)
    if 0 < (before := has.get("dynamic_length") or 0) < length:
        factor = has["dynamic_factor"]
        theta *= (factor * length / before - factor + 1) ** (width / (width - 2))
    found = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if (factor := has.get("linear_factor") or 1) > 1:
        return found / factor, 1.0
    if (factor := has.get("llama3_factor") or 1) > 1:
        low, high = has["llama3_low"], has["llama3_high"]
        made = []
        for f in found.tolist():
            turns = has["llama3_length"] * f / (2 * math.pi)
            share = min(1.0, max(0.0, (turns - low) / (high - low)))
            made.append(share * f + (1 - share) * f / factor)
        return torch.tensor(made, dtype=torch.float64), 1.0
    if (factor := has.get("yarn_factor") or 1) == 1:
        return found, 1.0
    ends = [
        width * math.log(has["yarn_length"] / (2 * math.pi * turns)) / (2 * math.log(has["theta"]))
        for turns in (has["yarn_fast"], has["yarn_slow"])
    ]
    if has["yarn_rounded"]:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], width - 1)
    ramp = [min(1.0, max(0.0, (i - low) / (high - low or 1e-3))) for i in range(width // 2)]
    slowed = torch.tensor(ramp, dtype=torch.float64)
    return found * (1 - slowed) + found / factor * slowed, 0.1 * has["yarn_mscale"] * math.log(factor) + 1
