"""The configuration: one TOML file, overridden by --set, every key typed, unknown keys refused with
a suggestion.

A key that would do nothing does not exist. mpitrain/plan/settings/resolve.py fills in what was left open.
"""

import datetime
import hashlib
import json
import math
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec
import tomli_w
from msgspec import Meta

from mpitrain import config_hints, origins, plugins
from mpitrain.errors import ConfigError, counted, nearest
from mpitrain.inputs import as_argument, is_one_line, read_text, shown
from mpitrain.origins import KeyOrigin, Origins

MOST_BYTES = 1 << 18  # of a configuration file
MOST_DOTS = 1_000  # in a line: tomllib's memory grows with the square of a dotted key's parts
MOST_BASES = 32
TOO_DEEP = "brackets within brackets, too deep; no key needs more than one"
MOST_THREADS = 1_024  # no node has more cores; glibc ends a process that can't start as many

Count = Annotated[int, Meta(ge=1, le=2**63 - 1)]
CountOrNone = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # 0: derived, or never
Length = Annotated[int, Meta(ge=1, le=2**31 - 1)]  # of a side of a tensor
LengthOrNone = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Heads = Annotated[int, Meta(ge=1, le=2**16)]
Fraction = Annotated[float, Meta(gt=0, lt=1)]
Share = Annotated[float, Meta(ge=0, lt=1)]
Weight = Annotated[float, Meta(ge=0, lt=1e9)]
When = Count | Annotated[str, Meta(max_length=40)]  # a step, or tokens read: "4B"


# Tables name `frozen` again: they inherit it from this one, but type checkers don't see that.
class ConfigTable(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A table of the configuration file."""


class Run(ConfigTable, frozen=True):
    dir: str = ""  # directory of the run; "": runs/ and the name of the configuration file
    steps: Count = 120  # optimizer steps of the whole run, those before a resume included
    seed: CountOrNone = 1  # random seed of initial weights, the order of the data, and held-out documents
    save_every: CountOrNone = 40  # steps between checkpoints; 0: only at the end
    # how a checkpoint is written. background: from a copy in host memory, while training continues;
    # blocking: without a copy
    save: Literal["background", "blocking"] = "background"
    # which ranks write files of a checkpoint: each rank, the first of each node (node), or rank 0
    # for all (one)
    shards: Literal["rank", "node", "one"] = "rank"
    # node-local directory: shards are written there first, then copied to run.dir in one piece; "":
    # none
    staging: str = ""
    # share of a checkpoint's chunks that is verified before a run resumes from it
    verify: Annotated[float, Meta(ge=0, le=1)] = 1.0
    keep: CountOrNone = 0  # number of newest checkpoints to keep; 0: all
    # also keep checkpoints of steps that are multiples of this; 0: none
    keep_every: CountOrNone = 0
    keep_best: CountOrNone = 0  # number of checkpoints to keep that are the best by run.keep_best_by
    # metric that ranks checkpoints for run.keep_best: val_loss or another number of metrics.jsonl,
    # or TASK/METRIC and SOURCE/loss, such as hellaswag/acc_norm. acc, acc_norm, acc_bytes,
    # exact_match, tokens_per_s, mfu and hfu are better if higher, all others if lower
    keep_best_by: str = "val_loss"
    eval_every: CountOrNone = 40  # steps between validations; 0: only first and last
    eval_batches: Count = 2  # validation batches of batch.global sequences each
    eval_sources: bool = False  # with data.sources: validate each alone, too, on as many batches
    # files of tasks (JSON lines, as `mpitrain eval --tasks` has them) that are scored at each
    # validation; the name of a task is its file's, without .jsonl
    eval_tasks: str | tuple[str, ...] = ()
    eval_shots: Annotated[int, Meta(ge=0, le=1000)] = 0  # solved examples before each question of eval_tasks
    # skipped steps in a row that end the run as diverged; 0: never. fp16 skips a few at first
    max_skips: CountOrNone = 50
    # steps whose routing is recorded in routing.npz, for models with experts
    routing: CountOrNone = 0
    # steps, or seconds such as "30s", between printed steps where the output is no terminal; 0:
    # only the first and the last. Validated steps are always printed
    log_every: CountOrNone | str = "5s"
    # each rank writes a log in the run directory; true in jobs that mpitrain writes
    logs: bool = False
    # checks before the first step: space, clocks and devices; full: also the bandwidth of each
    # axis, and always a report; off: none
    preflight: Literal["auto", "off", "full"] = "auto"
    # wall-clock limit of a run, from its start, as hours:minutes:seconds; "": the scheduler's
    # limit, if any
    time_limit: str = ""
    # part of the time limit to leave unused, in seconds, besides the time of a step and of two
    # saves
    time_margin_s: Annotated[float, Meta(ge=0)] = 60.0
    # machine for predictions, for run.layout and the table at the end of a run: a name of
    # jobs/machines/, or a file of `mpitrain bench machine`; "": this node's memory, and the times
    # of the most similar GPU, or of a laptop
    machine: str = ""
    # load imbalance of experts, for predictions: tokens of the most loaded rank of parallel.ep over
    # the mean; 0: from experts.replay, else an estimate
    expert_load: Annotated[float, Meta(ge=0)] = 0.0
    # number of steps whose instructions are timed and written to trace.json, from the second step
    # on
    trace: CountOrNone = 0
    # steps and ranks for torch's profiler, such as "steps=20-22, ranks=0,5": writes a table, and
    # profile.json with operators and kernels under their instructions; default of ranks: 0; "":
    # none
    profile: str = ""
    # measure the gradient noise scale (arXiv:1812.06162) each step: grad_signal and grad_noise in
    # metrics.jsonl, from the gradients of data-parallel ranks, and of microbatches with
    # parallel.reduce = "microbatch"
    noise_scale: bool = False
    # loggers beside metrics.jsonl: tensorboard, csv, wandb, mlflow; or "module:name", a class of
    # your own
    loggers: str | tuple[str, ...] = ()
    # device to compute on; cuda is torch's name for GPUs, both NVIDIA's and AMD's
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # fuse the operations between matrix products with torch.compile. It needs a C++ compiler on
    # CPUs, Triton and a C compiler on GPUs; auto: on NVIDIA's GPUs, where all ranks have them
    compile: bool | Literal["auto"] = "auto"
    # how the layout is chosen. default: data-parallel ranks, and pipeline ranks for the rest;
    # planned: the planner's first choice, with the keys that are set; auto: planned where no key of
    # parallel and pipeline is set and the default doesn't fit, or a measured run.machine predicts a
    # gain of a tenth
    layout: Literal["auto", "planned", "default"] = "auto"
    # torch threads per rank; 0: OMP_NUM_THREADS, else 1. Bits depend on it
    threads: Annotated[int, Meta(ge=0, le=MOST_THREADS)] = 0

    @property
    def logger_names(self) -> tuple[str, ...]:
        """Return the loggers, one or several."""
        return (self.loggers,) if isinstance(self.loggers, str) else self.loggers

    @property
    def task_files(self) -> tuple[str, ...]:
        """Return the files of tasks, one or several."""
        return (self.eval_tasks,) if isinstance(self.eval_tasks, str) else self.eval_tasks


class Model(ConfigTable, frozen=True):
    preset: str = "quickstart"  # published sizes; other keys of the model override them
    # model family, which defines the layers; default, also for other keys of this table: the
    # preset's; "module:name": a ModelFamily of your own
    family: str = ""
    # initial weights: a Hugging Face folder, a run directory or a step. The sizes are taken from
    # it, not from a preset; the optimiser state starts from zero
    init: str = ""
    layers: Annotated[int, Meta(ge=1, le=10_000)] | None = None  # transformer blocks
    width: Length | None = None  # hidden size: features of a token between blocks
    heads: Heads | None = None  # attention heads of queries
    kv_heads: Heads | None = None  # heads of keys and values (grouped-query attention)
    ffn: Length | None = None  # hidden units of the feed-forward
    vocab: Length | None = None  # rows of the vocabulary; default: the preset's, else the tokenizer's
    # pad the vocabulary to a multiple of this, with rows that no token uses and none predicts
    vocab_multiple: Count | None = None
    padding: CountOrNone | None = None  # rows of model.vocab that pad it; derived
    tied: bool | None = None  # embedding and head share their weights
    # multi-token prediction: number of further tokens that each position predicts in training, one
    # block each
    mtp: Annotated[int, Meta(ge=0, le=16)] | None = None
    # weight of the mean loss of the further tokens of model.mtp; the next token's loss has weight
    # 1; default: 0.3
    mtp_weight: Annotated[float, Meta(ge=0)] | None = None
    # epsilon of norms, added to the mean of the squares; default: the preset's, else the family's
    eps: Annotated[float, Meta(gt=0, lt=1)] | None = None
    ffn_biased: bool | None = None  # feed-forwards have biases
    positions: Length | None = None  # number of learned positions, the longest sequence
    # GELU: approximated by tanh, or exact, by the error function; default: the family's
    gelu: Literal["tanh", "exact"] | None = None
    # soft cap c of logits: they become c tanh(logit / c); 0: none
    logit_cap: Annotated[float, Meta(ge=0)] | None = None
    # dropout of the sum of token and position embeddings; 0: none
    embedding_dropout: Share | None = None
    attention_dropout: Share | None = None  # dropout of attention's probabilities; 0: none
    # dropout of the outputs of attention and feed-forward, before they are added to the residual
    # stream; 0: none
    residual_dropout: Share | None = None


class AttentionTable(ConfigTable, frozen=True):
    """Attention, besides model.heads and model.kv_heads. Defaults: the preset's, else the family's."""

    # width of a head's queries and keys; 0: model.width / model.heads; latent attention: of their
    # part without positions
    head_width: LengthOrNone | None = None
    theta: Annotated[float, Meta(gt=1)] | None = None  # base of rotary positions (RoPE)
    # YaRN: factor by which the context is extended; 1: no YaRN
    yarn_factor: Annotated[float, Meta(ge=1)] | None = None
    # YaRN: context length that the model was trained with originally
    yarn_length: CountOrNone | None = None
    # YaRN: coefficient (mscale) of the temperature of attention's scores; 0: no temperature
    yarn_mscale: Annotated[float, Meta(ge=0)] | None = None
    # YaRN: beta_fast. Feature pairs with more rotations than this over attention.yarn_length are
    # not scaled
    yarn_fast: Annotated[float, Meta(gt=0)] | None = None
    # YaRN: beta_slow. Feature pairs with fewer rotations than this are scaled by the whole factor;
    # those between are interpolated
    yarn_slow: Annotated[float, Meta(gt=0)] | None = None
    # YaRN: round the bounds of the interpolation to whole feature pairs (truncate)
    yarn_rounded: bool | None = None
    # linear scaling: factor that positions are divided by; 1: none
    linear_factor: Annotated[float, Meta(ge=1)] | None = None
    # dynamic NTK scaling: its factor, by which theta grows where data.sequence exceeds
    # attention.dynamic_length
    dynamic_factor: Annotated[float, Meta(ge=1)] | None = None
    # dynamic NTK scaling: context length that the model was trained with originally; 0: no such
    # scaling
    dynamic_length: CountOrNone | None = None
    # Llama 3.1's scaling of rotary positions: its factor; 1: none
    llama3_factor: Annotated[float, Meta(ge=1)] | None = None
    # Llama 3.1's scaling: context length that the model was trained with originally
    llama3_length: CountOrNone | None = None
    # Llama 3.1's scaling: low_freq_factor. Feature pairs with fewer rotations than this over
    # attention.llama3_length are scaled by the whole factor
    llama3_low: Annotated[float, Meta(gt=0)] | None = None
    # Llama 3.1's scaling: high_freq_factor. Feature pairs with more rotations than this are not
    # scaled; those between are interpolated
    llama3_high: Annotated[float, Meta(gt=0)] | None = None
    # sliding-window attention: number of positions that a query attends to, its own included; 0:
    # all
    window: CountOrNone | None = None
    # repeated pattern of blocks with sliding windows, a letter for each block; w: window, f: full
    # attention
    window_blocks: Annotated[str, Meta(pattern="^[wf]+$", max_length=10_000)] | None = None
    # repeated pattern of blocks with rotary positions, a letter for each block; r: rotary, n: none
    rotary_blocks: Annotated[str, Meta(pattern="^[rn]+$", max_length=10_000)] | None = None
    # attention.theta of blocks with a window, whose positions aren't scaled; 0: that of all blocks
    window_theta: Annotated[float, Meta(ge=0)] | None = None
    # projections that have a bias: none; queries, keys and values; or these and the output
    biases: Literal["none", "qkv", "all"] | None = None
    normed: bool | None = None  # queries and keys of each head are normalised (QK norm)
    # width whose square root divides attention's scores; 0: the width of a head
    score_width: LengthOrNone | None = None
    # soft cap c of attention's scores: they become c tanh(score / c); 0: none
    score_cap: Annotated[float, Meta(ge=0)] | None = None
    # latent attention (MLA): width of the latent vector of queries; 0: none, queries are projected
    # directly
    q_rank: CountOrNone | None = None
    # latent attention (MLA): width of the latent vector of keys and values
    kv_rank: LengthOrNone | None = None
    # number of features of a head that have rotary positions, the first ones; 0: all. Latent
    # attention: number of further features of queries and keys, which have positions
    rotary_width: LengthOrNone | None = None
    value_width: LengthOrNone | None = None  # latent attention (MLA): width of a head's values


class ExpertsTable(ConfigTable, frozen=True):
    """For families with experts. Defaults: the preset's, else the family's."""

    # number of experts of a block that has any. At most 1,024: a layer's loads are reduced as one
    # piece (optim/expert_bias.py)
    count: Annotated[int, Meta(ge=0, le=1024)] | None = None
    # number of experts that a token is sent to (top-k)
    active: Annotated[int, Meta(ge=0, le=2**10)] | None = None
    # number of shared experts, which process every token
    shared: Annotated[int, Meta(ge=0, le=2**10)] | None = None
    width: LengthOrNone | None = None  # hidden units of an expert
    # function that turns the router's logits into scores
    score: Literal["", "softmax", "sigmoid"] = ""
    # normalise the weights of a token's experts to a sum of 1, before `scale`
    normalised: bool | None = None
    # factor of the weights of a token's experts (routed scaling factor)
    scale: Annotated[float, Meta(gt=0)] | None = None
    # number of groups of experts; a token's experts come from `groups_active` of them, hence from
    # few nodes
    groups: CountOrNone | None = None
    groups_active: CountOrNone | None = None  # number of groups that a token's experts come from
    # number of first blocks without experts, which have a feed-forward of model.ffn
    first: CountOrNone | None = None
    every: CountOrNone | None = None  # every n-th block after `first` has experts
    # load balancing of experts: by an auxiliary loss over microbatches, sequences or the step
    # before (global); or by a bias of the scores, without a loss (bias)
    balance: Literal["", "none", "microbatch", "sequence", "global", "bias"] = ""
    # weight of the load-balancing loss; with bias: of an additional loss over sequences
    balance_weight: Annotated[float, Meta(ge=0)] | None = None
    # experts.balance = "bias": step size of the biases; 0: they stay fixed
    bias_rate: Annotated[float, Meta(ge=0)] | None = None
    z_weight: Annotated[float, Meta(ge=0)] | None = None  # weight of the router's z-loss
    # path of a routing.npz (run.routing): tokens go to the experts recorded there, with the
    # router's current weights, and steps are predicted with its loads; "": none
    replay: str = ""
    # capacity factor: tokens that an expert accepts of a rank's microbatch in training, over the
    # mean; 0: all (dropless). Validation and sampling are dropless
    capacity: Annotated[float, Meta(ge=0)] = 0.0
    # tokens that a rank receives at once for its experts, over the mean; more come in further
    # rounds
    buffer: Annotated[float, Meta(gt=0)] = 2.0
    # how tokens cross between nodes. flat: one copy for each of its experts; hierarchical: one copy
    # for each node; auto: hierarchical where experts are spread over several nodes
    # (comm.node_ranks)
    dispatch: Literal["auto", "flat", "hierarchical"] = "auto"
    # type of tokens sent to experts and back: "": that of the computation; bf16: rounded; fp8: to
    # the experts, and bf16 back
    wire: Literal["", "bf16", "fp8"] = ""


class DataSource(ConfigTable, frozen=True):
    path: str | tuple[str, ...]
    # share of the sequences, as a ratio; or [[step, weight], ...]: weights that hold from these steps on, or
    # from so many tokens read, such as "4B"
    weight: Weight | tuple[tuple[When, Weight], ...] = 1.0
    epochs: CountOrNone = 0  # how often its text is read at most; 0: without end
    source: Literal[
        "auto", "text", "jsonl", "chat", "parquet", "megatron", "datatrove", "npy", "nanogpt", "python-stdlib"
    ] = "auto"
    text_key: str = "text"


class Data(ConfigTable, frozen=True):
    # format of the corpus: python-stdlib, text, jsonl, parquet, megatron, datatrove, npy, nanogpt;
    # chat: conversations, where only answers are trained on (fine-tuning); auto: by the first bytes
    # of each file; or "module:name", a Source of your own
    source: str = "python-stdlib"
    # several sources with weights, in place of source and path: tables [[data.sources]] of path,
    # weight, epochs, source (default: auto) and text_key
    sources: tuple[DataSource, ...] = ()
    # a file, a folder or a pattern such as "a/**/*.txt", or a list of these
    path: str | tuple[str, ...] = ""
    # text for validation, in the format of data.source; "": documents of data.path are held out
    val_path: str | tuple[str, ...] = ""
    text_key: str = "text"  # jsonl: the key of each line that has the text; parquet: the column
    # token files without an index: the token that ends each document, or none; default: the
    # tokenizer's
    ends: CountOrNone | Literal["none"] | None = None
    # type of tokens in files that don't state it; "": the format's default
    dtype: Literal["", "uint8", "uint16", "uint32", "uint64"] = ""
    # [[first, end], ...]: sequences of the order that are not read, such as those before a loss
    # spike; `mpitrain data show` prints their numbers
    skip: tuple[tuple[CountOrNone, Count], ...] = ()
    damaged: CountOrNone = 0  # maximum number of damaged lines, rows or documents to leave out
    # a tokenizer.json of the tokenizers library; or bytes: a token for each byte, 256 of them
    tokenizer: str = "bytes"
    # token between documents; "": none; default: as the tokenizer's model was trained
    end_of_text: str | None = None
    # token before each document; "": none; default: as the tokenizer's model was trained
    begin_of_text: str | None = None
    # how documents share a sequence. joined: attention crosses documents; separate: attention stays
    # within a document, and none predicts the next one; packed: as separate, with whole documents
    # by best fit, and positions without loss where none fits
    documents: Literal["joined", "separate", "packed"] = "joined"
    sequence: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 128  # tokens of a sequence (context length)
    val_fraction: Fraction = 0.05  # share of the tokens that is held out for validation
    # permutation of the sequences of an epoch: feistel, in constant memory; or sorted, that of
    # older versions, with 16 bytes a sequence on every rank; default: the run's own, feistel for a
    # new one
    order: Literal["feistel", "sorted"] | None = None
    # folder of prepared tokens that several runs share: the first run writes those of its text and
    # tokenizer, others read them; "": none
    tokens: str = ""
    # how prepared tokens are read: map, as memory maps; pread, by read calls, where a file system
    # is slow at maps: ends of documents are in memory then, 8 bytes each on every rank
    read: Literal["map", "pread"] = "map"

    @property
    def kinds(self) -> list[str]:
        """Return the format of each source."""
        return [source.source for source in self.sources] or [self.source]

    @property
    def separates(self) -> bool:
        """Return whether attention stays within documents."""
        return self.documents != "joined"


class Batch(ConfigTable, frozen=True, rename={"global_": "global"}):
    # sequences per step over all ranks; 0: the smallest multiple of dp * micro that is at least 24
    global_: CountOrNone = 0
    # [[step, sequences], ...]: batch-size schedule, batch.global from each of these steps on; in place of a
    # step, tokens read before it: "4B"
    growth: tuple[tuple[When, Count], ...] = ()
    # [[step, tokens], ...]: sequence-length curriculum: from these steps on (or tokens, likewise)
    # sequences are cut into rows of so many tokens; the place in the data and a step's tokens stay
    lengths: tuple[tuple[When, Count], ...] = ()
    micro: Count = 1  # sequences per microbatch


class Parallel(ConfigTable, frozen=True):
    dp: CountOrNone = 0  # data-parallel ranks; 0: the ranks that other axes leave
    # pipeline-parallel ranks; 0: the ranks that dp leaves, or those of a schedule's table
    pp: CountOrNone = 0
    tp: Count = 1  # tensor-parallel ranks, which divide each layer
    # sequence parallelism, with tp: activations between blocks are divided along the sequence
    sequence: bool = True
    # with sequence: gathered inputs of matrix products are not kept; the backward gathers them
    # again
    regather: bool = False
    # with tp: overlap communication, by computing one chunk while the others are sent
    async_tp: bool = False
    cp: Count = 1  # context-parallel ranks, which divide each sequence
    # expert-parallel ranks, which divide the experts of a block; taken from tp x cp x dp
    ep: Count = 1
    # ranks that divide each expert (expert tensor parallelism); also taken from tp x cp x dp
    etp: Count = 1
    # context parallelism, how the ranks of cp exchange. ring: keys and values are passed round the
    # ranks; zigzag: likewise, with chunks of equal work; gather: each rank gathers them all;
    # ulysses: heads are divided
    context: Literal["zigzag", "ring", "gather", "ulysses"] = "zigzag"
    # ZeRO stage, what data-parallel ranks divide: 1 the optimiser state, 2 also gradients, 3 also
    # weights; default: 1 with more than one data-parallel rank. 1 has the bits of 0, and overlaps
    # its reduce-scatter and all-gather
    zero: Annotated[int, Meta(ge=0, le=3)] | None = None
    # with zero: number of data-parallel ranks that divide the state (hybrid sharding); 0: all
    dp_shard: CountOrNone = 0
    # when gradients are reduced over data-parallel ranks: after each microbatch, or once a step,
    # which keeps whole gradients until then; auto: microbatch with zero 2 and 3, to save memory,
    # step with 0 and 1
    reduce: Literal["auto", "step", "microbatch"] = "auto"
    # zero 3, how long gathered weights are kept: for one use, or the whole step; auto: by the
    # bandwidth between nodes
    gather: Literal["auto", "use", "step"] = "auto"
    ahead: Count = 1  # zero 3: number of blocks whose weights are prefetched


class Pipeline(ConfigTable, frozen=True):
    # pipeline schedule: a name; auto: the one with the shortest simulated step; the path of a
    # table, in the form of mpitrain schedule --help; "module:name": a ScheduleFamily of your own
    schedule: str = "1f1b"
    chunks: Count | None = None  # stages per rank; default: the schedule's, or its table's
    # number of blocks of each stage, also halves; default: balanced
    stages: list[Annotated[float, Meta(gt=0, multiple_of=0.5)]] | None = None
    # interleaved: microbatches that a chunk computes before the next chunk does
    group: Count | None = None
    segments: Count | None = None  # seq1f1b: segments of a microbatch's sequence
    # automatic schedules: times of F, I, W and of a message, to plan with
    times: Annotated[list[Annotated[float, Meta(ge=0)]], Meta(min_length=4, max_length=4)] | None = None
    # automatic schedules: times of F, I and W of each stage, instead of equal shares of `times`
    stage_times: (
        list[Annotated[list[Annotated[float, Meta(gt=0)]], Meta(min_length=3, max_length=3)]] | None
    ) = None
    # automatic schedules: a run with run.trace, or its trace.json, whose measured times they plan
    # with
    trace: str = ""
    # automatic schedules: maximum number of microbatches in flight on a rank
    memory_limit: Annotated[float, Meta(gt=0)] | None = None
    # automatic schedules: share of a stash that is kept from I to W; default: 1 with a memory_limit
    weight_memory: Annotated[float, Meta(ge=0, le=1)] | None = None
    # automatic schedules: recompute activations where that makes a step with this memory_limit shorter;
    # this share of a stash, the input of a stage, is kept then
    recompute: Annotated[float, Meta(ge=0, lt=1)] | None = None
    # automatic schedules: offload activations where that makes a step with this memory_limit
    # shorter; the time, in the unit of `times`, to copy a rank's activations of a microbatch to
    # host memory, or back
    offload: Annotated[float, Meta(ge=0)] | None = None
    # last n backwards run interleaved, bucket by bucket, so that reductions overlap; with zero 1 to
    # 3 also the first n forwards; only with one stage; 0: 1, or over several nodes up to 4, by
    # their links
    tail: CountOrNone = 0
    # dualpipe and dualpipev, with zero 3 or reduce = "microbatch": how a forward and a backward
    # that overlap run. whole: one after the other; parts: block by block, with the weights of two blocks
    # in memory
    pairs: Literal["whole", "parts"] = "whole"


class Memory(ConfigTable, frozen=True):
    # activation recomputation (checkpointing): what the backward recomputes instead of keeping it.
    # selective: norms, attention and gated products; full: a whole block; every-k: k blocks
    # together
    recompute: Literal["none", "full", "every-k", "selective"] = "none"
    # every-k: number of blocks of which only the first one's input is kept; 0: the number that
    # needs least memory
    every: CountOrNone = 0
    # what GPUs keep in host memory: activations that wait for the backward; the optimiser's master
    # weights and moments, which are updated there; or all
    offload: Literal["none", "activations", "optimizer", "all"] = "none"
    # memory limit of a rank, in 10**9 bytes: of its GPU, or of its process on a CPU. A run that
    # needs more is planned if its layout is open, else refused; 0: the available memory
    limit_gb: Annotated[float, Meta(ge=0)] = 0.0


class Precision(ConfigTable, frozen=True):
    # type of weights and activations; below fp32, master weights and sums are fp32
    compute: Literal["fp32", "fp64", "bf16", "fp16", "fp8"] = "fp32"
    # type in which gradients are sent between data-parallel ranks: same as their sums, or rounded
    # to bf16
    reduce: Literal["same", "bf16"] = "same"
    # type of a microbatch's weight gradient before its fp32 sum: fp32, or rounded to `compute`;
    # auto: rounded for bf16 on a CPU
    products: Literal["auto", "fp32", "rounded"] = "auto"


class Numerics(ConfigTable, frozen=True):
    # bits of losses and weights. run: alike in every run of a layout; layout: for every
    # parallel.dp, too, at the cost of gradient buffers
    reproducible: Literal["run", "layout"] = "run"
    # deterministic kernels on a GPU, some of them slower; a CPU is always deterministic
    deterministic: bool = True
    # steps between checks that replicas are equal, which are also made before a save; 0: never
    check_every: CountOrNone = 100
    # steps between steps that are computed twice and compared, to find silent corruption; 0: never
    rerun_every: CountOrNone = 0


class SpikesTable(ConfigTable, frozen=True):
    """Loss spikes: steps whose loss is far above earlier ones."""

    # reaction to a loss spike. count: report it; skip: report it and leave out the update
    # (run.max_skips in a row end a run); rollback: return to the newest checkpoint of
    # run.save_every, and skip the data read since
    do: Literal["nothing", "count", "skip", "rollback"] = "nothing"
    window: Annotated[int, Meta(ge=4, le=4096)] = 64  # number of earlier losses whose median is taken
    # number of deviations above the median from which a loss is a spike, see
    # training/checks/spikes.py
    threshold: Annotated[float, Meta(gt=0)] = 10.0
    most: CountOrNone = 5  # number of rollbacks that end a run; 0: never


class RecoveryTable(ConfigTable, frozen=True):
    """Fast restarts: copies of the state in memory of the node, beside checkpoints on disk."""

    every: CountOrNone = 0  # steps between copies in memory; 0: none
    folder: str = "/dev/shm"  # memory file system of each node for these copies
    # distance in ranks to the partner, which keeps a copy of what only this rank has; "auto": the
    # ranks of a node, where there are several nodes; 0: no partner
    partner: CountOrNone | Literal["auto"] = "auto"
    # replace a node by a spare one (mpitrain supervise --nodes) when a rank of it takes this many
    # times as long as others with the same work, in three windows of comm.slow_after steps in a row;
    # default: never
    replace_slow: Annotated[float, Meta(gt=1)] | None = None
    # number of started ranks that wait outside the layout and replace ranks that die; needs
    # Open MPI 5 and mpirun --with-ft ulfm
    spares: CountOrNone = 0
    # resume with fewer data ranks when more ranks die, or nodes are lost, than there are spares for,
    # and with parallel.dp again when there are ranks for it; the bits stay
    shrink: bool = False


class OptimizerTable(ConfigTable, frozen=True):
    # optimiser. muon takes the matrices of blocks, and adamw the embedding, head and norms;
    # "module:name": an OptimizerKind of your own
    name: str = "adamw"
    # peak learning rate; muon's steps are scaled like adamw's, so that the same rates suit
    lr: Annotated[float, Meta(gt=0)] = 3e-3
    # weight decay, lr * decay of a weight in each step; of embedding and head, too, not of norms
    # and biases
    decay: Annotated[float, Meta(ge=0)] = 0.1
    # gradient clipping: maximum norm of all gradients; 0: no clipping
    clip: Annotated[float, Meta(ge=0)] = 1.0
    betas: tuple[Share, Share] | None = None  # decay rates of the moments; default: the optimiser's
    # epsilon, added to the root of the second moment
    eps: Annotated[float, Meta(gt=0)] | None = None
    momentum: Share | None = None  # momentum: share of the previous step's that is kept
    nesterov: bool | None = None  # Nesterov's momentum
    ns_steps: Annotated[int, Meta(ge=1, le=100)] | None = None  # number of Newton-Schulz iterations
    # weights that are not trained, by name, such as "embedding.weight" or "blocks.0.*"; * matches
    # any characters
    frozen: tuple[str, ...] = ()
    # type of the optimiser's moments: fp32, which is fp64 with compute = "fp64"; or bf16,
    # stochastically rounded
    moments: Literal["fp32", "bf16"] = "fp32"


class Schedule(ConfigTable, frozen=True):
    # learning-rate schedule after the warm-up. cosine: cosine decay; wsd: stable, with a decay at
    # the end (warm-up, stable, decay); constant
    name: Literal["cosine", "wsd", "constant"] = "cosine"
    # number of warm-up steps, in which the learning rate rises to optimizer.lr
    warmup: CountOrNone = 10
    decay: CountOrNone = 0  # wsd: number of steps of the final decay; 0: a tenth of the run
    # length of the learning-rate schedule in steps; later steps keep its last rate; 0: run.steps
    steps: CountOrNone = 0
    final: Annotated[float, Meta(ge=0, le=1)] = 0.1  # last learning rate as a share of optimizer.lr


class Comm(ConfigTable, frozen=True):
    # how collectives move bytes: as our own messages, by MPI's collectives, or in memory that the
    # ranks of a node share; auto: by axis and size. The bits are the same
    transport: Literal["auto", "messages", "collectives", "shared"] = "auto"
    # how GPU buffers are sent: direct to MPI, or staged in pinned host memory; auto: direct where
    # this MPI reports support. A child process tests uncertain cases, and `direct` where the MPI
    # reports none
    device: Literal["auto", "direct", "staged"] = "auto"
    # a message between stages is sent only when its receive is posted: finds schedules that
    # deadlock without buffering
    synchronous: bool = False
    # what drives MPI while a rank computes. poll: the rank itself, between instructions; thread: a
    # progress thread, for ranks with a core to spare
    progress: Literal["poll", "thread"] = "poll"
    # size of a gradient bucket, which is reduced in one operation, in 2**20 bytes; at least a
    # block's gradients
    bucket_mb: Annotated[float, Meta(gt=0)] = 4.0
    # seconds of a wait from which it counts as a hang; default: ten of the run's own steps, between
    # 60 and 600 s
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    slow_after: CountOrNone = 50  # steps between reports of slow ranks and links; 0: never
    # number of neighbouring ranks that count as a node; 0: as the launcher placed them
    node_ranks: CountOrNone = 0
    # levels of collectives. auto: over several nodes, inside nodes and between them in turn; one:
    # all ranks at once. The bits are the same
    levels: Literal["auto", "one"] = "auto"


class Config(ConfigTable, frozen=True):
    run: Run = Run()
    model: Model = Model()
    attention: AttentionTable = AttentionTable()
    experts: ExpertsTable = ExpertsTable()
    data: Data = Data()
    batch: Batch = Batch()
    parallel: Parallel = Parallel()
    pipeline: Pipeline = Pipeline()
    memory: Memory = Memory()
    precision: Precision = Precision()
    numerics: Numerics = Numerics()
    spikes: SpikesTable = SpikesTable()
    recovery: RecoveryTable = RecoveryTable()
    optimizer: OptimizerTable = OptimizerTable()
    schedule: Schedule = Schedule()
    comm: Comm = Comm()


# of keys that were left open, where neither the preset nor the family says anything
NEUTRAL: dict[str, dict[str, Any]] = {
    # the weight: DeepSeek-V3 (arXiv:2412.19437, section 4.2), for most of its training
    "model": dict(mtp=0, mtp_weight=0.3, vocab_multiple=1, padding=0),
    "attention": dict(head_width=0, yarn_length=0, dynamic_length=0, llama3_length=0)
    | dict(kv_rank=0, rotary_width=0, value_width=0),
    "experts": dict(count=0, active=0, width=0, groups=0, groups_active=0, every=0),
}

FIRST_FAMILY = "llama"  # of presets that say nothing else, and of runs before there was a choice
DERIVED = "derived"  # the table of a run directory's config.toml for its readers, not for the run
SCALARS = (bool, int, float, datetime.date, datetime.time)  # of TOML
PATHS = (
    *("run.dir", "run.staging", "run.machine", "recovery.folder", "data.path", "data.val_path"),
    *("data.tokenizer", "data.tokens", "experts.replay", "model.init", "pipeline.schedule"),
    "pipeline.trace",
)

AnyConfig = TypeVar("AnyConfig", bound=Config)


# ---------------------------------------------------------------- reading


class LoadedConfig(NamedTuple):
    """A configuration, and where its keys come from."""

    config: Config
    origins: Origins

    def changed(self, config: Config, origin: KeyOrigin) -> "LoadedConfig":
        """Return another configuration; the keys whose values differ come from `origin`."""
        before = flatten(self.config)
        keys = [key for key, value in flatten(config).items() if value != before[key]]
        return LoadedConfig(config, self.origins.updated(keys, origin))

    def with_values(self, values: Mapping[str, Any], origin: KeyOrigin) -> "LoadedConfig":
        """Return the configuration with other values of some keys, which come from `origin`."""
        return LoadedConfig(with_values(self.config, values), self.origins.updated(values, origin))


def load(path: str | Path | None, overrides: Iterable[str] = ()) -> Config:
    """Return the configuration alone. Raises as read() does."""
    return read(path, overrides).config


def read(path: str | Path | None, overrides: Iterable[str] = ()) -> LoadedConfig:
    """Read a configuration file, its bases and overrides. Raises ConfigError with file and key."""
    typed: set[str] = set()
    by_key: dict[str, KeyOrigin] = {}
    tree = {} if path is None else _read(Path(path), {}, typed, by_key)
    own: dict[str, Any] = {}
    for override in overrides:
        _override(own, override)
        _override(tree, override)
    typed |= _plugins(own)
    config = parse(tree, typed)
    key_origins = Origins(by_key).updated(_flat(own), KeyOrigin(origins.SET))
    if config.run.dir:
        return LoadedConfig(config, key_origins)
    named = msgspec.structs.replace(config.run, dir=f"runs/{Path(path).stem if path else 'quickstart'}")
    _require_writable("run.dir (named after the configuration file)", named.dir)
    named_config = msgspec.structs.replace(config, run=named)
    return LoadedConfig(named_config, key_origins.updated(["run.dir"], KeyOrigin(origins.DERIVED)))


def parse(tree: Mapping[str, Any], typed: Collection[str] = ()) -> Config:
    """Check a tree of tables against the typed keys and return the Config.

    typed: plug-ins that the user named in this command; another one is refused (plugins.py).
    """
    _refuse_unknown(tree, Config, "")
    plugins.refuse_untyped(tree, typed)
    try:
        config = msgspec.convert(_at_home(tree), Config, strict=True)
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
        # until msgspec 0.21 the first is no ValueError; TOML has no null: the key is left out
        what, _, place = str(error).replace(" | null`", "`").partition(" - at `$.")
        place = place.rstrip("`")
        refusal = f"{what[0].lower()}{shown(what[1:])}{_instead(tree, place)}"
        raise ConfigError(f"{shown(place)}: {refusal}") from None
    for key, value in flatten(config).items():
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str):
                _require_writable(key, text)
        _require_finite(key, value)
    return config


def _require_finite(key: str, value: Any) -> None:
    """Raise ConfigError for inf and nan, which TOML has; nan passes some limits."""
    if isinstance(value, list | tuple):
        for one in value:
            _require_finite(key, one)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}: expected a finite number, got {value}")


def _at_home(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree with the home folder for `~` in paths: no shell does it after --set."""
    resolved = {table: dict(keys) for table, keys in tree.items()}
    for key in PATHS:
        table, _, name = key.partition(".")
        value = resolved.get(table, {}).get(name)
        if isinstance(value, list | tuple):
            resolved[table][name] = [_expanded(key, item) for item in value]
        elif value is not None:
            resolved[table][name] = _expanded(key, value)
    return resolved


def _expanded(key: str, value: Any) -> Any:
    """Return a path with the home folder in place of `~`; anything else as it is."""
    if not isinstance(value, str) or not value.startswith("~"):
        return value
    path = os.path.expanduser(value)
    if path == value:
        user = shown(value.partition("/")[0])
        instead = f"write the whole path, or ./{user} for a name"
        raise ConfigError(f'{key} = "{shown(value)}": found no home folder of {user}; {instead}')
    return path


def _instead(tree: Mapping[str, Any], place: str) -> str:
    """Return what msgspec doesn't say of a wrong value at `table.key`: its choices, or the value."""
    if not place:
        return ""
    kind: Any = Config
    for name in place.partition("[")[0].split("."):
        kind = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}[name]
        tree = tree[name]
    literals = [some for some in (kind, *get_args(kind)) if get_origin(some) is Literal]
    choices = [choice for literal in literals for choice in get_args(literal) if choice]
    if choices:
        choices += ["true", "false"] * (bool in get_args(kind))
        instead = config_hints.instead_of_value(place, tree)
        return f"; needed one of {', '.join(choices)}" + f": {instead}" * bool(instead)
    current = f": {shown(tree)!r}" if isinstance(tree, str) else f": {shown(tree)}"
    works = config_hints.form_that_works(place, tree, kind)
    return f"{current}; write {works}" if works else current


def _require_writable(key: str, value: str) -> None:
    """Raise ConfigError for text that config.toml can't hold: paths needn't be UTF-8, TOML is."""
    refusal = ""
    change = "rename it, or link to it by another name"
    if "\0" in value:
        refusal = "found a NUL character, which no path and no name has"
        change = "leave it out"
    elif any("\ud800" <= c <= "\udfff" for c in value):  # os.fsdecode() has these for such bytes
        refusal = "found bytes that are not UTF-8, which config.toml can't hold"
    elif not is_one_line(value):
        refusal = "found a line break, or another character that controls a terminal"
    if refusal:
        raise ConfigError(f'{key} = "{shown(value)}": {refusal}; {change}')


def _plugins(tree: Mapping[str, Any]) -> set[str]:
    return {name for _, name in plugins.names_in(tree)}


def _is_of_a_run(tree: Mapping[str, Any], real: str) -> bool:
    """Return whether a run has written a config.toml; a copy by another name is the user's own."""
    folder = Path(real).parent
    written = DERIVED in tree or config_hints.recognised(folder) == config_hints.RUN_DIRECTORY
    return Path(real).name == "config.toml" and written


def _read(path: Path, seen: dict[str, Path], typed: set[str], by_key: dict[str, KeyOrigin]) -> dict[str, Any]:
    """Read a file over its bases.

    `seen`: those that led here, by their real paths: one file can have many names. `typed`: takes
    the plug-ins that files of the user's own name. `by_key`: takes the origin of each key.
    """
    try:
        text = read_text(path, MOST_BYTES)
        real = os.path.realpath(path)
    except OSError as error:
        asked = f", the base of {shown(list(seen.values())[-1])}" if seen else ""
        raise ConfigError(f"{shown(path)}{asked}: {error.strerror}; {_to_give(path)}") from None
    if real in seen:
        through = shown(" -> ".join(map(str, seen.values())))
        raise ConfigError(f"{shown(path)}: base leads back to itself through {through}")
    if len(seen) > MOST_BASES:
        most = f"at most {MOST_BASES} are read, join some of them"
        raise ConfigError(f"{shown(path)}: found a base of a base, {len(seen)} times; {most}")
    tree = toml_of(text, path)
    if not _is_of_a_run(tree, real):
        typed |= _plugins(tree)
    base = tree.pop("base", None)
    of_a_run = origins.TABLE in tree or DERIVED in tree
    tree.pop(DERIVED, None)  # another number of ranks gives others
    record = tree.pop(origins.TABLE, None)
    _refuse_unknown(tree, Config, "", f" in {shown(path)}")
    own = dict.fromkeys(_flat(tree), KeyOrigin(origins.FILE, shown(path)))
    if of_a_run:  # it has all keys
        recorded = origins.read_record(record, path)
        own = origins.recorded(recorded, _flat(tree), flatten(Config()), path)
    if base is None:
        by_key |= own
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{shown(path)}: base: expected the path of a TOML file, got {shown(base)}")
    under = _read(path.parent / base, {**seen, real: path}, typed, by_key)
    by_key |= own
    return _merged(under, tree)


def _to_give(path: Path, otherwise: str = "give the path of a TOML file") -> str:
    """Return what to give instead of a path that holds no TOML."""
    recognised = config_hints.recognised(path)
    if not recognised and "=" in str(path):
        return f"a key is changed by --set {shown(path)}"
    if not recognised:
        return otherwise
    if recognised == config_hints.RUN_DIRECTORY:
        return f"it is {recognised}: give {shown(path / 'config.toml')}"
    sizes = config_hints.keys_of_model(path)
    trained = f"; such a model is trained from the beginning with {sizes}" if sizes else ""
    return f"it is {recognised}, needed a TOML file{trained}"


def toml_of(text: str, path: Path) -> dict[str, Any]:
    """Return the tables of a file's text, however deep or long. Raises ConfigError for no TOML."""
    where = shown(path)
    counts = ((line.count("."), number) for number, line in enumerate(text.splitlines(), start=1))
    dots, number = max(counts, default=(0, 0))
    if dots > MOST_DOTS:
        most = f"at most {MOST_DOTS:,} are read; divide it"
        raise ConfigError(f"{where}: found {dots:,} dots in line {number}, {most}")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{where}: not TOML that can be read: {TOO_DEEP}") from None
    except ValueError as error:  # besides what is no TOML, numbers of more than 4,300 digits
        advice = _to_give(path, "correct the file")
        raise ConfigError(f"{where}: not valid TOML: {shown(error)}; {advice}") from None


def hint_for_option(name: str) -> str:
    """Return the key for what was typed as an option, such as --lr; "" if that isn't known."""
    name = name.lower().replace("-", "_")
    own = [key for key in _types() if name in (key, key.partition(".")[2])]
    hint = config_hints.hint_for_alias(name) or (f"use {' or '.join(own)}" if own else "")
    return re.sub(r"^use (\S+)( or \S+)*$", lambda match: f"use --set {match[0][4:]}=VALUE", hint)


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result


def _override(tree: dict[str, Any], override: str) -> None:
    """Apply one `table.key=value`; the value is TOML, and what isn't TOML is a string."""
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {shown(override)}: expected key=value, such as --set run.steps=100")
    value = _value(text, override)
    # a name that TOML would take for a number or a date; a length of time isn't written in seconds
    is_text = name.strip() != "run.time_limit" and _is_text(_types().get(name.strip()))
    if isinstance(value, SCALARS) and is_text:
        value = text.strip()
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {shown(override)}: {shown(key)} is not a table")
    tree[keys[-1]] = value


@cache
def _types() -> dict[str, Any]:
    """Return the type of each key, by "table.key"."""
    return {
        f"{table.encode_name}.{field.encode_name}": field.type
        for table in msgspec.structs.fields(Config)
        for field in msgspec.structs.fields(table.type)
    }


def _is_text(kind: Any) -> bool:
    """Return whether an annotation takes text, and no number."""
    kinds = get_args(kind) if get_origin(kind) not in (None, Annotated) else (kind,)
    plain = {get_args(member)[0] if get_origin(member) is Annotated else member for member in kinds}
    return str in plain and not plain & {int, float, bool}


def _value(text: str, override: str) -> Any:
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except RecursionError:
        raise ConfigError(f"--set {shown(override)}: found {TOO_DEEP}") from None
    except ValueError as error:
        raise ConfigError(f"--set {shown(override)}: {shown(error)}") from None
    if len(document) > 1:
        found = "found another key after the value; give each its own --set"
        raise ConfigError(f"--set {shown(override)}: {found}")
    # 12:00:00 is a length here, not an hour
    return text.strip() if isinstance(document["value"], datetime.time) else document["value"]


def as_override(key: str, text: str) -> str:
    """Return `key=text` as a shell's word after --set; quoted if TOML had a number or date there."""
    try:
        plain = _value(text, key) == text
    except ConfigError:
        plain = False
    return as_argument(f"{key}={text}" if plain else f"{key}={json.dumps(text, ensure_ascii=False)}")


def _refuse_unknown(tree: Any, kind: type[msgspec.Struct], prefix: str, where: str = "") -> None:
    """Raise ConfigError for the first key that isn't one of `kind`, with one like it."""
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in tree.items():
        if key not in fields:
            sibling = nearest(key, fields)
            elsewhere = next((name for name in _types() if name.partition(".")[2] == key), "")
            near = f"{prefix}{sibling}" if sibling else elsewhere or nearest(key, _types())
            hint = config_hints.hint_for_alias(prefix + key) or (
                f"did you mean {near}?" if near else f"known here: {', '.join(fields)}"
            )
            raise ConfigError(f"unknown key {shown(prefix + key)}{where}; {hint}")
        if isinstance(fields[key], type) and issubclass(fields[key], msgspec.Struct):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{prefix}{key}: expected a table, got {shown(value)}")
            _refuse_unknown(value, fields[key], f"{prefix}{key}.", where)


# ---------------------------------------------------------------- writing and comparing


def flatten(config: Config) -> dict[str, Any]:
    """Return the configuration as {"table.key": value}."""
    return _flat(msgspec.to_builtins(config))


def with_values(config: AnyConfig, values: Mapping[str, Any]) -> AnyConfig:
    """Return a configuration, resolved or not, with other values of some keys, such as "parallel.zero"."""
    tables = _nested(values).items()
    replace = msgspec.structs.replace
    return replace(config, **{table: replace(getattr(config, table), **own) for table, own in tables})


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{table}.{key}": value for table, keys in tree.items() for key, value in keys.items()}


def _nested(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    return tables


def plugins_of(config: Config) -> set[str]:
    """Return the plug-ins that a configuration names, as `module:name`."""
    return _plugins(msgspec.to_builtins(config))


def to_toml(config: Config) -> str:
    """Write the configuration as TOML that load() reads back to the same Config."""
    return tomli_w.dumps(_as_tables(config))


def given_toml(given: LoadedConfig) -> str:
    """Write the keys that were given or chosen, as TOML; without what model.init gives."""
    begins = bool(given.config.model.init)

    def is_kept(key: str) -> bool:
        of_init = begins and given.origins.of(key).kind == origins.FOLDER
        return given.origins.is_settled(key) and not of_init

    values = _flat(_as_tables(given.config))
    return tomli_w.dumps(_nested({key: value for key, value in values.items() if is_kept(key)}))


def to_toml_with_derived(asked: LoadedConfig, resolved: LoadedConfig) -> str:
    """Write what was asked as TOML that load() reads, and what was derived from it in a table that
    only resolved_with_origins() reads; both with their origins.
    """
    given = flatten(asked.config)
    whole = _flat(_as_tables(resolved.config))
    changed = {key: value for key, value in whole.items() if given[key] != value}
    derived_origins = resolved.origins.to_table(changed)
    derived = tomli_w.dumps({DERIVED: _nested(changed) | {origins.TABLE: derived_origins}})
    record = tomli_w.dumps({origins.TABLE: asked.origins.to_table(given)})
    layout = resolved.config.parallel
    num_ranks = layout.dp * layout.pp * layout.tp * layout.cp
    return (
        f"{to_toml(asked.config)}\n"
        "# Where the keys above come from; others have their defaults.\n"
        "# A key that is changed above counts as given by this file.\n"
        f"{record}\n"
        f"# Derived from the keys above on {counted(num_ranks, 'ranks')}. "
        f"A run that reads this file derives them again.\n{derived}"
    )


def resolved_with_origins(tree: Mapping[str, Any], path: object, typed: Collection[str] = ()) -> LoadedConfig:
    """Check what a run has written to its directory; return the configuration and its origins.

    path: for messages. typed: as parse() takes it.
    """
    asked = dict(tree)
    table = asked.pop(origins.TABLE, None)
    record = origins.read_record(table, path)
    derived = asked.pop(DERIVED, {})
    if not isinstance(derived, Mapping):
        raise ConfigError(f"{DERIVED}: expected a table, got {shown(derived)}")
    derived = dict(derived)
    record_of_derived = origins.read_record(derived.pop(origins.TABLE, None), path)
    parse(_merged(asked, derived), typed)  # so that all are tables of keys
    defaults = flatten(Config())
    if table is not None:  # what is changed above isn't derived any more
        changed = set(origins.changed_by_hand(record, _flat(asked), defaults))
        derived = _nested({key: value for key, value in _flat(derived).items() if key not in changed})
    config = parse(_merged(asked, derived), typed)
    by_key = origins.recorded(record, _flat(asked), defaults, path)
    of_derived = origins.origins_in(record_of_derived, _flat(derived), KeyOrigin(origins.DERIVED))
    return LoadedConfig(config, Origins(by_key | of_derived))


def _as_tables(config: Config) -> dict[str, dict[str, Any]]:
    """Return the keys that have a value, by their tables: TOML has no null."""
    return {
        table: {key: value for key, value in keys.items() if value is not None}
        for table, keys in msgspec.to_builtins(config).items()
    }


def digest(config: Config) -> str:
    """Return a hash of the resolved configuration, compared over all ranks before the first step."""
    return hashlib.sha256(json.dumps(flatten(config), sort_keys=True).encode()).hexdigest()[:16]
