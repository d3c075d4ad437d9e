"""Programs written by hand as `spec` records, with their scalar functions and references: all of the contract, none of the emitter.

`ALL` maps a name to `Case(program, functions, reference)`; a reference takes `torch_fns.Written()` or `Exact()` first.
The tests of twin, host and self-check run all of them.
"""

from .build import COL, ROW, Case, inputs, program, tensor
from .heads import HEAD_NORM, QKV, ROPE
from .plain import BIAS_GELU, GEGLU, LINEAR, REARRANGED, SWIGLU, SWIGLU_HALVES
from .reductions import LM_HEAD, RESIDUAL
from .several import CHAIN

ALL = {
    "linear": LINEAR, "bias_gelu": BIAS_GELU, "swiglu": SWIGLU, "swiglu_halves": SWIGLU_HALVES, "geglu": GEGLU, "residual": RESIDUAL,
    "lm_head": LM_HEAD, "head_norm": HEAD_NORM, "qkv": QKV, "rope": ROPE, "rearranged": REARRANGED, "chain": CHAIN,
}  # fmt: skip

__all__ = ["ALL", "BIAS_GELU", "COL", "Case", "GEGLU", "HEAD_NORM", "LINEAR", "LM_HEAD", "QKV", "REARRANGED", "RESIDUAL", "ROPE", "ROW"]
__all__ += ["CHAIN", "SWIGLU", "SWIGLU_HALVES", "inputs", "program", "tensor"]
