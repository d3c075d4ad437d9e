"""`GemmSm90`: one `Gemm` record as a Hopper kernel, with its host entry point.

In: the record, a tile configuration, the phase functions. Out: an object that `cute.compile` accepts, called with the device tensors in
the order of `Gemm.tensors`, one Int32 per name in `Gemm.extents`, and the stream. Roles: two warpgroups multiply and run the epilogue,
one loads; in ping-pong the two work on different tiles and take turns at the tensor cores, in a cooperative kernel they share a tile.
Without products it is a map kernel: the same epilogues, over tiles and vectors alone.
Non-goals: checking arguments and allocating; empty matrices (the host launches nothing for M = 0 or N = 0, and for K = 0 hands over
operands of zeros).
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ..configs import WARPGROUPS, accumulators, budget, tile_stores
from ..spec import ColReduce, Config, Gemm, Load, Point, RowReduce, Store
from . import ports, scheduler
from .epilogue import THREADS, Epilogue, Plan
from .mainloop import Loader, Mainloop, Multiplier
from .ports import TileLoader
from .ring import Cursor, Ring

MMA_WARPS = WARPGROUPS * 4
TURN = 3  # named barriers: 1 and 2 belong to the epilogues, 3 and 4 say whose turn it is at the tensor cores
MULTIPROCESSORS = 132


class GemmSm90:
    """A kernel to be compiled. Raises ValueError where the record and the configuration do not fit together."""

    def __init__(self, spec: Gemm, config: Config, fns: dict[str, Callable], library=None, multiprocessors: int = MULTIPROCESSORS):
        if library is None:
            from .. import device_fns as library
        memory = budget(spec, config)
        if memory is None:
            raise ValueError(f"{spec.name}: configuration {config.key} does not fit in shared memory")
        self.spec, self.config, self.budget, self.multiprocessors = spec, config, memory, multiprocessors
        self.mainloop = Mainloop(spec, config, memory.ab_stages)
        self.plan = Plan(spec, config, memory, fns, library)
        self.shape = scheduler.Shape(config.tile_m, self.mainloop.nb, (config.cluster_m, config.cluster_n))
        # Enough registers for the accumulators and an epilogue; the loading warps need few.
        self.registers = (24, 240) if accumulators(config) >= 192 else (40, 232)
        used = [p.tensor for p in spec.ports if isinstance(p, Load)] + [s.tensor for s in spec.sinks if isinstance(s, Point)]
        used += [s.matrix.tensor for s in spec.sinks if isinstance(s, Store) and s not in tile_stores(spec)]
        used += [s.work for s in spec.sinks if isinstance(s, (RowReduce, ColReduce))]
        self.direct = tuple(dict.fromkeys(used))  # tensors that the epilogue addresses itself, without TMA

    @cute.jit
    def __call__(self, *args):
        spec = self.spec
        tensors = {record.name: tensor for record, tensor in zip(spec.tensors, args)}
        extents = tuple(args[len(spec.tensors) : -1])
        operands, loads = self.mainloop.atoms_for(tensors)
        if cutlass.const_expr(len(operands) > 0):
            m, n = Int32(cute.size(operands[0], mode=[0])), Int32(cute.size(operands[1], mode=[0]))
        else:
            m, n = (Int32(ports.size_of(sizes, dict(zip(spec.extents, extents)))) for sizes in (spec.rows, spec.cols))
        depths = tuple(Int32(cute.size(view, mode=[1])) for view in operands[::2])
        atoms = (loads, self.plan.store_atoms(tensors), self.plan.tile_atoms(tensors))
        direct = tuple(tensors[name] for name in self.direct)
        self.kernel(atoms, direct, extents, (m, n, depths)).launch(
            grid=self.shape.grid(m, n, self.multiprocessors),
            block=[(WARPGROUPS + 1) * THREADS, 1, 1],
            cluster=(*self.shape.cluster, 1),
            min_blocks_per_mp=1,
            stream=args[-1],
        )

    @cute.kernel
    def kernel(self, atoms, direct, extents, sizes):
        loads, stores, tile_loads = atoms
        m, n, depths = sizes
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(warp // 4)  # the warpgroup
        tensors = dict(zip(self.direct, direct))
        named = dict(zip(self.spec.extents, extents))

        smem = SmemAllocator()
        rings, tile_rings = self.rings(smem)
        operands = self.operands(smem)
        panels = self.panels(smem)
        if warp == 0:
            with cute.arch.elect_one():
                for ring in (*rings, *tile_rings):
                    ring.init()
            cute.arch.mbarrier_init_fence()
        if warp == MMA_WARPS:
            self.prefetch(atoms)
        if cutlass.const_expr(self.shape.cluster != (1, 1)):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        if warp >= MMA_WARPS:
            cute.arch.setmaxregister_decrease(self.registers[0])
            for ring in rings:
                if warp == MMA_WARPS:
                    self.load(ring, loads, operands, m, n, depths)
            for g in cutlass.range_constexpr(len(tile_rings)):
                if warp == MMA_WARPS + 1 + g:
                    self.load_tiles(g, tile_rings[g], tile_loads, panels, m, n)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            multipliers = [Multiplier(self.mainloop, ring, *operands, 0 if self.config.pingpong else group) for ring in rings]
            own_ring = tile_rings[0].shifted(group) if cutlass.const_expr(len(tile_rings) > 0) else None
            epilogue = Epilogue(self.plan, tensors, named, m, n, group, tidx % THREADS, stores, self.of_group(panels, group), own_ring)
            if cutlass.const_expr(len(rings) > 0):
                self.multiply(multipliers[0], epilogue, group, m, n, depths)
            else:
                self.map(epilogue, group, m, n)

    # --- shared memory

    def rings(self, smem: SmemAllocator):
        """The ring of the operands (none in a map kernel), and one of the tile ports for each warpgroup (none without tile ports)."""
        memory = self.budget
        rings = []
        if self.spec.products:
            warps = 4 if self.config.pingpong else MMA_WARPS  # that drain one stage
            barriers = smem.allocate_array(Int64, 2 * memory.ab_stages)
            rings = [Ring(barriers, memory.ab_stages, self.mainloop.stage_bytes, warps, self.shape.cluster)]
        if not self.plan.tiles:
            return rings, []
        barriers = smem.allocate_array(Int64, WARPGROUPS * 2 * memory.tile_stages)
        size = sum(panel.stage_bytes for _, panel in self.plan.tiles)
        first = Ring(barriers, memory.tile_stages, size, 4)
        return rings, [first.shifted(g) for g in range(WARPGROUPS)]

    def operands(self, smem: SmemAllocator):
        """The stages of A and of B (nothing in a map kernel)."""
        if not self.spec.products:
            return ()
        return tuple(smem.allocate(rows * 128 * self.budget.ab_stages, 1024) for rows in (self.config.tile_m, self.config.tile_n))

    def panels(self, smem: SmemAllocator):
        """Bytes for each store, each tile port and the scratch: (pointer, bytes of one warpgroup)."""

        def room(panel):
            size = panel.stage_bytes * panel.stages
            return smem.allocate(WARPGROUPS * size, 1024), size

        scratch = None
        if self.plan.scratch_floats():
            scratch = smem.allocate_array(Float32, WARPGROUPS * self.plan.scratch_floats()), self.plan.scratch_floats()
        return [room(panel) for panel in self.plan.stores.values()], [room(panel) for _, panel in self.plan.tiles], scratch

    @staticmethod
    def of_group(panels, group):
        """One warpgroup's share of `panels`."""
        stores, tiles, scratch = panels

        def share(entry, align: int):
            return (entry[0] + group * entry[1]).align(align)

        return [share(s, 1024) for s in stores], [share(t, 1024) for t in tiles], None if scratch is None else share(scratch, 16)

    @staticmethod
    def prefetch(atoms) -> None:
        loads, stores, tile_loads = atoms
        for atom, _ in (*(part for product in loads for part in product), *stores, *tile_loads):
            cpasync.prefetch_descriptor(atom)

    # --- roles

    @cute.jit
    def load(self, ring, loads, operands, m: Int32, n: Int32, depths):
        loader = Loader(self.mainloop, ring, loads, *operands)
        cursor = Cursor.start(ring.stages)
        rows, cols = self.shape.clusters(m, n)
        _, _, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        for work in cutlass.range(first, rows * cols, step, unroll=1):
            row, col = scheduler.tile_at(work, rows, cols, self.shape.cluster)
            cursor = loader.tile(row, col, depths, cursor)
        ring.drain(cursor)

    @cute.jit
    def load_tiles(self, group: cutlass.Constexpr, ring, tile_loads, panels, m: Int32, n: Int32):
        _, pointers, _ = self.of_group(panels, group)
        plan = self.plan
        loader = TileLoader([panel for _, panel in plan.tiles], tile_loads, pointers, ring, plan.order, plan.rows, plan.nb)
        cursor = Cursor.start(ring.stages)
        rows, cols = self.shape.clusters(m, n)
        _, _, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        if cutlass.const_expr(self.config.pingpong):
            first, step = first + group * step, step * WARPGROUPS
        for work in cutlass.range(first, rows * cols, step, unroll=1):
            row, col = scheduler.tile_at(work, rows, cols, self.shape.cluster)
            wg_row = row if cutlass.const_expr(self.config.pingpong) else row * WARPGROUPS + group
            cursor = loader.tile(wg_row, col, cursor)

    @cute.jit
    def map(self, epilogue, group: Int32, m: Int32, n: Int32):
        """A map kernel: epilogues alone."""
        rows, cols = self.shape.clusters(m, n)
        _, _, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        tile_cursor = Cursor.start(max(self.budget.tile_stages, 1))
        if cutlass.const_expr(self.config.pingpong):
            first, step = first + group * step, step * WARPGROUPS
        for work in cutlass.range(first, rows * cols, step, unroll=1):
            row, col = scheduler.tile_at(work, rows, cols, self.shape.cluster)
            wg_row = row if cutlass.const_expr(self.config.pingpong) else row * WARPGROUPS + group
            tile_cursor = epilogue.tile(epilogue.begin(None, wg_row, col, tile_cursor))
        epilogue.drain()

    @cute.jit
    def multiply(self, multiplier, epilogue, group: Int32, m: Int32, n: Int32, depths):
        pingpong = self.config.pingpong
        rows, cols = self.shape.clusters(m, n)
        _, _, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        cursor = Cursor.start(multiplier.ring.stages)
        tile_cursor = Cursor.start(max(self.budget.tile_stages, 1))
        blocks = Int32(0)
        for depth in depths:
            blocks += self.mainloop.blocks(depth)
        if cutlass.const_expr(pingpong):
            cursor = cursor.skip(group * blocks)  # the first tile's operands are the other warpgroup's
            first, step = first + group * step, step * WARPGROUPS
            if group == 1:
                cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=WARPGROUPS * THREADS)
        for work in cutlass.range(first, rows * cols, step, unroll=1):
            row, col = scheduler.tile_at(work, rows, cols, self.shape.cluster)
            if cutlass.const_expr(pingpong):
                cute.arch.barrier(barrier_id=TURN + group, number_of_threads=WARPGROUPS * THREADS)
            cursor, last = multiplier.tile(depths, cursor)
            if cutlass.const_expr(pingpong):
                cute.arch.barrier_arrive(barrier_id=TURN + 1 - group, number_of_threads=WARPGROUPS * THREADS)
                cursor = cursor.skip(blocks)
            wg_row = row if cutlass.const_expr(pingpong) else row * WARPGROUPS + group
            elements = epilogue.begin(multiplier.accumulator, wg_row, col, tile_cursor)
            multiplier.finish(last)
            tile_cursor = epilogue.tile(elements)
        epilogue.drain()
