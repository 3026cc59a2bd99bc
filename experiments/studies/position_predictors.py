"""`privlab study positions`: the accuracy of position predictors, and how they work.

The figures are those of MP3 (2, 3, 8, 9) and DropPos (S3 to S5).
"""

import copy
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.functional import to_pil_image

from privlab.base import draw_for, linear_sum_assignment, write_whole
from privlab.experiments.studies.data import write_facts, write_tables
from privlab.experiments.studies.position_embeddings import attention_weights
from privlab.experiments.training.examples import Examples
from privlab.experiments.training.position_accuracy import DROPPED, HIDDEN, position_accuracy
from privlab.experiments.training.reading import read_examples
from privlab.images import open_images
from privlab.patches import permute, shuffle_within
from privlab.reassembly import DropPosNetwork, Mp3Network, PositionPredictor, load_predictor, predictor_file, tiles
from privlab.victims import hash_of, shipped_file

ETAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""η at which the accuracy of MP3 is measured (Figure 3)."""

UNKNOWN_SHARE = 0.95
"""Share of the patches whose place DropPos does not know in the reconstructions (Figure 3); MP3 knows none."""

NEIGHBOURS = 10
"""k of the k-NN probe; the MP3 paper does not state its k."""

FACTS = "predictors.json"
BATCH = 50

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class PredictorStudy:
    """Which predictors are examined, and on which images.

    Args:
        predictors: names in the zoo, or files of `privlab train mp3|droppos`.
        images: what `open_images` opens; `limit` of its `split` are used.
        train_split: split of the neighbours of the k-NN probe, `train_limit` of them; without it there is no probe.
        pictures: number of images whose reconstructions are kept, the first ones.
    """

    predictors: tuple[str, ...]
    images: str
    split: str | None = None
    limit: int = 1000
    train_split: str | None = None
    train_limit: int = 5000
    pictures: int = 4
    seed: int = 0


def study(plan: PredictorStudy, out: Path, *, say: Say = print) -> list[dict[str, Any]]:
    """Write `predictors.json`, and as Parquet `accuracy`, `placements`, `heads`, `attention` and `knn`, to `out`.

    Return the facts: one entry for each predictor. The tables hold its position there as `predictor`.

    Args:
        plan: the predictors, and the images on which they are measured.
        out: folder of the files, and of the PNGs of the images in `images/`.
        say: is called with a line for each image that is skipped and each probe that is left out.

    Raises:
        PrivlabError: as `load_predictor`, `open_images` and `read_examples` do.
    """
    facts, tables = [], {}
    for number, name in enumerate(plan.predictors):
        path = predictor_file(name)
        predictor = load_predictor(path)
        size = predictor.model.image_shape[1:]
        data = read_examples(open_images(plan.images, split=plan.split, limit=plan.limit), size, labelled=False)
        for skipped in data.skipped:
            say(f"Skipped: {skipped}")
        about, made = _facts(name, path, predictor, plan, data), {}
        about["accuracy"], made["accuracy"] = _accuracy(predictor, data, plan.seed)
        about["placed"], made["placements"] = _placements(predictor, data, plan, out, number)
        made["heads"], made["attention"] = _attention(predictor, data)
        made["knn"] = _probe(predictor, data, plan, lambda why, who=about["name"]: say(f"{who}: no k-NN probe: {why}"))
        about["knn"] = _best(made["knn"])
        for table, rows in made.items():
            tables.setdefault(table, []).append(rows.assign(predictor=number))
        facts.append(about)
    write_tables(out, tables)
    write_facts(out / FACTS, facts)
    return facts


def to_rows(facts: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return a row of text for each predictor: its accuracy, the patches that it places, and its k-NN probe."""
    return [_row(about) for about in facts]


def _row(about: Mapping[str, Any]) -> dict[str, str]:
    told, probe = about["placed"], about["knn"]
    of = "η = 0" if about["kind"] == Mp3Network.name else "mean over γ and γ_pos"
    best = "" if probe is None else f"{100 * probe['accuracy']:.1f}, layer {probe['layer']}"
    return {
        "predictor": f"{about['name']} ({about['kind']})",
        "position accuracy %": f"{100 * about['accuracy']:.1f} ({of})",
        "known": f"{told['known']} of {told['patches']}",
        "placed by argmax %": f"{100 * told['likeliest']:.1f}",
        "by assignment %": f"{100 * told['assigned']:.1f}",
        "best k-NN %": best,
        "untrained %": "" if probe is None else f"{100 * probe['untrained']:.1f}",
    }


def _facts(name: str, path: Path, predictor: PositionPredictor, plan: PredictorStudy, data: Examples) -> dict[str, Any]:
    vit, block = predictor.model.vit, predictor.model.vit.blocks[0]
    digest = hash_of(predictor.tensors())
    stem = path.resolve().parent.name if path.stem == "predictor" else path.stem
    return {
        "name": name if shipped_file(name) else stem,
        "kind": predictor.name,
        "sha256": digest,
        "objective": _objective(path, digest),
        "grid": list(predictor.model.grid),
        "patch": predictor.model.patch,
        "width": vit.embed_dim,
        "depth": len(vit.blocks),
        "heads": block.attn.num_heads,  # pyright: ignore[reportAttributeAccessIssue]
        "data": {"source": Path(plan.images).name, "split": plan.split, "pictures": len(data), "sha256": data.identity},
        "skipped": list(data.skipped),
    }


def _objective(path: Path, digest: str) -> dict[str, Any] | None:
    """Return how a predictor was trained; None unless its card is in its folder."""
    for card in (path.with_suffix(".json"), path.parent / "card.json"):
        try:
            found = json.loads(card.read_text(encoding="utf-8"))
            if found["predictor_sha256"] == digest:
                return found["objective"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _accuracy(predictor: PositionPredictor, data: Examples, seed: int) -> tuple[float, pd.DataFrame]:
    """Return the overall accuracy of a predictor, and that at each η, or at each γ and γ_pos."""
    if isinstance(predictor, Mp3Network):
        found = position_accuracy(predictor, data, seed=seed, hidden=ETAS)
        rows = [(eta, None, None, found[f"accuracy_eta_{eta:g}"]) for eta in ETAS]
    else:
        found = position_accuracy(predictor, data, seed=seed)
        cells = itertools.product(HIDDEN, DROPPED)
        rows = [(None, gamma, lost, found[f"accuracy_gamma_{gamma:g}_pos_{lost:g}"]) for gamma, lost in cells]
    table = pd.DataFrame(rows, columns=["eta", "gamma", "gamma_pos", "accuracy"])  # pyright: ignore[reportArgumentType]
    return found["accuracy"], table.astype(float)


@torch.no_grad()
def places(
    predictor: PositionPredictor, images: Float[Tensor, "b c h w"], known: Bool[Tensor, "b n"]
) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b n"]]:
    """Return the slot of the patch in each slot: the likeliest one, and that of the assignment with the largest Π p.

    Patches that are known to stand in their own slots stay there; the likeliest slot of another may be one of theirs.

    Args:
        predictor: a position predictor for this grid and patch.
        images: shuffled images in [0, 1], of the predictor's size.
        known: slots whose patch is known to be their own.
    """
    log_p = predictor.scores(tiles(images, predictor.model.patch), known)
    own = torch.arange(known.shape[1], device=known.device)
    likeliest, assigned = torch.where(known, own, log_p.argmax(2)), own.repeat(len(known), 1)
    for row, (each, told) in enumerate(zip(log_p, known, strict=True)):
        free = (~told).nonzero()[:, 0]
        among = each[free][:, free].double().cpu().numpy()
        assigned[row, free] = free[torch.from_numpy(linear_sum_assignment(among, maximize=True)[1]).to(free)]
    return likeliest, assigned


def _placements(
    predictor: PositionPredictor, data: Examples, plan: PredictorStudy, out: Path, number: int
) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return the shares of shuffled patches that are placed right, and the places in the first images."""
    n, device = predictor.slots, predictor.model.mean.device
    loose = n if isinstance(predictor, Mp3Network) else max(1, round(UNKNOWN_SHARE * n))
    hits, rows = torch.zeros(2, dtype=torch.long), []
    for some in torch.arange(len(data)).split(BATCH):
        drawn = [_shuffle(data, int(row), n, loose, plan.seed) for row in some]
        order, known = (torch.stack(parts).to(device) for parts in zip(*drawn, strict=True))
        mixed = permute(data.pixels(some).to(device), order, predictor.model.patch)
        likeliest, assigned = places(predictor, mixed, known)
        hits += torch.stack([((found == order) & ~known).sum() for found in (likeliest, assigned)]).cpu()
        for row in (int(row) for row in some if row < plan.pictures):
            at = row - int(some[0])
            name = f"images/{number + 1}_{row + 1}.png"
            write_whole(out / name, lambda path, row=row: to_pil_image(data.images[row]).save(path, format="PNG"))
            columns = {"patch": order, "known": known, "likeliest": likeliest, "assigned": assigned}
            table = pd.DataFrame({key: value[at].cpu().numpy() for key, value in columns.items()})
            rows.append(table.assign(image=row, picture=name, slot=range(n)))
    shares = (hits.double() / (loose * len(data))).tolist()
    told = {"patches": n, "known": n - loose, "likeliest": shares[0], "assigned": shares[1]}
    return told, pd.concat(rows, ignore_index=True)


def _shuffle(data: Examples, row: int, n: int, loose: int, seed: int) -> tuple[Int[Tensor, " n"], Bool[Tensor, " n"]]:
    """Return the order in which an image's patches are given, and which of them are known to stand in their slots."""
    draw = draw_for(seed, hashlib.sha256(data.images[row].numpy().tobytes()).hexdigest(), "shuffled patches")
    moved = torch.zeros(n, dtype=torch.bool)
    moved[torch.randperm(n, generator=draw)[:loose]] = True
    return shuffle_within(moved, draw), ~moved


@torch.no_grad()
def layers(predictor: PositionPredictor, images: Float[Tensor, "b c h w"]) -> Iterator[Float[Tensor, "b t d"]]:
    """Yield the tokens, class token first, before the first block and after each.

    The patches stand in their slots and are all context; with DropPos, all carry their PE.
    """
    vit = predictor.model.vit
    x = predictor.embed(tiles(images, predictor.model.patch))
    if isinstance(predictor, DropPosNetwork):
        x = x + predictor.pe
    assert vit.cls_token is not None
    x = torch.cat([vit.cls_token.expand(len(x), -1, -1), x], 1)
    yield x
    for block in vit.blocks:
        x = block(x)
        yield x


def offsets(grid: tuple[int, int]) -> Int[Tensor, "n n"]:
    """Return for each pair of slots the flat index of its offset (Δrow, Δcolumn) in a (2h − 1) × (2w − 1) map."""
    h, w = grid
    row, column = torch.arange(h).repeat_interleave(w), torch.arange(w).repeat(h)
    down, right = row[None] - row[:, None], column[None] - column[:, None]
    return (down + h - 1) * (2 * w - 1) + right + w - 1


def relative(
    weights: Float[Tensor, "*k n n"], grid: tuple[int, int]
) -> tuple[Float[Tensor, "*k u v"], Int[Tensor, "u v"]]:
    """Return the mean weight that a slot gives to the slot at each offset, and the number of pairs at that offset.

    Σ mean · pairs / n is the mean over the rows of their sums. Source: MP3, Figure 8.
    """
    shape, index = (2 * grid[0] - 1, 2 * grid[1] - 1), offsets(grid).flatten().to(weights.device)
    pairs = torch.bincount(index, minlength=shape[0] * shape[1])
    flat = weights.flatten(-2)
    total = flat.new_zeros(*flat.shape[:-1], len(pairs)).index_add(-1, index, flat)
    return (total / pairs).unflatten(-1, shape), pairs.view(shape)


@torch.no_grad()
def _attention(predictor: PositionPredictor, data: Examples) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return entropy, class token's share and reach of each head, and its mean attention by offset.

    All are means over images and over queries, without the class token's own. The entropy is in nats; `distance` is
    the mean distance, in patches, of what is attended to, `distance_uniform` that of equal attention to all patches.
    """
    blocks: Any = predictor.model.vit.blocks
    mean = entropy = torch.zeros(())
    for rows in torch.arange(len(data)).split(BATCH):
        images = data.pixels(rows).to(predictor.model.mean)
        tokens = layers(predictor, images)
        found = [attention_weights(block, x)[:, :, 1:] for block, x in zip(blocks, tokens, strict=False)]
        weights = torch.stack(found).double().cpu()
        mean = mean + weights.sum(1) / len(data)
        entropy = entropy + torch.special.entr(weights).sum(-1).mean(-1).sum(1) / len(data)
    maps, pairs = relative(mean[..., 1:], predictor.model.grid)
    h, w = predictor.model.grid
    down, right = torch.meshgrid(torch.arange(1 - h, h), torch.arange(1 - w, w), indexing="ij")
    far, mass = torch.hypot(down.double(), right.double()), maps * pairs
    heads = {
        "entropy": entropy,
        "class_share": mean[..., 0].mean(-1),
        "distance": (mass * far).sum((-2, -1)) / mass.sum((-2, -1)),
        "distance_uniform": ((pairs * far).sum() / pairs.sum()).expand_as(entropy),
    }
    offset = {name: part.expand_as(maps) for name, part in (("down", down), ("right", right), ("pairs", pairs))}
    return _by_head(heads), _by_head(offset | {"weight": maps})


def _by_head(columns: Mapping[str, Tensor]) -> pd.DataFrame:
    """Return tensors, layer × head × …, as columns of one table, with layer and head counted from 1."""
    shape = next(iter(columns.values())).shape
    layer, head, *_ = torch.meshgrid(*(torch.arange(1, 1 + side) for side in shape), indexing="ij")
    return pd.DataFrame({name: x.flatten().numpy() for name, x in {"layer": layer, "head": head, **columns}.items()})


def _probe(predictor: PositionPredictor, data: Examples, plan: PredictorStudy, skip: Say) -> pd.DataFrame:
    """Return the k-NN accuracy of each layer, by neighbours in the train split, trained and untrained (Figure 9)."""
    table = pd.DataFrame({"layer": [], "accuracy": [], "untrained": [], "neighbours": []})
    if plan.train_split is None:
        skip("give --train-split for its neighbours.")
        return table
    size = predictor.model.image_shape[1:]
    source = open_images(plan.images, split=plan.train_split, limit=plan.train_limit)
    known = read_examples(source, size, labelled=False)
    if (known.labels < 0).any() or (data.labels < 0).any():
        skip("not all images have labels.")
        return table
    columns = {}
    for name, network in (("accuracy", predictor), ("untrained", reinitialise(predictor, plan.seed))):
        pairs = zip(_features(network, known), _features(network, data), strict=True)
        columns[name] = [knn_accuracy(near, known.labels, far, data.labels) for near, far in pairs]
    return pd.DataFrame({"layer": range(len(columns["accuracy"]))} | columns | {"neighbours": len(known)})


def _best(probe: pd.DataFrame) -> dict[str, Any] | None:
    """Return the best layer of a probe, and the best of the untrained network's; None without a probe."""
    if not len(probe):
        return None
    accuracies = probe.accuracy.tolist()
    best = max(accuracies)
    return {"layer": accuracies.index(best), "accuracy": best, "untrained": float(probe.untrained.max())}


def _features(predictor: PositionPredictor, data: Examples) -> Float[Tensor, "l n d"]:
    """Return the mean of the patches' tokens, before the first block and after each."""
    parts = []
    for rows in torch.arange(len(data)).split(BATCH):
        images = data.pixels(rows).to(predictor.model.mean)
        parts.append(torch.stack([x[:, 1:].mean(1).cpu() for x in layers(predictor, images)]))
    return torch.cat(parts, 1)


def knn_accuracy(
    known: Float[Tensor, "m d"],
    labels: Int[Tensor, " m"],
    queries: Float[Tensor, "n d"],
    wanted: Int[Tensor, " n"],
    k: int = NEIGHBOURS,
) -> float:
    """Return the share of queries whose k nearest neighbours by cosine vote for the right label.

    Of labels with the same number of votes, the one with the nearer neighbours wins.

    Args:
        known: features of the labelled images.
        labels: class indices of these, ≥ 0.
        queries: features of the images that are classified.
        wanted: true class indices of the queries, ≥ 0.
        k: number of neighbours that vote; if there are fewer images, all of them.
    """
    near = (F.normalize(queries, dim=1) @ F.normalize(known, dim=1).T).topk(min(k, len(known)), dim=1)
    classes = int(max(labels.max(), wanted.max())) + 1
    votes = torch.zeros(len(queries), classes, dtype=torch.float64)
    votes.scatter_add_(1, labels[near.indices], 1 + near.values.double() / (4 * k))  # these sum to less than one vote
    return float((votes.argmax(1) == wanted).double().mean())


def reinitialise(predictor: PositionPredictor, seed: int = 0) -> PositionPredictor:
    """Return a predictor of the same shape with random weights, as at the start of a training."""
    made = copy.deepcopy(predictor)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for part in made.modules():
            if callable(reset := getattr(part, "reset_parameters", None)):
                reset()
        made.model.vit.init_weights()
    return made.eval().requires_grad_(False)
