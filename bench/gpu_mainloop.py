"""Checks and times the GEMM kernels on a Hopper GPU, from objects compiled on a machine without one.

    python bench/gpu_mainloop.py build DIR [--quick]     # compiles; needs nvidia-cutlass-dsl and gcc, no GPU
    python bench/gpu_mainloop.py run DIR OUT [--limit S] # runs; needs torch and apache-tvm-ffi, no cutlass

Correctness: every case × configuration × size against float64, outputs poisoned with NaN inside and around, one JSON line each. A kernel
that hangs is killed with its process and reported as such. Speed: interleaved with torch.mm in one run on random data.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

from gemm_objects import compiled, parse  # noqa: E402

from coda_lang.backend_cute import configs, layout  # noqa: E402
from coda_lang.backend_cute.spec import Config, Gemm  # noqa: E402

SIZES = ((1, 1, 1), (7, 128, 7), (128, 7, 128), (129, 1000, 104), (1000, 1000, 1000), (520, 136, 4096), (4096, 520, 72))
QUICK = ((7, 128, 7), (129, 1000, 104), (1000, 520, 1000))
SWEEP = ("linear", "residual", "rope")  # with every configuration of `PICK`
PICK = (
    "128x128_pp_c1x1", "128x192_pp_c2x1", "128x160_pp_c1x2", "192x128_pp_c1x2", "64x256_pp_c2x1",
    "256x128_coop_c2x1", "256x160_coop_c1x2", "256x208_coop_c2x1", "128x256_coop_c1x2", "64x64_pp_c1x1", "64x32_pp_c2x1",
)  # fmt: skip
TIMED = {
    "linear": (
        "128x128_pp_c2x1", "128x128_pp_c1x2", "128x160_pp_c2x1", "128x192_pp_c1x1", "128x192_pp_c2x1", "128x192_pp_c1x2", "128x208_pp_c1x1",
        "128x208_pp_c2x1", "128x208_pp_c1x2", "192x128_pp_c1x1", "192x128_pp_c2x1", "192x128_pp_c1x2", "256x128_coop_c1x1",
        "256x128_coop_c1x2", "128x256_coop_c2x1", "128x256_coop_c1x1",
    ),
    "swiglu": ("128x128_pp_c2x1", "128x192_pp_c1x1", "128x256_coop_c2x1"),
    "swiglu_halves": ("128x128_pp_c2x1", "128x192_pp_c1x1", "128x256_coop_c2x1"),
    "geglu": ("128x128_pp_c2x1", "128x192_pp_c1x1"),
    "residual": ("128x128_pp_c2x1", "128x160_pp_c1x1"),
    "bias_gelu": ("128x128_pp_c2x1", "128x192_pp_c1x1"),
    "lm_head": ("128x128_pp_c2x1", "128x160_pp_c1x1"),
    "rope": ("128x128_pp_c2x1", "128x256_coop_c2x1"),
    "major_mn": ("128x128_pp_c2x1", "256x128_coop_c2x1"),
}  # fmt: skip
NARROW = {"major_mn": ("128x160_pp_c2x1", "128x208_pp_c1x2"), "halves_n_major": ("128x160_pp_c1x1", "128x208_pp_c1x1")}  # every swizzle
SPEED = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 28672, 4096))


def wanted(name: str, gemm: Gemm, quick: bool) -> list[str]:
    """Keys of the configurations to compile for a case."""
    offered = [c.key for c in configs.offered(gemm)]
    picked = [k for k in dict.fromkeys((*PICK, *TIMED.get(name, ()))) if k in offered] if name in SWEEP else []
    picked += [k for k in (*TIMED.get(name, ()), *NARROW.get(name, ())) if k in offered]
    default = [configs.default(gemm, 1000, 1000, 1000).key]
    basic = [k for k in offered if k in ("128x128_pp_c1x1", "256x128_coop_c2x1")] or offered[:1]
    return list(dict.fromkeys(default if quick else [*basic, *picked]))


# --- compile ------------------------------------------------------------------------------------------------------------


def build(directory: Path, quick: bool, resume: bool) -> None:
    import gemm_cases

    directory.mkdir(parents=True, exist_ok=True)
    manifest = []
    for name, case in gemm_cases.ALL.items():
        for key in wanted(name, case.gemm, quick):
            target = directory / f"{name}-{key}.so"
            manifest.append({"case": name, "config": key, "file": target.name})
            if resume and target.exists():
                continue
            began = time.time()
            compiled(name, key, target)
            print(json.dumps({**manifest[-1], "seconds": round(time.time() - began, 2)}), flush=True)
    (directory / "manifest.json").write_text(json.dumps(manifest))


# --- run ----------------------------------------------------------------------------------------------------------------


class Launcher:
    """Loads shared objects and calls them on torch tensors."""

    def __init__(self, directory: Path):
        import tvm_ffi

        ctypes.CDLL(str(directory / "libcute_dsl_runtime.so"), mode=ctypes.RTLD_GLOBAL)
        self.directory, self.load = directory, tvm_ffi.load_module

    def function(self, entry):
        return self.load(str(self.directory / entry["file"]))["func"]


def sizes_of(case, m: int, n: int, k: int) -> dict[str, int]:
    """Extents of the axes: rows and columns made m and n as nearly as the fixed axes allow, all others k."""
    gemm = case.gemm
    extents = dict(case.fixed)
    for sizes, size in ((gemm.rows, m), (gemm.cols, n)):
        free = [a for a in sizes if isinstance(a, str) and a not in extents]
        fixed = math.prod(extents.get(a, a) for a in sizes if a not in free)
        if free:
            size = -(-size // case.divisor) * case.divisor if sizes is gemm.cols else size
            extents[free[0]] = max(size // fixed, 1)
    for record in gemm.tensors:
        for mode in record.modes:
            for axis in mode:
                extents.setdefault(axis, k)
    extents["k"] = extents.get("k", 3)
    if "hd" in extents:
        extents["hd"] = 8 * extents["head"]
    return extents


def poisoned(torch, shape, strides, dtype):
    """(tensor, check): check() gives how many elements outside the tensor were written, and how many more in the padding of its rows.

    Padding is what lies between the end of a row and the next multiple of 16 bytes: rows start there, so it belongs to nobody.
    """
    size = sum((n - 1) * s for n, s in zip(shape, strides)) + 1
    room = torch.full((size + 4096,), math.nan, dtype=dtype, device="cuda")
    view = room[2048:].as_strided(shape, strides)
    unit = max(16 // dtype.itemsize, 1)
    padded = (*shape[:-1], -(-shape[-1] // unit) * unit) if shape and strides[-1] == 1 else shape

    def outside() -> tuple[int, int]:
        kept = view.clone()
        view.fill_(math.nan)
        everywhere = int((~room.isnan()).sum())
        room[2048:].as_strided(padded, strides).fill_(math.nan)
        beyond = int((~room.isnan()).sum())
        view.copy_(kept)
        return beyond, everywhere - beyond

    return view, outside


def make(torch, case, config: Config, extents, seed=0, poison=True):
    """Device tensors in record order, by name; and the checks of those that are written."""
    from coda_lang.backend_cute.torch_fns import DTYPES

    gen = torch.Generator(device="cuda").manual_seed(seed)
    packed, tensors, checks = layout.packed_tensors(case.gemm), {}, {}
    m, n = (math.prod(extents.get(a, a) for a in sizes) for sizes in (case.gemm.rows, case.gemm.cols))
    for record in case.gemm.tensors:
        shape = tuple(math.prod(extents[a] for a in mode) for mode in record.modes)
        dtype = DTYPES[record.dtype]
        far = (1 << 20, 1) if record.name in case.far else ()
        sink = next((s for s in case.gemm.sinks if getattr(s, "work", None) == record.name), None)
        if record.role == "work" and sink is not None:
            shape = configs.partial_shape(case.gemm, config, sink, m, n)
            tensors[record.name], checks[record.name] = poisoned(torch, shape, torch.empty(shape, device="meta").stride(), dtype)
        elif record.role != "in":
            strides = far or layout.pitched(record, record.name in packed, shape)
            tensors[record.name], checks[record.name] = poisoned(torch, shape, strides, dtype)
        elif dtype.is_floating_point:
            strides = far or layout.pitched(record, record.name in packed, shape)
            size = sum((e - 1) * s for e, s in zip(shape, strides)) + 1
            flat = torch.randn(size, generator=gen, device="cuda", dtype=dtype)
            tensors[record.name] = flat.as_strided(shape, strides) if shape else flat
        else:
            high = 2 if record.dtype == "bool" else max(m if case.gemm.name == "column_points" else n, 1)
            values = torch.randint(0, high, shape, generator=gen, device="cuda").to(dtype)
            whole = torch.empty_strided(shape, layout.pitched(record, False, shape), dtype=dtype, device="cuda")
            tensors[record.name] = whole.copy_(values)
    if case.gemm.name == "column_points":  # one row per column, so that each element has one writer
        tensors["target"] = torch.arange(n, device="cuda", dtype=torch.int32) % m
    return tensors, checks


def check(torch, launcher, case, entry, size) -> dict:
    from coda_lang.backend_cute import torch_fns, twin

    config, extents = parse(entry["config"]), sizes_of(case, *size)
    tensors, checks = make(torch, case, config, extents)
    arguments = [tensors[t.name] for t in case.gemm.tensors] + [extents[e] for e in case.gemm.extents]
    function = launcher.function(entry)
    function(*arguments)
    torch.cuda.synchronize()
    first = {name: tensors[name].clone() for name in checks}
    function(*arguments)
    torch.cuda.synchronize()
    results = {}
    inputs = {t.name: tensors[t.name] if t.modes else tensors[t.name].reshape(()) for t in case.gemm.tensors if t.role == "in"}
    exact, written = dict(inputs), dict(inputs)
    twin.launch(case.gemm, case.functions, exact, extents, {}, torch_fns.Exact(), config)
    twin.launch(case.gemm, case.functions, written, extents, {}, torch_fns.Written(), config)
    good = True
    for name, outside in checks.items():
        want, got, plain = exact[name].double(), tensors[name].double(), written[name].double()
        again = torch.equal(first[name].nan_to_num(9e9), tensors[name].nan_to_num(9e9))
        beyond, padding = outside()
        unwritten = bool((got.isnan() & ~want.isnan()).any())
        if any(getattr(s, "work", None) == name and s.kind == "moments" for s in case.gemm.sinks):  # which value is an anchor is free
            want, got, plain = (twin.combine("moments", work) for work in (want, got, plain))
        norm = want.nan_to_num().norm().item() + 1e-30
        error = ((got - want).nan_to_num().norm() / norm).item()
        plainly = ((plain - want).nan_to_num().norm() / norm).item()
        ok = again and not beyond and not unwritten and error <= 2 * plainly + 2e-5
        results[name] = {"error": error, "eager": plainly, "nan": unwritten, "repeatable": again, "ok": ok}
        results[name] |= {"written_beyond": beyond, "written_padding": padding}
        good = good and ok
    return {"case": entry["case"], "config": entry["config"], "size": size, "ok": good, "outputs": results}


def work(directory: Path, jobs: list, start: int) -> None:
    """The worker: prints one JSON line per job; the parent kills it when a line is late."""
    import gemm_cases
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    launcher = Launcher(directory)
    torch.zeros(1, device="cuda")
    print(json.dumps({"ready": True}), flush=True)
    for index in range(start, len(jobs)):
        entry, size = jobs[index]
        try:
            result = check(torch, launcher, gemm_cases.ALL[entry["case"]], entry, tuple(size))
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"[:400]
            result = {"case": entry["case"], "config": entry["config"], "size": size, "ok": False, "raised": raised}
        print(json.dumps({"index": index, **result}), flush=True)
        if "CUDA error" in result.get("raised", ""):
            return


def supervise(directory: Path, jobs: list, out: Path, patience: float, deadline: float) -> list[dict]:
    """Run all jobs in worker processes, restarting after a hang or a crash."""
    import queue
    import threading

    (directory / "jobs.json").write_text(json.dumps(jobs))
    results, index = [], 0
    with out.open("w") as sink:
        while index < len(jobs) and time.time() < deadline:
            command = [sys.executable, __file__, "work", str(directory), str(index)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            lines: queue.Queue = queue.Queue()
            threading.Thread(target=lambda p=process, q=lines: [q.put(line) for line in p.stdout] + [q.put(None)], daemon=True).start()
            wait = 90.0
            while index < len(jobs) and time.time() < deadline:
                try:
                    line = lines.get(timeout=wait)
                except queue.Empty:
                    line = ""
                if not line:
                    entry, size = jobs[index]
                    reason = "hang" if line == "" else f"worker left with {process.wait()}"
                    record = {"case": entry["case"], "config": entry["config"], "size": size, "ok": False, "raised": reason}
                elif "ready" in line:
                    wait = patience
                    continue
                else:
                    record = json.loads(line)
                results.append(record)
                sink.write(json.dumps(record) + "\n")
                sink.flush()
                index += 1
                if not line or "CUDA error" in record.get("raised", ""):
                    break
            process.kill()
            process.wait()
    return results


def speed(directory: Path, manifest: list, out: Path, deadline: float) -> None:
    """Times, interleaved with torch.mm: median over rounds of the mean of a few launches each."""
    import gemm_cases
    import torch

    launcher = Launcher(directory)
    lines = []
    for size in SPEED:
        m, n, k = size
        a, b = (torch.randn(r, k, device="cuda", dtype=torch.bfloat16) for r in (m, n))
        c = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        runs = {"torch.mm": partial(torch.mm, a, b.T, out=c)}
        for entry in manifest:
            name, key = entry["case"], entry["config"]
            if key not in TIMED.get(name, ()):
                continue
            case = gemm_cases.ALL[name]
            columns = n // case.gemm.segments
            extents = sizes_of(case, m, columns, k)
            if name == "residual":
                extents["rank"] = 64
            tensors, _ = make(torch, case, parse(key), extents)
            arguments = [tensors[t.name] for t in case.gemm.tensors] + [extents[e] for e in case.gemm.extents]
            runs[f"{name} {key}"] = partial(launcher.function(entry), *arguments)
        times: dict[str, list[float]] = {r: [] for r in runs}
        launches = 5 if m == 4096 else 2
        for function in runs.values():
            function()
        torch.cuda.synchronize()
        for _ in range(7):
            for label, function in runs.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                function()
                start.record()
                for _ in range(launches):
                    function()
                end.record()
                end.synchronize()
                times[label].append(start.elapsed_time(end) / launches)
            if time.time() > deadline:
                break
        reference = sorted(times["torch.mm"])[len(times["torch.mm"]) // 2]
        for label, values in times.items():
            median = sorted(values)[len(values) // 2]
            tflops = 2 * m * n * k / median / 1e9
            ratio = round(reference / median, 4)
            lines.append({"size": size, "kernel": label, "ms": median, "tflops": round(tflops, 1), "times_mm": ratio, "all": values})
            print(json.dumps({k: v for k, v in lines[-1].items() if k != "all"}), flush=True)
        del runs
        torch.cuda.empty_cache()
    calls = {}
    for name in ("linear", "residual"):  # host time of a call: small enough that the device keeps up
        entry = next(e for e in manifest if e["case"] == name)
        case = gemm_cases.ALL[name]
        tensors, _ = make(torch, case, parse(entry["config"]), sizes_of(case, 64, 64, 64))
        call = partial(launcher.function(entry), *(tensors[t.name] for t in case.gemm.tensors))
        call()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(500):
            call()
        calls[name] = (time.perf_counter() - began) / 500 * 1e6
    print(json.dumps({"microseconds a call": calls}), flush=True)
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    out.write_text(json.dumps({**versions, "host_us_per_call": calls, "lines": lines}))


def run(directory: Path, out: Path, limit: float) -> None:
    deadline = time.time() + limit
    manifest = json.loads((directory / "manifest.json").read_text())
    jobs = []
    seen: set[str] = set()
    for size in QUICK:
        jobs += [(e, size) for e in manifest]
    for entry in manifest:
        if entry["case"] not in seen:
            seen.add(entry["case"])
            jobs += [(entry, size) for size in SIZES if size not in QUICK]
    results = supervise(directory, jobs, out / "check.jsonl", 20.0, deadline - 120)
    bad = [r for r in results if not r["ok"]]
    print(f"{len(results)} of {len(jobs)} checks ran, {len(bad)} failed")
    for r in bad[:40]:
        print(json.dumps(r)[:600])
    speed_process = subprocess.Popen([sys.executable, __file__, "speed", str(directory), str(out / "speed.json"), str(deadline)])
    try:
        speed_process.wait(timeout=max(deadline + 20 - time.time(), 20))
    except subprocess.TimeoutExpired:
        speed_process.kill()
        print("timing hung")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("build", "run", "work", "speed"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--resume", action="store_true", help="keep objects that are there")
    parser.add_argument("--limit", type=float, default=300.0)
    args = parser.parse_args()
    if args.verb == "build":
        build(args.directory, args.quick, args.resume)
    elif args.verb == "run":
        run(args.directory, Path(args.rest[0]), args.limit)
    elif args.verb == "work":
        work(args.directory, json.loads((args.directory / "jobs.json").read_text()), int(args.rest[0]))
    else:
        speed(args.directory, json.loads((args.directory / "manifest.json").read_text()), Path(args.rest[0]), float(args.rest[1]))


if __name__ == "__main__":
    main()
