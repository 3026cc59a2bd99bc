"""Learned model inversion: decoders that learn, are reused by hash, and heed or ignore the order of the rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.attacks.decoders import DECODERS, Decoder, Shape, make_release
from privlab.attacks.decoders.networks import Whitening
from privlab.attacks.features.learned_inversion import (
    Inversion,
    InversionConv,
    InversionMae,
    InversionSet,
    InversionToken,
)
from privlab.base import PrivlabError, PrivlabWarning
from privlab.defenses import BatchShuffle, ColumnPermutation, GaussianNoise, Jigsaw, LowPass, RowPermutation
from privlab.metrics import placement_accuracy, psnr
from privlab.patches import patchify
from privlab.release import effects_of, observe_features, send
from privlab.threat import Capability, Draws, FeatureObservation, Sent, Stack, check_capabilities
from privlab.training import TrainingProgress, listening
from privlab.victims import VictimModel, cache_folder

Make = Callable[..., VictimModel]
Photographs = Callable[[int, int], Tensor]
Parts = tuple
AnyInversion = InversionConv | InversionMae | InversionSet | InversionToken


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIVLAB_CACHE", str(tmp_path))
    return tmp_path / "decoders"


def seen_of(
    model: VictimModel, images: Tensor, public: Tensor, defense: Parts = (), seed: int = 0
) -> tuple[FeatureObservation, Sent]:
    stack, generators = Stack(defense), [Generator().manual_seed(seed + i) for i in range(len(images) + 2)]
    draws = Draws(images=generators[2:], batch=generators[0], model=generators[1])
    sent = send(model, stack.feed(images, model.patch, draws.images), stack, draws)
    return observe_features(model, sent, stack, public), sent


def public_side(model: VictimModel, defense: Parts, public: Tensor, cut_layer: int = 0) -> FeatureObservation:
    """Return a release of which all but the features counts."""
    return FeatureObservation(model, torch.zeros(0, 1, 1), defense, public, frozenset(), cut_layer)


# What the adversary makes itself


@pytest.mark.parametrize("defense", [(), (RowPermutation(),), (RowPermutation("image"), BatchShuffle())])
def test_releases_are_those_of_a_client(tiny_model: Make, crops: Tensor, defense: Parts) -> None:
    """Each row is the token that `source` names."""
    model, images = tiny_model(), crops[:4].double()
    seen = make_release(model, defense, images, Generator().manual_seed(1))
    tokens = model.embed(images).flatten(0, 1).float()
    assert_close(seen.features.flatten(0, 1), tokens[seen.source.flatten()])
    assert_close(seen.images.double(), images, atol=1e-6, rtol=0)


def test_releases_have_draws_of_their_own(tiny_model: Make, crops: Tensor) -> None:
    """New ones for every release, the same ones for the same generator."""
    model, images = tiny_model(), crops[:2].double()
    for defense in ((RowPermutation(),), (ColumnPermutation(),), (GaussianNoise(),)):
        one, same, other = (
            make_release(model, defense, images, Generator().manual_seed(seed)).features for seed in (1, 1, 2)
        )
        assert torch.equal(one, same)
        assert not torch.equal(one, other)


def test_releases_say_what_was_fed_where(tiny_model: Make, crops: Tensor) -> None:
    """Under a jigsaw the patches' places are those of the feed; under a low pass their content is the private one."""
    model, images = tiny_model(unknown=False), crops[:2].double()
    jigsaw = make_release(model, (Jigsaw(gamma=0.5),), images, Generator().manual_seed(1))
    assert not torch.equal(jigsaw.fed, jigsaw.images)
    assert_close(jigsaw.features[:, 1:].double(), model.embed(jigsaw.fed.double())[:, 1:], atol=1e-5, rtol=1e-5)
    smooth = make_release(model, (LowPass(0.1),), images, Generator().manual_seed(1))
    assert torch.equal(smooth.fed, smooth.images)


@pytest.mark.parametrize(
    ("defense", "order"),
    [
        ((), "kept"),
        ((GaussianNoise(), LowPass()), "kept"),
        ((ColumnPermutation(),), "kept"),
        ((RowPermutation(),), "shared"),
        ((RowPermutation("image"),), "own"),
        ((BatchShuffle(),), "mixed"),
    ],
)
def test_the_adversary_knows_what_a_defense_does_to_places(tiny_model: Make, defense: Parts, order: str) -> None:
    assert effects_of(tiny_model(), defense).rows == order


# Decoders


def attack_of(kind: str, steps: int = 80, **changed: object) -> AnyInversion:
    """Return the attack with a small decoder of this kind."""
    (attack,) = (each for each in ATTACKS if each.kind == kind)
    return attack(width=64, depth=1, steps=steps, **changed)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "steps", "falls_to", "of_mean"),
    [("mae", 80, 0.1, 0.03), ("conv", 80, 0.15, 0.05), ("set", 160, 0.5, 0.2), ("token", 80, 0.4, 0.03)],
)
def test_a_decoder_learns(
    tiny_model: Make, crops: Tensor, kind: str, steps: int, falls_to: float, of_mean: float
) -> None:
    """Its loss falls, and images that it never saw come back with a small part of the public mean's error.

    It is trained as its attack trains it, but for its size and the number of steps.
    """
    model, seen = tiny_model(), list[TrainingProgress]()
    private, public = crops[:64], crops[64:]
    with listening(seen.append):
        decoder = attack_of(kind, steps).trained(public_side(model, (), public))
    assert seen[-1].loss < falls_to * seen[0].loss
    with torch.no_grad():
        images, _ = decoder.reconstruct(make_release(model, (), private.double(), Generator()).features, "kept")
    assert (images - private).square().mean() < of_mean * (public.mean(0) - private).square().mean()
    assert images.min() >= 0
    assert images.max() <= 1


def untrained(model: VictimModel, kind: str) -> Decoder:
    """Return a decoder with random weights; a new one's last layer is zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        decoder = DECODERS[kind](Shape.of(model), 64, 1)
        for parameter in decoder.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    return decoder.double().eval()


@pytest.mark.parametrize("patch", [2, 4, 8])
@pytest.mark.parametrize("kind", DECODERS)
def test_decoders_fit_any_patch(tiny_model: Make, crops: Tensor, kind: str, patch: int) -> None:
    model = tiny_model(patch_size=patch, reg_tokens=2, num_heads=2)
    images, _ = untrained(model, kind).reconstruct(model.embed(crops[:2].double()), "own")
    assert images.shape == (2, 3, 16, 16)


@pytest.mark.slow
@settings(max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_order_is_nothing_to_set_and_token_and_everything_to_the_others(
    tiny_model: Make, crops: Tensor, seed: int
) -> None:
    """P_R Z and Z give the same images under `set` and `token`, whose rows are those of Z seen through P_R."""
    model = tiny_model()
    tokens = model.embed(crops[:2].double())
    order = torch.randperm(17, generator=Generator().manual_seed(seed))
    for kind in ("set", "token"):
        images, rows = untrained(model, kind).reconstruct(tokens, "own")
        moved, rows_moved = untrained(model, kind).reconstruct(tokens[:, order], "own")
        assert_close(images, moved)
        assert images.std() > 0.01
        if rows is not None:
            assert rows_moved is not None
            assert torch.equal(order[rows_moved % 17], rows % 17)
    for kind in ("mae", "conv"):
        decoder = untrained(model, kind)
        assert (decoder(tokens) - decoder(tokens[:, order.roll(1)])).abs().max() > 1e-3


def test_a_shared_order_is_found_by_the_batch_together(tiny_model: Make, crops: Tensor) -> None:
    """All images of a batch agree on the slots, though each by itself would not."""
    model = tiny_model()
    features = model.embed(crops[:6].double())
    decoder = untrained(model, "token")
    _, own = decoder.reconstruct(features, "own")
    _, shared = decoder.reconstruct(features, "shared")
    assert own is not None
    assert shared is not None
    assert len(torch.unique(own % 17, dim=0)) > 1
    assert len(torch.unique(shared % 17, dim=0)) == 1


def test_whitening_whitens() -> None:
    """M (C + r I) M = I with r = 10⁻⁴ tr C / d, and the mean comes to zero."""
    rows = torch.randn(200, 9, generator=Generator().manual_seed(0)) @ torch.randn(9, 9, generator=Generator()) + 3
    whiten = Whitening(9)
    whiten.fit(rows)
    C = rows.mT.cov(correction=0)
    M, eye = whiten.matrix, torch.eye(9)
    assert_close(M @ (C + 1e-4 * C.diagonal().mean() * eye) @ M, eye, atol=1e-3, rtol=0)
    assert_close(whiten(rows[None])[0].mean(0), torch.zeros(9), atol=1e-4, rtol=0)


def test_public_images_are_mirrored_and_rolled(tiny_model: Make, crops: Tensor) -> None:
    """Augmented images are those that went in, moved around the border; without augmentation they stay."""
    model = tiny_model()
    seen, rows = public_side(model, (), crops), torch.arange(8)
    still, moving = attack_of("mae", augment=False), attack_of("mae")
    plain = Inversion(seen, still, still.made(seen)).batch(rows, Generator())
    moved = Inversion(seen, moving, moving.made(seen)).batch(rows, Generator().manual_seed(3))
    assert_close(plain[2], crops[:8])
    assert not torch.equal(moved[2], plain[2])
    assert_close(moved[2].flatten(1).sort(1).values, plain[2].flatten(1).sort(1).values)


def test_bad_decoders_are_refused(tiny_model: Make) -> None:
    with pytest.raises(PrivlabError, match=r"multiple.*32.*40"):
        DECODERS["set"](Shape.of(tiny_model()), 40, 1)


# Reuse by hash

SHORT: dict[str, Any] = {"steps": 3, "batch_size": 8}


def test_a_decoder_is_trained_once(tiny_model: Make, crops: Tensor, cache: Path) -> None:
    attack, heard = attack_of("mae", **SHORT), list[TrainingProgress]()
    with listening(heard.append):
        first = attack.network(public_side(tiny_model(), (RowPermutation(),), crops))
        assert len(heard) == 1
        again = attack.network(public_side(tiny_model(), (RowPermutation(),), crops.clone()))
    assert len(heard) == 1
    assert not again.training
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert torch.equal(first.whiten.matrix, again.whiten.matrix)
    assert [path.name[:4] for path in cache.iterdir()] == ["mae-"]


def test_the_key_covers_all_that_shapes_a_decoder(tiny_model: Make, crops: Tensor) -> None:
    model, attack = tiny_model(), attack_of("mae")
    keys = {
        attack.key(public_side(model, (), crops)),
        attack.key(public_side(tiny_model(seed=1), (), crops)),
        attack.key(public_side(model, (GaussianNoise(0.5),), crops)),
        attack.key(public_side(model, (GaussianNoise(0.4),), crops)),
        attack.key(public_side(model, (GaussianNoise(0.5), RowPermutation()), crops)),
        attack.key(public_side(model, (), crops[1:])),
        attack_of("set").key(public_side(model, (), crops)),
        attack_of("mae", **SHORT).key(public_side(model, (), crops)),
    }
    assert len(keys) == 8
    assert attack.key(public_side(model, (), crops, 0)) in keys
    assert attack.key(public_side(model, (), crops, 1)) not in keys


def test_decoders_of_two_cuts_are_two(tiny_model: Make, crops: Tensor, cache: Path) -> None:
    """Each whitens the rows behind its own number of blocks."""
    model, attack = tiny_model(depth=2), attack_of("token", **SHORT)
    made = [attack.network(public_side(model, (), crops, cut_layer)) for cut_layer in (0, 1, 2)]
    assert len(list(cache.iterdir())) == 3
    for cut_layer, decoder in enumerate(made):
        rows = model.client_blocks(model.embed(crops.double()), cut_layer).flatten(0, 1)
        assert (decoder.whiten.mean - rows.mean(0)).norm() < 0.3 * rows.std(0).norm()


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign"])
def test_a_damaged_or_foreign_file_is_trained_anew(tiny_model: Make, crops: Tensor, cache: Path, damage: str) -> None:
    attack = attack_of("token", **SHORT)
    good = attack.network(public_side(tiny_model(), (), crops))
    (path,) = cache.iterdir()
    content = path.read_bytes()
    if damage == "foreign":
        attack.network(public_side(tiny_model(), (GaussianNoise(),), crops))
        (other,) = set(cache.iterdir()) - {path}
        path.write_bytes(other.read_bytes())
    else:
        path.write_bytes(content[:-9] if damage == "cut" else content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    heard: list[TrainingProgress] = []
    with pytest.warns(PrivlabWarning, match="trained"), listening(heard.append):
        anew = attack.network(public_side(tiny_model(), (), crops))
    assert len(heard) == 1
    assert path.read_bytes() == content
    assert all(torch.equal(a, b) for a, b in zip(good.parameters(), anew.parameters(), strict=True))


def test_a_store_that_cannot_be_written_costs_a_warning(tiny_model: Make, crops: Tensor, cache: Path) -> None:
    cache.write_text("a file is in the way")
    with pytest.warns(PrivlabWarning, match="trained"):
        attack_of("conv", **SHORT).network(public_side(tiny_model(), (), crops))


def test_few_public_images_are_warned_of(tiny_model: Make, crops: Tensor) -> None:
    with pytest.warns(PrivlabWarning, match=r"5.*evidence"):
        attack_of("conv", **SHORT).network(public_side(tiny_model(), (), crops[:5]))


def test_the_store_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder("models") == tmp_path / "models"
    monkeypatch.delenv("PRIVLAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("decoders") == tmp_path / "privlab" / "decoders"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder("decoders") == tmp_path / ".cache" / "privlab" / "decoders"


# The attacks

ATTACKS = (InversionMae, InversionConv, InversionSet, InversionToken)


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_refuse_what_they_are_not_granted(attack: type[InversionMae]) -> None:
    with pytest.raises(PrivlabError, match=f"{attack.name}.*auxiliary_images.*knows_defense.*queries"):
        check_capabilities(attack(), {Capability.RELEASED_FEATURES})


@pytest.mark.slow
def test_row_permutation_costs_the_papers_attack_more_than_the_one_that_places_rows(
    tiny_model: Make, crops: Tensor
) -> None:
    """Position embeddings are in: the per-token decoder places the rows, the other must learn to find them."""
    model, defense = tiny_model(), (RowPermutation("image"),)
    private, public = crops[:24].double(), crops[24:].double()
    seen, sent = seen_of(model, private, public, defense)
    mae = InversionMae(width=64, depth=1, steps=80)(seen)
    token = InversionToken(width=64, depth=1, steps=150, learning_rate=1e-2)(seen)
    accuracy = placement_accuracy(sent, token)
    assert accuracy is not None
    assert accuracy.mean() > 0.95
    assert mae.rows is None
    assert token.images.dtype == torch.float64
    assert psnr(token.images, private).mean() > psnr(mae.images, private).mean() + 3


def test_rows_in_place_are_taken_in_order(tiny_model: Make, crops: Tensor) -> None:
    model = tiny_model(pos_embed="none")
    seen, sent = seen_of(model, crops[:4].double(), crops[4:].double(), (GaussianNoise(0.1),))
    accuracy = placement_accuracy(sent, InversionToken(width=32, depth=1, steps=2)(seen))
    assert accuracy is not None
    assert (accuracy == 1).all()


@pytest.mark.parametrize("defense", [(BatchShuffle(), RowPermutation("image")), (Jigsaw(gamma=1.0),)])
def test_a_perfect_token_decoder_has_no_loss(tiny_model: Make, crops: Tensor, defense: Parts) -> None:
    """Whatever moved a row, its patch and its slot are those of the token that it is."""
    model = tiny_model(unknown=False)
    seen = make_release(model, defense, crops[:4].double(), Generator().manual_seed(2))
    by_token = {
        tuple(token.tolist()): (patch, slot)
        for image, patches in zip(model.embed(seen.fed.double()).float(), patchify(seen.fed, 4), strict=True)
        for slot, (token, patch) in enumerate(zip(image, [torch.zeros(48), *patches], strict=True))
    }

    def perfect(features: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        found = [[by_token[tuple(row.tolist())] for row in image] for image in features]
        patches = torch.stack([torch.stack([patch for patch, _ in image]) for image in found])
        places = torch.tensor([[slot for _, slot in image] for image in found])
        assert torch.equal(slots, places)
        return patches - 0.5, 100 * torch.eye(17)[places]

    assert untrained(model, "token").objective(perfect, seen) < 1e-9
