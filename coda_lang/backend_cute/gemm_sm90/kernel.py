"""`GemmSm90`: one `Gemm` record, or several `Together`, as a Hopper kernel, with its host entry point.

In: the record, a tile configuration, the phase functions. Out: an object that `cute.compile` accepts, called with the device tensors in
the order of the record's `tensors`, one Int32 per name in its `extents`, and the stream. Roles: two warpgroups multiply and run the
epilogue, one loads; in ping-pong the two work on different tiles and take turns at the tensor cores, in a cooperative kernel they share a
tile. Without products it is a map kernel: the same epilogues, over tiles and vectors alone.
Several Gemms are *problems* of one launch: each role walks its tiles of the first, then of the second, in a loop of its own. The ring of
operands goes on through all of them; the room for tiles and stores is used anew by each.
Non-goals: checking arguments and allocating; empty matrices (the host launches nothing for M = 0 or N = 0, and for K = 0 hands over
operands of zeros).
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ..configs import MULTIPROCESSORS, WARPGROUPS, accumulators, budget
from ..spec import Config, Gemm, Together, gemms
from . import scheduler
from .epilogue import THREADS
from .mainloop import Loader, Multiplier
from .ports import TileLoader
from .problem import Panels, Problem, Worker
from .ring import Cursor, Ring

MMA_WARPS = WARPGROUPS * 4
TURN = 3  # named barriers: 1 and 2 belong to the epilogues, 3 and 4 say whose turn it is at the tensor cores


class GemmSm90:
    """A kernel to be compiled. Raises ValueError where the record and the configuration do not fit together."""

    def __init__(
        self, spec: Gemm | Together, config: Config, fns: dict[str, Callable], library=None, multiprocessors: int = MULTIPROCESSORS
    ):
        if library is None:
            from .. import device_fns as library
        memory = budget(spec, config)
        if memory is None:
            raise ValueError(f"{spec.name}: configuration {config.key} does not fit in shared memory")
        self.spec, self.config, self.budget = spec, config, memory
        self.problems = [Problem(gemm, config, memory, fns, library, multiprocessors) for gemm in gemms(spec)]
        self.shapes = [p.shape for p in self.problems]
        self.tile_loaders = WARPGROUPS if memory.tile_stages else 0  # warps that load tiles, one for each warpgroup
        # Enough registers for the accumulators and an epilogue; the loading warps need few.
        self.registers = (24, 240) if accumulators(config) >= 192 else (40, 232)

    @cute.jit
    def __call__(self, *args):
        extents = dict(zip(self.spec.extents, args[len(self.spec.tensors) : -1]))
        given, rest = [], args
        for problem in self.problems:
            records = problem.spec.tensors
            given.append(problem.arguments({record.name: tensor for record, tensor in zip(records, rest)}, extents))
            rest = rest[len(records) :]
        atoms, direct, sizes = zip(*given)
        self.kernel(atoms, direct, tuple(extents.values()), sizes).launch(
            grid=scheduler.grid(self.shapes, sizes, self.blocks(sizes)),
            block=[(WARPGROUPS + 1) * THREADS, 1, 1],
            cluster=(self.config.cluster_m, self.config.cluster_n, 1),
            min_blocks_per_mp=1,
            stream=args[-1],
        )

    @cute.kernel
    def kernel(self, atoms, direct, extents, sizes):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(warp // 4)  # the warpgroup
        named = dict(zip(self.spec.extents, extents))

        smem = SmemAllocator()
        rings, tile_rings = self.rings(smem)
        operands = self.operands(smem)
        panels = Panels(smem, self.problems)
        if warp == 0:
            with cute.arch.elect_one():
                for ring in (*rings, *(ring.shifted(g) for ring in tile_rings[:1] for g in range(WARPGROUPS))):
                    ring.init()
            cute.arch.mbarrier_init_fence()
        if warp == MMA_WARPS:
            self.prefetch(atoms)
        if cutlass.const_expr(self.shapes[0].cluster != (1, 1)):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        if warp >= MMA_WARPS:
            cute.arch.setmaxregister_decrease(self.registers[0])
            for ring in rings:
                if warp == MMA_WARPS:
                    self.load(ring, atoms, operands, sizes)
            for g in cutlass.range_constexpr(self.tile_loaders):
                if warp == MMA_WARPS + 1 + g:
                    self.load_tiles(g, tile_rings, atoms, panels, sizes)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            worker = Worker(self.problems, group, tidx % THREADS, panels, tile_rings, atoms, direct, named, sizes)
            if cutlass.const_expr(len(rings) > 0):
                self.multiply(rings[0], operands, worker, group, sizes)
            else:
                m, n, _ = sizes[0]
                self.map(worker.epilogue(0), group, m, n)

    # --- shared memory

    def rings(self, smem: SmemAllocator):
        """The ring of the operands (none in a map kernel), and for each problem that of its tile ports (none where no problem has any).

        Rings of tile ports are one: the same barriers, though the bytes of a stage differ. Each is followed by the other warpgroup's.
        """
        memory = self.budget
        rings = []
        if self.multiplies():
            warps = 4 if self.config.pingpong else MMA_WARPS  # that drain one stage
            barriers = smem.allocate_array(Int64, 2 * memory.ab_stages)
            rings = [Ring(barriers, memory.ab_stages, self.problems[0].mainloop.stage_bytes, warps, self.shapes[0].cluster)]
        if not memory.tile_stages:
            return rings, []
        barriers = smem.allocate_array(Int64, WARPGROUPS * 2 * memory.tile_stages)
        most = max(p.tile_bytes for p in self.problems)
        return rings, [Ring(barriers, memory.tile_stages, p.tile_bytes or most, 4) for p in self.problems]

    def multiplies(self) -> bool:
        """Has the launch a mainloop?"""
        return bool(self.problems[0].spec.products)

    def operands(self, smem: SmemAllocator):
        """The stages of A and of B (nothing in a map kernel)."""
        if not self.multiplies():
            return ()
        return tuple(smem.allocate(rows * 128 * self.budget.ab_stages, 1024) for rows in (self.config.tile_m, self.config.tile_n))

    @staticmethod
    def prefetch(atoms) -> None:
        for loads, stores, tile_loads in atoms:
            for atom, _ in (*(part for product in loads for part in product), *stores, *tile_loads):
                cpasync.prefetch_descriptor(atom)

    def shares(self, sizes, turn=None) -> list[scheduler.Share]:
        """This block's tiles of each problem; in ping-pong those of the warpgroup whose `turn` it is."""
        return scheduler.shares(self.shapes, sizes, self.blocks(sizes), turn if self.config.pingpong else None)

    def blocks(self, sizes) -> list:
        """The k-blocks of a tile of each problem."""
        return [problem.blocks(depths) for problem, (_, _, depths) in zip(self.problems, sizes)]

    # --- roles

    @cute.jit
    def load(self, ring, atoms, operands, sizes):
        cursor = Cursor.start(ring.stages)
        for problem, (loads, _, _), (m, _, depths), share in zip(self.problems, atoms, sizes, self.shares(sizes)):
            loader = Loader(problem.mainloop, ring, loads, *operands, m)
            for work in cutlass.range(share.first, share.end, share.step, unroll=1):
                row, col = share.tile(work)
                cursor = loader.tile(row, col, depths, cursor)
        ring.drain(cursor)

    @cute.jit
    def load_tiles(self, group: cutlass.Constexpr, tile_rings, atoms, panels, sizes):
        cursor = Cursor.start(tile_rings[0].stages)
        for i, share in enumerate(self.shares(sizes, Int32(group))):
            plan, ring = self.problems[i].plan, tile_rings[i].shifted(group)
            if cutlass.const_expr(len(plan.tiles) > 0):
                if cutlass.const_expr(i > 0):
                    ring.drain(cursor)  # the stages are about to be cut anew: none may be in use
                pointers = panels.tiles(self.problems[i], group)
                loader = TileLoader([panel for _, panel in plan.tiles], atoms[i][2], pointers, ring, plan.order, plan.rows, plan.nb)
                for work in cutlass.range(share.first, share.end, share.step, unroll=1):
                    row, col = share.tile(work)
                    wg_row = row if cutlass.const_expr(self.config.pingpong) else row * WARPGROUPS + group
                    cursor = loader.tile(wg_row, col, cursor)

    @cute.jit
    def map(self, epilogue, group: Int32, m: Int32, n: Int32):
        """A map kernel: epilogues alone."""
        rows, cols = self.shapes[0].clusters(m, n)
        _, _, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        tile_cursor = Cursor.start(max(self.budget.tile_stages, 1))
        if cutlass.const_expr(self.config.pingpong):
            first, step = first + group * step, step * WARPGROUPS
        for work in cutlass.range(first, rows * cols, step, unroll=1):
            row, col = scheduler.tile_at(work, rows, cols, self.shapes[0])
            wg_row = row if cutlass.const_expr(self.config.pingpong) else row * WARPGROUPS + group
            tile_cursor = epilogue.tile(epilogue.begin(None, wg_row, col, tile_cursor))
        epilogue.drain()

    @cute.jit
    def multiply(self, ring, operands, worker, group: Int32, sizes):
        pingpong, (a, b) = self.config.pingpong, operands
        cursor = Cursor.start(ring.stages)
        tile_cursor = Cursor.start(max(self.budget.tile_stages, 1))
        if cutlass.const_expr(pingpong):
            if group == 1:
                cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=WARPGROUPS * THREADS)
        for i, share in enumerate(self.shares(sizes, group)):
            depths = sizes[i][2]
            multiplier = Multiplier(self.problems[i].mainloop, ring, a, b, 0 if pingpong else group)
            epilogue = worker.epilogue(i)
            blocks = self.problems[i].blocks(depths)
            if cutlass.const_expr(pingpong):  # tiles before, of whichever problem, were this warpgroup's or the other's
                cursor = Cursor.start(ring.stages).skip(share.before)
            for work in cutlass.range(share.first, share.end, share.step, unroll=1):
                if cutlass.const_expr(pingpong):
                    cute.arch.barrier(barrier_id=TURN + group, number_of_threads=WARPGROUPS * THREADS)
                cursor, last = multiplier.tile(depths, cursor)
                if cutlass.const_expr(pingpong):
                    cute.arch.barrier_arrive(barrier_id=TURN + 1 - group, number_of_threads=WARPGROUPS * THREADS)
                    cursor = cursor.skip(blocks)
                # Only the epilogue asks which tile this was: the divisions run while the last products do.
                row, col = share.tile(work)
                wg_row = row if cutlass.const_expr(pingpong) else row * WARPGROUPS + group
                elements = epilogue.begin(multiplier.accumulator, wg_row, col, tile_cursor)
                multiplier.finish(last)
                tile_cursor = epilogue.tile(elements)
        worker.drain()
