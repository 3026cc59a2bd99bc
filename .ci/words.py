"""Count phrases that readers stumble over, per 1,000 words, in the pages and in the texts of the code.

`python .ci/words.py` prints the rates and fails where one is above its ceiling in pyproject.toml, [tool.privlab.words].
`python .ci/words.py FILE...` lists the phrases of these files with their lines. Code in backticks and in blocks does
not count; of Python files the docstrings and messages count.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PHRASES = re.compile(
    r"""\b(
      told | tells | beside | anew | apart | alike | by\ turns | dearest | furthest
    | of\ (its|their|one's)\ own | (is|are)\ of | has\ no\ meaning | what\ comes\ of | holds?\ that\ down
    | (?<!there\ )(is|are)\ no\ (?!longer|more|less|better|evidence|worse|larger|smaller)
    | stands?\ (in|on|at|below|above|there) | lies?\ there
    | at\ hand | gives?\ away | by\ itself | are\ as\ many
    )\b""",
    re.VERBOSE | re.IGNORECASE,
)
"""Phrases that nobody would use in this sense: see "Plain English" in CONTRIBUTING.md."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the prose of a file: each line of a page, or each text of a Python file, with the number of its line."""
    content = path.read_text("utf-8")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield from enumerate(node.value.splitlines(), node.lineno)
        return
    inside = False
    for number, line in enumerate(content.splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            yield number, line


def phrases(path: Path) -> tuple[int, list[tuple[int, str]]]:
    """Return the number of words of a file, and its marked phrases, each with the number of its line."""
    words, found = 0, []
    for number, text in texts(path):
        plain = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
        words += len(plain.split())
        found += [(number, match[0]) for match in PHRASES.finditer(plain)]
    return words, found


def main(files: list[str]) -> int:
    """List the phrases of some files, or compare the rates of pages and code with their ceilings."""
    if files:
        for file in files:
            for number, phrase in phrases(Path(file))[1]:
                print(f"{file}:{number}: {phrase}")
        return 0
    ceilings = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["tool"]["privlab"]["words"]
    tracked = subprocess.check_output(("git", "ls-files"), text=True).splitlines()
    of_kind = {
        "pages": r"(README|CONTRIBUTING)\.md|docs/(?!generated/).*\.md",
        "code": r"(privlab|attacks|defenses)/.*\.py",
    }
    status = 0
    for kind, pattern in of_kind.items():
        counts = [phrases(Path(name)) for name in tracked if re.fullmatch(pattern, name)]
        words, marked = sum(words for words, _ in counts), sum(len(found) for _, found in counts)
        rate = round(1000 * marked / words, 2)
        print(f"{kind}: {marked} marked phrases in {words} words, {rate} per 1,000; the ceiling is {ceilings[kind]}")
        status |= rate > ceilings[kind]
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
