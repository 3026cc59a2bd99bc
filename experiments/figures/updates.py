"""The table on updates: what comes back of each way in which a client of a federation trains.

`python -m privlab.experiments.figures.updates measure FOLDER [ROW …]` runs the command of each row, and goes on where
it was stopped. `collect FOLDER` keeps the records of these runs, and a sheet with one image of each, in
experiments/notes. `write` puts the short table into README.md. `docs/_ext/generated_pages.py` makes the long one when
the site is built.
"""

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, UInt8
from matplotlib.figure import Figure
from torch import Tensor

from privlab.evaluation import CONTROL
from privlab.metrics import EXACT_DB
from privlab.report.figures.style import figure_style
from privlab.report.intervals import mean_interval
from privlab.report.run import Run, load
from privlab.report.tables.per_image import Segments
from privlab.victims import victim

ROOT = Path(__file__).resolve().parents[2]
NOTES = ROOT / "experiments" / "notes"
RECORDS, STUDIED, SHEET = NOTES / "updates.csv", NOTES / "updates_studied.csv", NOTES / "updates.jpg"

COMMAND = "privlab attack --model cifar_vit --metrics psnr"
"""What the command of each row begins with. Its images are the 14 photographs that come with privlab."""

HEAD = "| the client trains | `cifar_vit` | ViT-Ti | attack |"
"""The first line of the table in README.md; a blank line ends it."""

LEVEL = 0.95
"""Of the intervals."""

NOTHING = "no evidence"
"""What is said where no attack was better than the leakiest control; it is not said that nothing leaks."""

UNKNOWN = "–"
"""What is said where nothing was measured."""

_COLUMNS = 3
"""The number of pairs in a line of the sheet."""


SHEET_ON_SITE = "../../experiments/notes/updates.jpg"
"""The sheet, from a page in a folder of the site."""

_SHEET_TEXT = (
    "*On the left the private image, on the right what came back, on `cifar_vit`. Of each row the image is shown whose "
    "PSNR is the median.*"
)
_TABLE_TEXT = """\
Exact: every grey level is right. The other figures are the mean PSNR and its 95 % interval. Unless a row says
otherwise, the client takes one step of SGD on one image.

- `cifar_vit`: 14 photographs that come with privlab, some of them crops of one scene (10 of Adam). The command of a
  row repeats it. The width is D = 128; there are N = 144 patches where N > D, else at most 64. An exact image counts
  as 100 dB, and intervals are Student's.
- ViT-Ti was trained on ImageNet. The study that is named has its photographs, settings and command. "–" was not
  measured.
- No attack in privlab reads two steps on batches. `patch-gradient`, which takes the update for the gradient of one
  image, is forced to run.
- **No evidence**: the attack was not shown to be better than the leakiest control, an image that no attack made. Other
  attacks may find more. PSNR does not see everything either: with secure aggregation parts of the photograph are
  visible in the picture above. `privlab attack` asks for 20 images before it says that one leaks which is not exact.
- Secure aggregation has two clients of one image on `cifar_vit`, and four on ViT-Ti.
- Adam and AdamW are the same without weight decay, as here.
- DP-SGD has a noise multiplier of 1: ε ≤ 4.73 for presence, whether an image was used (δ = 10⁻⁵, one release). On
  ViT-Ti the gradient of the step was attacked.
- MixUp (shares of 0.7 and 0.3) and CutMix (a quarter of the image) mix each photograph with the next one, and their
  labels in the same shares. What comes back is the mixed image. One that MixUp made has no grey levels, so that none
  counts as exact.

`python -m privlab.experiments.figures.updates measure FOLDER` makes the npz files, and runs the commands of all
rows that have a figure of `cifar_vit`."""


@dataclass(frozen=True)
class Row:
    """One way in which a client trains.

    Args:
        name: of its run and of its records.
        trains: the same in words, for the table.
        options: what follows `COMMAND`.
        short: whether README.md has the row.
        is_measured: whether its command was run; a study has the row where it was not.
    """

    name: str
    trains: str
    options: str
    short: bool = True
    is_measured: bool = True


ROWS = (
    Row("sgd-1", "SGD, one image, 1 step", "--client sgd --attack patch-update", short=False),
    Row("sgd-20", "SGD, one image, 20 steps", "--client sgd --set client.steps=20 --attack patch-update"),
    Row(
        "wide",
        "SGD, 5 steps, N > D",
        "--img-size 48 --client sgd --set client.steps=5 --attack patch-update",
    ),
    Row(
        "bf16",
        "SGD, weights sent in bf16",
        "--client sgd --set client.sends=weights --set client.sent_as=bf16 --attack patch-update",
    ),
    Row(
        "int8",
        "SGD, difference sent in int8",
        "--client sgd --set client.sent_as=int8 --attack patch-update",
    ),
    Row(
        "batch",
        "SGD, one step on a batch of 2",
        "--img-size 24 --client sgd --set client.images=2 --set client.batch_size=2 --attack token-separation",
    ),
    Row(
        "rounds",
        "SGD, 2 images, one in each step",
        "--img-size 24 --client sgd --set client.images=2 --attack round-unrolling",
    ),
    Row(
        "several",
        "SGD, two steps on batches of 2",
        "--client sgd --set client.images=4 --set client.batch_size=2 --attack patch-gradient --block stock --force",
    ),
    Row(
        "clients",
        "secure aggregation, 5 steps each",
        "--img-size 24 --client sgd --set client.clients=2 --set client.steps=5 --attack client-unrolling",
    ),
    Row("adamw", "Adam, AdamW", "--client adamw --set client.lr=1e-4 --limit 10 --attack adam-update"),
    Row("head", "the head alone", "--client sgd --set client.trains=head --attack head-inversion"),
    Row(
        "frozen",
        "all but the embedding",
        "--img-size 28 --client sgd --set client.trains=no-embedding --attack token-separation",
    ),
    Row(
        "lora-16",
        "LoRA of rank 16",
        "--client sgd --set client.trains=lora --set client.lr=0.1 --attack qkv-span",
    ),
    Row(
        "lora-64",
        "LoRA of rank 64, 16 patches",
        "--img-size 16 --client sgd --set client.trains=lora --set client.rank=64 --attack qkv-span",
        short=False,
    ),
    Row(
        "adapters",
        "adapters of width 64, 16 patches",
        "--img-size 16 --client sgd --set client.trains=adapters --set client.rank=64 --attack adapter-separation",
        is_measured=False,
    ),
    Row("mixup", "MixUp", "--images mixup.npz --client sgd --attack patch-update"),
    Row("cutmix", "CutMix", "--images cutmix.npz --client sgd --attack patch-update", short=False),
    Row(
        "labels",
        "two labels an image, binary loss",
        "--images labels.npz --client sgd --set client.loss=binary --attack patch-update",
    ),
    Row(
        "dp",
        "DP-SGD, one image, ε ≤ 4.73",
        "--client sgd --defense gradient-noise --set gradient-noise.multiplier=1 --attack patch-gradient-adaptive",
    ),
)


def measure(folder: Path, names: Sequence[str]) -> None:
    """Run the commands of rows in a folder; a run that is complete there is not repeated.

    Args:
        folder: where the runs are, one for each row.
        names: the rows, in the order of their runs; all if there is none. The mixed images are made from `sgd-1`.
    """
    chosen = [row for row in ROWS if (row.name in names if names else row.is_measured)]
    for row in sorted(chosen, key=lambda row: row.name != "sgd-1"):
        if ".npz" in row.options:
            write_mixed(load(folder / "sgd-1").images(), folder)
        words = shlex.split(COMMAND.removeprefix("privlab "))
        words += [*shlex.split(row.options), "--workers", "1", "--out", row.name]
        subprocess.run([sys.executable, "-m", "privlab", *words], cwd=folder, check=True)


def write_mixed(images: Float[Tensor, "b 3 h w"], folder: Path) -> None:
    """Write mixed images with their soft labels, and images with two labels each, as npz files.

    Each image is mixed with the next one; labels are the victim's predictions. MixUp takes 0.7 x + 0.3 x', CutMix
    the middle quarter of x', and both take the labels in these shares.
    """
    model = victim("cifar_vit").model
    with torch.no_grad():
        classes = torch.eye(10)[model.vit((images - model.mean) / model.std).argmax(1)]  # b × y
    others, other_classes = images.roll(-1, 0), classes.roll(-1, 0)
    quarter = slice(images.shape[-1] // 4, images.shape[-1] * 3 // 4)
    cut = images.clone()
    cut[..., quarter, quarter] = others[..., quarter, quarter]
    made = {
        "mixup": (0.7 * images + 0.3 * others, 0.7 * classes + 0.3 * other_classes),
        "cutmix": (to_bytes(cut), 0.75 * classes + 0.25 * other_classes),
        "labels": (to_bytes(images), torch.maximum(classes, other_classes)),
    }
    for name, (mixed, labels) in made.items():
        np.savez(folder / f"{name}.npz", images=mixed.permute(0, 2, 3, 1).numpy(), labels=labels.numpy())


def to_bytes(images: Float[Tensor, "b 3 h w"]) -> UInt8[Tensor, "b 3 h w"]:
    """Return images in [0, 1] as grey levels; no stored pixel changes."""
    return (images * 255).round().to(torch.uint8)


def collect(folder: Path) -> None:
    """Keep the records of all runs in a folder, and draw the sheet."""
    runs = {row.name: load(folder / row.name) for row in ROWS if row.is_measured}
    records = pd.concat([records_of(name, run) for name, run in runs.items()], ignore_index=True)
    records.to_csv(RECORDS, index=False, float_format="%.2f")
    sheet(runs, read_records()).savefig(SHEET, dpi=105, pil_kwargs={"quality": 68, "optimize": True})


def records_of(name: str, run: Run) -> pd.DataFrame:
    """Return a line for each image: the score of the attack, and that of the control that leaks most on average."""
    scores = run.records.query("geometry == 'in_place' and status == 'ok'")
    is_control = scores.attack.str.startswith(CONTROL)
    control = scores[is_control].groupby("attack").psnr.mean().idxmax()
    controls = scores[scores.attack == control].set_index("image_sha256").psnr
    found = scores[~is_control]
    columns = {
        "row": name,
        "image": found.image,
        "attack": found.attack,
        "psnr": found.psnr.to_numpy(),
        "levels_wrong": found.levels_wrong.astype(int),
        "control": controls[found.image_sha256].to_numpy(),
    }
    return pd.DataFrame(columns)


def read_records() -> pd.DataFrame:
    """Return the stored records: a line for each row of the table and each image."""
    return pd.read_csv(RECORDS)


@dataclass(frozen=True)
class Result:
    """What came back of some images.

    Args:
        images: their number.
        exact: on how many of them every grey level is right.
        mean: PSNR in dB, in which an exact image counts as 100; `low` and `high` are the ends of its 95 % interval.
        above_control: whether the attack is shown to be better than the leakiest control.
    """

    images: int
    exact: int
    mean: float
    low: float
    high: float
    above_control: bool

    def __str__(self) -> str:
        """Return it in words."""
        if self.exact == self.images:
            return f"{self.exact} of {self.images} exact"
        if not self.above_control and not self.exact:
            return f"{NOTHING} ({self.mean:.1f} dB)"
        interval = f"{self.mean:.1f} dB [{self.low:.1f}, {self.high:.1f}]"
        return f"{self.exact} of {self.images} exact; {interval}" if self.exact else interval


def result_of(records: pd.DataFrame) -> Result:
    """Return what the records of one row say; both intervals are Student's."""
    psnr = records.psnr.clip(upper=EXACT_DB).to_numpy()
    one_group = np.zeros(len(psnr), int)
    (low,), (high,) = mean_interval(Segments.of(psnr, one_group), LEVEL)
    (least_gain,), _ = mean_interval(Segments.of(psnr - records.control.to_numpy(), one_group), LEVEL)
    exact = int((records.levels_wrong == 0).sum())
    return Result(len(psnr), exact, psnr.mean(), low, high, bool(least_gain > 0))


def measured() -> dict[str, Result]:
    """Return the result of each row that was measured on `cifar_vit`."""
    return {str(name): result_of(part) for name, part in read_records().groupby("row", sort=False)}


def studied() -> pd.DataFrame:
    """Return what studies measured on the trained ViT-Ti; the pages name the commands."""
    return pd.read_csv(STUDIED, index_col="row", keep_default_na=False)


def sheet(runs: Mapping[str, Run], records: pd.DataFrame) -> Figure:
    """Return a private image and what came back of it for each row that was measured: of median PSNR."""
    results, shown = measured(), [row for row in ROWS if row.is_measured]
    lines = -(-len(shown) // _COLUMNS)
    with figure_style():
        figure = Figure(figsize=(7.5, 1.75 * lines), layout="constrained")
        for place, row in enumerate(shown):
            scores = records[records.row == row.name].psnr.to_numpy()
            median = int(np.argsort(scores, kind="stable")[(len(scores) - 1) // 2])
            private = runs[row.name].images()[median]  # 3 × h × w
            found = runs[row.name].images(attack_of(row))[median]
            gap = torch.ones(3, private.shape[1], private.shape[2] // 12)
            axes = figure.add_subplot(lines, _COLUMNS, place + 1, xticks=[], yticks=[])
            axes.imshow(torch.cat((private, gap, found), 2).permute(1, 2, 0), interpolation="nearest")
            axes.set_title(row.trains, fontsize=8.5)
            axes.set_xlabel(str(results[row.name]), fontsize=8.5)
            axes.spines[:].set_visible(False)
    return figure


def short_table() -> str:
    """Return the table of README.md; ways of which no attack has found anything share its last line."""
    lines, hidden = [], []
    for row in ROWS:
        if not row.short:
            continue
        small, large, attack = cells_of(row)
        if {small.partition(" (")[0], large.partition(" (")[0]} <= {NOTHING, UNKNOWN}:
            hidden.append(row.trains)
        else:
            exact_alone = small.partition(";")[0]
            lines.append(f"| {row.trains} | {exact_alone} | {large} | `{attack}` |")
    return "\n".join((HEAD, "|---|---|---|---|", *lines, f"| {'; '.join(hidden)} | {NOTHING} | {NOTHING} | |"))


def long_table() -> str:
    """Return the table of the site, in which each row has its command."""
    studies, lines = studied(), []
    for row in ROWS:
        small, large, attack = cells_of(row)
        if row.name in studies.index:
            study = studies.loc[row.name]
            large += f"; {study.images} images, {study.pixels} pixels ({{doc}}`study </studies/{study.page}>`)"
        lines.append(f"| {row.trains} | {small} | {large} | `{attack}` | `{row.options}` |")
    head = (f"| the client trains | `cifar_vit` | ViT-Ti | attack | `{COMMAND}` … |", "|---|---|---|---|---|")
    return "\n".join((*head, *lines))


def cells_of(row: Row) -> tuple[str, str, str]:
    """Return what came back on `cifar_vit` and on ViT-Ti, and the name of the attack."""
    small = str(measured()[row.name]) if row.is_measured else UNKNOWN
    return small, studied().found.get(row.name, UNKNOWN), attack_of(row)


def attack_of(row: Row) -> str:
    """Return the attack that the command of a row names."""
    return row.options.partition("--attack ")[2].split()[0]


def page() -> str:
    """Return what the site's pages show: the sheet, the table, and how to read both."""
    picture = f"![Private images and what came back of each]({SHEET_ON_SITE})"
    return f"{picture}\n\n{_SHEET_TEXT}\n\n{long_table()}\n\n{_TABLE_TEXT}\n"


def write() -> None:
    """Put the short table into README.md."""
    path = ROOT / "README.md"
    path.write_text(with_table(path.read_text("utf-8")), "utf-8")


def with_table(readme: str) -> str:
    """Return the text of README.md with the short table in the place of the one that it has."""
    before, _, rest = readme.partition(HEAD)
    _, _, after = rest.partition("\n\n")
    return f"{before}{short_table()}\n\n{after}"


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["measure", folder, *names]:
            measure(Path(folder), names)
        case ["collect", folder]:
            collect(Path(folder))
        case ["write"]:
            write()
        case _:
            sys.exit(__doc__)
