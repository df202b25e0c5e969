"""Step times of schedules on a model and machines, next to DistributedDataParallel's."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from toolkit.cost.boundary_compression import boundary_costs, sends_activations
from toolkit.cost.compression import accuracy_class, compressed_costs
from toolkit.cost.hardware import Hardware
from toolkit.cost.simulate import simulate
from toolkit.cost.slow_link_rivals import Averaging, rivals_on_slow_links
from toolkit.cost.stage_costs import Costs
from toolkit.cost.tensor_width import Width
from toolkit.cost.timeline import Timeline
from toolkit.cost.timeline_rows import summary
from toolkit.cost.worker_forms import (
    CUTS,
    CostsOf,
    Cut,
    DataParallelJob,
    Form,
    fastest_form,
)
from toolkit.schedule import CHAINS, Schedule


@dataclass
class SimulationRow:
    """A row of the table: a schedule in its fastest form, the baseline, or a rival of it.

    Attributes:
        name: label in tables.
        form: schedule, cut of the model, and simulated timeline.
        n_samples: of a training step.
        accuracy: how training differs from plain data parallelism.
        drawn: timeline of the steps that the figure shows; None for the baseline and rivals.
        baseline: step seconds of DistributedDataParallel on as many ranks; None if it would need
            micro-batches of another size.
        width: devices of a rank.
        averaging: what averages of the weights add to a step; None: weights are not averaged.
    """

    name: str
    form: Form
    n_samples: int
    accuracy: str
    drawn: Timeline | None = None
    baseline: float | None = None
    width: int = 1
    averaging: Averaging | None = None

    @property
    def seconds(self) -> float:
        """Seconds of a training step."""
        if self.averaging is None:
            return self.form.seconds
        return self.form.seconds + self.averaging.seconds


@dataclass
class SimulationTable:
    """Simulates schedules in their fastest form, and DistributedDataParallel as their baseline.

    Attributes:
        costs_of: costs of the model's stages, on one of the devices of a rank.
        baseline_costs_of: costs of the whole model on each device.
        width: devices of a rank, and the machines.
        batch: samples of a micro-batch.
        optimizer_words: numbers that the optimizer keeps of each parameter.
        compression: of messages of gradients and weights.
        boundary_compression: of activations and their gradients, between ranks.
        chains: to choose from, for workers; empty: a schedule keeps its own.
        cuts: of the model, to choose from.
    """

    costs_of: CostsOf
    baseline_costs_of: CostsOf
    width: Width
    batch: int
    optimizer_words: float
    compression: str = "none"
    boundary_compression: str = "none"
    chains: Sequence[str] = CHAINS
    cuts: Sequence[Cut] = CUTS
    _baselines: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def hardware(self) -> Hardware:
        """The machines as one device of every rank sees them."""
        return self.width.hardware_of_ranks

    def rows_of(self, name: str, schedule: Schedule) -> list[SimulationRow]:
        """Return the row of a schedule; before it that of its baseline, if that is new."""
        best_form = fastest_form(
            schedule,
            partial(self.costs_of_program, state=schedule.state),
            self.hardware,
            chains=self.chains,
            cuts=self.cuts,
            optimizer_words=self.optimizer_words,
        )
        rows = self._baseline_of(schedule)
        is_late = best_form.schedule.max_staleness > 0
        boundary_compression = "none"
        if sends_activations(schedule):
            boundary_compression = self.boundary_compression
        row = SimulationRow(
            name,
            best_form,
            n_samples=self.batch * schedule.n_microbatches,
            accuracy=accuracy_class(
                self.compression,
                is_late=is_late,
                state=schedule.state,
                boundary_compression=boundary_compression,
            ),
            baseline=self._baselines.get(self._baseline_key(schedule)),
            width=self.width.devices,
        )
        return [*rows, row]

    def _baseline_key(self, schedule: Schedule) -> tuple[int, int]:
        """Return the numbers of devices and of micro-batches."""
        return schedule.n_ranks * self.width.devices, schedule.n_microbatches

    def costs_of_program(self, n_stages: int, cut: Cut, state: str) -> Costs:
        """Return the costs of stages whose messages are compressed as the options say.

        Args:
            n_stages: of the schedule.
            cut: of the model.
            state: of the schedule.
        """
        costs = compressed_costs(
            self.costs_of(n_stages, cut), self.compression, state=state
        )
        return boundary_costs(costs, self.boundary_compression)

    def _baseline_of(self, schedule: Schedule) -> list[SimulationRow]:
        """Return the baseline of a schedule in a list, which is empty if there is no new one.

        There is none for one device, or if workers would have unequal numbers of micro-batches.
        """
        key = self._baseline_key(schedule)
        n_ranks, n_microbatches = key
        if n_ranks == 1 or n_microbatches % n_ranks or key in self._baselines:
            return []
        form = self._job(n_ranks, n_microbatches).form()
        self._baselines[key] = form.seconds
        row = SimulationRow(
            form.schedule.name,
            form,
            n_samples=self.batch * n_microbatches,
            accuracy=accuracy_class("none", is_late=False),
            baseline=form.seconds,
        )
        return [row]

    def _job(self, n_ranks: int, n_microbatches: int) -> DataParallelJob:
        """Return the training of the whole model on every device."""
        return DataParallelJob(
            self.baseline_costs_of,
            self.width.hardware,
            n_ranks,
            accumulate=n_microbatches // n_ranks,
            optimizer_words=self.optimizer_words,
        )

    def draw(self, row: SimulationRow, n_steps: int) -> Timeline:
        """Simulate the ``n_steps`` that the figure and traces show."""
        form = row.form
        schedule = form.schedule
        costs = self.costs_of_program(schedule.n_stages, form.partition, schedule.state)
        state_bytes = [self.optimizer_words * cost.parameter_bytes for cost in costs]
        program = schedule.lower(n_steps).verify()
        timeline = simulate(program, costs, self.hardware, state_bytes)
        row.drawn = replace(timeline, name=row.name)
        return row.drawn

    def cells(self, row: SimulationRow) -> dict[str, Any]:
        """Return the cells of a row, by heading."""
        form = row.form
        ratio = "-"
        if row.baseline:
            ratio = f"{row.seconds / row.baseline:.2f}"
        cells: dict[str, Any] = {"schedule": row.name, "by DDP's time": ratio}
        cells |= summary(
            form.timeline, row.n_samples, self.hardware, averaging=row.averaging
        )
        cells["devices"] = cells["ranks"] * row.width
        cells["mean staleness"] = round(form.schedule.mean_staleness, 3)
        return cells | {"form": form.words, "accuracy": row.accuracy}

    def rivals(self) -> list[SimulationRow]:
        """Return what people use on slow links, if messages are compressed."""
        if self.compression == "none":
            return []
        rows = []
        for (n_ranks, n_microbatches), baseline in self._baselines.items():
            job = self._job(n_ranks, n_microbatches)
            for rival in rivals_on_slow_links(job, self.compression):
                row = SimulationRow(
                    rival.name,
                    rival.form,
                    n_samples=self.batch * n_microbatches,
                    accuracy=rival.accuracy,
                    baseline=baseline,
                    averaging=rival.averaging,
                )
                rows.append(row)
        return rows
