"""The ring all-reduce, step by step: who sends which chunk, and what each rank holds.

mpirun -n 4 python examples/ring_all_reduce_step_by_step.py [--elements N]

Rank r starts with an array a_r, cut into one chunk for each rank. In the tables, a0+a1
means: this chunk is the sum of the contributions of rank 0 and rank 1.
"""

from __future__ import annotations

import argparse

import numpy as np

from mpiscale.backend import Array
from mpiscale.comm.algorithms.ring_all_reduce import ring_all_reduce
from mpiscale.comm.communicator import Communicator, Waitall
from mpiscale.comm.world import World, printed_by_rank_0, run
from mpiscale.errors import InputError


def parse_arguments(rank: int) -> argparse.Namespace:
    """Read the command line, on every rank alike."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--elements", type=int, default=10, help="length of each array")
    with printed_by_rank_0(rank):
        return parser.parse_args()


def names(contributors: int) -> str:
    """Bit r set: rank r has contributed. 0b101 -> a0+a2"""
    ranks = [r for r in range(contributors.bit_length()) if contributors >> r & 1]
    return "+".join(f"a{r}" for r in ranks)


def chunk_names(marks: Array, p: int) -> list[str]:
    """What each chunk of `marks` is the sum of; '-' for a chunk without elements."""
    return [
        names(int(chunk[0])) if chunk.size else "-"
        for chunk in np.array_split(marks, p)
    ]


def print_table(title: str, rows: list[list[str]]) -> None:
    """Print one line for each rank, the first cell saying what it sent."""
    header = ["", "sends", *(f"chunk {c}" for c in range(len(rows)))]
    lines = [header, *([f"rank {r}", *cells] for r, cells in enumerate(rows))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for cells in lines:
        padded = (c.ljust(w) for c, w in zip(cells, widths, strict=True))
        print("   ".join(padded).rstrip())


def show_start(marks: Array, comm: Communicator) -> None:
    """Print, on rank 0, what every rank starts with."""
    rows = comm.gather(["", *chunk_names(marks, comm.size)])
    if rows:
        print_table("start", rows)


def show_step(number: int, marks: Array, comm: Communicator) -> None:
    """Print, on rank 0, who sent which chunk and what every rank holds now."""
    p, rank = comm.size, comm.rank
    # Counted through both phases: rank - 1, rank - 2, ... and then rank, rank - 1, ...
    sent = (rank - number) % p if number < p else (rank - (number - p)) % p
    sends = f"chunk {sent} to rank {(rank + 1) % p}"
    rows = comm.gather([sends, *chunk_names(marks, p)])
    if rows:
        phase = "reduce-scatter" if number < p else "all-gather"
        step = (number - 1) % (p - 1) + 1
        print_table(f"{phase}, step {step} of {p - 1}", rows)


def main(world: World) -> None:
    """Show the steps on marks, then check and measure the algorithm on numbers."""
    comm, n = world.comm, parse_arguments(world.rank).elements
    if n < 0:
        raise InputError(f"--elements must be at least 0, got {n}")
    # A bit for each rank: their sum names them. Every second element of an array: what
    # arrives for a strided array is put there in Wait, so no step shows the next one's.
    marks = np.full(2 * n, 1 << comm.rank)[::2]
    show_start(marks, comm)
    steps = ring_all_reduce.steps(marks, marks, comm, np.add)
    Waitall(next(steps, ()))  # the messages of the first step
    for number in range(1, 2 * comm.size - 1):
        following = next(steps, ())  # adds what has arrived, and starts the next step
        show_step(number, marks, comm)
        Waitall(following)

    x = np.random.default_rng(comm.rank).normal(size=n)
    comm.ledger.reset()
    total = ring_all_reduce(x, comm)
    sent = comm.gather(comm.ledger.sent_bytes())
    by_mpi = np.empty_like(x)
    comm.Allreduce(x, by_mpi)
    equal = comm.gather(np.allclose(total, by_mpi, rtol=1e-12, atol=1e-12))
    if sent and equal:
        p = comm.size
        print(
            f"\nequal to MPI's Allreduce on all ranks: {'yes' if all(equal) else 'NO'}"
        )
        print(f"bytes sent by each rank: {', '.join(map(str, sent))}")
        print(
            f"on average: {sum(sent) / p:g} = 2 (p - 1) / p n x {x.itemsize} bytes, "
            f"with p = {p}, n = {n}"
        )


if __name__ == "__main__":
    run(main)
