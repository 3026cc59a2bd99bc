"""What a client trained, as what moved in its update shows it."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor

from privlab.attacks import QkvSpan
from privlab.base import PrivlabError, PrivlabWarning, configure, options_of
from privlab.defenses import PercentilePrivacy
from privlab.release import GradientFile, run_client, trained_parameters, update_on
from privlab.release.explained import residual
from privlab.release.update_files import update_observation
from privlab.threat import Client, ClientData, Observation
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]
QKV = "blocks.*.attn.qkv.weight"


def whole_update(model: VictimModel, images: Tensor, client: Client) -> GradientFile:
    """Return the file of a client's update: every parameter of the model, those that were not trained unchanged."""
    data = ClientData(images.to(model.mean), torch.arange(len(images)), Generator())
    moved = run_client(model, client, data)
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.vit.named_parameters()}
    return GradientFile("update", zeros | {name: -u for name, u in moved.items()}, len(images), "mean")


def observed(model: VictimModel, images: Tensor, trained: str, stated: str = "all", steps: int = 2) -> Observation:
    client = Client(lr=0.1, steps=steps, trains=trained)
    return update_observation(whole_update(model, images, client), model, Client(lr=0.1, steps=steps, trains=stated))[1]


TRAINED = {
    "all": "all",
    "head.*": "head",
    "norms": "norms",
    "no-embedding": "no-embedding",
    "*.attn.*": "attention",
    "blocks.1.*,norm.*,head.*": "blocks.1.*,head.*,norm.*",
    "blocks.0.*": "blocks.0.*",
    "*.bias": "*.bias",
    "*.bias,head.*": "*.bias,head.*",
    "blocks.*,norm.*,head.*,patch_embed.*,cls_token": "blocks.*,head.*,norm.*,patch_embed.*,cls_token",
    "blocks.*,norm.*,head.*,patch_embed.*,pos_embed": "blocks.*,head.*,norm.*,patch_embed.*,pos_embed",
}


@pytest.mark.filterwarnings("ignore::privlab.base.PrivlabWarning")
@pytest.mark.parametrize("trained", TRAINED)
def test_what_moved_is_what_the_client_trained_and_is_trained_again(
    tiny_model: Model, crops: Tensor, trained: str
) -> None:
    model = tiny_model(unknown=False)
    seen = observed(model, crops[:1], trained)
    client = seen.client
    assert client is not None
    assert {*client.patterns} == {*TRAINED[trained].split(",")}
    names = {name for name, _ in model.vit.named_parameters()}
    chosen = {name for name in names if Client(trains=trained).chooses(name)}
    assert seen.gradients.keys() == chosen
    assert update_on(model, client, crops[:1].to(model.mean), 0).keys() == chosen
    if trained == "head.*":  # whose features many images have
        assert residual(seen, crops[:1].to(model.mean), 0) == float("inf")
        return
    assert residual(seen, crops[:1].to(model.mean), 0) < 1e-5
    assert residual(seen, 1 - crops[:1].to(model.mean), 0) > 1e-3


def test_all_that_moved_is_nothing_to_say(tiny_model: Model, crops: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        observed(tiny_model(unknown=False), crops[:1], "head", stated="head")


@pytest.mark.parametrize("stated", ["attention", "lora", "norm.*,head.*"])
def test_a_contradiction_is_said_and_what_moved_holds(tiny_model: Model, crops: Tensor, stated: str) -> None:
    with pytest.warns(PrivlabWarning, match=r"2.*\(head\).*client.trains="):
        seen = observed(tiny_model(unknown=False), crops[:1], "head", stated=stated)
    assert seen.client is not None
    assert seen.client.trains == "head"
    assert seen.gradients.keys() == {"head.weight", "head.bias"}


def test_what_a_filter_took_counts_as_trained(tiny_model: Model, crops: Tensor) -> None:
    model = tiny_model(unknown=False)
    file = whole_update(model, crops[:1], Client(lr=0.1, trains="head"))
    _, seen = update_observation(file, model, Client(lr=0.1), [PercentilePrivacy()])
    assert "pos_embed" in seen.gradients


@pytest.mark.filterwarnings("ignore::privlab.base.PrivlabWarning")
@pytest.mark.parametrize(("decay", "moved"), [(0.0, "head"), (0.01, "all")])
def test_decay_counts_as_training_and_no_gradient_does_not(
    tiny_model: Model, crops: Tensor, decay: float, moved: str
) -> None:
    """A head of zeros gives all other weights no gradient in the first step; decay moves them nevertheless."""
    model = tiny_model(unknown=False)
    model.vit.get_parameter("head.weight").zero_()
    client = Client(lr=0.1, weight_decay=decay)
    _, seen = update_observation(whole_update(model, crops[:1], client), model, client)
    assert seen.client is not None
    assert seen.client.trains == moved
    assert residual(seen, crops[:1].to(model.mean), 0) == float("inf")  # every image gives the same


def test_merged_adapters_are_named_and_are_no_gradients(tiny_model: Model, crops: Tensor) -> None:
    model, draw = tiny_model(img_size=8, unknown=False), Generator().manual_seed(0)
    file = whole_update(model, crops[:1, :, :8, :8], Client(lr=0.1, trains="head"))
    moved = {
        name: torch.randn(len(u), 2, generator=draw).double() @ torch.randn(2, u.shape[1], generator=draw).double()
        for name, u in file.gradients.items()
        if name.endswith("attn.qkv.weight")
    }
    merged = GradientFile("update", {**file.gradients, **moved}, 1, "mean")
    with pytest.warns(PrivlabWarning, match=r"2.*most.*LoRA"):
        _, seen = update_observation(merged, model, Client(lr=0.1))
    assert seen.client is not None
    assert {*seen.client.patterns} == {QKV, "head.*"}
    assert QkvSpan().beyond(seen) == "rank 2 < N + 1 = 5"
    with pytest.warns(PrivlabWarning, match="parameters moved") as said:
        observed(model, crops[:1, :, :8, :8], QKV, steps=1)
    assert "LoRA" not in str(said[0].message)


@pytest.mark.parametrize("trains", ["attentoin", "head.*,", "head weight", "", (), ("head.*", "attention")])
def test_other_names_of_sets_are_refused(trains: str | tuple[str, ...]) -> None:
    with pytest.raises(PrivlabError, match="set of trained parameters"):
        Client(trains=trains)


def test_an_update_of_nothing_that_is_trained_is_one_line(tiny_model: Model, crops: Tensor) -> None:
    model = tiny_model(unknown=False)
    file = whole_update(model, crops[:1], Client(trains="head"))
    nothing = GradientFile("update", {name: torch.zeros_like(u) for name, u in file.gradients.items()}, 1, "mean")
    with pytest.raises(PrivlabError, match="nothing"):
        update_observation(nothing, model, Client())


def test_a_tuple_of_patterns_is_the_text_with_commas(tiny_model: Model) -> None:
    client = Client(trains=("blocks.1.*", "head.*"))
    assert client == Client(trains="blocks.1.*,head.*")
    assert configure(Client, options_of(client)) == client
    names = trained_parameters(tiny_model(), client)
    assert {name.partition(".")[0] for name in names} == {"blocks", "head"}


def test_a_pattern_that_matches_nothing_is_one_line_with_the_names(tiny_model: Model) -> None:
    with pytest.raises(PrivlabError, match=r"'blocks\.2\.\*'.*pos_embed.*blocks\.\*\.attn\.qkv\.weight") as found:
        trained_parameters(tiny_model(), Client(trains="head.*,blocks.2.*"))
    assert "\n" not in str(found.value)
    assert trained_parameters(tiny_model(), Client(trains="unk_embed,head.*"))[0].startswith("head")
