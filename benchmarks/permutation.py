"""`privlab bench permutation`: permutations as index tensors against matrices, plain copies, and the model itself."""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.attacks.features.pe_assignment import PEAssignment
from privlab.base import Progress, pick_device
from privlab.benchmarks.common import Bench, machine, quiet, sample_images, time_rounds
from privlab.defenses import RowPermutation
from privlab.keys import ModelShape, apply_key, new_key
from privlab.metrics import placement_accuracy
from privlab.patches import draw_orders, permute_features, restore_features
from privlab.release import observe_features, send
from privlab.threat import Draws, FeatureObservation, Feed, Sent, Stack
from privlab.victims import Victim, victim

_ATTACKED = "vit_ti"
_COPIES, _FORWARD = "two copies", "backbone, forward"
_DENSE_ROW, _DENSE_COLUMN = "row and back (matrices)", "column and back (matrices)"
_ROW, _COLUMN = "row and back", "column and back"
_BOTH, _APART = "row with column and back", "row, then column, and back"
_PLACED, _ENCRYPTED = f"pe-assignment ({_ATTACKED})", "key encryption"

_PE_SCALE = 5.5
"""Deviation of position embeddings over that of the projection's weights: ViT-Ti trained on ImageNet; untrained, 1."""

_TARGETS = {
    "dense_over_index_row": "≥ 2",
    "dense_over_index_column": "≥ 2",
    "index_row_over_copies": "≤ 2",
    "index_column_over_copies": "≤ 2",
    "index_both_over_copies": "≤ 2",
    "both_over_row_then_column": "< 1",
    "permutation_over_forward": "< 0.01",
    "key_encryption_seconds": "< 2",
    "pe_assignment_ms_per_image": "< 5",
    "pe_assignment_placed": "≥ 0.99",
}


def bench_permutation(
    *, model: str, batch: int, repeats: int, device: str, progress: Progress = lambda done, total: None
) -> Bench:
    """Time permutations and their inverses on the features of one batch, in `repeats` rounds of every stage.

    The paper's way multiplies by dense permutation matrices, made beforehand; ours gathers by index, and computes the
    inverse orders within the time. Two plain copies move as much memory as a permutation and its inverse, and are their
    limit. `pe-assignment` is the attack's call on a batch of vit_ti, images included. Weights are random, but position
    embeddings are scaled to the size, relative to the projection, that training gives them, because it decides how hard
    the assignment is.

    Args:
        model: name of the victim, whose tokens and width are permuted.
        batch: number of images in the batch.
        repeats: rounds that are timed, after one that warms up.
        device: "auto", "cpu", "cuda" or "cuda:N".
        progress: is called with the stages done and their number.

    Raises:
        PrivlabError: for a model or a device that is not there.
    """
    target = pick_device(device)
    with quiet():
        subject = victim(model, weights="random").to(target)
        attacked, sent = _observe_permuted(victim(_ATTACKED, weights="random").to(target), batch)
    with torch.no_grad():
        seconds = time_rounds(_stages(subject, attacked, batch), repeats, target, progress)
    setup = {"model": model, "batch": batch, "repeats": repeats} | machine(target)
    per_image = {name: each / batch for name, each in seconds.items() if name != _ENCRYPTED}
    placed = placement_accuracy(sent, PEAssignment()(attacked))
    assert placed is not None
    return Bench(_figures(seconds, batch) | {"pe_assignment_placed": float(placed.mean())}, _TARGETS, per_image, setup)


def _figures(s: Mapping[str, float], batch: int) -> dict[str, float]:
    return {
        "dense_over_index_row": s[_DENSE_ROW] / s[_ROW],
        "dense_over_index_column": s[_DENSE_COLUMN] / s[_COLUMN],
        "index_row_over_copies": s[_ROW] / s[_COPIES],
        "index_column_over_copies": s[_COLUMN] / s[_COPIES],
        "index_both_over_copies": s[_BOTH] / s[_COPIES],
        "both_over_row_then_column": s[_BOTH] / s[_APART],
        "permutation_over_forward": s[_BOTH] / s[_FORWARD],
        "key_encryption_seconds": s[_ENCRYPTED],
        "pe_assignment_ms_per_image": 1000 * s[_PLACED] / batch,
    }


def _stages(subject: Victim, attacked: FeatureObservation, batch: int) -> dict[str, Callable[[], object]]:
    vit, device = subject.model.vit, subject.model.mean.device
    n, d = vit.num_prefix_tokens + vit.patch_embed.num_patches, vit.embed_dim
    draw, state, shape = Generator().manual_seed(0), vit.state_dict(), ModelShape.of(vit)
    Z = torch.randn(batch, n, d, generator=draw).to(device)
    r, c = draw_orders(n, [draw])[0].to(device), draw_orders(d, [draw])[0].to(device)
    P_R, P_C = torch.eye(n, device=device)[r], torch.eye(d, device=device)[:, c].contiguous()
    P_R_inverse, P_C_inverse = P_R.T.contiguous(), P_C.T.contiguous()
    key = new_key(shape)
    return {
        _COPIES: lambda: Z.clone().clone(),
        _DENSE_ROW: lambda: P_R_inverse @ (P_R @ Z),
        _ROW: lambda: restore_features(permute_features(Z, r), r),
        _DENSE_COLUMN: lambda: (Z @ P_C) @ P_C_inverse,
        _COLUMN: lambda: restore_features(permute_features(Z, columns=c), columns=c),
        _BOTH: lambda: restore_features(permute_features(Z, r, c), r, c),
        _APART: lambda: _one_by_one(Z, r, c),
        _PLACED: lambda: PEAssignment()(attacked),
        _ENCRYPTED: lambda: apply_key(state, key, shape),
        _FORWARD: lambda: subject.model.backbone(Z),
    }


def _one_by_one(Z: Float[Tensor, "b n d"], r: Tensor, c: Tensor) -> Float[Tensor, "b n d"]:
    moved = permute_features(permute_features(Z, r), columns=c)
    return restore_features(restore_features(moved, columns=c), r)


def _observe_permuted(subject: Victim, batch: int) -> tuple[FeatureObservation, Sent]:
    """Return what a server sees of a batch of photographs with permuted rows, and what the client sent.

    The server has eight other photographs.
    """
    assert subject.model.vit.pos_embed is not None
    subject.model.vit.pos_embed.mul_(_PE_SCALE)
    stack, draws = Stack((RowPermutation(per="image"),)), [Generator().manual_seed(i) for i in range(batch + 2)]
    images, public = sample_images(subject, batch + 8).to(subject.model.mean.device).split([batch, 8])
    feed = Feed.undefended(images, subject.model.patch)
    sent = send(subject.model, feed, stack, Draws(draws[2:], draws[0], draws[1]))
    return observe_features(subject.model, sent, stack, public), sent
