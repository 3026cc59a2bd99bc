"""`privlab identify` on the pictures of small runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

RUN = ("--attack", "patch-gradient", "--setting", "a", "--strips", "--public", "samples", "--quiet")


@pytest.fixture
def people(picture: Callable[..., Path], tmp_path: Path) -> Path:
    """Return a folder for each of three people, of two pictures each."""
    for person in "abc":
        for number in "12":
            picture(f"people/{person}/{person}{number}.png")
    return tmp_path / "people"


@pytest.fixture
def run(attack: Callable[..., Any], people: Path, tmp_path: Path) -> Path:
    """Return a run whose reconstructions are exact, of the first picture of each person."""
    attack("--images", people, "--limit", "3", *RUN)
    return tmp_path / "run"


def rows_of(told: Any, **wanted: object) -> list[dict[str, Any]]:
    """Return the rows of identity with these values."""
    return [row for row in json.loads(told.out)["identity"] if wanted.items() <= row.items()]


@pytest.mark.slow
def test_exact_reconstructions_are_found_and_one_colour_is_at_chance(
    cli: Callable[..., Any], run: Path, people: Path
) -> None:
    told = cli("identify", run, "--candidates", people, "--among", "2,6", "--json")
    assert told.status == 0
    controls = {f"control:{name}" for name in ("flat", "mean", "other", "shuffled")}
    assert {row["attack"] for row in json.loads(told.out)["identity"]} >= controls
    for features in ("low pass", "pixels", "squeezenet"):
        for n in (2, 6):
            (row,) = rows_of(told, attack="patch-gradient", features=features, n=n)
            assert (row["rank_1"], row["reciprocal_rank"], row["images"], row["attacked"]) == (1, 1, 3, 3)
            assert row["chance"] == 1 / n
            assert row["low"] == pytest.approx(0.025 ** (1 / 3))  # Clopper-Pearson, 3 of 3
            (flat,) = rows_of(told, attack="control:flat", features=features, n=n)
            assert features == "squeezenet" or flat["rank_1"] == pytest.approx(1 / n)
    (mean,) = rows_of(told, attack="control:mean", features="low pass", n=6)
    assert mean["rank_1"] == 0  # made of the five others, it is nearer to them
    table = cli("identify", run, "--candidates", people).out
    assert "patch-gradient" in table
    assert "control:shuffled" in table


@pytest.mark.slow
def test_a_release_is_found_although_its_pictures_are_none(
    cli: Callable[..., Any], attack: Callable[..., Any], people: Path, tmp_path: Path
) -> None:
    noisy = ("--defense", "gradient-noise", "--set", "multiplier=0.05", "--setting", "c", "--labels", "predicted")
    out = tmp_path / "noisy"
    attack("--images", people, "--limit", "3", "--attack", "patch-gradient", *noisy, "--no-strips", "--out", out)
    asked = ("identify", out, "--candidates", people, "--compare", "releases")
    assert "keeps no pictures" in cli(*asked[:4]).err
    told = cli(*asked, "--among", "2,6", "--json")
    for features in ("release", "release, signs"):
        (row,) = rows_of(told, attack="release", features=features, n=6)
        assert (row["rank_1"], row["images"], row["psnr"], row["chance"]) == (1, 3, None, 1 / 6)
        (other,) = rows_of(told, attack="control:other", features=features, n=6)
        assert other["rank_1"] == 0  # the release is that of another image, which is found
        assert rows_of(told, attack="control:flat", features=features, n=2)
    assert "—" in cli(*asked).out
    by_class = json.loads(cli(*asked, "--by", "class", "--json").out)["identity"]
    assert {row["n"] for row in by_class} == {3}
    assert "Give --candidates" in cli("identify", out, "--compare", "releases").err
    judged = cli(*asked, "--classifier", "cifar_vit")
    assert (judged.status, judged.err.count("\n")) == (2, 1)
    assert "look at pictures. Leave them out" in judged.err
    rows = tmp_path / "rows"
    attack("--images", people, "--limit", "3", "--release", "features", "--attack", "least-squares", "--out", rows)
    sent = cli("identify", rows, "--candidates", people, "--compare", "releases")
    assert (sent.status, sent.out) == (2, "")
    assert "features are released" in sent.err


@pytest.mark.slow
def test_a_person_is_sought_among_people_by_other_pictures(
    cli: Callable[..., Any], run: Path, people: Path, picture: Callable[..., Path]
) -> None:
    for person in "abc":  # the other picture becomes a copy with one pixel changed: another file of the same person
        copy = Image.open(people / person / f"{person}1.png")
        copy.putpixel((0, 0), (0, 0, 0))
        copy.save(people / person / f"{person}2.png")
    told = cli("identify", run, "--candidates", people, "--by", "class", "--json")
    for features in ("low pass", "squeezenet"):
        (row,) = rows_of(told, attack="patch-gradient", features=features)
        assert (row["n"], row["rank_1"], row["chance"]) == (3, 1, 1 / 3)
    picture("people/a/a3.png")
    shutil.rmtree(people / "c")
    assert "Every private image must be among the 5 candidates" in cli("identify", run, "--candidates", people).err


@pytest.mark.slow
def test_the_class_is_what_another_classifier_says(
    cli: Callable[..., Any], attack: Callable[..., Any], tmp_path: Path
) -> None:
    images = ("--images", "samples", "--limit", "2", "--model", "cifar_vit", "--weights", "auto", "--img-size", "32")
    out = tmp_path / "run"
    attack(*images, *RUN)
    told = json.loads(cli("identify", out, "--classifier", "cifar_vit_mjp", "--json").out)
    assert told["identity"] == []
    rows = {row["attack"]: row for row in told["class"]}
    assert rows["patch-gradient"]["agreement"] == 1
    assert set(rows) == {"patch-gradient", *(f"control:{name}" for name in ("mean", "other", "shuffled", "flat"))}
    same = cli("identify", out, "--classifier", "cifar_vit")
    assert (same.status, same.err.count("\n")) == (2, 1)
    assert "another network than the attacked one. Found cifar_vit for both" in same.err


@pytest.mark.slow
def test_what_cannot_be_told_is_one_line(
    cli: Callable[..., Any], attack: Callable[..., Any], run: Path, people: Path, picture: Callable[..., Path]
) -> None:
    def error(*arguments: object) -> str:
        done = cli("identify", *arguments)
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        return done.err

    assert "Give --candidates, --classifier, or both" in error(run)
    assert "among the 2 candidates, as the same file. 'a/a1.png' is not" in error(run, "--candidates", people / "b")
    assert "n must be from 2 to the number of identities, 6. Found 7" in error(
        run, "--candidates", people, "--among", "7"
    )
    assert "whole numbers. Found 2.5" in error(run, "--candidates", people, "--among", "2.5")
    flat = people.parent / "flat"
    flat.mkdir()
    for file in people.glob("*/*.png"):
        shutil.copy(file, flat)
    assert "needs candidates with classes" in error(run, "--candidates", flat, "--by", "class")
    for strip in (run / "strips").glob("*.png"):
        whole = strip.read_bytes()
        strip.write_bytes(whole[: len(whole) // 2])
    assert "cannot be read" in error(run, "--candidates", people)
    shutil.rmtree(run / "strips")
    assert "keeps no pictures of reconstructions: run it with --strips" in error(run, "--candidates", people)
    alone = picture("alone.png")
    attack("--images", alone, *RUN, "--out", people.parent / "one")
    assert "two images or more. Found 1" in error(people.parent / "one", "--candidates", alone)
