"""Capabilities: declared data that say what the adversary knows and sees."""

from enum import StrEnum


class Capability(StrEnum):
    """A capability of the adversary: observations grant capabilities, attacks require them."""

    KNOWS_WEIGHTS = "knows_weights"
    BATCH_SIZE_ONE = "batch_size_one"
    LEARNABLE_PE_GRADIENT = "learnable_pe_gradient"
    PE_OF_EVERY_TOKEN = "pe_of_every_token"
    APRIL_BLOCK = "april_block"
    PLAIN_BLOCK = "plain_block"
    RELEASED_FEATURES = "released_features"
    POSITION_EMBEDDINGS = "position_embeddings"
    CLASS_TOKEN = "class_token"
    AUXILIARY_IMAGES = "auxiliary_images"
    OWN_ROWS = "own_rows"
    EMBEDDED_ROWS = "embedded_rows"
    QUERIES = "queries"
    KNOWS_DEFENSE = "knows_defense"
    GRADIENT_DEFENSE = "gradient_defense"
    CLIENT_UPDATE = "client_update"
    PERMUTED_VALUES = "permuted_values"
    FILTERED_IMAGES = "filtered_images"
    MIXED_IMAGES = "mixed_images"
    CLASS_LABELS = "class_labels"
    CHOOSES_WEIGHTS = "chooses_weights"

    @property
    def meaning(self) -> str:
        """Return the meaning of the capability, in one clause."""
        return _MEANING[self]


_MEANING = {
    Capability.KNOWS_WEIGHTS: "the weights of the model are known",
    Capability.BATCH_SIZE_ONE: "each released gradient belongs to one image",
    Capability.LEARNABLE_PE_GRADIENT: "the gradient of a learnable position embedding is released",
    Capability.PE_OF_EVERY_TOKEN: "the class token has a position embedding too",
    Capability.APRIL_BLOCK: "the first block has neither pre-norm nor skip (--block april)",
    Capability.PLAIN_BLOCK: "the first block is timm's own (--block stock), and its gradients are released",
    Capability.RELEASED_FEATURES: "the features that the client sends are seen, as in split learning",
    Capability.POSITION_EMBEDDINGS: "the features carry position embeddings, which are known",
    Capability.CLASS_TOKEN: "the row of the class token is among the features",
    Capability.AUXILIARY_IMAGES: "public images like the private ones are at hand",
    Capability.OWN_ROWS: "every row stays with its image (no batch-shuffle)",
    Capability.EMBEDDED_ROWS: "each row is one patch's embedding, as with --cut-layer 0",
    Capability.QUERIES: "the client's part of the model can be run on images of the adversary's own",
    Capability.KNOWS_DEFENSE: "the defense's algorithm and its parameters are known, its draws are not",
    Capability.GRADIENT_DEFENSE: "a defense acts on the released gradient (noise, pruning, fewer bits)",
    Capability.PERMUTED_VALUES: "a defense permutes the values within every patch (block-scrambling)",
    Capability.FILTERED_IMAGES: "a defense changes the pixels of images (blur, low-pass) of at most 64 × 64",
    Capability.MIXED_IMAGES: "a defense mixes the images of a batch (cutmix), of at most 64 × 64 pixels",
    Capability.CLIENT_UPDATE: "the update of a client's local training is released, and its settings are public",
    Capability.CLASS_LABELS: "the clients' loss is the cross-entropy of a class label, which the head's gradient tells",
    Capability.CHOOSES_WEIGHTS: "the server chose the weights, which is granted to attacks that are named",
}

FORCEABLE = frozenset({Capability.APRIL_BLOCK, Capability.BATCH_SIZE_ONE})
"""The capabilities that a forced run may lack: the formula can still be evaluated, although it does not hold."""
