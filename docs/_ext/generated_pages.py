"""Writes the pages that are generated from privlab itself: attacks, defenses, metrics, flags, commands and rooms."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

import click
from class_examples import examples, shared
from drawings import drawing
from marked_blocks import not_run
from public_names import public_names
from sphinx.application import Sphinx

import privlab
from privlab.benchmark import entries, site_files
from privlab.cli import cli
from privlab.cli.common import EXAMPLES
from privlab.experiments.figures import updates
from privlab.inventory.explain import Explanation, explain, known
from privlab.inventory.texts import docstrings, references
from privlab.report.flag_meanings import FLAG_MEANINGS

FOLDER = "generated"
"""Where the pages are written, below docs/; git ignores it."""

INTRODUCTIONS = {
    "attack": "Each page is generated from the attack's docstring and its declarations; `privlab explain NAME` prints "
    "it in the terminal. N is the number of patches, K = 3·P² the values of a patch, D the width of the embedding. "
    '"Exact" is said of the equations, without rounding.',
    "defense": "Each page is generated from the defense's docstring and its declarations; `privlab explain NAME` "
    "prints it in the terminal. Defenses stack: `--defense low-pass+row-permutation`.",
    "metric": "Each page is generated from the metric's docstring; `privlab explain NAME` prints it in the terminal. "
    "Reconstructions are clipped to [0, 1] and scored as floats; `--eight-bit` rounds them first.",
}

STRIPS = "experiments/notes/strips"
CAPTIONS = json.loads((Path(__file__).parents[2] / STRIPS / "captions.json").read_text("utf-8"))
"""What the panels of each strip are, or why there is no strip, by the name of its page."""

LOOKS = "{doc}`/studies/decibels` shows what a PSNR looks like."

SECTIONS = {
    "The Python interface": ("privlab",),
    "Attacks, defenses and metrics": ("privlab.attacks", "privlab.defenses", "privlab.metrics", "privlab.testing"),
    "The threat model and what is released": ("privlab.threat", "privlab.release", "privlab.split", "privlab.keys"),
    "Images and models": ("privlab.images", "privlab.victims", "privlab.patches", "privlab.reassembly"),
    "Runs, tables and figures": (
        *("privlab.evaluation", "privlab.runs", "privlab.grids", "privlab.stores"),
        *("privlab.report.tables", "privlab.report.figures", "privlab.report.page", "privlab.benchmark"),
    ),
    "Other frameworks": (
        *("privlab.flower", "privlab.nvflare", "privlab.callbacks.lightning", "privlab.callbacks.transformers"),
        "privlab.integrations",
    ),
    "Parts that all share": ("privlab.base", "privlab.training", "privlab.inventory"),
}
"""The packages whose public names have a page, in the sections of the API's index."""

ROOMS = tuple(room for rooms in SECTIONS.values() for room in rooms)
"""All of these packages."""


def write_pages(app: Sphinx) -> None:
    """Write every generated page that has changed, and remove those that are no longer wanted."""
    root = Path(app.srcdir) / FOLDER
    wanted = {root / path: text for path, text in pages(Path(app.srcdir))}
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
    for path in root.rglob("*.md"):
        if path not in wanted:
            path.unlink()


def markdown(page: Explanation) -> str:
    """Return a page of an attack, a defense, a metric or a flag; its drawing is below the idea, the first section."""
    parts, shown = [f"# `{page.name}`", page.idea, *strip(page)], drawing(page.name, page.flow)
    for title, text in page.sections.items():
        parts += [f"## {title}", text, *([shown] if shown and title == next(iter(page.sections)) else [])]
        parts += [LOOKS] if title == "Measured" or (page.name.startswith("psnr") and title == "Range") else []
    return "\n\n".join(parts) + "\n"


def strip(page: Explanation) -> list[str]:
    """Return the figures of a page's examples, which `strips.py` drew, or why there is none."""
    return [figure(page.name, name, CAPTIONS[name]) for name in CAPTIONS if name.partition("+")[0] == page.name]


def figure(page: str, name: str, shown: Mapping[str, str]) -> str:
    """Return the figure of one example, or why there is none.

    Args:
        page: the name of its page.
        name: that of its file, before the ending.
        shown: its caption.
    """
    command = f"`{shown['command']}`"
    if "missing" in shown:
        return f"There is no picture of `{page}` at work: {shown['missing']} ({command})."
    score = "exactly" if shown["psnr"] == "inf" else f"{shown['psnr']} dB"
    parts = f"the private image; {shown['middle']}; what `{shown['made']}` rebuilt, {score}"
    address = f"../../../{STRIPS}/{file_name(name)}.png"
    source = "From the results of {doc}`the benchmark </generated/benchmark/index>`." if "kept" in shown else command
    about = f"{shown['about']} " if "about" in shown else ""
    text = f"{about}Left to right: {parts}. {source}"
    return f":::{{figure}} {address}\n:class: strip\n:alt: {parts}\n\n{text}\n:::"


def pages(source: Path) -> Iterator[tuple[str, str]]:
    """Yield the path of each page below the folder, and its text."""
    kinds = known()
    for kind in INTRODUCTIONS:
        found = [explain(name) for name, each in kinds.items() if each == kind]
        yield f"{kind}s/index.md", index(kind, found)
        for page in found:
            yield f"{kind}s/{file_name(page.name)}.md", markdown(page) + studies(page)
    yield "flags.md", flags()
    yield "references.md", bibliography()
    yield "references.bib", "\n\n".join(entry.bibtex for entry in references().values()) + "\n"
    yield "not-run.md", left_out(source)
    yield "updates.inc", updates.page()
    yield from benchmark()
    yield "commands/index.md", group_page()
    for name, command in cli.commands.items():
        yield f"commands/{name}.md", command_page(("privlab", name), command)
    for room in ROOMS:
        shown = f"```{{eval-rst}}\n.. automodule:: {room}\n\n{members(room)}```\n"
        yield f"api/{room}.md", f"# `{room}`\n\n{shared_lines(room)}{shown}"
    yield "api/index.md", api_index()


def shared_lines(room: str) -> str:
    """Return what the examples on the page of a package share, below their heading; "" if it has no such example."""
    if not any(name.rpartition(".")[0] == room for name in examples()):
        return ""
    return f"The examples of classes on this page begin with these lines:\n\n```pycon\n{shared()}\n```\n\n"


def api_index() -> str:
    """Return the page that lists the packages in their sections, each with its first sentence."""
    parts = ["# Python API", "{doc}`/reference/functions` shows an example of each function that most readers need."]
    for title, rooms in SECTIONS.items():
        about = {room: cell((import_module(room).__doc__ or "").split("\n\n")[0]) for room in rooms}
        rows = (f"| [`{room}`]({room}.md) | {text} |" for room, text in about.items())
        parts += [f"## {title}", "\n".join(("| package | what it has |", "|---|---|", *rows))]
    return "\n\n".join([*parts, toctree(ROOMS, hidden=True)])


def benchmark() -> Iterator[tuple[str, str]]:
    """Yield the page of the benchmark and its feeds, made from the result files of the package."""
    files = site_files(entries())
    table = files.pop("table.html")
    links = "{download}`feed.json`" + "".join(f", {{download}}`{name}`" for name in files if name != "feed.json")
    yield (
        "benchmark/index.md",
        "---\nhide-toc: true\n---\n# Benchmark\n\nDefenses of Vision Transformers, ranked by the mean of the best "
        "attack over photographs and draws; less is better. The worst draw of each photograph counts only in the worst "
        "case. Click a line to open its details, and the head of a column to sort by "
        "it.\n\n- {doc}`/how-to/benchmark`\n- {doc}`/studies/benchmark`\n- {doc}`/studies/decibels`\n\n```{raw} html\n"
        f"{table}\n```\n\n## Feeds\n\nThe rows as JSON, and each entry as a record of Every Eval Ever: {links}.\n",
    )
    yield from ((f"benchmark/{name}", text) for name, text in files.items())


def members(room: str) -> str:
    """Return the directives of what autodoc leaves out: values, and what `privlab` imports on use."""
    functions = "" if room != "privlab" else "".join(interface())
    values = [
        f".. autodata:: {each.module}.{each.name}\n   :no-value:\n\n" for each in public_names(room) if each.is_value
    ]
    return "".join((functions, *values))


def interface() -> Iterator[str]:
    """Yield the directives of the names of `privlab`: its functions, and its classes, whose entry is in their room."""
    for name in privlab.__all__:
        if isinstance(getattr(privlab, name), type):
            yield f".. autoclass:: privlab.{name}\n   :no-index:\n   :no-members:\n\n"
        elif not name.startswith("_"):
            yield f".. autofunction:: privlab.{name}\n\n"


def left_out(source: Path) -> str:
    """Return the page that lists each block of code that no test runs, with its reason."""
    rows = [
        f"| [{path.relative_to(source)}](/{path.relative_to(source)}) | {cell(reason)} | `{cell(code)}` |"
        for path in sorted(source.rglob("*.md"))
        if FOLDER not in path.parts and "_build" not in path.parts
        for reason, code in not_run(path.read_text("utf-8"))
    ]
    table = "\n".join(("| page | why | what |", "|---|---|---|", *rows))
    return (
        "# Code that is not run\n\nThe tests or the build of this site run every other block of code in the README and "
        f"on these pages. The options of these commands are checked.\n\n{table}\n"
    )


def index(kind: str, found: Sequence[Explanation]) -> str:
    """Return the page that lists all of a kind."""
    rows = [f"| [`{page.name}`]({file_name(page.name)}.md) | {cell(page.idea)} |" for page in found]
    table = "\n".join((f"| {kind} | what it does |", "|---|---|", *rows))
    links = toctree([file_name(page.name) for page in found], hidden=True)
    return f"# {kind.capitalize()}s\n\n{INTRODUCTIONS[kind]}\n\n{table}\n\n{links}"


def studies(page: Explanation) -> str:
    """Return the links to the studies that hold measured figures of a page's subject."""
    links = [f"- {{doc}}`/studies/{stem}`" for stem in page.studies]
    return "\n## Studies\n\nMeasured figures, with their commands:\n\n" + "\n".join(links) + "\n" if links else ""


def flags() -> str:
    """Return the table of red flags."""
    rows = "\n".join(f"| {name} | {cell(meaning)} |" for name, meaning in FLAG_MEANINGS.items())
    return (
        "# Red flags\n\nA red flag weakens a verdict. Flags stand under every table, in `--json` and on the page of a "
        "run. They compare attacks by PSNR if it was measured.\n\n"
        f"| flag | when it is raised |\n|---|---|\n{rows}\n"
    )


def bibliography() -> str:
    """Return the page with all papers, and who comes from each."""
    parts = [
        "# Papers to cite\n\nCite privlab by its `CITATION.cff` (*privlab: privacy and gradient-inversion evaluation "
        "of Vision Transformers*, with the version), and the papers of the attacks, defenses and metrics that you ran. "
        "{download}`references.bib` holds the BibTeX of all; `privlab explain NAME` prints that of one."
    ]
    for key, entry in references().items():
        users = [name for name, kind in known().items() if kind != "flag" and key in docstrings(name)[0].papers]
        links = ", ".join(f"[`{name}`]({known()[name]}s/{file_name(name)}.md)" for name in users)
        parts.append(f"## {entry.fields['title']}\n\n{escape(str(entry))} Of {links}.\n\n```text\n{entry.bibtex}\n```")
    return "\n\n".join(parts) + "\n"


def group_page() -> str:
    """Return the page that lists all commands."""
    rows = [f"| [`privlab {name}`]({name}.md) | {cell(first_line(each))} |" for name, each in cli.commands.items()]
    table = "\n".join(("| command | what it does |", "|---|---|", *rows))
    return f"# Command line\n\n{first_line(cli)}\n\n{table}\n\n{toctree(cli.commands, hidden=True)}"


def command_page(words: tuple[str, ...], command: click.Command, level: int = 1) -> str:
    """Return what there is to know of a command: its help, its usage, its options and examples."""
    context = command.context_class(command, info_name=" ".join(words), show_default=True)
    parts = [f"{'#' * level} `{' '.join(words)}`", escape((command.help or "").replace("\b\n", ""))]
    parts.append(f"```text\n{command.get_usage(context)}\n```")
    parts += [option_table(title, options, context) for title, options in option_groups(command)]
    if lines := EXAMPLES.get(" ".join(words[1:])):
        parts.append("Examples:\n\n```text\n" + "\n".join(lines) + "\n```")
    if isinstance(command, click.Group):
        parts += [command_page((*words, name), each, level + 1) for name, each in command.commands.items()]
    return "\n\n".join(parts) + "\n"


def option_groups(command: click.Command) -> Iterator[tuple[str, list[click.Option]]]:
    """Yield the titled groups of a command's options, and last those without a title."""
    groups: dict[str, list[click.Option]] = {}
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            group = getattr(option, "group", None)
            groups.setdefault("" if group is None else group.title, []).append(option)
    untitled = groups.pop("", [])
    yield from groups.items()
    if untitled:
        yield "Other options" if groups else "Options", untitled


def option_table(title: str, options: Sequence[click.Option], context: click.Context) -> str:
    """Return a table of options and their meanings, below their title."""
    records = filter(None, (option.get_help_record(context) for option in options))
    rows = [f"| `{in_table(names)}` | {cell(text)} |" for names, text in records]
    return "\n".join((f"| {title.lower()} | meaning |", "|---|---|", *rows))


def first_line(command: click.Command) -> str:
    """Return the first sentence of a command's help."""
    return " ".join((command.help or "").split("\n\n")[0].split())


def escape(text: str) -> str:
    """Return a text whose angle brackets and stars Markdown leaves as they are."""
    return text.replace("<", "\\<").replace("*", "\\*").replace("[", "\\[")


def cell(text: str) -> str:
    """Return a text for a cell of a table."""
    return escape(" ".join(text.split())).replace("|", "\\|")


def in_table(code: str) -> str:
    """Return code for a cell of a table, which a bar would end."""
    return code.replace("|", "\\|")


def file_name(name: str) -> str:
    """Return the name of a page's file."""
    return name.replace(":", "-")


def toctree(names: Iterable[str], *, hidden: bool = False) -> str:
    """Return a table of contents."""
    option = ":hidden:\n" if hidden else ""
    return f"```{{toctree}}\n:maxdepth: 1\n{option}\n" + "\n".join(names) + "\n```\n"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-docstring", plain_text, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", add_example, priority=410)
    app.connect("autodoc-process-signature", plain_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def plain_text(_app: Sphinx, _what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Escape what our docstrings mean literally and reStructuredText does not: |x|, a trailing _, and stars."""
    for i, line in enumerate(lines):
        parts = line.split("`")
        parts[::2] = [part.replace("|", "\\|").replace("*", "\\*").replace("_ ", "\\_ ") for part in parts[::2]]
        lines[i] = "`".join(parts)


def add_example(_app: Sphinx, _what: str, name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Add the example of a class that has one in `class_examples`."""
    if example := examples().get(name):
        lines += ["", "Example:", *(f"    {line}" for line in example.splitlines()), ""]


def plain_signature(  # Sphinx calls it so
    _app: Sphinx, _what: str, _name: str, _obj: object, _options: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Return a signature without the checks of options: `Annotated[int, …]` becomes `int`; "Args" has the range."""
    checked = r"(?:~?typing\.)?Annotated\[(\w+), ~?privlab\.base\.options\._Range\(.*?\)\]"
    return signature and re.sub(checked, r"\1", signature), returned
