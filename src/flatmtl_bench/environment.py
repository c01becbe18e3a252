"""What results were made with: versions, machine and threads, written beside them."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("flatmtl", "torch", "torchvision", "torchmetrics", "lightning", "numpy", "mlxtend")


def environment() -> dict[str, Any]:
    """Return versions, machine and threads as plain values."""
    return {
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "commit": _commit(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _commit() -> str | None:
    """Return the commit of this file's own source tree, marked if files were changed; None outside of it."""
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # installed below some other tree: not its commit
        return _git("describe", "--always", "--abbrev=12", "--dirty")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    here = Path(__file__).parent
    done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _processor() -> str:
    """Return the name of the CPU; `platform` knows only the architecture on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
