"""Swin with absolute PEs and ResNet: naive twins, MJP in them, their weights in every layout, and who refuses them."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor, nn

from privlab.backbones import Backbone, Pupil, SwinModel, classifier
from privlab.cli import _status
from privlab.errors import PrivlabError
from privlab.evaluation import worth, worth_by_gamma
from privlab.judgement import Exam, judge
from privlab.lessons import Course, teach
from privlab.patches import patchify
from privlab.recipes import DALS, Lesson, TrainMjp
from privlab.threat import PrivlabWarning
from privlab.training import Augmentation, Compute, Examples, Plan, Progress, train
from privlab.victims import victim

STILL = Augmentation(flip=False, shift=0)
COLOURS: tuple[Any, Any] = ((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
TINY: dict[str, Any] = {"img_size": 32, "patch_size": 2, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)}
SHUFFLE = TrainMjp(gamma=0.5, unknown=False, dal="none")


def swin(*, unknown: bool = True, **options: Any) -> SwinModel:
    """Return a Swin of 16 × 16 patches, four of which make a piece of the jigsaw."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = TINY | {"window_size": 4, "num_classes": 3, "drop_path_rate": 0.1} | options
        net = timm.create_model("swin_tiny_patch4_window7_224", **sizes)
        made = SwinModel(net, *COLOURS, unknown=unknown)
        for parameter in made.parameters():  # biases start at zero, which would hide mistakes
            nn.init.normal_(parameter, std=0.2)
    return made.double().eval().requires_grad_(False)


def resnet() -> Backbone:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = timm.create_model("resnet18", channels=(4, 4, 8, 8), num_classes=3)
    return Backbone(net, (3, 32, 32), *COLOURS).double().eval().requires_grad_(False)


def pictures(n: int = 6) -> Examples:
    images = torch.randint(256, (n, 3, 32, 32), generator=Generator().manual_seed(0), dtype=torch.uint8)
    return Examples(images, torch.arange(n) % 3, 3, "toy")


def shades(n: int, seed: int) -> Examples:
    labels = torch.arange(n) % 3
    noise = torch.randint(60, (n, 3, 32, 32), generator=Generator().manual_seed(seed))
    return Examples((noise + 90 * labels[:, None, None, None]).byte(), labels, 3, f"shades {seed}")


def seen(model: Backbone, n: int = 2) -> Tensor:
    return pictures(n).images.to(model.mean) / 255


def normalised(model: Backbone, images: Tensor) -> Tensor:
    return (images - model.mean) / model.std


# The networks


def test_e_unk_stands_at_every_patch_of_a_masked_piece() -> None:
    """The embedding is that of a naive loop over Swin's patches, two by two of which a piece covers."""
    model = swin()
    images, masked = seen(model), torch.rand(2, 64, generator=Generator().manual_seed(1)) < 0.3
    assert (model.patch, model.grid) == (4, (16, 16))
    assert model.unk_embed is not None
    assert model.pos_embed is not None
    tokens = model.net.patch_embed(normalised(model, images))
    for b in range(2):
        for i in range(16):
            for j in range(16):
                hidden = masked[b, i // 2 * 8 + j // 2]
                tokens[b, i, j] += model.unk_embed[0, 0] if hidden else model.pos_embed[0, 16 * i + j]
    expected = model.net.head(model.net.norm(model.net.layers(tokens)))
    torch.testing.assert_close(model(images, masked), expected)
    assert not torch.allclose(model(images), expected)


@pytest.mark.parametrize("make", [lambda: swin(unknown=False), resnet])
def test_without_position_embeddings_it_is_timms(make: Callable[[], Backbone]) -> None:
    model = make()
    images = seen(model)
    torch.testing.assert_close(model(images), model.net(normalised(model, images)))
    assert model.slot_pe is None
    assert model.unk_embed is None
    with pytest.raises(PrivlabError, match="MJP masks position embeddings, and this model has none"):
        model(images, torch.zeros(2, 64, dtype=torch.bool))


def test_what_the_classifier_reads_is_pooled() -> None:
    model = swin()
    images = seen(model)
    torch.testing.assert_close(model.features(images), model.maps(images).mean((1, 2)))
    torch.testing.assert_close(model.logits(model.features(images)), model(images))


@pytest.mark.parametrize(("side", "patch"), [(32, 4), (124, 4), (128, 16), (224, 16)])
def test_pieces_are_of_16_pixels_where_a_picture_has_enough(side: int, patch: int) -> None:
    net = timm.create_model("resnet18", channels=(4, 4, 8, 8), num_classes=3)
    assert Backbone(net, (3, side, side), *COLOURS).patch == patch


@pytest.mark.filterwarnings("ignore::privlab.threat.PrivlabWarning")
def test_sides_that_pieces_do_not_fill() -> None:
    with pytest.raises(PrivlabError, match=r"multiples of the jigsaw's pieces, 16 pixels. Found 200×200"):
        classifier("resnet50", weights="random", img_size=200)


# MJP in them


def test_a_resnet_is_shuffled_and_no_more() -> None:
    """The masked pieces hold their own pixels in another order; the loss is the cross-entropy of that picture."""
    model, data = resnet(), pictures()
    lesson = Lesson(model, data, SHUFFLE, STILL)
    images, labels, masked = lesson.batch(torch.arange(6), Generator().manual_seed(3))
    before, after = patchify(data.images.float() / 255, 4), patchify(images, 4)
    assert (masked.sum(1) == 32).all()
    assert torch.equal(after[~masked], before[~masked])
    assert not torch.equal(after, before)
    for i in range(6):
        assert sorted(after[i, masked[i]].sum(1).tolist()) == sorted(before[i, masked[i]].sum(1).tolist())
    found = lesson.loss(lesson.model, (images.double(), labels.double(), masked), Generator())
    logits = model.net(normalised(model, images.double()))
    torch.testing.assert_close(found, nn.functional.cross_entropy(logits, labels.double(), label_smoothing=0.1))


def test_a_swin_is_taught_on_masked_pieces() -> None:
    model = swin()
    lesson = Lesson(model, pictures(), TrainMjp(gamma=0.5), STILL)
    images, _, masked = lesson.batch(torch.arange(6), Generator().manual_seed(3))
    assert masked.shape == (6, 64)
    logits, dal = lesson.model.double()(images.double(), masked, True)
    assert torch.equal(logits, model(images.double(), masked))
    assert dal > 0


@pytest.mark.parametrize("kind", DALS)
def test_dal_reaches_only_the_unmasked_position_embeddings_of_a_swin(kind: str) -> None:
    lesson = Lesson(model := swin(), pictures(), TrainMjp(gamma=0.5, dal=kind), STILL)
    masked = torch.zeros(2, 64, dtype=torch.bool)
    masked[0, :40], masked[1, :24] = True, True
    _, loss = lesson.model.double()(seen(model), masked, True)
    loss.backward()
    assert model.pos_embed is not None
    assert model.pos_embed.grad is not None
    shares = model.pos_embed.grad[0]
    hidden = torch.arange(256) < 96  # 24 pieces are masked in both: three rows of eight, six rows of sixteen PEs
    if kind == "pca":  # its centre is the mean of all
        shares = shares - shares[hidden].mean(0)
    assert torch.equal(shares.abs().sum(1) > 1e-12, ~hidden)


def orderless() -> SwinModel:
    """Return a Swin of one stage whose tokens do not see one another, without position embeddings' help."""
    model = swin(depths=(1,), num_heads=(1,))
    proj = model.net.layers[0].blocks[0].attn.proj
    for silent in (proj.weight, proj.bias, model.pos_embed, model.unk_embed):
        assert isinstance(silent, Tensor)
        silent.zero_()
    return model


def test_a_model_that_ignores_order_is_consistent() -> None:
    found = worth(orderless(), pictures(30), gamma=0.9)
    assert found.consistency == 1
    assert found.shuffled_accuracy == found.accuracy
    assert found.diff_norm < 1e-20


def test_an_unknown_embedding_moves_features() -> None:
    model = orderless()
    assert model.unk_embed is not None
    model.unk_embed.copy_(torch.linspace(-1, 1, 8))
    still, moved = worth_by_gamma(model, [(torch.arange(6), seen(model, 6), torch.arange(6) % 3)], (0.0, 0.5))
    assert still.diff_norm == 0
    assert moved.diff_norm > 1e-6


@pytest.mark.parametrize(("make", "objective"), [(swin, TrainMjp(gamma=0.3)), (resnet, SHUFFLE)])
def test_classes_are_learnt_from_shuffled_pictures(make: Callable[[], Backbone], objective: TrainMjp) -> None:
    """Dark, grey and light pictures, each with noise, are told apart, others than those of the training too."""
    model = make().float()
    train(Lesson(model, shades(24, 0), objective, STILL), Plan(steps=40, batch_size=12, learning_rate=1e-2))
    found = worth(model, shades(30, 1), gamma=0.5)
    assert found.accuracy == 1
    assert found.consistency == 1


@pytest.mark.parametrize(("make", "objective"), [(swin, TrainMjp(gamma=0.3)), (resnet, SHUFFLE)])
def test_a_training_goes_on_to_the_same_bits(make: Callable[[], Backbone], objective: TrainMjp, tmp_path: Path) -> None:
    """What BatchNorm has counted included; stochastic depth is at work."""
    plan = Plan(steps=6, batch_size=4, learning_rate=1e-2)

    class StoppedError(Exception):
        pass

    def stop(now: Progress) -> None:
        if now.step == 4:
            raise StoppedError

    def lesson() -> Lesson:
        return Lesson(make().float(), pictures(), objective, STILL)

    train(whole := lesson(), plan)
    often = Compute(log_every=2, save_every=3)
    with pytest.raises(StoppedError):
        train(lesson(), plan, compute=often, out=tmp_path, progress=stop)
    train(resumed := lesson(), plan, compute=often, out=tmp_path)
    ends, begin = (each.model.state_dict() for each in (whole, resumed)), lesson().model.state_dict()
    for (name, tensor), again in zip(next(ends).items(), next(ends).values(), strict=True):
        assert torch.equal(tensor, again), name
        assert not torch.equal(tensor, begin[name]), name


# By name, from the command line's side


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder of ten classes, with a picture for training and one for the test in each."""
    draw = Generator().manual_seed(0)
    for split in ("train", "test"):
        for label in range(10):
            (folder := tmp_path / "data" / split / f"{label}").mkdir(parents=True)
            pixels = torch.randint(256, (32, 32, 3), generator=draw, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / "0.png")
    return tmp_path / "data"


@pytest.mark.filterwarnings("ignore::privlab.threat.PrivlabWarning")
@pytest.mark.parametrize(
    ("model", "options", "unknown"),
    [("cifar_swin_mjp", (), "trained"), ("cifar_resnet", ("unknown=false", "dal=none"), None)],
)
def test_a_taught_one_is_judged_from_its_file(
    model: str, options: tuple[str, ...], unknown: str | None, data: Path, tmp_path: Path
) -> None:
    """The card's hash and scores are those of what is read back, in half precision; BatchNorm's counts stay whole."""
    course = Course(
        recipe="mjp",
        model=model,
        data=str(data),
        preset="small",
        epochs=1.0,
        batch_size=5,
        precision="32-true",
        options=("gamma=0.3", *options),
        half=True,
    )
    card = teach(course, tmp_path / "out")
    assert card is not None
    file = tmp_path / "out" / "model.safetensors"
    read = classifier(model, weights=file)
    assert (read.weights.sha256, read.weights.unknown) == (card["sha256"], unknown)
    assert {v.dtype for k, v in load_file(file).items() if not k.endswith("tracked")} == {torch.float16}
    (row,) = judge(Exam(models=(model,), weights=(str(file),), data=str(data), gammas=(0.15,), batch=250))
    test = {name: card["test"][name] for name in asdict(worth(read.model, pictures(), gamma=0.15))}
    found = row["by_gamma"][0] | {"images": row["images"], "accuracy": row["accuracy"]}
    assert found == pytest.approx(test, rel=1e-5)
    kept = classifier(model, weights=next((tmp_path / "out" / "checkpoints").rglob("*.safetensors")))
    assert kept.weights.unknown == unknown


def test_random_weights_are_those_of_the_seed() -> None:
    with pytest.warns(PrivlabWarning, match=r"RANDOM weights \(seed 1\)"):
        first = classifier("cifar_swin_mjp", weights="random", seed=1)
    with pytest.warns(PrivlabWarning, match="RANDOM"):
        again = classifier("cifar_swin_mjp", weights="random", seed=1)
    with pytest.warns(PrivlabWarning, match="RANDOM"):
        other = classifier("cifar_swin_mjp", weights="random")
    assert first.weights == again.weights
    assert other.weights.sha256 != first.weights.sha256
    assert first.weights.unknown == "random"
    assert first.preprocessing.size == (32, 32)


def read(state: Mapping[str, Tensor], path: Path, model: str = "cifar_swin_mjp", **options: Any) -> Pupil:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    made = classifier(model, weights=path, **options)
    assert isinstance(made, Pupil)
    return made


@pytest.fixture
def cifar_swin() -> SwinModel:
    with pytest.warns(PrivlabWarning, match="RANDOM"):
        made = classifier("cifar_swin_mjp", weights="random").model
    assert isinstance(made, SwinModel)
    return made


@pytest.mark.parametrize("layout", ["swin", "mjp", "wrapped"])
def test_weights_of_the_authors(cifar_swin: SwinModel, layout: str, tmp_path: Path) -> None:
    """Swin's authors merge patches at the end of a stage; MJP's put E_unk behind the PEs, in one table."""
    net, pe, unknown = cifar_swin.net.state_dict(), cifar_swin.pos_embed, cifar_swin.unk_embed
    assert pe is not None
    assert unknown is not None
    for number in (1, 2):
        moved = [name for name in net if name.startswith(f"layers.{number}.downsample.")]
        for name in moved:
            net[name.replace(f"layers.{number}.", f"layers.{number - 1}.")] = net.pop(name)
    theirs = {name.replace("head.fc.", "head."): tensor for name, tensor in net.items()}
    images = torch.rand(2, 3, 32, 32, generator=Generator().manual_seed(0))
    masked = torch.arange(64).expand(2, -1) < 20
    if layout == "swin":
        with pytest.warns(PrivlabWarning, match="hold no E_unk; the mean position embedding stands in"):
            made = read(theirs | {"absolute_pos_embed": pe}, tmp_path / "w.safetensors")
        assert made.weights.unknown == "mean-pe"
        torch.testing.assert_close(made.model.unk_embed, pe.mean(1, keepdim=True), check_stride=False)
        assert torch.equal(made.model(images), cifar_swin(images))
        return
    if layout == "mjp":
        theirs |= {"absolute_pos_embed.weight": torch.cat([pe, unknown], 1)[0], "dlocr.layers.0.weight": pe[0]}
    else:  # a checkpoint of `privlab train`
        theirs = {f"victim.{name}": tensor for name, tensor in cifar_swin.state_dict().items()}
    made = read(theirs, tmp_path / "w.safetensors")
    assert made.weights.unknown == "trained"
    assert torch.equal(made.model(images, masked), cifar_swin(images, masked))


def test_a_plain_swin_gets_position_embeddings_that_are_untrained(cifar_swin: SwinModel, tmp_path: Path) -> None:
    with pytest.warns(PrivlabWarning, match="hold no absolute position embeddings; random ones"):
        made = read(cifar_swin.net.state_dict(), tmp_path / "w.safetensors")
    assert made.weights.unknown == "random"
    assert read(cifar_swin.net.state_dict(), tmp_path / "w.safetensors", "cifar_swin").model.unk_embed is None


def test_another_size_is_asked_for(cifar_swin: SwinModel, tmp_path: Path) -> None:
    state = cifar_swin.state_dict()
    assert read(state, tmp_path / "w.safetensors", img_size=64).model.grid == (32, 32)
    state["pos_embed"] = state["pos_embed"][:, :64]
    with pytest.raises(PrivlabError, match=r"pos_embed \(1, 64, 48\) instead of \(1, 256, 48\) \(--img-size resizes"):
        read(state, tmp_path / "w.safetensors")


def test_position_embeddings_are_not_dropped(cifar_swin: SwinModel, tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match=r"hold position embeddings, which cifar_swin lacks\. Use cifar_swin_mjp"):
        read(cifar_swin.state_dict(), tmp_path / "w.safetensors", "cifar_swin")


def test_weights_of_something_else(cifar_swin: SwinModel, tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match=r"do not fit this model. missing: conv1.weight, .*; unexpected: "):
        read(cifar_swin.net.state_dict(), tmp_path / "w.safetensors", "cifar_resnet")
    with pytest.raises(PrivlabError, match="--weights pretrained: timm has no pretrained weights for cifar_swin"):
        classifier("cifar_swin", weights="pretrained")


@pytest.mark.filterwarnings("ignore::privlab.threat.PrivlabWarning")
def test_timms_names_are_taken_too() -> None:
    made = classifier("timm:resnet10t", weights="random", img_size=32)
    assert isinstance(made, Pupil)
    assert (made.model.image_shape, made.architecture) == ((3, 32, 32), "resnet10t")
    plain = classifier("cifar_vit", weights="random")
    assert plain.weights == victim("cifar_vit", weights="random").weights


# Refusals


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("cifar_resnet", (), "MJP trains E_unk, and this model has none. Use a `_mjp` victim, or --set unknown=false"),
        ("cifar_resnet", ("unknown=false",), "this model has none: --set dal=none"),
        ("cifar_swin", (), "MJP trains E_unk, and this model has none"),
        ("resnet50_mjp", (), "resnet50 has no position embeddings, and so no E_unk. Found resnet50_mjp"),
        ("resnet5", (), "Unknown model 'resnet5'. Did you mean resnet50"),
    ],
)
@pytest.mark.filterwarnings("ignore::privlab.threat.PrivlabWarning")
def test_mjp_says_what_it_lacks(model: str, options: tuple[str, ...], message: str, data: Path, tmp_path: Path) -> None:
    course = Course(recipe="mjp", model=model, data=str(data), preset="small", options=options)
    with pytest.raises(PrivlabError, match=message):
        teach(course, tmp_path / "out")


@pytest.mark.parametrize("command", [("attack",), ("train", "mp3"), ("train", "droppos")])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "swin_t_mjp",
            "needs a plain ViT, timm's VisionTransformer. Found swin_t_mjp: `privlab evaluate`",
        ),
        (
            "resnet50",
            "needs a plain ViT, timm's VisionTransformer. Found resnet50: `privlab evaluate`",
        ),
        ("timm:resnet10t", "timm's VisionTransformer. Found resnet10t, a ResNet"),
    ],
)
def test_what_needs_a_plain_vit_says_so_in_one_line(
    command: tuple[str, ...], model: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = () if command == ("attack",) else ("--data", "samples", "--split", "none")
    out = ("--out", str(tmp_path / "out"), "--weights", "random")
    assert _status([*command, "--model", model, *rest, *out]) == 2
    told = capsys.readouterr()
    lines = [line for line in told.err.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in told.err
    assert told.out == ""
