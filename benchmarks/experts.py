"""Training speed of a mixture of experts, as ratios within one run.

Against plain torch, and on several ranks against as many times one.

    python benchmarks/experts.py [--turns 12] [--set KEY=VALUE]...              one rank against
        plain torch
    mpirun -n 2 python benchmarks/experts.py [--turns 12] [--set KEY=VALUE]...  ep=2 against twice
        one rank, at equal tokens a rank

The model: family mixtral, 4 blocks of width 384, 8 experts of 512 hidden units, 2 for a token,
fp32, AdamW, clip 1.0; 4 sequences of 256 tokens a rank and step in microbatches of 2; one thread
per rank. Plain torch has the same weights, sorts tokens by expert, multiplies expert by expert, and
adds with index_add; its loss and norm are compared with ours. The candidates take turns, step by
step; a line gives the median over the turns of each one's seconds, and of the ratio of the two
steps of a turn. Seconds of the processor are printed as well: on a machine with other work they are
what is left of the truth.

With several ranks, tokens go to the experts in turns, whatever the router says: every rank gets as
many rows as it sends. (A router that balances itself would need training first.) One rank steps
alone while the others sleep. The learning rate is 0: the routing stays what it was.

That folded layouts run at all is seen with 32 ranks on any machine, here in 3 minutes on 2 cores
that others used too:

    OMP_NUM_THREADS=1 mpirun -n 32 mpitrain run --set model.family=mixtral --set model.layers=4
        --set model.width=64 --set model.ffn=64
        --set model.heads=4 --set model.kv_heads=2 --set experts.count=8 --set parallel.pp=2 --set
            parallel.tp=2 --set parallel.cp=2
        --set parallel.dp=4 --set parallel.ep=4 --set data.sequence=64 --set batch.global=8 --set
            batch.micro=1 --set run.steps=20
        --set comm.timeout_s=300
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional

from mpitrain import config as settings
from mpitrain.actor.actor import Actor
from mpitrain.actor.communicators import build_mesh
from mpitrain.config import Config
from mpitrain.model import router
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.settings.resolve import resolve

# sequences of a rank and step
VOCAB = 4096
SEQUENCE = 256
SEQUENCES = 4
MODEL = (
    "model.family=mixtral", "model.layers=4", "model.width=384", "model.heads=6", "model.kv_heads=2",
    "model.ffn=512", "model.tied=false",
    "experts.count=8", "experts.active=2", f"data.sequence={SEQUENCE}", "batch.micro=2",
)  # fmt: skip


# ---------------------------------------------------------------- plain torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Expert(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(*shape, bias=False) for shape in ((width, hidden), (width, hidden), (hidden, width))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Returns what the experts make of x [B, T, D], and the balance loss of its tokens."""

    def __init__(self, config: Config):
        super().__init__()
        self.count = config.experts.count
        self.active = config.experts.active
        self.weight = config.experts.balance_weight
        self.router = nn.Linear(config.model.width, self.count, bias=False)
        self.experts = nn.ModuleList(
            Expert(config.model.width, config.experts.width) for _ in range(self.count)
        )

    def forward(self, x_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_ND = x_BTD.flatten(0, 1)
        scores = self.router(x_ND).softmax(-1)
        weights, chosen = scores.topk(self.active, dim=-1, sorted=False)
        weights = weights / weights.sum(-1, keepdim=True)
        chosen = chosen.flatten()
        order = chosen.argsort()
        counts = torch.bincount(chosen, minlength=self.count)
        tokens = order // self.active
        sizes = counts.tolist()
        y_ND = torch.zeros_like(x_ND)
        groups = zip(
            self.experts,
            x_ND[tokens].split(sizes),
            tokens.split(sizes),
            weights.flatten()[order, None].split(sizes),
        )
        for expert, rows, theirs, weight in groups:
            if len(rows):
                y_ND.index_add_(0, theirs, expert(rows) * weight)
        balance = self.weight * self.count * (counts / len(chosen) * scores.sum(0)).sum()
        return y_ND.view_as(x_BTD), balance


class MixtralBlock(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        model = config.model
        self.width = model.width // model.heads
        self.norm, self.ffn_norm = (nn.RMSNorm(model.width, eps=1e-5) for _ in range(2))
        heads = (model.heads, model.kv_heads, model.kv_heads)
        self.q, self.k, self.v = (nn.Linear(model.width, number * self.width, bias=False) for number in heads)
        self.output = nn.Linear(model.width, model.width, bias=False)
        self.mixture = Mixture(config)
        rates = 10_000.0 ** (-torch.arange(0, self.width, 2) / self.width)
        angles = torch.outer(torch.arange(config.data.sequence), rates)
        self.cos = angles.cos()
        self.sin = angles.sin()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.norm(x)
        q, k, v = (
            linear(h).unflatten(-1, (-1, self.width)).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        q, k = (rotate(each, self.cos, self.sin) for each in (q, k))
        made = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.output(made.transpose(1, 2).flatten(2))
        made, balance = self.mixture(self.ffn_norm(x))
        return x + made, balance


class Plain(nn.Module):
    """The model and its training step, in plain torch."""

    def __init__(self, config: Config):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, config.model.width)
        self.head = nn.Linear(config.model.width, VOCAB, bias=False)
        self.blocks = nn.ModuleList(MixtralBlock(config) for _ in range(config.model.layers))
        self.norm = nn.RMSNorm(config.model.width, eps=1e-5)
        self.config = config

    def take(self, weights: dict[str, torch.Tensor]) -> None:
        """Take our weights, by our names."""
        for name, own in self.named_parameters():
            whole, _, number = _our_name(name).partition(" ")
            own.data.copy_(weights[whole][int(number)] if number else weights[whole])
        optimizer = self.config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.parameters(), lr=0.0, betas=optimizer.betas, weight_decay=optimizer.decay, fused=True
        )

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(tokens)
        losses = []
        for block in self.blocks:
            x, balance = block(x)
            losses.append(balance)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), sum(losses)

    def step(self, rows: torch.Tensor) -> tuple[float, float]:
        """Return (loss, norm) of a training step."""
        total = 0.0
        count = rows[:, 1:].numel()
        for microbatch in rows.split(self.config.batch.micro):
            loss, balance = self(microbatch[:, :-1], microbatch[:, 1:])
            ((loss + balance) / count).backward()
            total += loss.item() / count
        norm = nn.utils.clip_grad_norm_(self.parameters(), self.config.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm.item()


def _our_name(name: str) -> str:
    """Return our name of a parameter of plain torch; after it the number of the expert, if it is one's."""
    if ".mixture.experts." in name:
        block, number, matrix = name.split(".")[1], *name.split(".")[4:6]
        return f"blocks.{block}.ffn.experts.{matrix}.weight {number}"
    name = name.replace(".mixture.", ".ffn.").replace(".ffn_norm.", ".ffn.norm.")
    for part in ("norm", "q", "k", "v", "output"):
        parts = name.split(".")
        if parts[0] == "blocks" and parts[2] == part:
            return f"blocks.{parts[1]}.attention.{part}.weight"
    return "head.norm.weight" if name == "norm.weight" else name


# ---------------------------------------------------------------- ours


def actor_of(ranks: MPI.Intracomm, given: list[str]) -> Actor:
    """Return the trainer of these ranks, over which the experts are spread. Collective over them."""
    layout = (f"parallel.ep={ranks.size}", f"batch.global={SEQUENCES * ranks.size}")
    plan = plan_of(resolve(settings.load(None, (*MODEL, *layout, *given)), ranks.size, VOCAB))
    return Actor(plan, build_mesh(plan, ranks), torch.device("cpu"))


def in_turns(choose: Callable[..., router.Chosen]) -> Callable[..., router.Chosen]:
    """Return a router that sends the first tokens to the first experts, the next ones to the next,
    and weighs as it would.
    """

    def chosen(
        logits_NE: torch.Tensor, bias_E: torch.Tensor | None, experts: settings.ExpertsTable
    ) -> router.Chosen:
        numbers = torch.arange(len(logits_NE) * experts.active).view(-1, experts.active) % experts.count
        return router.Chosen(logits_NE, numbers, router.weigh(logits_NE, numbers, experts))

    return chosen


# ---------------------------------------------------------------- turns


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of a step, on the clock and of the processor."""
    begin = time.perf_counter()
    worked = time.process_time()
    step()
    return time.perf_counter() - begin, time.process_time() - worked


def asleep(world: MPI.Intracomm) -> None:
    """Wait for all ranks without keeping a core busy."""
    pending = world.Ibarrier()
    while not pending.Test():
        time.sleep(1e-3)


def report(names: tuple[str, str], turns: list[list[tuple[float, float]]], goal: str) -> None:
    """Print the medians of both candidates, and of their ratio."""
    for kind, what in enumerate(("clock", "processor")):
        first, second = ([turn[candidate][kind] for turn in turns] for candidate in (0, 1))
        seconds = "  ".join(
            f"{name} {statistics.median(each):.3f} s" for name, each in zip(names, (first, second))
        )
        print(
            f"{what:<10} {seconds}  {goal} {statistics.median(a / b for a, b in zip(first, second)):.3f}",
            flush=True,
        )


def against_plain(turns: int, given: list[str]) -> None:
    """One rank against plain torch."""
    actor = actor_of(MPI.COMM_SELF, given)
    plain = Plain(actor.config)
    plain.take({piece.spec.name: piece.weight.view(piece.spec.shape) for piece in actor.gradients.pieces})
    found = []
    for step in range(1, turns + 2):
        rows = torch.randint(
            0, VOCAB, (SEQUENCES, SEQUENCE + 1), generator=torch.Generator().manual_seed(step)
        )
        loss, norm = plain.step(rows) if step == 1 else (0.0, 0.0)
        if step == 1:
            ours = actor.run_step(step, actor.cutter.cut(rows), 0.0)
            if abs(ours.loss - loss) > 1e-4 or abs(ours.grad_norm - norm) > 1e-3 * norm:
                raise SystemExit(
                    f"not the same: loss {ours.loss} and {loss} of plain torch, norm {ours.grad_norm} and "
                    f"{norm}"
                )
            continue
        steps = [
            lambda rows=rows: plain.step(rows),
            lambda rows=rows, step=step: actor.run_step(step, actor.cutter.cut(rows), 0.0),
        ]
        order = (0, 1) if step % 2 else (1, 0)
        times = {candidate: timed(steps[candidate]) for candidate in order}
        found.append([times[0], times[1]])
    report(("plain torch", "mpitrain"), found, "mpitrain's speed / plain torch's:")
    actor.mesh.free()


def over_ranks(world: MPI.Intracomm, turns: int, given: list[str]) -> None:
    """All ranks, each with some of the experts, against as many times one of them."""
    router.choose = in_turns(router.choose)
    alone = actor_of(MPI.COMM_SELF, given)
    together = actor_of(world, given)
    found = []
    for step in range(turns + 1):
        rows = torch.randint(
            0,
            VOCAB,
            (SEQUENCES, SEQUENCE + 1),
            generator=torch.Generator().manual_seed(step * world.size + world.rank),
        )
        asleep(world)
        once = (
            timed(lambda rows=rows, step=step: alone.run_step(step, alone.cutter.cut(rows), 0.0))
            if world.rank == 0
            else None
        )
        asleep(world)
        found.append(
            [
                once,
                timed(lambda rows=rows, step=step: together.run_step(step, together.cutter.cut(rows), 0.0)),
            ]
        )
    if world.rank == 0:
        n = world.size
        report(
            ("one rank", f"ep={n}"),
            found[1:],
            f"speed of ep={n} / {n} times that of one rank, at equal tokens a rank:",
        )
    alone.mesh.free()
    together.mesh.free()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--set", dest="settings", action="append", default=[], help="further settings")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    if world.size == 1:
        against_plain(arguments.turns, arguments.settings)
    else:
        over_ranks(world, arguments.turns, arguments.settings)


if __name__ == "__main__":
    main()
