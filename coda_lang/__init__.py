"""coda_lang: a language and compiler for fused GEMM kernels. Importing it needs neither torch nor cutlass.

`compile(text_or_path, **params)` and `load(directory)` give callables on torch tensors, `nn` has whole models; naming them imports torch.
`CodaError` is what a mistake in a source or a call raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["CodaError", "compile", "load", "nn"]

if TYPE_CHECKING:
    from . import nn
    from .diagnostics.model import CodaError
    from .torch_api import compile, load


def __getattr__(name: str) -> Any:
    if name in ("compile", "load"):
        from . import torch_api

        return getattr(torch_api, name)
    if name == "nn":
        import importlib

        return importlib.import_module(".nn", __name__)
    if name == "CodaError":
        from .diagnostics.model import CodaError

        return CodaError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
