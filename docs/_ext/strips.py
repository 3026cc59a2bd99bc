"""The strip on the page of each attack and defense: the private image, what was fed or released, a reconstruction.

`python docs/_ext/strips.py RUNS [SECONDS]` runs the example of each page into a folder of RUNS, and goes on
where it was stopped. An example that takes longer than the limit has no strip, and its page says so.
Pages without a strip are tried again where SECONDS is given.
"""

import json
import shlex
import signal
import sys
from base64 import b64decode
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from PIL import Image

import privlab
from privlab.attacks import attacks
from privlab.base import PrivlabError, write_whole
from privlab.benchmark import entries
from privlab.cli import cli
from privlab.defenses import defenses
from privlab.evaluation import CONTROL, CONTROLS
from privlab.evaluation.names import client_of
from privlab.inventory.explain import explain, known
from privlab.report.tables import load_results
from privlab.report.tables.per_image import attack_label
from privlab.stores import places_of
from privlab.threat import Capability, FeatureObservation
from privlab.threat.declarations import attack_declarations

FOLDER = Path(__file__).parents[2] / "experiments" / "notes" / "strips"
CAPTIONS = FOLDER / "captions.json"
PHOTOGRAPH = "samples/chelsea-0"
"""The photograph that is shown where the example attacks it."""

SECONDS = 90
"""The limit of an example, on one core, unless another is given."""

DECODERS = ("inversion-conv", "inversion-mae", "inversion-set", "inversion-token")
SEARCHES = ("beyondinfering", "clsattack", "deepleakage", "invertinggradients", "legacy", "modern")
SEARCHES += ("seethroughgradients", "tag", "wei")
FEWER = {
    "orthogonal-matching": ("steps=2",),
    **dict.fromkeys(DECODERS, ("steps=20",)),
    **{f"breaching:{name}": ("optim.max_iterations=100", "restarts.num_trials=1") for name in SEARCHES},
}
"""Options that make long examples short; the caption has the command with them."""

FURTHER = {
    "patch-update+wide": (
        "privlab attack --model cifar_vit --attack patch-update --img-size 48 --client sgd --limit 2",
        "At 48 pixels the image has 144 patches, more than the 128 channels, and the equations do not determine it.",
    )
}
"""Examples that a page shows besides its own, by its name and one for them: the command, and what is different."""

_SIDE, _GAP = 32, 3
"""A panel and the space between two, in pixels; the site enlarges them without smoothing."""


def main(runs: Path, seconds: int | None = None) -> None:
    """Run the examples that have no strip yet, and write their strips and captions.

    Args:
        runs: the folder of their run directories.
        seconds: the limit of each example; None is SECONDS, and does not try again what has no strip.
    """
    FOLDER.mkdir(exist_ok=True)
    kinds = known()
    own = {name: explain(name).sections["Example"] for name, kind in kinds.items() if kind in ("attack", "defense")}
    further = {name: command for name, (command, _) in FURTHER.items()}
    for name, command in (own | further).items():
        page, kind = name.partition("+")[0], kinds[name.partition("+")[0]]
        words = shlex.split(command)
        if "--limit" not in words:
            words += ["--limit", "2"]
        words += [word for option in FEWER.get(name, ()) for word in ("--set", f"{name}.{option}")]
        captions = json.loads(CAPTIONS.read_text("utf-8")) if CAPTIONS.exists() else {}
        run, file = runs / name.replace(":", "-"), FOLDER / f"{name.replace(':', '-')}.png"
        if name not in captions or (seconds and "missing" in captions[name]):
            obstacle = attack_declarations(attacks()[page]).obstacle if kind == "attack" else ""
            caption = (
                {"missing": f"it does not run on ViTs ({obstacle})"}
                if obstacle
                else _strip(words, run, file, page if kind == "attack" else "", seconds or SECONDS)
            )
            captions[name] = {"command": shlex.join(words), **caption}
            if name in FURTHER:
                captions[name]["about"] = FURTHER[name][1]
            text = json.dumps(captions, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
            write_whole(CAPTIONS, lambda draft, text=text: draft.write_text(text, "utf-8"))
        print(name, captions[name], flush=True)  # noqa: T201


def _strip(words: Sequence[str], run: Path, file: Path, attack: str, seconds: int) -> dict[str, str]:
    """Run an example, write its strip, and return what the panels are; or why there is no strip.

    Args:
        words: the command line.
        run: its run directory.
        file: that of the strip.
        attack: whose reconstruction is shown; "" for the one with the highest PSNR.
        seconds: after which it is stopped.
    """
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(seconds)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            cli.main([*words[1:], "--metrics", "psnr", "--out", str(run)], standalone_mode=False)
    except _LateError:
        return _from_benchmark(words, file, attack) or {
            "missing": f"the example takes more than {seconds} seconds on one busy core"
        }
    except (PrivlabError, click.ClickException) as error:
        return {"missing": f"the example ends with: {error}"}
    finally:
        signal.alarm(0)
    records = load_results(run).records
    places = {
        panel: place for path in sorted((run / "strips").glob("*.png")) for panel, place in places_of(path).items()
    }
    own = ~records.attack.str.startswith(CONTROL) if not attack else records.attack == attack
    rows = records[own & (records.status == "ok") & (records.geometry != "oracle")]
    rows = rows[rows.setting == rows.setting.max()]  # the private image is what scores compare with
    preferred = rows[rows.image == PHOTOGRAPH]
    for row in (rows if preferred.empty else preferred).sort_values("psnr", ascending=False).to_dict("records"):
        same = (records.attack == CONTROLS[0]) & (records.setting == row["setting"])
        control, image = records[same].cell.iloc[0], row["image_sha256"]
        cell = f"{row['cell']}-reassembled" if row["geometry"] == "reassembled" else row["cell"]
        keys = [(cell, image), *((f"{control}-{what}", image) for what in ("private", "sent", "fed"))]
        made, private, sent, fed = (places[key].open().convert("RGB") if key in places else None for key in keys)
        if made is None or private is None:
            continue
        together = [places[f"{control}-private", sha].open().convert("RGB") for sha in records.image_sha256.unique()]
        shown = _draw(file, private, *_released(words, row["release"], private, sent, fed, together), made)
        label = attack_label(row["attack"], row["geometry"])
        return {"middle": shown, "made": label, "psnr": f"{row['psnr']:.1f}", "photograph": row["image"]}
    reasons = records.reason[own & (records.status != "ok")].dropna()
    return {"missing": reasons.iloc[0] if len(reasons) else "its result is not a picture"}


def _from_benchmark(words: Sequence[str], file: Path, attack: str) -> dict[str, str] | None:
    """Write a strip of the picture that the benchmark keeps of an attack on the example's defense, if it has one."""
    defense = dict(pairwise(words)).get("--defense")
    for result in entries():
        for shown in result.data.get("pictures", {}).get(defense, {}).values():
            if result.card.kind == "attack" and shown["attack"] == attack:
                both = [BytesIO(b64decode(shown[key].partition(",")[2])) for key in ("private", "made")]
                private, made = (Image.open(png).convert("RGB") for png in both)
                kind = "features" if result.card.track == "features" else "gradients"
                middle = _draw(file, private, *_released(words, kind, private, None, None), made)
                return {"middle": middle, "made": attack, "psnr": f"{float(shown['score']):.1f}", "kept": "benchmark"}
    return None


def _draw(file: Path, private: Image.Image, middle: Image.Image, shown: str, made: Image.Image) -> str:
    """Write the three panels of a strip, and return what the one in the middle shows."""
    sheet = Image.new("RGB", (3 * _SIDE + 2 * _GAP, _SIDE), "white")
    for i, panel in enumerate((private, middle, made)):
        sheet.paste(panel.resize((_SIDE, _SIDE), Image.Resampling.NEAREST), (i * (_SIDE + _GAP), 0))
    sheet.save(file, optimize=True)
    return shown


def _released(
    words: Sequence[str],
    release_name: str,
    private: Image.Image,
    sent: Image.Image | None,
    fed: Image.Image | None,
    together: Sequence[Image.Image] = (),
) -> tuple[Image.Image, str]:
    """Return what the client fed or sent, where a defense changed it; else a part of the release, as grey levels.

    Args:
        words: the command line.
        release_name: the column `release` of the records.
        private: the private image.
        sent: its patches in the order in which their features were sent.
        fed: what the client fed to the model.
        together: all private images of the run, of which some may share a release.
    """
    if sent is not None and sent.tobytes() != private.tobytes():
        return sent, "the patches in the order in which the client sent their features"
    if fed is not None and fed.tobytes() != private.tobytes():
        return fed, "what the client fed to the model"
    options = dict(pairwise(words))
    settings = [value for word, value in pairwise(words) if word == "--set"]
    size = options.get("--img-size")
    victim = privlab.victim(options["--model"], img_size=None if size is None else int(size))
    count = int(options.get("--gradient-batch", 1))  # images in one release
    release: Any = privlab.Features() if release_name == "features" else privlab.Gradient(count)
    if preset := options.get("--client"):
        release = privlab.Update(client_of(preset, settings))
        count = release.client.images * release.client.clients
    shown = together[:count] if count > 1 else [private]
    x = torch.stack([torch.tensor(np.asarray(image)).permute(2, 0, 1).float() / 255 for image in shown])
    attack = attacks().get(options.get("--attack", ""))
    server: Any = attack() if attack and Capability.CHOOSES_WEIGHTS in attack.requires else None
    defense = options.get("--defense", "none")
    seen = privlab.observe(victim, x, release=release, defense=defenses()[defense](), server=server)
    if isinstance(seen, FeatureObservation):
        return _grey(seen.features[0]), "a part of the features that the client released, as grey levels"
    name = "patch_embed.proj.weight"
    if name not in seen.gradients:  # the embedding was not trained
        name = max((n for n, g in seen.gradients.items() if g.ndim == 3), key=lambda n: seen.gradients[n].numel())
    what = "update" if seen.client else "gradient"
    return _grey(seen.gradients[name][0].flatten(1)), f"a part of the {what} that the client released, as grey levels"


class _LateError(BaseException):
    """The example takes too long; not an Exception, which would count as a failure of the attack."""


def _stop(*_: object) -> None:
    raise _LateError


def _grey(values: torch.Tensor) -> Image.Image:
    """Return the first rows and columns of a matrix as a picture; 99 in 100 values are between black and white."""
    part = values.detach().float()[:_SIDE, :_SIDE]
    scale = part.abs().quantile(0.99).clamp(min=1e-12)
    pixels = (127.5 + 127.5 * part / scale).clamp(0, 255).byte()
    return Image.fromarray(pixels.cpu().numpy(), "L").convert("RGB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
