"""Plant a bug in each module, one at a time, in a copy of the tree, and tell which test finds it first.

    python benchmarks/planted_bugs.py                      all of them, an hour on two cores
    python benchmarks/planted_bugs.py schedules optim/     those in files whose path holds one of the words
    python benchmarks/planted_bugs.py --all optim/norm     not only the first: every test file that finds it
    python benchmarks/planted_bugs.py --after FILE         other than planted_bugs.txt, in which is what this printed last

Who found a bug in the study before is asked first, then the tests of the bug's room in the order of what they cost: in one process, then
under mpirun on 1, 2 and 4 ranks, then whole runs of the program. A bug that none of them finds is printed with `nothing`: a test is
missing, or the code is.

The copy is found by PYTHONPATH, before what is installed. Limits are in wall time: run it where nothing else runs.
"""

import argparse
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import pytest  # noqa: E402
from launch import started  # noqa: E402
from preload import LIBRARIES, WHAT  # noqa: E402

FOUND = Path(__file__).with_suffix(".txt")
LIMIT_S = {
    "one process": 200,
    "1 rank": 600,
    "2 ranks": 600,
    "4 ranks": 600,
    "runs": 900,
}  # who takes longer has found it: it hangs

# ruff: noqa: E501  a bug is a line
# Which tests are asked about a room: names of files in the rooms of tests/, without test_ and .py.
ASKED = {
    "comm/": "comm_* device_clock slicing train_zero train_schedules run_one_rank",
    "comm/base/library": "comm_awareness cluster_launch",
    "schedules/": "schedules_* schedule_command train_schedules",
    "mpitrain/actor/": "rehearsal train_* model_keeping run_communication",
    "mpitrain/commands/dryrun/recipes": "dry_run",
    "mpitrain/commands/dryrun/asleep": "dry_run",
    "mpitrain/plan/predict/step_time/step": "plan_step_time",
    "comm/base/cores": "cluster_conditions",
    "mpitrain/actor/trace": "device_clock",
    "mpitrain/actor/profile": "profile",
    "mpitrain/training/profiling": "profile",
    "mpitrain/plan/predict/step_time/predicted_timeline": "plan_timeline",
    "mpitrain/plan/settings/profile_request": "profile",
    "mpitrain/checkpoint/": "checkpoint_* hostile_run_directory generate optim_training run_resume run_domains",
    "mpitrain/cluster/": "cluster_board run_lock odd_input hostile_run_directory fuzz_command_lines run_one_rank run_bad_input run_faults cluster_behind run_hang",
    "mpitrain/cluster/allocation": "cluster_allocation",
    "mpitrain/cluster/guard": "run_leaving_early run_leaving run_one_rank run_faults run_hang cluster_behind",
    "mpitrain/cluster/shared_memory": "cluster_shared_memory",
    "mpitrain/cluster/crowding": "run_commands run_logs",
    "mpitrain/cluster/entry": "odd_input schedule_command fuzz_command_lines run_commands run_bad_input",
    "mpitrain/cluster/heap": "cluster_heap",
    "mpitrain/cluster/watchdog": "cluster_watchdog cluster_behind cluster_console cluster_finding run_faults run_hang",
    "mpitrain/kernels/processor": "processor",
    "mpitrain/kernels/streams": "model_offload",
    "mpitrain/kernels/products": "products processor zero_gradients",
    "mpitrain/model/linear": "products processor zero_gradients grouped train_oracle train_fp8 model_fp8",
    "mpitrain/commands/schedule/": "schedule_command schedules_measured schedules_draw odd_input",
    "mpitrain/commands/": "generate odd_input verify run_commands run_communication",
    "mpitrain/cli": "generate odd_input schedule_command fuzz_command_lines run_commands run_bad_input",
    "mpitrain/errors": "config odd_input run_bad_input",
    "mpitrain/config": "config fuzz_configurations odd_input generate run_bad_input run_nothing_lost",
    "mpitrain/plugins": "plugins families_presets",
    "mpitrain/inputs": "odd_input hostile_files hostile_run_directory data_* checkpoint_* run_nothing_lost",
    "mpitrain/data/": "data_* fuzz_corpora train_documents run_documents run_nothing_lost",
    "mpitrain/plan/": "gpus config slicing layout_axes parallel_placement node_memory schedules_* rehearsal model_* verify train_* optim_* run_bad_input",
    "mpitrain/plan/declared/probabilities": "processor train_memory",
    "mpitrain/plan/declared/layer": "gpus processor train_memory train_recompute",
    "mpitrain/plan/declared/layer_traffic": "model_traffic rehearsal",
    "mpitrain/plan/predict/link_choices": "layout_exchange train_traffic",
    "mpitrain/plan/declared/formatting": "dry_run",
    "mpitrain/training/machine/between_nodes": "run_between_nodes",
    "mpitrain/plan/settings/attention": "config families_presets train_families",
    "mpitrain/plan/settings/identity": "config families_presets",
    "mpitrain/plan/declared/optimizers": "config optim_steps",
    "mpitrain/plan/settings/dispatch": "experts_exchange layout_experts rehearsal train_experts",
    "mpitrain/model/families/": "config families_* layout_experts model_* train_families train_experts",
    "mpitrain/kernels/activation_functions": "activation_functions families_logits train_families",
    "mpitrain/model/latent_attention": "families_logits generate_cache train_families",
    "mpitrain/model/kv_cache": "generate_cache",
    "mpitrain/kernels/attention_one_query": "generate_cache",
    "mpitrain/commands/decoding": "generate_cache",
    "mpitrain/commands/sampling": "sampling",
    "mpitrain/model/layers/latent_attention": "families_* train_families",
    "mpitrain/model/layers/multi_token": "families_* train_families",
    "mpitrain/model/layers/rope": "families_* train_families",
    "mpitrain/model/multi_token": "families_* train_families train_schedules",
    "mpitrain/model/regather": "train_regather train_memory",
    "mpitrain/model/selective": "processor train_leaks train_recompute model_keeping",
    "mpitrain/model/attention_functions": "attention_window train_families attention_by_onednn processor train_leaks train_recompute model_keeping",
    "mpitrain/kernels/attention": "attention_request attention_window attention_by_blocks attention_by_onednn parallel_placement new_family",
    "mpitrain/kernels/attention_cpu_16bit": "attention_by_blocks attention_request processor",
    "mpitrain/kernels/attention_cpu_fp32": "attention_by_onednn attention_request",
    "mpitrain/kernels/attention_products": "parallel_placement attention_request new_family",
    "mpitrain/model/layers/norm_behind": "new_family",
    "mpitrain/kernels/attention_window": "attention_window train_families",
    "mpitrain/model/experts": "train_experts train_routing",
    "mpitrain/kernels/grouped": "grouped train_experts",
    "mpitrain/model/router": "train_experts train_routing layout_experts",
    "mpitrain/model/layers/experts": "layout_experts train_routing train_experts",
    "mpitrain/model/layers/feed_forward": "layout_experts train_memory train_recompute",
    "mpitrain/plan/settings/experts": "layout_experts config train_experts",
    "mpitrain/plan/routing": "layout_experts train_routing run_experts",
    "mpitrain/parallel/device_clock": "device_clock",
    "mpitrain/kernels/compiled": "functions_compiled train_compiled",
    "mpitrain/kernels/functions": "model_norm functions_compiled train_oracle model_new_layer",
    "mpitrain/training/compile_warmup": "train_compiled run_compile",
    "mpitrain/training/machine/compiler": "functions_compiled run_compile",
    "mpitrain/parallel/expert/": "experts_exchange train_experts train_routing",
    "mpitrain/training/saving/saver": "run_saving run_spikes",
    "mpitrain/training/going_on": "run_older run_hints",
    "mpitrain/training/expert_loads": "layout_experts run_experts",
    "mpitrain/training/replay/": "run_replay",
    "mpitrain/optim/expert_bias": "train_experts run_experts",
    "mpitrain/model/": "model_* products parallel_* train_oracle train_recompute train_memory train_fp8 train_documents train_*",
    "mpitrain/optim/": "optim_* train_precision train_zero run_optimizers",
    "mpitrain/parallel/zero/": "zero_gradients parallel_* model_init train_zero train_precision train_traffic train_* optim_*",
    "mpitrain/parallel/": "parallel_* model_init train_zero train_precision train_traffic train_* optim_*",
    "mpitrain/kernels/": "model_* parallel_* products train_oracle train_precision train_zero train_*",
    "mpitrain/training/": "gpus run_gpus config train_memory run_nothing_lost run_communication run_same_bits run_resume run_commands train_corruption stragglers "
    "run_corruption run_spikes run_replay run_saving",
}

# (file, what is there once, what is put in its place)
BUGS = [
    # ------------------------------------------------------------ comm
    ("comm/meters/account.py", "self.calls += 1", "self.calls += 2"),
    ("comm/device/gpu_support.py", '(not restrictors or "device" in restrictors)', "True"),
    ("comm/device/gpu_support.py", "return opinions.pop() if len(opinions) == 1 else None", "return any(opinions) if opinions else None"),
    ("comm/device/gpu_support.py", "next((way for way in every if not way.direct), every[0])", "mine"),
    ("comm/axis.py", "self._tag = (self._tag + 1) % self.num_tags", "self._tag = 0"),
    ("comm/axis.py", "self.device_aware or not to_mpi", "self.device_aware"),
    ("comm/axis.py", "self.size > 1 or name in LINKS", "self.size > 1"),
    ("comm/base/buffers.py", "return x.float() if narrow else x.clone()", "return x.float() if narrow else x"),
    ("comm/base/axis_operations.py", "return size == 1 or operation in self.operations", "return operation in self.operations"),
    ("comm/meters/clock_offset.py", "if other != hosts[0]]", "if other == hosts[0]]"),
    ("comm/collectives.py", "copy(_apart(shard, out, out[own]), out[own])", "copy(_apart(shard, out, out[own]), out[: len(shard)])"),
    ("comm/device/staging.py", "and not device_aware:", "and device_aware:"),
    ("comm/device/staging.py", "if axis.size > 1:", "if axis.size > 0:"),
    ("comm/device/staging.py", "return ()", "return range(99)"),
    ("comm/base/grid.py", "unknown = set(axes) - set(self.degrees)", "unknown = set()"),
    ("comm/links.py", "if needed > largest:", "if needed > 2 * largest:"),
    ("comm/base/library.py", "ctypes.CDLL(os.fsdecode(found.file), mode=os.RTLD_NOW | getattr(os, \"RTLD_NOLOAD\", 0))", "ctypes.CDLL(None)"),
    ("comm/base/library.py", "started.size == 1 else (started.variable, started.size)", "started.size > 0 else (started.variable, started.size)"),
    ("comm/base/library.py", "num_ranks in dict(said).values() else said[0]", "num_ranks in dict(said[:1]).values() else said[0]"),
    ("comm/mesh.py", "len(ranks) == 1", "len(ranks) <= 2"),
    ("comm/mesh.py", "if axis.size > 1:\n                axis.account.clock", "if True:\n                axis.account.clock"),
    ("comm/transports/messages.py", "for i in ((r - me) % size for r in range(size))]", "for i in range(size)]"),
    ("comm/transports/mpi_collectives.py", "[begin * width for begin in bounds[:-1]]", "[begin for begin in bounds[:-1]]"),
    ("comm/transports/mpi_collectives.py", "num_bytes + size * WIDEST <= LIMIT", "num_bytes <= LIMIT"),
    ("comm/progress.py", "return MPI.Request.Testall(self._requests)", "return True"),
    ("comm/progress.py", "                self._first()", "                pass"),
    ("comm/progress.py", 'if hasattr(self._ready, "waiting_on"):', "if True:"),
    ("comm/standins/rehearsal.py", "if isinstance(result, np.ndarray):", "if not isinstance(result, np.ndarray):"),
    ("comm/transports/shared.py", "put(i, (first + i) % 2)", "put(i, i % 2)"),
    ("comm/transports/window.py", "comm.allreduce(num_bytes <= self.left, MPI.LAND)", "num_bytes <= self.left"),
    ("comm/transports/window.py", "self.left -= num_bytes", "pass"),
    ("comm/axis.py", "if not self.comm.allreduce(made.clear(), MPI.LAND):", "if not made.clear():"),
    ("comm/transports/shared.py", "if views is None:\n        yield from _all_gather(out, axis)", "if False:\n        yield from _all_gather(out, axis)"),
    ("comm/device/gpu_probe.py", "env=without_launcher(os.environ)", "env=dict(os.environ)"),
    ("comm/device/gpu_probe.py", "start_new_session=True", "start_new_session=False"),
    ("comm/base/wire.py", '"all_reduce": to_reduce + to_gather', '"all_reduce": to_reduce'),
    ("comm/base/wire.py", "return sum(len(pieces(part)) for", "return sum(1 for"),
    ("comm/base/world.py", "failed = [rank for rank, found in enumerate(errors) if found is not None]", "failed = []"),
    # ------------------------------------------------------------ schedules
    ("schedules/actions.py", 'return Action("W", microbatch, stage, part)', 'return Action("I", microbatch, stage, part)'),
    ("schedules/proof/bucket_rules.py", "if there.rank != place.rank or there.position < place.position:", "if there.position < place.position:"),
    ("schedules/catalog.py", "if option not in family.takes:", "if False:"),
    ("schedules/proof/check.py", "return None if reduces is None else", "return None if True else"),
    ("schedules/proof/check.py", "rules.needs_come_first(needs, messages=False)", "pass"),
    ("schedules/formats/table_tokens.py", "return [PAIR, *read_token(pair[1].strip()), *read_token(pair[2].strip())]", "return [*read_token(pair[1].strip()), *read_token(pair[2].strip())]"),
    ("schedules/proof/deadlock.py", "cursors[rank] += 1", "cursors[rank] += 2"),
    ("schedules/proof/deadlock.py", "if action.kind in RECEIVES:", "if False:"),
    ("schedules/play/draw.py", "ends.append(ends[-1] + UNIT[action.kind])", "ends.append(ends[-1] + 1)"),
    ("schedules/families/dualpipe.py", "if num_ranks % 2:", "if False:"),
    ("schedules/families/gpipe.py", "return forward + [B(m, stage) for m in range(num_microbatches)]", "return forward + [B(m, stage) for m in reversed(range(num_microbatches))]"),
    ("schedules/families/interleaved.py", "number = max(1, num_microbatches // num_ranks)", "number = 1"),
    ("schedules/families/interleaved.py", "warmup = num_ranks - 1 - rank + (chunks - 1) * max(sizes)", "warmup = num_ranks - 1 - rank + (chunks - 1) * sizes[0]"),
    ("schedules/limits.py", "if num_forwards > MOST_FORWARDS:", "if False:"),
    ("schedules/lowering/lower.py", "tail=tail, each=reduce_each", "tail=1, each=reduce_each"),
    ("schedules/lowering/lower.py", '[action for action in program if action.kind == "F"][:head]', '[action for action in program if action.kind == "F"][-head:]'),
    ("schedules/lowering/lower.py", 'if residency.ahead < 0 or residency.until not in ("use", "step"):', "if False:"),
    ("schedules/play/measured.py", "if timeline.programs != timelines[0].programs:", "if False:"),
    ("schedules/lowering/messages.py", "return RECV_B(m, stage) if following else None,", "return RECV_B(m, stage) if previous else None,"),
    ("schedules/lowering/needs.py", "return [action._replace(part=part - 1)]", "return [action._replace(part=part)]"),
    ("schedules/formats/notation.py", "chunked = max(map(len, table.chunks)) > 1", "chunked = False"),
    ("schedules/families/one_f_one_b.py", "warmup=2 * (num_stages - 1 - stage)", "warmup=num_stages - 1 - stage"),
    ("schedules/options.py", 'if value is not None and name != "notify"]', "if value is not None]"),
    ("schedules/options.py", "self._replace(weight_memory=1)", "self"),
    ("schedules/pairs.py", "*islice(rest, 2)) if action", "*islice(rest, 1)) if action"),
    ("schedules/pairs.py", "if all(parts) else", "if any(parts) else"),
    ("schedules/search_progress.py", "self._done += 1", "self._done += 2"),
    ("schedules/lowering/reductions.py", "if ready == part and (last or not once):", "if ready <= part and (last or not once):"),
    ("schedules/lowering/residency.py", "[parts[len(parts) - 1 - part if kind == \"F\" else part]]", "[parts[part]]"),
    ("schedules/proof/rules.py", "if there.rank != place.rank:", "if there.rank == place.rank:"),
    ("schedules/play/scale.py", 'row = ["."] * columns', 'row = ["."] * (columns - 1)'),
    ("schedules/families/seq1f1b.py", "warmup=num_ranks - stage - 2 + segments", "warmup=num_ranks - stage - 1"),
    ("schedules/play/simulate.py", "self.sender_free[rank] = leaves + transfer", "self.sender_free[rank] = leaves"),
    ("schedules/lowering/sums.py", "late = TIED in self._then(key) and key == self._first_tied(self.rank_of[stage])", "late = False"),
    ("schedules/table.py", "return len(self.rank_of) // self.copies", "return len(self.rank_of)"),
    ("schedules/play/timeline.py", "held -= 1", "held -= 0"),
    ("schedules/play/transfers.py", "return max(time, self.free, self.free_for_sums)", "return max(time, self.free)"),
    ("schedules/families/v_half.py", "stashes += 1", "stashes += 0"),
    ("schedules/families/v_shape.py", "return rank if 0 <= rank < num_ranks else None", "return rank if 0 < rank < num_ranks else None"),
    ("schedules/families/zb_auto.py", 'return self.done("I") - self.done("W")', "return 0"),
    ("schedules/families/zbv.py", 'while up.done["F"] < pattern:', 'while up.done["F"] <= pattern:'),
    ("schedules/families/zbv_auto.py", "return [rank.order for rank in min(found, key=_longest_wait).ranks]", "return [rank.order for rank in max(found, key=_longest_wait).ranks]"),
    ("schedules/families/zero_bubble.py", "if len(late) > lag:", "if len(late) >= lag:"),
    # ------------------------------------------------------------ actor
    ("mpitrain/actor/update.py", "(max(1, work.result.num_tokens) * self._loss_scale.value)", "max(1, work.result.num_tokens)"),
    ("mpitrain/actor/stage_compute.py", "if grad is None and self._loss_scale.dynamic:", "if False:"),
    ("mpitrain/actor/contexts.py", "Context(microbatch, start, segment", "Context(microbatch, 0, segment"),
    ("mpitrain/actor/memory.py", "weights=kept + masters", "weights=kept"),
    ("mpitrain/actor/memory_meter.py", "held += stage.offload_store.tensors() if stage.offload_store is not None else ()", "held += ()"),
    ("mpitrain/commands/dryrun/recipes.py", "if seen != before:", "if False:"),
    ("mpitrain/commands/dryrun/asleep.py", "max(0.0, stage.inputs + stage.weights - backward)", "stage.inputs + stage.weights"),
    ("mpitrain/plan/predict/step_time/step.py", "(message if sends else 0.0)", "0.0"),
    ("comm/base/cores.py", "frozenset().union(*node.allgather(of_this_process()))", "of_this_process()"),
    ("mpitrain/actor/reductions.py", "first.whole += gradient.whole", "first.whole = gradient.whole"),
    ("mpitrain/actor/reductions.py", "if piece.spec.trained:", "if True:"),
    ("mpitrain/commands/dryrun/rehearsal.py", "self._start(self._traffic.backward)", "self._start(self._traffic.forward)"),
    ("mpitrain/actor/stage.py", "done = parts[-1] == len(self.parts) - 1", "done = parts[-1] == len(self.parts)"),
    ("mpitrain/actor/stage_state.py", "owned=shared is None)", "owned=True)"),
    ("mpitrain/actor/step_totals.py", "return int(sum(map(num_counted, targets)))", "return sum(each.numel() for each in targets)"),
    ("mpitrain/parallel/device_clock.py", "        event.record()\n        return event", "        event.record()\n        event.synchronize()\n        return event"),
    ("mpitrain/plan/predict/step_time/predicted_timeline.py", "took - forward.get(axis, 0.0)", "took"),
    ("mpitrain/actor/profile_events.py", 'launches.get(event["args"].get("correlation"), event["ts"])', 'event["ts"]'),
    ("mpitrain/actor/profile_events.py", "key = part.replica, receive, seen[receive]", "key = 0, receive, seen[receive]"),
    ("mpitrain/actor/trace.py", '"ts": (begin - zero) * 1e6,', '"ts": begin * 1e6,'),
    # ------------------------------------------------------------ checkpoint
    ("mpitrain/checkpoint/arrays.py", "return Chunks(self.shape, self.dtype.itemsize)", "return Chunks(self.shape, 1)"),
    ("mpitrain/checkpoint/boxes.py", "[math.prod(shape[dim + 1 :]) for dim in range(len(shape))]", "[math.prod(shape[dim:]) for dim in range(len(shape))]"),
    ("mpitrain/checkpoint/dtypes.py", "return bytes([code[0] & 15]) + code[1:]", "return code"),
    ("mpitrain/checkpoint/files.py", "if isinstance(error, ForeignError):", "if False:"),
    ("mpitrain/checkpoint/folders.py", "if os.path.lexists(final):", "if False:"),
    ("mpitrain/checkpoint/hdf5.py", "if len(self.blocks_read) > MOST_OBJECTS:", "if False:"),
    ("mpitrain/checkpoint/hdf5.py", "start.take((16 if flags & 0x20 else 0)", "start.take((0 if flags & 0x20 else 0)"),
    ("mpitrain/checkpoint/hdf5_bytes.py", "if count > MOST_BLOCK_BYTES:", "if False:"),
    ("mpitrain/checkpoint/hdf5_links.py", "if heap_id[0]:", "if False:"),
    ("mpitrain/checkpoint/hdf5_virtual.py", "return _blocks(body) if version == 1 else _regular(body, version)", "return _blocks(body)"),
    ("mpitrain/checkpoint/index.py", 'if not re.fullmatch("[0-9a-f]{32}", self.digest):', "if False:"),
    ("mpitrain/checkpoint/load.py", "        if refused:", "        if False:"),
    ("mpitrain/checkpoint/lookup3.py", "(c << 11 & MASK | c >> 21)", "(c << 12 & MASK | c >> 20)"),
    ("mpitrain/checkpoint/meta.py", "if known.step != step:", "if False:"),
    ("mpitrain/checkpoint/save.py", "return publish(tmp)", "return tmp"),
    ("mpitrain/checkpoint/shards.py", "if file.size != self.sizes[name]:", "if False:"),
    ("mpitrain/checkpoint/shards.py", "if (array.dtype, array.shape) != (dtype, shape):", "if None:"),
    ("mpitrain/checkpoint/tensors.py", "x.view(torch.int16).numpy().view(BF16) if x.dtype == torch.bfloat16", "x.to(torch.int16).numpy().view(BF16) if x.dtype == torch.bfloat16"),
    ("mpitrain/checkpoint/verify.py", "if _digest(checkpoint, array, box) != array.digests[chunk]:", "if False:"),
    # ------------------------------------------------------------ cli, cluster, commands
    ("mpitrain/cluster/entry.py", "if (launch is None or launch.rank == 0) and (", "if (launch is None or launch.rank >= 0) and ("),
    ("mpitrain/cluster/allocation.py", "if said.left_s >= YEAR_10000 - time.time():", "if False:"),
    ("mpitrain/cluster/allocation.py", "return End(now() + seconds, source)", "return End(time.time() + seconds, source)"),
    ("mpitrain/cluster/allocation.py", "or not _sees_all_processes()\n    ):", "or True\n    ):"),
    ("mpitrain/cluster/allocation.py", 'rf"^{re.escape(job)} (.+)$"', 'r"^\\d+ (.+)$"'),
    ("mpitrain/cluster/status_board.py", "if crc32(content[_CHECKSUM.size : end]) == checksum else None", "if True else None"),
    ("mpitrain/cluster/guard.py", "at_once = self.num_asked > 2 or (", "at_once = False or ("),
    ("mpitrain/cluster/guard.py", "elif time.monotonic() >= self._leave_by and self._unheard is None:", "elif False:"),
    ("mpitrain/cluster/guard.py", "early = where.phase in BEFORE_STEPS and isinstance", "early = isinstance"),
    ("mpitrain/cluster/launch.py", "return (found.rank, found.size) if found else (0, 1)", "return (0, found.size) if found else (0, 1)"),
    ("mpitrain/cluster/lock.py", "if owner is not None and owner.token == self.token:\n                self.path.unlink()", "if True:\n                self.path.unlink()"),
    ("mpitrain/cluster/lock.py", "while not lives and time.monotonic() - since < GONE_S:", "while False:"),
    ("mpitrain/cluster/lock.py", "if time.monotonic() - begin > SLOW_S:", "if False:"),
    ("mpitrain/cluster/code_identity.py", "return found.hexdigest()[:12]", 'return "the same"'),
    ("mpitrain/cluster/rundir.py", "if found not in (None, needed):", "if False:"),
    ("mpitrain/cluster/shared_memory.py", "if path.name not in mapped)", "if path.name)"),
    ("mpitrain/cluster/std_streams.py", "while (spare := os.open(os.devnull, os.O_RDWR)) < 3:", "while (spare := os.open(os.devnull, os.O_RDWR)) < 0:"),
    ("mpitrain/cluster/threads.py", "return numbers[0]", "return 1"),
    ("mpitrain/cluster/watchdog.py", "or rank.number in self.gave_up or leaves", "or leaves"),
    ("mpitrain/cluster/hang_analysis.py", "bool(self.where.waiting_on) if self.where.waits_for else", "bool(self.where.waits_for) or"),
    ("mpitrain/cluster/hang_analysis.py", "free = [rank for rank in free if rank.where.rank in awaited] or free", "free = list(free)"),
    ("mpitrain/cluster/limit.py", "if self._num_steps > 1:", "if True:"),
    ("mpitrain/cluster/nodes.py", 'greeting.get("token") == self.meeting.token', "True"),
    ("mpitrain/cluster/watchdog.py", "(most, most))", "(_, most))"),
    ("mpitrain/cluster/watchdog.py", "if descriptor in self.dropped:", "if False:"),
    ("mpitrain/cluster/watchdog.py", "elif kind == MEET and flags & socket.MSG_CTRUNC:", "elif False:"),
    ("mpitrain/cluster/watchdog.py", "while rank.number in self.seen and self._hear(rank):", "while False:"),
    ("mpitrain/cluster/watchdog.py", "if rank.life is None:\n            self._drop(rank)\n        else:\n            self._poll.unregister(rank.connection)", "if rank.slot is not None:\n            self._miss(rank)\n        self._drop(rank)"),
    ("mpitrain/cluster/watchdog.py", "or not any(where.state in AT_WORK for _, where in ranks)):", "):"),
    ("mpitrain/cluster/crowding.py", 'if ranks <= cores or not variable or variable in os.environ:', "if True:"),
    ("mpitrain/commands/generate.py", 'if inside and kind == "a file":', 'if kind == "a file":'),
    ("mpitrain/commands/sampling.py", "said > 0, said / penalty", "said < 0, said / penalty"),
    ("mpitrain/commands/sampling.py", "whole.find(stop, self._begin)", "whole.find(stop)"),
    ("mpitrain/commands/sampling.py", "range(min(most, len(text)), 0, -1)", "range(1, min(most, len(text)))"),
    ("mpitrain/commands/sampling.py", "self.min_p * probabilities_V.max()", "self.min_p"),
    ("mpitrain/commands/inspect.py", "if rank >= num_ranks:", "if rank > num_ranks:"),
    ("mpitrain/commands/verify.py", "return FAILED if differences else DONE", "return DONE"),
    ("mpitrain/commands/waiting.py", "if self._timer is not None and console.is_interactive:", "if self._timer is not None:"),
    ("mpitrain/commands/schedule/cells.py", "top = rank - height / 2", "top = rank - height"),
    ("mpitrain/commands/schedule/command.py", "if len(words) != len(UNIT_TIMES):", "if len(words) > len(UNIT_TIMES):"),
    ("mpitrain/commands/schedule/comparison.py", "return played.timeline.makespan, max(played.peak_stashes)", "return max(played.peak_stashes), played.timeline.makespan"),
    ("mpitrain/commands/schedule/frame.py", "if needed + margins > WIDEST:", "if False:"),
    ("mpitrain/commands/schedule/measured_picture.py", "[row * num_ranks, row * num_ranks]", "[row * num_ranks, row]"),
    ("mpitrain/commands/schedule/measurement.py", "return median(timeline.makespan for timeline in self.simulations)", "return max(timeline.makespan for timeline in self.simulations)"),
    ("mpitrain/commands/schedule/picture.py", "    if limit is not None:", "    if False:"),
    ("mpitrain/commands/schedule/played.py", '"I": late - 1,', '"I": -1,'),
    ("mpitrain/commands/schedule/text.py", "if whole or lines <= MOST_LINES:", "if True:"),
    # ------------------------------------------------------------ configuration, data
    ("mpitrain/errors.py", "    exit_code = BAD_INPUT", "    exit_code = FAILED"),
    ("mpitrain/plan/settings/identity.py", 'if key in IDENTITY or key.split(".")[0] in IDENTITY}', "if key in IDENTITY}"),
    ("mpitrain/inputs.py", "os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC", "os.O_RDONLY | os.O_CLOEXEC"),
    ("mpitrain/inputs.py", "flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder", "flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder"),
    ("mpitrain/data/documents.py", "targets.masked_fill(ends_BT, IGNORED)", "targets"),
    ("mpitrain/data/encoding.py", "<= int(ids.max()) < tokenizer.vocab", "<= int(ids.max()) <= tokenizer.vocab"),
    ("mpitrain/data/encoding.py", "else self.document.num_bytes) + DOCUMENT_BYTES", "else 0) + DOCUMENT_BYTES"),
    ("mpitrain/data/sources/python_stdlib.py", "return name in STDLIB_WITHOUT or name.startswith(", "return name.startswith("),
    ("mpitrain/data/permutation.py", "if self._cached[0] != epoch:", "if self._cached[0] < 0:"),
    ("mpitrain/data/permutation.py", "return least + least % 2", "return least"),
    ("mpitrain/data/permutation.py", "while outside.size:", "if outside.size:"),
    ("mpitrain/data/split.py", "max(int(count * val_fraction), window)", "int(count * val_fraction)"),
    ("mpitrain/data/tokenizer_file.py", "self.vocab = max(ids.values()) + 1", "self.vocab = len(ids)"),
    ("mpitrain/data/tokens.py", "if largest >= below:", "if largest > below:"),
    ("mpitrain/data/tokens.py", "needed = count * dtype.itemsize", "needed = count"),
    # ------------------------------------------------------------ layout
    ("mpitrain/plan/activations/kept.py", "return self._inner(segment, self.blocks) if self.offloaded else 0", "return 0"),
    ("mpitrain/model/layers/latent_attention.py", '"kv_rank": 4 * width', '"kv_rank": 2 * width'),
    ("mpitrain/model/layers/latent_attention.py", 'if found["value_width"] > together:', "if False:"),
    ("mpitrain/plan/axes.py", '"replicate": cp * dp // self.divided,', '"replicate": dp // self.divided or 1,'),
    ("mpitrain/plan/division/stage_balance.py", "loads[ranks[-1]] += head", "loads[ranks[-1]] += 0"),
    ("mpitrain/plan/division/buckets.py", "if (size >= limit and index not in joined) or index == 0:", "if size >= limit or index == 0:"),
    ("mpitrain/plan/settings/dispatch.py", "if ranks % node_ranks:", "if False:"),
    ("mpitrain/plan/settings/dispatch.py", "min(self.tokens, self.limit // self.copies)", "min(self.tokens, self.limit)"),
    ("mpitrain/plan/settings/dispatch.py", "crossing * (a + b)) for a, b in zip((there, back, there, back), extra_bytes)", "crossing * a) for a, b in zip((there, back, there, back), extra_bytes)"),
    ("mpitrain/plan/division/domains.py", "return parallel.cp * (parallel.dp_shard or parallel.dp) if parallel.zero else 1", "return parallel.cp * parallel.dp if parallel.zero else 1"),
    ("mpitrain/plan/settings/fp8_sizes.py", "yield halves._replace(length=micro * (chunk // 2))", "yield halves._replace(length=micro * chunk)"),
    ("mpitrain/plan/division/gradient_accumulation.py", "return number // (number & -number)", "return number"),
    ("mpitrain/plan/predict/bucket_buffers.py", "return self.length // (self.layout.num_shards if divided else 1)", "return self.length"),
    ("mpitrain/plan/declared/layer.py", "in_pieces = self.tp > 1", "in_pieces = False"),
    ("mpitrain/optim/optimizers/muon.py", 'return ("muon/momentum",) if group == "matrix" else', "return"),
    ("mpitrain/plan/predict/node_memory.py", '(2 if config.optimizer.moments == "bf16" else wide)', "wide"),
    ("mpitrain/plan/declared/parameters.py", "yield self.place(first), min(", "yield self.place(at), min("),
    ("mpitrain/plan/declared/parameters.py", "copies = shard.size // pieces", "copies = 1"),
    ("mpitrain/plan/plan.py", "else self.placement.positions(cp_rank)", "else self.placement.positions(0)"),
    ("mpitrain/plan/program.py", 'reduce_each = parallel.reduce == "microbatch"', "reduce_each = False"),
    ("mpitrain/plan/predict/link_choices.py", "math.ceil(ROOM * found.gradients / backward)", "math.ceil(found.gradients / backward)"),
    ("mpitrain/plan/settings/resolve.py", "if model.kv_heads % tp and tp % model.kv_heads:", "if False:"),
    ("mpitrain/plan/division/sequence.py", 'else [rank, 2 * self.size - 1 - rank]', "else [2 * rank, 2 * rank + 1]"),
    ("mpitrain/plan/settings/recompute.py", "given = sizes.config.memory.every", "given = 0"),
    ("mpitrain/plan/settings/pipeline_table.py", "// (config.parallel.dp * config.batch.micro)", "// config.parallel.dp"),
    ("mpitrain/plan/declared/formatting.py", 'if num_bytes < 1e9 else f"{num_bytes / 1e6:,.0f}"', 'if num_bytes < 1e9 else f"{num_bytes / 1e9:,.0f}"'),
    ("mpitrain/plan/declared/traffic.py", "for width in (itemsize, max(itemsize, 4)))", "for width in (itemsize, itemsize))"),
    ("mpitrain/plan/declared/layer_traffic.py", "into(sizes, width_before or width)", "into(sizes, width)"),
    ("mpitrain/model/layers/multi_token.py", "(*head, *self.depths * depth)", "(*head, *depth)"),
    ("mpitrain/plan/declared/probabilities.py", "min(4 * width, LONGEST)", "4 * width"),
    ("mpitrain/plan/declared/probabilities.py", "(end - begin) * end for", "(end - begin) * length for"),
    ("mpitrain/plan/declared/layer.py", "if self.selective or masked or not ours", "if masked or not ours"),
    ("mpitrain/plan/declared/layer.py", "and not self.on_gpu and", "and"),
    ("mpitrain/plan/declared/layer.py", 'config.precision.compute in ("bf16", "fp8") and', "self.itemsize == 2 and"),
    # ------------------------------------------------------------ model
    ("mpitrain/model/layers/attention.py", "return max(1, self.kv_heads // sizes.tp)", "return self.kv_heads // sizes.tp"),
    ("mpitrain/model/blocks.py", "blocks[group[0] + 1 : group[-1] + 1] = [[] for _ in group[1:]]", "pass"),
    ("mpitrain/model/embedding_and_head.py", ".squeeze(1) * here_N", ".squeeze(1)"),
    ("mpitrain/kernels/functions.py", "targets_N[rows]] -= here_N[rows].to(grad_RV.dtype)", "targets_N[rows]] -= 0.99"),
    ("mpitrain/plugins.py", "if name in known:", "if True:"),
    ("mpitrain/plugins.py", "if name not in allowed}", "if False}"),
    ("mpitrain/plan/declared/optimizers.py", "if key not in self.keys:", "if False:"),
    ("mpitrain/kernels/attention_products.py", "grad_of_scores.mul_(slope)", "grad_of_scores"),
    ("mpitrain/model/layers/norm_behind.py", "+ sizes.shared * sizes.norm(self.width)", ""),
    ("mpitrain/model/families/deepseek.py", "own.q_rank, own.kv_rank", "own.kv_rank, own.q_rank"),
    ("mpitrain/model/families/gpt_oss.py", "window_blocks=\"wf\"", "window_blocks=\"fw\""),
    ("mpitrain/model/families/gpt_oss.py", "if model.width % etp:", "if False:"),
    ("mpitrain/model/families/decoder.py", "rope, 2 * model.layers, **of_block)", "rope, model.layers, **of_block)"),
    ("mpitrain/model/families/qwen3.py", "return decoder(config, normed=True)", "return decoder(config, normed=False)"),
    ("mpitrain/model/families/sparse.py", "number >= first and", "number > first and"),
    ("mpitrain/model/families/decoder.py", "depth = 2 * model.layers", "depth = model.layers"),
    ("mpitrain/model/feed_forward.py", "tape.gated(gate_BTF, up_BTF,", "tape.gated(up_BTF, gate_BTF,"),
    ("mpitrain/model/linear.py", "self.parameter.grad += fp8.multiply(", "self.parameter.grad[:] = fp8.multiply("),
    ("mpitrain/kernels/activation_functions.py", ".masked_fill_(gate > self.limit, 0)", ""),
    ("mpitrain/kernels/activation_functions.py", "torch.ops.aten.silu_backward(grad, gate)", "grad * torch.sigmoid(gate)"),
    ("mpitrain/kernels/activation_functions.py", "gelu_backward(grad, gate, approximate=self.approximation)", "gelu_backward(grad, gate)"),
    ("mpitrain/kernels/activation_functions.py", "self.activation.grad_of_up(grad * activated, up)", "grad * activated"),
    ("mpitrain/model/latent_attention.py", "q = q * self.magnitude**2", "q = q * self.magnitude"),
    ("mpitrain/model/latent_attention.py", "self.rotary(k_turned.unsqueeze(1), context.start).expand", "self.rotary(k_turned.unsqueeze(1), 0).expand"),
    ("mpitrain/model/layers/latent_attention.py", "latent -= self.rope.width", "latent -= 0"),
    ("mpitrain/model/layers/multi_token.py", "first = replace(model.first, tied=True)", "first = model.first"),
    ("mpitrain/model/layers/multi_token.py", "return (1 + self.depths) * self.head.kept(", "return self.depths * self.head.kept("),
    ("mpitrain/model/layers/rope.py", "0.1 * self.mscale * math.log", "0.1 * math.log"),
    ("mpitrain/model/layers/attention.py", "return width * (heads + 2 * kv_heads) * sizes.itemsize", "return width * (heads + kv_heads) * sizes.itemsize"),
    ("mpitrain/model/layers/embedding_and_head.py", "return sizes.positions * 10 + sizes.normed", "return sizes.normed"),
    ("mpitrain/model/layers/feed_forward.py", "return product_flops(self.parameters())", "return 0"),
    ("mpitrain/model/linear.py", "total += product(grad, parameter.data.t())", "total = product(grad, parameter.data.t())"),
    ("mpitrain/kernels/products.py", "if (\n        x.dtype != torch.float32\n", "if (\n        x.dtype == torch.bfloat16\n"),
    ("mpitrain/kernels/products.py", " or not (weight.is_contiguous() or weight.t().is_contiguous())", ""),
    ("mpitrain/kernels/products.py", "_add(some, product(part.t(), b.t()), first)", "_add(some, product(part.t(), b.t()), True)"),
    ("mpitrain/kernels/products.py", "total.addmm_(a.t(), b, beta=0 if first else 1)", "total.addmm_(a.t(), b, beta=1)"),
    ("mpitrain/kernels/products.py", "add_product(total, a.to(total.dtype), b.to(total.dtype), first=first)", "add_product(total, a.to(total.dtype), b.to(total.dtype))"),
    ("mpitrain/parallel/zero/parameters.py", "first = self._stale\n        self._stale = False", "first = self._stale"),
    ("mpitrain/parallel/zero/shards.py", "parameter.settle()", "pass"),
    ("mpitrain/parallel/zero/shards.py", "in self.layout.gaps()", "in ()"),
    ("mpitrain/kernels/products.py", "return mkl_is_slow() and a.numel()", "return a.numel()"),
    ("mpitrain/kernels/grouped.py", "return x.is_cpu and x.dtype == torch.float32", "return False"),
    ("mpitrain/kernels/processor.py", '"Intel" not in has.get("cpu_name", "Intel")', '"Intel" not in has.get("cpu_name", "")'),
    ("mpitrain/model/multi_token.py", "            tokens = targets\n", ""),
    ("mpitrain/model/multi_token.py", "context.record_metric(\"mtp_loss\", loss / len(self.depths))", "context.record_metric(\"mtp_loss\", loss)"),
    ("mpitrain/model/offload.py", "host.give_back(buffer, self._arrived)", "pass"),
    ("mpitrain/model/offload.py", "host.give_back(buffer, self._arrived)", "host.give_back(buffer, OVER)"),
    ("mpitrain/model/offload.py", "while len(self._leaving) >= AHEAD:", "while False:"),
    ("mpitrain/model/regather.py", "later(gradients)", "pass"),
    ("mpitrain/model/segment.py", "return x, self.regathered", "return x, None"),
    ("mpitrain/plan/declared/layer_traffic.py", "gathered.forward + whole.backward", "whole.backward"),
    ("mpitrain/model/recompute.py", "x, left = yield from forward(block, x, context)", "_, left = yield from forward(block, x, context)"),
    ("mpitrain/model/rotary.py", "here = slice(start, start + x_BHTC.shape[-2])", "here = slice(0, x_BHTC.shape[-2])"),
    ("mpitrain/model/segment.py", "not self.selective and functions.keep_activated:", "True:"),
    ("mpitrain/kernels/functions.py", "addcmul_(unit, along, value=-1)", "addcmul_(unit, along, value=1)"),
    ("mpitrain/kernels/functions.py", "addcmul_(unit.to(weight.dtype), along, value=-1)", "addcmul_(unit.to(weight.dtype), along, value=1)"),
    ("mpitrain/model/kv_history.py", ".tril(begin)", ".tril(begin + 1)"),
    ("mpitrain/model/attention_functions.py", "else mask == 0", "else mask < 0"),
    ("mpitrain/model/build_context.py", "self.plan.positions(self.cp.rank if self.cp else 0)", "self.plan.positions(0)"),
    # ------------------------------------------------------------ mixtures of experts
    ("mpitrain/plan/settings/experts.py", "if experts.active > experts.count:", "if False:"),
    ("mpitrain/plan/routing.py", "if missing:", "if False:"),
    ("mpitrain/model/experts.py", "whole = router.Statistics(sum(sums),", "whole = router.Statistics(sums[-1],"),
    ("mpitrain/model/experts.py", "router.Statistics(sum(saved.sums),", "router.Statistics(saved.sums[-1],"),
    ("mpitrain/plan/routing.py", "return (step - self.first) % self.steps", "return (step - 1) % self.steps"),
    ("mpitrain/model/experts.py", "order = experts.argsort(stable=True)", "order = experts.argsort(descending=True, stable=True)"),
    ("mpitrain/kernels/grouped.py", "            add_product(total, a, b, ", "            add_product(total, a, 2 * b, "),
    ("mpitrain/model/layers/experts.py", "routed += self._sums(sizes) if sizes.segments == 1 else 0", "routed += 0"),
    ("mpitrain/model/router.py", "return weights * settings.scale", "return weights"),
    ("mpitrain/model/attention_functions.py", "ctx.needs_input_grad[0] and not selective and", "ctx.needs_input_grad[0] and"),
    ("mpitrain/model/attention_functions.py", "saved_tensors_hooks(torch.Tensor.detach, _itself)", "saved_tensors_hooks(_itself, _itself)"),
    ("mpitrain/optim/expert_bias.py", "(piece.grad.mean() - piece.grad).sign_()", "(piece.grad - piece.grad.mean()).sign_()"),
    ("mpitrain/parallel/expert/crossings.py", ".sum(-1) * self.divided", ".sum(-1)"),
    ("mpitrain/parallel/expert/exchange.py", "unflatten(0, (self.divided, -1)).sum(0)", "unflatten(0, (self.divided, -1))[0]"),
    ("mpitrain/parallel/expert/hierarchical.py", "places[local[places].argsort(stable=True)]", "places[local[places].argsort(descending=True, stable=True)]"),
    ("mpitrain/parallel/expert/hierarchical.py", "total[rows[found]] += made_RD[found]", "total[rows[found]] = made_RD[found].to(total.dtype)"),
    ("mpitrain/parallel/expert/packing.py", "(exponent - (fraction == 0.5).int())", "(exponent - 1)"),
    ("mpitrain/parallel/expert/packing.py", "torch.ldexp(torch.ones_like(amax), power), torch.nan)", "torch.ldexp(torch.ones_like(amax), power), 1.0)"),
    ("mpitrain/parallel/expert/rounds.py", "return max(1, -(-int(self._to_parts.sum(0).max()) // self.limit))", "return max(1, int(self._to_parts.sum(0).max()) // self.limit)"),
    ("mpitrain/training/expert_loads.py", "return bool(further), int(number)", "return bool(further), number"),
    # ------------------------------------------------------------ optim
    ("mpitrain/optim/elementwise.py", '(group != "vector", parts.moments(group))', '(group == "vector", parts.moments(group))'),
    ("mpitrain/optim/loss_scale.py", "self.value = self.value * 2\n            self.steps = 0", "self.value = self.value * 2\n            self.steps = 1"),
    ("mpitrain/optim/matrices.py", "if part and part.spec.copy == 0 else 0", "if part else 0"),
    ("mpitrain/optim/moments.py", "places(piece.spec, begin, begin + len(weight), weight.device)", "places(piece.spec, 0, len(weight), weight.device)"),
    ("mpitrain/optim/optimizers/muon.py", "grad.lerp(momentum, beta) if self._settings.nesterov else momentum", "grad.lerp(momentum, beta)"),
    ("mpitrain/optim/newton_schulz.py", "return x.mT if rows > columns else x", "return x.mT if rows >= columns else x"),
    ("mpitrain/optim/norm.py", "(bits >> (DIGIT - shift)) & MASK", "bits >> (DIGIT - shift)"),
    ("mpitrain/optim/norm.py", "if all(map(math.isfinite, parts)) else math.nan", "if all(map(math.isfinite, parts)) else 0.0"),
    ("mpitrain/optim/norm.py", "sums[above : above + count] += found[:, above]", "sums[above : above + count] = found[:, above]"),
    ("mpitrain/optim/offload.py", "        for load in self._loads:\n            load.optimizer.set_step(num_updates)", "        self._loads[0].optimizer.set_step(num_updates)"),
    ("mpitrain/optim/optimizer.py", "whole=kind.whole_matrices", "whole=False"),
    ("mpitrain/optim/rates.py", "return peak * (schedule.final + (1 - schedule.final) * left)", "return peak * left"),
    ("mpitrain/optim/elementwise.py", "self._num_updates += 1", "self._num_updates += 0"),
    ("mpitrain/optim/stochastic_rounding.py", ".flatten()[begin % width :][: end - begin]", ".flatten()[: end - begin]"),
    ("mpitrain/optim/stochastic_rounding.py", "spec.shape[1:] == spec.whole[1:]", "spec.shape[-1] == spec.whole[-1]"),
    # ------------------------------------------------------------ parallel
    ("mpitrain/parallel/communication.py", "flat.view(-1, *first.shape[1:]).transpose(0, self.dim)", "flat.view(-1, *first.shape[1:]).transpose(0, 0)"),
    ("mpitrain/parallel/microbatch.py", "return nullcontext()", "return 1 / 0"),
    ("mpitrain/kernels/precision.py", "return torch.promote_types(dtype, torch.float32)", "return dtype"),
    ("mpitrain/parallel/async_tp.py", "offset = self.axis.rank * x.shape[TOKENS] if gather else 0", "offset = 0"),
    ("mpitrain/parallel/walk.py", "pending = walk.send(None if pending is None else pending.wait())", "pending = walk.send(None if pending is None else pending._result)"),
    ("mpitrain/parallel/context/online_softmax.py", "grad_of_kv[1, ..., tile.keys, :] += for_v", "grad_of_kv[1, ..., tile.keys, :] = for_v"),
    ("mpitrain/parallel/context/all_gather.py", "work.attend(placement.tiles_of_others(axis.rank), kv, whole)", "work.attend(placement.tiles_of_others(axis.rank), kv, None)"),
    ("mpitrain/parallel/context/attention.py", "(Gather if kind == \"gather\" else Ring)(axis, placement)", "Ring(axis, placement)"),
    ("mpitrain/kernels/attention_cpu_16bit.py", "multiplied_as(q.dtype) != q.dtype)", "multiplied_as(q.dtype) == q.dtype)"),
    ("mpitrain/kernels/attention_cpu_fp32.py", "own += _hidden(num_queries)", "own -= _hidden(num_queries)"),
    ("mpitrain/kernels/attention_cpu_fp32.py", "[:, None], alpha=LOG2_E)", "[:, None])"),
    ("mpitrain/kernels/functions.py", "x.mul_(LOG2_E).exp2_()", "x.exp2_()"),
    ("mpitrain/kernels/attention_cpu_fp32.py", "of_v_SC[seen] +=", "of_v_SC[seen] ="),
    ("mpitrain/kernels/attention_cpu_fp32.py", "total.log2_().add_(most)", "total.log2_()"),
    ("mpitrain/kernels/attention_cpu_fp32.py", "rows.to(multiplied_as(rows.dtype)).contiguous()", "rows.to(multiplied_as(rows.dtype))"),
    ("mpitrain/kernels/attention_cpu_fp32.py", "q_BHTC.shape[1] // k_BKSC.shape[1] *", "q_BHTC.shape[1] *"),
    ("mpitrain/kernels/attention_cpu_16bit.py", "triu_(1)", "triu_(0)"),
    ("mpitrain/kernels/attention_cpu_16bit.py", "_causal(_num_rows(q_BKTGC, k_BKSC),", "_causal(ROWS[rows.element_size()],"),
    ("mpitrain/kernels/attention_cpu_16bit.py", "return visible is None and q.dtype", "return q.dtype"),
    ("mpitrain/kernels/attention_cpu_16bit.py", "torch.softmax(scores, -1).to(q_BKTGC.dtype)", "torch.softmax(scores, -1)"),
    ("mpitrain/kernels/attention_cpu_16bit.py", "        sequences = 1  # each", "        pass  # each"),
    ("mpitrain/kernels/attention_cpu_16bit.py", "grads[1].copy_(of_k_BKSC.mul_(scale))", "grads[1].copy_(of_k_BKSC)"),
    ("mpitrain/kernels/attention_tiles.py", "k_BKSC, v_BKSC, 0.0, causal and visible is None,", "k_BKSC, v_BKSC, 0.0, False,"),
    ("mpitrain/kernels/attention.py", "onednn = not masked and", "onednn = True and"),
    ("mpitrain/kernels/attention_products.py", ".mul_(request.scale_of(q.shape[-1]))", ".mul_(q.shape[-1] ** -0.5)"),
    ("mpitrain/kernels/attention_cpu_16bit.py", "torch.bmm(of_scores, keys).mul_(scale))", "torch.bmm(of_scores, keys).mul_(q_BHTC.shape[-1] ** -0.5))"),
    ("mpitrain/parallel/context/ring.py", "source = (axis.rank - turn) % axis.size\n            work.attend", "source = (axis.rank + turn) % axis.size\n            work.attend"),
    ("mpitrain/parallel/context/ulysses.py", "self._copies = max(1, axis.size // kv_heads)", "self._copies = 1"),
    ("mpitrain/kernels/attention_window.py", "(distance < window)", "(distance <= window)"),
    ("mpitrain/kernels/attention_window.py", "return -((sinks_H", "return ((sinks_H"),
    ("mpitrain/kernels/pinned.py", 'if device.type == "meta":', "if False:"),
    ("mpitrain/parallel/zero/initial.py", "self._numbers.random(begin % 4)", "self._numbers.random(0)"),
    ("mpitrain/parallel/zero/inverse_normal.py", "ERROR = 2.0**-33", "ERROR = 2.0**-38"),
    ("mpitrain/parallel/zero/pool.py", "self._program = program\n        self._taken = 0", "self._program = program"),
    ("mpitrain/parallel/zero/shards.py", "return self.replicate is None or self.replicate.rank == 0", "return True"),
    ("mpitrain/parallel/zero/tree_accumulation.py", "total = earlier\n            level = level + 1", "level = level + 1"),
    # ------------------------------------------------------------ training
    ("mpitrain/training/going_on.py", "found = newest.order or SORTED", "found = newest.order or FEISTEL"),
    ("mpitrain/training/run_report.py", "self.speaks = rank == 0", "self.speaks = True"),
    ("mpitrain/training/machine/device_placement.py", 'if config.run.device == "cpu":', "if False:"),
    ("mpitrain/training/machine/device_placement.py", "tuple(rank for rank, gpu in taken.items() if gpu == mine)", "(world.rank,)"),
    ("mpitrain/training/machine/gpus.py", "min(seen, key=lambda gpu: taken.get(gpu, 0), default=None)", "next(iter(seen), None)"),
    ("mpitrain/training/machine/gpus.py", 'if uuid.strip("0-"):', "if uuid:"),
    ("mpitrain/training/checks/comm_report.py", "self._num_steps += 1", "self._num_steps += 2"),
    ("mpitrain/training/replay/recording.py", "self._attempt(self._write, f", "self._write(f"),
    ("mpitrain/training/prepare.py", "if newest.step and newest.data not in (description.content, description.digest):", "if False:"),
    ("mpitrain/training/prepare.py", 'newest.routing not in ("", routing.digest)', "False"),
    ("mpitrain/training/machine/peak_flops.py", "return spent\n", "return passed\n"),
    ("mpitrain/training/machine/peak_flops.py", "asked = placement.first if", "asked = True if"),
    ("mpitrain/training/machine/peak_flops.py", "if not PART.search(name) else", "if name else"),
    ("mpitrain/training/saving/saver.py", "        self._sync()", "        pass"),
    ("mpitrain/training/saving/state_io.py", "tuple(a + b for a, b in zip(spec.offset, box.start))", "tuple(b for a, b in zip(spec.offset, box.start))"),
    ("mpitrain/kernels/compiled.py", "sin[:, None] * sense", "sin[:, None]"),
    ("mpitrain/kernels/compiled.py", "(x.dtype, x.shape, x.stride())", "(x.dtype, x.shape)"),
    ("mpitrain/kernels/compiled.py", "& here_N[:, None]", "& (targets_N >= 0)[:, None]"),
    ("mpitrain/training/compile_warmup.py", "    actor.loss_scale.state = scale\n", ""),
    ("mpitrain/training/compile_warmup.py", "skip_update=lambda loss: True", "skip_update=lambda loss: False"),
    ("mpitrain/training/compile_warmup.py", "progress.timeout_s = max(timeout_s, FIRST_S)", "progress.timeout_s = timeout_s"),
    ("mpitrain/training/machine/compiler.py", "if done.returncode:", "if False:"),
    ("mpitrain/training/trainer.py", "self.updates += not without", "self.updates += 1"),
    ("mpitrain/training/checks/spikes.py", "+ spike - to", "+ spike"),
    ("mpitrain/training/machine/between_nodes.py", "if not (left_open(plan) and _cross(names, plan, world)):", "if not left_open(plan):"),
    ("mpitrain/training/machine/between_nodes.py", "len({nodes[rank] for rank in mine[name]}) > 1 for name in names", "world.num_nodes > 1 for name in names"),
    ("mpitrain/plan/predict/link_choices.py", "if fits(longer):", "if True:"),
    ("mpitrain/plan/predict/link_choices.py", "config.pipeline.tail == 0 and config.parallel.reduce", "config.parallel.reduce"),
    ("schedules/lowering/lower.py", "return table.num_stages == 1 and table.segments == 1", "return table.num_stages == 1"),
    ("mpitrain/kernels/processor.py", 'has.get("avx512_fp16") and "Intel"', '"Intel"'),
    ("mpitrain/kernels/streams.py", "if event is not OVER:", "if True:"),
    ("mpitrain/kernels/products.py", "for some, out in zip(weight.split(rows), y.split(rows, -1)):", "for some, out in zip(weight.split(rows)[:-1], y.split(rows, -1)):"),
    ("mpitrain/cluster/heap.py", "MMAP_THRESHOLD: PIECE,", "MMAP_THRESHOLD: 1 << 17,"),
    ("mpitrain/cluster/heap.py", "FAST: 0,", "FAST: 64,"),
    ("mpitrain/training/trainer.py", "if not reason and saving:", "if saving:"),
    ("mpitrain/training/side_files.py", "self._routing[step] = [each", "self._routing[len(self._routing) + 1] = [each"),
    ("mpitrain/training/trainer.py", "and step % run.save_every == 0 and step <= newest", "and step <= newest"),
    ("mpitrain/training/trainer.py", "if corruption := self.checks.corruption(step, saving):", "if not result.spike and (corruption := self.checks.corruption(step, saving)):"),
    ("mpitrain/training/saving/saver.py", "self.finish()\n        self._record(", "self._record("),
]  # fmt: skip


class Copy:
    """A copy of the tree, in which a bug can be planted."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._writes = 1_000_000_000
        for part in ("mpitrain", "comm", "schedules", "jobs", "tests", "benchmarks"):
            shutil.copytree(
                ROOT / part, folder / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        for part in ("setup.cfg", "pyproject.toml", "README.md"):
            shutil.copy(ROOT / part, folder)

    def asked(self, file: str) -> list[Path]:
        """Return the test files that are asked about a bug in `file`, each once, in order."""
        room = max((room for room in ASKED if file.startswith(room)), key=len)
        found = [
            path
            for name in ASKED[room].split()
            for path in sorted((self.folder / "tests").rglob(f"test_{name}.py"))
        ]
        return list(dict.fromkeys(found))

    def judge(self, files: list[Path], every: bool) -> list[str]:
        """Return the tests that fail, the first one only or the first of each file, with how they were started."""
        found = []
        runs = [path for path in files if path.name.startswith("test_run_")]
        single = [path for path in files if path not in runs]
        under_mpi = [path for path in single if "pytest.mark.mpi" in path.read_text(encoding="utf-8")]
        for how, files in (
            ("one process", single),
            ("1 rank", under_mpi),
            ("2 ranks", under_mpi),
            ("4 ranks", under_mpi),
            ("runs", runs),
        ):
            for some in [[path] for path in files] if every else [files] * bool(files):
                found += [f"{test} ({how})" for test in self._failing(how, some)]
                if found and not every:
                    return found
        return found

    def still_found(self, finder: str) -> list[str]:
        """Ask the test that found a bug before, with how it was started, as judge() returns it."""
        name, _, how = finder.rpartition(" (")
        path, _, test = name.partition("::")
        path = next((self.folder / "tests").rglob(path), None)
        if path is None or (test and f"def {test.split('[')[0]}(" not in path.read_text(encoding="utf-8")):
            return []
        chosen = ["-k", test.split("[")[0]] if test else []
        return [f"{test} ({how}" for test in self._failing(how.rstrip(")"), [path], *chosen)]

    def plant(self, file: str, text: str) -> None:
        """Write a module, with a time of its own: what Python has compiled of it is then old."""
        self._writes += 1
        (self.folder / file).write_text(text, encoding="utf-8")
        os.utime(self.folder / file, (self._writes, self._writes))

    def _forked(self, options: list[str]) -> tuple[int | None, str]:
        """Run pytest in a child that finds torch and others loaded; return its exit code, None if it hangs, and what it said."""
        for name in ("h5py", "hypothesis", "numpy", "torch"):
            importlib.import_module(name)
        with tempfile.TemporaryFile("w+") as output:
            child = os.fork()
            if not child:
                os.setsid()
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                os.chdir(self.folder)
                os.environ["PYTHONPATH"] = str(self.folder)
                sys.path.insert(0, str(self.folder))
                code = pytest.main(options)
                sys.stdout.flush()
                os._exit(code)
            end = time.monotonic() + LIMIT_S["one process"]
            while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
                time.sleep(0.02)
            if not ended[0]:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(ended[1]) if ended[0] else None
            output.seek(0)
            return code, output.read()

    def _failing(self, how: str, files: list[Path], *chosen: str) -> list[str]:
        num_ranks = int(how.split()[0]) if " rank" in how else 0
        options = ["-x", "-q", "-rfE", "-p", "no:cacheprovider", *chosen, *map(str, files)]
        if num_ranks:
            lane = (sys.executable, str(self.folder / "tests" / "support" / "lane.py"), "--only-mpi", *options)
            with started(num_ranks, *lane, env={"PYTHONPATH": str(self.folder)}, cwd=self.folder) as job:
                done = job.wait(LIMIT_S[how])
            code = done.returncode
            text = done.output
        else:
            code, text = self._forked(options)
        if code in (0, 5):  # 5: nothing to run
            return []
        named = re.findall(r"^(?:FAILED|ERROR) (?:tests/\S*/)?(test_\S+)", text, re.M) or re.findall(
            r"(test_\w+\.py::\S+) failed on rank", text
        )
        return named[:1] or [f"{files[0].name}: {'hangs' if code is None else 'ends'}"]


def finders(output: Path) -> dict[tuple[str, str], str]:
    """Return {(module, what was put there): who found it first}, of what main() has printed."""
    pairs = re.findall(
        r"^(\S+): (.*)\n    (.*?)(?:;.*)?  \[\d+ s\]$", output.read_text(encoding="utf-8"), re.M
    )
    return {(file, new): found for file, new, found in pairs if found != "nothing"}


def place_of(old: str, text: str) -> tuple[int, int]:
    """Return where code begins and ends in a file, however its lines are broken; it is there once."""
    tokens = re.findall(r"\w+|[^\w\s]", old)
    closing = {")", "]", "}"}
    words = [(r"\s*,?\s*" if token in closing else r"\s*") + re.escape(token) for token in tokens]
    found = [text.find(old)] if text.count(old) == 1 else []
    if found:
        return found[0], found[0] + len(old)
    found = [match.span() for match in re.finditer("".join(words), text)]
    if len(found) != 1:
        raise LookupError(f"{old!r} is there {len(found)} times")
    begins, ends = found[0]
    return begins + len(text[begins:ends]) - len(text[begins:ends].lstrip()), ends


def main() -> None:
    """Plant one bug after the other; what runs by choice only may find it, too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="of the paths of modules; all if none is given")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--all", action="store_true", help="every test file that finds a bug, not only the first"
    )
    asked.add_argument("--after", type=Path, metavar="FILE", default=FOUND, help="what this printed before")
    parser.add_argument("--tests", help="ask these test files only, as in 'run_* train_zero'")
    given = parser.parse_args()
    before = {} if given.all or given.tests else finders(given.after)
    os.environ[WHAT] = LIBRARIES
    os.environ["MPITRAIN_LONG"] = "1"
    with tempfile.TemporaryDirectory(prefix="mpitrain-planted-") as folder:
        copy = Copy(Path(folder))
        for file, old, new in BUGS:
            if given.words and not any(word in file for word in given.words):
                continue
            path = copy.folder / file
            begin = time.monotonic()
            text = path.read_text(encoding="utf-8")
            begins, ends = place_of(old, text)
            files = copy.asked(file)
            if given.tests:
                files = [
                    path
                    for name in given.tests.split()
                    for path in sorted((copy.folder / "tests").rglob(f"test_{name}.py"))
                ]
            copy.plant(file, text[:begins] + new + text[ends:])
            finder = before.get((file, " ".join(new.split())))
            found = (finder and copy.still_found(finder)) or copy.judge(files, given.all)
            copy.plant(file, text)
            print(
                f"{file}: {' '.join(new.split())}\n    {'; '.join(found) or 'nothing'}  [{time.monotonic() - begin:.0f} s]",
                flush=True,
            )


if __name__ == "__main__":
    main()
