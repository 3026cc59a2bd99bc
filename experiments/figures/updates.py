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

ROOT = Path(__file__).parents[2]
NOTES = ROOT / "experiments" / "notes"
RECORDS, STUDIED, SHEET = NOTES / "updates.csv", NOTES / "updates_studied.csv", NOTES / "updates.jpg"

COMMAND = "privlab attack --model cifar_vit --metrics psnr"
"""What the command of each row begins with. Its images are the 14 photographs that come with privlab."""

BEGIN, END = "<!-- table on updates: python -m privlab.experiments.figures.updates write -->", "<!-- end -->"
"""What is before and after the table in README.md."""

LEVEL = 0.95
"""Of the intervals."""

NOTHING = "no evidence"
"""What is said where no attack was better than the leakiest control; it is not said that nothing leaks."""

_COLUMNS = 4
"""The number of pairs in a line of the sheet."""


SHEET_ON_SITE = "../../experiments/notes/updates.jpg"
"""The sheet, from a page in a folder of the site."""

_SHEET_TEXT = (
    "*On the left the private image, on the right what came back, on `cifar_vit`. Of each row the image is shown whose "
    "PSNR is the median.*"
)
_TABLE_TEXT = """\
Exact: every grey level is right. Otherwise the cell has the mean PSNR and its 95 % interval, in which an exact image
counts as 100 dB. `cifar_vit` has 14 photographs that come with privlab, some of them crops of one scene; the command of
the row repeats them. ViT-Ti was trained on ImageNet; the study that is named has its photographs, its settings and its
command. N is the number of patches, D the width of the model: 144 and 128 where N > D.

**No evidence** means that the attack was not shown to be better than the leakiest control, an image that no attack
made. Other attacks may find more: it is no evidence of privacy. PSNR does not see everything either: an image of which
some patches are exact and others are noise may score as a control does. `privlab attack` asks for 20 images before it
says that one leaks which is not exact, so that its verdict is more careful than the table.

DP-SGD with a noise multiplier of 1 has ε ≤ 4.73 for whether an image was used (δ = 10⁻⁵, one release). MixUp (shares of
0.7 and 0.3) and CutMix (a quarter of the image) mix each photograph with the next one, and their labels in the same
shares; what comes back is the mixed image. `python -m privlab.experiments.figures.updates measure FOLDER` makes the npz
files, and repeats all rows."""


@dataclass(frozen=True)
class Row:
    """One way in which a client trains.

    Args:
        name: of its run and of its records.
        trains: the same in words, for the table.
        options: what follows `COMMAND`.
        short: whether README.md has the row.
    """

    name: str
    trains: str
    options: str
    short: bool = True


ROWS = (
    Row("sgd-1", "SGD, one image, 1 step", "--client sgd --attack patch-update", short=False),
    Row("sgd-20", "SGD, one image, 20 steps", "--client sgd --set client.steps=20 --attack patch-update"),
    Row(
        "wide",
        "SGD, one image, 5 steps, N > D",
        "--img-size 48 --client sgd --set client.steps=5 --attack patch-update",
    ),
    Row(
        "bf16",
        "SGD, one image, weights sent in bf16",
        "--client sgd --set client.sends=weights --set client.sent_as=bf16 --attack patch-update",
    ),
    Row(
        "int8",
        "SGD, one image, difference sent in int8",
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
        "SGD, 4 images, two steps on batches of 2",
        "--client sgd --set client.images=4 --set client.batch_size=2 --attack patch-gradient --block stock --force",
    ),
    Row(
        "clients",
        "Secure aggregation, 2 clients, 5 steps each",
        "--img-size 24 --client sgd --set client.clients=2 --set client.steps=5 --attack client-unrolling",
    ),
    Row(
        "clients-16",
        "the same, images of 16 patches",
        "--img-size 16 --client sgd --set client.clients=2 --set client.steps=5 --attack client-unrolling",
    ),
    Row("adam", "Adam, one image, 1 step", "--client adam --set client.lr=1e-4 --attack adam-update", short=False),
    Row("adamw", "AdamW, one image, 1 step", "--client adamw --set client.lr=1e-4 --attack adam-update"),
    Row("head", "the head alone", "--client sgd --set client.trains=head --attack head-inversion"),
    Row(
        "frozen",
        "all but the embedding, 1 step",
        "--img-size 28 --client sgd --set client.trains=no-embedding --attack token-separation",
    ),
    Row(
        "lora-16",
        "LoRA of rank 16, 1 step",
        "--client sgd --set client.trains=lora --set client.lr=0.1 --attack qkv-span",
    ),
    Row(
        "lora-64",
        "LoRA of rank 64, 16 patches, 1 step",
        "--img-size 16 --client sgd --set client.trains=lora --set client.rank=64 --attack qkv-span",
        short=False,
    ),
    Row(
        "adapters",
        "adapters of width 64, 16 patches, 1 step",
        "--img-size 16 --client sgd --set client.trains=adapters --set client.rank=64 --attack adapter-separation",
    ),
    Row("mixup", "MixUp of two photographs", "--images mixup.npz --client sgd --attack patch-update"),
    Row("cutmix", "CutMix of two photographs", "--images cutmix.npz --client sgd --attack patch-update"),
    Row(
        "labels",
        "two labels for each image, binary loss",
        "--images labels.npz --client sgd --set client.loss=binary --attack patch-update",
    ),
    Row(
        "dp",
        "DP-SGD, one image, noise multiplier 1",
        "--client sgd --defense gradient-noise --set gradient-noise.multiplier=1 --attack patch-gradient-adaptive",
    ),
)


def measure(folder: Path, names: Sequence[str]) -> None:
    """Run the commands of rows in a folder; a run that is complete there is not repeated.

    Args:
        folder: where the runs are, one for each row.
        names: the rows, in the order of their runs; all if there is none. The mixed images are made from `sgd-1`.
    """
    for row in sorted((row for row in ROWS if row.name in names or not names), key=lambda row: row.name != "sgd-1"):
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
    runs = {row.name: load(folder / row.name) for row in ROWS if (folder / row.name / "run.json").is_file()}
    records = pd.concat([records_of(name, run) for name, run in runs.items()], ignore_index=True)
    records.to_csv(RECORDS, index=False, float_format="%.2f")
    sheet(runs, read_records()).savefig(SHEET, dpi=110, pil_kwargs={"quality": 80})


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
        attack: its name.
    """

    images: int
    exact: int
    mean: float
    low: float
    high: float
    above_control: bool
    attack: str

    def __str__(self) -> str:
        """Return it in words."""
        if self.exact:
            return f"{self.exact} of {self.images} exact"
        if not self.above_control:
            return f"no evidence ({self.mean:.1f} dB)"
        return f"{self.mean:.1f} dB [{self.low:.1f}, {self.high:.1f}]"


def result_of(records: pd.DataFrame) -> Result:
    """Return what the records of one row say; both intervals are Student's."""
    psnr = records.psnr.clip(upper=EXACT_DB).to_numpy()
    one_group = np.zeros(len(psnr), int)
    (low,), (high,) = mean_interval(Segments.of(psnr, one_group), LEVEL)
    (least_gain,), _ = mean_interval(Segments.of(psnr - records.control.to_numpy(), one_group), LEVEL)
    exact = int((records.levels_wrong == 0).sum())
    return Result(len(psnr), exact, psnr.mean(), low, high, bool(least_gain > 0), records.attack.iloc[0])


def measured() -> dict[str, Result]:
    """Return the result of each row that was measured on `cifar_vit`."""
    return {str(name): result_of(part) for name, part in read_records().groupby("row", sort=False)}


def studied() -> pd.DataFrame:
    """Return what studies measured on the trained ViT-Ti; the pages name the commands."""
    return pd.read_csv(STUDIED, index_col="row", keep_default_na=False)


def sheet(runs: Mapping[str, Run], records: pd.DataFrame) -> Figure:
    """Return a private image and its reconstruction for each row of the README: the image whose PSNR is the median."""
    results, shown = measured(), [row for row in ROWS if row.name in runs and row.short]
    lines = -(-len(shown) // _COLUMNS)
    with figure_style():
        figure = Figure(figsize=(10, 1.75 * lines), layout="constrained")
        for place, row in enumerate(shown):
            scores = records[records.row == row.name].psnr.to_numpy()
            median = int(np.argsort(scores, kind="stable")[(len(scores) - 1) // 2])
            names = ("private", results[row.name].attack)
            private, found = (runs[row.name].images(name)[median] for name in names)  # 3 × h × w
            gap = torch.ones(3, private.shape[1], private.shape[2] // 12)
            axes = figure.add_subplot(lines, _COLUMNS, place + 1, xticks=[], yticks=[])
            axes.imshow(torch.cat((private, gap, found), 2).permute(1, 2, 0), interpolation="nearest")
            axes.set_title(row.trains, fontsize=8.5)
            axes.set_xlabel(str(results[row.name]), fontsize=8.5)
            axes.spines[:].set_visible(False)
    return figure


def short_table() -> str:
    """Return the table of README.md; ways of which no attack has found anything share its last line."""
    results, studies = measured(), studied()
    lines, hidden = [], []
    for row in ROWS:
        if not row.short:
            continue
        small = results[row.name]
        large = studies.found.get(row.name, "–")
        if str(small).startswith(NOTHING) and large.startswith((NOTHING, "–")):
            hidden.append(row.trains)
        else:
            lines.append(f"| {row.trains} | {small} | {large} | `{small.attack}` |")
    head = ("| the client trains | `cifar_vit` | ViT-Ti | attack |", "|---|---|---|---|")
    return "\n".join((*head, *lines, f"| {'; '.join(hidden)} | {NOTHING} | {NOTHING} | |"))


def long_table() -> str:
    """Return the table of the site, in which each row has its command."""
    results, studies = measured(), studied()
    lines = []
    for row in ROWS:
        small, large = results[row.name], "–"
        if row.name in studies.index:
            study = studies.loc[row.name]
            large = f"{study.found}; {study.images} images, {study.pixels} pixels ({{doc}}`/studies/{study.page}`)"
        lines.append(f"| {row.trains} | {small} | {large} | `{small.attack}` | `{row.options}` |")
    head = (f"| the client trains | `cifar_vit` | ViT-Ti | attack | `{COMMAND}` … |", "|---|---|---|---|---|")
    return "\n".join((*head, *lines))


def page() -> str:
    """Return what the site's pages show: the sheet, the table, and how to read both."""
    picture = f"![Private images and what came back of each]({SHEET_ON_SITE})"
    return f"{picture}\n\n{_SHEET_TEXT}\n\n{long_table()}\n\n{_TABLE_TEXT}\n"


def write() -> None:
    """Put the short table into README.md."""
    path = ROOT / "README.md"
    path.write_text(with_table(path.read_text("utf-8")), "utf-8")


def with_table(readme: str) -> str:
    """Return the text of README.md with the short table between its marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{short_table()}\n{END}{after}"


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
