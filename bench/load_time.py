"""Time of loading a built directory in a fresh process, after `import torch`: milliseconds of CPU, and what was imported for it.

    codac build FILE -o DIR; python bench/load_time.py DIR

Needs no GPU: kernels are opened as well (tvm_ffi and the DSL's runtime library), which a first call does, and not launched. The best of
several processes, the first of which may write Python's bytecode.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TURNS = 5
SCRIPT = """
import json, sys, time
clock = time.process_time
start = clock()
import torch
found = {"import torch": clock() - start}
before, start = set(sys.modules), clock()
import coda_lang
loaded = coda_lang.load(sys.argv[1])
found["load"] = clock() - start
more = {m.partition(".")[0] for m in set(sys.modules) - before}
functions = [loaded] if callable(loaded) else list(vars(loaded).values())
from coda_lang.backend_cute import compile
start = clock()
objects = {functions[0].objects.build.directory / e.file for e in functions[0].objects.build.entries}
for path in sorted(objects):
    compile.load(path)
found[f"open {len(objects)} kernels"] = clock() - start
imported = sorted(m for m in more if not m.startswith("coda_lang_build"))
print(json.dumps({"ms": {k: round(1e3 * v, 1) for k, v in found.items()}, "imported": imported,
                  "cutlass": "cutlass" in sys.modules}))
"""


def main() -> int:
    """Measure and print; the process's exit status."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    root = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    found = []
    for _ in range(TURNS):
        done = subprocess.run([sys.executable, "-c", SCRIPT, sys.argv[1]], capture_output=True, text=True, env=environment)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        found.append(json.loads(done.stdout))
    for what in found[0]["ms"]:
        print(f"{what:20} {min(f['ms'][what] for f in found):8.1f} ms")
    print(f"imported for loading: {', '.join(found[-1]['imported'])}; cutlass {'was' if found[-1]['cutlass'] else 'never'} imported")
    return 0


if __name__ == "__main__":
    sys.exit(main())
