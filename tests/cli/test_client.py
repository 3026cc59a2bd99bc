"""`privlab attack --client`: the update of a round of local training is released, attacked, scored and recorded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import privlab
from privlab.base import PrivlabError
from privlab.evaluation import CONTROLS, Case, Rows, applicable
from privlab.grids import read_experiment, specify
from privlab.release import observe_updates
from privlab.threat import CLIENT_PRESETS, Client, ClientData
from privlab.victims import victim

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")

Cli = Callable[..., Any]
ROUND = ("--set", "client.lr=0.1", "--set", "client.steps=3")


def spec(**given: Any) -> Case:
    return specify(model=("vit_ti",), weights="random", img_size=32, **given)


@pytest.mark.slow
def test_an_update_is_attacked_scored_and_recorded(attack: Cli, records: Callable[..., pd.DataFrame]) -> None:
    done = attack("--client", "sgd", *ROUND, "--metrics", "psnr", "--limit", "2", "--json").json
    frame = records()
    assert set(frame.release) == {"update"}
    assert set(frame.attack) == {"patch-update", "patch-gradient", "mjp-subspace", *CONTROLS}
    told = [json.loads(text)["client"] for text in frame.conditions]
    assert all(Client(**each) == Client(lr=0.1, steps=3) for each in told)
    assert (frame[frame.attack == "patch-update"].psnr > 60).all()
    assert frame[frame.attack.isin(CONTROLS)].psnr.max() < 40
    assert {row["attack"]: row["images"] for row in done["rows"]}["patch-update"] == 2
    stated = json.loads(Path(done["run"], "run.json").read_text())
    assert stated["specification"]["client"] == "sgd"
    assert stated["specification"]["options"] == ["client.lr=0.1", "client.steps=3"]
    assert any("updates after 3 steps of sgd (lr 0.1, images 1)" in line for line in done["verdict"])
    assert any("sees the update" in line for line in done["verdict"])
    shares = frame[frame.geometry == "in_place"].set_index("attack").explained
    assert shares["patch-update"].min() > 0.9999
    assert shares[[*CONTROLS]].isna().all()
    (line,) = done["explained"]
    assert line.startswith("vit_ti: share of the update that a reconstruction explains, no image being known: patch-gr")
    assert "patch-update 1.0000 (2 of 2 proven)" in line


@pytest.mark.slow
def test_a_client_that_no_attack_reads_is_a_result_and_no_evidence(
    attack: Cli, records: Callable[..., pd.DataFrame]
) -> None:
    adam = ("--client", "adam", "--set", "client.images=2", "--set", "client.steps=2", "--metrics", "psnr")
    done = attack(*adam, "--limit", "2", "--json")
    assert done.status == 0
    assert set(records().attack) == {*CONTROLS}
    told = done.json
    assert [verdict["word"] for verdict in told["verdicts"]] == ["no evidence"]
    assert [flag["head"] for flag in told["flags"]].count("No attack ran") == 1
    assert [message for message in told["warnings"] if "no evidence: No attack can run. 'patch-gradient'" in message]
    assert "needs what this observation does not grant" in attack(*adam, "--attack", "patch-gradient").error


@pytest.mark.slow
def test_it_is_the_update_that_such_a_client_sends(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What attacks get is `observe_updates` of each image by itself: of the same image in any batch, order or run."""
    seen: list[Any] = []
    from privlab.evaluation import check

    run = check.attack_batch
    monkeypatch.setattr(check, "attack_batch", lambda attack, each: (seen.append(each), run(attack, each))[1])
    options = {"weights": "random", "img_size": 32, "metrics": "psnr", "attacks": "patch-gradient"}
    frame = privlab.attack("vit_ti", images=photos, limit=2, client=Client(steps=2, lr=0.1), **options).records
    base = victim("vit_ti", weights="random", img_size=32)
    pixels = [base.preprocessing(image.pixels) for image in privlab.open_images(photos, limit=2) if image.pixels]
    labels = frame[(frame.attack == "patch-gradient") & (frame.geometry == "in_place")].label.tolist()
    own = observe_updates(
        base.model,
        Client(steps=2, lr=0.1),
        [ClientData(x[None], torch.tensor([y]), torch.Generator()) for x, y in zip(pixels, labels, strict=True)],
    )
    (given,) = seen
    assert {*given.gradients} == {"pos_embed", "patch_embed.proj.weight", "head.weight", "head.bias"}
    assert given.client == Client(steps=2, lr=0.1)
    assert given.grants == own.grants
    for name, update in given.gradients.items():
        torch.testing.assert_close(update, own.gradients[name], rtol=1e-3, atol=1e-7)


@pytest.mark.slow
def test_a_list_of_classes_is_a_target_of_the_binary_loss_alone(photos: Path, tmp_path: Path) -> None:
    """Its update is proven by what the head's bias says of each class; other losses take one class."""
    files = [path.read_bytes() for path in sorted(photos.glob("*.png"))]
    source = tmp_path / "labels.parquet"
    pq.write_table(pa.table({"image": files, "label": [[3, 1], [], [0]]}), source)
    options = {"weights": "random", "img_size": 32, "attacks": "patch-update", "metrics": "psnr"}
    frame = privlab.attack("vit_ti", images=source, client=Client(loss="binary"), **options).records
    rows = frame[frame.attack == "patch-update"]
    assert (rows.levels_wrong == 0).all()
    assert rows.explained.min() > 0.9999  # with one class of each, 0.99
    assert rows.label.isna().all()
    refused = privlab.attack("vit_ti", images=source, client=Client(), **options).records
    reasons = [of_image.reason for _, of_image in refused.groupby("image")]
    assert [bool(each.str.contains("loss=binary").all()) for each in reasons] == [True, True, False]
    assert reasons[2].isna().all()  # a list of one class is a class


def test_cells_of_other_clients_are_other_cells() -> None:
    base = victim("vit_ti", weights="random", img_size=32)

    def cell(client: str | None, *options: str) -> str:
        made = spec(client=client, options=options, attack=("patch-gradient",))
        return Rows(made, base, ()).cells("a", applicable(made, base)[0])["patch-gradient"]

    found = [cell(None), cell("sgd"), cell("sgd", "client.lr=0.02"), cell("adam"), cell("sgd", "client.clip=1")]
    assert len({*found}) == 5
    assert cell("sgd", "client.lr=0.01", "client.steps=1") != found[1]  # one says its length, the other takes one pass
    assert cell("sgd", "client.lr=0.01") == found[1]


def test_a_preset_is_its_client_and_an_option_for_the_length_takes_the_place_of_its_own() -> None:
    for name, client in CLIENT_PRESETS.items():
        assert spec(client=name).client == client
    made = spec(client="mediswarm", options=("client.steps=3", "client.lr=0.5")).client
    assert made is not None
    assert (made.steps, made.epochs, made.lr, made.weight_decay) == (3, None, 0.5, 0.01)
    assert spec(client="adam").client == Client(optimiser="adam")
    assert spec().client is None


@pytest.mark.slow
def test_images_of_a_client_are_released_together(attack: Cli, records: Callable[..., pd.DataFrame]) -> None:
    forced = ("--attack", "patch-gradient", "--block", "stock", "--force", "--metrics", "psnr")
    attack("--client", "sgd", "--set", "client.images=2", *forced, "--limit", "3")
    rows = records().query("attack == 'patch-gradient' and geometry == 'in_place'")
    assert sorted(rows.batch_images) == [1, 2, 2]
    assert rows[rows.batch_images == 2].batch.nunique() == 1
    assert rows[rows.batch_images == 1].psnr.min() > rows[rows.batch_images == 2].psnr.max() + 10
    assert rows[rows.batch_images == 2].beyond_range.eq("forced without batch_size_one").all()


def test_each_attack_reads_the_updates_that_it_declares(attack: Cli) -> None:
    base = victim("vit_ti", weights="random", img_size=32)
    groups, _ = applicable(spec(effort="full"), base)
    of_gradients = {each.name for group in groups for each in group.attacks}
    assert "patch-update" not in of_gradients
    two_steps, one_step = ("client.steps=2",), ("client.steps=1",)
    for client, length, expected in (
        ("sgd", two_steps, {"patch-update", "patch-gradient", "mjp-subspace", "mjp-unrolling"}),
        ("sgd", one_step, {"patch-update"} | of_gradients),
        ("adamw", one_step, {"patch-gradient", "adam-update"}),
    ):
        groups, refused = applicable(spec(client=client, effort="full", options=length), base)
        assert {each.name for group in groups for each in group.attacks} == expected
        assert not refused
    said = attack("--client", "sgd", "--set", "client.steps=2", "--attack", "gradient-matching").error
    assert "Attack 'gradient-matching' reads the gradient of one step, and this run releases the update" in said
    assert "trains by sgd (steps: 2, images: 1)" in said
    said = attack("--client", "adam", "--attack", "patch-update").error
    assert (
        "'patch-update' reads updates of sgd, and this run releases the update of a client that trains by adam ("
        in said
    )
    assert "no evidence of privacy" in said
    assert "client_update" in attack("--attack", "patch-update").error


@pytest.mark.slow
def test_masks_that_are_drawn_anew_in_each_step_hide_little(attack: Cli, records: Callable[..., pd.DataFrame]) -> None:
    given = ("--attack", "mjp-subspace,patch-gradient,patch-update", "--metrics", "psnr", "--limit", "1")
    under = ("--model", "vit_ti_mjp", "--img-size", "64", "--defense", "mjp", "--setting", "c", "--gamma", "0.2")
    done = attack("--client", "sgd", *ROUND, *given, *under)
    assert done.status == 0, done.error
    frame = records().query("geometry == 'in_place'").set_index("attack")
    assert set(frame.setting) == {"c"}
    assert frame.psnr["mjp-subspace"] > frame.psnr[["patch-gradient", "patch-update"]].max() + 0.5
    assert frame.explained.isna().all()  # nobody can repeat the draws


@pytest.mark.slow
def test_images_of_one_step_are_separated_as_those_of_a_gradient(
    attack: Cli, records: Callable[..., pd.DataFrame]
) -> None:
    given = ("--attack", "token-separation", "--metrics", "psnr", "--limit", "2", "--overwrite")
    done = attack("--client", "sgd", *given, "--set", "client.images=2", "--set", "client.batch_size=2")
    assert done.status == 0, done.error
    of_update = records().query("attack == 'token-separation' and geometry == 'in_place'").set_index("image_sha256")
    attack("--gradient-batch", "2", *given, "--setting", "a")
    of_gradient = records().query("attack == 'token-separation' and geometry == 'in_place'").set_index("image_sha256")
    assert set(of_update.release) == {"update"}
    assert of_update.status.tolist() == ["ok"] * 2
    assert (of_update.psnr - of_gradient.psnr[of_update.index]).abs().max() < 15  # rounding of stored weights


@pytest.mark.slow
def test_what_makes_an_update_no_gradient_is_in_the_records(attack: Cli, records: Callable[..., pd.DataFrame]) -> None:
    attack("--client", "adamw", "--set", "client.weight_decay=0.1", "--metrics", "psnr", "--limit", "1")
    (said,) = records().query("attack == 'patch-gradient'").beyond_range.unique()
    assert said == "adamw scales each entry separately and weight decay 0.1 in the update"
    assert records().query("attack == 'patch-gradient' and geometry == 'in_place'").explained.item() < 0.9


@pytest.mark.slow
def test_clients_under_secure_aggregation_are_released_as_their_mean(
    attack: Cli, records: Callable[..., pd.DataFrame]
) -> None:
    given = ("--attack", "token-separation", "--metrics", "psnr", "--overwrite", "--client", "sgd")
    done = attack(*given, "--set", "client.clients=2", "--limit", "3", "--details")
    assert done.status == 0, done.error
    assert "updates after 1 step of sgd (lr 0.01, images 1, clients 2)" in " ".join(done.out.split())
    of_clients = records().query("attack == 'token-separation' and geometry == 'in_place'").set_index("image_sha256")
    assert sorted(of_clients.batch_images) == [1, 2, 2]
    assert json.loads(of_clients.conditions.iloc[0])["client"]["clients"] == 2
    attack(*given, "--set", "client.images=2", "--set", "client.batch_size=2", "--limit", "2")
    of_batch = records().query("attack == 'token-separation' and geometry == 'in_place'").set_index("image_sha256")
    assert "clients" not in json.loads(of_batch.conditions.iloc[0])["client"]
    assert (of_clients.psnr[of_batch.index] - of_batch.psnr).abs().max() < 15  # rounding of stored weights
    assert (of_clients.explained > 0.9999).all()  # all clients are run again
    assert of_batch.explained.isna().all()


MISTAKES = {
    "name": (("--client", "sdg"), "Unknown client 'sdg'. Did you mean sgd"),
    "steps": (("--client", "sgd", "--set", "client.steps=0"), "client.steps must be at least 1. Found 0."),
    "key": (("--client", "sgd", "--set", "client.rate=1"), "Unknown option 'rate'"),
    "type": (("--client", "sgd", "--set", "client.lr=fast"), "--set client.lr=fast: the value must be of type float."),
    "not public": (
        ("--client", "sgd", "--set", "client.weight_decay=unknown"),
        "Found client.weight_decay=unknown: state the likeliest value",
    ),
    "both": (("--client", "sgd", "--set", "client.steps=2", "--set", "client.epochs=1"), "give one of them"),
    "adam's momentum": (("--client", "adam", "--set", "client.momentum=0.9"), "client.momentum=0.9 needs sgd."),
    "no client": (("--release", "update"), "An update is released by a client. Found release 'update' and no client"),
    "option alone": (("--set", "client.lr=1"), "An update is released by a client. Found client.lr=1 and no client"),
    "other release": (("--client", "sgd", "--release", "features"), "A client releases its update. Found --release"),
    "defense": (
        ("--client", "sgd", "--setting", "c", "--defense", "row-permutation"),
        "Defense 'row-permutation' acts on features, which a client that trains does not send.",
    ),
    "setting": (("--client", "sgd", "--setting", "a,b"), "Found setting a,b and an update: take a or c."),
    "one key": (
        ("--client", "sgd", "--setting", "c", "--defense", "block-scrambling"),
        "'block-scrambling' has one key for all images of a client, and is not defined for updates.",
    ),
    "batch": (("--client", "sgd", "--gradient-batch", "2"), "use --set client.images=2."),
    "too few": (
        (
            *("--client", "sgd", "--set", "client.images=32", "--attack", "patch-gradient"),
            "--block",
            "stock",
            "--force",
        ),
        "client.images must be at most the number of images, 3. Found 32: give --images with 32 or more",
    ),
    "too few for the clients": (
        ("--client", "sgd", "--set", "client.clients=4", "--attack", "token-separation"),
        "client.clients times client.images must be at most the number of images, 3. Found 4: give --images with 4",
    ),
    "no clients": (("--client", "sgd", "--set", "client.clients=0"), "client.clients must be at least 1. Found 0."),
    "filters of several": (
        *(("--client", "sgd", "--set", "client.clients=2", "--setting", "c", "--defense", "gradient-noise"),),
        "Defense 'gradient-noise' acts on the update of each client, and its mean over client.clients=2 is not",
    ),
    "the mean of several": (
        ("--client", "sgd", "--set", "client.clients=2", "--set", "client.steps=2", "--attack", "patch-update"),
        "'patch-update' reads the update of one client, and here the mean of client.clients=2 is released.",
    ),
    "preset of a batch": (
        ("--client", "nvflare-default", "--set", "client.epochs=2"),
        "Found 32, by the preset nvflare-default: give --images with 32 or more, or --set client.images=3.",
    ),
    "frozen": (
        ("--client", "sgd", "--set", "client.trains=head", "--attack", "patch-gradient"),
        "'patch-gradient' needs patch_embed.proj.weight, pos_embed, which this client did not train",
    ),
    "attack on features": (
        ("--client", "sgd", "--attack", "least-squares"),
        "'least-squares' reads features, and this run releases the update of a client",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(attack: Cli, photos: Path, name: str) -> None:
    arguments, said = MISTAKES[name]
    assert said in attack(*arguments).error


@pytest.mark.slow
def test_a_client_that_diverges_fails_its_images_alone(attack: Cli, records: Callable[..., pd.DataFrame]) -> None:
    done = attack("--client", "sgd", "--set", "client.lr=1e30", "--set", "client.steps=9", "--limit", "1")
    assert done.status == 2
    reasons = records().query("status == 'failed'").reason.unique()
    assert len(reasons) == 1
    assert "the client trained nothing or diverged in 9 steps from a rate of 1e+30. Take another" in reasons[0]


def test_a_table_takes_clients_and_their_options_as_keys(tmp_path: Path) -> None:
    file = tmp_path / "clients.toml"
    file.write_text(
        '[run]\nmodel = "vit_ti"\nclient = "sgd"\n"client.nesterov" = true\n"client.momentum" = 0.9\n'
        'set = ["client.images=1"]\n\n[grid]\n"client.steps" = [1, 5]\n\n[[case]]\n"client.lr" = 0.5\n'
    )
    cases = read_experiment(file).cases
    made = [case.runs[0].client for case in cases]
    assert made == [Client(lr=0.5, momentum=0.9, nesterov=True, steps=n) for n in (1, 5)]
    assert [case.options["client.steps"] for case in cases] == [1, 5]
    for text, line, message in (
        ('"client.stesp" = 3', 3, "Unknown key of [run] 'client.stesp'. Did you mean client.steps"),
        ('client = "sgd"\n"client.steps" = 0', 4, "client.steps must be at least 1. Found 0."),
        ('client = "sgd"\n"client.lr" = [1]', 4, "the value must be of type float. Found '[1]'."),
        ('client = "sdg"', 3, "Unknown client 'sdg'. Did you mean sgd"),
    ):
        file.write_text(f'[run]\nmodel = "vit_ti"\n{text}\n')
        with pytest.raises(PrivlabError) as error:
            read_experiment(file)
        assert f"line {line}: " in str(error.value)
        assert message in str(error.value)


@pytest.mark.slow
def test_a_filter_acts_on_the_update_and_stands_in_the_record(
    attack: Cli, records: Callable[..., pd.DataFrame]
) -> None:
    filtered = ("--client", "sgd", *ROUND, "--defense", "percentile-privacy", "--metrics", "psnr", "--limit", "1")
    attack(*filtered)
    frame = records()
    assert set(frame.defense) == {"percentile-privacy"}
    assert set(frame.release) == {"update"}
    assert json.loads(frame.defense_params.iloc[0]) == {"percentile": 10.0, "gamma": 0.01, "steps": 1}
    psnr = frame[frame.geometry == "in_place"].set_index("attack").psnr
    assert psnr["patch-update"] > psnr["patch-gradient"] + 10
    everything = ("--client", "sgd", "--defense", "exclude-vars", "--set", "pattern=.", "--limit", "1")
    assert "'exclude-vars' removes everything" in attack(*everything, "--attack", "patch-update", "--overwrite").error
