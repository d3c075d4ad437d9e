"""Who does the works: ours, cuBLAS, torch.compile, Liger, QuACK, coda-kernels, each an `Adapter`.

In: `works.Case`s. Out: `protocol.Method`s by name, and for each adapter that does not import, why. An adapter calls a library's public
functions with the operands in the layout that suits it best (gate and up interleaved where it wants them so), and brings what they
give into the work's order; nothing of a library is copied here. What it gives is compared before it is timed (`protocol.measure`).
Non-goals: installing libraries, tuning them beyond what they do by themselves.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench.protocol import Method, several
from bench.works import EPS, Case, halves, pairs, row_halves

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = {  # of ours, by work: the file, the program in it
    "gemm": ("bench/rivals.coda", "gemm"),
    "swiglu": ("specs/swiglu.coda", "swiglu"),
    "rmsnorm_swiglu": ("bench/rivals.coda", "rmsnorm_swiglu"),
    "residual_rms": ("bench/rivals.coda", "residual_rms"),
    "swiglu_backward": ("bench/training.coda", "swiglu_backward_interleaved"),
    "rmsnorm_lse": ("bench/rivals.coda", "rmsnorm_lse"),
    "linear_swiglu": ("bench/rivals.coda", "linear_swiglu"),
    "rmsnorm": ("bench/norms.coda", "rms"),
}
Build = Callable[[Any, Case], Method]


@dataclass(frozen=True)
class Adapter:
    """`load` imports the library and gives what the builds call; `package` is the library's name for people, `module` its name for Python;
    `builds` has a build for each work that it does."""

    name: str
    package: str
    module: str
    load: Callable[[], Any]
    builds: Mapping[str, Build]


@dataclass
class Peers:
    """The adapters that import, with what they loaded, and why others do not."""

    found: dict[str, tuple[Adapter, Any]]
    missing: dict[str, str]

    def methods(self, case: Case) -> tuple[dict[str, Method], dict[str, str]]:
        """All ways to do a case, and why an adapter that has one cannot make it here."""
        made: dict[str, Method] = {}
        failed: dict[str, str] = {}
        for name, (adapter, api) in self.found.items():
            if case.work.name in adapter.builds:
                try:
                    made[name] = adapter.builds[case.work.name](api, case)
                except Exception as problem:
                    failed[name] = f"{type(problem).__name__}: {problem}"[:500]
        return made, failed


def peers(adapters: Iterable[Adapter]) -> Peers:
    """Import what can be imported."""
    found: dict[str, tuple[Adapter, Any]] = {}
    missing: dict[str, str] = {}
    for adapter in adapters:
        try:
            found[adapter.name] = adapter, adapter.load()
        except ModuleNotFoundError as problem:
            gone = (problem.name or "").partition(".")[0] == adapter.module
            missing[adapter.name] = f"{adapter.package} is not installed" if gone else f"{adapter.package} does not import: {problem}"
        except Exception as problem:  # some refuse the versions at hand with errors of every kind
            missing[adapter.name] = f"{adapter.package} does not import: {type(problem).__name__}: {problem}"[:500]
    return Peers(found, missing)


# --- ours ------------------------------------------------------------------------------------------------------------------------


@functools.cache
def _compiled(source: str) -> Any:
    import coda_lang

    return coda_lang.compile(ROOT / source)


def program(work: str) -> Any:
    """Our function for a work; the loss has two, by name."""
    if work == "linear_cross_entropy":
        from coda_lang.nn.head import programs

        heads = programs(-100)
        return SimpleNamespace(stored=heads.head, chunked=heads.head_chunked)
    source, name = PROGRAMS[work]
    made = _compiled(source)
    return getattr(made, name) if isinstance(made, SimpleNamespace) else made


def _ours(results: Callable[[Any], Sequence[Any]] | None = None, paired: Sequence[str] = ()) -> Build:
    """A call of the work's program, the tensors in `paired` with gate and up side by side."""

    def build(_: Any, case: Case) -> Method:
        given = [(case.paired(t) if name == "w" else pairs(t)) if name in paired else t for name, t in case.t.items()]
        call = case.call(program(case.work.name), *given)
        return Method(call, results or several, ours=True)

    return build


def _loss(which: str) -> Build:
    def build(_: Any, case: Case) -> Method:
        fn = getattr(program(case.work.name), which)
        extra = {"outputs": "loss"} if which == "stored" else {}
        says = "keeps bf16 logits for the backward" if which == "stored" else "keeps no logits: the vocabulary in chunks"
        return Method(case.call(lambda *t: fn(*t, **extra).mean()), ours=True, says=says)

    return build


OURS: dict[str, Build] = {
    "gemm": _ours(),
    "swiglu": _ours(lambda out: (out[0], halves(out[1])), paired=("w",)),
    "rmsnorm_swiglu": _ours(lambda out: (out[0], halves(out[1])), paired=("w",)),
    "residual_rms": _ours(),
    "swiglu_backward": _ours(lambda out: (halves(out[0]), *out[1:]), paired=("z",)),
    "rmsnorm_lse": _ours(),
    "linear_swiglu": _ours(lambda out: (out[0], out[1], row_halves(out[2])), paired=("w",)),
    "linear_cross_entropy": _loss("stored"),
    "rmsnorm": _ours(),
}


# --- torch -----------------------------------------------------------------------------------------------------------------------


def _cublas(_: Any, case: Case) -> Method:
    return Method(case.products(), part=True, says="the products alone, by torch.mm")


def _eager(_: Any, case: Case) -> Method:
    return Method(case.call(case.work.eager))


def _torch_compile(mode: str | None, says: str = "") -> Build:
    def build(_: Any, case: Case) -> Method:
        fn = case.work.eager if case.device == "cpu" else torch.compile(case.work.eager, fullgraph=True, dynamic=False, mode=mode)
        return Method(case.call(fn), says=says)

    return build


def _every(build: Build, but: Sequence[str] = ()) -> dict[str, Build]:
    return {name: build for name in OURS if name not in but}


TUNED = "mode max-autotune-no-cudagraphs: its kernels, in our graphs as everyone's"


# --- Liger -----------------------------------------------------------------------------------------------------------------------


def _load_liger() -> Any:
    ops = {name: importlib.import_module(f"liger_kernel.ops.{name}") for name in ("rms_norm", "swiglu", "fused_linear_cross_entropy")}
    return SimpleNamespace(
        rmsnorm=ops["rms_norm"].LigerRMSNormFunction.apply,
        silu_mul=ops["swiglu"].LigerSiLUMulFunction.apply,
        loss=ops["fused_linear_cross_entropy"].LigerFusedLinearCrossEntropyFunction.apply,
    )


def _liger_swiglu(api: Any, case: Case) -> Method:
    def run(x: Any, w: Any) -> Any:
        z = torch.mm(x, w.mT)
        gate, up = (t.contiguous() for t in z.chunk(2, -1))
        return api.silu_mul(gate, up), z

    return Method(case.call(run), says="the product by torch.mm, halves copied since its kernel wants them contiguous")


def _liger_linear_swiglu(api: Any, case: Case) -> Method:
    gate, up = (t.detach().contiguous().requires_grad_() for t in case.t["w"].chunk(2))

    def run(x: Any, wg: Any, wu: Any) -> Any:
        return api.silu_mul(x @ wg.mT, x @ wu.mT)

    call = case.call(run, case.t["x"], gate, up)
    return Method(call, lambda out: (out[0], out[1], torch.cat(out[2:])), says="gate and up in two weights, as its module has them")


def _liger_loss(api: Any, case: Case) -> Method:
    def run(x: Any, w: Any, target: Any) -> Any:
        found = api.loss(x, w, target)
        return found if isinstance(found, torch.Tensor) else found[0]

    return Method(case.call(run), says="keeps no logits")


LIGER: dict[str, Build] = {
    "swiglu": _liger_swiglu,
    "linear_swiglu": _liger_linear_swiglu,
    "linear_cross_entropy": _liger_loss,
    "rmsnorm": lambda api, case: Method(case.call(lambda x, g: api.rmsnorm(x, g, EPS, 0.0, "llama", False))),
}


# --- QuACK -----------------------------------------------------------------------------------------------------------------------


def _load_quack() -> Any:
    api = importlib.import_module("quack.gemm_interface")
    loss = importlib.import_module("quack.linear_cross_entropy")
    norm = importlib.import_module("quack.rmsnorm")
    try:  # the library of ready epilogues refuses some versions of the DSL while the rest works
        lse, why = importlib.import_module("quack.epilogue.library").rstd_lse_epi, ""
    except Exception as problem:
        lse, why = None, f"quack.epilogue.library does not import: {type(problem).__name__}: {problem}"
    return SimpleNamespace(
        gemm=api.gemm, norm_act=api.gemm_norm_act, act=api.gemm_act, rms=api.gemm_rms, dgated=api.gemm_dgated_out, lse=lse, why=why,
        loss=loss.chunked_linear_cross_entropy, rmsnorm=norm.rmsnorm,
    )  # fmt: skip


def _quack_gated(normed: bool) -> Build:
    def build(api: Any, case: Case) -> Method:
        x, w = case.t["x"], case.paired(case.t["w"]).flatten(0, 1).mT
        if normed:
            call = case.call(lambda *_: api.norm_act(x, w, rstd=case.t["rstd"], activation="swiglu", store_preact=True))
        else:
            call = case.call(lambda *_: api.act(x, w, activation="swiglu", store_preact=True))
        return Method(call, lambda out: (out[1], halves(out[0])), says="gate and up interleaved")

    return build


def _quack_residual(api: Any, case: Case) -> Method:
    x, w, r, g = case.t.values()
    before = torch.empty_like(r)
    call = case.call(lambda *_: api.rms(x, w.mT, C=r, norm_weight=g, premult_out=before, eps=EPS))
    return Method(call, lambda out: (before, out[0], out[1]), says="h in a buffer made once")


def _quack_swiglu_backward(api: Any, case: Case) -> Method:
    dx, w, z = case.t.values()
    beside = pairs(z).flatten(1)
    dz, y = torch.empty_like(beside), torch.empty(dx.shape[0], w.shape[1], dtype=dx.dtype, device=dx.device)
    call = case.call(lambda *_: api.dgated(dx, w, beside, dz, y, activation="swiglu", colvec_reduce=True))
    says = "gate and up interleaved, results in buffers made once; its row sums are Σ y·dy, another reduction of as many numbers"
    return Method(call, lambda out: (halves(dz), y, None), says=says)


def _quack_lse(api: Any, case: Case) -> Method:
    if api.lse is None:
        raise ImportError(api.why)
    x, w, rstd = case.t.values()
    call = case.call(lambda *_: api.lse(x, w.mT, rstd=rstd))
    return Method(call, lambda out: (out["D"], out["lse"]))


QUACK: dict[str, Build] = {
    "gemm": lambda api, case: Method(case.call(lambda x, w: api.gemm(x, w.mT))),
    "swiglu": _quack_gated(False),
    "rmsnorm_swiglu": _quack_gated(True),
    "residual_rms": _quack_residual,
    "swiglu_backward": _quack_swiglu_backward,
    "rmsnorm_lse": _quack_lse,
    "linear_cross_entropy": lambda api, case: Method(
        case.call(lambda x, w, target: api.loss(x, w, target, reduction="mean")), says="keeps no logits: rows in chunks"
    ),
    "rmsnorm": lambda api, case: Method(case.call(lambda x, g: api.rmsnorm(x, g, eps=EPS))),
}


# --- coda-kernels ----------------------------------------------------------------------------------------------------------------


def _load_coda_kernels() -> Any:
    api = importlib.import_module("coda.core.gemm.functional")
    return SimpleNamespace(
        gemm=api.gemm, swiglu=api.gemm_swiglu, rmsnorm_swiglu=api.gemm_rmsnorm_swiglu, residual=api.gemm_residual_partial_rmsnorm,
        swiglu_backward=api.gemm_swiglu_bwd_zdz, lse=api.gemm_rmsnorm_lse,
        linear_swiglu=importlib.import_module("coda.kernels.functional.swiglu").linear_swiglu,
        loss=importlib.import_module("coda.kernels.functional.cross_entropy").linear_cross_entropy,
    )  # fmt: skip


def _kernels_gated(normed: bool) -> Build:
    def build(api: Any, case: Case) -> Method:
        x, w = case.t["x"], case.paired(case.t["w"]).flatten(0, 1).mT
        call = case.call(lambda *_: api.rmsnorm_swiglu(x, w, case.t["rstd"]) if normed else api.swiglu(x, w))
        return Method(call, lambda out: (out[1], halves(out[0])), says="gate and up interleaved")

    return build


def _kernels_residual(api: Any, case: Case) -> Method:
    x, w, r, g = case.t.values()
    return Method(case.call(lambda *_: api.residual(x, w.mT, r, g, EPS)))


def _kernels_swiglu_backward(api: Any, case: Case) -> Method:
    dx, w, z = case.t.values()
    beside = pairs(z).flatten(1)
    call = case.call(lambda *_: api.swiglu_backward(dx, w.mT, beside))
    return Method(call, lambda out: (halves(out[0]), out[2], out[1]), says="gate and up interleaved")


def _kernels_linear_swiglu(api: Any, case: Case) -> Method:
    w = case.paired(case.t["w"].detach()).flatten(0, 1).requires_grad_()
    call = case.call(api.linear_swiglu, case.t["x"], w)
    return Method(call, lambda out: (out[0], out[1], row_halves(out[2])), says="gate and up interleaved")


def _kernels_loss(api: Any, case: Case) -> Method:
    target = case.t["target"].int()
    return Method(case.call(lambda x, w, _: api.loss(x, w, target)), says="targets of 32 bits")


CODA_KERNELS: dict[str, Build] = {
    "gemm": lambda api, case: Method(case.call(lambda x, w: api.gemm(x, w.mT))),
    "swiglu": _kernels_gated(False),
    "rmsnorm_swiglu": _kernels_gated(True),
    "residual_rms": _kernels_residual,
    "swiglu_backward": _kernels_swiglu_backward,
    "rmsnorm_lse": lambda api, case: Method(case.call(lambda x, w, rstd: api.lse(x, w.mT, rstd))),
    "linear_swiglu": _kernels_linear_swiglu,
    "linear_cross_entropy": _kernels_loss,
}


def _nothing() -> None:
    """What needs no import beyond torch."""


ADAPTERS = {
    a.name: a
    for a in (
        Adapter("coda", "coda_lang", "coda_lang", _nothing, OURS),
        Adapter("coda_chunked", "coda_lang", "coda_lang", _nothing, {"linear_cross_entropy": _loss("chunked")}),
        Adapter("gemm", "torch", "torch", _nothing, _every(_cublas, but=("rmsnorm",))),
        Adapter("eager", "torch", "torch", _nothing, _every(_eager, but=("gemm",))),
        Adapter("compile", "torch", "torch", _nothing, _every(_torch_compile(None))),
        Adapter("compile_max", "torch", "torch", _nothing, _every(_torch_compile("max-autotune-no-cudagraphs", TUNED))),
        Adapter("liger", "liger-kernel", "liger_kernel", _load_liger, LIGER),
        Adapter("quack", "quack-kernels", "quack", _load_quack, QUACK),
        Adapter("coda_kernels", "coda-kernels", "coda", _load_coda_kernels, CODA_KERNELS),
    )
}
