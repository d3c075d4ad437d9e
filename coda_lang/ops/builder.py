"""Building tensor programs: values with operators, and the two things applying an op can do: append an equation, or compute.

In:  the operator table, axes. Out: `Value`, `EqnBuilder` (equations, for the front end and the passes), `EvalBuilder` (torch tensors, for
tests of derivative rules; `ir.interp` shares its `apply_op`), `literal` (what a written number is beside its operands), `unbroadcast`.
Non-goals: diagnostics, and the rules of sources that are stricter than the IR (both are `ir.build`'s).

Applying converts as rule 10 of the language says: a number takes the type of the operands beside it if it is exact there, an integer
that meets f32 is cast to f32. Casts appear as equations, so the IR has no implicit conversion but reading bf16 and f16 as f32.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..diagnostics.model import InternalError
from ..ir.graph import Atom, Eqn, Lit, Var
from ..ir.types import BOOL, DTYPES, F32, I32, I64, Axis, DType, Ty
from ..source import Span
from .spec import TABLE, TypeProblem, unify


def f32(value: float) -> float:
    """The f32 nearest to `value`, as a Python float. Raises TypeProblem where a finite value overflows."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        raise TypeProblem(f"{value} does not fit f32", None, "write inf if infinity is meant") from None


def literal(value: float | int | bool, beside: Iterable[DType] = ()) -> Lit:
    """The constant that a number is beside operands of these types: of theirs if exact, else of its own (i32, or i64 where needed; f32).

    Raises TypeProblem for an integer no type holds, or one that f32 operands would round.
    """
    if isinstance(value, bool):
        return Lit(value, BOOL)
    kinds = [d for d in beside if d.kind != "bool"]
    if kinds and unify(kinds) is F32:
        if isinstance(value, int) and (abs(value) > 2**128 or f32(value) != value):
            raise TypeProblem(f"the integer {value} is not exact in f32", None, f"write {value}.0 if rounding is meant")
        return Lit(f32(value), F32)
    if isinstance(value, float) and not (kinds and value.is_integer()):
        return Lit(f32(value), F32)
    whole = int(value)
    for dtype in (I64,) if I64 in kinds else (I32, I64):
        if -(2 ** (dtype.bits - 1)) <= whole < 2 ** (dtype.bits - 1):
            return Lit(whole, dtype)
    raise TypeProblem(f"the integer {whole} does not fit i64")


@dataclass(frozen=True, eq=False)
class Value:
    """An operand: `atom` says what it is in the IR (a `Lit`, or a `Var` with its type), `tensor` its value where the builder computes."""

    builder: Builder
    atom: Atom
    tensor: Any = None

    @property
    def ty(self) -> Ty:
        return self.atom.ty if isinstance(self.atom, Var) else Ty(self.atom.dtype)

    @property
    def is_literal(self) -> bool:
        return isinstance(self.atom, Lit)

    def _op(self, name: str, *args: Any) -> Value:
        return self.builder.apply(name, args)

    def __add__(self, y: Any) -> Value:
        return self._op("add", self, y)

    def __radd__(self, y: Any) -> Value:
        return self._op("add", y, self)

    def __sub__(self, y: Any) -> Value:
        return self._op("sub", self, y)

    def __rsub__(self, y: Any) -> Value:
        return self._op("sub", y, self)

    def __mul__(self, y: Any) -> Value:
        return self._op("mul", self, y)

    def __rmul__(self, y: Any) -> Value:
        return self._op("mul", y, self)

    def __truediv__(self, y: Any) -> Value:
        return self._op("div", self, y)

    def __rtruediv__(self, y: Any) -> Value:
        return self._op("div", y, self)

    def __pow__(self, y: Any) -> Value:
        return self._op("pow", self, y)

    def __rpow__(self, y: Any) -> Value:
        return self._op("pow", y, self)

    def __neg__(self) -> Value:
        return self._op("neg", self)

    def __lt__(self, y: Any) -> Value:
        return self._op("lt", self, y)

    def __le__(self, y: Any) -> Value:
        return self._op("le", self, y)

    def __gt__(self, y: Any) -> Value:
        return self._op("gt", self, y)

    def __ge__(self, y: Any) -> Value:
        return self._op("ge", self, y)

    def __and__(self, y: Any) -> Value:
        return self._op("and", self, y)

    def __or__(self, y: Any) -> Value:
        return self._op("or", self, y)

    def __invert__(self) -> Value:
        return self._op("not", self)


class Builder:
    """What derivative rules use: `b.name(*args, **attrs)` applies the op `name`; operands are `Value`s, atoms or Python numbers."""

    def __init__(self, axes: tuple[Axis, ...]) -> None:
        self.axes = axes

    def __getattr__(self, name: str) -> Any:
        if name in TABLE:
            return lambda *args, **attrs: self.apply(name, args, attrs)
        raise AttributeError(name)

    def extent(self, axis: str) -> int | None:
        """The fixed extent of an axis, None where free."""
        return {a.name: a.extent for a in self.axes}[axis]

    def value(self, x: Any) -> Value:
        """An atom, or a number that stands alone, as an operand."""
        if isinstance(x, Value):
            return x
        return self._wrap(x if isinstance(x, (Var, Lit)) else literal(x))

    def apply(self, name: str, args: Iterable[Any], attrs: dict[str, Any] | None = None, span: Span | None = None, hint: str = "") -> Value:
        """The result of op `name`, its arguments converted. Raises TypeProblem where the op has no such application."""
        op, attrs, given = TABLE[name], dict(attrs or {}), tuple(args)
        op.check_arity(len(given))
        written = {i for i, a in enumerate(given) if isinstance(a, (int, float))}
        known = {i: self.value(a) for i, a in enumerate(given) if i not in written}
        values = [known[i] if i in known else self._wrap(self._literal(op, i, a, known)) for i, a in enumerate(given)]
        for i, (v, want) in enumerate(zip(values, op.wants(tuple(v.ty for v in values)))):
            if want is not None:
                values[i] = self._convert(v, want, i, span)
        ty = op.infer(tuple(v.ty for v in values), attrs, self.axes)
        return self._emit(name, values, attrs, ty, span, hint)

    def _literal(self, op: Any, index: int, number: Any, known: dict[int, Value]) -> Lit:
        beside = [v.ty.dtype for i, v in known.items() if op.read(i) == op.read(index)] if op.read(index) in ("number", "any") else []
        try:
            return literal(number, [F32] if op.read(index) == "f32" else beside)
        except TypeProblem as problem:
            raise TypeProblem(problem.message, index, problem.help) from None

    def _convert(self, v: Value, to: DType, index: int, span: Span | None) -> Value:
        if isinstance(v.atom, Lit):
            try:
                return self._wrap(literal(v.atom.value, [to]))
            except TypeProblem as problem:
                raise TypeProblem(problem.message, index, problem.help) from None
        return self.apply("cast", (v,), {"dtype": to.name}, span)

    def _wrap(self, atom: Atom) -> Value:
        return Value(self, atom)

    def _emit(self, name: str, values: list[Value], attrs: dict[str, Any], ty: Ty, span: Span | None, hint: str) -> Value:
        raise NotImplementedError


class EqnBuilder(Builder):
    """Appends one equation per application to `eqns`; new variables avoid the names in `taken`."""

    def __init__(self, axes: tuple[Axis, ...], taken: Iterable[str] = (), prefix: str = "t") -> None:
        super().__init__(axes)
        self.eqns: list[Eqn] = []
        self.taken, self.prefix, self._next = set(taken), prefix, 0

    def fresh(self, hint: str = "") -> str:
        """A name not yet taken: the hint, the hint with a number, or the prefix with a number."""
        name = hint
        while not name or name in self.taken:
            name = f"{hint}_{self._next}" if hint else f"{self.prefix}{self._next}"
            self._next += 1
        self.taken.add(name)
        return name

    def _emit(self, name: str, values: list[Value], attrs: dict[str, Any], ty: Ty, span: Span | None, hint: str) -> Value:
        frozen = tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in attrs.items()))
        out = Var(self.fresh(hint), ty)
        self.eqns.append(Eqn(out, name, tuple(v.atom for v in values), frozen, span))
        return self._wrap(out)


@dataclass(frozen=True)
class Frame:
    """How tensors lie while computing: one dimension per axis of the program, in its order; extent 1 where a value lacks the axis."""

    order: tuple[str, ...]
    extents: dict[str, int]
    device: Any = "cpu"

    @property
    def rank(self) -> int:
        return len(self.order)

    def dim(self, axis: str) -> int:
        return self.order.index(axis)

    def extent(self, axis: str) -> int:
        return self.extents[axis]

    def lay(self, tensor: Any, axes: tuple[str, ...]) -> Any:
        """A tensor whose dimensions are `axes` (any order), laid out in this frame."""
        order = sorted(range(len(axes)), key=lambda i: self.dim(axes[i]))
        held = {axes[i]: tensor.shape[i] for i in order}
        return tensor.permute(order).reshape([held.get(a, 1) for a in self.order])

    def take(self, tensor: Any, axes: tuple[str, ...]) -> Any:
        """The inverse of `lay`: exactly the dimensions `axes`, in that order."""
        full = tensor.expand([self.extents[a] if a in axes else 1 for a in self.order])
        kept = [i for i, a in enumerate(self.order) if a in axes]
        squeezed = full.reshape([full.shape[i] for i in kept])
        return squeezed.permute([[self.order[i] for i in kept].index(a) for a in axes])


def apply_op(name: str, tensors: list[Any], attrs: dict[str, Any], frame: Frame, T: Any, exact: bool) -> Any:
    """One op on tensors laid out in `frame`. Floats are held as f32 (f64 where `exact`); a cast rounds unless `exact`."""
    op, real = TABLE[name], T.float64 if exact else T.float32
    if name == "cast":
        to, x = DTYPES[attrs["dtype"]], tensors[0]
        if to.kind == "int":
            return x.to(T.int64 if to is I64 else T.int32)
        return x.to(real) if exact or to is F32 else x.to(T.bfloat16 if to.name == "bf16" else T.float16).to(real)
    if op.kind == "map":
        return op.ref(T, *tensors, **attrs)
    mixed = op.variadic and len({t.dtype for t in tensors}) > 1
    return op.ref(T, frame, *([t.to(real) for t in tensors] if mixed else tensors), **attrs)


def constant(lit: Lit, frame: Frame, T: Any, exact: bool) -> Any:
    """A literal as a tensor laid out in `frame`."""
    real = T.float64 if exact else T.float32
    dtype = {"f32": real, "i32": T.int32, "i64": T.int64, "bool": T.bool}[lit.dtype.name]
    return T.full([1] * frame.rank, lit.value, dtype=dtype, device=frame.device)


class EvalBuilder(Builder):
    """Computes at once on torch tensors laid out in `frame` (float64 without rounding where `exact`)."""

    def __init__(self, axes: tuple[Axis, ...], frame: Frame, T: Any, exact: bool = True) -> None:
        super().__init__(axes)
        self.frame, self.T, self.exact = frame, T, exact

    def tensor(self, tensor: Any, ty: Ty) -> Value:
        """A tensor, already laid out, as an operand."""
        return Value(self, Var("", ty), tensor)

    def _wrap(self, atom: Atom) -> Value:
        return Value(self, atom, constant(atom, self.frame, self.T, self.exact) if isinstance(atom, Lit) else None)

    def _emit(self, name: str, values: list[Value], attrs: dict[str, Any], ty: Ty, span: Span | None, hint: str) -> Value:
        return self.tensor(apply_op(name, [v.tensor for v in values], attrs, self.frame, self.T, self.exact), ty)


def unbroadcast(b: Builder, g: Value, axes: tuple[str, ...]) -> Value:
    """A cotangent for a value with `axes`: summed over the axes it has too many. Raises InternalError where it lacks one."""
    if missing := [a for a in axes if a not in g.ty.axes]:
        raise InternalError(f"a cotangent lacks the axes {', '.join(missing)} of its value")
    extra = tuple(a for a in g.ty.axes if a not in axes)
    return b.apply("sum", (g,), {"axes": extra}) if extra else g
