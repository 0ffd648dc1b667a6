"""Print the shape of this tree's code.

Long lines, tuple assignments, functions, class names, circles of files, twins of file names.

    python benchmarks/house.py              the tree that this file lies in
    python benchmarks/house.py DIR          another checkout, to compare with
    python benchmarks/house.py --list KIND  each place of one kind: lines, functions, complexity,
                                            classes, circles, twins

Complexity is McCabe's (A Complexity Measure, 1976): one, and one for each place where the way
forks.
"""

import argparse
import ast
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = ("mpitrain", "schedules", "comm", "jobs")
OTHER_CODE = ("tests", "benchmarks")
LONG, TOO_LONG = 100, 110  # characters
LONGEST_FUNCTION, MOST_COMPLEX = 59, 15
# Why a file name stands in several folders. One subject, and the folder says what of it stands there.
TWINS = {
    "attention.py": "plan/settings its keys; model/layers what it declares, model what computes it; "
    "kernels the arithmetic; parallel/context the same over the cp axis",
    "catalog.py": "built-in schedules; built-in families",
    "embedding_and_head.py": "model/layers what it declares, model what computes it",
    "experts.py": "plan/settings their keys; model/layers what they declare, model what computes them",
    "family.py": "of schedules; of models",
    "feed_forward.py": "model/layers what it declares, model what computes it",
    "inspect.py": "commands/ckpt checkpoints; commands a layout",
    "keys.py": "commands/reference what each means; weights what a config.json says of them",
    "latent_attention.py": "model/layers what it declares, model what computes it",
    "memory.py": "plan/predict what a rank will hold; actor what it holds",
    "messages.py": "schedules/lowering when they are sent; comm/transports how",
    "multi_token.py": "model/layers what it declares, model what computes it",
    "nodes.py": "comm/base which ranks are on which; cluster how their watchdogs talk",
    "offload.py": "of activations in model; of optimizer state in optim",
    "parameters.py": "plan/declared their shapes; parallel/zero their tensors",
    "protocol.py": "what every transport has; what every optimiser has",
    "recompute.py": "plan/settings every how many blocks; model the recomputation",
    "reductions.py": "schedules/lowering where REDUCE stands in a program; actor what it does",
    "rehearsal.py": "actor/ itself on silent axes; comm/standins those axes",
    "replay.py": "training/replay a recorded step; comm/standins its axes",
    "shards.py": "of ZeRO in parallel/zero; files of a checkpoint in checkpoint",
    "text.py": "commands/schedule what is printed; data/sources a corpus of texts",
    "verify.py": "checkpoint a step; commands a layout",
}
FORKS = (
    ast.If,
    ast.For,
    ast.While,
    ast.IfExp,
    ast.ExceptHandler,
    ast.With,
    ast.Assert,
    ast.comprehension,
    ast.match_case,
)
NAMED_BY_PYTHON = {"__init__.py", "__main__.py"}


@dataclass
class Shape:
    """What is counted in some files. Places are `file:line` with what stands there."""

    num_lines: int = 0
    num_statements: int = 0
    long_lines: list[str] = field(default_factory=list)
    too_long_lines: list[str] = field(default_factory=list)
    tuples: list[str] = field(default_factory=list)
    conditionals: list[str] = field(default_factory=list)
    lengths: dict[str, int] = field(default_factory=dict)
    complexity: dict[str, int] = field(default_factory=dict)
    classes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def python_files(root: Path, folders: Iterable[str]) -> list[Path]:
    """Return the files of Python in some folders; a link to a folder is not followed twice."""
    return sorted(
        path
        for top in folders
        for path in (root / top).rglob("*.py")
        if path.resolve().is_relative_to(root / top)
    )


def complexity(function: ast.AST) -> int:
    """Return how many ways lead through a function, functions within it left out."""
    count = 1
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        count += isinstance(node, FORKS)
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        waiting += ast.iter_child_nodes(node)
    return count


def measure(root: Path, folders: Iterable[str]) -> Shape:
    """Return the shape of all files in some folders of a tree."""
    shape = Shape()
    for path in python_files(root, folders):
        name = str(path.relative_to(root))
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            shape.num_lines += 1
            if len(line) > LONG:
                shape.long_lines.append(f"{name}:{number}: {len(line)} characters")
            if len(line) > TOO_LONG:
                shape.too_long_lines.append(shape.long_lines[-1])
        for node in ast.walk(ast.parse(text)):
            _count(node, name, shape)
    return shape


def _count(node: ast.AST, name: str, shape: Shape) -> None:
    place = f"{name}:{getattr(node, 'lineno', 0)}"
    shape.num_statements += isinstance(node, ast.stmt)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
        if any(isinstance(target, ast.Tuple) for target in node.targets):
            shape.tuples.append(f"{place}: {ast.unparse(node)}")
    elif isinstance(node, ast.IfExp):
        shape.conditionals.append(f"{place}: {ast.unparse(node)}")
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        shape.lengths[f"{place} {node.name}"] = node.end_lineno - node.lineno + 1
        shape.complexity[f"{place} {node.name}"] = complexity(node)
    elif isinstance(node, ast.ClassDef):
        shape.classes[node.name].append(place)


def two_meanings(shape: Shape) -> dict[str, list[str]]:
    """Return the class names that stand in more than one place."""
    return {name: places for name, places in sorted(shape.classes.items()) if len(places) > 1}


# ---------------------------------------------------------------- files that import one another


def imports(root: Path, folders: Iterable[str]) -> dict[str, set[str]]:
    """Return {file: the files of this tree that it imports when it is loaded}.

    What a function imports comes later.
    """
    files = python_files(root, folders)
    names = {_module(path.relative_to(root)): str(path.relative_to(root)) for path in files}
    return {names[_module(path.relative_to(root))]: set(_imported(path, root, names)) for path in files}


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    parts = parts if parts[0] == "mpitrain" else ("mpitrain", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path, root: Path, names: dict[str, str]) -> Iterator[str]:
    for node in _at_load(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            asked = [alias.name for alias in node.names]
        else:
            package = _module(path.relative_to(root)).split(".")[: -node.level] if node.level else []
            module = ".".join([*package, *filter(None, [node.module])])
            inner = [f"{module}.{alias.name}" for alias in node.names]
            asked = [name if name in names else module for name in inner]
        yield from (names[name] for name in asked if name in names)


def _at_load(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports outside of functions and of `if TYPE_CHECKING`."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += ast.iter_child_nodes(node)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of files each of which is reached from the others (Tarjan, Depth-First
    Search, 1972).
    """
    order = {}
    low = {}
    path = []
    found = []

    def visit(file: str) -> None:
        order[file] = low[file] = len(order)
        path.append(file)
        for other in graph[file]:
            if other not in order:
                visit(other)
            if other in path:
                low[file] = min(low[file], low[other])
        if low[file] == order[file]:
            group = path[path.index(file) :]
            del path[path.index(file) :]
            if len(group) > 1:
                found.append(sorted(group))

    for file in graph:
        if file not in order:
            visit(file)
    return found


def twins(root: Path, folders: Iterable[str]) -> dict[str, list[str]]:
    """Return the file names that stand in more than one folder."""
    places = defaultdict(list)
    for path in python_files(root, folders):
        if path.name not in NAMED_BY_PYTHON:
            places[path.name].append(str(path.parent.relative_to(root)))
    return {name: folders for name, folders in sorted(places.items()) if len(folders) > 1}


# ---------------------------------------------------------------- the table


def percent(part: list, whole: int) -> str:
    return f"{100 * len(part) / max(1, whole):.1f} %"


def rows(root: Path, folders: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the lines of the table: what is counted, and the count."""
    shape = measure(root, folders)
    lengths = sorted(shape.lengths.values()) or [0]
    yield "lines", f"{shape.num_lines:,}"
    yield f"lines over {TOO_LONG} characters", percent(shape.too_long_lines, shape.num_lines)
    yield f"lines over {LONG} characters", percent(shape.long_lines, shape.num_lines)
    yield "statements that assign a tuple to a tuple", percent(shape.tuples, shape.num_statements)
    yield "conditional expressions, of statements", percent(shape.conditionals, shape.num_statements)
    ninth = lengths[int(0.9 * (len(lengths) - 1))]
    yield (
        "lines of a function: median, p90, longest",
        f"{statistics.median(lengths):.0f}, {ninth}, {lengths[-1]}",
    )
    yield (
        f"functions over {LONGEST_FUNCTION} lines",
        str(sum(length > LONGEST_FUNCTION for length in lengths)),
    )
    complexities = list(shape.complexity.values()) or [0]
    over = sum(count > MOST_COMPLEX for count in complexities)
    yield f"complexity: highest, functions over {MOST_COMPLEX}", f"{max(complexities)}, {over}"
    yield "class names with two meanings", str(len(two_meanings(shape)))
    yield "circles of files", str(len(circles(imports(root, folders))))
    found = twins(root, folders)
    yield "file names in two folders, unexplained", f"{len(found)}, {len(found.keys() - TWINS.keys())}"


def listed(kind: str, root: Path, folders: Iterable[str]) -> Iterator[str]:
    """Yield each place of one kind, the worst first where there is a worst."""
    shape = measure(root, folders)
    if kind == "lines":
        yield from shape.too_long_lines
    elif kind == "tuples":
        yield from shape.tuples
    elif kind in ("functions", "complexity"):
        counts, limit = (
            (shape.lengths, LONGEST_FUNCTION) if kind == "functions" else (shape.complexity, MOST_COMPLEX)
        )
        for name, count in sorted(counts.items(), key=lambda each: -each[1]):
            if count > limit:
                yield f"{count:4} {name}"
    elif kind == "classes":
        yield from (f"{name}: {', '.join(places)}" for name, places in two_meanings(shape).items())
    elif kind == "circles":
        yield from (" <-> ".join(group) for group in circles(imports(root, folders)))
    else:
        for name, places in twins(root, folders).items():
            yield f"{name}: {', '.join(places)}: {TWINS.get(name, 'unexplained')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path, nargs="?", default=ROOT)
    kinds = ("lines", "tuples", "functions", "complexity", "classes", "circles", "twins")
    parser.add_argument("--list", choices=kinds)
    given = parser.parse_args()
    root = given.root.resolve()
    if given.list:
        print(*listed(given.list, root, CODE), sep="\n")
        return
    print(f"{'':50}{'code':>14}{'tests':>14}")
    for (what, code), (_, others) in zip(rows(root, CODE), rows(root, OTHER_CODE), strict=True):
        print(f"{what:50}{code:>14}{others:>14}")


if __name__ == "__main__":
    main()
