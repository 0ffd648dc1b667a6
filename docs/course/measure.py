"""Make the tables, programs and pictures of the course again.

    python docs/course/measure.py [PAGE ...]

Writes docs/course/measured/PAGE/: what the pages include. Without a PAGE: all of them, in some 15
minutes on 2 cores. Every number of the course comes out of this program. Needs the extras mpich (or
openmpi) and test.
"""

import importlib
import sys
import tempfile
import time
from pathlib import Path

import click
from measuring.report import PAGES, Report

COURSE = Path(__file__).resolve().parent


@click.command(help=__doc__)
@click.argument("pages", nargs=-1, type=click.Choice(PAGES))
def main(pages: tuple[str, ...]) -> None:
    """Measure each page in a folder of its own, as a user in the root of a clone would."""
    for name in pages or PAGES:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="course-") as folder:
            report = Report(COURSE, name, Path(folder))
            importlib.import_module(f"measuring.pages.{name}").measure(report)
        click.echo(f"{name}: {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
