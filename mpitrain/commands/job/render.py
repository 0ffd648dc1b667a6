"""`mpitrain job slurm|pbs|lsf|flux|kubernetes`.

Write the script of a job, say what it will do, and submit it if that is wanted.
"""

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from mpitrain import config as settings
from mpitrain.commands.declared_options import MOST_RANKS
from mpitrain.commands.inspect import judged_job
from mpitrain.commands.job.schedulers import SCHEDULERS, Scheduler
from mpitrain.commands.output_file import refuse_file_of_a_run
from mpitrain.commands.requests import JobRequest
from mpitrain.errors import ConfigError, MpitrainError, counted
from mpitrain.inputs import (
    as_argument,
    is_one_line,
    is_there,
    os_errors_as,
    read_file,
    require_file,
    shown,
    write_regular,
)
from mpitrain.plan.plan import Plan

LOGS = "run.logs=true"  # a job's ranks write where they can be read later
MOST_BYTES = 1 << 24  # of a script that is there already
SEAL = "# Digest of the lines above; while it fits, `mpitrain job` replaces this script: "
WRITTEN = "Written by `mpitrain job`, to train"
MOST_NAME = 40  # characters; Kubernetes takes 63, with what it appends


def main(kind: str, asked: JobRequest, say: Callable[[str], None]) -> int:
    """Write the script, unless its ranks can't run the configuration; explain it, and submit it."""
    scheduler = SCHEDULERS[kind]
    _ = asked.seconds  # refused before anything else
    path = Path(asked.out or f"{_name(asked.config)}.{kind}{Path(scheduler.template).suffix}")
    _require_lines(asked, path)
    _require_spares(scheduler, asked)
    _require_fault_tolerance(scheduler, asked)
    seen = _seen_by_ranks(asked.config) if scheduler.mount else asked.config
    nodes, per_node = asked.nodes, asked.ranks_per_node
    if asked.ranks > MOST_RANKS:
        product = f"--nodes {nodes:,} x --ranks-per-node {per_node:,} = {asked.ranks:,} ranks"
        raise ConfigError(f"{product}, needed at most {MOST_RANKS:,}")
    plan, said = judged_job(asked.config, asked.overrides, nodes, per_node, bool(asked.gpus))
    if asked.submit and shutil.which(scheduler.submit[0]) is None:
        raise ConfigError(
            f"--submit: found no {scheduler.submit[0]} on the path; leave it out, and submit the "
            "script on a login node of the cluster"
        )
    _write(path, render(scheduler, seen, asked, path), asked.force)
    say("\n".join([explain(scheduler, plan, asked, path), *said]))
    return _submit(scheduler, path) if asked.submit else 0


def _require_spares(scheduler: Scheduler, asked: JobRequest) -> None:
    """Raise ConfigError for spare nodes where nothing starts ranks on others of the job's nodes."""
    launch = (asked.launch or scheduler.launch(asked)).split()
    if not asked.spare:
        return
    if not scheduler.spare:
        raise ConfigError(
            f"--spare {asked.spare}: found {scheduler.title}, needed Slurm, whose srun starts "
            "ranks on chosen nodes; leave it out"
        )
    if launch[:1] != ["srun"]:
        raise ConfigError(
            f"--spare {asked.spare} with --launch {shown(asked.launch)}: needed srun, which starts "
            "ranks on chosen nodes"
        )


def _require_fault_tolerance(scheduler: Scheduler, asked: JobRequest) -> None:
    """Raise ConfigError for spare ranks where the launcher ends the job when a rank dies.

    Under srun Open MPI doesn't survive a death: https://docs.open-mpi.org/en/v5.0.x/features/ulfm.html
    """
    spares = settings.load(asked.config, asked.overrides).recovery.spares
    launch = asked.launch or scheduler.launch(asked)
    if spares and "--with-ft" not in launch.split():
        raise ConfigError(
            f"recovery.spares = {spares} with --launch {shown(launch)}: needed Open MPI's own mpirun with "
            "fault tolerance; use --launch 'mpirun --with-ft ulfm', or --spare nodes in place of spare ranks"
        )


def render(scheduler: Scheduler, config: str | None, asked: JobRequest, path: Path) -> str:
    """Return the script, for a file at `path`. config: as the ranks see it."""
    mount = scheduler.mount
    sets = [word for override in (LOGS, *asked.overrides) for word in ("--set", override)]
    text = template(scheduler.template)
    is_own = not mount and sys.prefix != sys.base_prefix  # a virtual environment has written the script
    environment = [f"PATH={shlex.quote(sys.prefix)}/bin:$PATH"] if is_own else []
    values = {
        "written": f"{WRITTEN} {config or 'the quickstart'}; yours to change.",
        "script": shlex.quote(str(path if mount else path.absolute())),
        "name": _name(config),
        "nodes": str(asked.nodes),
        "all_nodes": str(asked.nodes + asked.spare),
        "supervisor": asked.supervisor,
        "ranks": str(asked.ranks),
        "ranks_per_node": str(asked.ranks_per_node),
        "cores": str(asked.cores),
        "cores_per_node": str(asked.cores * asked.ranks_per_node),
        "all_cores": str(asked.cores * asked.ranks),
        "seconds": str(asked.seconds),
        "minutes": str(-(-asked.seconds // 60)),
        "time": scheduler.time(asked.seconds),
        "gpus": scheduler.gpus(asked),
        "image": _as_yaml(asked.image),
        "claim": _as_yaml(asked.claim),
        "mpi": asked.mpi,
        "mount": mount,
        "config": config or "the folder runs/",
        "most": str(asked.most),
        "folder": mount or shlex.quote(str(Path.cwd())),
        "launch": asked.launch or scheduler.launch(asked),
        "arguments": " ".join([*([as_argument(config)] if config else []), shlex.join(sets)]),
        "directives": "\n".join(scheduler.lines(asked)),
        "setup": "\n".join([*environment, *asked.setup]),
    }
    filled = _fill(_fill(text, {"body": template("body.sh").rstrip()}), values)
    return f"{filled}{SEAL}{_digest(filled)}\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_of_before(content: bytes, script: str) -> bool:
    """Return whether this command wrote what is there, for the same configuration and any options.

    Names of several configurations may lead to one name of a script.
    """
    lines, _, digest = content.decode(errors="replace").rpartition(SEAL)
    return digest.strip() == _digest(lines) and _written_line(lines) == _written_line(script)


def _written_line(script: str) -> str:
    return next((line for line in script.splitlines() if WRITTEN in line), "")


def _seen_by_ranks(config: str | None) -> str | None:
    """Return a configuration's name in the working directory, all that pods see of this host."""
    if config is None:
        return None
    try:
        name = str(Path(config).resolve().relative_to(Path.cwd().resolve()))
    except ValueError:
        raise ConfigError(
            f"CONFIG {shown(config)}: the pods see the working directory alone, as a volume; "
            f"needed a file in or below {shown(Path.cwd())}"
        ) from None
    return f"./{name}" if name.startswith("-") else name  # else it would be an option


def _as_yaml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _require_lines(asked: JobRequest, path: Path) -> None:
    """Raise ConfigError for text with a line break: what follows would be a command of the script."""
    options = [
        (f"--{name}", getattr(asked, name)) for name in ("account", "queue", "launch", "image", "claim")
    ]
    options += [("--setup", line) for line in asked.setup]
    options += [("--set", override) for override in asked.overrides]
    options += [("--directive", line) for line in asked.directive]
    for name, text in options:
        if not text.isprintable():
            raise ConfigError(
                f"{name} {shown(text)}: needed one line that can be printed; give several with an option each"
            )
    places = {
        "CONFIG": asked.config or "",
        "--out": path.name,
        "the folder of the script": str(path.absolute().parent),
        "the working directory": str(Path.cwd()),
        "the folder of Python": sys.prefix,
    }
    for name, text in places.items():
        if not is_one_line(text):
            where = f"{name} {shown(text)}: found a line break, or another character that controls a terminal"
            raise ConfigError(f"{where}; the script would run what follows it: rename it")


def template(name: str) -> str:
    """Return a template of jobs/, which is installed beside the code."""
    return resources.files("mpitrain.jobs").joinpath(name).read_text(encoding="utf-8")


def _fill(text: str, values: dict[str, str]) -> str:
    """Fill in what is between @.

    A value of several lines is indented as its place is, and a line that comes to nothing goes.
    """
    lines = []
    for line in text.splitlines():
        filled = re.sub("@([a-z_]+)@", lambda match: values.get(match[1], match[0]), line)
        if not (line.strip() and not filled.strip()):
            indent = line[: len(line) - len(line.lstrip())]
            lines += [indent * bool(number and part) + part for number, part in enumerate(filled.split("\n"))]
    return "\n".join(lines) + "\n"


def _name(config: str | None) -> str:
    """Return the name of the job: that of the configuration, in letters that every scheduler takes."""
    name = re.sub("[^a-z0-9]+", "-", Path(config).stem.lower() if config else "quickstart").strip("-")[
        :MOST_NAME
    ]
    return name if name[:1].isalpha() else f"run-{name}".rstrip("-")


def _write(path: Path, script: str, force: bool) -> None:
    """Write the script, but not over an edited one, or another configuration's, unless `force`."""
    content = script.encode()
    with os_errors_as(ConfigError, shown(path), "choose another name with --out"):
        if not is_there(path):
            with open(path, "xb") as file:
                file.write(content)
            return
        if not force and not _is_of_before(read_file(path, MOST_BYTES), script):
            raise ConfigError(
                f"{shown(path)} is there, and was edited, or written for another configuration or "
                "by something else; choose another name with --out, or replace it with --force"
            )
        refuse_file_of_a_run("--out", path)
        require_file(path, MOST_BYTES)
        write_regular(path, content)


def explain(scheduler: Scheduler, plan: Plan, asked: JobRequest, path: Path) -> str:
    """Return what the job will do, and the commands that belong to it."""
    run = plan.config.run
    every = f"a checkpoint every {run.save_every}" if run.save_every else "a checkpoint at the end"
    spare = plan.run_config.recovery.spares
    rows = {
        "ranks": f"{counted(asked.nodes, 'nodes')} x {asked.ranks_per_node} = {asked.ranks}"
        + f", {spare} of them spare" * bool(spare)
        + f", started by {asked.launch or scheduler.launch(asked)}",
        "layout": f"{plan.axes.grid}; {plan.config.pipeline.schedule}",
        "run": f"{shown(run.dir)}: {counted(run.steps, 'steps', ',')}, {every}",
        "time": f"{scheduler.time(asked.seconds)} per allocation; the run stops with a checkpoint before "
        "its end (run.time_margin_s)",
        "restarts": f"until the run is done: at most {counted(asked.most, 'starts')}, and none "
        "after 3 in a row without a newer checkpoint",
        "console": scheduler.console.format(name=_name(asked.config))
        + f"; each rank also in {shown(run.dir)}/logs/",
        "submit": f"{' '.join(scheduler.submit)} {as_argument(path)}",
        "watch": scheduler.watch,
        "requeue": f"{scheduler.leave}: the run stops with a checkpoint, and the job resubmits itself",
    }
    if asked.spare:
        spares = f"{counted(asked.spare, 'nodes')} more"
        rows["spares"] = (
            f"{spares}: a lost node is excluded, and the run restarts at once on {asked.nodes} that answer"
        )
    if scheduler.mount:
        rows["volume"] = (
            f"{asked.claim} holds what is in {shown(Path.cwd())}; pods see it as {scheduler.mount}"
        )
    if scheduler.mount and (absolute := _absolute_paths(plan)):
        rows["paths"] = f"{', '.join(absolute)}: needed in the pods, too"
    if ignored := scheduler.ignored(asked):
        rows["left out"] = (
            f"{', '.join(f'--{name}' for name in ignored)}: {scheduler.title.partition(',')[0]} has none"
        )
    return f"{shown(path)}: a job for {scheduler.title}\n" + "\n".join(
        f"  {key:10}{value}" for key, value in rows.items()
    )


def _absolute_paths(plan: Plan) -> list[str]:
    values = settings.flatten(plan.config)
    paths = {key: values[key] for key in ("run.dir", "data.path", "data.tokenizer", "model.init")}
    return [f"{key} = {shown(path)}" for key, path in paths.items() if path and Path(path).is_absolute()]


def _submit(scheduler: Scheduler, path: Path) -> int:
    """Give the script to the scheduler. Raises MpitrainError if that refuses it."""
    *command, last = scheduler.submit
    by_input = last == "<"
    file = f"./{path}" if str(path).startswith("-") else str(path)  # no option of the scheduler
    words = command if by_input else [*scheduler.submit, file]
    with path.open("rb") as script:
        code = subprocess.run(words, stdin=script if by_input else subprocess.DEVNULL, check=False).returncode
    if code:
        raise MpitrainError(
            f"{' '.join(scheduler.submit)} {path} ended with exit code {code}; see its message above"
        )
    return 0
