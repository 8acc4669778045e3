"""Which cell starts where: the largest first, on the node that it fills best, within each node's host memory.

Pure: the time is handed in.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prober.fleet.jobs import Cell, FleetNode, runs_on


@dataclass(slots=True)
class _Place:
    """What is free on one node."""

    node: FleetNode
    gpus: int  # on a node without GPUs: 1, one search at a time
    memory_mib: float
    skipped_until: float = 0.0

    def has_room(self, cell: Cell) -> bool:
        return self.gpus >= max(cell.gpus, 1) and self.memory_mib >= cell.host_memory_mib

    def take(self, cell: Cell, sign: int = 1) -> None:
        self.gpus -= sign * max(cell.gpus, 1)
        self.memory_mib -= sign * cell.host_memory_mib


class Queue:
    """The cells that wait, and the nodes that may take them."""

    def __init__(self, cells: Iterable[Cell], nodes: Iterable[FleetNode]) -> None:
        self._places: dict[str, _Place] = {}
        self._waiting: dict[str, list[Cell]] = defaultdict(list)
        for node in nodes:
            if node.problem is None:
                self.add_node(node)
        for cell in sorted(cells, key=lambda cell: cell.order):
            self._waiting[cell.gpu].append(cell)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add_node(self, node: FleetNode) -> None:
        memory = float("inf") if node.host_memory_mib is None else node.host_memory_mib
        self._places[node.id] = _Place(node, max(node.gpus, 1), memory)

    def add(self, cell: Cell) -> None:
        """Put a cell (back) in line."""
        insort(self._waiting[cell.gpu], cell, key=lambda cell: cell.order)

    def place(self, now: float) -> list[tuple[Cell, FleetNode]]:
        """Take out of line what can start now. A cell that finds no room keeps a node from smaller ones behind it."""
        started = []
        for gpu, waiting in self._waiting.items():
            places = [p for p in self._places.values() if p.node.gpu == gpu and p.skipped_until <= now]
            chosen = dict(self._chosen(waiting, places))
            if chosen:
                self._waiting[gpu] = [cell for cell in waiting if cell.key not in chosen]
                started += [(cell, chosen[cell.key]) for cell in waiting if cell.key in chosen]
        return started

    def _chosen(self, waiting: Iterable[Cell], places: list[_Place]) -> Iterator[tuple[str, FleetNode]]:
        nowhere = set()  # shapes that no open node can ever take: not looked at again for each cell
        places = [place for place in places if place.gpus]
        for cell in waiting:
            if not places:
                return
            shape = (cell.gpus, cell.host_memory_mib, cell.engine.name)
            able = [] if shape in nowhere else [place for place in places if runs_on(cell, place.node)]
            if not able:
                nowhere.add(shape)
                continue
            with_room = [place for place in able if place.has_room(cell)]
            if with_room:
                best = min(with_room, key=lambda place: place.gpus)
                best.take(cell)
                yield cell.key, best.node
            else:
                best = max(able, key=lambda place: place.gpus)  # it waits for this one, which therefore drains
            if not with_room or not best.gpus:
                places.remove(best)

    def give_back(self, cell: Cell, node_id: str) -> None:
        """The cell no longer runs on the node."""
        if node_id in self._places:
            self._places[node_id].take(cell, -1)

    def skip(self, node_id: str, until: float) -> None:
        """Start nothing new on the node until then."""
        if node_id in self._places:
            self._places[node_id].skipped_until = until

    def lose(self, node_id: str) -> None:
        """The node is gone."""
        self._places.pop(node_id, None)

    def take_hopeless(self) -> list[Cell]:
        """Take out of line the cells that no node is left for."""
        nodes = [place.node for place in self._places.values()]
        return self._take(lambda cell: not any(runs_on(cell, node) for node in nodes))

    def take_all(self) -> list[Cell]:
        """Take out of line everything: the night is over."""
        return self._take(lambda _: True)

    def _take(self, is_wanted: Callable[[Cell], bool]) -> list[Cell]:
        taken = [cell for cells in self._waiting.values() for cell in cells if is_wanted(cell)]
        gone = {cell.key for cell in taken}
        for gpu, cells in self._waiting.items():
            self._waiting[gpu] = [cell for cell in cells if cell.key not in gone]
        return taken
