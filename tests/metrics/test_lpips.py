"""LPIPS against the `lpips` package with the same backbone loaded by hand; and where backbones come from."""

import hashlib
import warnings
from pathlib import Path

import lpips as package
import pytest
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from privlab.base import PrivlabError
from privlab.metrics import LPIPS_BACKBONES, Lpips, LpipsUnavailable, find_backbone, load_lpips, net_at_hand, score
from privlab.metrics.lpips_backbones import SHIPPED

WEIGHTS = Path(__file__).parents[2].parent / "shared" / "weights"


def need_weights(prefix: str) -> Path:
    found = sorted(WEIGHTS.glob(f"{prefix}*.safetensors"))
    if not found:
        pytest.skip(f"{WEIGHTS}/{prefix}*.safetensors is not on this machine")
    return found[0]


def images(side: int = 64, b: int = 3) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return torch.rand(b, 3, side, side, generator=rng), torch.rand(b, 3, side, side, generator=rng)


@pytest.fixture(scope="module")
def alexnet() -> dict[str, Tensor]:
    """An AlexNet of random weights: good for tests of loading code, and for nothing else."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        state = torchvision.models.alexnet(weights=None).state_dict()
    return {name: tensor for name, tensor in state.items() if "classifier.1" not in name and "classifier.4" not in name}


@pytest.fixture(scope="module")
def alexnet_file(alexnet: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "alexnet-owt-test.pth"
    torch.save(alexnet, path)
    return path


@pytest.fixture(scope="module")
def alex(alexnet_file: Path) -> Lpips:
    return load_lpips("alex", alexnet_file)


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty torch hub, and a network that does not answer."""
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    monkeypatch.setattr("privlab.victims.weights.reachable", lambda _: False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path


def by_hand(net: str, features: dict[str, Tensor]) -> torch.nn.Module:
    """Set every layer through torchvision's own indices, not through names of the state dict."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = package.LPIPS(net=net, pnet_rand=True, verbose=False)
    for piece in module.net.children():
        for index, layer in piece.named_children():
            start = f"features.{index}."
            own = {name.removeprefix(start): t for name, t in features.items() if name.startswith(start)}
            layer.load_state_dict(own)
    return module


def assert_agrees(metric: Lpips, features: dict[str, Tensor]) -> None:
    x, y = images()
    with torch.no_grad():
        expected = by_hand(metric.net, features)(2 * x - 1, 2 * y - 1)[:, 0, 0, 0].double()
    assert metric(x, y).dtype == torch.float64
    assert_close(metric(x, y), expected, rtol=1e-5, atol=1e-7)


def test_agrees_with_the_package_on_a_test_backbone(alex: Lpips, alexnet: dict[str, Tensor]) -> None:
    assert_agrees(alex, alexnet)


@pytest.mark.parametrize("net", ["alex", "squeeze"])
def test_agrees_with_the_package_on_pretrained_backbones(net: str) -> None:
    path = need_weights(LPIPS_BACKBONES[net].prefix)
    assert_agrees(load_lpips(net, WEIGHTS), load_file(path))


def test_squeeze_reproduces_a_published_value() -> None:
    """The documented example of torchmetrics: seed 123, ten random pairs in [−1, 1], mean 0.1008."""
    metric = load_lpips("squeeze")
    rng = torch.Generator().manual_seed(123)
    x, y = (torch.rand(10, 3, 100, 100, generator=rng) for _ in range(2))
    assert_close(metric(x, y).mean().item(), 0.1008, rtol=0, atol=5e-5)


def test_images_are_mapped_to_minus_one_to_one(alex: Lpips) -> None:
    """The commonest published slip is to feed [0, 1]; it gives another distance."""
    x, y = images()
    slip = alex.module(x, y).flatten().double()
    assert ((alex(x, y) - slip).abs() > 1e-3 * slip).all()
    assert_close(alex(x, y), alex.module(x, y, normalize=True).flatten().double())


def test_equal_images_have_distance_zero_and_images_are_scored_alone(alex: Lpips) -> None:
    x, y = images()
    assert_close(alex(x, x), torch.zeros(3, dtype=torch.float64))
    alone = torch.cat([alex(x[i : i + 1], y[i : i + 1]) for i in range(3)])
    assert_close(alex(x, y), alone, rtol=1e-5, atol=1e-7)


def test_score_takes_backbones_by_network(alex: Lpips) -> None:
    x, y = images()
    values = score(x, y, ["mse", "lpips_alex"], {"lpips_alex": alex})
    assert_close(values["lpips_alex"], alex(x, y))


def test_identity_of_the_backbone_is_kept(alex: Lpips, alexnet_file: Path) -> None:
    assert (alex.net, alex.file) == ("alex", "alexnet-owt-test.pth")
    assert alex.sha256 == hashlib.sha256(alexnet_file.read_bytes()).hexdigest()


def test_the_distance_has_a_gradient_for_x_only(alex: Lpips) -> None:
    x, y = images()
    x.requires_grad_()
    alex(x, y).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert not any(parameter.requires_grad for parameter in alex.module.parameters())


def test_loading_leaves_the_random_state_alone(alexnet_file: Path) -> None:
    before = torch.get_rng_state()
    load_lpips("alex", alexnet_file)
    assert_close(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["alexnet_features.safetensors", "alexnet-owt-7be5be79.pth", "alexnet.pth"])
def test_a_folder_is_searched_for_the_network(name: str, alexnet: dict[str, Tensor], tmp_path: Path) -> None:
    (tmp_path / "squeezenet1_1.pth").touch()
    save = save_file if name.endswith(".safetensors") else torch.save
    save(alexnet, tmp_path / name)
    assert load_lpips("alex", tmp_path).file == name


def test_vgg16_with_batch_norm_is_not_taken_for_vgg16(tmp_path: Path) -> None:
    (tmp_path / "vgg16_bn-6c64b313.pth").touch()
    with pytest.raises(LpipsUnavailable, match=r".+vgg16\*\.safetensors.*vgg16\*\.pth"):
        load_lpips("vgg", tmp_path)


def test_torchvisions_cache_is_used(alexnet_file: Path, alex: Lpips, no_cache: Path) -> None:
    cached = no_cache / "checkpoints" / "alexnet-owt-7be5be79.pth"
    cached.parent.mkdir()
    cached.write_bytes(alexnet_file.read_bytes())
    assert load_lpips("alex").sha256 == alex.sha256


def test_squeeze_comes_with_privlab(no_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a file nor the network is needed, and the cache is not looked into."""
    monkeypatch.setattr("privlab.victims.weights.reachable", lambda _: pytest.fail("tried to reach it"))
    metric = load_lpips("squeeze")
    assert (metric.file, metric.sha256) == SHIPPED["squeeze"]
    assert_agrees(metric, load_file(find_backbone("squeeze")))
    assert find_backbone("squeeze").with_name("LICENSE.squeezenet").is_file()


def test_a_folder_that_lacks_squeeze_leaves_what_comes_with_privlab(alexnet_file: Path, tmp_path: Path) -> None:
    shipped = find_backbone("squeeze")
    assert find_backbone("squeeze", alexnet_file.parent) == shipped
    (tmp_path / "squeezenet1_1.pth").touch()
    assert find_backbone("squeeze", tmp_path) == tmp_path / "squeezenet1_1.pth"
    with pytest.raises(LpipsUnavailable, match=r"lpips_squeeze: found no file .+nowhere"):
        find_backbone("squeeze", tmp_path / "nowhere")


def test_a_damaged_or_missing_shipped_backbone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bytearray(find_backbone("squeeze").read_bytes())
    monkeypatch.setattr("privlab.metrics.lpips_backbones._FOLDER", tmp_path)
    with pytest.raises(LpipsUnavailable, match=r"lpips_squeeze.*.+safetensors"):
        load_lpips("squeeze")
    whole[-1] ^= 1  # the last weight, which every reader would take
    (tmp_path / SHIPPED["squeeze"][0]).write_bytes(whole)
    with pytest.raises(PrivlabError, match=r"SHA-256.*29dd9af42ad4…"):
        load_lpips("squeeze")


def test_the_network_at_hand_is_alexnet_where_it_can_be_had(
    no_cache: Path, alexnet_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, reason = net_at_hand()
    assert net == "squeeze"
    assert reason is not None
    assert "alexnet-owt-7be5be79.pth cannot be reached" in reason
    assert net_at_hand(alexnet_file) == net_at_hand(alexnet_file.parent) == ("alex", None)
    (no_cache / "checkpoints").mkdir()
    (no_cache / "checkpoints" / "alexnet-owt-7be5be79.pth").write_bytes(alexnet_file.read_bytes())
    monkeypatch.setattr("privlab.victims.weights.reachable", lambda _: pytest.fail("tried to reach it"))
    assert net_at_hand() == ("alex", None)


def test_a_place_that_is_named_must_hold_one_of_the_two_networks(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(LpipsUnavailable, match=r"lpips_alex.*.+--lpips-weights.*PATH"):
            net_at_hand(place)
    (tmp_path / "squeezenet1_1.pth").touch()
    assert net_at_hand(tmp_path)[0] == "squeeze"


def test_a_missing_backbone_is_unavailable_and_says_how_to_get_it(no_cache: Path) -> None:
    place = r"alexnet-owt-7be5be79\.pth"
    message = rf"checkpoints.{place} does not exist, and https.+{place} cannot be reached\. .+--lpips-weights PATH"
    with pytest.raises(LpipsUnavailable, match=message):
        load_lpips("alex")


def test_offline_means_no_attempt(no_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privlab.victims.weights.reachable", lambda _: pytest.fail("tried to reach it"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(LpipsUnavailable, match=r"\(HF_HUB_OFFLINE.*set\)"):
        load_lpips("alex")


def test_a_download_lands_in_torchvisions_cache(
    no_cache: Path, alexnet_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(url: str, dst: str, hash_prefix: str, progress: bool) -> None:
        assert (url.rpartition("/")[2], hash_prefix) == ("alexnet-owt-7be5be79.pth", "7be5be79")
        Path(dst).write_bytes(alexnet_file.read_bytes())

    monkeypatch.setattr("privlab.victims.weights.reachable", lambda _: True)
    monkeypatch.setattr("torch.hub.download_url_to_file", download)
    assert load_lpips("alex").file == "alexnet-owt-7be5be79.pth"
    assert (no_cache / "checkpoints" / "alexnet-owt-7be5be79.pth").is_file()


def test_a_failed_download_is_unavailable(no_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(url: str, dst: str, hash_prefix: str, progress: bool) -> None:
        raise RuntimeError("invalid hash value")

    monkeypatch.setattr("privlab.victims.weights.reachable", lambda _: True)
    monkeypatch.setattr("torch.hub.download_url_to_file", download)
    with pytest.raises(LpipsUnavailable, match=r"failed \(invalid hash value\)"):
        load_lpips("alex")


def test_a_path_that_does_not_exist_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(LpipsUnavailable, match=r"lpips_alex.*.+nowhere\.pth.*.+--lpips-weights.*PATH"):
        load_lpips("alex", tmp_path / "nowhere.pth")


def test_unknown_networks_are_refused() -> None:
    with pytest.raises(PrivlabError, match=r"LPIPS.*'alexnet'"):
        load_lpips("alexnet")


def test_a_file_that_does_not_fit_names_its_tensors(alexnet: dict[str, Tensor], tmp_path: Path) -> None:
    wrong = {name: tensor for name, tensor in alexnet.items() if name != "features.3.weight"}
    wrong["features.6.bias"] = torch.zeros(7)
    wrong["features.11.weight"] = torch.zeros(7)
    save_file(wrong, tmp_path / "wrong.safetensors")
    found = "missing: features.3.weight; unexpected: features.11.weight; mis-shaped: features.6.bias"
    with pytest.raises(PrivlabError, match=found):
        load_lpips("alex", tmp_path / "wrong.safetensors")


def test_the_file_of_another_network_names_missing_tensors(alexnet_file: Path) -> None:
    with pytest.raises(PrivlabError, match=r"features\.3\.squeeze\.weight.*and \d+ more"):
        load_lpips("squeeze", alexnet_file)


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.pth").write_bytes(b"not a checkpoint")
    with pytest.raises(PrivlabError, match=r"broken\.pth"):
        load_lpips("alex", tmp_path / "broken.pth")


@pytest.mark.parametrize("net", ["alex", "squeeze", "vgg"])
def test_the_smallest_side_is_the_one_below_which_the_network_fails(net: str) -> None:
    side = LPIPS_BACKBONES[net].min_side
    with torch.device("meta"):  # shapes alone decide, and random weights take seconds
        model = {"alex": torchvision.models.alexnet, "vgg": torchvision.models.vgg16}.get(
            net, torchvision.models.squeezenet1_1
        )(weights=None)
        used = model.features[: {"alex": 12, "vgg": 30, "squeeze": 13}[net]]
        used(torch.zeros(1, 3, side, side))
        with pytest.raises(RuntimeError, match=r"too small|Output size"):
            used(torch.zeros(1, 3, side, side - 1))


def test_small_images_are_refused_and_grey_ones_have_three_equal_colours(alex: Lpips) -> None:
    x, y = images(side=30)
    with pytest.raises(PrivlabError, match=r"lpips_alex.*3×31×31.*3×30×30"):
        alex(x, y)
    x, y = images(side=64)
    with pytest.raises(PrivlabError, match=r"Found 2×64×64\."):
        alex(x[:, :2], y[:, :2])
    torch.testing.assert_close(
        alex(x[:, :1], y[:, :1]), alex(x[:, :1].expand_as(x).clone(), y[:, :1].expand_as(y).clone())
    )


def test_images_outside_the_unit_range_are_refused(alex: Lpips) -> None:
    x, y = images()
    with pytest.raises(PrivlabError, match=r"\[0.*1\].*values.*-1"):
        alex((2 * x - 1).index_fill(3, torch.tensor(0), -1.0), y)
