"""Pictures of benchmarks, as PNG files, for `--plot`: what a table tells, to be seen at once.

Each function takes figures, writes one file and returns its path. matplotlib is loaded by the first
(it is in the extra `bench`), and draws off screen: nothing here needs a display. Colours and axes
are alike, so that pictures can be laid beside one another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minivllm.errors import ConfigError
from minivllm.measures import Answer

_BLUE, _ORANGE, _GREY = "#2b6cb0", "#dd6b20", "#718096"


def _draw(file: Path, draw: Callable[[Any], None], *, num_panels: int = 1) -> Path:
    """A picture of panels side by side; one panel is given as itself, more as a list.

    Raises: `ConfigError` when matplotlib is not installed
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        rule = "needs matplotlib: pip install minivllm[bench]"
        raise ConfigError("plot", str(file.parent), rule) from error
    figure = Figure(figsize=(5.6 * num_panels, 3.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, num_panels)
    for panel in [panels] if num_panels == 1 else panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    draw(panels)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    return file


def timeline(steps: Sequence[Any], file: Path) -> Path:
    """The steps of a run (`roofline.Step`): how long each took, and what was in it."""

    def draw(panels: Any) -> None:
        left, right = panels
        now_s = 0.0
        starts_s = []
        for step in steps:
            starts_s.append(now_s)
            now_s += step.seconds
        for is_decode, color, label in (
            (True, _BLUE, "decode alone"),
            (False, _ORANGE, "with prompts"),
        ):
            kind = [
                (start_s, step)
                for start_s, step in zip(starts_s, steps, strict=True)
                if step.is_decode == is_decode
            ]
            if not kind:
                continue
            left.bar(
                [start_s for start_s, _ in kind],
                [step.num_rows for _, step in kind],
                [step.seconds for _, step in kind],
                align="edge",
                color=color,
                label=label,
            )
            right.scatter(
                [step.num_tokens for _, step in kind],
                [step.seconds * 1000 for _, step in kind],
                s=9,
                color=color,
                label=label,
            )
        left.set(title="Rows of each step", xlabel="seconds in steps", ylabel="rows")
        left.set_ylim(0, 1.2 * max(step.num_rows for step in steps))
        left.legend(frameon=False, loc="upper right", ncols=2)
        right.set(title="Time of a step", xlabel="tokens of the step", ylabel="ms")
        right.set_xscale("log", base=2)
        right.set_yscale("log")
        right.legend(frameon=False)

    return _draw(file, draw, num_panels=2)


def requests(answers: Sequence[Answer], file: Path) -> Path:
    """Each answer of a load: when it was asked, its first token, its end."""

    def draw(panel: Any) -> None:
        done = sorted((one for one in answers if not one.error), key=lambda one: one.start_s)
        zero_s = done[0].start_s if done else 0.0
        starts_s = [one.start_s - zero_s for one in done]
        ttfts_s = [one.ttft_s for one in done]
        rest_s = [one.latency_s - one.ttft_s for one in done]
        rows = range(len(done))
        panel.barh(rows, ttfts_s, left=starts_s, height=0.8, color=_ORANGE, label="to first token")
        firsts_s = [start_s + ttft_s for start_s, ttft_s in zip(starts_s, ttfts_s, strict=True)]
        panel.barh(rows, rest_s, left=firsts_s, height=0.8, color=_BLUE, label="to the end")
        panel.invert_yaxis()
        panel.grid(axis="y", visible=False)
        panel.set(title="Requests", xlabel="seconds", ylabel="request, in order of arrival")
        panel.legend(frameon=False, loc="upper right")

    return _draw(file, draw)


def load_curves(result: Mapping[str, Any], file: Path) -> Path:
    """A sweep's latencies against the rate of arrivals, a line for each setting; objectives are
    dashed."""

    def draw(panels: Any) -> None:
        for panel, metric, title in (
            (panels[0], "ttft", "p99 time to first token"),
            (panels[1], "tpot", "p99 time per output token"),
        ):
            for one in result["found"]:
                runs = sorted(one["runs"], key=lambda run: run["request_rate"])
                panel.plot(
                    [run["request_rate"] for run in runs],
                    [run[f"p99_{metric}_ms"] for run in runs],
                    marker="o",
                    label=_name(one["settings"]),
                )
            if metric in result["goodput"]:
                panel.axhline(result["goodput"][metric], color=_GREY, linestyle="--")
            panel.set(title=title, xlabel="requests per second", ylabel="ms")
            panel.set_ylim(bottom=0)
        panels[0].legend(frameon=False, fontsize=8)

    return _draw(file, draw, num_panels=2)


def pareto(found: Sequence[Mapping[str, Any]], file: Path) -> Path:
    """Every run of a sweep by throughput and latency; the front that no run beats in both."""

    def draw(panel: Any) -> None:
        points = []
        for one in found:
            xs = [run["output_throughput"] for run in one["runs"]]
            ys = [run["p99_ttft_ms"] for run in one["runs"]]
            points += list(zip(xs, ys, strict=True))
            panel.scatter(xs, ys, s=22, label=_name(one["settings"]))
        front = pareto_front(points)
        panel.plot([x for x, _ in front], [y for _, y in front], color=_GREY, linestyle="--")
        panel.set(
            title="Throughput against latency, and the front",
            xlabel="output tokens per second",
            ylabel="p99 time to first token, ms",
        )
        panel.set_ylim(bottom=0)
        panel.legend(frameon=False, fontsize=8)

    return _draw(file, draw)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points (more is better, less is better) that no other beats in both, by the first.

    >>> pareto_front([(1, 1), (2, 5), (3, 4), (4, 9)])
    [(1, 1), (3, 4), (4, 9)]
    """
    front: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (-point[0], point[1])):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front[::-1]


def lines(
    file: Path,
    panels: Sequence[tuple[str, str, Mapping[str, Sequence[float]]]],
    xs: Sequence[float],
    xlabel: str,
    *,
    xlog: bool = False,
) -> Path:
    """Panels (title, unit, one or two lines by their names) over the same xs; `limit` is dashed."""

    def draw(drawn: Any) -> None:
        for panel, (title, unit, named) in zip(
            [drawn] if len(panels) == 1 else drawn, panels, strict=True
        ):
            for (name, ys), color in zip(named.items(), (_BLUE, _ORANGE), strict=False):
                if name == "limit":
                    panel.plot(xs, ys, color=_GREY, linestyle="--", label=name)
                else:
                    panel.plot(xs, ys, marker="o", color=color, label=name)
            panel.set(title=title, xlabel=xlabel, ylabel=unit)
            if xlog:
                panel.set_xscale("log", base=2)
                panel.set_xticks(xs, [f"{x:g}" for x in xs])
                panel.minorticks_off()
            panel.set_ylim(bottom=0)
            panel.legend(frameon=False)

    return _draw(file, draw, num_panels=len(panels))


def bars(file: Path, panels: Sequence[tuple[str, str, Mapping[str, float]]]) -> Path:
    """Panels (title, unit, values by their names) of bars with their values on top."""

    def draw(drawn: Any) -> None:
        for panel, (title, unit, values) in zip(
            [drawn] if len(panels) == 1 else drawn, panels, strict=True
        ):
            colors = [_GREY] * (len(values) - 1) + [_BLUE]
            marks = panel.bar(list(values), list(values.values()), color=colors, width=0.6)
            panel.bar_label(marks, fmt="{:,.3g}", padding=2)
            panel.set(title=title, ylabel=unit)
            panel.margins(y=0.15)

    return _draw(file, draw, num_panels=len(panels))


def _name(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())
