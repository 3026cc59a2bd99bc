"""What a card claims of ε and of its key is compared with what the defense declares."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from privlab.base import PrivlabError
from privlab.benchmark.cards import Card, parse_card, read_card
from privlab.benchmark.page import fragment
from privlab.benchmark.results import PACKAGE, read_result
from privlab.benchmark.rule import standings
from privlab.benchmark.submit import check_claims, derived_bits, draws_nothing
from privlab.defenses import BlockScrambling, Jigsaw, Mjp, RowPermutation
from privlab.threat import Draws, Sent
from privlab.victims import victim

MODEL = victim("cifar_vit").model
"""64 patches of 48 values, one class token, 128 columns."""


def changed(name: str, **values: object) -> Card:
    """Return a card of the package that states other values."""
    text = (PACKAGE / "cards" / f"{name}.toml").read_text("utf-8")
    head, rest = text.split("\n\n", 1)
    lines = [line for line in head.splitlines() if line.partition(" =")[0] not in values]
    stated = [f"{key} = {value}" for key, value in values.items()]
    return parse_card("\n".join([*stated, *lines, rest]), Path("card"))


@pytest.mark.filterwarnings("ignore:vit_ti has RANDOM weights")
@pytest.mark.parametrize("path", sorted(PACKAGE.glob("cards/*.toml")), ids=lambda path: path.stem)
def test_no_card_of_the_package_claims_more_than_its_class_has(path: Path) -> None:
    card = read_card(path)
    if isinstance(card.epsilon, float):
        pytest.importorskip("opacus")
    if card.kind == "defense":
        check_claims(card, "random" if card.victim_name == "vit_ti" else "auto")  # its shapes decide
        assert not card.stated_alone


@pytest.mark.parametrize(
    ("name", "bits", "found"),
    [
        ("weights-key-paper", 99999, "122.2"),
        ("weights-key-full", 20200, "20000.4"),
        ("weights-arrow-cloak", 62000, "61072.4"),
        ("features-row-permutation", 304, "302.0"),
        ("features-noise-rows", 304, "302.0"),
        ("features-column-permutation", 720, "716.2"),
        ("features-batch-shuffle", 1716.1, "1684.0"),
        ("gradients-block-scrambling", 502, "498.9"),
        ("gradients-mjp", 49, "48.3"),
        ("gradients-pruning", 1, "0.0"),
        ("gradients-dp-sgd", 1, "0.0"),
        ("local-training-mjp", 49, "48.3"),
    ],
)
def test_a_card_that_claims_more_bits_than_there_are_keys_is_refused(name: str, bits: float, found: str) -> None:
    epsilon = {"epsilon": '"none"'} if name == "gradients-dp-sgd" else {}
    with pytest.raises(PrivlabError, match=rf"secret_bits says {bits:g}, and '.*' draws from keys of {found} bits"):
        check_claims(changed(name, secret_bits=bits, **epsilon), "auto")
    check_claims(changed(name, secret_bits=0, **epsilon), "auto")


def test_epsilon_must_be_what_the_noise_gives() -> None:
    pytest.importorskip("opacus")
    said = r"epsilon says 0\.001, and multiplier = 1 with releases = 1 gives 10\.73 at delta = 1e-05 \(replace-one\)"
    with pytest.raises(PrivlabError, match=said):
        check_claims(changed("gradients-dp-sgd", epsilon=0.001), "auto")
    with pytest.raises(PrivlabError, match="epsilon says 10"):  # more than a rounding away
        check_claims(changed("gradients-dp-sgd", epsilon=10.6), "auto")
    check_claims(changed("gradients-dp-sgd", epsilon=10.725), "auto")
    check_claims(changed("gradients-dp-sgd", epsilon='"none"'), "auto")


@pytest.mark.parametrize("name", ["gradients-pruning", "features-blur", "updates-quantisation", "gradients-undefended"])
def test_what_draws_nothing_has_no_finite_epsilon(name: str) -> None:
    with pytest.raises(PrivlabError, match=r"3.*'.*'.*whatever"):
        check_claims(changed(name, epsilon=3), "auto")


def test_a_key_adds_no_noise() -> None:
    with pytest.raises(PrivlabError, match=r"0\.001"):
        check_claims(changed("weights-key-paper", epsilon=0.001), "auto")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"epsilon": 0}, 'epsilon must be finite and above 0, or "none". Found 0'),
        ({"epsilon": "inf"}, 'epsilon must be a finite number or "none". Found inf'),
        ({"secret_bits": -1}, "secret_bits must be finite and at least 0. Found -1"),
        ({"secret_bits": "inf"}, "secret_bits must be a finite number. Found inf"),
        ({"secret_bits": "1" + "0" * 400}, "secret_bits must be a finite number"),
    ],
)
def test_numbers_that_say_nothing_are_refused(value: dict[str, Any], said: str) -> None:
    with pytest.raises(PrivlabError, match=said):
        check_claims(changed("gradients-mjp", **value), "auto")


@pytest.mark.slow
def test_the_page_says_what_the_card_alone_states() -> None:
    (row,) = standings([read_result(PACKAGE / "results/gradients-mjp.json")])
    own = {**row.result.data, "card": 'plugin = "my.py"\n' + row.result.data["card"]}
    for result, said in ((row.result, False), (replace(row.result, data=own), True)):
        page = fragment([replace(row, result=result)])
        assert "secret bits: 48.3" in page
        assert ("secret bits: 48.3 (stated by the card)" in page) == said


def test_what_nothing_derives_is_stated_by_the_card() -> None:
    svt = changed("gradients-svt", epsilon=1.5)
    assert svt.stated_alone == {"epsilon"}
    check_claims(svt, "auto")
    assert changed("gradients-mjp", plugin='"my.py"').stated_alone == {"secret_bits"}
    assert not changed("gradients-dp-sgd", epsilon=10.73).stated_alone


@dataclass(frozen=True)
class Own:
    """A defense of another package that does nothing and declares nothing."""

    name: ClassVar[str] = "own"
    paper: ClassVar[str] = "none"

    def send(self, sent: Sent, draws: Draws) -> Sent:
        """Return what is given."""
        return sent


def test_a_plugin_without_a_declaration_has_no_derived_bits() -> None:
    assert derived_bits([Own()], MODEL, 1) is None
    assert derived_bits([Own(), RowPermutation()], MODEL, 1) is None
    assert draws_nothing(Own(), MODEL)


def log2_factorial(n: int) -> float:
    return math.log2(math.factorial(n))


@pytest.mark.parametrize(
    ("part", "bits"),
    [
        (RowPermutation(class_token=False), log2_factorial(64)),
        (RowPermutation(per="image"), 4 * log2_factorial(65)),
        (BlockScrambling(blocks=0.5, pixels=0.0), math.log2(math.perm(64, 32))),
        (BlockScrambling(blocks=0.0, pixels=0.0, invert=True), math.log2(math.comb(48, 24))),
        (Jigsaw(gamma=0.25), math.log2(math.perm(64, 16))),
        (Jigsaw(gamma=1.0, per="image"), 4 * log2_factorial(64)),
        (Mjp(gamma=0.25), log2_factorial(16)),
        (Mjp(gamma=0.25, masked_pe="slot"), math.log2(math.perm(64, 16))),
    ],
)
def test_the_bits_of_a_key_are_counted(part: Any, bits: float) -> None:
    assert derived_bits([part], MODEL, 4) == pytest.approx(bits, rel=1e-9)
