"""Reads the shapes of a call as the declared axes: the shape contract, by axis name.

In: a `spec.Program` and one shape an input. Out: `Binding`, the extent of every axis and the dims in which a leading free axis
arrived; or `CallError` with everything that is wrong. Adjacent axes may arrive merged if at most one of them is free, and a leading
free axis may arrive as several dims. Pure arithmetic: needs no torch. Non-goal: strides, which `layout` judges.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..diagnostics.model import Diagnostic
from . import errors, spec

Shape = tuple[int, ...]
LIMIT = 2**31 - 1


def extents_in(text: str) -> dict[str, int]:
    """The extents in `m=128,d=64`, as a command line has them. Raises ValueError, saying what is wrong."""
    found: dict[str, int] = {}
    for part in filter(str.strip, text.split(",")):
        name, _, size = (word.strip() for word in part.partition("="))
        if not name or not size.removeprefix("-").isdecimal():
            raise ValueError("--shape is of the form m=8192,d=4096")
        if name in found:
            raise ValueError(f"--shape gives {name} twice")
        if len(size) > len(str(LIMIT)) or not 0 <= int(size) <= LIMIT:
            raise ValueError(f"--shape gives {name} {size} positions; an axis has from 0 to {LIMIT}")
        found[name] = int(size)
    return found


@dataclass
class Binding:
    """`extents` of every axis; `split[axis]` the dims that the axis arrived as, where more than one; `origin` says who bound an axis."""

    extents: dict[str, int]
    split: dict[str, Shape] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)

    def declared(self, argument: spec.Argument) -> Shape:
        """The argument's shape with one dim per declared axis."""
        return tuple(self.extents[a] for a in argument.axes)

    def returned(self, output: spec.Argument) -> Shape:
        """The shape a caller gets: as declared, a leading axis in the dims it arrived in."""
        shape = self.declared(output)
        return self.split[output.axes[0]] + shape[1:] if output.axes and output.axes[0] in self.split else shape


@dataclass(frozen=True)
class _Reading:
    """One way to read a shape: groups of axes, one a dim, after `leading` dims (0 or at least 2) of the first axis alone."""

    groups: tuple[tuple[str, ...], ...]
    leading: int = 0


def bind(program: spec.Program, shapes: Sequence[Shape]) -> Binding:
    """Read every input's shape; raises `CallError` with all problems found."""
    fixed = {name: size for name, size in program.extents if size is not None}
    binding = Binding(dict(fixed), origin={name: "the declaration" for name in fixed})
    problems: list[Diagnostic] = []
    pending = list(zip(program.inputs, shapes, strict=True))
    while pending:
        remaining = []
        for argument, shape in pending:
            meanings = {r: _extents(r, argument, shape, binding) for r in _readings(argument, len(shape), fixed)}
            readings = [r for r, meaning in meanings.items() if meaning is not None]
            if all(meanings[r] == meanings[readings[0]] for r in readings):
                readings = readings[:1]
            if len(readings) == 1:
                problems.extend(_apply(program, readings[0], argument, shape, binding))
            elif readings:
                remaining.append((argument, shape))
            else:
                problems.append(_explain(program, argument, shape, fixed, binding))
        if len(remaining) == len(pending):  # all ambiguous: one dim per axis is what people mean
            plain = [(a, shape) for a, shape in remaining if _extents(_direct(a), a, shape, binding) is not None]
            argument, shape = (plain or remaining)[0]
            remaining.remove((argument, shape))
            if plain:
                problems.extend(_apply(program, _direct(argument), argument, shape, binding))
            else:
                problems.append(_ambiguous(program, argument, shape))
        pending = remaining
    for one, other in program.equal * 2:  # renames may follow each other
        for known, name in ((one, other), (other, one)):
            if known in binding.extents:
                binding.extents.setdefault(name, binding.extents[known])
    for name, size in program.extents:
        if size is None and name not in binding.extents:
            binding.extents[name] = 0  # only after a problem: every free axis stands in some input
    if problems:
        raise errors.CallError(problems)
    check_conditions(program, binding.extents)
    return binding


def check_conditions(program: spec.Program, extents: Mapping[str, int]) -> None:
    """Raise CallError where extents are too large or a shape condition does not hold."""
    problems = list(_conditions(program, extents))
    if problems:
        raise errors.CallError(problems)


def _direct(argument: spec.Argument) -> _Reading:
    """One dim per axis."""
    return _Reading(tuple((a,) for a in argument.axes))


def _readings(argument: spec.Argument, dims: int, fixed: Mapping[str, int]) -> Iterator[_Reading]:
    axes = argument.axes
    yield from (_Reading(g) for g in _partitions(axes, dims, fixed))
    if axes and axes[0] not in fixed:
        for leading in range(2, dims + 1):
            yield from (_Reading(g, leading) for g in _partitions(axes[1:], dims - leading, fixed))


def _partitions(axes: tuple[str, ...], parts: int, fixed: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every way to cut `axes` into `parts` consecutive groups with at most one free axis each."""
    if parts == 0:
        if not axes:
            yield ()
        return
    for size in range(1, len(axes) - parts + 2):
        head = axes[:size]
        if sum(a not in fixed for a in head) > 1:
            return
        yield from ((head, *rest) for rest in _partitions(axes[size:], parts - 1, fixed))


def _extents(reading: _Reading, argument: spec.Argument, shape: Shape, binding: Binding) -> dict[str, int] | None:
    """The extents that a reading gives to the axes not known yet; None where it contradicts the shape or what is known."""
    if len(shape) != reading.leading + len(reading.groups):
        return None
    found: dict[str, int] = {}
    pairs = list(zip(reading.groups, shape[reading.leading :], strict=True))
    if reading.leading:
        pairs.insert(0, ((argument.axes[0],), math.prod(shape[: reading.leading])))
    for group, size in pairs:
        known = math.prod(binding.extents.get(a, found.get(a, 1)) for a in group)
        unknown = [a for a in group if a not in binding.extents and a not in found]
        if not unknown and known != size:
            return None
        if unknown:
            if known == 0 or size % known:
                return None
            found[unknown[0]] = size // known
    return found


def _apply(program: spec.Program, reading: _Reading, argument: spec.Argument, shape: Shape, binding: Binding) -> Iterator[Diagnostic]:
    for name, size in (_extents(reading, argument, shape, binding) or {}).items():
        binding.extents[name] = size
        binding.origin[name] = f"argument {argument.name!r}"
    if reading.leading:
        axis, dims = argument.axes[0], shape[: reading.leading]
        if binding.split.setdefault(axis, dims) != dims:
            yield errors.problem(
                errors.EXTENT,
                f"{program.name}: argument {argument.name!r}: axis {axis!r} arrives as {_text(dims)}, in another argument as "
                f"{_text(binding.split[axis])}",
                help=f"give both the same leading dims, or flatten both to one dim of extent {math.prod(dims)}",
            )


def _explain(program: spec.Program, argument: spec.Argument, shape: Shape, fixed: Mapping[str, int], binding: Binding) -> Diagnostic:
    """Why no reading fits: by axis where the rank is as declared, else by the forms that would do."""
    where = f"{program.name}: argument {argument.name!r}"
    if len(shape) == len(argument.axes):
        wrong = [(a, n) for a, n in zip(argument.axes, shape, strict=True) if binding.extents.get(a, n) != n]
        if wrong:
            axis, got = wrong[0]
            want = binding.extents[axis]
            others = [f"axis {a!r}: got {n}, expected {binding.extents[a]} as in {binding.origin[a]}" for a, n in wrong[1:]]
            return errors.problem(
                errors.EXTENT,
                f"{where}: axis {axis!r} (dim {argument.axes.index(axis)}) has extent {got}, expected {want} as in {binding.origin[axis]}",
                f"got shape {_text(shape)} for {_declared(argument, fixed)}",
                *others,
                help=f"pass a tensor whose dim {argument.axes.index(axis)} is {want}, or make the other argument agree",
            )
        repeated = [a for a in argument.axes if argument.axes.count(a) > 1]
        if repeated:
            return errors.problem(
                errors.EXTENT, f"{where}: axis {repeated[0]!r} stands for one extent, got shape {_text(shape)}", help="pass equal extents"
            )
    known = ", ".join(f"{a}={binding.extents[a]}" for a in argument.axes if a in binding.extents)
    return errors.problem(
        errors.RANK,
        f"{where}: shape {_text(shape)} cannot be read as {_declared(argument, fixed)}",
        *([f"known so far: {known}"] if known else []),
        "accepted: one dim per axis; adjacent axes merged into one dim if at most one of them is free; "
        "a leading free axis as several dims",
        help=_no_reshape(argument, shape, fixed, binding) or f"reshape {argument.name!r} to {_declared(argument, fixed)}",
    )


def _no_reshape(argument: spec.Argument, shape: Shape, fixed: Mapping[str, int], binding: Binding) -> str:
    """The remedy where the elements are too many or too few for any reshape: the dim that is odd in the nearest reading."""
    known = {a: n for a, n in binding.extents.items() if a in argument.axes}
    most, elements = math.prod(known.values()), math.prod(shape)
    if not (elements % most if most and len(known) < len(argument.axes) else elements != most):
        return ""
    nearest: list[tuple[int, int, str]] = []
    for reading in _partitions(argument.axes, len(shape), fixed):
        wrong = []
        for dim, (group, size) in enumerate(zip(reading, shape, strict=True)):
            held = {a: known[a] for a in group if a in known}
            least, text = math.prod(held.values()), " * ".join(f"{a}={n}" for a, n in held.items())
            if len(held) == len(group) and size != least:
                wrong.append((1, f"dim {dim} is {size}, not {text}"))
            elif least and size % least:
                wrong.append((0, f"dim {dim} is {size}, no multiple of {text}"))
        if wrong:
            nearest.append((len(wrong), *wrong[0]))
    said = min(nearest)[2] + ": " if nearest else "no reshape fits: "
    return f"{said}pass a tensor of {_declared(argument, fixed)}"


def _ambiguous(program: spec.Program, argument: spec.Argument, shape: Shape) -> Diagnostic:
    declared = _declared(argument, {n: s for n, s in program.extents if s is not None})
    return errors.problem(
        errors.AMBIGUOUS,
        f"{program.name}: argument {argument.name!r}: shape {_text(shape)} can be read as {declared} in several ways",
        help=f"pass {argument.name!r} with one dim per axis",
    )


def _conditions(program: spec.Program, extents: Mapping[str, int]) -> Iterator[Diagnostic]:
    """What does not hold. Extents that a tracer left symbolic are judged when the call is made."""
    symbolic = {name for name, size in extents.items() if not isinstance(size, int)}
    for name, size in extents.items():
        if name not in symbolic and size > LIMIT:
            yield errors.problem(
                errors.TOO_LARGE, f"{program.name}: axis {name!r} has extent {size}, at most {LIMIT} is supported", help="split the call"
            )
    for require in program.requires:
        if symbolic.isdisjoint(_names(require.text)) and not _holds(require.text)(dict(extents)):
            used = [n for n in extents if n in _names(require.text)]
            yield errors.problem(
                errors.REQUIRE,
                f"{program.name}: the shape condition `{require.text}` does not hold: got {', '.join(f'{n}={extents[n]}' for n in used)}",
                *([require.reason] if require.reason else []),
                help="pad or cut the axis so that the condition holds",
            )


@functools.cache
def _names(text: str) -> frozenset[str]:
    return frozenset(n.id for n in ast.walk(ast.parse(text, mode="eval")) if isinstance(n, ast.Name))


@functools.cache
def _holds(text: str):
    code = compile(text, "<require>", "eval")

    def holds(extents: dict[str, int]) -> bool:
        try:
            return bool(eval(code, {"__builtins__": {}}, extents))
        except ZeroDivisionError:
            return False

    return holds


def _text(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _declared(argument: spec.Argument, fixed: Mapping[str, int]) -> str:
    return f"[{', '.join(f'{a}={fixed[a]}' if a in fixed else a for a in argument.axes)}]"
