"""The explorer's drawing of schedules as a part of another page."""

from collections.abc import Sequence

from toolkit.figures.explorer import page
from toolkit.figures.explorer.analysis import analyse, predict
from toolkit.figures.explorer.choice import Choice
from toolkit.figures.explorer.drawing import draw, frame_of

_STEPS = 3  # training steps drawn


def explored(choices: Sequence[Choice]) -> str:
    """HTML without script: drawings to point at, key numbers with an op of a slot a stage.

    Raises:
        ValueError: a choice that is impossible.
    """
    from toolkit.cost import UNIT, unit_costs

    panes, analyses = [], [analyse(choice, _STEPS) for choice in choices]
    frame = frame_of(analyses)
    for analysis in analyses:
        timeline = predict(analysis, unit_costs(analysis.schedule.n_stages), UNIT)
        numbers = analysis.numbers(timeline, in_slots=True)
        panes.append(page.pane(analysis.schedule, numbers, draw(analysis.choice, _STEPS, frame)))
    return page.styles() + page.side_by_side(panes) + page.legend()
