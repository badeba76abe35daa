"""What timed kernels leave: a table and a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def kernel_table(measured: dict[str, Any]) -> str:
    """What `measure_kernels` found, a line a kernel."""
    copy = measured["copy_bytes_per_second"] / 1e9
    head = (
        "reference ms",
        "compiled ms",
        "PyTorch ms",
        "PyTorch/ours",
        "MB",
        "of copy",
    )
    lines = [
        f"threads {measured['threads']}, {measured['clock']}, medians of "
        f"{measured['repeats']} in turn; a copy moves {copy:.1f} GB/s (read + written)",
        f"{'kernel':<26}" + "".join(f"{name:>14}" for name in head),
    ]
    for row in measured["kernels"]:
        torch = row["torch_s"]
        cells = (
            f"{1e3 * row['reference_s']:,.2f}",
            f"{1e3 * row['compiled_s']:,.3f}",
            "-" if torch is None else f"{1e3 * torch:,.3f}",
            "-" if torch is None else f"{torch / row['compiled_s']:.2f}",
            f"{row['bytes'] / 1e6:,.1f}",
            f"{row['bandwidth_share']:.0%}",
        )
        lines.append(f"{row['name']:<26}" + "".join(f"{cell:>14}" for cell in cells))
    lines.append("MB: read and written by formula; above 100 % the caches helped")
    return "\n".join(lines)


def write_kernels(measured: dict[str, Any], folder: Path, name: str) -> str:
    """Write NAME.json into `folder`; return what to tell the user."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(measured, indent=2) + "\n")
    return f"wrote {path}"
