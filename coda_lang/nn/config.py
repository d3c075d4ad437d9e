"""The sizes of a model, under Hugging Face's names; a `config.json` or a transformers configuration can be taken as it is.

In: keywords, or a file, mapping or object that has them. Out: frozen dataclasses. What would change the mathematics and is not there is
refused (C0716), never ignored. Non-goals: weights, programs.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ..backend_cute.errors import OPTION, CallError, problem, refuse

Config = TypeVar("Config", bound="_Config")
SHARED = {"vocab_size", "initializer_range", "tie_word_embeddings"}  # names that say nothing of the family


@dataclass(frozen=True)
class _Config:
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # what else a configuration may say, and the values that these programs compute

    @classmethod
    def of(cls: type[Config], given: Any, **changed: Any) -> Config:
        """From a config.json (its path, or its folder's), what `json.load` makes of one, or a transformers configuration.

        Keywords replace what it says. Raises CodaError (C0716) for a file that is none, for what is no configuration, and for a model that
        these programs are not; warns of dropout, which they have not.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(changed.keys() - {*known, *cls.only})
        if unknown:
            raise refuse(OPTION, f"{cls.__name__}: there is no option {unknown[0]!r}", help=f"it has {', '.join(sorted(known))}")
        values = {**cls._renamed(_said(cls.__name__, given, {*known, *cls.only})), **cls._renamed(changed)}
        if not values.keys() & ({*known, *cls.only} - SHARED):
            text = f"{cls.__name__}.of: {_shown(given)} says neither `model_type` nor any size of such a model"
            raise refuse(OPTION, text, help=TAKEN)
        wrong = [(n, values[n], allowed) for n, allowed in cls.only.items() if n in values and values[n] not in allowed]
        if wrong:
            name = cls.__name__
            problems = [
                problem(OPTION, f"{name}: {n}={got!r} is a model that these programs are not", help=f"{n} may be {_listed(allowed)}")
                for n, got, allowed in wrong
            ]
            raise CallError(problems)
        dropout = {n: v for n, v in values.items() if n.endswith(("pdrop", "dropout")) and v}
        if dropout:
            said = ", ".join(f"{n}={v}" for n, v in dropout.items())
            warnings.warn(f"{cls.__name__}: {said}: these models have no dropout, so training differs from one that has", stacklevel=2)
        return cls(**{n: v for n, v in values.items() if n in known})

    @classmethod
    def _renamed(cls, values: dict[str, Any]) -> dict[str, Any]:
        """What is said, under this family's names."""
        return values

    def _check(self, *divides: tuple[str, str]) -> None:
        """Sizes are positive; the first of each pair is a multiple of the second."""
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise refuse(OPTION, f"{type(self).__name__}: {f.name}={value!r}", help="a size is a whole number from 1 on")
        for whole, part in divides:
            if getattr(self, whole) % getattr(self, part):
                text = f"{whole}={getattr(self, whole)} is no multiple of {part}={getattr(self, part)}"
                raise refuse(OPTION, f"{type(self).__name__}: {text}", help="choose sizes that divide each other")


@dataclass(frozen=True)
class LlamaConfig(_Config):
    """A LLaMA. `head_dim` None is hidden_size / num_attention_heads; `rope_scaling` as Hugging Face has it: linear or llama3."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,), "partial_rotary_factor": (1, None),
        "model_type": ("llama",), "rope_parameters": (None,),
    }  # fmt: skip

    @classmethod
    def _renamed(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Newer configurations keep the base of the angles and their scaling in one mapping, `rope_parameters`."""
        rope = values.get("rope_parameters")
        if not isinstance(rope, Mapping):
            return values
        kept = {n: v for n, v in values.items() if n != "rope_parameters"}
        return {**kept, "rope_scaling": rope, **{n: rope[n] for n in ("rope_theta", "partial_rotary_factor") if n in rope}}

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_key_value_heads", self.num_key_value_heads or self.num_attention_heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // max(self.num_attention_heads, 1))
        self._check(("num_attention_heads", "num_key_value_heads"))
        if self.head_dim % 2:  # type: ignore[operator]
            raise refuse(OPTION, f"LlamaConfig: head_dim={self.head_dim} is odd", help="rotary embedding turns pairs of coordinates")
        self.frequencies()

    @property
    def extents(self) -> dict[str, int]:
        """Of the axes that the programs fix."""
        return {"qh": self.num_attention_heads, "kh": self.num_key_value_heads, "pair": self.head_dim // 2}  # type: ignore[dict-item, operator]

    def frequencies(self) -> list[float]:
        """The angle by which each pair of coordinates turns from one position to the next."""
        pairs = self.head_dim // 2  # type: ignore[operator]
        plain = [self.rope_theta ** (-i / pairs) for i in range(pairs)]
        scaling = {k: v for k, v in (self.rope_scaling or {}).items() if k != "rope_theta"}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return plain
        if kind == "linear":
            return [f / scaling["factor"] for f in plain]
        if kind != "llama3":
            help = "rope_type may be default, linear or llama3; other angles can be put into the buffer `freq` of the model"
            raise refuse(OPTION, f"LlamaConfig: rope_scaling of type {kind!r}", help=help)
        low, high, factor = (scaling[n] for n in ("low_freq_factor", "high_freq_factor", "factor"))
        context = scaling["original_max_position_embeddings"]

        def scaled(f: float) -> float:
            turns = context * f / (2 * math.pi)  # within the context the model was first trained for
            kept = min(max((turns - low) / (high - low), 0.0), 1.0)
            return (1 - kept) * f / factor + kept * f

        return [scaled(f) for f in plain]


@dataclass(frozen=True)
class GPT2Config(_Config):
    """A GPT-2; its head is its embedding. `n_inner` None is 4 n_embd."""

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
        "model_type": ("gpt2",),
    }

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_inner", self.n_inner or 4 * self.n_embd)
        self._check(("n_embd", "n_head"))

    @property
    def extents(self) -> dict[str, int]:
        """Of the axes that the programs fix."""
        return {"head": self.n_head, "hd": self.n_embd // self.n_head}


TAKEN = "pass the path of a config.json or of its folder, what json.load makes of it, or the `.config` of a transformers model"


def _said(name: str, given: Any, names: set[str]) -> dict[str, Any]:
    """What a file, a mapping or an object says of these names; of a mapping also the rest."""
    if isinstance(given, (str, Path)):
        return _read(name, Path(given))
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, type):  # its attributes are defaults, if anything
        raise refuse(OPTION, f"{name}.of: {_shown(given)} is a class", help=TAKEN)
    return {n: getattr(given, n) for n in names if hasattr(given, n)}


def _read(name: str, path: Path) -> dict[str, Any]:
    """The mapping in a config.json. Raises CodaError (C0716) where there is none."""
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        help = f"{TAKEN}; a model's name is no path: transformers.AutoConfig.from_pretrained finds its configuration"
        raise refuse(OPTION, f"{name}.of: cannot read {str(file)!r}: {e.strerror or e}", help=help) from None
    except ValueError as e:  # of JSON or UTF-8
        raise refuse(OPTION, f"{name}.of: {str(file)!r} is no JSON: {e}", help="fetch the file again") from None
    if not isinstance(found, dict):
        raise refuse(OPTION, f"{name}.of: {str(file)!r} holds {_shown(found)}, not the options of a model", help=TAKEN)
    return found


def _shown(given: Any) -> str:
    """A value as a message can name it."""
    return "None" if given is None else f"{given.__name__!r}" if isinstance(given, type) else f"a value of type {type(given).__name__}"


def _listed(values: tuple[Any, ...]) -> str:
    return " or ".join(map(repr, values))
