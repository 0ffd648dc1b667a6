"""`mpitrain report` and `mpitrain plot`: a page, or a picture, of one run or several."""

from collections.abc import Callable, Sequence
from pathlib import Path

from mpitrain.commands.output_file import PICTURES, require_file, write
from mpitrain.errors import DONE, ConfigError
from mpitrain.inputs import printable, shown
from mpitrain.report.curves import BY_COLUMN, Curve
from mpitrain.report.recorded_run import RecordedRun, read_run

MOST_RUNS = 100


def main(paths: tuple[str, ...], out: str, over: str, say: Callable[[str], None]) -> int:
    """Write the page and say where; return 0. Raises InputError."""
    require_file("--out", out, (".html", ".htm"))
    runs = _read(paths)  # what is no run is refused before a page is loaded
    try:
        from mpitrain.report.page import page
    except ImportError:
        raise ConfigError(f"--out {shown(out)}: a page needs bokeh; pip install 'mpitrain[report]'") from None
    content = page(runs, over).encode(errors="replace")
    write("--out", out, content)
    say(f"{shown(out)}: {len(content) / 1e6:.2g} MB; open it in a browser")
    return DONE


def plot(
    paths: tuple[str, ...], out: str, names: Sequence[str], over: str, say: Callable[[str], None]
) -> int:
    """Draw curves into a picture and say where; return 0. Raises InputError."""
    require_file("--out", out, PICTURES, instead="look at the curves by mpitrain report")
    unknown = [name for name in names if name not in BY_COLUMN and "/" not in name]
    if unknown:
        raise ConfigError(
            f"--curve {shown(unknown[0])}: found no such curve; give one of {', '.join(BY_COLUMN)}"
        )
    from mpitrain.report.paper_picture import draw

    curves = [BY_COLUMN.get(name) or Curve(printable(name), name) for name in dict.fromkeys(names)]
    try:
        content = draw(_read(paths), curves, over, Path(out).suffix[1:])
    except ValueError as error:
        raise ConfigError(f"{', '.join(map(shown, paths))}: {error}; give another --curve") from None
    write("--out", out, content)
    say(f"{shown(out)}: {', '.join(curve.column for curve in curves)} over {over}")
    return DONE


def _read(paths: Sequence[str]) -> list[RecordedRun]:
    if len(paths) > MOST_RUNS:
        raise ConfigError(f"found {len(paths)} runs; needed {MOST_RUNS} at most")
    return [read_run(path) for path in paths]
