"""Entries of the error catalog, C07xx: calling a compiled function."""

from __future__ import annotations

from ..entry import Entry

_LINEAR = '''
import torch, coda_lang

linear = coda_lang.compile("""
program linear(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
y = x @ w
""")
x, w = torch.randn(4, 64).bfloat16(), torch.randn(8, 64).bfloat16()
'''
_PAIRS = '''
import torch, coda_lang

pairs = coda_lang.compile("""
program pairs(x: bf16[b, two=2, t, k], w: bf16[n, k]) -> (y: bf16[b, two, t, n])
y = x @ w
""")
w = torch.randn(8, 64).bfloat16()
'''
_BLOCKS = '''
import torch, coda_lang

blocks = coda_lang.compile("""
program blocks(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n])
require k % 16 == 0
y = x @ w
""")
x, w = torch.randn(4, 32).bfloat16(), torch.randn(8, 32).bfloat16()
'''
_MANIFEST = '''
import json, pathlib, tempfile, coda_lang

folder = pathlib.Path(tempfile.mkdtemp())
(folder / "manifest.json").write_text(json.dumps({"format": 1, "arch": ARCH, "entries": []}))
coda_lang.load(folder)
'''


def _entry(code: str, title: str, why: str, wrong: str, right: str, remedy: str) -> Entry:
    return Entry(code, title, why, wrong, right, remedy, kind="python")


ENTRIES: tuple[Entry, ...] = (
    _entry(
        "C0701",
        "arguments that do not fit the signature",
        """A call gives every argument of the signature once, by position or by name. There are no defaults: a value that is
        fixed when the program is compiled is a `param`.""",
        _LINEAR + "linear(x, weight=w)",
        _LINEAR + "linear(x, w=w)",
        "Pass the arguments that the message lists, in their order or by name.",
    ),
    _entry(
        "C0702",
        "an argument that is no plain tensor",
        """Kernels read dense memory of one device. A list, an array, a sparse tensor or a number for an argument that is no
        scalar has none; a DTensor or an FSDP shard has only a part, and a tensor subclass may give its elements
        another meaning. None is converted or gathered silently.

        A Python number may stand for an `f32[]` scalar.""",
        _LINEAR + "linear(x.tolist(), w)",
        _LINEAR + "linear(x, w)",
        "Convert the value to a plain torch.Tensor; of a sharded tensor pass `.to_local()` or `.full_tensor()`.",
    ),
    _entry(
        "C0703",
        "an argument of another dtype than declared",
        """The type in the signature is what the kernel was compiled for. Nothing is cast on the way in: a cast reads and writes
        the whole tensor, and which precision is meant is the program's decision.""",
        _LINEAR + "linear(x.float(), w)",
        _LINEAR + "linear(x.float().to(torch.bfloat16), w)",
        "Cast the tensor, or declare the argument with its type.",
    ),
    _entry(
        "C0704",
        "tensors on several devices, or on one of another kind",
        """All tensors of a call are on one CUDA device, where the kernels run, or all on the CPU, where the reference runs.
        Nothing is moved silently: a run-time scalar is a Python number or a tensor on the same device.""",
        _LINEAR + 'linear(x, w.to("meta"))',
        _LINEAR + "linear(x, w)",
        "Move the tensors to one device; those on `meta` have no elements, so pass real ones.",
    ),
    _entry(
        "C0705",
        "kernels for another architecture",
        """An object holds machine code of one architecture, which is checked before anything is launched: a build names its own
        in its manifest, and a device must be a Hopper GPU (compute capability 9.0) to run `sm_90a`.""",
        _MANIFEST.replace("ARCH", '"sm_80"'),
        "",
        "Build for `--arch sm_90a` and run on a Hopper GPU, or call with CPU tensors, which runs the reference.",
    ),
    _entry(
        "C0706",
        "dims that cannot be read as the declared axes",
        """A tensor has one dim per declared axis, in their order. Two other forms are views of that and accepted too: adjacent
        axes merged into one dim, if at most one of them is free, and a leading free axis as several dims, which
        outputs return.""",
        _LINEAR + "linear(x[0], w)",
        _LINEAR + "linear(x[:1], w)",
        "Reshape the tensor to the axes that the message lists.",
    ),
    _entry(
        "C0707",
        "an axis with two extents",
        """An axis is one extent in a program. Where a tensor brings another than the declaration, or than an argument before it,
        the message names the axis, the dim, both extents and where the other comes from.""",
        _LINEAR + "linear(x[:, :63], w)",
        _LINEAR + "linear(x[:, :63], w[:, :63])",
        "Pass a tensor whose dim has the expected extent, or mend the argument that set it.",
    ),
    _entry(
        "C0708",
        "dims that can be read in several ways",
        """A merged or split form is accepted where the extents leave one way to read it. With fixed extents that repeat, there
        may be two; one is not chosen silently. One dim per axis is never ambiguous.""",
        _PAIRS + "pairs(torch.randn(4, 6, 64).bfloat16(), w)",
        _PAIRS + "pairs(torch.randn(4, 2, 3, 64).bfloat16(), w)",
        "Pass the tensor with one dim per axis.",
    ),
    _entry(
        "C0709",
        "a shape condition that does not hold",
        """`require` in the source, and the compiler where a kernel needs it, state conditions on extents; `codac plan` prints
        them all. They are checked on every new shape, before anything is launched.""",
        _BLOCKS + "blocks(x[:, :24], w[:, :24])",
        _BLOCKS + "blocks(x, w)",
        "Pad or cut the axis so that the condition holds.",
    ),
    _entry(
        "C0710",
        "an axis longer than 32 bits can count",
        """Coordinates in a kernel are 32-bit integers, so an axis has at most 2147483647 elements. Offsets have 64 bits: the
        tensor as a whole may be larger.""",
        _LINEAR + "linear(torch.empty(1, 64, dtype=torch.bfloat16).expand(2**31, 64), w)",
        _LINEAR + "linear(x, w)",
        "Split the call along that axis.",
    ),
    _entry(
        "C0711",
        "an output that the program does not have",
        """`outputs=` names the outputs to compute; the others, and their stores, are dropped. Each must be one of the
        signature's.""",
        _LINEAR + 'linear(x, w, outputs="z")',
        _LINEAR + 'linear(x, w, outputs="y")',
        "Name outputs that the message lists.",
    ),
    _entry(
        "C0712",
        "a directory that is no usable build",
        """`coda_lang.load` takes a directory that `codac build` wrote: a manifest, shared objects with checksums, the emitted
        module. It refuses one that is incomplete or damaged, was made by another version, or whose objects belong to
        another program.""",
        'import coda_lang\n\ncoda_lang.load("no/such/build")',
        "",
        "Build it again with `codac build FILE -o DIR`.",
    ),
    _entry(
        "C0714",
        "compiled kernels that cannot be kept",
        """Emitted modules and compiled kernels are kept on disk, so that a second process compiles nothing: in CODA_CACHE_DIR,
        or else the user's cache folder. It must be possible to write there.""",
        'import os\n\nos.environ["CODA_CACHE_DIR"] = "/dev/null/cache"' + _LINEAR + "linear(x, w)",
        "",
        "Set CODA_CACHE_DIR to a folder that can be written.",
    ),
    _entry(
        "C0715",
        "a tool that is not installed",
        """Compiling kernels needs nvidia-cutlass-dsl and a C compiler to link; launching them needs apache-tvm-ffi and the DSL's
        runtime library, found in the installed package, beside the kernels of a build, or at CODA_DSL_RUNTIME.""",
        """
import os
from coda_lang.backend_cute import compile

os.environ["CODA_DSL_RUNTIME"] = "no/such/file.so"
compile.runtime_library()
""",
        "",
        "Install what the message names: in the clone, `pip install -e '.[torch,cute]'` has it all but the C compiler.",
    ),
    _entry(
        "C0716",
        "an option that a model does not have",
        """The models of `coda_lang.nn` are certain programs: another activation, biases where there are none, an unknown scaling of
        rotary angles are other programs. A configuration that asks for one is refused, since ignoring it would compute
        something else. The same holds for sizes that do not divide each other, for an unknown `reduction`, and for what is no
        configuration at all: `of` takes the path of a config.json or of its folder, a mapping, or a transformers configuration.""",
        'from coda_lang import nn\n\nnn.LlamaConfig.of({"hidden_size": 64, "num_attention_heads": 4, "hidden_act": "gelu"})',
        'from coda_lang import nn\n\nnn.LlamaConfig.of({"hidden_size": 64, "num_attention_heads": 4, "hidden_act": "silu"})',
        "Choose what the message lists, or write the program: specs/ has layers of other families.",
    ),
)
