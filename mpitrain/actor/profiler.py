"""torch's profiler on one rank: what it records stands under the instructions of the program.

On a GPU, NVTX ranges of the same names are open meanwhile: other profilers show those.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from mpitrain.actor.profile_events import ProfilerOutput, RankProfile, rank_profile
from mpitrain.inputs import read_file
from mpitrain.schedules.actions import Action

UNNAMED = nullcontext()
MOST_BYTES = 1 << 33  # of what torch writes: more doesn't fit in memory


class Profiler:
    """Records operators and kernels of this process, from start() to stop(). device: whose kernels."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._profile: profile | None = None
        self._instructions = dict[str, tuple[Action, ...]]()
        self._steps = set[str]()

    @property
    def running(self) -> bool:
        return self._profile is not None

    def warm_up(self) -> None:
        """Load what a first profile loads, which takes seconds."""
        with self._make():
            pass

    def start(self) -> None:
        """Begin a profile; one that is running is dropped."""
        self.drop()
        self._instructions.clear()
        self._steps.clear()
        self._profile = self._make()
        self._profile.start()
        # one moment on two clocks: the profiler's, and the one that ranks compare
        self._unix_ns, self._start_s = time.time_ns(), time.perf_counter()

    def drop(self) -> None:
        """End a profile that nobody needs, if one is running."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def instruction(self, *actions: Action) -> AbstractContextManager:
        """Name what is recorded within: an instruction, or the two of a pair."""
        if self._profile is None:
            return UNNAMED
        name = " + ".join(map(str, actions))
        self._instructions[name] = actions
        return self._range(name)

    def step(self, step: int) -> AbstractContextManager:
        """Name what is recorded within, a step."""
        if self._profile is None:
            return UNNAMED
        self._steps.add(f"step {step}")
        return self._range(f"step {step}")

    def stop(self, title: str, replica: int, clock_offset_s: float) -> RankProfile:
        """End the profile, and return what it holds.

        clock_offset_s: what leads from this rank's time.perf_counter() to rank 0's.
        Raises OSError.
        """
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "profile.json")
            self._profile.export_chrome_trace(path)
            self._profile = None
            content = json.loads(read_file(path, MOST_BYTES).decode(errors="replace"))
        base_ns = content.get("baseTimeNanoseconds", 0)
        shift_us = (self._start_s + clock_offset_s) * 1e6 - (self._unix_ns - base_ns) / 1e3
        recorded = ProfilerOutput(content["traceEvents"], self._instructions, self._steps, shift_us)
        return rank_profile(recorded, title, replica)

    def _make(self) -> profile:
        return profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._on_gpu)

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(record_function(name))
            if self._on_gpu:
                stack.enter_context(torch.cuda.nvtx.range(name))
            yield
