"""A plan, drawn: how long a step takes with how many servers. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

if TYPE_CHECKING:
    from pstesting.planner.plan import Plan


def draw(plan: Plan, path: Path) -> None:
    """Draws the steps of all numbers of servers that were tried.

    Args:
        plan: the plan.
        path: the file; its suffix says of which kind.
    """
    servers = [each.servers for each in plan.tried]
    computes = [1e3 * (each.step_seconds - each.round_seconds) for each in plan.tried]
    steps = [1e3 * each.step_seconds for each in plan.tried]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    axes.fill_between(servers, computes, color="#d9d9d9", label="the worker computes")
    axes.fill_between(servers, computes, steps, color="#9ecae1", label="the round")
    axes.plot(servers, steps, "o-", color="#08519c", label="a step")
    named = ""
    for each in plan.tried:
        name = each.bottleneck.removeprefix("the ")
        used = f"{100 * each.use[each.bottleneck]:.0f} %"
        text, named = (used if name == named else f"{name}\n{used}"), name
        axes.annotate(text, (each.servers, 1e3 * each.step_seconds), (3, 6), textcoords="offset points", fontsize=7)
    chosen = plan.chosen
    axes.axvline(chosen.servers, color="#de2d26", linestyle=":", label=f"{chosen.servers} servers are enough")
    axes.set_xscale("log", base=2)
    axes.set_xticks(servers, [str(number) for number in servers])
    axes.set_ylim(0, 1.25 * max(steps))
    axes.set_xlabel("servers")
    axes.set_ylabel("milliseconds")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
