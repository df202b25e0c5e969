"""What a wrapped training continues from, by the names of weights, whatever the stages.

``toolkit.runtime.state`` joins the states of ranks, from which this is made.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from toolkit.cost.compression import sends_differences
from toolkit.runtime.stage_optimizers import GroupOptions, StageOptimizers
from toolkit.runtime.step_optimizer import Clip, Settings
from toolkit.runtime.updater import Weights

if TYPE_CHECKING:
    from toolkit.runtime.loop_runtime import LoopRuntime


@dataclass(frozen=True)
class TrainingState:
    """All that the next steps depend on, except the newest weights.

    Attributes:
        steps_done: number of training steps.
        optimizer: the optimizer's state of each parameter.
        options: the options of each parameter's group, as its stage's optimizer has them.
        versions: late weights that are still read, by version and name. With compressed messages
            also the newest as receivers decode it, which differs from the model's exact weights.
        averages: the moving averages of weights and running statistics, if any.
        n_averaged: number of updates in them.
        n_skipped: updates of each stage that were skipped since they were not finite; their
            largest number.
        settings: what the loop has set for recent steps.
        followed: options that the loop has ever changed, as (parameter group, name).
        ranks: what ranks keep of compressed messages, by rank; see :meth:`RankCompressor.state`.
        stages: the names of the trained weights of each stage of ``ranks``.
    """

    steps_done: int
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, GroupOptions] = field(default_factory=dict)
    versions: Mapping[int, Weights] = field(default_factory=dict)
    averages: Weights | None = None
    n_averaged: int = 0
    n_skipped: int = 0
    settings: Mapping[int, Settings] = field(default_factory=dict)
    followed: frozenset[tuple[int, str]] = frozenset()
    ranks: Mapping[int, Any] = field(default_factory=dict)
    stages: Sequence[Sequence[str]] = ()

    @classmethod
    def of_stages(
        cls,
        state: Mapping[str, Any],
        trained: Sequence[Sequence[str]],
        optimizers: StageOptimizers,
        settings: Mapping[int, Settings],
        followed: Iterable[tuple[int, str]],
    ) -> "TrainingState":
        """Return a runtime's ``state`` by the names of weights.

        Args:
            state: of all ranks, see :meth:`Runtime.state_dict`.
            trained: names of the trained weights of each stage.
            optimizers: that made those of the stages.
            settings: what the loop has set, by step.
            followed: options that it has changed.
        """
        steps_done = state["steps_done"]
        parameter_states: dict[str, Any] = {}
        options: dict[str, GroupOptions] = {}
        versions: dict[int, Weights] = {}
        averages: Weights | None = None
        n_averaged = 0
        # Tables of stages become tables of weights: the next session may cut other stages.
        for names, updater_state, stage_versions in zip(
            trained, state["stages"], state["versions"], strict=True
        ):
            if updater_state["optimizer"] is not None:
                stage_state, stage_options = optimizers.named(
                    names, updater_state["optimizer"]
                )
                parameter_states |= stage_state
                options |= stage_options
            if updater_state["average"] is not None:
                averages = (averages or {}) | updater_state["average"]["weights"]
                n_averaged = updater_state["average"]["n_updates"]
            for version, weights in stage_versions.items():
                # Version `steps_done` is the newest, which the model itself has. What ranks keep
                # for themselves may differ from it.
                if version < steps_done or "ranks" in state:
                    versions.setdefault(version, {}).update(weights)
        n_skipped = max(updater_state["n_skipped"] for updater_state in state["stages"])
        return cls(
            steps_done,
            optimizer=parameter_states,
            options=options,
            versions=versions,
            averages=averages,
            n_averaged=n_averaged,
            n_skipped=n_skipped,
            settings=dict(settings),
            followed=frozenset(followed),
            ranks=state.get("ranks", {}),
            stages=[list(names) for names in trained],
        )

    def for_runtime(
        self,
        runtime: "LoopRuntime",
        optimizers: StageOptimizers,
        weights: Mapping[str, Tensor],
    ) -> dict[str, Any]:
        """Return the state that ``runtime`` loads to continue with the newest ``weights``."""
        step = self.steps_done
        schedule = runtime.schedule_plan.at(step)
        versions = []
        stages = []
        same_stages = self._same_stages(runtime)
        for stage, names in enumerate(runtime.trained):
            decoded = self.versions.get(step, {})
            if stage not in same_stages and not sends_differences(schedule.state):
                # The message of these weights was of another stage: compress the exact ones anew.
                decoded = {}
            newest = {name: decoded.get(name, weights[name]) for name in names}
            stage_versions = {}
            for version in schedule.versions(stage, step):
                # A weight that was frozen until now has been the same all the time.
                stale_weights = self.versions.get(version, {})
                stage_versions[version] = {
                    name: stale_weights.get(name, newest[name]) for name in names
                }
            versions.append(stage_versions | {step: newest})
            stages.append(self._stage_entry(names, runtime, stage, optimizers))
        return {
            "steps_done": step,
            "model": weights,
            "versions": versions,
            "stages": stages,
            "ranks": self._ranks_of(runtime, versions, same_stages),
        }

    def _same_stages(self, runtime: "LoopRuntime") -> set[int]:
        """Return the stages that have the weights that they had in :attr:`ranks`."""
        same_stages = set()
        for stage, (before, now) in enumerate(
            zip(self.stages, runtime.trained, strict=False)
        ):
            if list(before) == list(now):
                same_stages.add(stage)
        return same_stages

    def _ranks_of(
        self,
        runtime: "LoopRuntime",
        versions: Sequence[Mapping[int, Weights]],
        same_stages: Collection[int],
    ) -> Mapping[int, Any]:
        """Return what ranks of ``runtime`` keep of messages.

        What a message lost is a vector of all of a stage's numbers, and so are its codes: of other
        stages they mean nothing. Messages of such a stage begin anew.
        """
        if not runtime.is_compressed:
            # rank_compression.check_ranks_state refuses it, if there is any.
            return self.ranks
        ranks = {}
        for rank, entries in self.ranks.items():
            errors = {}
            for stage, tensors in entries["errors"].items():
                if stage in same_stages:
                    errors[stage] = tensors
            ranks[rank] = {"errors": errors}
            if "weights" in entries:
                messages = {}
                for stage in same_stages & entries["weights"].keys():
                    messages[stage] = {
                        version: message
                        for version, message in entries["weights"][stage].items()
                        # A script that replaces weights empties the versions: messages of them
                        # are stale.
                        if version in versions[stage] and version in self.versions
                    }
                ranks[rank]["weights"] = messages
        return ranks

    def _stage_entry(
        self,
        names: Sequence[str],
        runtime: "LoopRuntime",
        stage: int,
        optimizers: StageOptimizers,
    ) -> dict[str, Any]:
        average = None
        if runtime.options.ema is not None and self.averages is not None:
            expected = runtime.averaged_names(stage)
            stage_averages = {
                name: self.averages[name] for name in expected if name in self.averages
            }
            average = {"weights": stage_averages, "n_updates": self.n_averaged}
        state = optimizers.state_of_stage(names, self.optimizer, self.options)
        return {
            "optimizer": state if names else None,
            # As of :class:`toolkit.runtime.step_optimizer.FollowsSettings`.
            "lr_scheduler": {"n": self.steps_done} if names else None,
            "average": average,
            "n_skipped": self.n_skipped,
            # An optimizer has a state of each weight that has had a gradient.
            "unused": [name for name in names if name not in self.optimizer],
        }

    def beside_optimizer(self) -> dict[str, Any]:
        """Return the entry of a saved state, of tensors and plain values."""
        return {
            "steps_done": self.steps_done,
            "options": dict(self.options),
            "versions": dict(self.versions),
            "averages": self.averages,
            "n_averaged": self.n_averaged,
            "n_skipped": self.n_skipped,
            "settings": {
                step: _plain(settings) for step, settings in self.settings.items()
            },
            "followed": sorted(map(list, self.followed)),
            "ranks": dict(self.ranks),
            "stages": [list(names) for names in self.stages],
        }

    @classmethod
    def of_saved(
        cls, of_parameters: Mapping[str, Any], entry: Mapping[str, Any]
    ) -> "TrainingState":
        """Return the state whose :meth:`beside_optimizer` is ``entry``."""
        settings = {step: _settings(plain) for step, plain in entry["settings"].items()}
        followed = frozenset((group, name) for group, name in entry["followed"])
        replaced = {"settings": settings, "followed": followed}
        return cls(optimizer=of_parameters, **{**entry, **replaced})


def _plain(settings: Settings) -> dict[str, Any]:
    clip = None
    if settings.clip is not None:
        clip = [settings.clip.max_norm, settings.clip.norm_type]
    return {"options": settings.options, "clip": clip}


def _settings(plain: Mapping[str, Any]) -> Settings:
    clip = None
    if plain["clip"] is not None:
        clip = Clip(*plain["clip"])
    return Settings(plain["options"], clip)
