"""The papers that attacks, defenses and metrics come from: `references.bib`, read as it is printed."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from textwrap import indent

__all__ = ["CITED", "Reference", "cite", "references"]


@dataclass(frozen=True)
class Reference:
    """An entry of the bibliography: its key, its fields without BibTeX's braces, and the entry as it stands."""

    key: str
    fields: Mapping[str, str]
    bibtex: str

    def __str__(self) -> str:
        """Return the entry as a line of a list of references."""
        names = [name.split(", ") for name in self.fields["author"].split(" and ")]
        people = ["et al." if name == ["others"] else " ".join(reversed(name)) for name in names]
        venue = next(self.fields[kind] for kind in ("booktitle", "journal", "howpublished") if kind in self.fields)
        title = self.fields["title"].replace(" -- ", " – ")
        stop = "" if title.endswith("?") else "."
        authors = ", ".join(people).replace(", et al.", " et al").removesuffix(".")
        return f"{authors}. {title}{stop} {venue}, {self.fields['year']}."


CITED: Mapping[str, tuple[str, ...]] = {
    "patch-gradient": ("lu2022april", "ren2023mjp"),
    "april": ("lu2022april", "ren2023mjp"),
    "mjp-subspace": ("ren2023mjp",),
    "mjp-full": ("ren2023mjp",),
    "staged-likelihood": ("geiping2020inverting",),
    "orthogonal-matching": ("zhang2025censor", "geiping2020inverting"),
    "learning-to-invert": ("wu2023lti",),
    "block-key": ("kiya2023blockwise", "paikin2015jigsaw"),
    "gradient-matching": ("zhu2019dlg", "geiping2020inverting"),
    "class-token-key": ("xu2024permutation",),
    "pe-assignment": ("xu2024permutation",),
    "border-jigsaw": ("gallagher2012jigsaw", "paikin2015jigsaw"),
    "row-alignment": ("xu2024permutation",),
    "column-statistics": ("xu2024permutation",),
    "deconvolution": ("dosovitskiy2021vit",),
    "cutmix-completion": ("yun2019cutmix", "baek2022cutmix"),
    "map-inversion": ("dosovitskiy2021vit",),
    "map-unet": ("jin2017fbpconvnet", "ronneberger2015unet"),
    "least-squares": ("dosovitskiy2021vit",),
    "feature-optimisation": ("mahendran2015understanding",),
    "depth-optimisation": ("mahendran2015understanding",),
    "qkv-span": ("hu2022lora",),
    "adapter-separation": ("houlsby2019adapters",),
    "head-inversion": ("mahendran2015understanding", "phong2017revisited"),
    "cocktail-party": ("kariyappa2023cocktail",),
    "spear": ("dimitrov2024spear",),
    "fedleak": ("fan2025fedleak",),
    "fedavg-matching": ("dimitrov2022fedavg",),
    "inversion-conv": ("dosovitskiy2016inverting", "xu2024permutation"),
    "inversion-mae": ("xu2024permutation", "he2022mae"),
    "inversion-set": ("lee2019set",),
    "breaching:invertinggradients": ("geiping2020inverting",),
    "breaching:seethroughgradients": ("yin2021gradinversion",),
    "breaching:deepleakage": ("zhu2019dlg",),
    "breaching:wei": ("wei2020framework",),
    "breaching:tag": ("deng2021tag",),
    "breaching:beyondinfering": ("wang2019beyond",),
    "breaching:clsattack": ("wen2022fishing",),
    "breaching:april_analytic": ("lu2022april",),
    "breaching:multiscale_ghiasi": ("ghiasi2022plugin",),
    "breaching:analytic": ("phong2017revisited",),
    "breaching:imprint": ("fowl2022robbing",),
    "breaching:rgap": ("zhu2021rgap",),
    "jigsaw": ("ren2023mjp",),
    "mjp": ("ren2023mjp",),
    "low-pass": ("jeong2022frequency", "xu2024permutation"),
    "blur": ("xu2024permutation",),
    "cutmix": ("yun2019cutmix", "baek2022cutmix"),
    "block-scrambling": ("kiya2023blockwise", "horio2024restricted"),
    "gaussian-noise": ("jeong2022frequency", "xu2024permutation"),
    "row-permutation": ("xu2024permutation",),
    "column-permutation": ("xu2024permutation",),
    "batch-shuffle": ("yao2022shuffling", "xu2024permutation"),
    "gradient-noise": ("abadi2016dpsgd",),
    "gradient-pruning": ("lin2018dgc", "zhu2019dlg"),
    "gradient-quantisation": ("alistarh2017qsgd", "zhu2019dlg"),
    "gradient-sign": ("bernstein2018signsgd",),
    "encrypted-embedding": ("aso2023encrypted",),
    "binary-weights": ("sawada2024binary",),
    "censor": ("zhang2025censor",),
    "percentile-privacy": ("shokri2015ppdl", "roth2022nvflare"),
    "svt-privacy": ("lyu2017svt", "roth2022nvflare"),
    "adaptive-clipping": ("andrew2021clipping",),
    "exclude-vars": ("roth2022nvflare",),
    "ssim": ("wang2004ssim", "ren2023mjp"),
    "ssim_skimage": ("wang2004ssim",),
    "fft2d": ("ren2023mjp",),
    "fft2d_mjp": ("ren2023mjp",),
    "gms_affine": ("xue2014gmsd",),
    **dict.fromkeys(("lpips", "lpips_alex", "lpips_vgg", "lpips_squeeze"), ("zhang2018lpips",)),
    **dict.fromkeys(("f_sim", "placement_accuracy", "neighbour_accuracy"), ("xu2024permutation",)),
}
"""The keys of the papers that an attack, a defense or a metric comes from; what is ours alone, or common, has none."""


@cache
def references() -> Mapping[str, Reference]:
    """Return the entries of `references.bib`, by key."""
    text = files("privlab.inventory").joinpath("references.bib").read_text("utf-8")
    return {entry.key: entry for entry in map(_entry, text.strip().split("\n\n"))}


def cite(keys: Sequence[str]) -> str:
    """Return a list of references, and their BibTeX.

    Args:
        keys: of entries, in the order in which they are printed.
    """
    found = [references()[key] for key in keys]
    lines = [f"- {entry}" for entry in found]
    return "\n".join([*lines, "", *(indent(entry.bibtex, "    ") for entry in found)]) if found else ""


def _entry(bibtex: str) -> Reference:
    """Return an entry that is written as all of ours: the key in the first line, then a field in each line."""
    key = re.match(r"@\w+\{(\w+),\n", bibtex)
    found = re.findall(r"^  (\w+) = \{(.*)\},$", bibtex, re.MULTILINE)
    if key is None or len(found) != bibtex.count("\n") - 1:
        raise ValueError(f"An entry of references.bib is not written as the others: {bibtex.splitlines()[0]}")
    return Reference(key[1], {name: re.sub("[{}]", "", value) for name, value in found}, bibtex)
