"""What each red flag means, by name; this costs no import of pandas."""

from collections.abc import Mapping

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
"""When each red flag is raised; `privlab.report.tables.flags` has the rules."""
