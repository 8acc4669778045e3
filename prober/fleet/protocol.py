"""What goes between the driver of a fleet and its nodes: a job there, trials and an answer back.

Pure values; they travel pickled, between probers of one version.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from prober.fleet.jobs import Cell
from prober.records import Machine, Trial, Verify
from prober.results.schema import Row
from prober.search.next_length import LOWEST


class End(StrEnum):
    """How the work on one cell ended."""

    ANSWERED = "answered"  # the search ended; its row says how
    EXPIRED = "expired"  # the time was up: the row holds the bracket so far, if there is one
    NOT_READY = "not_ready"  # this machine could not measure now: a neighbour, a full disk
    FAILED = "failed"  # no machine will answer it tonight
    NOT_REACHED = "not_reached"  # the night was over before its turn


@dataclass(frozen=True, slots=True)
class Known:
    """A trial and the machine it was launched on."""

    machine: Machine
    trial: Trial


@dataclass(frozen=True, slots=True)
class Job:
    """One search to run on one node, with everything that is known to it."""

    cell: Cell
    until: float  # seconds since the epoch
    known: tuple[Known, ...] = ()  # of this run, from any node
    hints: tuple[Row, ...] = ()  # rows of the matrix that are alike
    verify: Verify = Verify.FULL
    low: int = LOWEST
    high: int | None = None
    wait_seconds: float = 60.0  # for a neighbour
    recorded: tuple[Trial, ...] = ()  # of earlier runs and probes, of any machine: the node picks its own


@dataclass(frozen=True, slots=True)
class Reply:
    """What came out of a job."""

    end: End
    why: str = ""
    row: Row | None = None


@dataclass(frozen=True, slots=True)
class Streamed:
    """A trial has ended on a node. ``log``: its scrubbed log, zlib-compressed."""

    cell_key: str
    known: Known
    log: bytes = b""


@dataclass(frozen=True, slots=True)
class Answered:
    """A job has ended."""

    cell_key: str
    answer: Reply


@dataclass(frozen=True, slots=True)
class Lost:
    """A job's process or node is gone; nobody knows what the running trial would have shown."""

    cell_key: str
    why: str
    node_is_gone: bool


Event = Streamed | Answered | Lost
