"""The arguments of a call: by position or name, of the right kind, type and place. Shapes are `binding`'s business.

In: a `spec.Program`, what the caller passed. Out: values in signature order, the device, a key under which a plan can be kept; or
`CallError`. Non-goals: strides and copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from ..diagnostics.model import Diagnostic
from . import errors, spec
from .binding import Binding
from .torch_fns import DTYPES

LARGEST = int(torch.finfo(torch.float32).max)  # of a number for a scalar
Tensor, Parameter = torch.Tensor, torch.nn.Parameter
PLAIN = (Tensor, Parameter)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
META = "pass real tensors: on meta they have shapes and no elements, so moving them makes none"
INTEGERS = (torch.int32, torch.int64)
PARTS = (torch.float32, torch.float16)  # of complex numbers: their imaginary parts may be marked as negated, while memory is not
TRACED = (FakeTensor, FunctionalTensor)
_watching, _transforming = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active
is_compiling = torch.compiler.is_dynamo_compiling  # torch.compile takes it for True; whatever else traces has a dispatch mode
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def key(arguments: Sequence[Any]) -> tuple | None:
    """What a plan depends on besides the program; None where an argument is not a plain tensor or number, or missing."""
    parts: list[Any] = []
    try:
        for t in arguments:
            kind = type(t)
            if kind is Tensor or kind is Parameter:
                dtype = t.dtype
                if dtype in PARTS and t.is_neg():
                    return None
                parts.append((dtype, t.device, t.shape, t.stride(), t.data_ptr() % 16, t.requires_grad))
            elif kind is float or kind is int and -LARGEST <= t <= LARGEST:
                parts.append(float)
            elif t is None:
                parts.append(None)
            else:
                return None
    except RuntimeError:  # no storage: fake, sparse, traced
        return None
    return tuple(parts)


def kind(arguments: Sequence[Any]) -> tuple | None:
    """What decides how a call is made: `key`, and whether autograd records. None where something watches calls, or transforms them."""
    if _watching() or forward_ad._current_level >= 0 or _transforming():
        return None
    found = key(arguments)
    return found and (torch.is_grad_enabled(), found)


def wanted(program: spec.Program, outputs: Any) -> tuple[str, ...]:
    """The names that `outputs=` gives: one, or several. Raises `CallError` where they are no names."""
    names = (outputs,) if isinstance(outputs, str) else tuple(outputs) if isinstance(outputs, Iterable) else (outputs,)
    wrong = [n for n in names if not isinstance(n, str)]
    if wrong:
        known = ", ".join(repr(o.name) for o in program.outputs)
        message = f"{program.name}: outputs= takes names, got {wrong[0]!r} of type {type(wrong[0]).__name__}"
        raise errors.refuse(errors.OUTPUTS, message, help=f"name one of {known}, or several in a tuple")
    return names


def order(program: spec.Program, positional: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """All arguments in signature order."""
    names = [a.name for a in program.inputs]
    given = dict(zip(names, positional))
    signature = f"{program.name}({', '.join(names)})"
    problems = []
    if len(positional) > len(names):
        problems.append(f"takes {len(names)} arguments, got {len(positional)}")
    for name in named:
        if name not in names:
            problems.append(f"has no argument {name!r}")
        elif name in given:
            problems.append(f"got argument {name!r} twice, by position and by name")
    missing = [n for n in names if n not in given and n not in named]
    if missing and len(positional) <= len(names):
        problems.append(f"misses argument{'s'[: len(missing) > 1]} {', '.join(map(repr, missing))}")
    if problems:
        help = f"the signature is {signature}"
        raise errors.CallError([errors.problem(errors.ARGUMENTS, f"{program.name}: {p}", help=help) for p in problems])
    return [named[n] if n in named else given[n] for n in names]


def check(program: spec.Program, arguments: Sequence[Any]) -> torch.device:
    """Kind, dtype and device of every argument; the one device. Raises `CallError` with everything that is wrong."""
    problems: list[Diagnostic] = []
    places: dict[torch.device, str] = {}
    for argument, value in zip(program.inputs, arguments, strict=True):
        where = f"{program.name}: argument {argument.name!r}"
        found = _kind(argument, value)
        if found:
            problems.append(errors.problem(errors.KIND, f"{where}: {found[0]}", help=found[1]))
            continue
        if not isinstance(value, torch.Tensor):
            continue
        if value.dtype != DTYPES[argument.dtype]:
            got = NAMES.get(value.dtype, str(value.dtype).removeprefix("torch."))
            remedy = f"pass {argument.name}.to({DTYPES[argument.dtype]})"
            if any({value.dtype, DTYPES[argument.dtype]} <= set(kind) for kind in (FLOATS, INTEGERS)):  # any other has another meaning
                remedy += f", or declare {argument.name}: {got}{_axes(argument)} in the program"
            problems.append(errors.problem(errors.DTYPE, f"{where}: got dtype {got}, expected {argument.dtype}", help=remedy))
        places.setdefault(value.device, argument.name)
    if len(places) > 1:
        text = ", ".join(f"{name!r} is on {device}" for device, name in places.items())
        help = META if any(device.type == "meta" for device in places) else "move them to one"
        problems.append(errors.problem(errors.DEVICE, f"{program.name}: arguments are on several devices: {text}", help=help))
    for device, name in places.items():
        if device.type not in ("cpu", "cuda"):
            text = f"{program.name}: argument {name!r} is on {device}, expected a CUDA device or the CPU"
            help = META if device.type == "meta" else f"pass {name}.to('cuda') or {name}.cpu()"
            problems.append(errors.problem(errors.DEVICE, text, help=help))
    if not places and not problems:
        text = f"{program.name}: no argument is a tensor, so the call has no device"
        problems.append(errors.problem(errors.KIND, text, help="pass tensors"))
    if problems:
        raise errors.CallError(problems)
    return next(iter(places))


def check_gpu(program: spec.Program, device: torch.device, arch: str = "sm_90a") -> None:
    """Raise `CallError` unless kernels for `arch` run on `device`."""
    major, minor = torch.cuda.get_device_capability(device)
    wanted = arch.removeprefix("sm_").rstrip("a")
    if f"{major}{minor}" != wanted:
        raise errors.refuse(
            errors.ARCHITECTURE,
            f"{program.name}: the kernels are for {arch}; {device} is a {torch.cuda.get_device_name(device)} "
            f"of compute capability {major}.{minor}",
            help="run on a Hopper GPU (H100, H200), or call with CPU tensors, which runs the reference",
        )


def wants_gradients(arguments: Sequence[Any], of: Sequence[bool] | None = None) -> bool:
    """May autograd want a backward of this call, by any argument, or by one of those marked in `of`?"""
    if not torch.is_grad_enabled():
        return False
    needs = [isinstance(t, torch.Tensor) and t.requires_grad for t in arguments]
    return any(needs) if of is None else any([n and o for n, o in zip(needs, of)])


def are_ordinary(arguments: Sequence[Any]) -> bool:
    """Are all plain tensors or numbers, and none to be cast by autocast?"""
    for value in arguments:
        kind = type(value)
        if kind not in PLAIN and kind is not float and (kind is not int or not -LARGEST <= value <= LARGEST):
            return False
    return not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))


def is_traced(value: Any) -> bool:
    """Does this tensor stand for another while something traces?"""
    return isinstance(value, torch.Tensor) and type(value) not in PLAIN and isinstance(value, TRACED)


def no_grad() -> contextlib.AbstractContextManager[object]:
    """Nothing inside is recorded by autograd."""
    return torch.no_grad()


def apart(results: Sequence[torch.Tensor], arguments: Sequence[Any]) -> list[torch.Tensor]:
    """The results, contiguous, none sharing memory with an argument."""
    taken = {t.untyped_storage().data_ptr() for t in arguments if isinstance(t, torch.Tensor)}
    contiguous = [r.contiguous() for r in results]
    return [r.clone() if r.untyped_storage().data_ptr() in taken else r for r in contiguous]


def device_of(arguments: Sequence[Any]) -> torch.device:
    """The device of the first tensor; the CPU where there is none."""
    return next((t.device for t in arguments if isinstance(t, torch.Tensor)), torch.device("cpu"))


def runs_kernels(device: torch.device) -> bool:
    """Do calls on this device run kernels? Else they run the reference, and the backward's twin. Tests put stand-ins for kernels here."""
    return device.type == "cuda"


def constant(method: Any) -> Any:
    """Mark a method whose result torch.compile may take as a constant: it is called while tracing, not traced."""
    method._dynamo_marked_constant = True  # as torch.compiler.assume_constant_result does, without importing the compiler
    return method


def is_special() -> bool:
    """Is a dispatch mode (fake tensors, tracing, counting) or forward-mode differentiation active?"""
    return _watching() > 0 or forward_ad._current_level >= 0


def check_tangents(program: spec.Program, arguments: Sequence[Any]) -> None:
    """Raise `CallError` where an argument carries a tangent, which the result would not."""
    for argument, value in zip(program.inputs, arguments, strict=True):
        if forward_ad._current_level >= 0 and isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise errors.refuse(
                errors.TRANSFORM,
                f"{program.name}: argument {argument.name!r} carries a forward-mode tangent, for which {program.name} has no derivative",
                help=f"differentiate in reverse mode (backward, torch.autograd.grad), or use {program.name}.reference(...)",
            )


def cast(program: spec.Program, arguments: Sequence[Any]) -> Sequence[Any]:
    """The autocast rule: where autocast is on, a float tensor of up to 32 bits is cast to the type that the program declares.

    A constant is not widened: no operation under autocast made it, so one that arrives narrower lost digits elsewhere, by a mistake.
    """
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not kinds:
        return arguments
    made = []
    for argument, value in zip(program.inputs, arguments, strict=True):
        if isinstance(value, torch.Tensor) and value.dtype in FLOATS and value.device.type in kinds:
            declared = DTYPES[argument.dtype]
            lossy = argument.const and value.dtype.itemsize < declared.itemsize
            value = value.to(declared) if declared in FLOATS and not lossy else value
        made.append(value)
    return made


def as_written() -> contextlib.AbstractContextManager[object]:
    """Reference and twin compute in the types written: inside, autocast is off on the CPU and on CUDA."""
    stack = contextlib.ExitStack()
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def shapes(arguments: Sequence[Any]) -> list[tuple[int, ...]]:
    """The shape of every argument; numbers are scalars."""
    return [tuple(t.shape) if isinstance(t, torch.Tensor) else () for t in arguments]


def declared(program: spec.Program, arguments: Sequence[Any], binding: Binding, device: torch.device) -> list[torch.Tensor]:
    """The arguments with one dim per declared axis; numbers become tensors."""
    made = []
    for argument, value in zip(program.inputs, arguments, strict=True):
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=DTYPES[argument.dtype], device=device)
        made.append(tensor.reshape(binding.declared(argument)))
    return made


def check_gradients(program: spec.Program, arguments: Sequence[Any]) -> None:
    """Raise `CallError` where autograd expects a backward: results that silently require no gradient would train nothing."""
    if not wants_gradients(arguments):
        return
    for argument, value in zip(program.inputs, arguments, strict=True):
        if isinstance(value, torch.Tensor) and value.requires_grad and not argument.const:
            raise errors.refuse(
                errors.BACKWARD,
                f"{program.name}: argument {argument.name!r} requires a gradient, and this program has no derivative",
                help=f"declare it without the word `forward`; call under torch.no_grad(), or pass {argument.name}.detach(); "
                f"or differentiate {program.name}.reference(...)",
            )


def _axes(argument: spec.Argument) -> str:
    return f"[{', '.join(argument.axes)}]"


def _kind(argument: spec.Argument, value: Any) -> tuple[str, str] | None:
    """What is wrong with the kind of a value, and the remedy."""
    kind = type(value)
    if kind in (float, int):
        if argument.axes or argument.dtype != "f32":
            return f"got a Python {kind.__name__}, expected a tensor of {argument.dtype}", "only an f32[] scalar may be a number"
        if kind is int and not -LARGEST <= value <= LARGEST:
            return f"got an integer of {value.bit_length()} bits, which f32 cannot hold", "pass a number below 3.4e38, or float('inf')"
        return None
    if value is None:
        return "got None, expected a torch.Tensor", f"every input is needed: pass a tensor of {argument.dtype}{_axes(argument)}"
    if not isinstance(value, torch.Tensor):
        return f"got {kind.__module__}.{kind.__qualname__}, expected a torch.Tensor", "convert it, as by torch.as_tensor"
    if kind not in PLAIN:
        if hasattr(value, "to_local"):
            remedy = "pass its shard (.to_local()) or the whole tensor (.full_tensor()); nothing is gathered silently"
            return f"got a sharded {kind.__name__}", remedy
        return f"got the tensor subclass {kind.__name__}, which may give meaning to its elements", "pass a plain torch.Tensor"
    if value.is_nested:
        return "got a nested tensor, whose rows have lengths of their own", "pass them one by one, or padded (.to_padded_tensor(0.0))"
    if value.layout != torch.strided:
        return f"got a tensor of layout {value.layout}", "pass a dense tensor (.to_dense())"
    if value.is_neg():
        return "got a tensor that is marked as negated (of a conjugate), whose memory has the other sign", "pass it .resolve_neg()"
    if value.device.type != "meta":
        try:
            value.data_ptr()
        except RuntimeError:
            return "got a tensor without storage (fake, traced or mapped over)", "call it on real tensors, outside of the transform"
    return None
