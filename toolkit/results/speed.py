"""How fast training goes, while it goes on."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.training import Step


class Speed:
    """Samples a second, since an epoch's first step or since it was last restarted."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._samples = 0

    @property
    def begun(self) -> bool:
        """Whether a step has been seen."""
        return self._since is not None

    def trained(self, step: "Step", now: float) -> None:
        """A training step is done, at ``now`` in seconds."""
        # What passed before it, a test or a compilation, is not the time of an epoch's first step.
        if step.step == 1 or not self.begun:
            self.restart(now)
        else:
            self._samples += step.samples

    def restart(self, now: float) -> None:
        """Count from ``now`` on."""
        self._since, self._samples = now, 0

    def rate(self, now: float) -> float | None:
        """Samples a second until ``now``; None while there are none."""
        if self._since is None or not self._samples:
            return None
        return self._samples / (now - self._since)
