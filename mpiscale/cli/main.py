"""`mpiscale COMMAND ...`: which commands there are, and how the program ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import tyro

from mpiscale.bench.conductor import ContenderError
from mpiscale.bench.step import DisagreementError
from mpiscale.cli.bench import bench
from mpiscale.cli.doctor import doctor
from mpiscale.cli.draw import draw
from mpiscale.errors import InputError

DESCRIPTION = (
    "Train large models in parallel: every strategy as explicit communication."
)
COMMANDS: dict[str, Callable[..., None]] = {
    "bench": bench,
    "doctor": doctor,
    "draw": draw,
}


def main(args: Sequence[str] | None = None) -> None:
    """Run one command; without any, print help.

    Exit code 0, 1 if a measurement failed, 2 if the command line can't be used.
    """
    args = sys.argv[1:] if args is None else args
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="mpiscale",
            description=DESCRIPTION,
            args=args or ["--help"],
        )
    except InputError as error:
        _leave(error, 2)
    except (ContenderError, DisagreementError) as error:
        _leave(error, 1)


def _leave(error: Exception, code: int) -> None:
    print(f"mpiscale: error: {error}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
