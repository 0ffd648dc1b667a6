"""What a run says at its end of predictions, and what it writes of them (`mpitrain run --calibrate`)."""

from datetime import date

from mpitrain.comm.base.world import World
from mpitrain.commands.plan.after_run import compare
from mpitrain.commands.plan.calibrate import calibrate
from mpitrain.commands.plan.calibration_file import CalibrationFile
from mpitrain.training.measured_run import Compare, MeasuredRun


def comparison(path: str | None, machine: str, world: World) -> Compare:
    """Return what makes the table at the end, and calibrates a machine's file if one is named.

    machine: run.machine. Raises ConfigError, alike on all ranks, for a file that a run must not
    write.
    Collective over all ranks.
    """
    if path is None:
        return compare
    file = world.on_first_rank("looking at --calibrate", lambda: CalibrationFile.require(path, machine))

    def compare_and_calibrate(run: MeasuredRun) -> str:
        return "\n".join(filter(None, [compare(run), calibrate(run, file, date.today())]))

    return compare_and_calibrate
