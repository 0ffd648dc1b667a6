"""`mpitrain report`: a page of one run or several."""

from collections.abc import Callable

from mpitrain.commands.output_file import require_file, write
from mpitrain.errors import DONE, ConfigError
from mpitrain.inputs import shown
from mpitrain.report.recorded_run import read_run

MOST_RUNS = 100


def main(paths: tuple[str, ...], out: str, over: str, say: Callable[[str], None]) -> int:
    """Write the page and say where; return 0. Raises InputError."""
    require_file("--out", out, (".html", ".htm"))
    if len(paths) > MOST_RUNS:
        raise ConfigError(f"found {len(paths)} runs; needed {MOST_RUNS} at most")
    try:
        from mpitrain.report.page import page
    except ImportError:
        raise ConfigError(f"--out {shown(out)}: a page needs bokeh; pip install 'mpitrain[report]'") from None
    content = page([read_run(path) for path in paths], over).encode(errors="replace")
    write("--out", out, content)
    say(f"{shown(out)}: {len(content) / 1e6:.1f} MB; open it in a browser")
    return DONE
