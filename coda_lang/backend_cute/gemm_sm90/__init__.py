"""The fixed Hopper GEMM: TMA loads, WGMMA, persistent ping-pong and cooperative schedules, and an epilogue that reads a `spec.Gemm`; map
kernels, the same without a product, and row kernels."""

from collections.abc import Callable

from ..configs import MULTIPROCESSORS
from ..row_configs import of_rows
from ..spec import Config, Launch
from .kernel import GemmSm90
from .rows import RowsSm90


def kernel_of(
    launch: Launch, config: Config, functions: dict[str, Callable], multiprocessors: int = MULTIPROCESSORS
) -> GemmSm90 | RowsSm90:
    """The kernel of a record, to be compiled; `multiprocessors` is how many blocks at most a launch has (of rows, as many as there are)."""
    if of_rows(launch):
        return RowsSm90(launch, config, functions)  # type: ignore[arg-type]
    return GemmSm90(launch, config, functions, multiprocessors=multiprocessors)


__all__ = ["GemmSm90", "RowsSm90", "kernel_of"]
