"""What the classes of attacks, defenses and flags do not say themselves: ranges, measured costs, studies, meanings.

`explain` joins these facts with docstrings and declarations. They import nothing, so that names can be checked at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ATTACK_FACTS", "DEFENSE_FACTS", "FLAG_MEANINGS", "METRIC_MEANINGS", "AttackFacts", "DefenseFacts"]


@dataclass(frozen=True)
class AttackFacts:
    """Facts about an attack that come from its analysis and its measurements.

    Args:
        exact: the condition under which its equations give the image back exactly, or where it has no guarantee.
        fails: where it cannot work, or is known to fall short.
        cost: a measured cost with its conditions; "" if none was measured.
        studies: the stems of the pages in docs/studies that hold its measured figures.
    """

    exact: str
    fails: str = ""
    cost: str = ""
    studies: tuple[str, ...] = ()


@dataclass(frozen=True)
class DefenseFacts:
    """Facts about a defense that come from its analysis and its measurements.

    Args:
        fails: what it leaves open to an adversary that knows it.
        cost: what it costs the client or the accuracy.
        studies: the stems of the pages in docs/studies that hold its measured figures; () if it was not studied.
    """

    fails: str
    cost: str
    studies: tuple[str, ...] = ()


_SEARCH = "It is a search without a guarantee."
_ROWS = "Exact up to what the projection W loses (nothing for a square W of full rank), if every row is placed."
_DECODER = "It is a trained decoder without a guarantee."
_LARGER = "With several images in one gradient its equations mix the images, and it is refused."

ATTACK_FACTS: Mapping[str, AttackFacts] = {
    "patch-gradient": AttackFacts(
        "Exact if ∂ℓ/∂E_pos has rank N, which needs N < D; what follows the embedding does not matter.",
        "It does not know any defense: under MJP the masked slots come back empty. " + _LARGER,
        "2.7 ms an image given the gradient (DeiT-S, 224 pixels, two cores).",
        ("mjp", "table5", "gradients"),
    ),
    "patch-update": AttackFacts(
        "Exact as `patch-gradient` for one image that a client trains on by SGD, however many steps, except for the "
        "rounding of stored weights. That is undone too where the image has 256 grey levels and its gradient is not "
        "too small. It undoes momentum, schedules, clipping and weight decay.",
        "It refuses Adam and AdamW, which divide each entry of the gradient by its own magnitude: see `adam-update`. "
        + _LARGER,
        "2 to 23 s an image (ViT-Ti, 160 pixels, 1 to 20 steps), of which the correction for rounding is nearly all; "
        "behind a filter that drops entries 16 to 45 s.",
        ("updates",),
    ),
    "adam-update": AttackFacts(
        "It has no guarantee. The fewer patches, and the more entries have a magnitude that ε shows, the nearer: at "
        "high rates and for images with a small gradient.",
        "It takes a fresh state, no filter, and no decay inside Adam's division (AdamW's is undone). " + _LARGER,
        "14 s an image of 96 pixels, 24 s of 160 (ViT-Ti, one core).",
        ("adam", "updates"),
    ),
    "april": AttackFacts(
        "Exact if N + 1 ≤ D and K ≤ D, on a first block without pre-norm and skip.",
        "It does not hold on a stock block, and does not know MJP. " + _LARGER,
        "4.7 ms an image given the gradient (DeiT-S, 224 pixels, two cores).",
        ("table5", "mjp"),
    ),
    "patch-gradient-prior": AttackFacts(
        "Exact as `patch-gradient`; for an image of eight bits also for a few patches more than that (measured: "
        "trained weights, D = 192, N = 196).",
        "With many more patches than equations (N = 225, D = 192), or pixels that are no whole grey levels, only its "
        "image prior is left. Under MJP it is `patch-gradient`.",
        "1.0 s an image (ViT-Ti, 224 pixels, one shared core).",
        ("gradients", "table5"),
    ),
    "patch-gradient-adaptive": AttackFacts(
        "Exact as `patch-gradient`, and under MJP as `mjp-subspace`, in the limit where the errors of the released "
        "gradient go to zero.",
        "It reads the two gradients of the embedding alone: its failure says nothing of attacks by all layers.",
        "",
        ("gradients",),
    ),
    "mjp-subspace": AttackFacts(
        "The unmasked patches are exact except for their part in the span of the masked ones, if N < D.",
        "An image prior completes that part; the masked patches become the smoothest ones in their span. Of an update "
        "of several steps with masks of their own, patches that moved while the loss was large count as masked.",
        "0.6 s of processor time an image at 160 pixels (ViT-Ti), 1.3 s at 224 pixels (DeiT-S).",
        ("mjp", "updates"),
    ),
    "block-key": AttackFacts(
        "The encrypted images are exact as by `patch-gradient`. The key has no guarantee: from 20 photographs of 100 "
        "blocks it was exact but for one bit, from 50 of 64 blocks whole (labels as the model predicts them).",
        "With five or ten photographs under one key it has 20 to 22 dB, and with one nothing. It tells an image "
        "from its mirror image only by labels that the model predicts. " + _LARGER,
        "2 s an image (20 photographs together, ViT-Ti, 160 pixels, one shared core).",
        ("published",),
    ),
    "mjp-full": AttackFacts(
        "Every patch whose token is found is exact, up to the order of the masked patches, if N + |masked| + 1 < D.",
        "Flat patches have tokens that are nearly alike, and some are missed. No token is found where N ≥ D.",
        "2.7 s of processor time an image (trained ViT-Ti, 160 pixels), 12 to 18 s (random DeiT-S, 224 pixels).",
        ("mjp", "table5"),
    ),
    "token-separation": AttackFacts(
        "Exact for the tokens that are found, of B images, with B N for N: without position embeddings up to the order "
        "of the patches, if 2 N + 1 < D; with known ones if N + 1 < D and 3 N + 6 < 2 D; if the patch embedding is "
        "frozen too and D ≤ K, except for K − D + 1 directions of each patch, if 2 N + 5 < D.",
        "Tokens that are nearly alike are missed, above all with random weights and several images.",
        "1 to 4 s of processor time an image (ViT-Ti, 96 to 160 pixels).",
        ("tokens", "table5"),
    ),
    "adapter-separation": AttackFacts(
        "The outputs of the first MLP that are found are exact if r > 2 (N + p) for the width r of the adapter, N "
        "patches and p prefix tokens. Their inversion has no guarantee. If D ≤ K, K − D + 1 directions of each patch "
        "are told by no token.",
        "Of one small crop 6 of 17 outputs were found. The inversion of the MLP and the fit of the patches are "
        "searches from photographs' inputs, and may end far off. It reads one step of SGD on one image, and needs "
        "position embeddings.",
        "44 to 270 s an image (ViT-Ti, 64 pixels, a busy core).",
        ("partial_training",),
    ),
    "qkv-span": AttackFacts(
        "Exact for one step of SGD on one image if d − N − p ≥ K + 1 for N patches of K values, p prefix tokens, and d "
        "= r for LoRA with B = 0, d = D where queries, keys and values are trained whole.",
        "With fewer equations it is a search under a prior of photographs. With N + p ≥ d there is no equation, and it "
        "returns one grey. It needs a frozen patch embedding and position embeddings.",
        "4 to 15 s an image where it searches (ViT-Ti, 64 pixels, a busy core), 0.2 s where it is exact.",
        ("partial_training",),
    ),
    "round-unrolling": AttackFacts(
        "Exact for rounds of T steps of SGD with one image in each, if T (N + p) < D for N patches and p prefix "
        "tokens, the images have 256 grey levels, and every token of an image is found.",
        "It ends at the first image of which a token is missed. The images must be like photographs: their law tells "
        "which slot a token is of.",
        "6 to 21 s an image for 68 to 74 tokens of 192, 69 s for 148 (ViT-Ti, 64 and 96 pixels, a busy core).",
        ("rounds",),
    ),
    "client-unrolling": AttackFacts(
        "Exact for K clients of one image each after several steps of SGD, if K (N + p) < D for N patches and p prefix "
        "tokens, the images have 256 grey levels, and every token of one image, then of the next, is found.",
        "Drift costs tokens: at a rate of 0.001 two images of 96 pixels were not found after two steps, where 0.01 and "
        "0.1 gave both. It ends where no image of those left is found.",
        "10 to 60 s for two images (ViT-Ti, 64 and 96 pixels, a busy core).",
        ("clients", "rounds"),
    ),
    "qkv-completion": AttackFacts(
        "Exact where the entries that are left determine the matrix, and the search finds it, if K + 1 ≤ D − N − p: a "
        "patch has K values, and there are N patches and p prefix tokens.",
        "It has no guarantee: the completion may end at a wrong matrix. Most ViTs have more values in a patch than "
        "channels, K ≥ D, and are outside of its range. Of an update it takes one step.",
        "25 to 92 s an image, with the load of the cores (`cifar_vit`, 32 pixels).",
        ("clipping",),
    ),
    "gradient-likelihood": AttackFacts(
        _SEARCH,
        "It was measured on a few images only, and stops far from the most likely image.",
        "Minutes an image.",
        ("gradients",),
    ),
    "staged-likelihood": AttackFacts(
        _SEARCH + " It comes nearer with every step that it may take, and stops after a fixed number.",
        "A start that is far from the image, as behind signs or where a tenth of the entries is kept, leaves it far "
        "below what the release determines. It was measured on `cifar_vit` alone.",
        "40 to 60 s an image on one core (`cifar_vit`, 32 pixels).",
        ("gradients",),
    ),
    "orthogonal-matching": AttackFacts(
        _SEARCH + " An image of 48 values came back exactly from the 160 equations of one release.",
        "L parameters give 2 L equations: 112 of `cifar_vit` for 3,072 values of an image, which do not determine it.",
        "Minutes an image: every class is tried (`cifar_vit`, 32 pixels).",
        ("published",),
    ),
    "learning-to-invert": AttackFacts(
        _DECODER + " Under noise as strong as the gradient it can learn no more than the mean of its images.",
        "With the bundled photographs alone it learns little: it needs `--public` with hundreds of images. It is "
        "trained for each defense and victim.",
        "11 to 24 minutes of training on one busy core, for 8,000 releases and 800 steps (`cifar_vit`).",
        ("gradients",),
    ),
    "gradient-matching": AttackFacts(
        _SEARCH + " Under MJP what is known exactly stays exact.",
        "On three photographs 200 steps did not improve on their start, `mjp-subspace`.",
        "289 s an image for 200 steps (ViT-Ti, 160 pixels, two busy cores).",
        ("mjp",),
    ),
    "head-inversion": AttackFacts(
        "The features that the head read are exact for one image, after one step or where the head alone trains, and "
        "for the images of a batch that the head's gradient tells apart; the search for an image has no guarantee.",
        "Many images have these features, and the one that it finds is no nearer to the photograph than one colour.",
        "11 s an image (ViT-Ti, 160 pixels, 300 steps, one core).",
        ("updates",),
    ),
    "cocktail-party": AttackFacts(
        "The features are exact where they are independent of each other over the D samples that they are; the search "
        "for images has no guarantee.",
        "On the features of trained ViTs it is far from exact at every batch size that was tried, and dividing a "
        "label's row of ∂ℓ/∂W by its entry of ∂ℓ/∂b is nearer. It needs B < C classes and B ≤ D.",
        "",
        ("baselines",),
    ),
    "spear": AttackFacts(
        "Exact as `token-separation` for an MLP with ReLU, as soon as every token's direction was drawn.",
        "The draws grow exponentially with the tokens. No ViT of timm or of privlab has ReLU: GELU leaves no exact "
        "zeros, and is refused. `token-separation` needs none.",
        "",
        ("baselines",),
    ),
    "fedleak": AttackFacts(
        _SEARCH,
        "Of several steps the update is no gradient at the server's weights, so that even the true image has a "
        "distance. It knows no filter.",
        "",
        ("baselines",),
    ),
    "fedavg-matching": AttackFacts(
        _SEARCH + " At the true images, in the client's order, its distance is zero but for rounding.",
        "It takes SGD without dropout. Each evaluation runs the whole round with second derivatives. It knows no "
        "filter, and takes labels in one order, the same in all passes.",
        "",
        ("baselines",),
    ),
    "class-token-key": AttackFacts(
        "The column key is exact without noise, if the class token's values are all different.",
        "Noise with a standard deviation of 0.1 reduces the recovered key to 24 % (ViT-Ti).",
        "",
        ("permutation",),
    ),
    "pe-assignment": AttackFacts(
        _ROWS,
        "Position embeddings that drifted from the public ones by several times their deviation are not matched.",
        "4.4 ms an image (ViT-Ti, 224 pixels, batches of 32).",
        ("permutation",),
    ),
    "border-jigsaw": AttackFacts(
        _ROWS,
        "Patches that look alike are put in the wrong place, above all where every image has an order of its own.",
        "0.03 to 0.30 s an image for the re-assembly (patches of 16 pixels, 160 and 224 pixels).",
        ("permutation", "training"),
    ),
    "row-alignment": AttackFacts(
        "It has no guarantee; it improves with the number of images.",
        "It needs at least two images, and rows that stay with their image.",
        "",
        ("permutation",),
    ),
    "column-statistics": AttackFacts(
        "It has no guarantee: the column order is the best that a local search finds.",
        "At width 768 it finds 89 to 98 % of the key from four images (random ViT-B).",
        "9 to 25 s a key at width 768.",
        ("permutation",),
    ),
    "least-squares": AttackFacts(
        "Exact for a square W of full rank, without noise.",
        "It takes rows in the order in which they were sent, so that a row permutation defeats it.",
        "",
        ("permutation",),
    ),
    "deconvolution": AttackFacts(
        "Exact but for rounding where the filter keeps every frequency and W has full column rank.",
        "Frequencies that the filter removes altogether stay lost. Images have at most 64 × 64 pixels. It takes rows "
        "in the order in which they were sent.",
        "",
        ("published",),
    ),
    "cutmix-completion": AttackFacts(
        "Exact but for rounding, and for pixels that no image of the batch shows, where the rectangles are found and W "
        "has full column rank.",
        "Pixels that no image shows are guessed smoothly. Behind blocks the images are inverted with errors, and few "
        "rectangles are found exactly. Images have at most 64 × 64 pixels.",
        "It grows with the cube of the number of images of a batch, and with the number of rectangles.",
        ("published",),
    ),
    "map-inversion": AttackFacts(
        "Never exact: noise stays, and weak textures are lost with it. Without noise it is `least-squares`.",
        "The noise is known, white, and on the embedding's rows. Rows that are moved need position embeddings.",
        "",
        ("published",),
    ),
    "map-unet": AttackFacts(
        "It is a trained network without a guarantee. Without noise it is `map-inversion`, and that `least-squares`.",
        "The noise is known, white, and on the embedding's rows. With the bundled photographs alone it learns little: "
        "it needs `--public` with hundreds of images. It is trained for each defense and victim.",
        "5 to 7 minutes of training on one busy core, its 6,000 own releases included (`cifar_vit`, 32 pixels).",
        ("published",),
    ),
    "feature-optimisation": AttackFacts(
        _SEARCH,
        "It takes rows in the order in which they were sent.",
        "",
        ("permutation",),
    ),
    "depth-optimisation": AttackFacts(
        _SEARCH,
        "It takes rows in the order in which they were sent, and does not know noise. Behind eight blocks of ViT-Ti it "
        "is weaker than a trained decoder.",
        "4 to 14 s an image behind 0 to 12 blocks (ViT-Ti, 160 pixels, one busy core).",
        ("depth",),
    ),
    "inversion-conv": AttackFacts(
        _DECODER, "It expects rows in their order.", "203 s of training on one core (ViT-Ti, 64 pixels)."
    ),
    "inversion-mae": AttackFacts(
        _DECODER,
        "With 196 rows in an order of their own for each image it learns almost nothing in 300 steps.",
        "70 to 95 s of training on one core (ViT-Ti, 64 pixels).",
        ("permutation",),
    ),
    "inversion-set": AttackFacts(
        _DECODER,
        "It finds 16 permuted rows in 1000 steps, and 196 not within 300.",
        "77 to 100 s of training on one core (ViT-Ti, 64 pixels).",
        ("permutation",),
    ),
    "inversion-token": AttackFacts(
        _DECODER,
        "Without position embeddings it cannot place rows.",
        "45 to 55 s of training on one core (ViT-Ti, 64 pixels).",
        ("permutation",),
    ),
    **dict.fromkeys(
        (
            *("breaching:invertinggradients", "breaching:seethroughgradients", "breaching:deepleakage"),
            *("breaching:modern", "breaching:legacy", "breaching:wei", "breaching:tag", "breaching:beyondinfering"),
            "breaching:clsattack",
        ),
        AttackFacts(_SEARCH, "It matches all released gradients with breaching's own budget, and knows of no defense."),
    ),
    "breaching:april_analytic": AttackFacts("Exact as `april`.", "It does not know any defense.", "", ("speed",)),
    **dict.fromkeys(
        ("breaching:multiscale_ghiasi", "breaching:analytic", "breaching:imprint", "breaching:rgap"),
        AttackFacts("Nowhere: it does not run on Vision Transformers.", "It fails with the reason."),
    ),
}
"""The facts of each attack that comes with privlab, by name; an attack of another package has none."""

_SAME = "It costs no accuracy: the client puts the outputs back in order."
_CHANGED = "It changes the outputs, and so the accuracy (`correct` in the records of released features)."
_GRADIENT = "It changes what the server trains with, and may slow training down."

DEFENSE_FACTS: Mapping[str, DefenseFacts] = {
    "none": DefenseFacts("It hides nothing.", "Nothing."),
    "jigsaw": DefenseFacts(
        "Every patch keeps its own equations, so that all patches come back, in the shuffled order; borders and "
        "position predictors put many of them in place.",
        "It changes the outputs, and so the accuracy: the study has victims that were trained with it and without.",
        ("training",),
    ),
    "mjp": DefenseFacts(
        "The zero rows of ∂ℓ/∂E_pos tell the mask, the rest of the gradient tells the span of the masked patches, and "
        "the first block's MLP tells their tokens, if N + |masked| + 1 < D.",
        "It changes the outputs, and so the accuracy: the study has victims that were trained with it and without.",
        ("mjp", "table5", "training"),
    ),
    "low-pass": DefenseFacts(
        "The filtered image itself may come back exactly, and what it still shows is leaked.",
        _CHANGED,
        ("permutation",),
    ),
    "blur": DefenseFacts(
        "The blurred image itself may come back exactly, and what it still shows is leaked.", _CHANGED
    ),
    "cutmix": DefenseFacts(
        "The mixture may come back exactly, with all of the image that the rectangle leaves. A batch of one image is "
        "not changed at all.",
        _CHANGED,
    ),
    "block-scrambling": DefenseFacts(
        "One key serves all images, so that photographs give it away: neighbouring pixels vary together, and borders "
        "continue each other.",
        "It changes the outputs; a model is fine-tuned on encrypted images. Not measured here.",
        ("published",),
    ),
    "gaussian-noise": DefenseFacts(
        "Noise is averaged by an adversary that knows how images look, or that sees one image several times.",
        _CHANGED,
        ("permutation",),
    ),
    "row-permutation": DefenseFacts(
        "Rows that carry public position embeddings are put back by them. Without position embeddings borders put back "
        "many rows, and all that share one order.",
        _SAME,
        ("permutation",),
    ),
    "column-permutation": DefenseFacts(
        "The class token's row is public, and sorting it gives the key; without it the statistics of the columns do, "
        "where the base model is public.",
        _SAME,
        ("permutation",),
    ),
    "batch-shuffle": DefenseFacts(
        "Rows that carry public position embeddings are put back by them, but for the image that they belong to.",
        _CHANGED,
        ("permutation",),
    ),
    "gradient-noise": DefenseFacts(
        "A small multiplier hides little, and its ε says so. That closed forms fail at a large one is no evidence of "
        "privacy: the guarantee is (ε, δ).",
        _GRADIENT,
        ("gradients",),
    ),
    "gradient-pruning": DefenseFacts(
        "Which entries are missing is public, and those that are left are exact. It gives no guarantee.",
        _GRADIENT,
        ("gradients",),
    ),
    "gradient-quantisation": DefenseFacts(
        "The error is bounded, so that a well conditioned system still gives the image. It gives no guarantee.",
        _GRADIENT,
        ("gradients",),
    ),
    "gradient-sign": DefenseFacts(
        "One bit an entry is left, and a search over all layers may use it. It gives no guarantee.",
        _GRADIENT,
        ("gradients",),
    ),
    "binary-weights": DefenseFacts(
        "The zeros show which entries are missing, and the others are exact: enough of them determine the image, which "
        "needs N < keep · D. Several releases of one image reveal more.",
        _GRADIENT,
        ("published",),
    ),
    "censor": DefenseFacts(
        "One release tells two numbers of each parameter's gradient. As many releases of one image at the same weights "
        "as a parameter has entries tell its gradient up to sign. What is released has no part along the gradient, so "
        "that it teaches nothing to first order.",
        _GRADIENT,
        ("published",),
    ),
    "percentile-privacy": DefenseFacts(
        "Entries that are dropped follow from the others if they are few. Of gradients above its bound the "
        "embedding's are cut most, and `qkv-completion` reads others. It draws nothing, and gives no guarantee.",
        _GRADIENT,
        ("filters", "clipping"),
    ),
    "svt-privacy": DefenseFacts(
        "The noise of what is sent depends on `noise` and `gamma` alone: a large `noise` makes it small.",
        _GRADIENT,
        ("filters",),
    ),
    "adaptive-clipping": DefenseFacts(
        "It hides the norm of an update, and nothing else of one client: one factor is on all entries. The noise that "
        "a server adds to the sum of the clients comes after the server has seen them.",
        _GRADIENT,
        ("filters",),
    ),
    "encrypted-embedding": DefenseFacts(
        "It hides the embedding alone: the gradients of the first block's MLP tell its tokens, and these tell the "
        "image, whatever the sequence is. It is a reading of an abstract.",
        _GRADIENT,
        ("published",),
    ),
    "exclude-vars": DefenseFacts(
        "Its default leaves nothing out. What it leaves in is exact, and other attacks read that.",
        _GRADIENT,
        ("filters",),
    ),
}
"""The facts of each defense that comes with privlab, by name."""

FLAG_MEANINGS: Mapping[str, str] = {
    "No attack ran": "No attack was tried on a case.",
    "Outside its stated range": "Every attack that was scored on a case is outside the range in which it is said to be "
    "exact (`beyond_range`).",
    "Low effort": "Attacks were run with `--effort quick`, which is less than the standard effort.",
    "No better than a control": "The mean of an attack leaks no more than that of the leakiest control, nor does it "
    "leak structure.",
    "Structure without its scale": "By PSNR an attack is no better than a control, but by `psnr_affine`, `correlation` "
    "or `gms_affine` it is, beyond the interval.",
    "No adaptive attack": "No attack that was scored knows all of the defense (as attacks declare: `knows`).",
    "Adaptive attack weaker": "The leakiest attack that knows the defense leaks less than one that does not.",
    "More budget, less leakage": "An attack leaks less with more steps, rounds or starts, while all else and the "
    "images are the same.",
    "One draw": "The defense draws at random, and each image had one draw.",
    "Nothing released": "What is released of an image is zero or NaN.",
    "Failed": "An attack failed, or an image could not be read.",
    "Random weights": "The victim's weights are random.",
    "Untrained E_unk": "A defense feeds an E_unk that no training has shaped: the mean position embedding, or a random "
    "one.",
    "Predicted labels": "Gradients are those of the victim's own predictions, and not those of true labels.",
    "Few images": "A case has fewer than 20 different images with a score.",
}
"""When each red flag is raised; the rules themselves stand in `privlab.report.tables.flags`."""

METRIC_MEANINGS: Mapping[str, str] = {
    "f_sim": "The cosine of both images' embeddings by a network that `--embedding timm:NAME@FILE` names; for faces it "
    "should be one of faces. Without a network it is n/a.",
    "placement_accuracy": "The share of the patch slots of an image that got their own row.",
    "neighbour_accuracy": "The share of pairs of adjacent slots whose patches are adjacent in the same direction.",
    "key_recovered": "The share of the entries of the column key that were recovered.",
    "correct": "Whether the client's prediction under its defense is the label; null if labels are predictions.",
}
"""What the metrics say that have no function of their own to say it: F-SIM, and those of released features."""
