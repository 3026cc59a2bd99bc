"""Every public name has a docstring, and an entry on its room's page of the site; examples in docstrings run."""

import doctest
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import privlab
from privlab.inventory.explain import explain

EXTENSIONS = str(Path(__file__).parents[2] / "docs/_ext")


@pytest.fixture
def extensions(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    """Return the module that makes pages, and the one that lists names."""
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(EXTENSIONS)
    yield import_module("generated_pages"), import_module("public_names")
    for path in Path(EXTENSIONS).glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower and NVFlare import
def test_every_public_name_is_documented(extensions: tuple[ModuleType, ModuleType]) -> None:
    pages, names = extensions
    for room in pages.ROOMS:
        for each in names.public_names(room):
            assert each.doc.strip(), f"{room}.{each.name} of {each.module} has no docstring"
            assert not each.is_value or f".. autodata:: {each.module}.{each.name}\n" in pages.members(room)


def test_a_value_is_found_in_the_module_that_defines_it(extensions: tuple[ModuleType, ModuleType]) -> None:
    found = {each.name: each for each in extensions[1].public_names("privlab.metrics")}
    assert (found["METRICS"].is_value, found["METRICS"].module) == (True, "privlab.metrics.registry")
    assert "by name" in found["METRICS"].doc
    assert (found["psnr"].is_value, found["psnr"].module) == (False, "privlab.metrics.formulas")
    assert extensions[1].of_value("privlab.metrics.registry", "NONE") == ""


PACKAGES = sorted(path.parent.name for path in (Path(__file__).parents[2] / "privlab").glob("*/__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_has_a_page_or_is_for_the_command_line(
    extensions: tuple[ModuleType, ModuleType], package: str
) -> None:
    stems = {room.split(".")[1] for room in extensions[0].ROOMS if "." in room}
    assert package in stems | {"cli", "benchmarks", "experiments", "api"}  # api is the page of privlab itself


@pytest.mark.parametrize("name", ["mjp-full", "jigsaw", "psnr", "Few images"])
def test_a_page_begins_with_its_name_and_its_idea(extensions: tuple[ModuleType, ModuleType], name: str) -> None:
    page = explain(name)
    text = extensions[0].markdown(page)
    assert text.startswith(f"# `{name}`\n\n{page.idea}\n")
    assert all(f"\n## {title}\n\n{said}" in text for title, said in page.sections.items())
    assert not page.flow or extensions[0].drawing(page.name, page.flow) in text


CLASSES = [name for name in privlab.__all__ if isinstance(getattr(privlab, name), type)]
FINDER = doctest.DocTestFinder(recurse=False)
EXAMPLES = {name: FINDER.find(getattr(privlab, name), name) for name in privlab.__all__ if not name.startswith("_")}


def test_every_class_of_the_interface_has_an_example() -> None:
    assert [name for name in CLASSES if not EXAMPLES[name][0].examples] == []


@pytest.mark.parametrize("name", [name for name, found in EXAMPLES.items() if any(each.examples for each in found)])
def test_the_example_of_a_docstring_prints_what_it_says(name: str) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for example in EXAMPLES[name]:
        assert runner.run(example).failed == 0


def _shared_names(extension: ModuleType) -> dict[str, object]:
    """Return what the lines define that the examples of the site share."""
    names: dict[str, object] = {}
    exec("\n".join(line.removeprefix(">>> ") for line in extension.shared().splitlines()), names)
    return names


def _complaints(extension: ModuleType, name: str, names: dict[str, object]) -> str:
    """Return what doctest complains of in the example of a class."""
    test = doctest.DocTestParser().get_doctest(extension.examples()[name], dict(names), name, None, None)
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False).run(test, out=said.append)
    return "".join(said)


def _skip_without_integrations() -> None:
    """Skip a test of classes that need the libraries of federations and of training."""
    for library in ("flwr", "nvflare", "lightning", "transformers"):
        pytest.importorskip(library)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower and NVFlare import
def test_every_public_class_has_an_example_and_every_example_a_class(extensions: tuple[ModuleType, ModuleType]) -> None:
    _skip_without_integrations()
    pages, names = extensions
    found = import_module("class_examples").examples()
    for room in pages.ROOMS:
        for each in names.public_names(room):
            if isinstance(getattr(import_module(room), each.name), type) and not each.is_value:
                assert f"{room}.{each.name}" in found or ">>>" in each.doc, f"{room}.{each.name} has no example"
    for name in found:
        room, _, last = name.rpartition(".")
        assert isinstance(getattr(import_module(room), last), type), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::privlab.base.PrivlabWarning")
def test_examples_of_the_pages_of_the_api_print_what_they_say(extensions: tuple[ModuleType, ModuleType]) -> None:
    _skip_without_integrations()
    pytest.importorskip("opacus")
    extension = import_module("class_examples")
    names = _shared_names(extension)
    assert "".join(_complaints(extension, name, names) for name in extension.examples()) == ""
