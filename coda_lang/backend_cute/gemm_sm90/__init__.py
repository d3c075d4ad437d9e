"""The fixed Hopper GEMM: TMA loads, WGMMA, persistent ping-pong and cooperative schedules, and an epilogue that reads a `spec.Gemm`."""

from .kernel import GemmSm90

__all__ = ["GemmSm90"]
