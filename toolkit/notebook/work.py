"""A training on ranks that reports its steps, and its timeline beside the predicted one."""

from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

if TYPE_CHECKING:
    from toolkit.cost import Timeline
    from toolkit.runtime.meters.measurements import Measurements


def train_on_ranks(config: DictConfig) -> "Measurements | None":
    """What each rank does: train as ``config`` has it, and report every step.

    A report has ``step`` and ``n_steps`` of the run, and the loss of the rank's micro-batches.

    Returns:
        what all ranks have measured, where the runtime measures.
    """
    from toolkit.runtime import report
    from toolkit.training import Step, prepare

    job = prepare(config)
    done = 0

    def tell(step: Step) -> None:
        nonlocal done
        done += 1
        found: dict[str, Any] = {"step": done, "n_steps": step.n_steps * config.epochs}
        if len(step.result.losses):
            found["loss"] = float(step.result.loss)
        report(found | {"lr": step.learning_rate})

    job.run(on_step=tell)
    return job.measurements()


def beside_prediction(found: "Measurements", config: DictConfig) -> tuple["Timeline", "Timeline"]:
    """What was measured, and what the simulator makes of ops and messages that take as long.

    Args:
        found: measured under ``config``.
        config: from which the stages are made again, without ranks.
    """
    from toolkit.training.data import load
    from toolkit.training.prediction import beside_prediction

    return beside_prediction(found, config, load(config.data).form)
