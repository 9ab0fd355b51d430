"""Engines: what stands between a front and a model."""

from mlx_zip.engine.interface import (
    Constraint,
    Counts,
    Emitted,
    Engine,
    EngineInfo,
    Event,
    Failed,
    Figures,
    Finished,
    Likely,
    Progress,
    SessionInfo,
    Started,
    Submission,
    Ticket,
    events,
)

__all__ = [
    "Constraint",
    "Counts",
    "Emitted",
    "Engine",
    "EngineInfo",
    "Event",
    "Failed",
    "Figures",
    "Finished",
    "Likely",
    "Progress",
    "SessionInfo",
    "Started",
    "Submission",
    "Ticket",
    "events",
]
