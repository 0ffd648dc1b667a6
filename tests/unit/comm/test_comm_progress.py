"""Waits and their limit."""

import time
from types import SimpleNamespace

import pytest


class Slow:
    """An operation of which each look takes some seconds, and that is over after some looks."""

    what = "a message"
    expected = ("", -1)

    def __init__(self, seconds, looks):
        self.seconds = seconds
        self.looks = looks
        self.account = SimpleNamespace(blocked=lambda begin, end: None)

    def test(self):
        time.sleep(self.seconds)
        self.looks -= 1
        return self.looks <= 0

    def foremost(self):
        return self

    def waiting_on(self):
        return ()


def test_a_job_that_was_suspended_has_not_waited_meanwhile(monkeypatch):
    from mpitrain.comm import progress
    from mpitrain.errors import HangError

    monkeypatch.setattr(progress, "STOOD_STILL_S", 0.5)
    waiting = progress.Progress(timeout_s=0.4)
    waiting._until_done(Slow(1.0, looks=2))  # the process stood still in the first
    with pytest.raises(HangError, match="for a message"):
        waiting._until_done(Slow(0.1, looks=20))
