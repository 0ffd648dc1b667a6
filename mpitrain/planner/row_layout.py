"""The model and the layout of one row of a CSV: its fields, over the registry and conventions."""

import math
from collections.abc import Mapping

from mpitrain.errors import ConfigError, counted
from mpitrain.inputs import shown
from mpitrain.plan.declared.family import family_of
from mpitrain.plan.declared.published import PublishedModel, find_published
from mpitrain.plan.declared.resolved import ResolvedExperts
from mpitrain.plan.declared.step_layout import MICROS, StepLayout
from mpitrain.plan.predict.step_time.step_model import StepModel
from mpitrain.planner.assumed import Convention
from mpitrain.planner.of_config import published_model
from mpitrain.schedules import catalog
from mpitrain.schedules.families.interleaved import INTERLEAVED

DIFFER = 0.12  # of one row: two figures that should say the same, parameters and what its sizes make
MOST_LAYERS = 1 << 14
USUAL_SEQUENCE = 2048
USUAL_VOCABULARY = 51200


class Incomplete(ConfigError):
    """A row leaves out what decides."""


def model_in(fields: Mapping[str, str], assumed: dict[str, str]) -> StepModel:
    """Return the model: of the registry, with the row's own sizes over it; or of its sizes alone."""
    if (layers := count_in(fields, "layers") or 0) > MOST_LAYERS:
        raise ConfigError(f"layers = {layers}: needed {MOST_LAYERS} at most")
    try:
        published = find_published(fields["model"])
    except ConfigError as error:
        published = _published_alone(fields, assumed, error)
    sequence = count_in(fields, "seq") or USUAL_SEQUENCE
    model = published_model(published, sequence)
    changed = _changed(fields, published, model, assumed)
    if changed != published:
        model = published_model(changed, sequence)
    stated = number_in(fields, "params_b")
    found = model.num_parameters / 1e9
    if stated and abs(math.log(found / stated)) > DIFFER:
        raise ConfigError(
            f"params_b = {stated:g} contradicts its sizes, which make {found:.3g} billion parameters"
        )
    return model


def _changed(
    fields: Mapping[str, str], published: PublishedModel, model: StepModel, assumed: dict[str, str]
) -> PublishedModel:
    """Return a model with the sizes of a row, and with those that follow from another width."""
    sizes, family = model.sizes, family_of(model.sizes)
    heads, width = (count_in(fields, "heads") or sizes.heads, count_in(fields, "hidden") or sizes.width)
    if width < heads:
        raise ConfigError(f"hidden = {width} of heads = {heads}: needed a number for each head at least")
    keys = {key: count_in(fields, key) or getattr(sizes, key) for key in ("layers", "kv_heads", "vocab")}
    attention = dict(published.attention)
    if (width, heads) != (sizes.width, sizes.heads):
        if sizes.kv_heads == sizes.heads and not fields.get("kv_heads"):
            keys["kv_heads"] = heads
        if "head_width" in family.attention:
            attention["head_width"] = width // heads
    if not family.grouped:
        del keys["kv_heads"]
    ffn = count_in(fields, "ffn")
    experts = dict(published.experts)
    if model.experts is None:
        keys["ffn"] = ffn or sizes.ffn * width // sizes.width
    elif given := _experts_of(fields, model.experts, ffn):
        experts |= given
        assumed |= {"ffn": f"{ffn} of one expert"} if ffn else {}
    keys |= dict(width=width, heads=heads)
    return published._replace(model={**published.model, **keys}, attention=attention, experts=experts)


def _experts_of(fields: Mapping[str, str], experts: ResolvedExperts, width: int | None) -> dict[str, int]:
    """Return the keys of experts that a row says. width: hidden units of one, if they are given."""
    count = count_in(fields, "n_experts") or experts.count
    active = count_in(fields, "topk") or experts.active
    _require_active(active, count)
    given = {"count": count, "active": active, "width": width or experts.width}
    groups = {"groups": 1, "groups_active": 1} if count % experts.groups else {}
    return {**given, **groups}


def layouts_in(
    fields: Mapping[str, str], model: StepModel, convention: Convention, assumed: dict[str, str]
) -> tuple[StepLayout, ...]:
    """Return the layout of a row; several, the likely one first, where an unknown field decides."""
    if not any(fields.get(key) for key in ("tp", "pp", "zero")):
        raise Incomplete("tp, pp, zero: found none of them; needed the layout")
    tp, cp, pp, ep = (count_in(fields, key) or 1 for key in ("tp", "cp", "pp", "ep"))
    inside = tp * cp * pp
    ranks, sequence = _ranks(fields, inside)
    zero = _zero(fields, convention, assumed)
    batch, micros = _batch(fields, max(1, ranks // inside), zero, assumed)
    schedule, chunks = _schedule(fields.get("schedule", ""), count_in(fields, "vpp") or 1, pp)
    modes = _recompute(fields, convention, assumed)
    precision = fields.get("precision", "")
    dispatch = _dispatch(fields, convention)
    layout = StepLayout(
        ranks, sequence, batch, tp=tp, cp=cp, pp=pp, ep=ep, etp=_etp(fields, model, tp, ep, ranks // pp),
        chunks=chunks, zero=zero, sharded=_shards(fields), schedule=schedule,
        compute=_dtype(precision), flash=_flash(fields, convention, assumed),
        fused=convention.fused or "compile" in precision,
        sequence_parallel=_sequence_parallel(fields, convention, tp),
        overlapped=convention.overlapped, wire_bytes=convention.wire_bytes,
        gradient_bytes=convention.wire_bytes,
        tp_overlap=0.7 if "AsyncTP" in precision else convention.tp_overlap,
        stages=_even_stages(len(model.blocks), pp * chunks, convention.ends_count), again=convention.again,
        dispatch=dispatch, awaits=_awaits(fields, convention, dispatch),
        hides_dispatch="overlap" in fields.get("dispatcher", "").lower(),
        narrow_gathers=convention.narrow_gathers,
    )  # fmt: skip
    if "(b/2,2m)" in fields.get("schedule", ""):
        micros = [max(1, each // 2) for each in micros]
    found = [layout._replace(micro=micro, recompute=mode) for micro in micros for mode in modes]
    whole = [each for each in found if each.dp and not each.batch % (each.dp * each.micro)]
    return tuple(whole or found[:1])


def _even_stages(blocks: int, stages: int, ends_count: bool) -> tuple[int, ...]:
    """Return the blocks of each stage as other frameworks have them: from the second on one more.

    ends_count: embedding and head count as a block each.
    """
    whole, more = divmod(blocks + 2 * ends_count, stages)
    counts = [whole + ((stage - 1) % stages < more) for stage in range(stages)]
    for end in (0, -1):
        counts[end] -= ends_count
    return tuple(counts)


def _ranks(fields: Mapping[str, str], inside: int) -> tuple[int, int]:
    """Return the GPUs and the sequence of a row. inside: ranks of a replica."""
    ranks = count_in(fields, "gpus") or (count_in(fields, "dp") or 0) * inside
    sequence = count_in(fields, "seq")
    if not ranks or not sequence:
        raise Incomplete(f"found no {'seq' if ranks else 'gpus'}; needed gpus and seq")
    dp = count_in(fields, "dp")
    if ranks % inside:
        raise ConfigError(f"tp x cp x pp = {inside} doesn't divide its {counted(ranks, 'GPUs')}")
    if dp and dp * inside != ranks:
        product = f"dp {dp} x tp x cp x pp {inside} = {dp * inside}"
        raise ConfigError(f"{product} contradicts its {counted(ranks, 'GPUs')}")
    return ranks, sequence


def _sequence_parallel(fields: Mapping[str, str], convention: Convention, tp: int) -> bool:
    return tp > 1 and ("sequence" in fields.get("recompute", "") or convention.sequence_parallel)


def _etp(fields: Mapping[str, str], model: StepModel, tp: int, ep: int, ranks: int) -> int:
    """Return how many ranks divide an expert: those of tp, unless experts are folded apart."""
    if stated := count_in(fields, "etp"):
        return stated
    return tp if model.experts and ep * tp <= ranks and "fold" not in fields["system"].lower() else 1


def _batch(fields: Mapping[str, str], dp: int, zero: int, assumed: dict[str, str]) -> tuple[int, list[int]]:
    """Return sequences of a step and of a microbatch: some, where it decides and isn't said."""
    batch, micro, count = (count_in(fields, key) for key in ("gbs_seqs", "mbs", "n_microbatches"))
    if batch is None:
        if micro is None or count is None:
            raise Incomplete("gbs_seqs: found nothing, nor mbs with n_microbatches; needed the batch")
        batch = micro * count * dp
    if micro is None and count is not None:
        micro = batch // (dp * count)
    if micro is None:
        return batch, _possible_micros(batch, dp, zero, assumed)
    if count is not None and micro * count * dp != batch:
        raise ConfigError(
            f"mbs {micro} x n_microbatches {count} x dp {dp} = {micro * count * dp} contradicts "
            f"gbs_seqs {batch}"
        )
    return batch, [micro]


def _possible_micros(batch: int, dp: int, zero: int, assumed: dict[str, str]) -> list[int]:
    """Return microbatches of a row that says none: they decide with ZeRO-3, else 1 is assumed."""
    possible = [each for each in MICROS if batch % (dp * each) == 0] if zero == 3 else [1]
    assumed["micro"] = "1 to 8" if len(possible) > 1 else "1"
    return possible or [1]


def number_in(fields: Mapping[str, str], key: str) -> float | None:
    text = fields.get(key, "")
    if not text:
        return None
    try:
        found = float(text)
    except ValueError:
        raise ConfigError(f"{key} = {shown(text)}: needed a number") from None
    if found != 0 and not 1e-9 <= found <= 1e15:
        raise ConfigError(f"{key} = {shown(text)}: needed a number, not negative, from 1e-9 to 1e15 or 0")
    return found


def count_in(fields: Mapping[str, str], key: str) -> int | None:
    found = number_in(fields, key)
    if found is None:
        return None
    if found != int(found) or not 0 < found < 2**40:
        raise ConfigError(f"{key} = {shown(fields[key])}: needed a whole number from 1 on")
    return int(found)


def _require_active(active: int, count: int) -> None:
    if active > count:
        raise ConfigError(f"topk = {active} of n_experts = {count}: needed no more than there are")


def _published_alone(
    fields: Mapping[str, str], assumed: dict[str, str], unknown: ConfigError
) -> PublishedModel:
    """Return the model that a row's sizes say: as GPT-2's, or with a gate where its hidden units aren't
    four widths, or heads share keys.
    """
    layers, width, heads = (count_in(fields, key) for key in ("layers", "hidden", "heads"))
    if layers is None or width is None or heads is None:
        raise Incomplete(unknown.args[0])
    usual = {"ffn": 4 * width, "vocab": USUAL_VOCABULARY}
    assumed |= {key: str(size) for key, size in usual.items() if not fields.get(key)}
    ffn, vocab = (count_in(fields, key) or size for key, size in usual.items())
    kv_heads = count_in(fields, "kv_heads") or heads
    experts = _experts_alone(fields)
    gated = ffn != usual["ffn"]
    sizes = dict(layers=layers, width=width, heads=heads, ffn=ffn, vocab=vocab, tied=not gated)
    name = fields["model"] or "unnamed"
    if experts or gated or kv_heads != heads:
        family = "mixtral" if experts else "llama"
        return PublishedModel(name, dict(family=family, kv_heads=kv_heads, **sizes), experts=experts)
    return PublishedModel(name, dict(family="gpt2", positions=USUAL_SEQUENCE, **sizes))


def _experts_alone(fields: Mapping[str, str]) -> dict[str, int]:
    count, active, width = (count_in(fields, key) for key in ("n_experts", "topk", "ffn"))
    if not count:
        return {}
    if not (active and width):
        raise Incomplete("n_experts without topk and ffn: needed both")
    _require_active(active, count)
    return dict(count=count, active=active, width=width)


def _zero(fields: Mapping[str, str], convention: Convention, assumed: dict[str, str]) -> int:
    text = fields.get("zero", "").lower()
    if text in ("0", "1", "2", "3"):
        return int(text)
    if "fsdp" in text or "hsdp" in text:
        return 3
    assumed["zero"] = str(convention.zero)
    return convention.zero


def _recompute(fields: Mapping[str, str], convention: Convention, assumed: dict[str, str]) -> list[str]:
    text = fields.get("recompute", "").lower()
    for mode in ("full", "selective", "none"):
        if mode in text:
            return [mode]
    if convention.recompute is not None:
        assumed["recompute"] = convention.recompute
        return [convention.recompute]
    assumed["recompute"] = "none to full"
    return ["none", "full"]


def _schedule(text: str, chunks: int, pp: int) -> tuple[str, int]:
    """Return the schedule's name here, and its chunks."""
    name = text.lower().replace("_", "-").split("+")[0].split("*")[0].strip()
    simplest = catalog.SIMPLEST
    if pp == 1:
        return simplest, 1
    known = (one for one in catalog.FAMILIES.values() if name in (one.name, *one.aliases))
    family = next(known, INTERLEAVED)
    if family.name in (INTERLEAVED.name, simplest):
        return (INTERLEAVED.name, chunks) if chunks > 1 else (simplest, 1)
    return family.name, chunks if family.placed == "looped" else catalog.chunks_of(family.name, None)


def _dtype(precision: str) -> str:
    return "fp8" if any(name in precision.lower() for name in ("fp8", "float8")) else "bf16"


def _dispatch(fields: Mapping[str, str], convention: Convention) -> str:
    text = fields.get("dispatcher", "").lower().replace("-", "")
    if any(name in text for name in ("deepep", "hybridep", "hierarchical")):
        return "hierarchical"
    if text:
        return "allgather" if "allgather" in text else "alltoall"
    return convention.dispatch


def _shards(fields: Mapping[str, str]) -> int:
    """Return how many ranks share the state of ZeRO; 0: all data ranks."""
    return count_in(fields, "dp_shard") or 0


def _awaits(fields: Mapping[str, str], convention: Convention, dispatch: str) -> float:
    """Return what a host waits for: kernels that bring rows once to a rank tell it less often, and experts
    that drop tokens have as many rows each.
    """
    is_dropping = "drop" in fields.get("model", "").lower()
    waits_often = dispatch == "alltoall" and not is_dropping
    return convention.awaits if waits_often else min(convention.awaits, 1.0)


def _flash(fields: Mapping[str, str], convention: Convention, assumed: dict[str, str]) -> bool:
    text = fields.get("flash", "").lower()
    if text in ("1", "yes", "true", "0", "no", "false"):
        return text in ("1", "yes", "true")
    assumed["flash"] = "yes" if convention.flash else "no"
    return convention.flash
