"""The order of a batch's rows: the same rows, so that data-parallel ranks have about equal work.

Attention within documents costs what their (query, key) pairs are, which differ between packed
rows. The order is a function of the rows' costs alone, and good for every number of ranks: rows are
dealt to as many bins as the batch has odd prime factors, then again and again to two, the costliest
to the bin with least.

    costs  9 8 2 1    two bins: 9 1 | 8 2    rows 0 3 | 1 2, whether 1, 2 or 4 ranks read them
"""

from collections.abc import Sequence


def balanced_order(costs: Sequence[int]) -> list[int]:
    """Return the rows of a batch in an order of which each part costs about its share."""
    rows = range(len(costs))
    if len(set(costs)) <= 1:
        return list(rows)
    costliest_first = sorted(rows, key=lambda row: -costs[row])
    return _dealt(costliest_first, costs, _odd_first(len(costs)))


def _dealt(rows: list[int], costs: Sequence[int], factors: Sequence[int]) -> list[int]:
    if not factors:
        return rows
    bins: list[list[int]] = [[] for _ in range(factors[0])]
    loads = [0] * len(bins)
    for at in range(0, len(rows), len(bins)):
        lightest_first = sorted(range(len(bins)), key=loads.__getitem__)
        for number, row in zip(lightest_first, rows[at : at + len(bins)], strict=True):
            bins[number].append(row)
            loads[number] += costs[row]
    return [row for part in bins for row in _dealt(part, costs, factors[1:])]


def _odd_first(number: int) -> list[int]:
    """Return the prime factors of a number, the largest first."""
    found = list[int]()
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return sorted([*found, *[number] * (number > 1)], reverse=True)
