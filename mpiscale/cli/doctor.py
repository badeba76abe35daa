"""`mpiscale doctor`, alone or under mpirun or srun."""

from __future__ import annotations

import sys


def doctor() -> None:
    """Look whether mpiscale will run here: launcher, ranks, memory, GPUs, files.

    mpirun -n 4 mpiscale doctor

    Every line is ok, a warning (it runs, but slower) or an error, with what to do.
    The exit code is 1 if there is an error.
    """
    # These start MPI: not before somebody wants it.
    from mpiscale.comm.launcher import stdout_is_terminal
    from mpiscale.comm.world import World, environment, run
    from mpiscale.doctor.examine import examine
    from mpiscale.doctor.report import exit_code, report

    def main(world: World) -> None:
        findings = examine(world, environment())
        code = 0
        if findings is not None:
            print(report(findings, colour=stdout_is_terminal()), flush=True)
            code = exit_code(findings)
        if world.comm.bcast(code):
            sys.exit(code or 1)

    run(main)
