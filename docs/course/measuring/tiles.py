"""Draw which tiles of causal attention each rank computes in each turn of a ring, as SVG."""

from measuring.bars import COLOURS
from mpitrain.plan.division.sequence import SequencePlacement

CELL = 52
LEFT = 70
TOP = 84


def drawn(title: str, placement: SequencePlacement) -> str:
    """Return the picture: queries from top to bottom, keys from left to right, one colour a turn.

    In turn n a rank has the keys of the rank n places before it. A cell is one chunk against one chunk.
    """
    chunk = placement.spans(0)[0][1]
    num_chunks = placement.sequence // chunk
    size = LEFT + num_chunks * CELL + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {TOP + num_chunks * CELL + 14}" '
        'role="img" font-family="sans-serif" fill="#222">',
        f'<rect width="{size}" height="{TOP + num_chunks * CELL + 14}" rx="6" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold">{title}</text>',
    ]
    for turn in range(placement.size):
        x = 12 + 105 * turn
        lines.append(f'<rect x="{x}" y="38" width="12" height="12" fill="{COLOURS[turn]}"/>')
        lines.append(f'<text x="{x + 18}" y="49" font-size="13">turn {turn}</text>')
    lines += _cells(placement, chunk, num_chunks)
    return "\n".join([*lines, "</svg>", ""])


def _cells(placement: SequencePlacement, chunk: int, num_chunks: int) -> list[str]:
    owner = [0] * num_chunks
    for rank in range(placement.size):
        for begin, _ in placement.spans(rank):
            owner[begin // chunk] = rank
    lines = []
    for number, rank in enumerate(owner):
        middle = number * CELL + CELL / 2
        lines.append(f'<text x="{LEFT - 6}" y="{TOP + middle + 4}" font-size="12" text-anchor="end">')
        lines[-1] += f"rank {rank}</text>"
        lines.append(f'<text x="{LEFT + middle}" y="{TOP - 8}" font-size="12" text-anchor="middle">')
        lines[-1] += f"rank {rank}</text>"
    for row, rank in enumerate(owner):
        for column, source in enumerate(owner[: row + 1]):
            turn = (rank - source) % placement.size
            x, y = LEFT + column * CELL, TOP + row * CELL
            shape = f"M{x} {y}h{CELL - 2}v{CELL - 2}h-{CELL - 2}z"
            if row == column:
                shape = f"M{x} {y}v{CELL - 2}h{CELL - 2}z"  # the diagonal: half of the pairs see each other
            label = f"<title>rank {rank}, turn {turn}</title>"
            lines.append(f'<path d="{shape}" fill="{COLOURS[turn]}">{label}</path>')
            if row > column:
                lines.append(f'<text x="{x + 20}" y="{y + 30}" font-size="13" fill="#fff">{rank}</text>')
    return lines
