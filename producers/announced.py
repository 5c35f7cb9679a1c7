"""The weights that explorers should serve: the newest announced on the surviving branch. Pure."""

from __future__ import annotations

from ..schemas import events as ev
from ..streams.lineage import surviving_lineage


class Announced:
    """Folds `checkpoints`; a fork may lower the version."""

    def __init__(self) -> None:
        self._branches: list[ev.Branch] = []
        self._checkpoints: dict[tuple[str, int], ev.Checkpoint] = {}
        self._lineage = surviving_lineage([])
        self.newest: ev.Checkpoint | None = None

    def on_event(self, event: ev.Checkpoint | ev.Branch) -> None:
        """One event in log order; a repeat replaces the same version."""
        if isinstance(event, ev.Branch):
            if event not in self._branches[-1:]:
                self._branches.append(event)
            self._lineage = surviving_lineage(self._branches)
        else:
            self._checkpoints[event.branch, event.step] = event
        self.newest = max(
            (c for c in self._checkpoints.values() if self._lineage.contains(c.branch, c.step)),
            key=lambda c: c.step,
            default=None,
        )

    def is_paced(self, task: ev.Task) -> bool:
        """Whether the task was published for this lineage, not for a branch that was left since."""
        return self._lineage.contains(task.branch, task.min_policy_version)

    def version_for(self, task: ev.Task) -> int:
        """Oldest policy_version that may roll out the task.

        What was paced on a branch that was left since, and not executed, takes the current one.
        """
        return task.min_policy_version if self.is_paced(task) else 0

    @property
    def branch(self) -> str:
        """The branch that training is on."""
        return self._lineage.branch
