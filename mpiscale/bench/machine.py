"""What a benchmark ran on, in words."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import threadpoolctl

from mpiscale.comm.threads import allowed_cpus


def blas_libraries() -> list[str]:
    """A line for each BLAS that this process has loaded: library, kernels, threads."""
    return [
        f"BLAS: {library['internal_api']} {library['version']}, kernels for "
        f"{library.get('architecture', 'an unknown CPU')}, "
        f"{library['num_threads']} thread{'s' * (library['num_threads'] > 1)}"
        for library in threadpoolctl.threadpool_info()
        if library["user_api"] == "blas"
    ]


def machine() -> dict[str, Any]:
    """CPU, number of CPUs, load at the moment, operating system."""
    return {
        "cpu": cpu_name(Path("/proc/cpuinfo")),
        "cpus": len(allowed_cpus()),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
    }


def cpu_name(cpuinfo: Path) -> str:
    """The processor's name: Linux's, or what Python knows elsewhere."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
