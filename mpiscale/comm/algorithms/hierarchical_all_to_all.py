"""Hierarchical all-to-all: few large messages over the network instead of many small.

A chunk from rank s to rank d travels by way of two carriers (`node_groups.py`), both of
d's column j:

1. inside s's node, to carrier j: with all chunks for column j of any node
2. across, to carrier j of d's node: with all chunks from this node to that column there
3. inside d's node, to d itself, unless it is the carrier

Over the network each pair of nodes exchanges one message in each column: L (H - 1) from
a node instead of the (p / H)^2 (H - 1) of a flat all-to-all, and the same bytes.

Where chunks differ in length, all ranks first exchange their lengths.

Source: S. Kumar, S. Sabharwal, R. Garg, P. Heidelberger, "Optimization of all-to-all
communication on the Blue Gene/L supercomputer", ICPP 2008 (indirect all-to-all).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiscale.backend import Array, array_module
from mpiscale.comm.algorithms.chunks import Chunks
from mpiscale.comm.algorithms.kinds import AllToAll
from mpiscale.comm.algorithms.node_groups import NodeGroups
from mpiscale.comm.algorithms.pairwise_all_to_all import pairwise_all_to_all
from mpiscale.comm.algorithms.recursive_doubling_all_gather import (
    recursive_doubling_all_gather,
)
from mpiscale.comm.algorithms.running import Steps
from mpiscale.comm.communicator import Communicator

Pair = tuple[int, int]  # (source, destination) names a chunk


@dataclass
class Leg:
    """One of the three parts of the way: for each member of `comm`, which chunks."""

    comm: Communicator
    leaving: list[list[Pair]]  # to each member
    arriving: list[list[Pair]]  # from each member


def legs_of(groups: NodeGroups, rank: int) -> list[Leg]:
    """What `rank` passes on in each leg; the second one is for carriers alone."""
    nodes, p = groups.nodes, sum(map(len, groups.nodes))
    node_of = {r: i for i, ranks in enumerate(nodes) for r in ranks}
    local_of = {r: i for ranks in nodes for i, r in enumerate(ranks)}
    inside, across = groups.inside, groups.across
    comms = [inside, across or inside, inside]
    member_of = [local_of, node_of, local_of]
    legs = [
        Leg(comm, [[] for _ in range(comm.size)], [[] for _ in range(comm.size)])
        for comm in comms
    ]
    for source in range(p):
        for dest in range(p):
            j = local_of[dest] % groups.carriers
            first, second = nodes[node_of[source]][j], nodes[node_of[dest]][j]
            stops = [source, first, second, dest]
            for leg, member, a, b in zip(
                legs, member_of, stops, stops[1:], strict=False
            ):
                if a == rank:
                    leg.leaving[member[b]].append((source, dest))
                if b == rank:
                    leg.arriving[member[a]].append((source, dest))
    return legs if across is not None else [legs[0], legs[2]]


def hierarchical_all_to_all(
    groups: NodeGroups, exchange: AllToAll = pairwise_all_to_all
) -> AllToAll:
    """The algorithm on these groups; `exchange` carries out each of its three legs."""
    rank = groups.nodes[groups.node][groups.local]
    legs = legs_of(groups, rank)

    def hierarchical_all_to_all(
        send: Chunks, recv: Chunks, comm: Communicator
    ) -> Steps:
        """send[s] goes to rank s, recv[r] comes from rank r."""
        p = comm.size
        lengths = np.empty((p, p), np.int64)  # [source, destination]
        lengths[:] = send.counts  # right for all ranks if they are alike
        if not send.alike:
            table = Chunks(lengths.reshape(-1), [p] * p)
            yield from recursive_doubling_all_gather.steps(table, comm)
        held = {(rank, dest): send[dest] for dest in range(p)}
        for leg in legs:
            packed = _packed(leg.leaving, held, lengths, send.flat)
            room = _room(leg.arriving, lengths, send.flat)
            yield from exchange.steps(packed, room, leg.comm)
            held = _unpacked(leg.arriving, lengths, room.flat)
        for source in range(p):
            recv[source][...] = held[source, rank]

    return AllToAll(hierarchical_all_to_all)


def _counts(blocks: list[list[Pair]], lengths: Array) -> list[int]:
    return [int(sum(lengths[pair] for pair in pairs)) for pairs in blocks]


def _room(blocks: list[list[Pair]], lengths: Array, like: Array) -> Chunks:
    counts = _counts(blocks, lengths)
    return Chunks(array_module(like).empty(sum(counts), like.dtype), counts)


def _packed(
    blocks: list[list[Pair]], held: dict[Pair, Array], lengths: Array, like: Array
) -> Chunks:
    packed = _room(blocks, lengths, like)
    for pair, place in _unpacked(blocks, lengths, packed.flat).items():
        place[...] = held[pair]
    return packed


def _unpacked(blocks: list[list[Pair]], lengths: Array, flat: Array) -> dict[Pair, Any]:
    """Each chunk's place in `flat`, which holds the blocks one after the other."""
    pairs = [pair for block in blocks for pair in block]
    chunks = Chunks(flat, [int(lengths[pair]) for pair in pairs])
    return {pair: chunks[i] for i, pair in enumerate(pairs)}
