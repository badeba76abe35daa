"""Who sends how much to whom in each step of each algorithm, in closed form.

A pattern is a list of steps, a step a list of messages that travel at the same time.
It says nothing of how an algorithm is carried out, so that the ledger of a real run can
be held against it, and a time computed from it (`cost_model.py`). Sizes are in
elements; p ranks, n elements in all, counts[r] of them in rank r's chunk.

A message from a rank to itself is a copy in its memory: chunks that are packed for a
message, unpacked, or put in order.

Sources: those of the algorithms, in `algorithms/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from mpiscale.comm.algorithms.chunks import block, even_counts
from mpiscale.comm.algorithms.double_binary_tree_all_reduce import Tree
from mpiscale.comm.algorithms.folded import Folded

Counts = Sequence[int]
Nodes = Sequence[Sequence[int]]  # the ranks of each node


class Message(NamedTuple):
    """`size` elements from one rank to another, which adds them to its own or not."""

    source: int
    dest: int
    size: int
    added: bool = False


Step = list[Message]
Pattern = list[Step]


def sent_by(pattern: Pattern, rank: int) -> tuple[int, int]:
    """(messages, elements) that `rank` sends in all."""
    messages = [m for step in pattern for m in step]
    mine = [m.size for m in messages if m.source == rank != m.dest]
    return len(mine), sum(mine)


def renamed(pattern: Pattern, ranks: Sequence[int]) -> Pattern:
    """The same among other ranks: i becomes ranks[i]."""
    return [
        [m._replace(source=ranks[m.source], dest=ranks[m.dest]) for m in step]
        for step in pattern
    ]


def at_once(patterns: Sequence[Pattern]) -> Pattern:
    """Several patterns side by side, among different ranks."""
    steps = zip_longest(*patterns, fillvalue=[])
    return [[m for part in parts for m in part] for parts in steps]


def copies(sizes: Counts) -> Step:
    """Rank r copies sizes[r] elements."""
    return [Message(rank, rank, size) for rank, size in enumerate(sizes)]


# Rings


def ring_reduce_scatter(counts: Counts) -> Pattern:
    """Chunk r ends at rank r: in step k rank r passes on chunk r - 1 - k."""
    p = len(counts)
    return [
        [Message(r, (r + 1) % p, counts[(r - 1 - k) % p], True) for r in range(p)]
        for k in range(p - 1)
    ]


def ring_all_gather(counts: Counts) -> Pattern:
    """In step k rank r passes on chunk r - k."""
    p = len(counts)
    return [
        [Message(r, (r + 1) % p, counts[(r - k) % p]) for r in range(p)]
        for k in range(p - 1)
    ]


def ring_all_reduce(p: int, n: int) -> Pattern:
    """A reduce-scatter, then an all-gather."""
    counts = even_counts(n, p)
    return ring_reduce_scatter(counts) + ring_all_gather(counts)


# Doubling and halving, on the largest power of two of ranks


def recursive_doubling_all_reduce(p: int, n: int) -> Pattern:
    """In each step partners exchange all n."""
    folded = Folded(p, 0)
    numbers, distance, inner = folded.size, 1, []
    while distance < numbers:
        inner.append([Message(i, i ^ distance, n, True) for i in range(numbers)])
        distance *= 2
    return _fold(p, inner, [n] * folded.pairs, [[n]] * folded.pairs, True)


def recursive_doubling_all_gather(counts: Counts) -> Pattern:
    """In each step partners exchange all that they have."""
    p, n = len(counts), sum(counts)
    pairs = Folded(p, 0).pairs
    give = [counts[2 * i] for i in range(pairs)]
    # The two parts around the chunk that a rank which sits out has itself.
    back = [[sum(counts[: 2 * i]), n - sum(counts[: 2 * i + 1])] for i in range(pairs)]
    return _fold(p, _doubling(_merged(counts)), give, back, False)


def recursive_halving_reduce_scatter(counts: Counts) -> Pattern:
    """In each step partners give each other what the other one still sums."""
    p, n = len(counts), sum(counts)
    pairs = Folded(p, 0).pairs
    back = [[counts[2 * i]] for i in range(pairs)]
    return _fold(p, _halving(_merged(counts)), [n] * pairs, back, True)


def rabenseifner_all_reduce(p: int, n: int) -> Pattern:
    """Halving, then doubling."""
    folded = Folded(p, 0)
    counts = even_counts(n, folded.size)
    inner = _halving(counts) + _doubling(counts)
    return _fold(p, inner, [n] * folded.pairs, [[n]] * folded.pairs, True)


def _doubling(counts: Counts) -> Pattern:
    steps, distance = [], 1
    while distance < len(counts):
        steps.append(
            [
                Message(i, i ^ distance, sum(counts[block(i, distance)]))
                for i in range(len(counts))
            ]
        )
        distance *= 2
    return steps


def _halving(counts: Counts) -> Pattern:
    steps, distance = [], len(counts) // 2
    while distance:
        steps.append(
            [
                Message(
                    i, i ^ distance, sum(counts[block(i ^ distance, distance)]), True
                )
                for i in range(len(counts))
            ]
        )
        distance //= 2
    return steps


def _merged(counts: Counts) -> list[int]:
    """The chunks of a pair of ranks count as one."""
    pairs = len(counts) - Folded(len(counts), 0).size
    head = [counts[2 * i] + counts[2 * i + 1] for i in range(pairs)]
    return head + list(counts[2 * pairs :])


def _fold(
    p: int, inner: Pattern, give: Counts, back: Sequence[Counts], added: bool
) -> Pattern:
    """`inner` among those that take part; before and after it, the pairs."""
    folded = Folded(p, 0)
    ranks = [folded.rank_of(number) for number in range(folded.size)]
    before = [Message(2 * i, 2 * i + 1, n, added) for i, n in enumerate(give)]
    after = [
        Message(2 * i + 1, 2 * i, n) for i, sizes in enumerate(back) for n in sizes
    ]
    return [before] * bool(before) + renamed(inner, ranks) + [after] * bool(after)


# Trees and chains


def double_binary_tree_all_reduce(p: int, n: int, segment: int) -> Pattern:
    """Each half, in segments, up and down its tree; a step is a slot of time."""
    if p == 1:
        return []
    halves = (n - n // 2, n // 2)
    trains = []
    for half, second in zip(halves, (False, True), strict=True):
        trees = [Tree(rank, p, second) for rank in range(p)]
        sizes = [min(segment, half - s) for s in range(0, max(half, 1), segment)]
        slots: Pattern = [[] for _ in range(len(sizes) + 2 * trees[0].levels)]
        for rank, tree in enumerate(trees):
            if tree.parent is None:
                continue
            for s, size in enumerate(sizes):
                up, down = s + tree.height, s + tree.levels + tree.depth - 1
                slots[up].append(Message(rank, tree.parent, size, True))
                slots[down].append(Message(tree.parent, rank, size))
        trains.append(slots)
    return [step for step in at_once(trains) if step]


def binomial_broadcast(p: int, n: int) -> Pattern:
    """In each step whoever has the n elements sends them on; rank 0 is the root."""
    return [[Message(a, b, n) for a, b in step] for step in _tree(p)]


def binomial_reduce(p: int, n: int) -> Pattern:
    """The same, backwards and added."""
    return [[Message(b, a, n, True) for a, b in step] for step in reversed(_tree(p))]


def binomial_scatter(counts: Counts) -> Pattern:
    """To each child the chunks of its subtree; rank 0 is the root."""
    p = len(counts)
    return [
        [Message(a, b, sum(counts[b : b + (b & -b)])) for a, b in step]
        for step in _tree(p)
    ]


def binomial_gather(counts: Counts) -> Pattern:
    """The same, backwards."""
    steps = reversed(binomial_scatter(counts))
    return [[Message(m.dest, m.source, m.size) for m in step] for step in steps]


def _tree(p: int) -> list[list[tuple[int, int]]]:
    """(parent, child) of each step of a broadcast from rank 0."""
    distances = [1 << k for k in reversed(range((p - 1).bit_length()))]
    return [[(a, a + d) for a in range(0, p, 2 * d) if a + d < p] for d in distances]


def chain_broadcast(p: int, n: int, segment: int) -> Pattern:
    """Segments follow each other from rank 0 to rank p - 1."""
    sizes = [min(segment, n - s) for s in range(0, max(n, 1), segment)]
    return [
        [
            Message(r, r + 1, sizes[slot - r])
            for r in range(p - 1)
            if 0 <= slot - r < len(sizes)
        ]
        for slot in range(len(sizes) + p - 2)
    ]


# All-to-all; lengths[s][d] elements from s to d


def pairwise_all_to_all(lengths: Sequence[Counts]) -> Pattern:
    """In step k rank r sends to r + k, if it has something."""
    p = len(lengths)
    return [
        [
            Message(r, (r + k) % p, lengths[r][(r + k) % p])
            for r in range(p)
            if lengths[r][(r + k) % p]
        ]
        for k in range(1, p)
    ]


def bruck_all_to_all(p: int, chunk: int) -> Pattern:
    """Step k moves all chunks (of one length) whose way has bit k."""
    steps = []
    for hop in (1 << k for k in range((p - 1).bit_length())):
        moved = chunk * sum(bool(d & hop) for d in range(p))
        steps.append(copies([moved] * p))
        steps.append([Message(r, (r + hop) % p, moved) for r in range(p)])
    return [*steps, copies([p * chunk] * p)]


# Two levels; nodes[h] are the ranks of node h, of which the first L are carriers


def hierarchical_all_reduce(nodes: Nodes, n: int) -> Pattern:
    """Reduce-scatter inside, all-reduce across in each column, all-gather inside."""
    carriers = min(map(len, nodes))
    counts = even_counts(n, carriers)

    def inside(ring: Callable[[Counts], Pattern]) -> Pattern:
        parts = []
        for ranks in nodes:
            chunks = counts + [0] * (len(ranks) - carriers)
            parts.append(renamed(ring(chunks), ranks))
        return at_once(parts)

    columns = [[ranks[j] for ranks in nodes] for j in range(carriers)]
    across = [
        renamed(ring_all_reduce(len(nodes), counts[j]), column)
        for j, column in enumerate(columns)
    ]
    return inside(ring_reduce_scatter) + at_once(across) + inside(ring_all_gather)


def hierarchical_all_gather(nodes: Nodes, counts: Counts) -> Pattern:
    """To the carriers, across in each column, all-gather inside."""
    carriers = min(map(len, nodes))
    to_carriers = [
        Message(rank, ranks[i % carriers], counts[rank])
        for ranks in nodes
        for i, rank in enumerate(ranks)
        if i >= carriers
    ]
    held = [  # by column, by node
        [sum(counts[rank] for rank in ranks[j::carriers]) for ranks in nodes]
        for j in range(carriers)
    ]
    across = [
        renamed(ring_all_gather(held[j]), [ranks[j] for ranks in nodes])
        for j in range(carriers)
    ]
    inside = [
        renamed(
            ring_all_gather([sum(c) for c in held] + [0] * (len(ranks) - carriers)),
            ranks,
        )
        for ranks in nodes
    ]
    in_order = copies([sum(counts)] * len(counts))
    head = [to_carriers] * bool(to_carriers)
    return [*head, *at_once(across), *at_once(inside), in_order]


def hierarchical_all_to_all(nodes: Nodes, lengths: Sequence[Counts]) -> Pattern:
    """Inside to the carrier of the column, across, inside to the destination."""
    carriers, p = min(map(len, nodes)), len(lengths)
    place = {
        rank: (h, i) for h, ranks in enumerate(nodes) for i, rank in enumerate(ranks)
    }
    legs = [[[0] * p for _ in range(p)] for _ in range(3)]
    for source in range(p):
        for dest in range(p):
            j = place[dest][1] % carriers
            first, second = nodes[place[source][0]][j], nodes[place[dest][0]][j]
            stops = (source, first, second, dest)
            for leg in range(3):
                legs[leg][stops[leg]][stops[leg + 1]] += lengths[source][dest]
    groups = [nodes, [[r[j] for r in nodes] for j in range(carriers)], nodes]
    pattern = []
    for lengths, parts in zip(legs, groups, strict=True):
        if len(nodes) == 1 and parts is not nodes:
            continue
        packed = copies([sum(row) for row in lengths])
        unpacked = copies([sum(column) for column in zip(*lengths, strict=True)])
        exchange = at_once([_exchange(lengths, ranks) for ranks in parts])
        pattern += [packed, *exchange, unpacked]
    return pattern


def _exchange(lengths: Sequence[Counts], ranks: Sequence[int]) -> Pattern:
    mine = [[lengths[a][b] for b in ranks] for a in ranks]
    return renamed(pairwise_all_to_all(mine), ranks)
