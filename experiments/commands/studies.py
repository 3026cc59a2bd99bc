"""The commands of `privlab study`, which run the studies on the user's images."""

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from privlab.base import PrivlabError
from privlab.cli.common import common, err, print_json, print_rows, print_table, warned
from privlab.cli.names import ATTACKS, VICTIM, VICTIMS

study = click.Group()


@study.command("split-privacy")
@click.option("--images", type=click.Path(path_type=Path), required=True, help="A folder with train/ and test/.")
@click.option("--model", type=VICTIM, required=True, help="The victim that is fine-tuned.")
@click.option("--weights", default="auto", show_default=True, help="auto, pretrained, random, or a file.")
@click.option("--img-size", type=click.IntRange(min=16), help="Side of the input.")
@click.option("--attributes", type=click.Path(path_type=Path), help="CSV: file, and a column of 0 and 1 per attribute.")
@click.option("--methods", help="Rows of the table, with commas.  [default: SL,GN,GN+,LP,LP+,BS,BS+]")
@click.option("--adaptive", type=ATTACKS, help="Attacks beside the paper's decoder, with commas.")
@click.option("--set", "options", multiple=True, metavar="[NAME.]KEY=VALUE", help="Option of an attack or a defense.")
@click.option("--embedding", metavar="timm:NAME@FILE", help="Network of F-SIM, with its weights.")
@click.option("--steps", type=click.IntRange(min=1), default=300, show_default=True, help="Of each client's training.")
@click.option("--batch", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--learning-rate", type=float, default=1e-4, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the study; it goes on there.")
@common
def split_privacy(
    methods: str | None,
    adaptive: str | None,
    device: str,
    out: Path,
    as_json: bool,
    **options: Any,  # noqa: ANN401
) -> None:
    """Measure utility and leakage of split learning under each defense (Table 6 of Permutation Equivariance)."""
    from privlab.base import pick_device
    from privlab.experiments.studies.split_privacy import Study, to_markdown
    from privlab.experiments.studies.split_privacy import study as run

    named = {"methods": methods, "adaptive": adaptive}
    given: dict[str, Any] = {name: tuple(text.split(",")) for name, text in named.items() if text is not None}
    options["options"] = tuple(options["options"])
    plan = Study(**options, **given)
    with warned():
        table = run(plan, out, device=str(pick_device(device)), say=lambda line: err.print(line, markup=False))
    if as_json:
        print_json(table.astype(object).where(table.notna(), None).to_dict("records"))
        return
    click.echo(to_markdown(table))


@click.command("finetune-study")
@click.option("--images", type=click.Path(path_type=Path), required=True, help="A folder with train/ and test/.")
@click.option("--model", type=VICTIM, required=True, help="The victim that is fine-tuned.")
@click.option("--weights", default="auto", show_default=True, help="The public base: auto, pretrained, or a file.")
@click.option("--img-size", type=click.IntRange(min=16), help="Side of the input.")
@click.option("--manners", help="With commas.  [default: normal,authorized,unauthorized,scratch]")
@click.option("--steps", type=click.IntRange(min=1), default=500, show_default=True)
@click.option("--every", type=click.IntRange(min=1), default=50, show_default=True, help="Steps between two points.")
@click.option("--batch", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--learning-rate", type=float, default=1e-4, show_default=True)
@click.option("--space", default="full", show_default=True, help="Key space: full or paper.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the study; it goes on there.")
@common
def finetune_study(
    manners: str | None,
    device: str,
    out: Path,
    as_json: bool,
    **options: Any,  # noqa: ANN401
) -> None:
    """Fine-tune an encrypted model with and without its key, and look for the key meanwhile (Table 7, Figure 4)."""
    from privlab.base import pick_device
    from privlab.experiments.studies.key_finetune import PUBLISHED, FinetuneStudy
    from privlab.experiments.studies.key_finetune import finetune_study as run

    given: dict[str, Any] = {} if manners is None else {"manners": tuple(manners.split(","))}
    plan = FinetuneStudy(**options, **given)
    with warned():
        curves = run(plan, out, device=str(pick_device(device)), say=lambda line: err.print(line, markup=False))
    if as_json:
        print_json(curves.astype(object).where(curves.notna(), None).to_dict("records"))
        return
    table = Table("manner", "step", "validation loss", "accuracy %", "paper %", "key recovered", header_style="bold")
    for manner, points in curves.groupby("manner", sort=False):
        last = points.iloc[-1]
        found = points["key_recovered"].dropna() if "key_recovered" in points else []
        recovered = f"{min(found):.3f} to {max(found):.3f}" if len(found) else "—"
        row = (str(int(last.step)), f"{last.validation_loss:.3f}", f"{100 * last.accuracy:.1f}")
        table.add_row(str(manner), *row, str(PUBLISHED.get(str(manner), "—")), recovered)
    print_table(table)


@study.command("pe")
@click.option("--model", "models", type=VICTIMS, required=True, help="Victims with position embeddings, with commas.")
@click.option(
    "--weights",
    default="auto",
    show_default=True,
    help="One value for all models, or one per model, separated by commas.",
)
@click.option("--images", help="For attention maps: samples, a folder, a data set.")
@click.option("--limit", type=click.IntRange(min=1), default=3, show_default=True, help="Use N images.")
@click.option("--img-size", type=click.IntRange(min=8), help="Side of the input.")
@click.option("--umap/--no-umap", default=True, show_default=True, help="Project by UMAP; it takes minutes at first.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--figures", type=click.Choice(["svg", "png", "pdf"]), default="svg", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the study.")
@common
def position_embeddings(
    models: str,
    weights: str,
    figures: str,
    out: Path,
    as_json: bool,
    **options: Any,  # noqa: ANN401
) -> None:
    """Measure what position embeddings know (Tables 6 and 8, Figures 1, 4, 7 and 8 of MJP)."""
    from privlab.experiments.figures.positions import draw_positions
    from privlab.experiments.studies.position_embeddings import PositionStudy, to_rows
    from privlab.experiments.studies.position_embeddings import study as run

    plan = PositionStudy(models=tuple(models.split(",")), weights=tuple(weights.split(",")), **options)
    with warned():
        facts = run(plan, out, say=lambda line: err.print(line, markup=False))
    paths = draw_positions(out, figures)
    if as_json:
        print_json({"models": facts, "figures": [str(path) for path in paths]})
        return
    print_rows(to_rows(facts), as_json=False)
    for path in paths:
        err.print(f"Figure: {path}", markup=False)


@study.command("positions")
@click.option("--predictor", "predictors", multiple=True, required=True, metavar="FILE|NAME", help="May be repeated.")
@click.option("--images", required=True, help="samples, a folder, a Parquet file, a data set.")
@click.option("--split", help="Of a folder or a data set: what is looked at.")
@click.option("--limit", type=click.IntRange(min=1), default=1000, show_default=True, help="Use N images.")
@click.option("--train-split", help="Where the k-NN probe finds its neighbours; no probe without.")
@click.option("--train-limit", type=click.IntRange(min=1), default=5000, show_default=True, help="Use N images of it.")
@click.option("--pictures", type=click.IntRange(min=1), default=4, show_default=True, help="Draw N reconstructions.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--figures", type=click.Choice(["svg", "png", "pdf"]), default="svg", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the study.")
@common
def position_predictors(
    predictors: tuple[str, ...],
    figures: str,
    out: Path,
    as_json: bool,
    **options: Any,  # noqa: ANN401
) -> None:
    """Measure what position predictors do (MP3, Figures 2, 3, 8 and 9; DropPos, Figure 3 and Tables S3 to S5)."""
    from privlab.experiments.figures.predictors import draw_predictors
    from privlab.experiments.studies.position_predictors import PredictorStudy, to_rows
    from privlab.experiments.studies.position_predictors import study as run

    facts = run(PredictorStudy(predictors=predictors, **options), out, say=lambda line: err.print(line, markup=False))
    paths = draw_predictors(out, figures)
    if as_json:
        print_json({"predictors": facts, "figures": [str(path) for path in paths]})
        return
    print_rows(to_rows(facts), as_json=False)
    for path in paths:
        err.print(f"Figure: {path}", markup=False)


@study.command("placement")
@click.option("--images", required=True, help="samples, a folder, a Parquet file, a data set.")
@click.option("--split", help="Of a folder or a data set.")
@click.option("--limit", type=click.IntRange(min=1), help="Use N images.")
@click.option("--img-size", type=click.IntRange(min=8), default=32, show_default=True, help="Side of the images.")
@click.option("--patch", type=click.IntRange(min=1), default=4, show_default=True, help="Side of a patch.")
@click.option("--gamma", "gammas", default="0.03,0.15,0.27,0.5,0.9,1", show_default=True, help="With commas.")
@click.option("--reassembly", "solvers", default="border,mp3,droppos", show_default=True, help="With commas.")
@click.option("--set", "options", multiple=True, metavar="[NAME.]KEY=VALUE", help="Option of a re-assembly.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the study.")
@common
def placement(gammas: str, solvers: str, out: Path, as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Count the patches, shuffled by MJP or a row permutation, that each re-assembly puts back."""
    from privlab.experiments.studies.placement import PlacementStudy, to_rows
    from privlab.experiments.studies.placement import study as run

    options["options"] = tuple(options["options"])
    plan = PlacementStudy(gammas=_numbers(gammas), solvers=tuple(solvers.split(",")), **options)
    facts = run(plan, out, say=lambda line: err.print(line, markup=False))
    if as_json:
        print_json(facts)
        return
    print_rows(to_rows(facts), as_json=False)
    few = f"{facts['images']} image{'s' if facts['images'] > 1 else ''}"
    click.echo(
        f"share of the shuffled patches that are put back, over {few}; [95 % interval of the mean, by bootstrap]"
    )
    err.print(f"records: {out}", markup=False)


@study.command("jigsaw")
@click.option("--images", required=True, help="samples, a folder, a Parquet file, a data set.")
@click.option("--split", help="Of a folder or a data set.")
@click.option("--limit", type=click.IntRange(min=1), help="Use N images.")
@click.option("--every", type=click.IntRange(min=1), help="Use every K-th image, before --limit.")
@click.option("--offset", type=click.IntRange(min=0), help="Leave out the first J images, before --limit.")
@click.option("--public", help="Photographs of the adversary, for odds+slots; those among --images are left out.")
@click.option("--public-limit", type=click.IntRange(min=1), default=200, show_default=True, help="Use N of them.")
@click.option(
    "--protocol",
    "protocols",
    default="3x3,3x3-gap11,3x3-gap21,14x14",
    show_default=True,
    metavar="NAMES",
    help="With commas: 3x3, 3x3-gap11, 3x3-gap21, jpwleg-3, jpwleg-5, 7x7, 14x14, or GxG@SIDE-GAP.",
)
@click.option("--missing", default="0", show_default=True, help="Numbers of missing pieces, with commas.")
@click.option("--known", type=click.IntRange(min=0), default=0, show_default=True, help="Pieces of known place.")
@click.option("--noise", type=float, default=0.0, show_default=True, help="Standard deviation on a pixel in [0, 1].")
@click.option("--solvers", default="border,odds,odds+slots", show_default=True, help="With commas.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--figures", type=click.Choice(["svg", "png", "pdf"]), default="svg", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the study.")
@common
def jigsaw(
    protocols: str,
    missing: str,
    solvers: str,
    figures: str,
    out: Path,
    as_json: bool,
    **options: Any,  # noqa: ANN401
) -> None:
    """Solve the jigsaws of other papers: eroded borders, missing pieces, their figures beside."""
    from privlab.experiments.figures.studies import draw_jigsaw
    from privlab.experiments.studies.jigsaw import JigsawStudy, to_rows
    from privlab.experiments.studies.jigsaw import study as run

    plan = JigsawStudy(
        protocols=tuple(protocols.split(",")),
        missing=_counts("--missing", missing),
        solvers=tuple(solvers.split(",")),
        **options,
    )
    facts = run(plan, out, say=lambda line: err.print(line, markup=False))
    path = draw_jigsaw(out, figures)
    if as_json:
        print_json(facts | {"figure": str(path)})
        return
    print_rows(to_rows(facts), as_json=False)
    for row in facts["published"]:
        click.echo(f"{row['method']}, {row['protocol']}: {row['setting']}. {row['found']}.")
    err.print(f"Figure: {path}", markup=False)


@study.command("noise-bound")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--images", required=True, help="The photographs of the run: samples, a folder, a data set.")
@click.option("--model", type=VICTIM, required=True, help="The victim of the run.")
@click.option("--weights", default="auto", show_default=True, help="auto, pretrained, random, or a file.")
@click.option("--img-size", type=click.IntRange(min=8), help="Side of the input.")
@click.option("--labels", help="CSV with file and label, or predicted.")
@click.option("--limit", type=click.IntRange(min=1), help="Use N images.")
@click.option(
    "--psnr", type=click.FloatRange(min=0), default=20.0, show_default=True, help="Least of a success, in dB."
)
@click.option("--draws", type=click.IntRange(min=1), default=200, show_default=True, help="Games for each photograph.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--figures", type=click.Choice(["svg", "png", "pdf"]), default="svg", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the study.")
@common
def noise_bound(figures: str, out: Path, as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Set what attacks of RUN on gradient-noise achieved beside the bound of DP-SGD that no attack may cross."""
    from privlab.experiments.figures.studies import draw_bound
    from privlab.experiments.studies.noise_bound import BoundStudy, to_markdown
    from privlab.experiments.studies.noise_bound import study as run

    with warned():
        facts = run(BoundStudy(**options), out, say=lambda line: err.print(line, markup=False))
    path = draw_bound(out, figures)
    if as_json:
        print_json(facts | {"figure": str(path)})
        return
    click.echo(to_markdown(facts))
    err.print(f"Figure: {path}", markup=False)


@study.command("architectures")
@click.option("--models", help="Names of timm, with commas; one or two of each kind of ViT by default.")
@click.option("--images", default="samples", show_default=True, help="samples, a folder, a data set.")
@click.option("--limit", type=click.IntRange(min=1), default=4, show_default=True, help="Use N images.")
@click.option("--layer-scale", type=float, default=0.1, show_default=True, help="Value of all layer scales.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@common
def architectures(models: str | None, as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Say for each kind of ViT what is reconstructed from a gradient and from features, on drawn weights."""
    from privlab.experiments.studies.architectures import ArchitectureStudy, reasons, to_rows

    chosen = {} if models is None else {"models": tuple(models.split(","))}
    with warned():
        facts = ArchitectureStudy(**chosen, **options)(say=lambda line: err.print(line, markup=False))
    if as_json:
        print_json(facts)
        return
    print_rows(to_rows(facts), as_json=False)
    for line in reasons(facts):
        click.echo(line)


@study.command("adam")
@click.option("--images", default="samples", show_default=True, help="samples, a folder, a data set.")
@click.option("--model", type=VICTIM, default="vit_ti", show_default=True, help="The model that the client trains.")
@click.option("--weights", default="auto", show_default=True, help="auto, pretrained, random, or a file.")
@click.option("--img-size", type=click.IntRange(min=8), help="Side of the input.")
@click.option("--labels", help="CSV with file and label, or predicted.")
@click.option("--rate", type=float, default=1e-4, show_default=True, help="Learning rate of the step.")
@click.option("--blocks", type=click.IntRange(min=0), default=2, show_default=True, help="First blocks that count.")
@click.option("--limit", type=click.IntRange(min=1), help="Use N images.")
@click.option("--every", type=click.IntRange(min=1), help="Use every K-th image, before --limit.")
@click.option("--offset", type=click.IntRange(min=0), help="Leave out the first J images, before --limit.")
@common
def adam(as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Count the magnitudes that one step of AdamW shows of a gradient, and set them beside the unknowns."""
    from privlab.experiments.studies.adam import AdamStudy, to_rows

    with warned():
        facts = AdamStudy(**options)(say=lambda line: err.print(line, markup=False))
    if as_json:
        print_json(facts)
        return
    print_rows(to_rows(facts), as_json=False)


@study.command("adam-pairs")
@click.option("--images", default="samples", show_default=True, help="samples, a folder, a data set.")
@click.option("--model", type=VICTIM, default="vit_ti", show_default=True, help="The model that the client trains.")
@click.option("--weights", default="auto", show_default=True, help="auto, pretrained, random, or a file.")
@click.option("--img-size", type=click.IntRange(min=8), help="Side of the input.")
@click.option("--labels", help="CSV with file and label, or predicted.")
@click.option("--rate", type=float, default=1e-4, show_default=True, help="Learning rate of the step.")
@click.option("--limit", type=click.IntRange(min=2), help="Use N images.")
@click.option("--every", type=click.IntRange(min=1), help="Use every K-th image, before --limit.")
@click.option("--offset", type=click.IntRange(min=0), help="Leave out the first J images, before --limit.")
@common
def adam_pairs(as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Run attacks of one image on steps of AdamW on two, and compare what they find with both photographs."""
    from privlab.experiments.studies.adam_pairs import AdamPairsStudy, to_rows

    with warned():
        facts = AdamPairsStudy(**options)(say=lambda line: err.print(line, markup=False))
    if as_json:
        print_json(facts)
        return
    print_rows(to_rows(facts), as_json=False)


@study.command("sent-weights")
@click.option("--weights", type=click.Path(path_type=Path), help="File of a trained ViT-Ti, which is audited too.")
@click.option("--images", default="samples", show_default=True, help="samples, a folder, a data set.")
@click.option("--limit", type=click.IntRange(min=2), default=14, show_default=True, help="Number of images.")
@click.option(
    "--offset", type=click.IntRange(min=0), default=0, show_default=True, help="Leave out the first J images."
)
@click.option("--kind", "kinds", multiple=True, help="Measure weights of one kind, such as hidden. [default: all]")
@click.option("--figures", type=click.Choice(["svg", "png", "pdf"]), default="svg", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New folder of the study.")
@common
def sent_weights(figures: str, out: Path, as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Measure how well the audit of a server's weights knows chosen weights from honest ones."""
    from privlab.experiments.figures.sent_weights import draw_sent_weights
    from privlab.experiments.methods.sent_weights import SentWeightsStudy, summary

    with warned():
        rows = SentWeightsStudy(**options)(out)
    paths = draw_sent_weights(out, figures)
    print_rows(summary(rows), as_json=as_json)
    if not as_json:
        for path in paths:
            err.print(f"figure: {path}", markup=False)


@study.command("honest-weights")
@click.option("--images", default="samples", show_default=True, help="samples, a folder, a data set.")
@click.option("--every", type=click.IntRange(min=1), default=1, show_default=True, help="Use every K-th image.")
@click.option(
    "--offset", type=click.IntRange(min=0), default=0, show_default=True, help="Leave out the first J images."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the study, which is resumed.")
@common
def honest_weights(out: Path, as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Measure how often the audit of a server's weights refuses those of honest rounds of training."""
    from privlab.experiments.methods.honest_weights import HonestWeightsStudy, summary

    with warned():
        rows = HonestWeightsStudy(**options)(out)
    print_rows(summary(rows), as_json=as_json)


@study.command("federation")
@click.option("--model", type=VICTIM, required=True, help="The model that the clients train.")
@click.option("--weights", default="auto", show_default=True, help="auto, pretrained, random, or a file.")
@click.option("--img-size", type=click.IntRange(min=8), help="Side of the input.")
@click.option("--images", default="samples", show_default=True, help="samples, a folder, a data set.")
@click.option("--limit", type=click.IntRange(min=1), default=2, show_default=True, help="N clients, of one image each.")
@click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True, help="Of SGD in a round.")
@click.option("--learning-rate", type=float, default=0.01, show_default=True)
@click.option("--weight-decay", type=float, default=0.0, show_default=True)
@click.option("--max-psnr", type=float, default=20.0, show_default=True, help="An update above it is withheld, in dB.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the study.")
@common
def federation(out: Path, as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Run a simulated federation of Flower whose clients audit each update before it leaves."""
    from privlab.experiments.studies.federation import FederationStudy, to_rows

    with warned():
        lines = FederationStudy(**options)(out)
    print_rows(to_rows(lines), as_json=as_json)
    if not as_json:
        err.print(f"updates that left: {out / 'server'}", markup=False)


def _numbers(text: str) -> tuple[float, ...]:
    """Return the numbers of a comma-separated list."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise PrivlabError(f"--gamma takes numbers in (0, 1] with commas between them. Found '{text}'.") from error


def _counts(option: str, text: str) -> tuple[int, ...]:
    """Return the whole numbers of a comma-separated list."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise PrivlabError(f"{option} takes whole numbers with commas between them. Found '{text}'.") from error
