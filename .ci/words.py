"""Count phrases that readers stumble over, per 1,000 words, in the pages and the code, and what is too long to read.

`python .ci/words.py` prints the rates, and the number of long paragraphs and sentences in pages and notes. It fails
where one is above its ceiling in pyproject.toml, [tool.privlab.words]. `python .ci/words.py FILE...` lists the phrases,
paragraphs and sentences of these files with their lines. Code in backticks and in blocks does not count; of Python
files the docstrings and messages count.
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
    | stands?\ (in|on|at|below|above|there) | lies?\ there | tell\ (\w+\ ){1,3}apart
    | at\ hand | giv(en|ing|es?)\ (\w+\ ){0,3}away | by\ itself | are\ as\ many
    | but\ for | seldom | hence | that\ which
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


PARAGRAPH, SENTENCE = 120, 35
"""The most words of a paragraph and of a sentence that are read easily."""

_ITEM = re.compile(r"\s*([-*+]|\d+\.)\s")
_END_OF_SENTENCE = re.compile(r"(?:(?<=[.!?:;])|(?<=[.!?]\*)|(?<=[.!?]\*\*))\s+(?=[A-Z\"(`*\[γσεN])")


def paragraphs(content: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs, items of lists and cells of tables of a page, each with the number of its first line."""
    fence, lines, first = "", [], 0
    for number, line in enumerate([*content.splitlines(), ""], 1):
        stripped = line.strip()
        opened = re.match(r"`{3,}", stripped)
        ends = not stripped or opened or fence or stripped.startswith((":::", "#", "|")) or _ITEM.match(line)
        if ends and lines:
            yield first, " ".join(lines)
            lines = []
        if opened and not fence:
            fence = opened[0]
        elif fence:
            fence = "" if stripped == fence else fence
        elif stripped.startswith("|"):
            yield from ((number, cell) for cell in re.split(r"(?<!\\)\|", stripped))
        elif stripped and not stripped.startswith((":::", "#")) and (lines or not line.startswith("    ")):
            first = first if lines else number
            lines.append(stripped)


def long_parts(path: Path) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Return the paragraphs and the sentences of a page that are too long, with their lines and numbers of words."""
    long_paragraphs, long_sentences = [], []
    for number, text in paragraphs(path.read_text("utf-8")):
        plain = re.sub(r"\{\w+\}`[^`]*`|`[^`]*`", "`code`", re.sub(r"\]\([^)]*\)", "]", text))
        words = len(plain.split())
        if words > PARAGRAPH:
            long_paragraphs.append((number, f"a paragraph of {words} words"))
        sentences = [(len(sentence.split()), sentence[:60]) for sentence in _END_OF_SENTENCE.split(plain)]
        long_sentences += [(number, f"a sentence of {n} words: {text}…") for n, text in sentences if n > SENTENCE]
    return long_paragraphs, long_sentences


def main(files: list[str]) -> int:
    """List the phrases of some files, or compare the rates of pages and code with their ceilings."""
    if files:
        for file in files:
            parts = [] if file.endswith(".py") else [part for kind in long_parts(Path(file)) for part in kind]
            for number, found in sorted([*phrases(Path(file))[1], *parts]):
                print(f"{file}:{number}: {found}")
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
    prose = r"(README|CONTRIBUTING|CHANGELOG)\.md|docs/(?!generated/).*\.md|experiments/.*\.md"
    parts = [long_parts(Path(name)) for name in tracked if re.fullmatch(prose, name)]
    for index, kind in enumerate(("paragraphs", "sentences")):
        number, most = sum(len(part[index]) for part in parts), (PARAGRAPH, SENTENCE)[index]
        print(f"{kind}: {number} of more than {most} words; the ceiling is {ceilings[kind]}")
        status |= number > ceilings[kind]
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
