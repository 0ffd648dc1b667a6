"""What experts compute, send and keep for one microbatch on one rank, for Layer.work. Integers."""

from mpitrain.plan.declared.resolved import ResolvedExperts
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.declared.work import AttentionCore, MessageVolume, PartWork, Product, Volumes


def experts_work(
    layout: StepLayout, width: int, experts: ResolvedExperts, load: float, *, biased: bool = False
) -> PartWork:
    """Return the work of a block's experts on a rank that has `load` times the mean of rows.

    width: of the residual stream. experts: resolved.

    R = n active etp / tp rows come to a rank in the mean: tp ranks have n positions between them,
    and each row is on etp ranks. Shared experts and the router are whole on every rank of tp, which
    has other positions.
    """
    tokens = layout.stream_positions
    sent_rows = tokens * experts.active * layout.etp
    rows = round(load * sent_rows)
    local = experts.count // layout.ep
    hidden = experts.width // layout.etp
    of_expert = max(1, rows // local)
    products = [Product(of_expert, 2 * hidden, width, local), Product(of_expert, width, hidden, local)]
    products.append(Product(tokens, experts.count, width, narrow=False))
    shared = _shared_width(experts)
    if shared:
        products += [Product(tokens, 2 * shared, width), Product(tokens, width, shared)]
    moved = (sent_rows + rows) * width * layout.item  # permuted, and back with weights
    passes = (
        3 * moved
        + rows * hidden * layout.item * 3
        + 9 * tokens * width * layout.item
        + 6 * tokens * experts.count * 4
        # a bias becomes rows, after what opens; that of the last product is weighted, too
        + biased * rows * (8 * hidden + 6 * width) * layout.item
    )
    sent = _dispatched(layout, experts, tokens * width * layout.item, load)
    if layout.etp > 1:
        gathered = rows * width * layout.item
        inside = (
            MessageVolume("all_gather", "etp", gathered),
            MessageVolume("reduce_scatter", "etp", gathered),
        )
        sent = (*sent[:1], *inside, *sent[1:])
    kernels = 2 * min(local, 8) + 24 + 7 * biased
    kept = _kept(layout, width, experts, tokens)
    # the host reads how many rows each expert gets, unless that is fixed; each has two products,
    # with their casts and copies
    awaited = round(layout.awaits * (6 * local + 60))
    return PartWork(tuple(products), AttentionCore(), passes, kernels, sent, sent, kept=kept, awaited=awaited)


def _shared_width(experts: ResolvedExperts) -> int:
    return (experts.shared or 0) * experts.width


def _dispatched(layout: StepLayout, experts: ResolvedExperts, once: int, load: float) -> Volumes:
    """Return what experts' rows travel by. once: bytes of each token's row."""
    if layout.ep == 1:
        return ()
    if layout.dispatch == "allgather":
        whole = once * layout.ep
        return (MessageVolume("all_gather", "ep", whole), MessageVolume("reduce_scatter", "ep", whole))
    operation = "all_to_all_by_node" if layout.dispatch == "hierarchical" else "all_to_all"
    active, groups = experts.active, (experts.groups, experts.groups_active)
    sent = MessageVolume(operation, "ep", round(load * active * once), active, *groups)
    return (sent, sent)


def _kept(layout: StepLayout, width: int, experts: ResolvedExperts, tokens: int) -> int:
    """Return what experts keep: rows as they came, hidden units, and what is sent back to be weighted."""
    rows = tokens * experts.active * layout.etp
    hidden = rows * experts.width // layout.etp * layout.item
    shared = 3 * tokens * _shared_width(experts) * layout.item
    return 2 * (tokens + rows) * width * layout.item + 3 * hidden + shared
