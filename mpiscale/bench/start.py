"""How a contender's process begins: alone, or as one of several ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable

from mpiscale.bench.contender import Contender, Settings, serve
from mpiscale.comm.communicator import Communicator

ON_RANKS = "--on-ranks"


def start(build: Callable[[Settings, Communicator | None], Contender]) -> None:
    """Answer messages: see `contender.py`, and `ranked_contender.py` under mpirun."""
    if ON_RANKS not in sys.argv[1:]:
        serve(lambda settings: build(settings, None))
        return
    from mpiscale.bench.ranked_contender import serve_on_ranks  # starts MPI

    serve_on_ranks(build)
