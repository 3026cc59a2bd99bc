"""The batched per-image gradients are those of autograd, image by image; and what they must satisfy."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from privlab.base import PrivlabError, draw_for, full_precision
from privlab.defenses import GradientSign, Jigsaw, Mjp, Undefended
from privlab.release import gradient_capabilities, observe, released_gradients, released_parameters
from privlab.threat import Capability, Feed
from privlab.victims import ARCHITECTURES, VictimModel, april_twin, victim

Model = Callable[..., VictimModel]


def one_by_one(model: VictimModel, feed: Feed, labels: Tensor, names: list[str]) -> dict[str, Tensor]:
    """Call autograd for one image at a time, on timm's own parameters: the naive twin."""
    model = copy.deepcopy(model).requires_grad_(True)
    parameters = [model.unk_embed if name == "unk_embed" else model.vit.get_parameter(name) for name in names]
    rows = []
    for i in range(len(labels)):
        masked = None if feed.masked_pe is None else feed.masked_pe[i : i + 1]
        loss = F.cross_entropy(model(feed.images[i : i + 1], masked, feed.replacement), labels[i : i + 1])
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)])
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(names)}


def of_the_mean(model: VictimModel, feed: Feed, labels: Tensor, names: list[str], B: int) -> dict[str, Tensor]:
    """Call autograd for the mean loss of one batch at a time: the naive twin of releases of B images."""
    model = copy.deepcopy(model).requires_grad_(True)
    parameters = [model.unk_embed if name == "unk_embed" else model.vit.get_parameter(name) for name in names]
    rows = []
    for start in range(0, len(labels), B):
        own = feed.take(slice(start, start + B))
        loss = F.cross_entropy(model(own.images, own.masked_pe, own.replacement), labels[start : start + B])
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)])
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(names)}


def fed(model: VictimModel, defense: Jigsaw | Undefended, b: int = 3) -> tuple[Feed, Tensor]:
    """Return what b clients feed, and their labels."""
    rng = torch.Generator().manual_seed(0)
    images = torch.rand(b, *model.image_shape, generator=rng, dtype=model.mean.dtype)
    feed = defense(images, model.patch, [draw_for(0, str(i), "defense") for i in range(b)])
    return feed, torch.randint(model.vit.num_classes, (b,), generator=rng)


DEFENSES = [
    Undefended(),
    Jigsaw(gamma=0.6),
    Mjp(gamma=0.6),
    Mjp(gamma=0.6, masked_pe="none"),
    Mjp(gamma=0.6, masked_pe="slot"),
]


@pytest.mark.parametrize("defense", DEFENSES, ids=repr)
@pytest.mark.parametrize("april", [False, True], ids=["stock", "april"])
def test_every_released_gradient_is_that_of_autograd(tiny_model: Model, defense: Jigsaw, april: bool) -> None:
    model = april_twin(tiny_model()) if april else tiny_model()
    names = sorted(released_parameters(model))
    feed, labels = fed(model, defense)
    assert_close(released_gradients(model, feed, labels, names), one_by_one(model, feed, labels, names))


@pytest.mark.parametrize(
    "options",
    [
        {"class_token": False, "global_pool": "avg"},
        {"reg_tokens": 3},
        {"reg_tokens": 2, "no_embed_class": True},
        {"pre_norm": True},
        {"qk_norm": True, "init_values": 0.3},
        {"global_pool": "avg", "fc_norm": True},
        {"depth": 1},
    ],
    ids=str,
)
def test_variants_of_timms_vit(tiny_model: Model, options: dict[str, object]) -> None:
    model = tiny_model(**options)
    names = sorted(released_parameters(model))
    feed, labels = fed(model, Mjp(gamma=0.5))
    assert_close(released_gradients(model, feed, labels, names), one_by_one(model, feed, labels, names))


@pytest.mark.slow
@pytest.mark.parametrize("defense", DEFENSES, ids=repr)
@pytest.mark.parametrize("options", [{}, {"global_pool": "avg", "fc_norm": True}, {"qk_norm": True}], ids=str)
def test_a_batch_releases_the_gradient_of_its_mean_loss(
    tiny_model: Model, defense: Jigsaw, options: dict[str, object]
) -> None:
    model = tiny_model(**options)
    names = sorted(released_parameters(model))
    feed, labels = fed(model, defense, b=6)
    for B in (2, 3, 6):
        seen = observe(model, feed, labels, names, images_per_release=B)
        assert_close(dict(seen.gradients), of_the_mean(model, feed, labels, names, B))
        assert (seen.images_per_release, seen.grants) == (B, gradient_capabilities(model) - {Capability.BATCH_SIZE_ONE})
    alone = observe(model, feed, labels, names)
    assert alone.images_per_release == 1
    for name, g in released_gradients(model, feed, labels, names).items():
        assert torch.equal(alone.gradients[name], g)


@pytest.mark.parametrize("B", [0, -1, 2, 4])
def test_a_batch_that_does_not_divide_the_images_is_refused(tiny_model: Model, B: int) -> None:
    model = tiny_model()
    feed, labels = fed(model, Undefended())
    for defense in ((), (GradientSign(),)):
        with pytest.raises(PrivlabError, match=rf"must be a divisor of the \d images\. Found {B}\."):
            observe(model, feed, labels, ["pos_embed"], defense, images_per_release=B)


CASES = [
    (family, variant, block, training)
    for family in ARCHITECTURES
    for variant in ("", "_nope", "_mjp")
    for block, training in [("stock", False), ("april", False), ("stock", True), ("april", True)]
    if not family.endswith("_b") or (block, training) == ("stock", False)  # each wide one costs seconds
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "variant", "block", "training"), CASES)
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_every_family_in_float32(family: str, variant: str, block: str, training: bool) -> None:
    model = victim(family + variant, weights="random", img_size=32, block=block).model.train(training)
    wanted = {"pos_embed", "unk_embed", "cls_token", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight"}
    names = sorted(wanted & released_parameters(model))
    feed, labels = fed(model, Mjp(gamma=0.5) if variant == "_mjp" else Undefended(), b=2)
    want = one_by_one(model, feed, labels, names)
    for name, got in released_gradients(model, feed, labels, names).items():
        assert_close(got, want[name], rtol=1e-4, atol=1e-5 * float(want[name].abs().max()))


def test_train_mode_with_dropout_and_drop_path(tiny_model: Model) -> None:
    """Both draw from torch's own generator, so the same seed drops the same."""
    model = tiny_model(depth=3, drop_path_rate=0.3, proj_drop_rate=0.2, pos_drop_rate=0.2, drop_rate=0.2).train()
    names = sorted(released_parameters(model))
    feed, labels = fed(model, Mjp(gamma=0.5), b=1)
    quiet = released_gradients(copy.deepcopy(model).eval(), feed, labels, names)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        got = released_gradients(model, feed, labels, names)
        torch.manual_seed(3)
        want = one_by_one(model, feed, labels, names)
    assert_close(got, want)
    assert not torch.allclose(got["pos_embed"], quiet["pos_embed"])


def test_autocast_of_the_caller_does_not_reach_the_observation(tiny_model: Model) -> None:
    """Reduced precision is a defense to be measured, not an accident."""
    model = tiny_model().float()
    feed, labels = fed(model, Undefended())
    plain = observe(model, feed, labels, ["pos_embed"]).gradients["pos_embed"]
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(observe(model, feed, labels, ["pos_embed"]).gradients["pos_embed"], plain, rtol=0, atol=0)


def test_pre_norm_does_not_see_a_constant_added_to_a_token(tiny_model: Model) -> None:
    """A·1 = 0 on the stock block, so rank A ≤ D − 1; the april block sees it."""
    model = tiny_model()
    feed, labels = fed(model, Undefended())
    stock = observe(model, feed, labels, ["pos_embed"]).gradients["pos_embed"]
    assert_close(stock.sum(-1), torch.zeros_like(stock.sum(-1)))
    april = observe(april_twin(model), feed, labels, ["pos_embed"]).gradients["pos_embed"]
    assert april.sum(-1).abs().max() > 1e-3


def test_class_token_row_of_the_pe_gradient(tiny_model: Model) -> None:
    """∂ℓ/∂E_pos[0] = ∂ℓ/∂cls_token."""
    model = tiny_model()
    feed, labels = fed(model, Undefended())
    seen = observe(model, feed, labels, ["pos_embed", "cls_token"]).gradients
    assert_close(seen["pos_embed"][:, :, :1], seen["cls_token"])


@pytest.mark.slow
@given(gamma=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_mjp_releases_zeros_at_masked_slots_and_their_sum_in_e_unk(tiny_model: Model, gamma: float, seed: int) -> None:
    """∂ℓ/∂E_pos[n] = 0 exactly at masked n, so the mask is public; ∂ℓ/∂E_unk = Σ_m g_m."""
    model = tiny_model()
    images = torch.rand(1, *model.image_shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    feed = Mjp(gamma=gamma)(images, model.patch, [torch.Generator().manual_seed(seed)])
    labels = torch.tensor([1])
    seen = observe(model, feed, labels, ["pos_embed", "unk_embed", "patch_embed.proj.bias"]).gradients
    rows = seen["pos_embed"][:, 0, 1:]
    assert feed.masked_pe is not None
    assert_close((rows == 0).all(-1), feed.masked_pe)
    assert_close(seen["unk_embed"].flatten(1) + rows.sum(1), seen["patch_embed.proj.bias"])


def test_the_callers_model_is_left_as_it_is(tiny_model: Model) -> None:
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    hooks = [len(module._forward_hooks) for module in model.modules()]
    feed, labels = fed(model, Mjp())
    observe(model, feed, labels, released_parameters(model))
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert hooks == [len(module._forward_hooks) for module in model.modules()]
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())


def test_unknown_parameter_is_refused_with_the_nearest_name(tiny_model: Model) -> None:
    model = tiny_model()
    feed, labels = fed(model, Undefended())
    with pytest.raises(PrivlabError, match=r"'blocks\.0\.attn\.qkv\.wieght'.*blocks\.0\.attn\.qkv\.weight"):
        observe(model, feed, labels, ["blocks.0.attn.qkv.wieght"])


def test_grants_follow_the_model(tiny_model: Model) -> None:
    assert Capability.LEARNABLE_PE_GRADIENT in gradient_capabilities(tiny_model())
    assert Capability.LEARNABLE_PE_GRADIENT not in gradient_capabilities(tiny_model(pos_embed="none"))
    assert Capability.APRIL_BLOCK in gradient_capabilities(april_twin(tiny_model()))
    assert Capability.APRIL_BLOCK not in gradient_capabilities(tiny_model())


def test_full_precision_is_restored() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
def test_gradients_on_a_gpu_are_those_on_the_cpu(tiny_model: Model) -> None:
    model = tiny_model()
    feed, labels = fed(model, Mjp(gamma=0.6))
    names = sorted(released_parameters(model))
    want = released_gradients(model, feed, labels, names)
    on_gpu = Feed(feed.images.cuda(), feed.order.cuda(), feed.moved.cuda(), feed.masked_pe.cuda())
    got = released_gradients(copy.deepcopy(model).cuda(), on_gpu, labels.cuda(), names)
    assert_close({name: value.cpu() for name, value in got.items()}, want)
