"""Write docs/generated from the source: keys, fields, exit codes, schedules, families, machines.

docs/conf.py writes them before Sphinx reads any page, so they aren't kept.
"""

from fractions import Fraction
from pathlib import Path

from building import pages

from mpitrain.commands.schedule.request import Request, play
from mpitrain.plan.declared.family import FAMILIES
from mpitrain.plan.predict.step_time.machine import known
from mpitrain.schedules.catalog import NAMES

PAPERS = {
    "gpipe": "[1811.06965](https://arxiv.org/abs/1811.06965)",
    "1f1b": "[2006.09503](https://arxiv.org/abs/2006.09503), [2104.04473](https://arxiv.org/abs/2104.04473)",
    "eager-1f1b": "[2211.05322](https://arxiv.org/abs/2211.05322)",
    "interleaved": "[2104.04473](https://arxiv.org/abs/2104.04473)",
    "looped-bfs": "[2211.05953](https://arxiv.org/abs/2211.05953)",
    "zb-h1": "[2401.10241](https://arxiv.org/abs/2401.10241)",
    "zb-h2": "[2401.10241](https://arxiv.org/abs/2401.10241)",
    "zb-auto": "[2401.10241](https://arxiv.org/abs/2401.10241), section 3.1",
    "plain-auto": "searched for, [guide](../guides/schedules.md#searched-orders)",
    "interleaved-auto": "searched for",
    "1f1b-v": "[2405.15362](https://arxiv.org/abs/2405.15362), section 3.3",
    "v-auto": "searched for; [2405.15362](https://arxiv.org/abs/2405.15362)",
    "interleaved-zb": "[2401.10241](https://arxiv.org/abs/2401.10241) with chunks, as PyTorch has it",
    "zbv": "[2401.10241](https://arxiv.org/abs/2401.10241), section 6",
    "zbv-auto": "[2401.10241](https://arxiv.org/abs/2401.10241), section 6",
    "v-half": "[2405.15362](https://arxiv.org/abs/2405.15362)",
    "v-min": "[2405.15362](https://arxiv.org/abs/2405.15362)",
    "dualpipe": "[2412.19437](https://arxiv.org/abs/2412.19437), section 3.2.1",
    "dualpipev": "[DualPipe](https://github.com/deepseek-ai/DualPipe)",
    "seq1f1b": "[2406.03488](https://arxiv.org/abs/2406.03488)",
}
SIZES = (4, 8), (8, 32)  # pipeline ranks, microbatches
HEAD = "| schedule | makespan | bubble | peak | messages | stages a rank | copies | paper |"


def write(folder: Path) -> None:
    """Write all pages; one that is as it was keeps its time, so that Sphinx doesn't read it again."""
    folder.mkdir(exist_ok=True)
    made = {
        "configuration.md": pages.configuration(),
        "outputs.md": pages.outputs(),
        "exit-codes.md": pages.codes(),
        "schedules.md": schedules(),
        "families.md": families(),
        "model-types.md": model_types(),
        "machines.md": machines(),
    }
    for name, text in made.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def schedules() -> str:
    """Return tables of all schedules, played with unit times."""
    lines = []
    for num_ranks, num_microbatches in SIZES:
        lines += [
            f"### {num_ranks} pipeline ranks, {num_microbatches} microbatches\n",
            HEAD,
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [_row(name, num_ranks, num_microbatches) for name in NAMES]
        lines.append("")
    return "\n".join(lines)


def _row(name: str, num_ranks: int, num_microbatches: int) -> str:
    played = play(Request(name, num_ranks, num_microbatches))
    makespan = played.timeline.makespan
    bubble = sum(played.idle) / (makespan * num_ranks)
    stages = max(map(len, played.chunks)) // played.table.copies
    cells = (
        f"`{name}`",
        f"{float(Fraction(makespan)):g}",
        f"{bubble:.1%}",
        f"{max(played.peak_stashes):g}",
        str(max(played.messages)),
        str(stages),
        str(played.table.copies),
        PAPERS[name],
    )
    return "| " + " | ".join(cells) + " |"


def families() -> str:
    """Return a table of the families of models: keys of their own, presets, weights elsewhere."""
    lines = ["| `model.family` | experts | presets | named in Hugging Face folders |", "|---|---|---|---|"]
    for name, family in FAMILIES.built_in().items():
        presets = ", ".join(f"`{preset}`" for preset in family.presets) or "none"
        experts = "yes" if family.experts is not None else "no"
        lines.append(f"| `{name}` | {experts} | {presets} | {'yes' if family.weight_names else 'no'} |")
    return "\n".join([*lines, ""])


def model_types() -> str:
    """Return a table of the models of Hugging Face folders, and the families that read them."""
    lines = ["| `model_type` of `config.json` | architecture | `model.family` |", "|---|---|---|"]
    for name, family in FAMILIES.built_in().items():
        lines += [f"| `{each.name}` | `{each.architecture}` | `{name}` |" for each in family.model_types]
    return "\n".join([*lines, ""])


def machines() -> str:
    """Return a table of the machines that have a file: their names, memory of a rank, ranks of a node."""
    lines = ["| name | machine | also | GB a rank | ranks a node |", "|---|---|---|---:|---:|"]
    for name, machine in known().items():
        cells = (
            f"`{name}`",
            machine.name,
            ", ".join(f"`{alias}`" for alias in machine.aliases),
            f"{machine.memory_bytes / 1e9:.1f}",
            str(machine.ranks_per_node),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])
