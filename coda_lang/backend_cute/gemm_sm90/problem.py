"""`Problem`: the static facts of one Gemm in a kernel, and where its tiles lie in shared memory.

In: the record, the tile configuration and the budget of the launch. Out: what host and device code ask of one Gemm: views, TMA atoms and
sizes on the host, its epilogue on the device. Holds no device values. Non-goals: who runs when (`kernel`).
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..configs import WARPGROUPS, Budget, tile_stores
from ..spec import ColReduce, Config, Gemm, Load, Point, RowReduce, Store
from . import ports, scheduler
from .epilogue import Epilogue, Plan
from .mainloop import Mainloop
from .ring import Fixed, Ring


class Problem:
    """One Gemm of a launch."""

    def __init__(self, spec: Gemm, config: Config, memory: Budget, fns: dict[str, Callable], library, multiprocessors: int):
        self.spec = spec
        self.mainloop = Mainloop(spec, config, memory.ab_stages)
        self.plan = Plan(spec, config, memory, fns, library)
        cluster = config.cluster_m, config.cluster_n
        self.shape = scheduler.Shape(config.tile_m, self.mainloop.nb, config.tile_n, cluster, multiprocessors)
        used = [p.tensor for p in spec.ports if isinstance(p, Load)] + [s.tensor for s in spec.sinks if isinstance(s, Point)]
        used += [s.matrix.tensor for s in spec.sinks if isinstance(s, Store) and s not in tile_stores(spec)]
        used += [s.work for s in spec.sinks if isinstance(s, (RowReduce, ColReduce))]
        self.direct = tuple(dict.fromkeys(used))  # tensors that the epilogue addresses itself, without TMA

    def arguments(self, tensors, extents):
        """Host: (atoms, tensors that the epilogue addresses, (m, n, depths))."""
        operands, loads = self.mainloop.atoms_for(tensors)
        if operands:
            m, n = Int32(cute.size(operands[0], mode=[0])), Int32(cute.size(operands[1], mode=[0]))
        else:
            m, n = (Int32(ports.size_of(sizes, extents)) for sizes in (self.spec.rows, self.spec.cols))
        depths = tuple(Int32(cute.size(view, mode=[1])) for view in operands[::2])
        atoms = (loads, self.plan.store_atoms(tensors), self.plan.tile_atoms(tensors))
        return atoms, tuple(tensors[name] for name in self.direct), (m, n, depths)

    def blocks(self, depths):
        """Device: k-blocks of one tile."""
        total = Int32(0)
        for depth in depths:
            total += self.mainloop.blocks(depth)
        return total

    @property
    def tile_bytes(self) -> int:
        """Of one stage of all tile ports."""
        return sum(panel.stage_bytes for _, panel in self.plan.tiles)


class Worker(Fixed):
    """One multiplying warpgroup: makes its epilogues, each where its problem begins."""

    def __init__(self, problems: list[Problem], group, thread, panels: Panels, tile_rings: list[Ring], atoms, direct, extents, sizes):
        self.problems, self.group, self.thread, self.panels, self.tile_rings = problems, group, thread, panels, tile_rings
        self.atoms, self.direct, self.extents, self.sizes = atoms, direct, extents, sizes

    def epilogue(self, i: int) -> Epilogue:
        """Of the `i`-th problem."""
        problem, group, (m, n, _) = self.problems[i], self.group, self.sizes[i]
        tensors, stores = dict(zip(problem.direct, self.direct[i])), self.atoms[i][1]
        pointers = self.panels.stores(problem, group), self.panels.tiles(problem, group), self.panels.scratch(problem, group)
        ring = self.tile_rings[i].shifted(group) if problem.plan.tiles else None
        return Epilogue(problem.plan, tensors, self.extents, m, n, group, self.thread, stores, pointers, ring)

    def drain(self) -> None:
        """Before the kernel ends: shared memory may go once every store has read it."""
        if any(problem.plan.stores for problem in self.problems):
            cute.arch.cp_async_bulk_wait_group(0, read=True)


class Panels:
    """Shared memory for stores, tile ports and scratch: room for the problem that needs most, which the others use in turn."""

    def __init__(self, smem, problems: list[Problem]):
        def room(sizes: list[list[int]]):
            """Nothing where no problem asks for any."""
            most = max(sum(map(_aligned, each)) for each in sizes)
            return smem.allocate(most, 1024) if most else None

        self._stores = room([self._store_sizes(p) for p in problems])
        self._tiles = room([self._tile_sizes(p) for p in problems])
        self._scratch = room([[4 * p.plan.scratch_floats()] for p in problems])

    def stores(self, problem: Problem, group) -> list:
        """Where one warpgroup's stages of each store begin."""
        return self._share(self._stores, self._store_sizes(problem), group)

    def tiles(self, problem: Problem, group) -> list:
        """Where one warpgroup's stages of each tile port begin."""
        return self._share(self._tiles, self._tile_sizes(problem), group)

    def scratch(self, problem: Problem, group):
        """One warpgroup's scratch, None where it needs none."""
        floats = problem.plan.scratch_floats()
        if not floats:
            return None
        pointer = cute.recast_ptr(self._scratch, dtype=cutlass.Float32)
        return (pointer + group * floats).align(16)

    @staticmethod
    def _store_sizes(problem: Problem) -> list[int]:
        return [panel.stage_bytes * panel.stages for panel in problem.plan.stores.values()]

    @staticmethod
    def _tile_sizes(problem: Problem) -> list[int]:
        return [panel.stage_bytes * panel.stages for _, panel in problem.plan.tiles]

    @staticmethod
    def _share(pointer, sizes: list[int], group) -> list:
        made, offset = [], 0
        for size in sizes:
            made.append((pointer + offset + group * size).align(1024))
            offset += _aligned(size)
        return made


def _aligned(size: int) -> int:
    """Bytes of both warpgroups' part, so that the next begins where TMA and swizzles want it."""
    return -(-WARPGROUPS * size // 1024) * 1024
