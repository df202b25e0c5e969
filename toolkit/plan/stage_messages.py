"""Messages between the stages of a search: what they wait for, and the bytes that they bring."""

from dataclasses import dataclass

from toolkit.cost import Costs, Hardware
from toolkit.plan.stage_placement import Places


@dataclass(frozen=True)
class StageMessages:
    """Messages between neighbouring stages on a placement."""

    costs: Costs
    placement: Places
    hardware: Hardware

    def needs(self, n_kinds: int) -> list[list[tuple[int, float]]]:
        """Return the chains that each chain needs, the sender of its message last.

        An op needs the one before it on its stage; a forward also the forward of the stage before,
        and a first backward that of the stage after::

            stage    0     1     2
            F        0 --> 2 --> 4        chains of whole backwards
            B        1 <-- 3 <-- 5
        """
        needs: list[list[tuple[int, float]]] = []
        for stage in range(len(self.costs)):
            forward = len(needs)
            needs.append([])
            # Each backward needs the op before it on its stage, which is free of messages.
            needs += [[(forward + kind, 0.0)] for kind in range(n_kinds - 1)]
            if stage > 0:
                lag = self._seconds(
                    self.costs[stage - 1].output_bytes, stage - 1, stage
                )
                # Appended, since the sender of a message is the last need.
                needs[forward].append((forward - n_kinds, lag))
            if stage < len(self.costs) - 1:
                lag = self._seconds(
                    self.costs[stage + 1].input_gradient_bytes, stage + 1, stage
                )
                needs[forward + 1].append((forward + n_kinds + 1, lag))
        return needs

    def input_bytes_on_rank(self, stage: int) -> float:
        """Return the bytes of its input that a stage keeps of a micro-batch."""
        if self._arrive(stage - 1, stage):
            return self.costs[stage].input_bytes
        return self.costs[stage].extra_input_bytes

    def waiting_bytes(self, stage: int) -> list[float]:
        """Return the bytes that wait on the stage's rank until its op starts, by kind."""
        input_bytes = gradient_bytes = 0.0
        if self._arrive(stage - 1, stage):
            input_bytes = self.costs[stage].input_bytes
        if self._arrive(stage + 1, stage):
            gradient_bytes = self.costs[stage + 1].input_gradient_bytes
        return [input_bytes, gradient_bytes, 0.0]

    def _arrive(self, sender: int, receiver: int) -> bool:
        """Whether there is such a stage on another rank."""
        is_stage = 0 <= sender < len(self.costs)
        return is_stage and self.placement[sender] != self.placement[receiver]

    def _seconds(self, n_bytes: float, sender: int, receiver: int) -> float:
        """Return the seconds of a message between two stages."""
        if not self._arrive(sender, receiver):
            return 0.0
        machines = {
            self.hardware.machine(self.placement[stage]) for stage in (sender, receiver)
        }
        return self.hardware.message(n_bytes, local=len(machines) == 1)
