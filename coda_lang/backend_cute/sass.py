"""Reads the machine code of a compiled object: for tests and for people.

In: a .o or .so that contains a cubin. Out: the cubin's bytes, its disassembly, counts of instructions. Needs nvdisasm (the package
nvidia-cuda-nvdisasm, or a CUDA toolkit on the path). Non-goals: judging performance.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

EM_CUDA = 190
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


def cubin(path: Path) -> bytes:
    """The cubin inside an object. Raises ValueError where there is none."""
    data = path.read_bytes()
    at = data.find(b"\x7fELF", 1)
    while at > 0:
        machine = struct.unpack_from("<H", data, at + 18)[0] if at + 64 <= len(data) else 0
        if machine == EM_CUDA and data[at + 4] == 2:  # 64-bit
            table, entry_size, entries = struct.unpack_from("<Q", data, at + 40)[0], *struct.unpack_from("<HH", data, at + 58)
            programs, program_size, program_count = struct.unpack_from("<Q", data, at + 32)[0], *struct.unpack_from("<HH", data, at + 54)
            return data[at : at + max(table + entry_size * entries, programs + program_size * program_count)]
        at = data.find(b"\x7fELF", at + 1)
    raise ValueError(f"{path} contains no cubin")


def nvdisasm() -> str | None:
    """The disassembler: on the path, or in the installed package; None where there is neither."""
    found = shutil.which("nvdisasm")
    spec = importlib.util.find_spec("nvidia")
    for root in () if found or spec is None else spec.submodule_search_locations or ():
        found = next((str(p) for p in sorted(Path(root).glob("*/bin/nvdisasm"))), None) or found
    return found


def disassemble(path: Path) -> str:
    """The SASS of an object's kernels. Raises FileNotFoundError without nvdisasm."""
    tool = nvdisasm()
    if tool is None:
        raise FileNotFoundError("nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(cubin(path))
        return subprocess.run([tool, "-c", str(binary)], capture_output=True, text=True, check=True).stdout


def instructions(text: str) -> list[str]:
    """The mnemonics of a disassembly in order, modifiers and all (`FMUL.FTZ`), predicates left out."""
    return _INSTRUCTION.findall(text)


def count(path: Path) -> Counter[str]:
    """How often each instruction occurs, by name without modifiers: HGMMA, UTMALDG, UTMASTG, STSM, STL, LDL, …; 0 for what does not."""
    return Counter(name.split(".")[0] for name in instructions(disassemble(path)))


def spills(path: Path) -> int:
    """Loads from and stores to local memory."""
    counts = count(path)
    return counts["STL"] + counts["LDL"]
