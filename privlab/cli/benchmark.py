"""`privlab admit` and `privlab benchmark`: whether an entry is what it says, and the table that it enters."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from privlab.cli.common import Commands, common, echo, err, print_either, print_json, print_paths, print_table
from privlab.cli.names import FROM_ZERO, PART, PATH, POSITIVE, VICTIM, WEIGHTS

_WEIGHTS = click.option(
    "--weights", default="auto", show_default=False, help="File of a victim whose weights are not in the package."
)
_PUBLIC = click.option("--public", help="Photographs that the adversary has, for decoders.  [default: bundled ones]")


@click.command()
@click.argument("name", type=PART)
@click.option("--set", "options", multiple=True, metavar="KEY=VALUE", help="Set an option of it; repeat it for more.")
@click.option("--gamma", type=float, help="γ of jigsaw and mjp.")
@click.option("--model", type=VICTIM, default="vit_ti_mjp", help="Victim on which it is tried.")
@click.option("--weights", type=WEIGHTS, default="random", help="Weights: auto, pretrained, random, or a file.")
@click.option("--img-size", type=click.IntRange(min=16), default=64, help="Side of the input.")
@click.option("--depth", type=POSITIVE, default=2, help="Number of blocks of the victim that are kept.")
@click.option("--seed", type=FROM_ZERO, default=0, help="Seed of all random draws.")
@common
def admit(name: str, as_json: bool, **options: Any) -> int:  # noqa: ANN401
    """Check that a defense, an attack or a metric does what it says.

    A defense must release what it says and nothing else; an attack or a metric must say what it needs, and return what
    it should. The exit status is 1 if a check fails.
    """
    from privlab.testing import check_any

    with err.status(f"admitting {name}"):
        checks = check_any(name, **options)
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        table = Table("check", "", "measured", "limit", "what", header_style="bold")
        for check in checks:
            verdict = "pass" if check.passed else "FAIL"
            table.add_row(
                check.name, verdict, f"{check.value:.3g}", f"{check.bound} {check.limit:g}", escape(check.text)
            )
        print_table(table)
    return 0 if all(check.passed for check in checks) else 1


@click.group(cls=Commands)
def benchmark() -> None:
    """Rank defenses and attacks on frozen tracks."""


@benchmark.command("list")
@click.option(
    "--track", help="gradients, updates, local-training, features, weights or dishonest-server.  [default: all]"
)
@click.option(
    "--entries", "folders", multiple=True, type=PATH, help="Folder with your own results; repeat it for more."
)
@common
def list_(track: str | None, folders: tuple[Path, ...], as_json: bool) -> None:
    """Show the entries: those with a rank first, the least leakage first.

    The score is that of the best single attack, in dB, for keys a share: the mean over photographs and draws. The worst
    case takes the leakiest attack and draw of each photograph. The column "unreliable" has the reasons in short.
    "known by" names the attack that leaks most among those that know the defense, and counts the others. --json has
    both in full.
    """
    from privlab.base import check_name
    from privlab.benchmark import TRACKS, listed
    from privlab.benchmark.tracks import track as of_track

    if track is not None:
        check_name("track", track, TRACKS)
    rows = [row for row in listed(folders) if track in (None, row.track)]
    if as_json:
        print_json([row.as_json() for row in rows])
        return
    table = Table(
        "track", "", "entry", "score", "worst case", "verdict", "known by", "kept", "unreliable", header_style="bold"
    )
    for row in rows:
        unit = of_track(row.track).unit
        score, worst = ("n/a" if mean is None else f"{mean:.2f}{unit}" for mean in (row.score, row.worst_case))
        worth = "—" if row.measured_utility is None else f"{row.measured_utility:.2f}"
        others = [f"{len(row.known_by) - 1}"] if row.known_by[1:] else []
        known = " + ".join([row.best_known_by or "no attack", *others])
        reasons = "; ".join(dict.fromkeys(reason.partition(":")[0] for reason in row.unreliable))
        cells = (row.track, str(row.rank or "—"), row.name, score, worst, row.concluded, known, worth, reasons)
        table.add_row(*map(escape, cells))
    print_table(table)


@benchmark.command()
@click.argument("card", type=PATH)
@click.option("--out", type=PATH, help="The result file.  [default: CARD's name with .json]")
@click.option(
    "--images", help="Folder with ImageNet's samples, whose public half is attacked besides the bundled photographs."
)
@click.option("--hidden", is_flag=True, help="With --images: attack the hidden half too.")
@_PUBLIC
@_WEIGHTS
@click.option("--key", type=PATH, help="An ed25519 private key in PEM, to sign the result with.")
@click.option("--workers", type=POSITIVE, help="Number of processes that attack photographs.  [default: one per core]")
@common
def submit(
    card: Path,
    out: Path | None,
    images: str | None,
    hidden: bool,
    public: str | None,
    weights: str,
    key: Path | None,
    workers: int | None,
    as_json: bool,
) -> None:
    """Check the entry of a CARD, measure it on its track, and write a result file with its hash.

    The runs are kept in a folder next to the result file (.runs), so that the same command continues them.
    """
    from privlab.base import PrivlabError, core_count
    from privlab.benchmark import read_card
    from privlab.benchmark import submit as submitted
    from privlab.benchmark.measure import Photographs
    from privlab.benchmark.tracks import track as of_track
    from privlab.grids import Engine

    if hidden and images is None:
        raise PrivlabError("--hidden needs --images FOLDER: the hidden half is named by its hashes alone.")
    parts = ("bundled", *(("public",) if images else ()), *(("hidden",) if hidden else ()))
    path = out or Path(card.with_suffix(".json").name)
    with err.status("submission") as shown:
        result = submitted(
            read_card(card),
            path,
            Photographs(parts, images, weights, public),
            key=key,
            engine=Engine(workers=workers or core_count()),
            say=lambda text: shown.update(f"submission: {text}"),
        )
    failed = [each for each in result.data.get("admission", ()) if not each["passed"]]
    told = {"file": str(path), "seconds": result.data["seconds"], "sha256": result.data["signature"]["sha256"]}
    judged = result.data["judged"]
    if as_json:
        print_json(told | {"judged": judged})
        return
    for name, each in ({"": judged} if "verdict" in judged else judged).items():
        echo(f"{name + ': ' if name else ''}{each['why']}")
        score, by = each["worst"].get(each["leakiest"]), " and ".join(each["by"])
        if score is not None and score["mean"] is not None:
            unit = of_track(result.card.track).unit
            echo(f"worst case by photograph: {score['mean']:.2f}{unit}, case '{each['leakiest']}', by {by}")
    for each in failed:
        echo(f"unreliable: admission, {each['name']}: {each['text']}")
    _say_confinement(result.data["plugin"])
    echo(f"result: {path} ({told['seconds']} s; SHA-256 {told['sha256'][:12]}…)")


def _say_confinement(plugin: str | bool | None) -> None:
    """Say in one line how a plug-in was confined, if there is one."""
    from privlab.testing.plugin_process import confinement

    if plugin:
        err.print(f"The plug-in ran in a separate process, {confinement()}.", highlight=False)


@benchmark.command()
@click.argument("result", type=PATH)
@click.option("--images", help="Folder with ImageNet's samples, to measure all photographs of the result again.")
@click.option("--seed", type=FROM_ZERO, help="Seeds the checks of admission.  [default: random]")
@_PUBLIC
@_WEIGHTS
@common
def verify(result: Path, images: str | None, seed: int | None, public: str | None, weights: str, as_json: bool) -> None:
    """Check the hash and the versions of a RESULT, conclude from its rows, and measure a part of it again.

    In every case all draws of the bundled photographs are measured, with --images of the others too. This needs the
    file alone, and runs the plug-in that the file holds.
    """
    from privlab.benchmark import verify as verified

    with err.status("verification"):
        found = verified(result, seed=seed, folder=images, weights=weights, public=public)
    text = (
        f"{found.name} ({found.track}): {found.confirmed} of {found.rows} rows are confirmed ({found.share:.0%}); "
        f"{found.measured} were measured again (seed {found.seed}). Worst cases differ by at most "
        f"{found.difference:g}; {found.allowed:g} is allowed."
    )
    _say_confinement(found.plugin)
    signed = f" The signature of {found.signer[:16]}… is right." if found.signer else ""
    print_either(as_json, asdict(found), text + signed)


@benchmark.command()
@click.argument("kind", metavar="defense|attack|check")
@click.argument("folder", type=PATH, default=Path())
@common
def template(kind: str, folder: Path, as_json: bool) -> None:
    """Write the card and the class of a working entry, to start from."""
    from privlab.benchmark import write_template

    print_paths(write_template(kind, folder), as_json)


@benchmark.command()
@click.option("--out", type=PATH, required=True, help="Folder of the pages and the feeds.")
@click.option(
    "--entries", "folders", multiple=True, type=PATH, help="Folder with your own results; repeat it for more."
)
@common
def page(out: Path, folders: tuple[Path, ...], as_json: bool) -> None:
    """Write the table as HTML, with its JSON feeds, from the result files alone."""
    from privlab.benchmark import entries, write_site

    print_paths(write_site(entries(folders), out), as_json)
