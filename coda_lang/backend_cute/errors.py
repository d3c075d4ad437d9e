"""Errors of calling a compiled function. In: a code, what is wrong, the remedy. Out: `CallError`, a `CodaError` whose text says it all."""

from __future__ import annotations

from ..diagnostics.model import CodaError, Diagnostic

BACKWARD = "C0501"  # gradients asked of a program that has no derivative
TWICE = "C0514"  # a gradient of a gradient
TRANSFORM = "C0515"  # forward-mode derivatives, torch.func transforms
ACCUMULATE = "C0516"  # a buffer of accumulate_into that cannot take the gradient
ARGUMENTS = "C0701"  # too many, too few, unknown or repeated arguments
KIND = "C0702"  # not a plain tensor (or float for a scalar)
DTYPE = "C0703"
DEVICE = "C0704"  # not one device, or neither CPU nor CUDA
ARCHITECTURE = "C0705"  # not a GPU these kernels run on
RANK = "C0706"  # no way to read the dims as the declared axes
EXTENT = "C0707"  # an axis has another extent than declared, or than in another argument
AMBIGUOUS = "C0708"  # several ways to read the dims
REQUIRE = "C0709"  # a shape condition does not hold
TOO_LARGE = "C0710"  # an extent past 32 bits
OUTPUTS = "C0711"  # an output that the program does not have
BUILD = "C0712"  # a directory that is no build, or of another version
CACHE = "C0714"  # compiled kernels cannot be kept on disk
OPTION = "C0716"  # an option of a model that its programs do not have
TOOLS = "C0715"  # something that compiling or loading needs is not installed


class CallError(CodaError):
    """A call that cannot be carried out; raised before anything is launched or written."""

    def __str__(self) -> str:
        lines = []
        for d in self.diagnostics:
            lines.append(f"{d.code}: {d.message}")
            lines.extend(f"  note: {note}" for note in d.notes)
            if d.help:
                lines.append(f"  help: {d.help}")
        return "\n".join(lines)


def problem(code: str, message: str, *notes: str, help: str = "") -> Diagnostic:
    """One thing wrong with a call."""
    return Diagnostic(code, message, notes=notes, help=help)


def refuse(code: str, message: str, *notes: str, help: str = "") -> CallError:
    """The error to raise for one thing wrong with a call."""
    return CallError((problem(code, message, *notes, help=help),))
