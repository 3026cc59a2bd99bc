"""The idea of each attack and each defense in three plain sentences, and the steps of its drawing.

The parties and what is released are in no table here: they follow from the declarations. Nothing is imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["ATTACK_IDEAS", "DEFENSE_IDEAS", "Box", "Idea"]


@dataclass(frozen=True)
class Idea:
    """What an attack or a defense does, for a reader who has not seen a formula yet.

    Args:
        text: three sentences: what it starts from, what it does, and why or how far that works.
        steps: one to three steps, in a few words each: of the attack behind what is released, or of the defense before
            it.
    """

    text: str
    steps: tuple[str, ...]


@dataclass(frozen=True)
class Box:
    """One box: whose it is, and what happens in it. What is released is on its way from one party to the other."""

    party: Literal["client", "released", "adversary"]
    text: str


def _matching(distance: str, prior: str, rest: str) -> Idea:
    """Return the idea of a search by breaching, which differs from the others in three phrases."""
    text = (
        "The attack starts from an image that says nothing, and computes the gradient that a client with that image "
        f"would release. An optimiser changes the image until that gradient is near the released one by {distance}, "
        f"{prior}. {rest}"
    )
    return Idea(text, ("guess an image", f"match its gradient: {distance}", "best guess of the search"))


def _unfit(what: str, why: str) -> Idea:
    """Return the idea of an attack of breaching that does not run on Vision Transformers."""
    text = f"{what} {why} On a Vision Transformer it ends with this reason, and counts as an attack that failed."
    return Idea(text, ("stops: does not fit a ViT",))


ATTACK_IDEAS: Mapping[str, Idea] = {
    "patch-gradient": Idea(
        "Each patch enters the model by one matrix W and by a position embedding of its own. The gradient of W is a "
        "sum over the patches, and the gradients of the position embeddings are the factors of that sum. So the "
        "patches are the solution of one linear system, and no search is needed.",
        ("factors: A = ∂ℓ/∂E_pos", "solve Aᵀ X = ∂ℓ/∂W", "patches X, in place"),
    ),
    "head-inversion": Idea(
        "The gradient of the classifier is an outer product, so it gives away the label of an image and the features "
        "that the classifier read. The attack reads both, and searches for an image with these features. The features "
        "are exact, and the image is a guess, since many images share them.",
        ("features f = Gᵀ h / ‖h‖²", "search an image that has them", "smooth by total variation"),
    ),
    "cocktail-party": Idea(
        "The gradient of the classifier mixes the features of all images of a batch. Independent component analysis "
        "looks for the mixtures that are least like a normal distribution, and takes these for the features of single "
        "images. The gradient of the bias tells their scales, and a search finds images that have them.",
        ("whiten ∂ℓ/∂W of the head", "unmix by negentropy", "search images that have f"),
    ),
    "spear": Idea(
        "ReLU passes no gradient where it is off, so that the gradient of each token has exact zeros. The attack draws "
        "rows of the factorised gradient until all of them are zero for one token, which gives that token's direction. "
        "All directions together separate the tokens, and images follow from these.",
        ("factorise ∂ℓ/∂W₁ = L R", "draw rows that one token leaves zero", "tokens U = Q⁻¹ R"),
    ),
    "fedleak": Idea(
        "The update of a round is taken for a gradient. The attack looks for images whose gradient has the direction "
        "of the update in its largest entries alone. It prefers points around which the distance hardly changes, "
        "because searches get on there.",
        ("mean gradient of the round", "match the largest entries", "penalise the slope"),
    ),
    "fedavg-matching": Idea(
        "The client's settings are public, so that the adversary can train as the client did, on images of its own. "
        "The attack changes these images until the whole round moves the weights as the released update does. Each "
        "pass over the data has its own candidates, which must agree on what no order of images changes.",
        ("labels from the head", "run the round on candidates", "match the update, join passes"),
    ),
    "patch-update": Idea(
        "A client that trains on one image for several steps releases the difference of its weights. All steps of SGD"
        " use the same patches, so the difference obeys the same linear system as one gradient. The attack undoes "
        "weight decay, solves the system, and trains the client again on its result to find the rounding error of the"
        " stored weights.",
        ("undo decay, weigh by rounding", "solve Aᵀ X = G", "retrain to foresee rounding"),
    ),
    "adam-update": Idea(
        "Adam divides each entry of the gradient by its own magnitude, so that an update shows its sign. Small entries "
        "show their magnitude too, because Adam adds ε to what it divides by. The attack looks for an image, as smooth "
        "as photographs are, and for one gradient behind the first blocks, which together give all matrices before it "
        "these signs and magnitudes.",
        ("undo decay, read signs, invert ε", "solve Aᵀ X = G, weighed", "search image and gradient by signs"),
    ),
    "april": Idea(
        "In a first block without pre-norm and skip, attention reads the tokens themselves. The gradients of its "
        "three matrices and of the position embeddings then give every token by a linear system. The inverse of the "
        "patch projection turns tokens into patches, and loses what the projection had lost.",
        ("solve Eq. 8 for the tokens z", "subtract E_pos and b", "invert the projection W"),
    ),
    "patch-gradient-prior": Idea(
        "The linear system of `patch-gradient` has too few equations where there are as many patches as channels. The"
        " attack solves what can be solved, and knows which few combinations of patches are left open. It completes "
        "these by the smoothest image, and then tests which whole grey levels fit.",
        ("solve Aᵀ X = ∂ℓ/∂W", "complete by an image prior", "round to grey levels that fit"),
    ),
    "patch-gradient-adaptive": Idea(
        "Noise, pruning or rounding puts errors on both sides of the linear system of `patch-gradient`. The attack "
        "knows how large these errors are, and weighs every equation by them. It then looks for the smooth image that"
        " explains the released gradient best.",
        ("weigh equations by their errors", "fill in missing entries", "smoothest X that explains G"),
    ),
    "mjp-subspace": Idea(
        "MJP hides the gradients of the masked slots, so their patches have no equation of their own. The rest of the"
        " gradient still tells the span in which the masked patches lie, and every other patch but for its part in "
        "that span. A prior learned from public photographs completes that part.",
        ("span Y of the masked patches", "solve the others outside Y", "complete by an image prior"),
    ),
    "block-key": Idea(
        "The gradient gives back the encrypted images, and all of them have one key. Values of neighbouring pixels "
        "vary together in every photograph, so that their correlations tell which values were neighbours. The blocks "
        "are then put together by their borders, and the labels that the model then predicts tell which way is up.",
        ("encrypted images: patch-gradient", "order of values by correlations", "blocks by borders, turn by labels"),
    ),
    "mjp-full": Idea(
        "The first block's MLP sees every token, masked or not, and its gradients are sums over them. The attack "
        "takes these sums apart, and so finds each token that MJP meant to hide. Tokens become patches by linear "
        "equations, and the masked patches are put where their borders fit.",
        ("start from mjp-subspace", "separate the MLP's tokens", "patches from tokens, by borders"),
    ),
    "token-separation": Idea(
        "The gradients of the first block's MLP are sums over all tokens of all images. A search finds the vectors "
        "that are true tokens, because only those agree with both matrices of the MLP. Patches follow from the tokens"
        " by linear equations, without any gradient of a position embedding.",
        ("separate the MLP's tokens", "patches from tokens", "sort into images and slots"),
    ),
    "adapter-separation": Idea(
        "The gradients of an adapter behind the first MLP span what that MLP gives for each token, and only true "
        "tokens agree with both layers of the adapter. So the outputs are found one by one. Then the MLP is inverted, "
        "the tokens are put into their slots, and the image is fitted to them.",
        ("separate the MLP's outputs", "invert the MLP", "put into slots, fit the patches"),
    ),
    "qkv-span": Idea(
        "Whoever trains queries, keys and values, or LoRA's mixtures of them, shows the space that an image's tokens "
        "span. Each patch must keep its token in that space: linear equations, whose number the rank decides. Where "
        "they do not suffice, the likeliest image is sought, with the density that a space has by its tokens.",
        ("space that tokens span", "equations of each patch", "likeliest image under them"),
    ),
    "round-unrolling": Idea(
        "A client takes several steps with another image in each, and releases the sum of what they moved. The first "
        "step was made at weights that the server knows, so only the first image's tokens agree with both matrices of "
        "the MLP. The attack finds that image, makes the step again, takes it off, and goes on at the next weights.",
        ("tokens of the first step", "its image, by attention", "make the step again, take it off"),
    ),
    "client-unrolling": Idea(
        "Several clients take several steps each on an image of their own, and the server sees the mean alone. All of "
        "them start at weights that the server knows, so the tokens of all first steps agree with both matrices of the "
        "MLP. The attack sorts them into images, runs the client of each again, and takes it off.",
        ("tokens of all first steps", "sort into images, by attention", "run each client again, take it off"),
    ),
    "qkv-completion": Idea(
        "A filter cuts or drops some entries of the gradient, but the matrix of the first block's queries, keys and "
        "values has only as many independent rows as there are tokens. So the missing entries follow from the others. "
        "Every token must lie in the span of the completed rows, which is a linear equation for each patch by itself.",
        ("keep the exact entries", "complete to rank N + p", "solve for each patch in the span"),
    ),
    "gradient-likelihood": Idea(
        "The attack knows how the defense of a gradient clips, what noise it adds and which entries it drops. So it "
        "can say how likely the released gradient is for any image. It searches for the image under which the "
        "gradients of all layers are likeliest, with a prior on images.",
        ("guess an image", "likelihood of the release", "climb to the likeliest image"),
    ),
    "staged-likelihood": Idea(
        "Whatever follows the first blocks, the gradients of their parameters depend on the image and on one gradient "
        "behind these blocks. Of one block this is nearly linear, so that a poor start finds its way. The attack "
        "solves for both, then does so for more blocks from the image found, up to all of them.",
        ("start from a closed form", "image and gradient behind one block", "more blocks, up to all"),
    ),
    "orthogonal-matching": Idea(
        "What the client releases of a layer is random, but it is as long as the layer's gradient, and orthogonal to "
        "it. These are two equations for each layer, whatever was drawn. The attack searches for an image whose "
        "gradients fulfil all of them, with a prior on images.",
        ("guess an image", "gradients of its length, orthogonal", "search for the image"),
    ),
    "learning-to-invert": Idea(
        "The adversary takes the step of a client on images of its own, and applies the defense to the gradients with "
        "draws of its own. On these pairs it trains a decoder from a release back to its image. The decoder learns "
        "what the defense leaves, whatever the defense is.",
        ("own releases of public images", "train a decoder", "apply it to the release"),
    ),
    "gradient-matching": Idea(
        "The attack guesses an image, and computes the gradient that a client with that image would release. An "
        "optimiser changes the guess until both gradients agree. It starts from the best closed form that the threat "
        "model grants, and keeps what that knows exactly.",
        ("start from a closed form", "match the gradients", "search for the unknown part"),
    ),
    "class-token-key": Idea(
        "The row of the class token is the same for every image, and its values are public. A column permutation only"
        " changes their order, so that sorting both rows gives the key. With the key the columns are put back, and "
        "the rows are placed and inverted.",
        ("sort the class token's values", "read off the column key", "place and invert the rows"),
    ),
    "pe-assignment": Idea(
        "Every row carries the position embedding of its slot, and the server knows these embeddings. Rows of public "
        "photographs tell how much the rest of a row varies. So the likeliest slot of each row follows from one "
        "assignment problem, and the rows are inverted in that order.",
        ("cost of each row at each slot", "solve the assignment", "subtract e_s, invert W"),
    ),
    "border-jigsaw": Idea(
        "Without position embeddings a row says nothing of its slot. It still says what its patch looks like, because"
        " the projection can be inverted. The patches are then put together as a jigsaw puzzle, by how well their "
        "borders continue each other.",
        ("invert each row", "compare borders", "grow the image"),
    ),
    "row-alignment": Idea(
        "The client may keep its position embeddings private, yet it adds the same ones to every image. Over several "
        "images the attack lines up the rows that share an embedding, as a clustering does. The slots are then put in"
        " place together, by their borders and by what is public of the embeddings.",
        ("cluster rows by slot", "order slots by borders", "subtract e_s, invert W"),
    ),
    "column-statistics": Idea(
        "A permutation of columns keeps the mean and the covariance of the features, in another order. The server "
        "knows both from public photographs. It looks for the order in which they agree best, first by an assignment "
        "and then by swaps.",
        ("moments of the features", "match with public moments", "place and invert the rows"),
    ),
    "least-squares": Idea(
        "A row of features is a linear function of its patch. The attack inverts that function, with the rows in the "
        "order in which they were sent. What the projection has lost is estimated from the statistics of public "
        "patches.",
        ("subtract e_s and b", "Wiener estimate of each patch"),
    ),
    "deconvolution": Idea(
        "A filter of images, such as a blur, is a matrix that the attack measures by running the defense on single "
        "pixels. The rows tell the filtered image. The attack finds the image that is likeliest as a photograph among "
        "those that the filter turns into it.",
        ("invert the rows", "measure the filter", "undo it under a power law"),
    ),
    "cutmix-completion": Idea(
        "The rectangle that covers a part of each image is of another one in the same batch, so the two look alike "
        "there, and it has sharp borders. The attack finds all rectangles of the batch together. It takes what "
        "other images show of a covered part from them, and fills pixels that no image shows smoothly.",
        ("invert the rows", "find the rectangles", "take back, and fill"),
    ),
    "map-inversion": Idea(
        "Noise on features hides weak textures, and not edges. The attack knows how strong the noise is, and that the "
        "differences of adjacent pixels of photographs are mostly small and sometimes large. It finds the image that "
        "is likeliest under both, all of it at once.",
        ("estimate each patch", "weigh differences by their size", "solve for the whole image, repeat"),
    ),
    "map-unet": Idea(
        "The best that is known of noise and of photographs in formulas leaves errors, which look alike from image to "
        "image. The adversary sends its own images through the client's part with noise of its own, and inverts them "
        "as it would the client's. It trains a network to correct the result, and applies it to the client's.",
        ("invert own noisy releases", "train a U-Net on the errors", "correct the image of the client"),
    ),
    "depth-optimisation": Idea(
        "The client runs the first blocks of the model too, and the attack knows their weights. It starts from the "
        "image that a linear map of public images gives, and changes it until its own features behind these blocks "
        "are the released ones. The deeper the cut, the more images have nearly the same features.",
        ("linear map from public images", "match the features behind the cut", "patches as in photographs, smooth"),
    ),
    "feature-optimisation": Idea(
        "The attack guesses an image, and computes the features that the client would send for it. An optimiser "
        "changes the guess until both agree, with a penalty on rough images. Rows are taken in the order in which "
        "they were sent.",
        ("guess an image", "match the features", "smooth by total variation"),
    ),
    "inversion-conv": Idea(
        "The adversary sends its own images through the client's embedding and defense. It trains a convolutional "
        "decoder that turns what is sent back into the image. The decoder is then applied to what the client sent, "
        "with row i as slot i.",
        ("features of public images", "train a decoder (CNN)", "apply it to the release"),
    ),
    "inversion-mae": Idea(
        "The adversary sends its own images through the client's embedding and defense. It trains a decoder of "
        "Transformer blocks, as the paper of permutation equivariance does. The decoder has a fixed order of rows, "
        "which a row permutation disturbs.",
        ("features of public images", "train a decoder (MAE)", "apply it to the release"),
    ),
    "inversion-set": Idea(
        "The adversary sends its own images through the client's embedding and defense. It trains a decoder that "
        "reads the rows as a set: each slot asks all rows for its patch. The order of the rows therefore does not "
        "matter to it.",
        ("features of public images", "train a decoder of sets", "apply it to the release"),
    ),
    "inversion-token": Idea(
        "The adversary sends its own images through the client's embedding and defense. It trains a decoder of single"
        " rows that also says to which slot a row belongs. An assignment then places the rows, each of them once.",
        ("features of public images", "train patch and slot decoders", "assign rows to slots"),
    ),
    "breaching:invertinggradients": _matching(
        "cosine", "with a penalty on total variation", "It takes 24,000 signed steps of Adam."
    ),
    "breaching:seethroughgradients": _matching(
        "Euclidean distance", "with priors on smoothness and norm", "It takes 20,000 steps of Adam with added noise."
    ),
    "breaching:deepleakage": _matching(
        "Euclidean distance", "without a prior", "It optimises the label too, by 1,200 iterations of L-BFGS."
    ),
    "breaching:modern": _matching(
        "cosine",
        "with priors on total variation and on the features of the last layer",
        "It starts from a repeated pattern, and takes 24,000 steps of Adam.",
    ),
    "breaching:legacy": _matching(
        "cosine",
        "with priors on total variation and on the features of the last layer",
        "It starts from zeros, and takes 24,000 steps of Adam.",
    ),
    "breaching:wei": _matching(
        "Euclidean distance",
        "together with the loss of the task",
        "It starts from a repeated pattern, and takes 300 iterations of L-BFGS.",
    ),
    "breaching:tag": _matching(
        "Euclidean and absolute distance",
        "weighted by layer",
        "It was made for text, and takes 1,000 steps of Adam as BERT uses it.",
    ),
    "breaching:beyondinfering": _matching(
        "Euclidean distance",
        "with a penalty on total variation",
        "It takes 400 iterations of L-BFGS, and leaves out the GAN of its paper.",
    ),
    "breaching:clsattack": _matching(
        "cosine",
        "with a penalty on total variation",
        "It starts from a pattern with noise, and takes 24,000 steps of Adam.",
    ),
    "breaching:april_analytic": Idea(
        "In a first block without pre-norm and skip, attention reads the tokens themselves. The gradients of its "
        "three matrices and of the position embeddings give every token by a linear system. This is the closed form "
        "of `april` in the code of another group.",
        ("solve Eq. 8 for the tokens z", "subtract E_pos and b", "invert the projection W"),
    ),
    "breaching:multiscale_ghiasi": _unfit(
        "The attack matches gradients at several sizes of the image, one after the other.",
        "A ViT takes one size alone.",
    ),
    "breaching:analytic": _unfit(
        "The attack divides the gradient of a linear layer's weight by that of its bias.",
        "It needs a first layer that reads all pixels at once.",
    ),
    "breaching:imprint": _unfit(
        "The attack reads images from a layer that a malicious server planted in the model.",
        "privlab's server is honest but curious, and its model has no such layer.",
    ),
    "breaching:rgap": _unfit(
        "The attack undoes a network layer by layer, from its output to its input.",
        "It does so for a chain of convolutions and activations alone.",
    ),
}
"""The idea of each attack that comes with privlab, by name."""

DEFENSE_IDEAS: Mapping[str, Idea] = {
    "none": Idea(
        "The client feeds its image as it is, and releases what the model gives. No defense acts on the image, on the"
        " features or on the gradient. It is the control beside which a defense is judged.",
        ("the image as it is",),
    ),
    "jigsaw": Idea(
        "The client chooses blocks of patches, and shuffles these among themselves. The model is fed the shuffled "
        "image with its position embeddings as they are. What is released shows every patch, and hides where some of "
        "them belong.",
        ("choose γ N slots", "shuffle their patches"),
    ),
    "mjp": Idea(
        "The client chooses blocks of patches, shuffles these among themselves, and feeds all of them with one "
        "unknown position embedding. The gradients of the masked slots' own position embeddings are then zero. A "
        "linear solver that takes these zeros for equations returns noise.",
        ("choose γ N slots", "shuffle their patches", "feed them with E_unk"),
    ),
    "low-pass": Idea(
        "The client removes the high frequencies of its image before it feeds it. What is released is a function of "
        "the blurred image alone. Details are gone for the model and for the adversary alike.",
        ("Fourier transform", "keep ‖f‖ ≤ radius"),
    ),
    "blur": Idea(
        "The client blurs its image with a Gaussian before it feeds it. What is released is a function of the blurred"
        " image alone. The finer a detail is, the more it is weakened.",
        ("Gaussian blur, sigma",),
    ),
    "cutmix": Idea(
        "The client pastes a rectangle of another image of its batch into each image. What is released is a function "
        "of the mixture. The adversary may recover the mixture exactly, and still lacks what lies under the "
        "rectangle.",
        ("draw λ and a rectangle", "paste from another image"),
    ),
    "block-scrambling": Idea(
        "The client cuts an image into the patches of the model, and puts them in a secret order. It puts the values "
        "within every patch in another secret order. Both orders are a key that serves all its images, and the model "
        "is fine-tuned on the encrypted images.",
        ("permute the blocks by a key", "permute the values in each block"),
    ),
    "gaussian-noise": Idea(
        "The client adds independent noise to every entry of the features that it sends. The adversary knows the "
        "strength of the noise, and not its draw. The better it knows how images look, the more of the noise it can "
        "average away.",
        ("features Z", "add ε ~ N(0, std²)"),
    ),
    "row-permutation": Idea(
        "The client sends the rows of its features in a secret order, which is new for each batch. A Transformer "
        "treats rows alike, so that the client can put the outputs back and loses no accuracy. What hides the image "
        "is only the order, and position embeddings reveal it.",
        ("features Z", "permute the rows: P_R Z"),
    ),
    "column-permutation": Idea(
        "The client sends its features with their columns in a secret order, to a server whose weights are stored in "
        "that order. The server computes as before, and the client puts the outputs back. The order is one key for "
        "the whole model.",
        ("features Z", "permute the columns: Z P_C"),
    ),
    "batch-shuffle": Idea(
        "The client exchanges patch tokens between the images of a batch before it sends them. The server's attention"
        " then mixes patches of different images. The outputs change, so that this defense costs accuracy.",
        ("draw a share of the tokens", "shuffle among all images"),
    ),
    "gradient-noise": Idea(
        "The client scales its gradient down to a largest norm, and adds Gaussian noise to every entry. This is the "
        "step of DP-SGD for one image. How much it hides depends on the noise beside the norm, and on the number of "
        "releases.",
        ("gradient g", "clip to norm C", "add N(0, (σ C)²)"),
    ),
    "gradient-pruning": Idea(
        "The client releases the largest entries of its gradient, and sets the others to zero. It saves "
        "communication, and the adversary lacks the equations of the others. The entries that are left are exact.",
        ("gradient g", "keep the largest share"),
    ),
    "gradient-quantisation": Idea(
        "The client rounds its gradient to fewer bits. The rounding error is bounded, and the adversary knows the "
        "bound. An attack that expects exact equations suffers from it where the system is ill conditioned.",
        ("gradient g", "round to dtype"),
    ),
    "gradient-sign": Idea(
        "The client releases the sign of each entry of its gradient, and no magnitude. A server can still train with "
        "it. The scales that a linear solver needs are gone.",
        ("gradient g", "sign of each entry"),
    ),
    "binary-weights": Idea(
        "The client draws a 0 or a 1 for each entry of its update, and sends the products. It was proposed against the "
        "closed form of APRIL, which expects every entry. Those that are sent are exact, and zeros show the others.",
        ("update g", "multiply by random 0 or 1"),
    ),
    "censor": Idea(
        "The client draws a random gradient for each layer, takes its part along the true one away, and makes it as "
        "long. Its authors release the one of 20 such draws that lowers the loss most. Two numbers of each layer's "
        "gradient are left.",
        ("gradient g", "random, orthogonal to g", "as long as g"),
    ),
    "percentile-privacy": Idea(
        "The client drops the entries of its update below a percentile of the magnitudes, and clips the others. "
        "Nothing is drawn at random, so that it gives no differential privacy. What is neither dropped nor clipped is"
        " exact.",
        ("update d", "drop the small ones", "clip to ±γ"),
    ),
    "svt-privacy": Idea(
        "The client chooses entries of its update by a noisy test of their magnitude. It sends these with Laplace "
        "noise, and zeros for all others. With the defaults the noise is far larger than what it hides.",
        ("update d", "noisy test of |d|", "add Laplace noise"),
    ),
    "adaptive-clipping": Idea(
        "The client scales its update down to a bound on the norm, and tells in one bit whether it had to. The server "
        "moves the bound by the noisy mean of the bits, towards a quantile of the norms. The ratios of all entries "
        "stay as they were.",
        ("update u", "scale to norm ≤ C", "C follows a quantile"),
    ),
    "encrypted-embedding": Idea(
        "The clients multiply the gradients of the embedding by a random sequence that they share, and the server does "
        "not know. The closed forms of APRIL and others read these gradients. All later layers are released as they "
        "are.",
        ("gradients of the embedding", "multiply by secret numbers", "all other gradients"),
    ),
    "exclude-vars": Idea(
        "The client leaves out the gradients or updates of some parameters. All others are released as they are. "
        "Attacks that read a missing parameter cannot run, and others can.",
        ("all parameters", "leave out those that match"),
    ),
}
"""The idea of each defense that comes with privlab, by name."""
