"""run.profile: operators and kernels of some steps and ranks, under the instructions they belong to."""

import json
import re

import pytest
from conftest import LONG
from launch import loss_lines, run_commands, tail, tiny, write_text

from mpitrain.actor.profile_events import OUTSIDE, Cost, Operation, ProfilerOutput, merged, rank_profile
from mpitrain.errors import ConfigError
from mpitrain.plan.settings.profile_request import ProfileRequest
from mpitrain.schedules.actions import RECV_F, SEND_F, B, F
from mpitrain.training.profiling import table


@pytest.mark.parametrize(
    ("text", "steps", "ranks"),
    [
        ("steps=20-22, ranks=0,5", range(20, 23), (0, 5)),
        (" steps = 7 ", range(7, 8), (0,)),
        ("steps=1-1,ranks=3, 1,3", range(1, 2), (1, 3)),
    ],
)
def test_a_request_is_read(text, steps, ranks):
    assert ProfileRequest.read(text) == ProfileRequest(steps, ranks)


def test_nothing_is_asked_for():
    assert ProfileRequest.read("") is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("steps=22-20", "found steps 22 to 20"),
        ("steps=0", "found steps 0 to 0"),
        ("steps=two", "needed steps"),
        ("ranks=0", "needed steps"),
        ("steps=3, ranks=", "needed steps"),
        ("steps=3, ranks=0,,1", "needed steps"),
        ("steps=3, ranks=a", "needed steps"),
        ("steps=3 ranks=1", "needed steps"),
        ("20-22", "needed steps"),
    ],
)
def test_what_is_no_request_is_refused(text, found):
    with pytest.raises(ConfigError, match=rf"run\.profile = .*{found}"):
        ProfileRequest.read(text)


def span(category: str, name: str, begin: float, end: float, tid: int = 1, pid: int = 900, **args) -> dict:
    return dict(ph="X", cat=category, name=name, pid=pid, tid=tid, ts=begin, dur=end - begin, args=args)


FORWARD, BACKWARD = F(0, 0), B(0, 0)
INSTRUCTIONS = {"F0@0": (FORWARD,), "B0@0": (BACKWARD,)}
HOST = [
    span("user_annotation", "step 3", 0, 100),
    span("user_annotation", "F0@0", 10, 40),
    span("cpu_op", "aten::matmul", 12, 32),
    span("cpu_op", "aten::mm", 14, 30),
    span("user_annotation", "B0@0", 50, 90),
    # the thread of the backward
    span("cpu_op", "aten::mm", 60, 80, tid=2),
    # a validation
    span("cpu_op", "aten::mm", 200, 290),
]


def costs_of(events: list[dict]) -> dict[Operation, Cost]:
    return rank_profile(ProfilerOutput(events, INSTRUCTIONS, {"step 3"}, 0.0), "rank 0", 0).costs


def test_an_operator_has_its_own_time_and_the_kind_of_its_instruction():
    assert costs_of(HOST) == {
        Operation(OUTSIDE, "between"): Cost(1, 30.0),
        Operation(OUTSIDE, "F"): Cost(1, 10.0),
        Operation("aten::matmul", "F"): Cost(1, 4.0),
        Operation("aten::mm", "F"): Cost(1, 16.0),
        Operation(OUTSIDE, "B"): Cost(1, 40.0),
        Operation("aten::mm", "B"): Cost(1, 20.0),
    }


def test_a_kernel_belongs_to_the_instruction_that_launched_it():
    """Kernels run later: that of the forward during the backward, that of the backward after the step."""
    device = [
        span("cuda_runtime", "cudaLaunchKernel", 20, 22, correlation=7),
        span("kernel", "gemm", 55, 85, pid=0, tid=7, correlation=7),
        span("cuda_driver", "cuLaunchKernelEx", 61, 62, tid=2, correlation=8),
        span("kernel", "gemm", 95, 130, pid=0, tid=7, correlation=8),
        span("gpu_memcpy", "Memcpy DtoH", 130, 131, pid=0, tid=7, correlation=9),
        span("cuda_runtime", "cudaMemcpyAsync", 70, 71, tid=2, correlation=9),
    ]
    recorded = ProfilerOutput(HOST + device, INSTRUCTIONS, {"step 3"}, 1000.0)
    part = rank_profile(recorded, "rank 0", 0)
    assert part.costs == {
        Operation("gemm", "F"): Cost(1, 30.0),
        Operation("gemm", "B"): Cost(1, 35.0),
        Operation("Memcpy DtoH", "B"): Cost(1, 1.0),
    }
    on_stream = [event for event in part.events if event["cat"] == "instruction"]
    spans = {(event["name"], event["tid"], event["ts"], event["dur"]) for event in on_stream}
    assert spans == {("F0@0", 7, 1055.0, 30.0), ("B0@0", 7, 1095.0, 36.0)}
    assert {event["pid"] for event in merged({5: part})["traceEvents"]} == {5}


def test_a_gpu_is_idle_for_messages_launches_or_data():
    """Kernels at 10-20, 30-40, 50-60, 70-80, each launched otherwise: the gaps are 10 each."""
    launches = {1: 5, 2: 15, 3: 45, 4: 62}  # before; while the first runs; late, within F; between steps
    events = [span("user_annotation", "step 3", 0, 61), span("user_annotation", "F0@0", 4, 60)]
    for number, launched in launches.items():
        events.append(span("cuda_runtime", "launch", launched, launched + 1, correlation=number))
        events.append(span("kernel", "k", 20 * number - 10, 20 * number, pid=0, tid=7, correlation=number))
    part = rank_profile(ProfilerOutput(events, INSTRUCTIONS, {"step 3"}, 0.0), "rank 0", 0)
    assert part.idle_us == {"messages": 10, "launches": 10, "data, between steps": 10}
    assert "the GPU is idle, ms, waiting for" in table({0: part})


def message_part(name: str, action, begin: float, replica: int):
    events = [span("user_annotation", "step 3", 0, 500), span("user_annotation", name, begin, begin + 10)]
    return rank_profile(ProfilerOutput(events, {name: (action,)}, {"step 3"}, 0.0), "", replica)


def test_an_arrow_leads_from_a_send_to_its_receive_within_a_replica():
    ranks = {
        0: message_part("SEND_F0@0", SEND_F(0, 0), 20, replica=0),
        1: message_part("RECV_F0@1", RECV_F(0, 1), 15, replica=0),
        2: message_part("SEND_F0@0", SEND_F(0, 0), 22, replica=1),
        3: message_part("RECV_F0@1", RECV_F(0, 1), 40, replica=1),
        4: message_part("SEND_F0@0", SEND_F(0, 0), 20, replica=2),
    }
    arrows = [event for event in merged(ranks)["traceEvents"] if event.get("cat") == "message"]
    first, second = [("s", 0, 20), ("f", 1, 24.999)], [("s", 2, 22), ("f", 3, 49.999)]
    assert [(event["ph"], event["pid"], event["ts"]) for event in arrows] == first + second
    ids = [event["id"] for event in arrows]
    assert ids[0] == ids[1] != ids[2] == ids[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiled")
    write_text(folder / "text.txt")
    return folder


SHORT = dict(
    run_steps=3, run_eval_every=1, run_save_every=0, model_layers=2, batch_global=4, batch_micro=1,
    parallel_pp=2,
)  # fmt: skip


def test_two_pipeline_ranks_are_profiled_with_the_same_bits(folder):
    keys = {"plain": {}, "profiled": {"run_profile": "steps=2-3, ranks=0,1"}}
    commands = [
        ("run", *tiny(folder / name, folder / "text.txt", **SHORT, **more)) for name, more in keys.items()
    ]
    refused = {
        "found rank 2 of 2 ranks, the last is 1": "steps=2, ranks=0,2",
        "found step 4, but run.steps = 3": "steps=3-4",
        "needed steps, and ranks": "always",
    }
    commands += [
        ("run", *tiny(folder / "refused", folder / "text.txt", **SHORT, run_profile=text))
        for text in refused.values()
    ]
    plain, profiled, *others = run_commands(2, *commands)
    assert (plain.returncode, profiled.returncode) == (0, 0), tail(plain.output + profiled.output)
    assert loss_lines(folder / "plain") == loss_lines(folder / "profiled")
    for words, done in zip(refused, others):
        assert done.returncode == 2 and done.output.count(words) == 1, tail(done.output)
    assert not (folder / "refused").exists()
    assert "(mean of 2 steps of ranks 0, 1):" in profiled.output, tail(profiled.output)
    row = r"^  aten::\w+ +[FB] +\d+ +\d+\.\d\d +\d+\.\d%$"
    assert re.search(row, profiled.output, re.MULTILINE), tail(profiled.output)
    assert "profiled:" not in plain.output and not (folder / "plain" / "profile.json").exists()
    require_whole(json.loads((folder / "profiled" / "profile.json").read_text())["traceEvents"])


def require_whole(events: list[dict]) -> None:
    """Check a profile of two steps of two ranks: instructions around operators, and messages between."""
    named = [event for event in events if event.get("cat") == "user_annotation"]
    for rank in (0, 1):
        mine = [event for event in named if event["pid"] == rank]
        steps = [event for event in mine if event["name"] in ("step 2", "step 3")]
        assert len(steps) == 2
        forwards = [event for event in mine if re.fullmatch(rf"F[0-3]@{rank}", event["name"])]
        in_steps = [each for each in forwards if any(map(lambda step: is_within(each, step), steps))]
        assert len(in_steps) == 2 * 4, "four microbatches a step; others are of validations"
        products = [event for event in events if event["name"] == "aten::mm" and event["pid"] == rank]
        assert any(is_within(product, in_steps[0]) for product in products)
    arrows = [event for event in events if event.get("cat") == "message"]
    sends = {event["id"]: event for event in arrows if event["ph"] == "s"}
    receives = {event["id"]: event for event in arrows if event["ph"] == "f"}
    assert sends.keys() == receives.keys() and len(sends) >= 2 * 2 * 4
    assert all(sends[key]["ts"] <= receives[key]["ts"] for key in sends)
    for arrow in arrows:
        kind = "SEND_" if arrow["ph"] == "s" else "RECV_"
        around = (each for each in named if each["pid"] == arrow["pid"] and is_within(arrow, each))
        assert any(each["name"].startswith(kind) for each in around)


def is_within(event: dict, outer: dict) -> bool:
    # times are rounded to nanoseconds
    end = event["ts"] + event.get("dur", 0)
    return outer["ts"] - 0.002 <= event["ts"] and end <= outer["ts"] + outer["dur"] + 0.002


@LONG
def test_a_run_alone_is_profiled_and_not_again(folder):
    keys = SHORT | {"parallel_pp": 1, "run_profile": "steps=2-3"}
    commands = [
        ("run", *tiny(folder / "alone", folder / "text.txt", **keys | {"run_steps": n})) for n in (3, 4)
    ]
    first, later = run_commands(1, *commands)
    assert first.returncode == 0, tail(first.output)
    assert "(mean of 2 steps of rank 0):" in first.output, tail(first.output)
    assert later.returncode == 0, tail(later.output)
    assert "step 3 isn't profiled again" in later.output, tail(later.output)
