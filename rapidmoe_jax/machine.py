"""This machine, in words, and the user's folder for things that can be made again."""

import os
import platform
from pathlib import Path
from typing import Any

import jax

from rapidmoe_jax.host_kernels import isa, threads


def cache_folder() -> Path:
    """Give the folder for things that can be made again: $XDG_CACHE_HOME/rapidmoe or ~/.cache/rapidmoe."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rapidmoe"


def machine() -> dict[str, Any]:
    """Describe this machine: processor, cores in use, instruction set, device, versions."""
    name = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        name = names[0] if names else name
    return {
        "cpu": name,
        "threads": threads(),
        "isa": isa(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
