"""Pages of runs under way: what is new is shown within two seconds, and hostile requests get nothing."""

import json
import os
import shutil
import socket
import threading
import time
import urllib.request
from contextlib import suppress

import pytest
from folders import ROOT

from mpitrain.report import live
from mpitrain.report.live import LiveRuns, PageServer
from mpitrain.report.recorded_run import RunReader
from mpitrain.report.tables import tables

GOLDEN = ROOT / "tests/golden/run-form-1"
TOKEN = "t" * 32
SECRET = "what lies beside the run"


def shown(runs, over, version):
    losses = [list(run.steps.columns.get("loss", ())) for run in runs]
    return json.dumps({"losses": losses, "tables": tables(runs), "version": version})


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(GOLDEN / "config.toml", folder)
    (tmp_path / "secret").write_text(SECRET)
    (folder / "notes").write_text(SECRET)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 4}\n')
    return folder


@pytest.fixture
def server(run, monkeypatch):
    monkeypatch.setattr(live, "ASKED_S", 0.5)
    runs = LiveRuns([RunReader(str(run))], "step", shown, shown)
    with PageServer("127.0.0.1", 0, TOKEN, runs) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def answer(server, request, seconds=5.0):
    """Send bytes and return all that comes."""
    with socket.create_connection(server.server_address, seconds) as client:
        try:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: client.recv(1 << 16), b""))
        except ConnectionError:
            return b""


def get(server, place):
    return answer(server, f"GET {place} HTTP/1.0\r\n\r\n".encode())


HOSTILE = [
    "/", f"/{TOKEN}", f"/{TOKEN[:-1]}/", f"/{TOKEN}x/", f"/{TOKEN.upper()}/", f"/{TOKEN}/../",
    f"/{TOKEN}/notes", f"/{TOKEN}/config.toml", f"/{TOKEN}/../secret", f"/{TOKEN}/%2e%2e/secret",
    f"/{TOKEN}/..%2fsecret", f"/{TOKEN}//etc/passwd", f"/{TOKEN}/state/../../secret", f"/{TOKEN}/state%00",
    f"/{TOKEN}/?x", f"http://127.0.0.1/{TOKEN}/", f"/{TOKEN}/\\..\\secret", "*", "/" + "x" * 60_000,
    f"/{TOKEN}/" + "../" * 900 + "etc/passwd",
]  # fmt: skip
METHODS = ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "CONNECT", "TRACE", "PATCH", "get", "G" * 9000]
MALFORMED = [
    b"", b"\r\n\r\n", b"\0" * 4096, b"GET\r\n\r\n", f"GET /{TOKEN}/ HTTP/9.9\r\n\r\n".encode(),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 50,
    b"GET / HTTP/1.0\r\nA: " + b"b" * 70_000 + b"\r\n\r\n",
    b"GET / HTTP/1.0\r\n" + b"A: b\r\n" * 500 + b"\r\n", b"GET " + b"\xff" * 500 + b" HTTP/1.0\r\n\r\n",
]  # fmt: skip


def test_hostile_requests_get_nothing_and_the_server_stays(server, run):
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*")}
    requests = [f"GET {place} HTTP/1.0\r\n\r\n".encode() for place in HOSTILE]
    requests += [
        f"{method} /{TOKEN}/ HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello".encode() for method in METHODS
    ]
    for request in [*requests, *MALFORMED]:
        got = answer(server, request)
        assert b" 200 " not in got and b"loss" not in got and SECRET.encode() not in got, (request[:99], got)
    assert get(server, f"/{TOKEN}/").startswith(b"HTTP/1.0 200 ")
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*")} == before


def test_slow_clients_and_floods_end_and_others_are_answered(server):
    slow = [socket.create_connection(server.server_address) for _ in range(live.MOST_CLIENTS)]
    try:
        begin = time.monotonic()
        while time.monotonic() - begin < 3 * live.ASKED_S:  # a byte now and then keeps nobody
            for client in slow:
                with suppress(OSError):
                    client.send(b"G")
            time.sleep(0.1)
        threads = [threading.Thread(target=get, args=(server, "/x")) for _ in range(60)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert b" 200 " in get(server, f"/{TOKEN}/state")
    finally:
        for client in slow:
            client.close()


def test_what_is_new_is_shown_within_two_seconds(server, run):
    address = f"http://127.0.0.1:{server.server_port}/{TOKEN}/state"
    for number in (2, 3, 4):
        with open(run / "metrics.jsonl", "a") as file:
            file.write(f'{{"step": {number}, "loss": {number}}}\n')
        begin = time.monotonic()
        state = {"losses": [[]]}
        while state["losses"][0][-1:] != [number]:
            assert time.monotonic() - begin < 2
            time.sleep(0.05)
            state = json.load(urllib.request.urlopen(address))
    unchanged = urllib.request.Request(address, headers={"If-None-Match": state["version"]})
    with pytest.raises(urllib.error.HTTPError, match="304"):
        urllib.request.urlopen(unchanged)
    os.rename(run, run.with_name("gone"))
    time.sleep(live.LOOK_S)
    assert b" 200 " in get(server, f"/{TOKEN}/state")
