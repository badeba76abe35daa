"""How a job ends: all ranks together, with one message, and never in a hang.

An exception on one rank, left to Python, hangs the job: that rank waits in MPI_Finalize
for the others, which wait in a collective for it. So each rank, failed or finished,
tells all others how it ended, and looks whether they end too:

all ranks ended           each kind of failure is printed once, by the lowest rank that
                          met it, then every rank leaves with its own exit code
failed, others still run  after 3 s it prints its failure and ends the job (MPI_Abort)
finished, others run      waits without burning CPU; after 30 s it says for whom

Seen in: mpi4py/mpi4py #290, chainer/chainermn #236.
"""

from __future__ import annotations

import hashlib
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

import numpy as np
from mpi4py import MPI

from mpiscale.errors import InputError

TAG = 32767  # the largest that every MPI has; `World.comm` is a duplicate, without it
PATIENCE_S = 3.0  # for ranks that fail a little later, or alike
FIRST_SPEAKER_S = 1.0  # how much longer the other failed ranks leave it the word
NOTICE_S = 30.0
LONGEST_NAP_S = 0.05


@dataclass(frozen=True)
class Outcome:
    """How one rank's program ended; `text` is what the user should read about it."""

    kind: Literal["returned", "raised", "refused", "exited", "interrupted"]
    code: int = 0
    text: str = ""
    where: str = ""  # file:line of a sys.exit

    def digest(self) -> bytes:
        """16 bytes that are the same on ranks that ended alike."""
        alike = f"{self.kind}\0{self.code}\0{self.text}"
        return hashlib.blake2b(alike.encode(errors="replace"), digest_size=16).digest()

    def report(self, ranks: Sequence[int], size: int) -> str:
        """What one of the `ranks` that ended so prints when all `size` have ended."""
        if self.kind == "interrupted":
            return "interrupted"
        text = f"error: {self.text}" if self.kind == "refused" else self.text
        if self.kind == "exited" or (self.kind == "refused" and len(ranks) == size):
            return text
        return f"{rank_list(ranks, size)}: {text}" if size > 1 else text

    def report_alone(self, rank: int, size: int) -> str:
        """What this rank prints before it ends a job in which others still run."""
        if self.kind == "exited":
            return (
                f"rank {rank} left with exit code {self.code} at {self.where} while "
                f"the others still run: ending the job\n{self.text}"
            ).rstrip()
        return self.report([rank], size)


def outcome_of(error: BaseException, skipped_frames: int = 0) -> Outcome:
    """Describe an exception; the first frames of its traceback may be left out."""
    trace = error.__traceback__
    for _ in range(skipped_frames):
        trace = trace.tb_next if trace else None
    if isinstance(error, InputError):
        return Outcome("refused", 2, str(error))
    if isinstance(error, KeyboardInterrupt):
        return Outcome("interrupted", 130)
    if isinstance(error, SystemExit):
        last = traceback.extract_tb(trace)[-1:]
        where = f"{last[0].filename}:{last[0].lineno}" if last else "?"
        if error.code is None or isinstance(error.code, int):
            return Outcome("exited", error.code or 0, "", where)
        return Outcome("exited", 1, str(error.code), where)
    lines = traceback.format_exception(type(error), error, trace)
    return Outcome("raised", 1, "".join(lines).rstrip())


def rank_list(ranks: Sequence[int], size: int) -> str:
    """on all 4 ranks; on rank 1 of 4; on ranks 1, 3 of 4."""
    if len(ranks) == size:
        return f"on all {size} ranks"
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"on {noun} {', '.join(map(str, ranks))} of {size}"


class Farewell:
    """This rank's outcome on its way to all ranks, and theirs on the way here."""

    def __init__(self, outcome: Outcome, comm: MPI.Comm) -> None:
        self.mine = np.frombuffer(outcome.digest(), np.uint8)
        self.digests = np.zeros((comm.size, self.mine.size), np.uint8)
        ranks = range(comm.size)
        self._arriving = [comm.Irecv(self.digests[r], r, TAG) for r in ranks]
        self._leaving = [comm.Isend(self.mine, r, TAG) for r in ranks]

    def missing(self) -> list[int]:
        """The ranks that have not ended yet."""
        return [r for r, request in enumerate(self._arriving) if not request.Test()]

    def alike(self) -> list[int]:
        """The ranks known to have ended as this one did."""
        same = (self.digests == self.mine).all(axis=1)
        return np.flatnonzero(same).tolist()

    def complete(self) -> None:
        """Wait until the others have this rank's outcome, when none is missing."""
        MPI.Request.Waitall(self._leaving)


def end_together(outcome: Outcome, comm: MPI.Comm) -> None:
    """Return when every rank has ended; end the job if one failed while others run."""
    farewell, start, nap, noticed = (
        Farewell(outcome, comm),
        time.monotonic(),
        1e-3,
        False,
    )
    try:
        while missing := farewell.missing():
            waited = time.monotonic() - start
            if outcome.kind != "returned":
                end_job_if_due(outcome, comm, farewell.alike(), waited)
            elif waited > NOTICE_S and not noticed:
                noticed = True
                say_for_whom(missing, comm)
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP_S)
    except KeyboardInterrupt:
        abort("interrupted" if comm.rank == 0 else "", 130)
    farewell.complete()
    alike = farewell.alike()
    if comm.rank == alike[0] and outcome.kind != "returned":
        say(outcome.report(alike, comm.size))


def end_job_if_due(
    outcome: Outcome, comm: MPI.Comm, alike: Sequence[int], waited: float
) -> None:
    """End the job after some patience; of ranks that failed alike the lowest speaks."""
    is_first = comm.rank == min(alike, default=comm.rank)
    if waited > PATIENCE_S + (0 if is_first else FIRST_SPEAKER_S):
        abort(outcome.report_alone(comm.rank, comm.size), outcome.code)


def say_for_whom(missing: Sequence[int], comm: MPI.Comm) -> None:
    """Tell, on the lowest rank that has finished, which ranks have not."""
    finished = sorted(set(range(comm.size)) - set(missing))
    if comm.rank == finished[0]:
        who = rank_list(missing, comm.size).removeprefix("on ")
        say(f"rank {comm.rank} has finished and waits for {who}")


def say(text: str) -> None:
    """Print to stderr in one piece, after all that went to stdout."""
    sys.stdout.flush()
    if text:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def abort(text: str, code: int) -> NoReturn:
    """Print `text` and end all ranks at once, with an exit code other than 0."""
    say(text)
    time.sleep(0.2)  # the launcher forwards what was printed before it kills
    MPI.COMM_WORLD.Abort(code or 1)
    raise SystemExit(code or 1)  # not reached: MPI_Abort does not return
