"""coda_lang: a language and compiler for fused GEMM kernels. Importing it needs neither torch nor cutlass."""

__version__ = "0.1.0"
