"""Parameters under the names that a checkpoint has for them, and the programs that read them.

In: shapes; files of programs, extents, params. Out: modules that hold parameters and compute nothing; compiled functions.
Non-goals: what is computed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .. import torch_api
from ..backend_cute.arguments import FLOATS, NAMES
from ..backend_cute.errors import DTYPE, EXTENT, KIND, OPTION, CallError, refuse
from ..backend_cute.function import Function

Forward = TypeVar("Forward", bound=Callable[..., Any])
FOLDER = Path(__file__).parent / "programs"


class Weight(nn.Module):
    """A `weight`, and a `bias` of the given size if any. A program reads them; the module itself computes nothing."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, *shape: int, bias: int = 0, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, **options))
        self.register_parameter("bias", nn.Parameter(torch.empty(bias, **options)) if bias else None)

    def extra_repr(self) -> str:
        return f"{list(self.weight.shape)}" + (f", bias {list(self.bias.shape)}" if self.bias is not None else "")

    def start(self, value: float | None, std: float = 0.0) -> None:
        """Fill: the weight with a value, or normal with the deviation `std`; the bias with 0."""
        with torch.no_grad():
            self.weight.normal_(0.0, std) if value is None else self.weight.fill_(value)
            if self.bias is not None:
                self.bias.zero_()


class Group(nn.Module):
    """Modules by name: what gives a parameter its path in a checkpoint."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Programs:
    """The compiled functions of files of one folder, by their programs' names without the folder's; the same for all models of one size.

    Extents and params go to the files that have them. Copies and pickles of a model carry what they were made for, not the functions.
    """

    def __init__(self, folder: str, files: Sequence[str], extents: Mapping[str, int], params: Mapping[str, float]) -> None:
        self._made_for = (folder, tuple(files), dict(extents), dict(params))
        for file in files:
            path = FOLDER / folder / f"{file}.coda"
            for name, fn in _compiled(path, tuple(sorted(extents.items())), tuple(sorted(params.items()))).items():
                setattr(self, name.removeprefix(f"{folder}_"), fn)

    def __getattr__(self, name: str) -> Function:
        raise AttributeError(f"no program is called {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Programs, self._made_for

    def __deepcopy__(self, memo: Any) -> Programs:
        return self

    def last_path(self) -> str | None:
        """What ran the last calls: "kernels" or "reference"; None before any call."""
        paths = {fn.last_path for fn in vars(self).values() if isinstance(fn, Function)} - {None}
        return " and ".join(sorted(map(str, paths))) or None


@functools.cache
def _compiled(path: Path, extents: tuple[tuple[str, int], ...], params: tuple[tuple[str, float], ...]) -> dict[str, Function]:
    """A file's programs, given those of the extents and params that it has."""
    words = set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    given: dict[str, Any] = {n: v for n, v in params if n in words}
    found = torch_api.compile(path, extents={n: e for n, e in extents if n in words}, **given)
    return vars(found) if isinstance(found, SimpleNamespace) else {found.program.name: found}


def positions(ids: Tensor, given: Tensor | None, most: int | None = None) -> Tensor:
    """The position of every token, as the programs take it: i32, one a row. Raises CallError for ids that are none, or too many."""
    if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
        text = f"input_ids of shape {list(ids.shape)} and dtype {ids.dtype}, expected [batch, rows] of integers"
        raise refuse(KIND, text, help="pass ids[None] for a single sequence")
    batch, rows = ids.shape
    if given is None:
        if most is not None and rows > most:
            help = f"pass at most {most} tokens a sequence"
            raise refuse(EXTENT, f"{rows} tokens a sequence, and the model has embeddings of {most} positions", help=help)
        return torch.arange(rows, dtype=torch.int32, device=ids.device).repeat(batch)
    if given.dtype.is_floating_point or given.dim() > 2 or any(n not in (1, most) for n, most in zip(given.shape[::-1], (rows, batch))):
        text = f"position_ids of shape {list(given.shape)} and dtype {given.dtype}, and ids of shape {[batch, rows]}"
        raise refuse(EXTENT, text, help=f"pass integers [{batch}, {rows}], or [{rows}] for all sequences alike")
    return given.expand(batch, rows).reshape(-1).to(torch.int32)


def check_whole(layer: nn.Module) -> None:
    """Raise CallError (C0702) where a layer's weights are shards: a program reads those of two layers, so nobody gathers them in time."""
    if any(hasattr(p, "to_local") for p in layer.parameters()):
        text = "a layer's weights are shards while the model runs"
        help = "fully_shard(model) as a whole, not layer by layer: what stands between two attentions reads weights of both layers"
        raise refuse(KIND, text, help=help)


def says_of_weights(forward: Forward) -> Forward:
    """A model's forward, whose C0703 names the model's weights, where it is they that have another type, and not a program's arguments.

    What stands between is asked only when a program has refused, so a call that fits pays nothing.
    """

    @functools.wraps(forward)
    def said(self: nn.Module, *args: Any, **named: Any) -> Any:
        try:
            return forward(self, *args, **named)
        except CallError as error:
            raise _of_weights(self, error) from None

    return said  # type: ignore[return-value]


def _of_weights(model: nn.Module, error: CallError) -> CallError:
    """C0703 about the weights of a model; other errors as they are."""
    everything = dict(model.named_parameters())
    wrong = {n: NAMES.get(p.dtype, str(p.dtype).removeprefix("torch.")) for n, p in everything.items() if not _readable(p)}
    if not wrong or all(d.code != DTYPE for d in error.diagnostics):
        return error
    name, dtypes = next(iter(wrong)), " and ".join(sorted(set(wrong.values())))
    text = f"{type(model).__name__}: {len(wrong)} of {len(everything)} weights are {dtypes}, its programs read bf16; the first is {name}"
    kind = everything[name].device.type
    help = f"model.bfloat16() casts them; or keep f32 weights and call the model under torch.autocast({kind!r}, torch.bfloat16)"
    return refuse(DTYPE, text, help=help)


def _readable(weight: Tensor) -> bool:
    """Do programs take a weight of this type, or does autocast see to it?"""
    return weight.dtype == torch.bfloat16 or weight.dtype in FLOATS and torch.is_autocast_enabled(weight.device.type)


@dataclass(frozen=True)
class Accept:
    """What checkpoints vary in, for `load_state_dict`: a hook that runs before it.

    Buffers whose names end as in `dropped` are left out; a name that is missing is taken from its alias (tied weights are stored once);
    names without `prefix` get it, where the checkpoint is of the model without its head. `others` are endings of names that a checkpoint
    of another family has, and what that is: C0716, in a load that is not strict too, since the model would compute something else.
    """

    dropped: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    prefix: str = ""
    others: tuple[tuple[str, str], ...] = ()

    def __call__(self, owner: nn.Module, state: dict[str, Any], path: str, *rest: Any) -> None:
        own = [n for n in state if n.startswith(path)]
        foreign = next(((n, what) for n in own for ending, what in self.others if n.endswith(ending)), None)
        if foreign:
            text = f"the checkpoint has {foreign[0]!r}, and {type(owner).__name__} has no {foreign[1]}"
            help = "write a module that calls the programs of that family in specs/; or drop these names, if it is a LLaMA all the same"
            raise refuse(OPTION, text, help=help)
        if self.prefix and not any(n.startswith(path + self.prefix) for n in own):
            for n in set(own) - {path + name for name, _ in self.aliases}:
                state[path + self.prefix + n.removeprefix(path)] = state.pop(n)
        for n in [n for n in state if n.startswith(path) and n.endswith(self.dropped or "\0")]:
            state.pop(n)
        for name, alias in self.aliases:
            if path + name not in state and path + alias in state:
                state[path + name] = state[path + alias]
