"""`mpitrain import` and `mpitrain export`: a Hugging Face folder as a run, and a step as such a folder."""

from collections.abc import Callable
from pathlib import Path

from mpitrain.cluster.team import Team
from mpitrain.errors import DONE
from mpitrain.inputs import as_argument, listed, shown
from mpitrain.weights.card import table
from mpitrain.weights.exporting import ExportOptions, export
from mpitrain.weights.folder import CONFIG, ModelFolder
from mpitrain.weights.importing import Imported, digest_line, import_weights, read_model, target_of
from mpitrain.weights.matching import tensors_of


def import_folder(
    team: Team, path: str, target: str, overrides: tuple[str, ...], say: Callable[[str], None]
) -> int:
    """Import a folder, say what it holds and what was made, and return 0. Collective."""
    place = team.on_first_rank("looking at --to", lambda: target_of(target))
    with team.on_every_rank("opening the folder", lambda: ModelFolder(path)) as folder:
        model = read_model(team, folder, place, overrides)
        if team.rank == 0:
            for line in (f"{folder.where(CONFIG)}:", *(f"  {line}" for line in model.read.lines)):
                say(line)
        imported = import_weights(team, folder, model, place)
        if team.rank == 0:
            say(_summary(folder, imported))
    return DONE


def _summary(folder: ModelFolder, imported: Imported) -> str:
    model, where, came, seconds = imported
    matched = model.matched
    tensors = tensors_of(matched.weights)
    read = sum(folder.entry(name).num_bytes for name in tensors)
    parameters = sum(weight.spec.numel for weight in matched.weights)
    lines = [
        f"{len(tensors):,} tensors, {parameters:,} parameters, {read:,} bytes read in {seconds:.1f} s "
        f"({read / 1e6 / seconds:,.0f} MB/s); {digest_line(matched, where)}"
    ]
    if matched.ignored:
        lines.append(f"ignored: {len(matched.ignored):,} tensors that are not part of the model")
    if matched.absent:
        absent = [weight.tensors[0] for weight in matched.absent]
        lines.append(f"missing, set to 0: {listed(absent, 2)}")
    if where.run is None:
        return "\n".join([*lines, f"step {where.step} is in {shown(where.checkpoints)}"])
    if came:
        lines.append(f"also copied: {', '.join(came)}, in {shown(where.run.came_along)}")
    run = as_argument(where.run.config)
    return "\n".join([*lines, f"done: step 0 of {shown(where.run.path)}; train it: mpitrain run {run}"])


def export_step(
    team: Team, path: str, target: str, options: ExportOptions, say: Callable[[str], None]
) -> int:
    """Export a step, say what was proved, and return 0. Collective."""
    exported = export(team, path, target, options)
    if team.rank == 0:
        say(f"step {exported.step} is in {shown(Path(target))}, read back and equal:\n{table(exported.rows)}")
        if exported.warning:
            say(exported.warning)
        if names := exported.left_out:
            say(f"left out: {len(names)} weights of multi-token prediction, such as {names[0]}")
    return DONE
