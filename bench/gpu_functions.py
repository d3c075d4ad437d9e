"""Measures the scalar functions and the finishing kernels on a Hopper GPU, against float64.

    python bench/gpu_functions.py --build DIR     compile everything into DIR (needs cutlass and a C compiler, no GPU)
    python bench/gpu_functions.py --run DIR       run it (needs a GPU, torch, tvm_ffi and what DIR holds; no cutlass)

`--run` prints one JSON line a check and exits with status 1 where one fails. Functions of one argument are sampled over all floats (every
`--stride`-th bit pattern; 1 takes them all), others over random bits and ordinary numbers; the error is counted in f32 ulps of the exact
result, where an error below `Op.absolute` and results below 2^-118 do not count, and must stay within `Op.ulp`. Finishing kernels run every
kind over several parts and lengths, with NaN and infinity among the partials, outputs poisoned first, twice for the same bits.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import lzma
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from coda_lang import ops
from coda_lang.backend_cute import compile as compiler
from coda_lang.backend_cute import manifest, spec
from coda_lang.ir.types import DTYPES, Ty

FLUSHED = 2.0**-118
ROW = spec.Index("row")

# --- what is built -----------------------------------------------------------------------------------------------------

# name -> (scalar expression of x, y, z; dtype of the result). The kernel is a `Finish` whose partial is read as it is: a map.


def from_table() -> dict[str, tuple[str, str]]:
    """Every element-wise operator of the table that takes no attributes, applied to floats (and to conditions where it wants bools)."""
    found = {}
    for op in ops.TABLE.values():
        if op.kind != "map" or not op.emit or op.attrs:
            continue
        bools = [op.read(i) == "bool" for i in range(len(op.args))]
        names = [f"f.gt({v}, 0.0)" if b else v for v, b in zip("xyz", bools)]
        types = tuple(Ty(DTYPES["bool" if b else "f32"], ()) for b in bools)
        found[op.name] = op.emit.format(**dict(zip(op.args, names))), str(op.infer(types, {}, ()).dtype)
    return found


MAPS: dict[str, tuple[str, str]] = {
    **from_table(),
    **{f"pow_{i}": (f"f.pow(x, {n!r})", "f32") for i, n in enumerate((2, 3.0, -1, 7, 0.5, -2.5))},
    "unfused": ("x * y + z", "f32"),
    "unfused_sub": ("x * y - z * x", "f32"),
    "select": ("f.where(f.logical_and(f.lt(x, y), f.logical_not(f.eq(z, 0.0))), x, z)", "f32"),
    "bf16": ("f.bf16(x)", "f32"),
    "f16": ("f.f16(x)", "f32"),
    "to_bf16": ("x", "bf16"),
    "to_f16": ("x", "f16"),
    "i32": ("f.i32(x)", "i32"),
    "i64": ("f.i64(x)", "i64"),
    "i32_arithmetic": ("f.maximum(f.i32(f.clamp(y, -1e6, 1e6)) + 3, -f.i32(f.clamp(z, -1e6, 1e6))) * 2", "i32"),
    "f32_of_i64": ("f.f32(f.i64(x))", "f32"),
    "f32_of_bool": ("f.f32(f.ge(x, 0.5))", "f32"),
}

KINDS = "sum max min amax lse moments only".split()
OUTPUTS = "f32 bf16 f16".split()
PARTS = (0, 1, 3, 16, 64, 65, 1000, 8192)
LENGTHS = (1, 3, 8, 31, 64, 1000, 8200)


def vector(name: str, dtype: str, role: str = "in") -> spec.Tensor:
    return spec.Tensor(name, dtype, (("n",),), role)


def map_kernel(name: str, dtype: str) -> spec.Finish:
    """x, y, z -> the function, element by element."""
    tensors = (vector("x", "f32", "work"), vector("y", "f32"), vector("z", "f32"), vector("out", dtype, "out"))
    ports = tuple(spec.Load(v, v, (ROW,)) for v in "yz")
    return spec.Finish(f"map_{name}", tensors, (spec.Partial("x", "only"),), f"map_{name}", ("out",), ("n",), ports)


def finish_kernel(kind: str) -> spec.Finish:
    """One partial of a kind, with ports of every sort and outputs of three dtypes."""
    outs = tuple(vector(d, d, "out") for d in OUTPUTS)
    ports = (
        spec.Load("scale", "scale", (spec.Index("row", div=(3,), mod=("k",)),)), spec.Load("one", "one", ()),
        spec.Iota("i", ROW), spec.Extent("k", ("k",)),
    )  # fmt: skip
    tensors = (vector("p", "f32", "work"), spec.Tensor("scale", "bf16", (("k",),)), spec.Tensor("one", "f32", ()), *outs)
    return spec.Finish(f"finish_{kind}", tensors, (spec.Partial("p", kind),), "finish_fn", tuple(OUTPUTS), ("n",), ports, ("k",))


def mixed_kernel() -> spec.Finish:
    """Two partials of different part counts and a vector, into an integer and a float."""
    tensors = (*(vector(name, "f32", "work") for name in "slv"), vector("o", "f32", "out"), vector("q", "i32", "out"))
    partials = (spec.Partial("s", "sum"), spec.Partial("l", "lse"), spec.Partial("v", "only"))
    return spec.Finish("finish_mixed", tensors, partials, "mixed_fn", ("o", "q"), ("n",))


SCALARS = """
def finish_fn(f, p, scale, one, i, k):
    q = p * scale + f.f32(i + k) * one
    return (p, q, q)


def mixed_fn(f, s, l, v):
    return (s + l * v, f.i32(f.round(v)))
"""


def program() -> spec.Program:
    kernels = [map_kernel(name, dtype) for name, (_, dtype) in MAPS.items()]
    kernels += [finish_kernel(kind) for kind in KINDS] + [mixed_kernel()]
    return spec.Program("functions", (), (), (("n", None), ("k", None)), tuple(kernels))


def build(directory: Path, workers: int | None) -> None:
    """Compile all kernels into `directory`, and put the runtime library beside them, packed."""
    directory.mkdir(parents=True, exist_ok=True)
    module = directory / "scalars.py"
    maps = "".join(f"\n\ndef map_{name}(f, x, y, z):\n    return ({text},)\n" for name, (text, _) in MAPS.items())
    module.write_text("from __future__ import annotations\n\n" + maps + SCALARS, encoding="utf-8")
    scalars = load_module(module)
    functions = {name: fn for name, fn in vars(scalars).items() if callable(fn)}
    made = compiler.build([program()], functions, directory, workers=workers)
    packed = directory / f"{compiler.RUNTIME}.xz"
    if not packed.is_file():
        packed.write_bytes(lzma.compress(compiler.runtime_library().read_bytes(), preset=6))
    print(json.dumps({"built": len(made.entries), "directory": str(directory)}))


def unpack_runtime(directory: Path) -> None:
    """Let `compile.load` find the packed runtime library."""
    if "CODA_DSL_RUNTIME" not in os.environ:
        library = Path(tempfile.mkdtemp()) / compiler.RUNTIME
        library.write_bytes(lzma.decompress((directory / f"{compiler.RUNTIME}.xz").read_bytes()))
        os.environ["CODA_DSL_RUNTIME"] = str(library)


def load_module(path: Path) -> Any:
    found = importlib.util.spec_from_file_location("scalars", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["scalars"] = module
    found.loader.exec_module(module)
    return module


# --- running: functions ------------------------------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -3.5, math.inf, -math.inf, math.nan]
SPECIAL += [2.0**-149, 2.0**-126, 3.4028235e38, -3.4028235e38, 2.0**31, -(2.0**31)]
CHUNK = 1 << 25


class Run:
    """The kernels of a build on the current GPU."""

    def __init__(self, directory: Path, stride: int) -> None:
        import torch

        from coda_lang.backend_cute import torch_fns

        self.torch, self.build, self.stride = torch, manifest.read(directory), stride
        self.dtypes = torch_fns.DTYPES
        self.kernels = {k.name: k for k in program().kernels}
        self.scalars = load_module(directory / "scalars.py")
        self.written, self.exact = torch_fns.Written(), torch_fns.Exact()
        self.failed = 0

    def launcher(self, name: str) -> Callable[..., None]:
        return compiler.load(self.build.find(self.kernels[name], None))

    def report(self, check: str, name: str, ok: bool, **facts: Any) -> None:
        self.failed += not ok
        print(json.dumps({"check": check, "name": name, "ok": ok, **facts}), flush=True)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A poisoned output."""
        kind = self.dtypes[dtype]
        return self.torch.full(shape, math.nan if kind.is_floating_point else 77, dtype=self.torch.float64, device="cuda").to(kind)

    def samples(self, name: str) -> Iterator[tuple[Any, Any, Any]]:
        """x, y, z on the GPU, in chunks."""
        torch = self.torch
        text = re.sub(r"f\.\w+", "", MAPS[name][0])
        if "y" not in text and "z" not in text:
            span = CHUNK * self.stride
            for start in range(-(2**31), 2**31, span):
                stop = min(start + span, 2**31)
                x = torch.arange(start, stop, self.stride, dtype=torch.int64, device="cuda").to(torch.int32).view(torch.float32)
                yield x, x, x
            return
        n = 1 << 24
        generator = torch.Generator("cuda").manual_seed(7)

        def wild() -> Any:
            whole = torch.randint(-(2**31), 2**31, (n,), dtype=torch.int64, device="cuda", generator=generator)
            return whole.to(torch.int32).view(torch.float32)

        def plain() -> Any:
            return torch.randn(n, device="cuda", generator=generator) * 4

        yield wild(), wild(), wild()
        yield plain(), plain(), plain()
        yield plain().abs(), plain(), plain()
        yield plain(), plain().round(), plain().round()
        grid = torch.tensor(list(itertools.product(SPECIAL, repeat=3)), dtype=torch.float32, device="cuda")
        grid = torch.cat([grid, torch.zeros((-len(grid)) % 4, 3, device="cuda")])
        yield tuple(grid.T.contiguous())

    def function(self, name: str) -> None:
        """One function over its samples."""
        torch = self.torch
        launch, (_, dtype) = self.launcher(f"map_{name}"), MAPS[name]
        op = ops.TABLE.get(name.split("_")[0] if name.startswith("pow_") else name)
        bound, absolute = (op.ulp or 0.5000001, op.absolute) if op and op.emit and dtype == "f32" else (0, 0.0)
        count = wrong = 0
        worst, at, worst_absolute = 0.0, [], 0.0
        for x, y, z in self.samples(name):
            out = self.empty(x.shape, dtype)
            launch(x[None], y, z, out)
            fn = getattr(self.scalars, f"map_{name}")
            if not bound:
                good = self.same(out, fn(self.written, x, y, z)[0].to(out.dtype))
                error = None
            else:
                good, error, distance = self.judge(name, x, out, fn(self.exact, x, y, z)[0], bound, absolute)
                worst_absolute = max(worst_absolute, distance)
            count += x.numel()
            bad = int((~good).sum())
            if error is not None:
                top = error.argmax()
                if float(error[top]) > worst:
                    worst, at = float(error[top]), [float(v[top]) for v in (x, y, z)]
            elif bad and not wrong:
                at = [float(v[~good][0]) for v in (x, y, z)] + [float(out[~good][0])]
            wrong += bad
        facts = {"samples": count, "wrong": wrong, "at": at}
        if bound:
            facts |= {"max_ulp": round(worst, 3), "bound_ulp": bound, "bound_absolute": absolute, "max_error_counted": worst_absolute}
        self.report("function", name, wrong == 0, **facts)
        torch.cuda.empty_cache()

    def same(self, a: Any, b: Any) -> Any:
        """Equal, or both NaN."""
        return (a == b) | ((a != a) & (b != b))

    def judge(self, name: str, x: Any, got: Any, exact: Any, bound: float, absolute: float) -> tuple[Any, Any, float]:
        """Which are right; the error of each in ulps beyond what does not count; the largest error that counted."""
        torch = self.torch
        if name in ("sin", "cos"):
            exact = torch.where(x.abs() <= 2.0**21, exact, torch.full_like(exact, math.nan))
        rounded = exact.to(torch.float32)
        wide = got.to(torch.float64)
        special = ~torch.isfinite(rounded) | ~torch.isfinite(got)
        # Next to the largest float a rounding may go either way; the ulp count below then decides.
        edge = (exact.abs() > 3.4028e38 * (1 - 1e-6)) & (exact.abs() < 3.4028236e38 * (1 + 1e-6)) & ~torch.isnan(got)
        _, exponent = torch.frexp(exact)
        ulp = torch.ldexp(torch.ones_like(exact), (exponent - 24).clamp(min=-149))
        distance = (wide - exact).abs()
        counted = torch.where(special | (distance <= absolute) | ((exact.abs() < FLUSHED) & (distance < 2 * FLUSHED)), 0.0, distance)
        error = (counted - absolute).clamp(min=0.0) / ulp
        good = torch.where(special, self.same(got, rounded) | edge, error <= bound)
        return good, torch.where(special, 0.0, error), float(counted.max()) if absolute else 0.0

    # --- running: finishing kernels

    def finish(self, kind: str, parts: int, length: int, trouble: str) -> None:
        """One kind at one shape against float64."""
        torch = self.torch
        generator = torch.Generator("cuda").manual_seed(parts * 1000003 + length)
        shape = (*spec.planes(kind), parts, length)
        p = torch.randn(shape, device="cuda", generator=generator) * 3
        if kind == "moments" and parts:  # counts, anchors far from zero, offsets, sums of squares
            p = torch.stack((p[0].abs().round() * 8, p[1] + 1000.0, p[2], torch.where(p[0].abs() < 0.5, 0.0, p[3].abs() * 50)))
            p[1:, p[0] == 0] = 0.0
        if kind == "lse" and parts:
            p[1] = p[1].abs() + 1.0
        if kind == "amax":
            p = p.abs()
        if trouble and parts:
            self.spoil(p, kind, trouble)
        k = 5
        scale, one = torch.randn(k, device="cuda", generator=generator).bfloat16(), torch.tensor([1.5], device="cuda")
        launch = self.launcher(f"finish_{kind}")
        results = []
        for _ in range(2):
            outs = [self.empty((length,), d) for d in OUTPUTS]
            launch(p, scale, one, *outs, k)
            results.append(outs)
        row = torch.arange(length, dtype=torch.int32, device="cuda")
        value, magnitude = self.combined(kind, p.double())
        factor = scale.double()[(row // 3 % k).long()]
        expected = self.scalars.finish_fn(self.exact, value, factor, one.double(), row, torch.tensor(k, device="cuda"))
        tolerances = (4e-7 * (1 + math.log2(max(parts, 1))), 2.0**-8, 2.0**-10)
        ok, worst = all(self.bits_equal(a, b) for a, b in zip(*results)), 0.0
        for got, want, tolerance in zip(results[0], expected, tolerances):
            finite = torch.isfinite(want)
            big = got.dtype == torch.float16
            ok &= bool(self.same(got.double(), want)[~finite].all()) if not big else bool(torch.isnan(got)[torch.isnan(want)].all())
            scale_of = torch.maximum(want.abs(), magnitude if got.dtype == torch.float32 else want.abs()) + 2.0**-14
            error = torch.where(finite & ~(big & (want.abs() > 65504)), (got.double() - want).abs() / scale_of, 0.0)
            worst = max(worst, float((error / tolerance).max()) if length else 0.0)
        self.report("finish", kind, ok and worst <= 1.0, parts=parts, length=length, trouble=trouble, error_over_tolerance=round(worst, 4))

    def spoil(self, p: Any, kind: str, trouble: str) -> None:
        """Put NaN or infinity into some columns; for "lse" as a kernel leaves them: infinities beside their sums."""
        value = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[trouble]
        columns = self.torch.arange(p.shape[-1], device="cuda") % 3 == 0
        parts = self.torch.arange(p.shape[-2], device="cuda") % 4 == (p.shape[-2] - 1) % 4
        where = columns[None, :] & parts[:, None]
        if kind == "amax":
            value = abs(value)
        if kind == "moments":
            p[3][where & (p[0] > 0)] = abs(value)
        elif kind == "lse":
            p[0][where] = value
            p[1][where] = 0.0 if trouble == "-inf" else value
            if trouble == "-inf":  # and one column of nothing
                p[0][:, 0], p[1][:, 0] = -math.inf, 0.0
        else:
            p[where] = value

    def combined(self, kind: str, p: Any) -> tuple[Any, Any]:
        """The reduction in float64, and the magnitude its rounding error is measured by."""
        torch = self.torch
        identity = {"sum": 0.0, "max": -math.inf, "min": math.inf, "amax": 0.0, "lse": -math.inf, "moments": 0.0, "only": math.nan}[kind]
        if p.shape[-2] == 0:
            full = torch.full((p.shape[-1],), identity, dtype=torch.float64, device="cuda")
            return full, full
        if kind == "lse":
            top, total = p
            peak = top.amax(0)
            weight = torch.where(top == peak, 1.0, torch.exp(top - peak))
            value = torch.where(torch.isinf(peak), peak, peak + torch.log((total * weight).sum(0)))
            return value, top.abs().amax(0) + 1.0
        if kind == "moments":
            count, anchor, offset, rest = p
            mean = anchor + offset
            middle = (count * mean).sum(0) / count.sum(0).clamp(min=1)
            value = (rest + count * (mean - middle) ** 2).sum(0)
            return value, value.abs()
        if kind == "sum":
            return p.sum(0), p.abs().sum(0)
        value = {"max": lambda: p.amax(0), "min": lambda: p.amin(0), "amax": lambda: p.abs().amax(0), "only": lambda: p[0]}[kind]()
        return value, value.abs()

    def bits_equal(self, a: Any, b: Any) -> bool:
        return bool(self.same(a, b).all())

    def mixed(self, length: int) -> None:
        """Partials of different part counts in one kernel, an integer result."""
        torch = self.torch
        generator = torch.Generator("cuda").manual_seed(length)
        s = torch.randn(9, length, device="cuda", generator=generator)
        lse = torch.randn(2, 40, length, device="cuda", generator=generator).abs() + 0.5
        v = torch.randn(1, length, device="cuda", generator=generator) * 100
        o, q = self.empty((length,), "f32"), self.empty((length,), "i32")
        self.launcher("finish_mixed")(s, lse, v, o, q)
        want = self.combined("sum", s.double())[0] + self.combined("lse", lse.double())[0] * v[0].double()
        error = float(((o.double() - want).abs() / (want.abs() + 100)).max())
        exact = bool((q == v[0].round().to(torch.int32)).all())
        self.report("finish", "mixed", exact and error < 1e-6, length=length, error=error)

    def time(self, kind: str, parts: int, length: int) -> None:
        """Microseconds of a launch, the best of several."""
        torch = self.torch
        launch = self.launcher(f"finish_{kind}")
        p = torch.rand((*spec.planes(kind), parts, length), device="cuda") + 0.5
        scale, one = torch.randn(5, device="cuda").bfloat16(), torch.ones(1, device="cuda")
        outs = [self.empty((length,), d) for d in OUTPUTS]
        times = []
        for _ in range(20):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(10):
                launch(p, scale, one, *outs, 5)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 100)
        best = min(times)
        facts = {"parts": parts, "length": length, "us": round(best, 2), "gb_s": round(p.nbytes / best / 1e3, 1)}
        print(json.dumps({"time": kind, **facts}), flush=True)


def run(directory: Path, stride: int) -> int:
    """Every check; the number that failed."""
    unpack_runtime(directory)
    checks = Run(directory, stride)
    for name in MAPS:
        checks.function(name)
    for kind in KINDS:
        for parts, length in itertools.product((1,) if kind == "only" else PARTS, LENGTHS):
            if parts * length <= 1 << 24:
                for trouble in ("", "nan", "inf", "-inf"):
                    checks.finish(kind, parts, length, trouble)
    for length in (1, 40, 5000):
        checks.mixed(length)
    for kind in ("sum", "lse"):
        for parts, length in ((16, 8192), (64, 32768), (64, 512), (4096, 64), (8192, 1), (65536, 1)):
            checks.time(kind, parts, length)
    print(json.dumps({"failed": checks.failed}))
    return checks.failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, metavar="DIR")
    parser.add_argument("--run", type=Path, metavar="DIR")
    parser.add_argument("--stride", type=int, default=7, help="sample every n-th float (default 7)")
    parser.add_argument("--workers", type=int, default=None, help="processes that compile")
    options = parser.parse_args()
    if not (options.build or options.run):
        parser.error("give --build DIR or --run DIR")
    if options.build:
        build(options.build, options.workers)
    return 1 if options.run and run(options.run, options.stride) else 0


if __name__ == "__main__":
    sys.exit(main())
