"""The light tables of names are those of what they name, and a table loads a part only where it is looked up."""

from importlib.metadata import EntryPoint

import pytest

from privlab.attacks import ATTACKS
from privlab.base import PrivlabError, Registry, unknown_name, with_plugins
from privlab.base import plugins as registry
from privlab.defenses import DEFENSES
from privlab.evaluation import check_names, known_names
from privlab.metrics import METRICS
from privlab.metrics.names import METRIC_NAMES


def test_names_are_the_keys_of_what_they_name() -> None:
    assert [*METRIC_NAMES] == [name for name in METRICS if name not in METRICS.added]
    assert len([name for name in ATTACKS if name.startswith("breaching:")]) == 14
    for table in (ATTACKS, DEFENSES):
        assert {name: kind.name for name, kind in table.items()} == {name: name for name in table}


def test_a_table_loads_nothing_before_it_is_looked_up() -> None:
    places = {"here": "math:pi", "gone": "nowhere_at_all:X", "held": "os:environ"}
    table: Registry[object] = Registry({name: EntryPoint(name, place, "") for name, place in places.items()})
    assert [*table] == ["here", "gone", "held"]
    assert (len(table), "gone" in table, "absent" in table) == (3, True, False)
    assert table["here"] == pytest.approx(3.14159, abs=1e-5)
    with pytest.raises(ModuleNotFoundError):
        table["gone"]
    with pytest.raises(KeyError):
        table["absent"]
    table["gone"] = "put"
    del table["held"]
    assert dict(table) == {"here": table["here"], "gone": "put"}


def test_ours_win_where_a_plugin_has_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint(name, f"math:{value}", "some.group") for name, value in (("a", "pi"), ("b", "tau"))]
    monkeypatch.setattr(registry, "installed_plugins", lambda group: points if group == "some.group" else [])
    for ours in ({"b": 2.0, "c": 3.0}, Registry({"b": 2.0, "c": 3.0})):
        assert dict(with_plugins(ours, "some.group")) == {"a": pytest.approx(3.14159, abs=1e-5), "b": 2.0, "c": 3.0}
        assert dict(with_plugins(ours, "another")) == {"b": 2.0, "c": 3.0}
        assert dict(ours) == {"b": 2.0, "c": 3.0}


def test_an_error_lists_each_name_once() -> None:
    assert str(unknown_name("option", "setings", ["settings", "seed", "settings"])).count("settings") == 1


@pytest.mark.parametrize(
    ("kind", "names", "message"),
    [
        ("defense", ["mjp", "auto"], "Unknown defense 'auto'"),
        ("defense", ["auto"], None),
        ("attack", ["worst-case"], None),
        ("attack", ["april", "worst-case"], "Found april,worst-case"),
        ("setting", ["a", "e"], "Unknown setting 'e'. Choose from: a, b, c."),
        ("release", ["auto", "feature"], "Unknown release 'feature'. Did you mean features"),
        ("metric", ["psnr", "levels_wrong"], "'levels_wrong' is always recorded"),
        ("metric", ["psnr", "level_wrong"], "Unknown metric 'level_wrong'"),
        ("block", ["aprl"], "Unknown block 'aprl'. Did you mean april"),
    ],
)
def test_each_kind_has_its_names(kind: str, names: list[str], message: str | None) -> None:
    if message is None:
        check_names(kind, names)
        assert set(names) <= {*known_names(kind)}
        return
    with pytest.raises(PrivlabError, match=message.replace("?", "")):
        check_names(kind, names)
