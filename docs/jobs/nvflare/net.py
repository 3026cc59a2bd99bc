"""The model of the job, made without arguments, as NVFlare names a model."""

from timm.models.vision_transformer import VisionTransformer


class Net(VisionTransformer):
    """A ViT-Ti for images of 64 × 64 pixels."""

    def __init__(self) -> None:
        super().__init__(img_size=64, embed_dim=192, depth=12, num_heads=3, num_classes=10)
