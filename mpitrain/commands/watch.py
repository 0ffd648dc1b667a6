"""`mpitrain watch`: runs under way, on a page of this host or in the terminal."""

import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from mpitrain.errors import DONE, ConfigError
from mpitrain.inputs import shown
from mpitrain.report.live import LiveRuns, PageServer
from mpitrain.report.recorded_run import RunReader

LOOPBACK = ("127.0.0.1", "::1", "localhost")
TOKEN_BYTES = 24


def serve(paths: Sequence[str], over: str, host: str, port: int, say: Callable[[str], None]) -> int:
    """Serve the page of some runs until Ctrl-C; return 0. Raises InputError."""
    try:
        from mpitrain.report.page import page, state
    except ImportError:
        instead = "or give --terminal"
        raise ConfigError(f"a page needs bokeh; pip install 'mpitrain[report]', {instead}") from None
    token = secrets.token_urlsafe(TOKEN_BYTES)
    readers = [RunReader(path) for path in paths]
    try:
        server = PageServer(host, port, token, LiveRuns(readers, over, page, state))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        asked = f"--host {shown(host)} --port {port}"
        raise ConfigError(f"{asked}: {why}; give another --host or --port") from None
    place = f"[{host}]" if ":" in host else host
    say(f"http://{place}:{server.server_port}/{token}/ in a browser; Ctrl-C ends it")
    if host not in LOOPBACK:
        say(f"--host {shown(host)}: anyone with this address can see the run, and it isn't encrypted")
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()
    return DONE


def show(paths: Sequence[str], over: str) -> int:
    """Draw runs in the terminal until Ctrl-C, elsewhere once; return 0. Raises InputError."""
    from rich.console import Console
    from rich.live import Live

    from mpitrain.report.terminal import screen

    readers = [RunReader(path) for path in paths]
    console = Console(highlight=False)
    plain = "utf" not in (sys.stdout.encoding or "").lower()

    def drawn() -> object:
        runs = [reader.read() for reader in readers]
        return screen(runs, over, console.width, console.height, plain)

    if not console.is_terminal:
        console.print(drawn())
        return DONE
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(drawn(), refresh=True)
            time.sleep(1)
    return DONE
