"""What an operator is: the record of the operator table, its laws, its type rule and the problem a type rule reports.

In:  `ir.types`. Out: `Op`, `Laws`, `Domain`, `TypeProblem` and `op(...)`, which registers an entry in `TABLE`.
Non-goals: the entries themselves (one file a kind), diagnostics with spans (`ir.build` makes them from `TypeProblem`).

Conventions
    ref      map ops: `ref(T, *tensors)`, `T` is the torch module; float arguments arrive in one dtype, f32 or f64, and broadcast.
             other ops: `ref(T, frame, *tensors, **attrs)` on tensors with one dimension per axis of the *program* (extent 1 where
             the value lacks the axis); `frame.dim(axis)` and `frame.extent(axis)` translate.
    vjp      `vjp(b, g, y, *args, **attrs)`: one cotangent per argument, None where there is none. `g` has the axes of `y`. Operands are
             `builder.Value`s with operators; `b.name(...)` applies any op of the table. A cotangent may have axes its argument lacks
             (broadcasting): the caller sums them away (`builder.unbroadcast`).
    emit     a scalar expression over the names in `args` (and attrs); functions are those of `device_fns` and `torch_fns`.
    reads    what dtype each argument is read as: "f32" (bf16 and f16 as their f32 value; an integer needs a cast), "number" (all such
             arguments together f32, or together integers), "bool", "int", "half" (bf16 or f16, equal), "any".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..ir.types import BOOL, F32, I32, I64, Axis, DType, Ty

Attrs = Mapping[str, Any]
Axes = tuple[Axis, ...]


class TypeProblem(Exception):
    """An application that has no type: `message` in the user's words, `arg_index` the argument at fault (None: all), `help` an edit
    in which `x` stands for that argument."""

    def __init__(self, message: str, arg_index: int | None = None, help: str = "") -> None:
        super().__init__(message)
        self.message, self.arg_index, self.help = message, arg_index, help


@dataclass(frozen=True)
class Laws:
    """Algebra the optimiser may use; tests check each numerically.

    homogeneous: f(r·x) = rᵏ·f(x) for r > 0 when *all* float arguments are scaled; the degree k.
    linear: groups of arguments in which f is jointly linear, the others held fixed (`mul`: x, or y; `add`: x and y together).
    commutative: f(x, y) = f(y, x). zero: f(0) = 0, so zero padding stays zero. nonzero: f(x) ≠ 0 in f32 for every finite x of its domain.
    """

    homogeneous: float | None = None
    linear: tuple[tuple[str, ...], ...] = ()
    commutative: bool = False
    zero: bool = False
    nonzero: bool = False


@dataclass(frozen=True)
class Domain:
    """Where tests sample: one interval an argument (the last repeats), and the points where the derivative jumps or the function does."""

    intervals: tuple[tuple[float, float], ...] = ((-3.0, 3.0),)
    kinks: tuple[float, ...] = ()
    gap: bool = False  # the distance of two arguments must not be near a kink (comparisons, min, max): a kink at x - y = 0


@dataclass(frozen=True)
class Op:
    """One entry of the table. `args` names the arguments; a last one starting with `*` is variadic."""

    name: str
    args: tuple[str, ...]
    kind: str  # "map" | "contract" | "reduce" | "lanes" | "move"
    doc: str
    derivative: str
    ref: Callable[..., Any]
    vjp: Callable[..., tuple[Any, ...]] | None  # None: no argument has a gradient
    rule: Callable[[tuple[Ty, ...], Attrs, Axes], Ty]
    reads: tuple[str, ...] = ("f32",)
    emit: str | None = None
    surface: str | None = None  # the name a source calls it by; None where it cannot be called
    symbol: str | None = None  # the operator sign a source writes
    brackets: str = "none"  # "none" | "axes" | "axis" | "arrow"
    attrs: tuple[str, ...] = ()
    flops: int = 1
    ulp: int | None = None  # bound of the device function against the exact value, in f32 ulps; None where correctly rounded or exact
    absolute: float = 0.0  # an error of the device function below this does not count (sine near its zeros, tails)
    laws: Laws = Laws()
    domain: Domain = Domain()

    @property
    def user(self) -> bool:
        """May a source call it by name?"""
        return self.surface is not None

    @property
    def variadic(self) -> bool:
        return bool(self.args) and self.args[-1].startswith("*")

    def accepts(self, count: int) -> bool:
        """Is `count` a possible number of arguments?"""
        return count >= len(self.args) - 1 if self.variadic else count == len(self.args)

    def arg(self, index: int) -> str:
        """The name of argument `index`."""
        return self.args[min(index, len(self.args) - 1)].lstrip("*")

    def read(self, index: int) -> str:
        """How argument `index` is read."""
        return self.reads[min(index, len(self.reads) - 1)]

    def infer(self, args: tuple[Ty, ...], attrs: Attrs, axes: Axes) -> Ty:
        """The type of the result; a literal is a `Ty` without axes. Integers are not converted here (see `wants`). Raises TypeProblem."""
        self.check_arity(len(args))
        missing = [a for a in self.attrs if a not in attrs] + [a for a in attrs if a not in self.attrs]
        if missing:
            raise TypeProblem(f"`{self.name}` takes the attributes {', '.join(self.attrs) or 'none'}; wrong: {', '.join(missing)}")
        for i, (ty, want) in enumerate(zip(args, self.wants(args))):
            if want is not None and ty.dtype is not want:
                raise TypeProblem(f"`{self.name}` needs its {self.arg(i)} as {want}, not {ty.dtype}", i, f"convert it with {want}(…)")
        return self.rule(args, attrs, axes)

    def check_arity(self, count: int) -> None:
        """Raises TypeProblem where `count` arguments are too few or too many."""
        if not self.accepts(count):
            least = len(self.args) - 1 if self.variadic else len(self.args)
            wanted = f"at least {least}" if self.variadic else str(least)
            raise TypeProblem(f"`{self.surface or self.name}` takes {wanted} argument{'s' * (least != 1)}, not {count}")

    def wants(self, args: tuple[Ty, ...]) -> tuple[DType | None, ...]:
        """The dtype each argument must be cast to, None where it is right as it is. Raises TypeProblem where none will do."""
        numbers = [a.dtype for i, a in enumerate(args) if self.read(i) == "number"]
        together = unify(numbers)
        out: list[DType | None] = []
        for i, a in enumerate(args):
            read, kind = self.read(i), a.dtype.kind
            what = f"`{self.surface or self.symbol or self.name}`"
            if read in ("f32", "number") and kind == "bool":
                raise TypeProblem(f"{what} takes numbers; its {self.arg(i)} is bool", i, "choose numbers with where(condition, 1.0, 0.0)")
            if read == "bool" and kind != "bool":
                mend = f"compare it, for example `x != {'-100' if kind == 'int' else '0'}`"  # a mask of targets may not leave out class 0
                raise TypeProblem(f"{what} needs a bool; its {self.arg(i)} is {a.dtype}", i, mend)
            if read == "int" and kind != "int":
                raise TypeProblem(f"{what} needs an integer; its {self.arg(i)} is {a.dtype}", i, "use an i32 or i64 tensor, or index[axis]")
            if read == "f32":
                out.append(F32 if kind == "int" else None)
            elif read == "number":
                out.append(together if kind == "int" and together is not a.dtype else None)
            else:
                out.append(None)
        return tuple(out)


def unify(dtypes: list[DType]) -> DType:
    """The dtype that numbers of these dtypes meet in: f32 if any is a float, else the wider integer."""
    if any(d.kind == "float" for d in dtypes):
        return F32
    return I64 if I64 in dtypes else I32


def union(args: tuple[Ty, ...], axes: Axes) -> tuple[str, ...]:
    """All axes of the arguments, in program order."""
    held = {a for ty in args for a in ty.axes}
    return tuple(a.name for a in axes if a.name in held)


def result(kind: str) -> Callable[[tuple[Ty, ...], Attrs, Axes], Ty]:
    """The rule of a map op: union of the axes; dtype "f32", "bool", or "same" (what its "number" arguments meet in)."""

    def rule(args: tuple[Ty, ...], attrs: Attrs, axes: Axes) -> Ty:
        fixed = {"f32": F32, "bool": BOOL}.get(kind)
        return Ty(fixed or unify([a.dtype for a in args if a.dtype.kind != "bool"]), union(args, axes))

    return rule


TABLE: dict[str, Op] = {}


def op(
    name: str,
    args: str,
    *,
    kind: str = "map",
    reads: str = "f32",
    gives: str = "f32",
    surface: str | None = "",
    attrs: str = "",
    **facets: Any,
) -> Op:
    """Registers an entry. `args`, `reads`, `attrs` are blank-separated; `surface` "" means the op's own name; `gives` is for map ops."""
    facets.setdefault("rule", result(gives))
    facets.setdefault("vjp", None)
    called = name if surface == "" else surface
    entry = Op(name, tuple(args.split()), kind, reads=tuple(reads.split()), surface=called, attrs=tuple(attrs.split()), **facets)
    if name in TABLE:
        raise ValueError(f"operator {name} registered twice")
    TABLE[name] = entry
    return entry
