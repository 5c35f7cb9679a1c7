"""Workflows, by name: how a task becomes trajectories."""

from .chat import Chat, Prompt
from .math import MathBoxedWorkflow, MathWorkflow
from .simple import SimpleWorkflow
from .transcript import Transcript
from .workflow import WORKFLOWS, GroupTask, Rollout, RolloutFailed, Workflow

__all__ = [
    "WORKFLOWS",
    "Chat",
    "GroupTask",
    "MathBoxedWorkflow",
    "MathWorkflow",
    "Prompt",
    "Rollout",
    "RolloutFailed",
    "SimpleWorkflow",
    "Transcript",
    "Workflow",
]
