"""What an observation grants, and that no attack runs on less: the threat model is not widened by accident."""

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from privlab.attacks import ATTACKS
from privlab.base import PrivlabError
from privlab.defenses import BatchShuffle, BlockScrambling, Blur, GradientNoise, RowPermutation
from privlab.release import feature_capabilities, gradient_capabilities, observe
from privlab.threat import FORCEABLE, Capability, FeatureObservation, Feed, Observation, check_capabilities
from privlab.victims import VictimModel, april_twin

Model = Callable[..., VictimModel]
ALL = frozenset(Capability)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_needs_each_capability_that_it_requires(name: str) -> None:
    attack = ATTACKS[name]()
    check_capabilities(attack, attack.requires)
    on_features = Capability.RELEASED_FEATURES in attack.requires
    for capability in attack.requires:
        lacking = (ALL if on_features else ALL - {Capability.RELEASED_FEATURES}) - {capability}
        other = capability is Capability.RELEASED_FEATURES  # a run releases gradients or features
        message = "reads features, and this run releases gradients" if other else capability.value
        with pytest.raises(PrivlabError, match=message):
            check_capabilities(attack, lacking)
        if capability in {Capability.APRIL_BLOCK, Capability.BATCH_SIZE_ONE}:
            check_capabilities(attack, lacking, force=True)
        else:
            with pytest.raises(PrivlabError, match=message):
                check_capabilities(attack, lacking, force=True)
    if not on_features:
        with pytest.raises(PrivlabError, match="gradients"):
            check_capabilities(attack, ALL, force=True)
    assert {Capability.APRIL_BLOCK, Capability.BATCH_SIZE_ONE} == FORCEABLE


def test_gradients_grant_what_they_show(tiny_model: Model) -> None:
    model = tiny_model()
    one, two = gradient_capabilities(model), gradient_capabilities(model, (), 2)
    assert one - two == {Capability.BATCH_SIZE_ONE}
    assert gradient_capabilities(model, (GradientNoise(),)) - one == {Capability.GRADIENT_DEFENSE}
    assert gradient_capabilities(model, (BlockScrambling(),)) - one == {Capability.PERMUTED_VALUES}
    assert gradient_capabilities(model, (BlockScrambling(pixels=0.0), Blur(0.1))) == one
    assert gradient_capabilities(model, public=1) - one == {Capability.AUXILIARY_IMAGES}
    assert Capability.PLAIN_BLOCK in one
    assert Capability.APRIL_BLOCK not in one
    twin = gradient_capabilities(april_twin(model))
    assert Capability.APRIL_BLOCK in twin
    assert Capability.PLAIN_BLOCK not in twin
    for capability in (Capability.RELEASED_FEATURES, Capability.AUXILIARY_IMAGES, Capability.QUERIES):
        assert capability not in one | twin


def test_features_grant_what_they_show(tiny_model: Model) -> None:
    model = tiny_model()
    with_images, without = feature_capabilities(model, 3), feature_capabilities(model, 0)
    assert with_images - without == {Capability.AUXILIARY_IMAGES}
    assert Capability.OWN_ROWS in feature_capabilities(model, 3, (RowPermutation(),))
    assert Capability.OWN_ROWS not in feature_capabilities(model, 3, (BatchShuffle(),))
    assert with_images - feature_capabilities(model, 3, (), 1) == {Capability.EMBEDDED_ROWS}
    bare = feature_capabilities(tiny_model(pos_embed="none", class_token=False, global_pool="avg"), 3)
    assert with_images - bare == {Capability.POSITION_EMBEDDINGS, Capability.CLASS_TOKEN}


def test_observations_have_no_field_for_the_truth() -> None:
    gradients = {"model", "gradients", "grants", "defense", "images_per_release", "photographs", "client", "public"}
    assert {f.name for f in fields(Observation)} == gradients
    features = {"model", "features", "grants", "defense", "public", "cut_layer"}
    assert {f.name for f in fields(FeatureObservation)} == features


def test_gradients_are_released_for_the_labels_and_what_was_fed(tiny_model: Model, crops: Tensor) -> None:
    """A gradient of other labels, or of other images, is another gradient; no parameter is shown that was not named."""
    model, names, labels = tiny_model(), ["pos_embed", "head.bias"], torch.tensor([1, 4])
    images = crops[:2].double()
    seen = observe(model, images, labels, names)
    assert set(seen.gradients) == set(names)
    fed = observe(model, Feed.undefended(images, model.patch), labels, names)
    for name in names:
        assert torch.equal(seen.gradients[name], fed.gradients[name])
        assert not torch.allclose(seen.gradients[name], observe(model, images, labels + 1, names).gradients[name])
        assert not torch.allclose(seen.gradients[name], observe(model, 1 - images, labels, names).gradients[name])
    mean = observe(model, images, labels, names, images_per_release=2)
    torch.testing.assert_close(mean.gradients["pos_embed"][0], seen.gradients["pos_embed"].mean(0))
    assert (len(seen.gradients["pos_embed"]), len(mean.gradients["pos_embed"])) == (2, 1)
