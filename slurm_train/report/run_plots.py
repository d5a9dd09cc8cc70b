"""The plots of a run: what was trained, how fast, and what saving took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from slurm_train.metrics.series import Series
from slurm_train.report.curve import Curve, thinned
from slurm_train.report.plot import Mark, Plot
from slurm_train.report.quantity import as_float
from slurm_train.report.record import RunRecord

_FEW = 60
_MOST_ATTEMPT_MARKS = 40
_MOST_EVENT_MARKS = 200
_WORDS = {"non_finite": "not finite", "spike": "spike", "rollback": "rollback", "hang": "hang", "stop": "stop asked"}


def run_plots(record: RunRecord) -> list[Plot]:
    """Returns the plots of a run, those without a value left out except for the loss."""
    series = record.series
    marks = [*attempt_marks(series), *_event_marks(record)]
    found = [_loss(series, marks), *_evaluations(series), _lr(series), _norm(series), *_speed(series), _times(series)]
    return [plot for plot in found if not plot.is_empty or plot.key == "loss"]


def attempt_marks(series: Series) -> list[Mark]:
    """Returns where another attempt took over."""
    if "attempt" not in series.columns:
        return []
    pairs = zip(series.columns["attempt"], series.columns["step"], strict=True)
    found, known = [], None
    for attempt, step in pairs:
        if known is not None and attempt != known:
            found.append(Mark(step, f"attempt {int(attempt)}"))
        known = attempt
    return found if len(found) <= _MOST_ATTEMPT_MARKS else []


def _event_marks(record: RunRecord) -> list[Mark]:
    found = []
    for event in record.events[-_MOST_EVENT_MARKS:]:
        step, kind = as_float(event.get("step")), str(event.get("event", "event"))
        if step is not None:
            css = "calm" if kind == "stop" else "event"
            found.append(Mark(step, f"{_WORDS.get(kind, kind)} at step {step:.0f}", css))
    return found


def _loss(series: Series, marks: Sequence[Mark]) -> Plot:
    train, held_out = series.points("loss"), series.points("eval_loss")
    curves = [thinned("training", *train), _dotted("held out", *held_out, colour="two")]
    return Plot(
        key="loss",
        title="Loss",
        curves=[curve for curve in curves if len(curve.x)],
        marks=marks,
        is_wide=True,
        note=_band_note(curves) if len(train[0]) else "no step is on record yet",
    )


def _band_note(curves: Sequence[Curve]) -> str:
    shown = next((curve for curve in curves if curve.is_thinned), None)
    return (
        "" if shown is None else "Line: mean of neighbouring steps. Band: smallest and largest, so spikes stay visible."
    )


def _dotted(name: str, x: Sequence[float], y: Sequence[float], *, colour: str) -> Curve:
    """Returns a line whose points are marked where they are few, and a dot where there is one."""
    if len(x) <= 1:
        return Curve(name=name, x=x, y=y, colour=colour, kind="dots")
    return replace(thinned(name, x, y, colour=colour), is_dotted=len(x) <= _FEW)


def _evaluations(series: Series) -> Iterator[Plot]:
    for key in series.evaluations:
        if key != "eval_loss":
            name = key.removeprefix("eval_").replace("_", " ")
            curve = _dotted(name, *series.points(key), colour="two")
            yield Plot(key=key, title=f"Held-out {name}", curves=[curve])


def _lr(series: Series) -> Plot:
    curve = thinned("learning rate", *series.points("lr"), colour="three")
    return Plot(key="lr", title="Learning rate", curves=[curve], from_zero=True, prefers_log=False)


def _norm(series: Series) -> Plot:
    curve = thinned("gradient norm", *series.points("grad_norm"))
    return Plot(key="grad_norm", title="Gradient norm before clipping", curves=[curve])


def _speed(series: Series) -> Iterator[Plot]:
    for unit in ("tokens", "samples"):
        curve = thinned("throughput", *series.points(f"{unit}_per_s"), colour="four")
        yield Plot(
            key=f"{unit}_per_s",
            title="Throughput of all ranks",
            y_label=f"{unit}/s",
            curves=[curve],
            from_zero=True,
            prefers_log=False,
        )
    steps, values = series.points("mfu")
    percent = [100 * value for value in values]
    yield Plot(
        key="mfu",
        title="Model FLOP utilisation",
        y_label="% of peak",
        curves=[thinned("MFU", steps, percent, colour="four")],
        from_zero=True,
        prefers_log=False,
    )


def _times(series: Series) -> Plot:
    names = (("step_time_s", "step", "one"), ("data_time_s", "waiting for data", "two"))
    points = {name: (series.points(key), colour) for key, name, colour in names}
    longest = max((value for (_, values), _ in points.values() for value in values), default=0.0)
    unit, factor = ("s", 1.0) if longest >= 2 else ("ms", 1000.0)
    curves = [
        thinned(name, steps, [factor * value for value in values], colour=colour)
        for name, ((steps, values), colour) in points.items()
    ]
    return Plot(
        key="step_time",
        title="Step time on rank 0",
        y_label=unit,
        curves=[curve for curve in curves if len(curve.x)],
        from_zero=True,
    )
