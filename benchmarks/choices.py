"""What the planner chooses beside the best of all layouts, by brute force, for eight models on 2 or 4 ranks.

    python benchmarks/choices.py                 a quarter of an hour on two cores
    python benchmarks/choices.py --machine FILE  by figures that were measured before
    python benchmarks/choices.py --only experts

`mpitrain plan` chooses by the file of this machine; then `mpitrain sweep` has its choice and every
division over dp, tp, cp, pp and ep take steps, with each schedule and microbatch of a few. Run it
where nothing else runs.

%s
"""

import argparse
import csv
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from predictions import measured_machine

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from launch import MPITRAIN, mpirun, tail  # noqa: E402

MEASURED = "Two cores of an AMD EPYC (Zen 5), 2026-11-28: docs/guides/planning.md has the rows."
EXPERTS = "model.family=mixtral experts.count=4 experts.active=2 experts.width=512"
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv")


def sizes(layers: int, width: int, heads: int, ffn: int, sequence: int, more: str = "") -> tuple[str, ...]:
    return (
        f"model.layers={layers}", f"model.width={width}", f"model.heads={heads}", f"model.kv_heads={heads}",
        f"model.ffn={ffn}", f"data.sequence={sequence}", "batch.global=8", *more.split(),
    )  # fmt: skip


MODELS = {  # ranks, settings
    "deep": (2, sizes(12, 192, 4, 512, 256)),
    "wide": (2, sizes(4, 768, 8, 2048, 128)),
    "bf16": (2, sizes(6, 512, 8, 1408, 256, "precision.compute=bf16")),
    "long": (2, sizes(4, 256, 4, 768, 1024)),
    "short": (2, sizes(4, 256, 4, 768, 64)),
    "gpt2": (2, sizes(6, 384, 6, 1536, 256, "model.family=gpt2")),
    "experts": (2, sizes(4, 256, 4, 512, 256, EXPERTS)),
    "four ranks": (4, sizes(8, 256, 4, 768, 256)),
}  # fmt: skip


def all_layouts(ranks: int, settings: tuple[str, ...]) -> Iterator[str]:
    """Yield every layout as the words of a sweep."""
    powers = [1 << power for power in range(ranks.bit_length()) if 1 << power <= ranks]
    for tp, cp, pp in product(powers, repeat=3):
        if ranks % (tp * cp * pp):
            continue
        dp = ranks // (tp * cp * pp)
        axes = f"parallel.tp={tp} parallel.cp={cp} parallel.pp={pp}"
        ways = [f" pipeline.schedule={each}" for each in SCHEDULES] if pp > 1 else [""]
        states = [" parallel.zero=1", " parallel.zero=3"] if dp > 1 else [""]
        if dp > 1 and any("experts" in word for word in settings):
            states += [f" parallel.zero=1 parallel.ep={dp}"]
        for way, state, micro in product(ways, states, (1, 2, 4)):
            if micro * dp <= 8 and (pp == 1 or 8 // (micro * dp) >= pp):
                yield f"{axes}{way}{state} batch.micro={micro}"


def chosen(ranks: int, settings: tuple[str, ...], machine: Path) -> str:
    """Return the first layout of the planner as the words of a sweep."""
    words = [word for each in settings for word in ("--set", each)]
    asked = ["--ranks", str(ranks), "--machine", str(machine), "--set", f"comm.node_ranks={ranks}"]
    done = mpirun(0, MPITRAIN, "plan", *asked, *words, "--json", timeout=120)
    found = json.loads(done.output)["best"][0]["layout"]
    keys = {f"parallel.{axis}": found[axis] for axis in ("tp", "cp", "pp", "ep", "zero")}
    keys |= {"batch.micro": found["micro"], "memory.recompute": found["recompute"]}
    if found["cp"] > 1:
        keys["parallel.context"] = found["context"]
    if found["pp"] > 1:
        keys["pipeline.schedule"] = found["schedule"]
        if found["chunks"] > 1 and found["schedule"] == "interleaved":
            keys["pipeline.chunks"] = found["chunks"]
    # as all_layouts() has it, so that one layout isn't measured as two
    left_out = {"parallel.ep": 1, "memory.recompute": "none"}
    left_out |= {"parallel.zero": 0} if found["dp"] == 1 else {}
    return " ".join(f"{key}={value}" for key, value in keys.items() if left_out.get(key) != value)


def tried(name: str, ranks: int, settings: tuple[str, ...], machine: Path, steps: int, folder: Path) -> float:
    """Print how much the choice loses, and return it as a share."""
    choice = chosen(ranks, settings, machine)
    layouts = folder / "layouts"
    layouts.write_text("\n".join(dict.fromkeys([choice, *all_layouts(ranks, settings)])))
    rows = folder / "rows.csv"
    words = [word for each in settings for word in ("--set", each)]
    words += ["--layouts", str(layouts), "--machine", str(machine), "--steps", str(steps), "--out", str(rows)]
    done = mpirun(ranks, MPITRAIN, "sweep", *words, timeout=1200)
    if done.returncode:
        raise RuntimeError(tail(done.output))
    with rows.open() as file:
        took = {row["layout"]: float(row["measured_s"]) for row in csv.DictReader(file) if row["measured_s"]}
    best = min(took, key=took.__getitem__)
    loses = took[choice] / took[best] - 1
    middle = statistics.median(took.values()) / took[best] - 1
    print(f"{name}: {len(took)} layouts; chosen {1e3 * took[choice]:.0f} ms ({choice}),")
    print(
        f"    best {1e3 * took[best]:.0f} ms ({best}): loses {loses:.1%}; the middle loses {middle:.1%}",
        flush=True,
    )
    return loses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__ % MEASURED, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", action="append", choices=MODELS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        machine = given.machine or measured_machine(folder / "machine.toml", 2, mpirun)
        lost = [tried(model, *MODELS[model], machine, given.steps, folder) for model in given.only or MODELS]
    print(f"the choice loses {statistics.median(lost):.1%} in the median, {max(lost):.1%} at most")


if __name__ == "__main__":
    main()
