"""Objects of hand-written records (tests/gemm_cases.py), compiled on a machine without a GPU: for bench/gpu_mainloop.py and gpu_configs.py.

In: a case's name, the key of a configuration. Out: a shared object with one function `func` of device tensors and extents.
Non-goals: what is emitted from sources (`coda_lang.backend_cute.compile`).
"""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

from coda_lang.backend_cute import configs, layout
from coda_lang.backend_cute.spec import Config, planes


def parse(key: str) -> Config:
    """The configuration of a key."""
    tile, kind, cluster, *step = key.split("_")
    (m, n), (cm, cn) = map(int, tile.split("x")), map(int, cluster[1:].split("x"))
    return Config(m, n, kind == "pp", cm, cn, int(step[0][1:]) if step else 0)


def fakes(case):
    """Fake tensors for `cute.compile`, with the strides that `layout.pitched` promises."""
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    from coda_lang.backend_cute.gemm_sm90.views import DTYPES

    packed = layout.packed_tensors(case.gemm)
    made = []
    for record in case.gemm.tensors:
        shape = list(mode_shape(case, record, lambda axis: cute.sym_int()))
        if record.role == "work":
            made.append(make_fake_tensor(DTYPES["f32"], *work_layout(case, record, cute), assumed_align=4))
            continue
        unit = max(16 // configs.BYTES[record.dtype], 1)
        strides: list = [cute.sym_int64(divisibility=unit) for _ in shape]
        if shape:
            strides[-1] = 1
        if record.name in packed:
            strides[-2] = shape[-1]
        made.append(make_fake_tensor(DTYPES[record.dtype], tuple(shape) or (1,), tuple(strides) or (1,), assumed_align=16))
    return made


def work_layout(case, record, cute):
    """A contiguous [parts, length], with planes outside where the kind has them; of a `Point`, [length]."""
    kinds = [s.kind for s in case.gemm.sinks if getattr(s, "work", None) == record.name]
    outer = planes(kinds[0]) if kinds else ()
    shape = (*outer, *(cute.sym_int() for _ in range(2 if kinds else 1)))
    return shape, tuple(cute.sym_int64() for _ in shape[1:]) + (1,)


def mode_shape(case, record, free):
    for mode in record.modes:
        sizes = [case.fixed.get(axis) for axis in mode]
        yield math.prod(sizes) if all(isinstance(s, int) for s in sizes) else free(mode)


def compiled(name: str, key: str, target: Path) -> None:
    """Compile a case in a configuration into a shared object."""
    import cutlass
    import gemm_cases
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    from coda_lang.backend_cute.gemm_sm90 import kernel_of

    case = gemm_cases.ALL[name]
    kernel = kernel_of(case.gemm, parse(key), case.functions)
    integers = [cutlass.Int32(1) for _ in case.gemm.extents]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    made = cute.compile(kernel, *fakes(case), *integers, stream, options="--enable-tvm-ffi")
    made.export_to_c(str(target.with_suffix(".o")), function_name="func")
    subprocess.run(["gcc", "-shared", "-o", target, target.with_suffix(".o")], check=True)
    target.with_suffix(".o").unlink()
