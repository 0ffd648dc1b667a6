"""Every number that a line of metrics.jsonl says of a model, by plain torch in fp64, to compare with.

A decoder with experts in each block, and modules that predict further tokens, written apart from
mpitrain. The mask of attention is written out, and there is one backward of the whole batch. No
code of the package is used; initial weights and rows are handed in.
"""

import math

import torch
from oracle import adamw, rms, rotate
from oracle_experts import gated, mixture
from torch.nn import functional


def under(w, prefix):
    return {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}


def attention(p, h, sees, heads, kv_heads):
    """sees: [B, T, T], which position may look at which."""
    B, T, _ = h.shape
    q, k, v = (h @ p[f"attention.{name}.weight"].T for name in "qkv")
    q = q.view(B, T, heads, -1).transpose(1, 2)
    k, v = (
        x.view(B, T, kv_heads, -1).transpose(1, 2).repeat_interleave(heads // kv_heads, 1) for x in (k, v)
    )
    scores = rotate(q) @ rotate(k).transpose(-1, -2) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~sees[:, None], -math.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(B, T, -1) @ p["attention.output.weight"].T


class MetricBatch:
    """What the microbatches of a step, or of a validation, add up to.

    has: heads, layers and so on.
    experts: their keys.
    """

    def __init__(self, w, has, experts):
        self.w = w
        self.has = has
        self.experts = experts
        self.loads = {}
        self.sums = dict.fromkeys(("loss", "mtp", "balance", "z", "dropped"), 0.0)
        self.count = 0

    def add(self, rows, ends):
        """Add a microbatch. rows: [B, T + 1].  ends: true at the last token of each document, like rows."""
        length = rows.shape[1] - 1
        documents = ends.long().cumsum(1) - ends.long()
        inputs = documents[:, :length]
        sees = (inputs[:, :, None] == inputs[:, None, :]) & torch.ones(
            length, length, dtype=torch.bool
        ).tril()
        x = self.w["embedding.weight"][rows[:, :length]]
        for number in range(self.has["layers"]):
            x = self._block(f"blocks.{number}.", str(number), x, sees)
        targets = self._ahead(rows, documents, 1)
        self.count += int((targets >= 0).sum())
        self.sums["loss"] += self._cross_entropy(rms(x, self.w["head.norm.weight"]), targets)
        for depth in range(1, self.has["depths"] + 1):
            p = under(self.w, f"mtp.{depth - 1}.")
            token = self.w["embedding.weight"][self._ahead(rows, documents, depth).clamp(min=0)]
            both = torch.cat((rms(x, p["hidden_norm.weight"]), rms(token, p["token_norm.weight"])), -1)
            x = self._block(f"mtp.{depth - 1}.", f"mtp.{depth - 1}", both @ p["projection.weight"].T, sees)
            further = self._cross_entropy(
                rms(x, p["head_norm.weight"]), self._ahead(rows, documents, depth + 1)
            )
            self.sums["mtp"] += further / self.has["depths"]

    def trained(self):
        """Return the sum whose mean over targets is trained."""
        sums = self.sums
        experts = self.experts
        routers = experts["balance_weight"] * sums["balance"] + experts["z_weight"] * sums["z"]
        return sums["loss"] + self.has["mtp_weight"] * sums["mtp"] + routers

    def line(self):
        """Return what a line of metrics.jsonl says."""
        sums = {name: float(torch.as_tensor(value).detach()) for name, value in self.sums.items()}
        shares = [load / load.sum() for load in self.loads.values()]
        of_depths = {"mtp_loss": sums["mtp"] / self.count} if self.has["depths"] else {}
        return of_depths | {
            "loss": sums["loss"] / self.count,
            "balance_loss": self.experts["balance_weight"] * sums["balance"] / self.count,
            "z_loss": self.experts["z_weight"] * sums["z"] / self.count,
            "dropped": sums["dropped"],
            "load_cv": math.fsum(float(share.std(correction=0) / share.mean()) for share in shares)
            / len(shares),
            "load_entropy": math.fsum(map(entropy, shares)) / len(shares),
        }

    def _block(self, prefix, name, x, sees):
        p = under(self.w, prefix)
        x = x + attention(
            p, rms(x, p["attention.norm.weight"]), sees, self.has["heads"], self.has["kv_heads"]
        )
        h = rms(x, p["ffn.norm.weight"])
        own = under(p, "ffn.")
        if "router.weight" not in own:
            return x + gated(h, own["gate.weight"], own["up.weight"], own["down.weight"])
        load = self.loads.setdefault(name, torch.zeros(self.experts["count"], dtype=x.dtype))
        return x + mixture(own, h, self.experts, self.sums, load)

    def _ahead(self, rows, documents, by):
        """Return the token `by` places ahead of each position, -1 if it is of another document or row."""
        length = rows.shape[1] - 1
        found = torch.full((len(rows), length), -1)
        within = documents[:, by:] == documents[:, : documents.shape[1] - by]
        found[:, : length + 1 - by] = torch.where(within, rows[:, by:], -1)[:, :length]
        return found

    def _cross_entropy(self, h, targets):
        logits = h @ self.w.get("head.weight", self.w["embedding.weight"]).T
        return functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
        )


def entropy(share):
    """Return the entropy of shares, as a part of the greatest there can be."""
    return -math.fsum(s * math.log(s) for s in share.tolist() if s) / math.log(len(share))


def one_step(weights, moments, microbatches, step, has, experts, lr, optimizer):
    """Train a step in place; return its line, and the shares of the experts by block."""
    trained = {name: w for name, w in weights.items() if not name.endswith(("router.load", "router.bias"))}
    w = weights | {name: value.clone().requires_grad_() for name, value in trained.items()}
    batch = MetricBatch(w, has, experts)
    for rows, ends in microbatches:
        batch.add(rows, ends)
    (batch.trained() / batch.count).backward()
    grads = {name: torch.zeros_like(w[name]) if w[name].grad is None else w[name].grad for name in trained}
    line = batch.line() | {"lr": lr, "grad_norm": adamw(trained, grads, moments, step, lr=lr, **optimizer)}
    for name, load in batch.loads.items():
        prefix = f"{name}." if name.startswith("mtp") else f"blocks.{name}."
        weights[f"{prefix}ffn.router.load"].copy_(load / load.sum())
        if (bias := weights.get(f"{prefix}ffn.router.bias")) is not None:
            bias += experts["bias_rate"] * (load.mean() - load).sign()
    return line, {name: (load / load.sum()).tolist() for name, load in batch.loads.items()}


def validate(weights, microbatches, has, experts):
    """Return the mean loss of the next token: nothing is dropped, and nothing further is predicted."""
    batch = MetricBatch(weights, has | {"depths": 0}, experts | {"capacity": 0.0})
    for rows, ends in microbatches:
        batch.add(rows, ends)
    return float(batch.sums["loss"]) / batch.count


def cosine(step, peak, warmup, steps, final):
    """Return the rate of a step, counted from 1: a line up, then half a cosine down to a part of the peak."""
    if step <= warmup:
        return peak * step / warmup
    angle = math.pi * (step - warmup) / (steps - warmup)
    return peak * (final + (1 - final) * (1 + math.cos(angle)) / 2)
