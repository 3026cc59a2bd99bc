"""breaching's attacks against breaching itself; what they may leave behind; labels read from a head's gradient."""

import copy
import math
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.testing import assert_close

from privlab.attacks import ATTACKS, April
from privlab.attacks.breaching.wrapper import Breaching, _shipped_config, contain_breaching
from privlab.base import PrivlabError, configure, read_options
from privlab.metrics import psnr
from privlab.release import (
    Told,
    certain_counts,
    gradient_capabilities,
    observe,
    released_parameters,
    told_labels,
)
from privlab.threat import Attack, Observation
from privlab.victims import VictimModel, april_twin

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
LABEL = torch.tensor([3])
BREACHING: dict[str, Any] = {name: ATTACKS[name] for name in ATTACKS if name.startswith("breaching:")}
Inverting = BREACHING["breaching:invertinggradients"]


def tiny(seed: int = 0, **options: Any) -> VictimModel:
    """Return a victim model: 3 × 16 × 16 in float32, 8 × 8 patches, two blocks of width 32."""
    settings: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vit = VisionTransformer(num_classes=5, **(settings | options))
        for parameter in vit.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.2)
    return VictimModel(vit.eval(), MEAN, STD)


def images(n: int = 1) -> Tensor:
    """Return n random images."""
    return torch.rand(n, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def seen(model: VictimModel, x: Tensor | None = None, label: Tensor = LABEL) -> Observation:
    """Return an observation with every released gradient."""
    x = images() if x is None else x
    return observe(model, x, label.expand(len(x)), released_parameters(model))


def short(kind: type[Breaching], steps: int = 3, **options: Any) -> Breaching:
    """Return an attack with few steps, where it takes steps."""
    takes = "optim.max_iterations" in kind.config_types()
    return kind(config=(("optim.max_iterations", steps),) if takes else (), **options)


class Plain(nn.Module):
    """A classifier, as breaching's own cases are."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.model = vit
        for module in vit.modules():
            if hasattr(module, "fused_attn"):
                setattr(module, "fused_attn", False)  # noqa: B010  # timm's own switch

    def forward(self, inputs: Tensor, **_: Tensor) -> Tensor:
        """Return the logits."""
        return self.model(inputs)


def breaching_itself(model: VictimModel, name: str, overrides: list[str], seed: int) -> SimpleNamespace:
    """Return what breaching's client shares of an image, and what breaching's attack makes of it."""
    with contain_breaching():
        import breaching
        from breaching.cases.users import UserSingleStep

        setup, loss = {"device": torch.device("cpu"), "dtype": torch.float}, nn.CrossEntropyLoss()
        classifier = Plain(copy.deepcopy(model.vit)).requires_grad_(True)
        metadata = SimpleNamespace(modality="vision", shape=[3, 16, 16], mean=list(MEAN), std=list(STD))
        payload = {"parameters": [p.detach() for p in classifier.parameters()], "buffers": [], "metadata": metadata}
        case = breaching.get_case_config("1_single_image_small").user
        case.num_data_points, case.provide_labels = 1, True
        client = UserSingleStep(classifier, loss, None, setup, 0, case)
        client.data_key = "inputs"
        data = {"inputs": model.normalise(images()), "labels": LABEL}
        shared, _ = client.compute_local_updates(payload, custom_data=data)
        attacker = breaching.attacks.prepare_attack(
            classifier, loss, breaching.get_attack_config(name, overrides), setup
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            found, stats = attacker.reconstruct([payload], [shared], {}, dryrun=False)
    return SimpleNamespace(gradients=shared["gradients"], data=found["data"], stats=stats)


@pytest.mark.slow
def test_invertinggradients_is_breachings_own_step_for_step() -> None:
    model = tiny()
    overrides = {"optim.max_iterations": 10, "restarts.num_trials": 2, "regularization.total_variation.scale": 0.1}
    theirs = breaching_itself(model, "invertinggradients", [f"{k}={v}" for k, v in overrides.items()], seed=5)
    names = [name for name, _ in model.vit.named_parameters()]
    shared = dict(zip(names, theirs.gradients, strict=True))
    ours = Inverting(config=tuple(overrides.items()), seed=5)
    data, stats = ours.solve(model, shared)
    for trial in ("Trial_0_Val", "Trial_1_Val"):
        assert len(stats[trial]) == 10
        assert stats[trial] == theirs.stats[trial]
    assert torch.equal(data, theirs.data)
    observed = Observation(model, {name: g[None] for name, g in shared.items()}, gradient_capabilities(model))
    assert torch.equal(ours(observed), (theirs.data * model.std + model.mean).clamp(0, 1))


@pytest.mark.slow
def test_what_privlab_observes_is_what_breachings_client_shares() -> None:
    model = tiny()
    theirs = breaching_itself(model, "invertinggradients", ["optim.max_iterations=1"], seed=0).gradients
    ours = seen(model).gradients
    for (name, _), gradient in zip(model.vit.named_parameters(), theirs, strict=True):
        assert_close(ours[name][0], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_search_goes_down() -> None:
    model = tiny()
    gradients = {name: g[0] for name, g in seen(model).gradients.items()}
    _, stats = short(Inverting, 60).solve(model, gradients)
    assert min(stats["Trial_0_Val"]) < 0.5 * stats["Trial_0_Val"][0]


def test_april_analytic_is_april() -> None:
    """K = 48 ≤ D = 64, and its block: both are exact."""
    model = april_twin(tiny(patch_size=4, embed_dim=64))
    exact = seen(model)
    theirs = BREACHING["breaching:april_analytic"]()(exact)
    assert psnr(theirs, images()).min() > 40
    assert_close(theirs, April()(exact), rtol=0, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", BREACHING)
def test_what_runs_on_vits_is_what_is_declared(name: str) -> None:
    kind = BREACHING[name]
    assert isinstance(kind(), Attack)
    assert (kind.name, kind.named_only) == (name, True)
    model = april_twin(tiny()) if "april" in name else tiny()
    if kind.obstacle:
        assert f"not on ViTs: {kind.obstacle}" in kind.paper
        with pytest.raises(PrivlabError, match=r"^breaching fails with [A-Z]\w+: ") as failure:
            short(kind)(seen(model))
        assert kind.obstacle in str(failure.value)
        assert "\n" not in str(failure.value)
        return
    assert kind.paper.endswith("runs on ViTs")
    found = short(kind)(seen(model))
    assert found.shape == (1, 3, 16, 16)
    assert 0 <= found.min() <= found.max() <= 1
    assert found.std() > 0


def test_every_vision_attack_of_breaching_is_there() -> None:
    with contain_breaching():
        import breaching
    folder = Path(breaching.__file__).parent / "config" / "attack"
    shipped = {path.stem for path in folder.glob("*.yaml")}
    left_out = {"_default_optimization_attack", "sanitycheck", "decepticon"}
    assert set(BREACHING) == {f"breaching:{name}" for name in shipped - left_out}


def test_the_seed_decides_and_images_do_not_meet() -> None:
    model, attack = tiny(), short(Inverting)
    both = attack(seen(model, images(2)))
    for i in (0, 1):
        assert torch.equal(attack(Observation(model, _only(model, i), gradient_capabilities(model)))[0], both[i])
    assert not torch.equal(short(Inverting, seed=1)(seen(model, images(2))), both)


def _only(model: VictimModel, i: int) -> Mapping[str, Tensor]:
    return {name: g[i : i + 1] for name, g in seen(model, images(2)).gradients.items()}


@pytest.mark.parametrize("options", [{"init_values": 0.5}, {"qk_norm": True}, {"global_pool": "avg"}, {"frozen": True}])
def test_parameters_without_a_released_gradient_are_constants(options: dict[str, Any]) -> None:
    """LayerScale has no per-image gradient here, and a frozen position embedding none at all."""
    frozen = options.pop("frozen", False)
    model = tiny(**options)
    if frozen:
        vit = copy.deepcopy(model.vit)
        vit.pos_embed.requires_grad_(False)  # pyright: ignore[reportOptionalMemberAccess]
        model = VictimModel(vit, MEAN, STD)
        assert "pos_embed" not in seen(model).gradients
    assert short(Inverting)(seen(model)).shape == (1, 3, 16, 16)


@pytest.fixture
def users_hydra() -> Iterator[object]:
    """Yield the Hydra of a program that runs privlab."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    with hydra.initialize(version_base="1.2", config_path=None):
        yield GlobalHydra.instance().hydra


def test_nothing_is_left_behind(users_hydra: object, capfd: pytest.CaptureFixture[str]) -> None:
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.singleton import Singleton
    from hydra.version import getbase
    from omegaconf.basecontainer import BaseContainer

    model = tiny()
    before = copy.deepcopy(model.state_dict())
    resolvers, instances = dict(BaseContainer._resolvers), dict(Singleton._instances)
    generator, warned = torch.get_rng_state(), list(_filters())
    _shipped_config.cache_clear()
    short(Inverting)(seen(model))
    with pytest.raises(PrivlabError):
        BREACHING["breaching:rgap"]()(seen(model))  # it prints
    assert GlobalHydra.instance().hydra is users_hydra
    assert str(getbase()).startswith("1.2")
    assert (BaseContainer._resolvers, Singleton._instances) == (resolvers, instances)
    assert torch.equal(torch.get_rng_state(), generator)
    assert list(_filters()) == warned
    assert capfd.readouterr() == ("", "")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.vit.parameters())
    assert all(getattr(module, "fused_attn", True) for module in model.vit.modules())


def _filters() -> Iterator[object]:
    import warnings

    yield from warnings.filters


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Have Python's own handler, which a process that a shell has started in the background lacks."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_it() -> None:
    """Ctrl-C: breaching itself takes it for the end of its search, and goes on with the next."""
    model = tiny()
    observed = seen(model)
    short(Inverting)(observed)
    ended = threading.Event()

    def press() -> None:
        wait = 0.5
        while not ended.wait(wait):  # again, as anyone would: Python drops one that comes while it destroys an object
            os.kill(os.getpid(), signal.SIGINT)
            wait = 5

    def search() -> None:
        try:
            Inverting()(observed)
        finally:
            ended.set()

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        search()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ((("objective.type", "nonsense"),), "breaching fails with ValueError: Unknown objective type nonsense given."),
        ((("optim.optimizer", "sgdd"),), "breaching fails with ValueError: Invalid optimizer sgdd given."),
        ((("restarts.num_trials", 0),), "breaching fails with IndexError: min"),
    ],
)
def test_its_failures_are_ours_in_one_line(config: tuple[tuple[str, Any], ...], reason: str) -> None:
    with pytest.raises(PrivlabError) as failure:
        Inverting(config=config)(seen(tiny()))
    assert str(failure.value).startswith(reason)
    assert "\n" not in str(failure.value)


def test_an_objective_that_is_not_finite_is_a_failure() -> None:
    model = tiny()
    gradients = dict(seen(model).gradients)
    gradients["norm.weight"] = gradients["norm.weight"] * math.inf
    with pytest.raises(PrivlabError, match="reconstruction"):
        short(Inverting)(Observation(model, gradients, gradient_capabilities(model)))


@pytest.mark.slow
def test_the_label_must_be_told() -> None:
    model = tiny()
    gradients = {name: g for name, g in seen(model).gradients.items() if name != "head.bias"}
    with pytest.raises(PrivlabError, match=r"head\.bias"):
        short(Inverting)(Observation(model, gradients, gradient_capabilities(model)))
    joint = short(BREACHING["breaching:deepleakage"])
    assert joint(Observation(model, gradients, gradient_capabilities(model))).shape == (1, 3, 16, 16)


def test_options_reach_the_configuration() -> None:
    options = ["optim.max_iterations=7", "breaching:invertinggradients.optim.signed=soft", "seed=3", "impl.JIT=none"]
    options += ["breaching:tag.optim.step_size=1", "optim.grad_clip=0.5", "normalize_gradients=true"]
    read_options(options, [Inverting, BREACHING["breaching:tag"]])
    made = configure(Inverting, options)
    assert made.seed == 3
    assert dict(made.config) == {
        "optim.max_iterations": 7,
        "optim.signed": "soft",
        "impl.JIT": None,
        "optim.grad_clip": 0.5,
        "normalize_gradients": True,
    }
    assert made(seen(tiny())).shape == (1, 3, 16, 16)
    assert configure(Inverting, []) == Inverting()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("optim.max_iteration=5", "Unknown option 'optim.max_iteration'. Did you mean optim.max_iterations"),
        ("breaching:invertinggradients.optim.steps=5", "Unknown option 'optim.steps'. Did you mean optim.step_size"),
        ("optim.max_iterations=many", "--set optim.max_iterations=many: the value must be of type int. Found 'many'."),
        ("optim.boxed=1", "--set optim.boxed=1: the value must be true or false. Found '1'."),
        ("optin.step_size=1", "Unknown option 'optin.step_size'. Did you mean optim.step_size"),
        (
            "breaching:invertingradients.seed=1",
            "Unknown attack or defense of this run 'breaching:invertingradients'. Did",
        ),
        ("aprill.rtol=1", "Unknown attack or defense of this run 'aprill'. Choose from"),
        ("attack_type=analytic", "Unknown option 'attack_type'."),
        ("config=1", "Unknown option 'config'."),
        ("optim.=1", "--set takes KEY=VALUE or NAME.KEY=VALUE. Found 'optim.=1'."),
    ],
)
def test_options_that_do_not_fit_are_one_line(option: str, message: str) -> None:
    with pytest.raises(PrivlabError) as refusal:
        read_options([option], [Inverting])
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


def test_a_key_that_is_none_is_refused_in_python_too() -> None:
    with pytest.raises(PrivlabError, match=r"Unknown option of breaching:invertinggradients 'optim\.step'"):
        Inverting(config=(("optim.step", 1),))


logits = st.integers(0, 2**31).map(lambda seed: torch.Generator().manual_seed(seed))


def released(generator: torch.Generator, batch: int, classes: int, spread: float) -> tuple[Tensor, list[int]]:
    """Return Σᵢ pᵢ − yᵢ of random predictions and labels, and the labels in ascending order."""
    p = (spread * torch.randn(batch, classes, generator=generator)).softmax(1)
    y = torch.randint(classes, (batch,), generator=generator)
    return (p - nn.functional.one_hot(y, classes)).sum(0), sorted(y.tolist())


def told(h: Tensor, batch: int) -> Told:
    """Return the labels that the gradient of the head's bias alone tells, from the sum over a batch."""
    found = told_labels(nn.Identity(), {"head.bias": h.double() / max(batch, 1)}, batch)
    assert found is not None
    return found


@pytest.mark.slow
@given(logits, st.integers(2, 50), st.floats(0, 6))
def test_one_label_is_always_told(generator: torch.Generator, classes: int, spread: float) -> None:
    h, labels = released(generator, 1, classes, spread)
    assume((h < 0).any())  # p = 1 − 1e-9 is rounded to 1, and nothing of the label is released
    assert told(h, 1) == Told(tuple(labels), tuple(labels))


@given(logits, st.integers(1, 12), st.integers(2, 30), st.floats(0, 4))
def test_counts_are_bounds_and_labels_are_right(
    generator: torch.Generator, batch: int, classes: int, spread: float
) -> None:
    h, labels = released(generator, batch, classes, spread)
    true = torch.bincount(torch.tensor(labels), minlength=classes)
    assert (certain_counts(h, batch) <= true).all()
    found = told(h, batch)
    assert not found.all_certain or list(found.labels) == labels
    assert (len(found.labels), list(found.labels)) == (batch, sorted(found.labels))


@given(logits, st.integers(1, 40), st.integers(2, 30))
def test_an_undecided_model_tells_all_labels(generator: torch.Generator, batch: int, classes: int) -> None:
    h, labels = released(generator, batch, classes, 0.0)
    found = told(h, batch)
    assert list(found.labels) == labels
    if 2 * batch < classes:  # nearer to C, a label's entry, B/C − 1, may be the rounding of a coarser format
        assert found.all_certain


def test_labels_of_what_is_no_such_gradient() -> None:
    assert told(torch.zeros(4), 1) == Told((0,), ())
    assert told(torch.tensor([-1.9, 0.9, 1.0]), 1) == Told((0,), (0,))
    assert told(torch.tensor([-1.9, -1.9, 3.8]), 2) == Told((0, 1), ())
    for call in (certain_counts, told):
        with pytest.raises(PrivlabError, match=r"positive.*0"):
            call(torch.zeros(3), 0)
        with pytest.raises(PrivlabError, match="must be finite"):
            call(torch.tensor([0.0, math.nan]), 1)
