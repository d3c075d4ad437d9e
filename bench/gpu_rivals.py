"""Ours beside cuBLAS, torch.compile, Liger, QuACK and coda-kernels at the same work, on a Hopper GPU.

    python bench/gpu_rivals.py [--only WORK …] [--models 8B …] [--tokens 8192 …] [--adapters NAME …] [--out FILE] [--limit SECONDS]
    python bench/gpu_rivals.py --list       # the works, who does each, the shapes; needs no GPU
    python bench/gpu_rivals.py --table FILE # what was measured, as a table in Markdown

What is done is in bench/works.py, who does it in bench/rivals.py, how it is measured in bench/protocol.py. Libraries that are not installed
are named in the file's first line, with the reason. A file that is there already is gone on with: cases in it are left out. QuACK and
max-autotune tune at the first call of every shape, which takes them minutes; `--adapters` chooses.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import need_gpu, protocol, rivals, works
from coda_lang.backend_cute import timing

AHEAD = 10_000_000  # cycles that the GPU waits before a step of a small work, whose launches take the host longer than it
AT_ONCE = 8  # cases whose kernels are compiled side by side
FAR = 1.5e-2


def objects(cases: Sequence[tuple[str, str, Mapping[str, int]]]) -> None:
    """Compile our kernels of some cases."""
    from bench import training_cases
    from coda_lang.backend_cute import compile

    jobs: dict[str, Any] = {}
    for name, _, sizes in cases:
        found = rivals.program(name)
        functions = [found.stored._chosen_for(("loss",)), found.chunked] if name == "linear_cross_entropy" else [found]
        kind = "gradients" if works.WORKS[name].training else "forward"
        for fn in functions:
            shape = {axis: size if size is not None else sizes[axis] for axis, size in fn.program.extents}
            jobs.update({j.key: j for j in training_cases.needed(fn, {"kind": kind, "shape": shape})})
    compile.objects_for(jobs.values())


def measured(peers: rivals.Peers, name: str, sizes: Mapping[str, int], clock: Any = None, device: str = "cuda") -> dict[str, Any]:
    """The record of one case."""
    case = works.Case(works.WORKS[name], sizes, device)
    methods, failed = peers.methods(case)
    training = case.work.training
    clock = clock or protocol.Gpu(ahead=AHEAD if training else timing.AHEAD)
    found = protocol.measure(methods, case.want, clock, graphs=not training, far=FAR)
    if failed:
        found["raised"] = failed | found.get("raised", {})
        found["ok"] = found["ok"] and "coda" not in failed
    return found


def run(options: argparse.Namespace) -> int:
    """All cases until the limit; the exit status."""
    began, good = time.time(), True
    peers = rivals.peers(rivals.ADAPTERS[name] for name in options.adapters)
    for name, why in peers.missing.items():
        print(f"{name} is left out: {why}", flush=True)
    sheet = protocol.Sheet(options.out, protocol.about(sys.argv, missing=peers.missing), ("work", "of", "sizes"))
    cases = [c for c in works.cases(options.only, options.models, options.tokens) if not sheet.has(work=c[0], of=c[1], sizes=c[2])]
    for place, (name, of, sizes) in enumerate(cases):
        record: dict[str, Any] = {"work": name, "of": of, "sizes": sizes}
        if time.time() - began > options.limit:
            print(f"{len(cases) - place} cases are left for another run", flush=True)
            return 1
        torch._dynamo.reset()  # what was compiled for other shapes counts against a limit
        try:
            if place % AT_ONCE == 0:
                objects(cases[place : place + AT_ONCE])
            record |= measured(peers, name, sizes)
        except Exception as problem:
            record |= {"ok": False, "raised": {"all": f"{type(problem).__name__}: {problem}"[:800]}}
        good &= record["ok"]
        sheet.add(record)
        torch.cuda.empty_cache()
    return 0 if good else 1


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Milliseconds in a row a case; what was wrong or raised by name."""
    found = [r for r in records if "work" in r]
    names = [name for name in rivals.ADAPTERS if any(name in r.get("ms", {}) for r in found)]
    lines = [f"| work | shape | {' | '.join(names)} | coda / products | best rival / coda |", "|---" * (len(names) + 4) + "|"]
    for r in found:
        ms, shape = r.get("ms", {}), ", ".join(f"{a} {n}" for a, n in r["sizes"].items())
        bad = {**{n: "wrong" for n in r.get("wrong", ())}, **{n: "raised" for n in r.get("raised", {})}}
        cells = [f"{ms[n]:.4g}" if n in ms else bad.get(n, "") for n in names]
        others = [t for n, t in ms.items() if n not in ("gemm", "eager") and not n.startswith("coda") or n == "coda_kernels"]
        ratio = f"{min(others) / ms['coda']:.3f}" if others and "coda" in ms else ""
        lines.append(
            f"| {r['work']} | {r['of']}: {shape} | {' | '.join(cells)} | {r.get('ratios', {}).get('coda / products', '')} | {ratio} |"
        )
    return "\n".join(lines)


def listing(options: argparse.Namespace) -> str:
    """The works, who does each, and the shapes."""
    lines = []
    for name in options.only or works.WORKS:
        who = [a.name for a in rivals.ADAPTERS.values() if name in a.builds]
        shapes = [
            f"{of} ({', '.join(f'{a} {n}' for a, n in s.items())})" for w, of, s in works.cases([name], options.models, options.tokens)
        ]
        lines += [f"{name}: {works.WORKS[name].what}", f"  by {', '.join(who)}", f"  {len(shapes)} shapes: {'; '.join(shapes)}"]
    missing = rivals.peers(rivals.ADAPTERS.values()).missing
    return "\n".join([*lines, *(f"{name} would be left out here: {why}" for name, why in missing.items())])


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], choices=list(works.WORKS), help="works; all by default")
    parser.add_argument("--models", nargs="*", default=list(works.MODELS), choices=list(works.MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(works.TOKENS))
    parser.add_argument("--adapters", nargs="+", default=list(rivals.ADAPTERS), choices=list(rivals.ADAPTERS))
    parser.add_argument("--out", type=Path, default=Path("rivals.jsonl"))
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further case begins")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.list:
        print(listing(options))
        return 0
    if options.table:
        print(table([json.loads(line) for line in options.table.read_text(encoding="utf-8").splitlines()]))
        return 0
    need_gpu.insist()
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
