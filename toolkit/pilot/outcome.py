"""What a pilot came to: its findings, what follows from them, and how both are shown."""

from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from math import inf

from toolkit.cost import Hardware
from toolkit.format import TIMES, digits, size, table, unit_for
from toolkit.pilot.advice import Advice, advise
from toolkit.pilot.findings import Findings
from toolkit.pilot.predict import check_placement, predict
from toolkit.schedule.paper_table import schedule_of


@dataclass(frozen=True)
class Pilot(Findings):
    """The findings, with the advice that follows from them."""

    @cached_property
    def advice(self) -> Advice:
        """What follows from the findings."""
        return advise(self)

    @property
    def recommendation(self) -> str:
        """The advice as text."""
        return self.advice.text()

    def elsewhere(self, hardware: Hardware | None = None, placement: str | None = None) -> "Pilot":
        """The same measurements, predicted for other machines or another placement."""
        hardware, placement = hardware or self.hardware, placement or self.placement
        check_placement(placement)
        schedules = [
            schedule_of(found.rule, self.n_workers, placement, n_stages=self.n_stages)
            for found in self.rules
        ]
        predictions = predict(schedules, self.costs, hardware, self.optimizer_bytes, self.slack)
        rules = tuple(
            replace(rule, predicted=prediction)
            for rule, prediction in zip(self.rules, predictions, strict=True)
        )
        return replace(self, hardware=hardware, placement=placement, rules=rules)

    def rows(self) -> list[dict[str, str]]:
        """A row a rule, as it is read."""
        rows = []
        for found in self.rules:
            row = {
                "rule": found.rule,
                "activations of all workers (measured)": _size(found.activations),
            }
            if found.cuda_peak is not None:
                row["CUDA peak (measured)"] = _size(found.cuda_peak)
            row |= {
                "step in one process (measured)": _time(found.seconds),
                "by that of DP": _range(found.ratio),
                "step on your machines (predicted)": _time(found.predicted.seconds),
                "by that of DP, predicted": _range(found.predicted.ratio),
                "of which messages": f"{found.waiting:.0%}",
                "fullest device (predicted)": _size(self.tightest(found)[0]),
            }
            if self.limited:
                row["fits"] = "yes" if self.fits(found) else "no"
            if self.training is not None and found.rule in self.training.accuracy:
                found_shares = self.training.accuracy[found.rule]
                row["accuracy (measured)"] = f"{sum(found_shares) / len(found_shares):.1%}"
            elif self.training is not None:
                row["accuracy (measured)"] = "-"
            rows.append(row)
        return rows

    def table(self) -> str:
        """The findings as aligned text."""
        if not self.rules:
            return "nothing was measured: the model cannot be cut into stages"
        return table(self._turned())

    def _turned(self) -> list[dict[str, str]]:
        """A row a quantity, a column a rule."""
        rows = self.rows()
        return [
            {"": name, **{row["rule"]: row[name] for row in rows}}
            for name in rows[0]
            if name != "rule"
        ]

    def origin(self) -> list[str]:
        """What was measured where, what was predicted from what, and how sure it is."""
        if not self.rules:
            return []
        compute = "was measured here" if self.compute == "measured" else "its roofline has"
        n_devices = len(self.rules[0].predicted.memories)
        memories = [self.hardware.memory_of(rank) for rank in range(n_devices)]
        room = " to ".join(_size(memory) for memory in sorted({min(memories), max(memories)}))
        room = f", {room} a device" if self.limited else ", memory not given"
        lines = [
            f"Measured on {self.device}: {self.n_workers} micro-batches of {self.batch}"
            f" {self.samples} of shape {list(self.shape)}, {self.n_stages} stages, in"
            f" {self.seconds:.0f} s.",
            f"Predicted for {self.hardware.name}: {self.hardware.link_bandwidth * 8e-9:g} Gbit/s"
            f" links{room}; computing takes the time that {compute}. Simulated, not run there:"
            " what disturbs a real machine is not in it.",
            "Ranges of measured ratios are quartiles over rounds; those of predicted ones come of"
            f" computing that takes {self.slack[0]:.2f} to {self.slack[1]:.2f} of the time"
            f" {'seen' if self.compute == 'measured' else 'of the roofline'}.",
        ]
        if self.training is not None:
            trained, n = self.training, len(self.training.seeds)
            lines.append(
                f"Accuracy: of {trained.n_tested} {trained.tested} after {trained.n_steps} training"
                f" steps, {n} seeds; an interval is that of the seeds, and no narrower than so few"
                f" {trained.tested} make it. So short a training shows large losses and no small"
                " ones, and nothing about the end of a long one."
            )
        else:
            lines.append(f"Accuracy was not measured: {self.untrained}.")
        return lines

    def __str__(self) -> str:
        return "\n\n".join([self.table(), *self.origin(), self.recommendation])

    def _repr_html_(self) -> str:
        advice = self.advice
        parts = [f"<h3>{escape(advice.verdict)}</h3>", _list(advice.reasons)]
        if self.rules:
            turned = self._turned()
            heads = "".join(f"<th>{escape(name)}</th>" for name in turned[0])
            body = "".join(
                "<tr>" + "".join(f"<td{_aligned(k)}>{escape(row[k])}</td>" for k in row) + "</tr>"
                for row in turned
            )
            parts.append(f"<table><thead><tr>{heads}</tr></thead>{body}</table>")
        parts.append(_list(self.origin()))
        for title, lines in (("Watch", advice.watch), ("Roll back", advice.roll_back)):
            if lines:
                parts.append(f"<b>{title}</b>{_list(lines)}")
        shown = escape(advice.command)
        parts.append(f'<b>Go on with</b><pre style="white-space:pre-wrap">{shown}</pre>')
        return "\n".join(parts)


def _list(lines: tuple[str, ...] | list[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _aligned(column: str) -> str:
    return "" if column else ' style="text-align:left"'


def _range(ratio: tuple[float, float, float]) -> str:
    least, middle, most = ratio
    return f"{middle:.2f} ({least:.2f} to {most:.2f})"


def _size(n_bytes: float) -> str:
    return "not limited" if n_bytes == inf else size(n_bytes)


def _time(seconds: float) -> str:
    unit, name = unit_for(seconds, TIMES[:2])
    return f"{seconds:.2f} s" if name == "s" else f"{digits(seconds / unit)} ms"
