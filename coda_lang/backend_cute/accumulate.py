"""The buffers of `accumulate_into`: gradients are added to them instead of being returned.

In: a `Function`, the tensors of a call, what the caller gave. Out: the buffers by place of their input, or `CallError` with everything that
is wrong with them; how one is added to, and what is left to do once the kernels have run. Non-goal: kernels that add (`into`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import arguments, errors
from .derivative import INTO, SUM, Derivative

BUFFERS = (torch.float32, torch.bfloat16)


def buffers(fn: Any, tensors: Sequence[Any], given: Mapping[str, Any], derivative: Derivative) -> dict[int, torch.Tensor]:
    """The buffers of `accumulate_into` by place of their input. Raises CallError with everything that is wrong with them."""
    if fn.objects.whole:
        raise errors.refuse(
            errors.BUILD,
            f"{fn.program.name}: a build has no kernels that leave a gradient in f32, as accumulate_into needs",
            help="compile the program with coda_lang.compile, or let the gradient be returned",
        )
    if not isinstance(given, Mapping):
        message = f"{fn.program.name}: accumulate_into= takes buffers by name, got {type(given).__name__}"
        raise errors.refuse(errors.ACCUMULATE, message, help="write accumulate_into={'w': buffer}")
    problems = []
    made: dict[int, torch.Tensor] = {}
    for name, buffer in given.items():
        where = f"{fn.program.name}: accumulate_into[{name!r}]"
        wrong, remedy = "", ""
        i = derivative.inputs.index(name) if name in derivative.inputs else -1
        if i < 0 or not derivative.differentiable[i]:
            wrong = "the program has no such input" if i < 0 else "this input never has a gradient"
            remedy = f"name one of {', '.join(n for n, d in zip(derivative.inputs, derivative.differentiable) if d)}"
        elif not isinstance(tensors[i], torch.Tensor) or (torch.is_grad_enabled() and not tensors[i].requires_grad):
            wrong = f"the argument {name!r} does not require a gradient, so none would be added"
            remedy = f"pass {name}.requires_grad_(), or leave the buffer out"
        else:
            wrong, remedy = _buffer_problem(tensors[i], buffer, tensors)
        if wrong:
            problems.append(errors.problem(errors.ACCUMULATE, f"{where}: {wrong}", help=remedy))
        made[i] = buffer
    if problems:
        raise errors.CallError(problems)
    return made


def code(buffer: torch.Tensor) -> int:
    """How the gradient is asked for: by the kernel that stores it, where the buffer can be seen with any axes; else in f32, added after."""
    return INTO["f32" if buffer.dtype is torch.float32 else "bf16"] if buffer.dtype in BUFFERS and buffer.is_contiguous() else SUM


def settle(buffer: torch.Tensor, gradient: torch.Tensor, added: bool) -> None:
    """Finish a buffer: `gradient` is the sum already (`added`), perhaps the buffer itself, or what is to be added."""
    if not added:
        buffer.add_(gradient.reshape(buffer.shape))
    elif gradient.data_ptr() != buffer.data_ptr():
        buffer.copy_(gradient.reshape(buffer.shape))
    else:
        torch.autograd.graph.increment_version(buffer)


def _buffer_problem(tensor: torch.Tensor, buffer: Any, tensors: Sequence[Any]) -> tuple[str, str]:
    """What is wrong with a buffer for the gradient of `tensor`, and the remedy; empty where nothing is."""
    if type(buffer) not in arguments.PLAIN:
        return f"got {type(buffer).__name__}, expected a plain torch.Tensor", "pass a tensor of the argument's shape"
    if buffer.dtype not in (*BUFFERS, tensor.dtype):
        return f"got dtype {buffer.dtype}, expected torch.float32 or torch.bfloat16", "a float32 buffer loses least"
    if buffer.shape != tensor.shape or buffer.device != tensor.device:
        have, want = (f"{list(t.shape)} on {t.device}" for t in (buffer, tensor))
        return f"got a tensor {have}, expected {want}", "make it by torch.zeros_like(argument, dtype=torch.float32)"
    if buffer.requires_grad:
        return "the buffer itself requires a gradient", "pass buffer.detach(), which shares its memory"
    if any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape)):
        return "the buffer is expanded: several elements share one place", "pass a tensor with an element for each"
    storage = buffer.untyped_storage().data_ptr()
    if storage and any(isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() == storage for t in tensors):
        return "the buffer shares memory with an argument", "pass memory of its own"
    return "", ""
