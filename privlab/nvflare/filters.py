"""Filters of an NVFlare client: one records its updates, one audits them and blocks those that leak."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.filter import ContentBlockedException, FilterChainType, FilterContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from privlab.base import PrivlabError
from privlab.release.capture import capture_next, numbered
from privlab.runs.own_update import LEAKS, OwnUpdateAudit, sample_images, write_line
from privlab.threat import Client
from privlab.victims import victim

_BEFORE = "privlab.before"


class _UpdateFilter(DXOFilter):
    """Keep the weights that come with a task until its result leaves, and hand both on; weights stay as they are."""

    def __init__(self) -> None:
        super().__init__([DataKind.WEIGHTS, DataKind.WEIGHT_DIFF], None)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO | None:
        """Keep what comes, or look at what leaves.

        Args:
            dxo: the weights, or their difference from those that came.
            shareable: the task, or its result.
            fl_ctx: the context of the client.
        """
        own = {name: torch.as_tensor(np.array(value)) for name, value in dxo.data.items()}
        if self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN:
            fl_ctx.set_prop(_BEFORE, own, private=True, sticky=True)
            self._look_at_sent(own, str(fl_ctx.get_identity_name()))
            return None
        before = fl_ctx.get_prop(_BEFORE) or {}
        if dxo.data_kind == DataKind.WEIGHT_DIFF:
            own = {name: value + own[name] if name in own else value for name, value in before.items()}
        round_, site = shareable.get_header(AppConstants.CURRENT_ROUND), str(fl_ctx.get_identity_name())
        self._look_at(before, own, f"round-{round_}", site)
        return None

    def _look_at_sent(self, sent: Mapping[str, Tensor], site: str) -> None:
        """Do what is to be done before training, with the weights that came."""

    @abstractmethod
    def _look_at(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], round_: str, site: str) -> None:
        """Do what the filter is for, with the weights that came and those that leave."""


class RecordFilter(_UpdateFilter):
    """Record what a client receives and returns in each round, as files that `privlab audit update` reads.

        recipe.add_client_input_filter(RecordFilter("/data/updates"), tasks=["train"])
        recipe.add_client_output_filter(RecordFilter("/data/updates"), tasks=["train"])

    They lie in `/data/updates/round-R/SITE/before.safetensors` and `after.safetensors`. What is recorded is what
    leaves if it is the last output filter. If there is an earlier record, of another job, the folder is `SITE-2`, and
    so on. An update that cannot be recorded is one line in NVFlare's log.

    Args:
        folder: absolute path of the folder on the client's machine: NVFlare works in its own folders.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def _look_at(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], round_: str, site: str) -> None:
        try:
            capture_next(before, after, numbered(Path(self.folder) / round_ / site))
        except PrivlabError as error:
            self.logger.warning("privlab: %s, %s: no update recorded. %s", round_, site, error)


class AuditFilter(_UpdateFilter):
    """Audit each update before it leaves, and block it if an image of the client can be reconstructed from it.

    NVFlare makes filters from JSON, so that one with a model is a class of your own, without arguments:

        class Audit(AuditFilter):
            def __init__(self):
                super().__init__(vit, Client(lr=0.01, steps=5), "/data/audit", my_images)

    It is added to the input and to the output of clients, as `RecordFilter` is. It blocks by NVFlare's
    ContentBlockedException, so that the server gets a return code and no weights; its FedAvg goes on without them if
    it has `ignore_result_error=True`. An update that cannot be audited is blocked too. Weights that the server sent
    are blocked before the client trains on them, if they are suspicious (`privlab.audit_weights`). Each round adds a
    line to `/data/audit/SITE.jsonl`.

    Args:
        model: the client's model, a timm ViT, which is copied. Its `pretrained_cfg` says how images are normalised; by
            ImageNet's mean and deviation where it has none.
        client: its settings (`privlab.threat.Client`).
        folder: absolute path of the folder for the lines.
        images: returns the client's images, b × c × h × w in [0, 1], as the model is fed them before normalisation;
            None judges by the certificate, for clients of one image.
        max_psnr: the largest PSNR in dB that is sent, with images; > 0.
        check_weights: whether the server's weights are tested before training, on what `images` returns then, or on
            bundled photographs without it.

    Raises:
        PrivlabError: if the threshold is out of its range, or updates of such a client or model cannot be audited.
    """

    def __init__(
        self,
        model: VisionTransformer,
        client: Client,
        folder: str,
        images: Callable[[], Float[Tensor, "b c h w"]] | None = None,
        max_psnr: float = OwnUpdateAudit.max_psnr,
        check_weights: bool = True,
    ) -> None:
        super().__init__()
        made = victim(model)
        self.audit = OwnUpdateAudit(made.model, client, max_psnr)
        self.preprocessing, self.check_weights = made.preprocessing, check_weights
        self.folder, self.images = folder, images
        if images is None:
            self.audit.check_certificate()

    def _look_at_sent(self, sent: Mapping[str, Tensor], site: str) -> None:
        if not self.check_weights:
            return
        try:
            images = sample_images(self.preprocessing) if self.images is None else self.images()
            why = self.audit.why_not_train(sent, images)
        except PrivlabError as error:
            why = f"the server's weights cannot be audited: {error}"
        if why is not None:
            write_line(Path(self.folder) / f"{site}.jsonl", {"site": site, "withheld": why})
            raise ContentBlockedException(f"privlab does not train: {why}")

    def _look_at(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], round_: str, site: str) -> None:
        line: dict[str, object] = {"round": round_, "site": site}
        try:
            found = self.audit(before, after, None if self.images is None else self.images())
            line |= asdict(found)
            withheld = LEAKS if found.leaks else None
        except PrivlabError as error:
            withheld = f"it cannot be audited: {error}"
        write_line(Path(self.folder) / f"{site}.jsonl", line | {"withheld": withheld})
        if withheld is not None:
            raise ContentBlockedException(f"privlab withheld the update: {withheld}")
