"""`breaching:NAME`: every vision attack of breaching 0.1.2; `decepticon` reads text, `sanitycheck` does not attack."""

from dataclasses import dataclass
from typing import ClassVar

from privlab.attacks.breaching.wrapper import Breaching
from privlab.attacks.gradients.april import April
from privlab.threat import Capability, Observation

_ONE_IMAGE = frozenset({Capability.KNOWS_WEIGHTS, Capability.BATCH_SIZE_ONE, Capability.CLASS_LABELS})


class _Search(Breaching):
    """An attack of breaching that searches, and runs on ViTs.

    Exact if: no condition is known: it is a search without a guarantee.

    Fails if: a defense is in its way: it knows none, and matches all released gradients with breaching's own budget.
    """


class _NotOnViT(Breaching):
    """An attack of breaching that does not fit a ViT; `obstacle` says why.

    Steps: stops: does not fit a ViT

    Exact if: never: it does not run on Vision Transformers.

    Fails if: it is run: it ends with the reason.
    """

    requires: ClassVar[frozenset[Capability]] = _ONE_IMAGE


@dataclass(frozen=True)
class BreachingInvertingGradients(_Search):
    """breaching's `invertinggradients`: Geiping et al. (NeurIPS 2020); runs on ViTs.

    Idea: The attack starts from an image that says nothing, and computes the gradient that a client with that image
    would release. An optimiser changes the image until that gradient is near the released one by cosine, with a penalty
    on total variation. It takes 24,000 signed steps of Adam.

    Steps: guess an image → match its gradient: cosine → best guess of the search

    Source: [@geiping2020inverting]
    """

    name: ClassVar[str] = "breaching:invertinggradients"
    paper: ClassVar[str] = "Geiping et al. (NeurIPS 2020); runs on ViTs"
    order: ClassVar[int] = 420


@dataclass(frozen=True)
class BreachingSeeThroughGradients(_Search):
    """breaching's `seethroughgradients`: Yin et al. (CVPR 2021); runs on ViTs.

    Idea: The attack starts from an image that says nothing, and computes the gradient that a client with that image
    would release. An optimiser changes the image until that gradient is near the released one by Euclidean distance,
    with priors on smoothness and norm. It takes 20,000 steps of Adam with added noise.

    Steps: guess an image → match its gradient: Euclidean distance → best guess of the search

    Source: [@yin2021gradinversion]
    """

    name: ClassVar[str] = "breaching:seethroughgradients"
    paper: ClassVar[str] = "Yin et al. (CVPR 2021); runs on ViTs"
    order: ClassVar[int] = 430


@dataclass(frozen=True)
class BreachingDeepLeakage(_Search):
    """breaching's `deepleakage`: Zhu et al. (NeurIPS 2019); runs on ViTs.

    Idea: The attack starts from an image that says nothing, and computes the gradient that a client with that image
    would release. An optimiser changes the image until that gradient is near the released one by Euclidean distance,
    without a prior. It optimises the label too, by 1,200 iterations of L-BFGS.

    Steps: guess an image → match its gradient: Euclidean distance → best guess of the search

    Source: [@zhu2019dlg]
    """

    name: ClassVar[str] = "breaching:deepleakage"
    paper: ClassVar[str] = "Zhu et al. (NeurIPS 2019); runs on ViTs"
    order: ClassVar[int] = 440


@dataclass(frozen=True)
class BreachingModern(_Search):
    """breaching's `modern`: breaching's own defaults for large images; runs on ViTs.

    Idea: The attack starts from an image that says nothing, and computes the gradient that a client with that image
    would release. An optimiser changes the image until that gradient is near the released one by cosine, with priors on
    total variation and on the features of the last layer. It starts from a repeated pattern for 24,000 steps of Adam.

    Steps: guess an image → match its gradient: cosine → best guess of the search
    """

    name: ClassVar[str] = "breaching:modern"
    paper: ClassVar[str] = "breaching's own defaults for large images; runs on ViTs"
    order: ClassVar[int] = 450


@dataclass(frozen=True)
class BreachingLegacy(_Search):
    """breaching's `legacy`: breaching's earlier defaults; runs on ViTs.

    Idea: The attack starts from an image that says nothing, and computes the gradient that a client with that image
    would release. An optimiser changes the image until that gradient is near the released one by cosine, with priors on
    total variation and on the features of the last layer. It starts from zeros, and takes 24,000 steps of Adam.

    Steps: guess an image → match its gradient: cosine → best guess of the search
    """

    name: ClassVar[str] = "breaching:legacy"
    paper: ClassVar[str] = "breaching's earlier defaults; runs on ViTs"
    order: ClassVar[int] = 460


@dataclass(frozen=True)
class BreachingWei(_Search):
    """breaching's `wei`: Wei et al. (ESORICS 2020); runs on ViTs.

    Idea: The attack starts from an image that says nothing, and computes the gradient that a client with that image
    would release. An optimiser changes the image until that gradient is near the released one by Euclidean distance,
    together with the loss of the task. It starts from a repeated pattern, and takes 300 iterations of L-BFGS.

    Steps: guess an image → match its gradient: Euclidean distance → best guess of the search

    Source: [@wei2020framework]
    """

    name: ClassVar[str] = "breaching:wei"
    paper: ClassVar[str] = "Wei et al. (ESORICS 2020); runs on ViTs"
    order: ClassVar[int] = 470


@dataclass(frozen=True)
class BreachingTag(_Search):
    """breaching's `tag`: Deng et al. (EMNLP 2021), made for text; runs on ViTs.

    Idea: The attack starts from an image that says nothing, and computes the gradient that a client with that image
    would release. An optimiser changes the image until that gradient is near the released one by Euclidean and absolute
    distance, weighted by layer. It was made for text, and takes 1,000 steps of Adam as BERT uses it.

    Steps: guess an image → match its gradient: Euclidean and absolute distance → best guess of the search

    Source: [@deng2021tag]
    """

    name: ClassVar[str] = "breaching:tag"
    paper: ClassVar[str] = "Deng et al. (EMNLP 2021), made for text; runs on ViTs"
    order: ClassVar[int] = 480


@dataclass(frozen=True)
class BreachingBeyondInferring(_Search):
    """breaching's `beyondinfering`: Wang et al. (INFOCOM 2019), without its GAN; runs on ViTs.

    Idea: The attack starts from an image that says nothing, and computes the gradient that a client with that image
    would release. An optimiser changes the image until that gradient is near the released one by Euclidean distance,
    with a penalty on total variation. It takes 400 iterations of L-BFGS, and leaves out the GAN of its paper.

    Steps: guess an image → match its gradient: Euclidean distance → best guess of the search

    Source: [@wang2019beyond]
    """

    name: ClassVar[str] = "breaching:beyondinfering"
    paper: ClassVar[str] = "Wang et al. (INFOCOM 2019), without its GAN; runs on ViTs"
    order: ClassVar[int] = 490


@dataclass(frozen=True)
class BreachingClassAttack(_Search):
    """breaching's `clsattack`: the search of Wen et al. (ICML 2022); runs on ViTs.

    Idea: The attack starts from an image that says nothing, and computes the gradient that a client with that image
    would release. An optimiser changes the image until that gradient is near the released one by cosine, with a penalty
    on total variation. It starts from a pattern with noise, and takes 24,000 steps of Adam.

    Steps: guess an image → match its gradient: cosine → best guess of the search

    Source: [@wen2022fishing]
    """

    name: ClassVar[str] = "breaching:clsattack"
    paper: ClassVar[str] = "the search of Wen et al. (ICML 2022); runs on ViTs"
    order: ClassVar[int] = 500


@dataclass(frozen=True)
class BreachingAprilAnalytic(Breaching):
    """breaching's `april_analytic`: Lu et al. (CVPR 2022); runs on ViTs.

    Idea: In a first block without pre-norm and skip, attention reads the tokens themselves. The gradients of its three
    matrices and of the position embeddings give every token by a linear system. This is `april` by another group.

    Steps: solve Eq. 8 for the tokens z → subtract E_pos and b → invert the projection W

    Exact if: `april` would be.

    Fails if: a defense is in its way: it knows none.

    Studies: speed

    Source: [@lu2022april]
    """

    name: ClassVar[str] = "breaching:april_analytic"
    paper: ClassVar[str] = "Lu et al. (CVPR 2022); runs on ViTs"
    order: ClassVar[int] = 510
    requires: ClassVar[frozenset[Capability]] = _ONE_IMAGE | {
        Capability.APRIL_BLOCK,
        Capability.LEARNABLE_PE_GRADIENT,
        Capability.PE_OF_EVERY_TOKEN,
    }

    def beyond(self, seen: Observation) -> str | None:
        """Return the condition of `april` that an observation violates, or None."""
        return April().beyond(seen)


@dataclass(frozen=True)
class BreachingMultiscaleGhiasi(_NotOnViT):
    """breaching's `multiscale_ghiasi`: after Ghiasi et al. (ICML 2022); it does not run on ViTs.

    Idea: The attack matches gradients at several sizes of the image, one after the other. A ViT takes one size alone.
    On a Vision Transformer it ends with this reason, and counts as an attack that failed.

    Source: [@ghiasi2022plugin]
    """

    name: ClassVar[str] = "breaching:multiscale_ghiasi"
    obstacle: ClassVar[str] = (
        "it passes its trial one argument too many, and searches at sizes that a ViT does not take"
    )
    paper: ClassVar[str] = f"after Ghiasi et al. (ICML 2022); not on ViTs: {obstacle}"
    order: ClassVar[int] = 520


@dataclass(frozen=True)
class BreachingAnalytic(_NotOnViT):
    """breaching's `analytic`: Phong et al. (2017); it does not run on ViTs.

    Idea: The attack divides the gradient of a linear layer's weight by that of its bias. It needs a first layer that
    reads all pixels at once. On a Vision Transformer it ends with this reason, and counts as an attack that failed.

    Source: [@phong2017revisited]
    """

    name: ClassVar[str] = "breaching:analytic"
    obstacle: ClassVar[str] = "made for linear layers alone, of which the first reads the pixels"
    paper: ClassVar[str] = f"Phong et al. (2017); not on ViTs: {obstacle}"
    order: ClassVar[int] = 530


@dataclass(frozen=True)
class BreachingImprint(_NotOnViT):
    """breaching's `imprint`: Fowl et al. (ICLR 2022); it does not run on ViTs.

    Idea: The attack reads images from a layer that a malicious server planted in the model. privlab's server is honest
    but curious, and its model has no such layer. On a Vision Transformer it ends with this reason, and counts as an
    attack that failed.

    Source: [@fowl2022robbing]
    """

    name: ClassVar[str] = "breaching:imprint"
    obstacle: ClassVar[str] = "needs a layer that a malicious server plants in the model"
    paper: ClassVar[str] = f"Fowl et al. (ICLR 2022); not on ViTs: {obstacle}"
    order: ClassVar[int] = 540


@dataclass(frozen=True)
class BreachingRgap(_NotOnViT):
    """breaching's `rgap`: Zhu and Blaschko (ICLR 2021); it does not run on ViTs.

    Idea: The attack undoes a network layer by layer, from its output to its input. It does so for a chain of
    convolutions and activations alone. On a Vision Transformer it ends with this reason, and counts as an attack that
    failed.

    Source: [@zhu2021rgap]
    """

    name: ClassVar[str] = "breaching:rgap"
    obstacle: ClassVar[str] = "undoes a chain of convolutions and activations, layer by layer"
    paper: ClassVar[str] = f"Zhu and Blaschko (ICLR 2021); not on ViTs: {obstacle}"
    order: ClassVar[int] = 550
