"""Prints each text that users may read: errors, log lines, prints and help, as one list to be read from top to bottom.

    python tools/messages.py [FOLDER ...]        # default: psclient psserver pswire

Each line has the place, the kind (the class of an error, a log level, `help`), and the text; values are `{}`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "warn", "say", "echo", "print"}
HELP = {"help", "short_help", "epilog", "description"}


def text_of(node: ast.AST) -> str:
    """Returns the words of an expression that makes a text; what is put in at run time is `{}`."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "{}" for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return f"[{text_of(node.body)}|{text_of(node.orelse)}]"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return text_of(node.func.value)
    return ""


def messages(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yields line, kind and text of each message of a module, in the order of lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant | ast.JoinedStr):
            text = text_of(node.value)
            if " " in text:
                yield node.lineno, "text", text
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in LEVELS or name[:1].isupper():
            for text in filter(lambda text: " " in text, map(text_of, node.args)):
                yield node.lineno, name, text
        for word in node.keywords:
            if word.arg in HELP and text_of(word.value):
                yield node.lineno, "help", text_of(word.value)


def main(folders: list[str]) -> None:
    """Prints the list."""
    for folder in folders or ["psclient", "psserver", "pswire"]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.parent.name == "pb":
                continue
            for line, kind, text in sorted(messages(ast.parse(path.read_text(encoding="utf-8")))):
                print(f"{path.relative_to(ROOT)}:{line}\t{kind}\t{' '.join(text.split())}")


if __name__ == "__main__":
    main(sys.argv[1:])
