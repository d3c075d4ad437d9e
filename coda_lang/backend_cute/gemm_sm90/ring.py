"""Rings of shared-memory stages that one TMA warp fills and MMA warps drain.

In: a barrier array in shared memory and who takes part. Out: `Ring` (the barriers) and `Cursor` (a position in it, carried through
device loops). A wrong arrival count hangs the kernel, so the counts are derived here, once, from who arrives, and `check` restates
them from the other side while the kernel is traced. Non-goals: what the stages hold.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import arith


class Cursor:
    """A position in a ring: the stage, and the parity of the round.

    A consumer waits for `phase`, a producer for its opposite.
    """

    def __init__(self, stages: int, stage: Int32, phase: Int32):
        self.stages, self.stage, self.phase = stages, stage, phase

    @staticmethod
    def start(stages: int) -> Cursor:
        return Cursor(stages, Int32(0), Int32(0))

    def next(self) -> Cursor:
        """The following stage."""
        wrap = self.stage == self.stages - 1
        stage = select(wrap, Int32(0), self.stage + 1)
        return Cursor(self.stages, stage, select(wrap, self.phase ^ 1, self.phase))

    def skip(self, count: Int32) -> Cursor:
        """The stage `count` further on."""
        total = self.stage + count
        rounds = total // self.stages
        return Cursor(self.stages, total - rounds * self.stages, self.phase ^ (rounds & 1))

    def __extract_mlir_values__(self):
        return [self.stage.ir_value(), self.phase.ir_value()]

    def __new_from_mlir_values__(self, values):
        return Cursor(self.stages, Int32(values[0]), Int32(values[1]))


def select(condition, a, b):
    """a where `condition` holds, else b: scalars of one type."""
    return type(a)(arith.select(condition.ir_value(), a.ir_value(), b.ir_value()))


class Fixed:
    """A trace-time object that device loops and branches may use but never change: it is carried through them as nothing."""

    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, values):
        return self


class Ring(Fixed):
    """`stages` pairs of barriers. "full" completes when one producer has armed it and `bytes` have landed; "empty" when every consumer
    warp that reads what this block's stage received, in this block or in one that multicasts with it, has let go."""

    def __init__(self, barriers: cute.Pointer, stages: int, stage_bytes: int, consumer_warps: int, cluster: tuple[int, int] = (1, 1)):
        self.full, self.empty = barriers, barriers + stages
        self.stages, self.bytes = stages, stage_bytes
        self.consumer_warps, self.cluster = consumer_warps, cluster
        self.peers = cluster[0] + cluster[1] - 1  # blocks in the same row or column of the cluster, this one included
        self.check()

    def check(self) -> None:
        """Counts arrivals block by block: each consumer warp tells every block whose load wrote into its own shared memory."""
        rows, cols = self.cluster
        blocks = [(i, j) for i in range(rows) for j in range(cols)]
        for block in blocks:
            arrivals = sum(self.consumer_warps for i, j in blocks if i == block[0] or j == block[1])
            if arrivals != self.empty_arrivals:
                counts = f"gets {arrivals} arrivals a stage and waits for {self.empty_arrivals}"
                raise AssertionError(f"ring of {self.stages}: block {block} {counts}")
        if self.bytes <= 0 or self.bytes >= 1 << 20:  # the transaction counter of a barrier has 20 bits
            raise AssertionError(f"ring of {self.stages}: {self.bytes} bytes a stage")

    def shifted(self, index) -> Ring:
        """The ring whose barriers follow `index` rings like this one."""
        return Ring(self.full + index * (2 * self.stages), self.stages, self.bytes, self.consumer_warps, self.cluster)

    @property
    def empty_arrivals(self) -> int:
        return self.consumer_warps * self.peers

    def init(self) -> None:
        """To be called by one thread, before the barrier of the cluster."""
        for i in range(self.stages):
            cute.arch.mbarrier_init(self.full + i, 1)
            cute.arch.mbarrier_init(self.empty + i, self.empty_arrivals)

    @cute.jit
    def acquire(self, cursor: Cursor, missing=0):
        """Producer: wait until the stage is empty, then announce the bytes to come, all but the `missing` ones."""
        cute.arch.mbarrier_wait(self.empty + cursor.stage, cursor.phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + cursor.stage, self.bytes - missing)

    def barrier(self, cursor: Cursor) -> cute.Pointer:
        """What the loads into this stage report to."""
        return self.full + cursor.stage

    def wait(self, cursor: Cursor) -> None:
        """Consumer: wait until the stage is full."""
        cute.arch.mbarrier_wait(self.full + cursor.stage, cursor.phase)

    @cute.jit
    def release(self, cursor: Cursor, enabled=True):
        """Consumer, whole warps: let go of the stage, in every block that loads into it."""
        lane = cute.arch.lane_idx()
        if cutlass.const_expr(self.peers == 1):
            if lane == 0 and enabled:
                cute.arch.mbarrier_arrive(self.empty + cursor.stage)
        else:
            rank = cute.arch.block_idx_in_cluster()
            rows = self.cluster[0]
            same = lane % rows == rank % rows or lane // rows == rank // rows
            if lane < self.cluster[0] * self.cluster[1] and same and enabled:
                cute.arch.mbarrier_arrive(self.empty + cursor.stage, lane)

    @cute.jit
    def drain(self, cursor: Cursor):
        """Producer, at the end: wait until all stages are empty, so that no peer signals a block that has left."""
        position = cursor
        for _ in cutlass.range(self.stages, unroll=1):
            cute.arch.mbarrier_wait(self.empty + position.stage, position.phase ^ 1)
            position = position.next()
