"""Say whether this machine can run what needs a Hopper GPU. Exit status 0 if so; else 1, with what is missing and what to do instead."""

from __future__ import annotations

import sys


def missing() -> str:
    """What stands in the way, in one sentence; "" where nothing does."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        return f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}, not 9.0"
    return ""


def insist() -> None:
    """Leave with status 1, and what to do instead, where `missing` finds something."""
    problem = missing()
    if problem:
        print(f"this command needs a Hopper GPU (H100, H200), its driver and a CUDA build of torch: {problem}.", file=sys.stderr)
        print("without one, `make test` runs every other test and `make cubins` compiles every kernel and inspects it.", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    insist()
