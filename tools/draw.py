"""Draws the diagrams of the documents: `python tools/draw.py [--write]` checks docs/images, or writes it anew.

The drawings follow the reader's light or dark scheme, for which they have two sets of colours.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"

STYLE = """
  text { font: 14px Helvetica, Arial, sans-serif; fill: #1f2733; text-anchor: middle; }
  .small { font-size: 12px; fill: #4d5766; }
  .left { text-anchor: start; }
  .bold { font-weight: bold; }
  rect, path { stroke: #5b6675; stroke-width: 1.4; fill: none; }
  .worker { fill: #dbe9fb; } .server { fill: #d5efdd; } .chief { fill: #fdebc8; } .plain { fill: #f2f4f7; }
  .dashed { stroke-dasharray: 5 4; }
  .head { fill: #5b6675; stroke: none; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e8ecf2; } .small { fill: #b3bdca; }
    rect, path { stroke: #9aa6b5; } .head { fill: #9aa6b5; }
    .worker { fill: #20466f; } .server { fill: #1f5a38; } .chief { fill: #6a4d12; } .plain { fill: #2c333d; }
  }"""


class Drawing:
    """A picture of boxes, arrows and texts; lengths are in pixels.

    Args:
        about: what the picture shows, for readers who do not see it.
    """

    def __init__(self, width: int, height: int, about: str) -> None:
        self._size, self._about, self._parts = (width, height), about, list[str]()

    def box(self, x: int, y: int, width: int, height: int, kind: str, *lines: str) -> None:
        """A box with lines of text in its middle, the first one bold."""
        self._parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>')
        top = y + height / 2 + 5 - 9 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + 18 * number, line, "small" if number else "bold")

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """A line of text."""
        self._parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def arrow(self, *points: tuple[int, int], kind: str = "") -> None:
        """A line through some points, with a head at its end."""
        path = " ".join(f"{'L' if number else 'M'}{x},{y}" for number, (x, y) in enumerate(points))
        self._parts.append(f'<path class="{kind}" d="{path}" marker-end="url(#head)"/>')

    def __str__(self) -> str:
        width, height = self._size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{escape(self._about)}">\n<style>{STYLE}\n</style>\n'
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto"><path class="head" d="M0,0 L8,4 L0,8 z"/></marker></defs>\n' + "\n".join(self._parts) + "\n"
            "</svg>\n"
        )


def cluster() -> Drawing:
    """Which process talks to which."""
    d = Drawing(820, 330, "Each worker talks to each server; the chief talks to the server that keeps the job's log")
    for index in range(3):
        d.box(60 + 250 * index, 20, 200, 64, "worker", f"worker {index}", "forward, backward")
    for index in range(2):
        d.box(185 + 250 * index, 170, 200, 64, "server", f"ps {index}", "variables, slots, updates")
        for worker in range(3):
            d.arrow((160 + 250 * worker, 84), (285 + 250 * index, 168))
            d.arrow((285 + 250 * index, 168), (160 + 250 * worker, 86))
    d.box(30, 262, 130, 52, "chief", "chief", "decides, saves")
    d.arrow((160, 280), (285, 236))
    d.arrow((435, 202), (387, 202))
    d.arrow((387, 202), (433, 202))
    d.text(700, 150, "gradients up, parameters down", "small")
    d.text(700, 168, "shm, tcp or gRPC", "small")
    d.text(250, 290, "log of the job", "small")
    d.text(411, 190, "votes", "small")
    return d


def step() -> Drawing:
    """One synchronous step on a time line."""
    d = Drawing(860, 330, "A step: workers compute, push gradients; each server sums, updates once, and answers")
    for y, name in ((40, "worker 0"), (110, "worker 1"), (200, "ps 0"), (270, "ps 1")):
        d.text(14, y + 23, name, "left bold")
        d.arrow((95, y + 18), (850, y + 18), kind="dashed")
    d.box(110, 40, 170, 36, "worker", "forward, backward")
    d.box(110, 110, 240, 36, "worker", "forward, backward")
    for y in (200, 270):
        d.box(430, y, 70, 36, "server", "sum")
        d.box(500, y, 110, 36, "server", "optimizer")
    for y in (40, 110):
        d.box(700, y, 130, 36, "worker", "next step")
    d.arrow((280, 76), (428, 198))
    d.arrow((280, 76), (428, 268))
    d.arrow((350, 146), (428, 198))
    d.arrow((350, 146), (428, 268))
    for y in (200, 270):
        d.arrow((610, y), (698, 76))
        d.arrow((610, y), (698, 146))
    d.text(330, 100, "push", "small")
    d.text(790, 232, "new parameters", "small")
    d.text(520, 325, "a server updates once, when every worker's push has arrived", "small")
    return d


def replication() -> Drawing:
    """Copies of variables on the next server."""
    d = Drawing(820, 300, "With a replication factor of two, each server also applies the updates of its neighbour")
    for index, (own, other) in enumerate((("w, b", "v"), ("u", "w, b"), ("v", "u"))):
        x = 40 + 265 * index
        d.box(x, 120, 210, 110, "server", f"ps {index}", f"primary: {own}", f"backup: {other}")
        d.arrow((410, 68), (x + 105, 118))
    d.box(290, 16, 240, 50, "worker", "workers", "push to primary and backup")
    d.text(410, 262, "ps 1 fails: ps 2 has v and u, and ps 0 still has w, b;", "small")
    d.text(410, 280, "the round continues, and a standby server copies what is missing", "small")
    return d


def table() -> Drawing:
    """The parts of a table without a size."""
    d = Drawing(820, 300, "Ids of a batch are made unique, split by hash over the servers, and found in their index")
    d.box(20, 30, 150, 60, "plain", "ids of a batch", "7, 3, 7, 905")
    d.box(210, 30, 150, 60, "worker", "unique ids", "3, 7, 905")
    d.arrow((170, 60), (208, 60))
    for index, ids in enumerate(("3, 905", "7")):
        y = 30 + 130 * index
        d.box(420, y, 120, 60, "server", f"ps {index}", f"ids {ids}")
        d.box(560, y, 100, 60, "server", "index", "id → row")
        d.box(680, y, 120, 60, "server", "rows, slots", "dim float32 each")
        d.arrow((360, 60), (418, y + 30))
        d.arrow((540, y + 30), (558, y + 30))
        d.arrow((660, y + 30), (678, y + 30))
    d.text(610, 250, "an id that is new gets a row by the initializer;", "small")
    d.text(610, 268, "filters, eviction and limits decide which rows stay", "small")
    return d


DRAWINGS = {"cluster": cluster, "step": step, "replication": replication, "table": table}


def main(*flags: str) -> None:
    """Exits with 1 if a picture in docs/images is not the one that is drawn here."""
    stale: list[str] = []
    for name, draw in DRAWINGS.items():
        path, text = IMAGES / f"{name}.svg", str(draw())
        if flags == ("--write",):
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        sys.exit(f"docs/images is stale ({', '.join(stale)}): python tools/draw.py --write")


if __name__ == "__main__":
    main(*sys.argv[1:])
