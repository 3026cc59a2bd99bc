"""Mods of a Flower client: one records its updates, one audits them and withholds those that leak."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable
from jaxtyping import Float
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from privlab.base import PrivlabError
from privlab.flower.messages import LOG, is_training, record, refusal, round_of, weights_of
from privlab.runs.own_update import LEAKS, OwnUpdateAudit, sample_images, write_line
from privlab.threat import Client
from privlab.victims import victim


class RecordMod:
    """Record what a client receives and returns in each round, as files that `privlab audit update` reads.

        app = ClientApp(mods=[RecordMod("updates")])

    They lie in `updates/round-R/node-N/before.safetensors` and `after.safetensors`. Mods that stand behind it in the
    list change the reply first, so that what is recorded is what leaves. An update that cannot be recorded is logged in
    one line; messages pass unchanged.

    Args:
        folder: path of the folder, on the client's machine.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def __call__(self, msg: Message, ctxt: Context, call_next: ClientAppCallable) -> Message:
        """Hand the message on, record the update, and return the reply as it is."""
        reply = call_next(msg, ctxt)
        if is_training(msg) and reply.has_content():
            record(msg, reply, self.folder, round_of(msg), ctxt.node_id)
        return reply


class AuditMod:
    """Audit each update before it leaves, and withhold it if an image of the client can be reconstructed from it.

        app = ClientApp(mods=[AuditMod(vit, Client(lr=0.01, steps=5), "audit", images=my_images)])

    The server gets an error in its place, with the code MOD_FAILED_PRECONDITION, as from Flower's own mods: FedAvg logs
    it and aggregates the other replies, whereas unchanged weights would count as those of a trained client. An update
    that cannot be audited is withheld too. Mods that stand behind it in the list, such as `LocalDpMod`, change the
    reply first, so that what is audited is what leaves.

    Before the client trains, the weights that the server sent are tested (`privlab.audit_weights`). If they are
    suspicious or cannot be tested, it does not train, and the server gets the error at once.

    Each round adds a line to `folder/node-N.jsonl`, which stays with the client: round, PSNR to the nearest image or
    the explained share, limits, whether it was withheld and why, and the seconds of the audit and of the training.

    Args:
        model: the client's model, which is copied, never changed. Its `pretrained_cfg` says how images are normalised;
            by ImageNet's mean and deviation where it has none.
        client: its settings (`privlab.threat.Client`).
        folder: path of the folder for the lines.
        images: returns the images of a context's client, b × c × h × w in [0, 1], after resizing and augmentation and
            before they are normalised; None judges by the certificate instead, for clients of one image.
        max_psnr: the largest PSNR in dB that is sent, with images; > 0. One colour has about 12 dB.
        max_explained: the largest explained share that is sent, without images; in (0, 1].
        check_weights: whether the server's weights are tested before training, on what `images` returns then, or on
            bundled photographs without it.

    Raises:
        PrivlabError: if a threshold is out of its range, or updates of such a client or model cannot be audited.
    """

    def __init__(
        self,
        model: VisionTransformer,
        client: Client,
        folder: str | Path,
        *,
        images: Callable[[Context], Float[Tensor, "b c h w"]] | None = None,
        max_psnr: float = OwnUpdateAudit.max_psnr,
        max_explained: float = OwnUpdateAudit.max_explained,
        check_weights: bool = True,
    ) -> None:
        made = victim(model)
        self.audit = OwnUpdateAudit(made.model, client, max_psnr, max_explained)
        self.folder, self.images = Path(folder), images
        self.preprocessing, self.check_weights = made.preprocessing, check_weights
        if images is None:
            self.audit.check_certificate()

    def _why_not_train(self, msg: Message, ctxt: Context) -> str | None:
        """Return why the client must not train on the weights in a message; None where nothing unusual was found."""
        try:
            images = sample_images(self.preprocessing) if self.images is None else self.images(ctxt)
            return self.audit.why_not_train(weights_of(msg, "server"), images)
        except PrivlabError as error:
            return f"the server's weights cannot be audited: {error}"

    def __call__(self, msg: Message, ctxt: Context, call_next: ClientAppCallable) -> Message:
        """Hand the message on, audit the update, and return the reply, or an error in its place."""
        if not is_training(msg):
            return call_next(msg, ctxt)
        line: dict[str, object] = {"round": round_of(msg), "node": ctxt.node_id}
        why = self._why_not_train(msg, ctxt) if self.check_weights else None
        if why is not None:
            LOG.warning("privlab: round %s, node %s: not trained, %s", line["round"], ctxt.node_id, why)
            write_line(self.folder / f"node-{ctxt.node_id}.jsonl", line | {"withheld": why})
            return refusal(msg, f"privlab did not train: {why}")
        started = time.perf_counter()
        reply = call_next(msg, ctxt)
        trained = time.perf_counter()
        if reply.has_error():
            return reply
        try:
            images = None if self.images is None else self.images(ctxt)
            names = self.audit.names(whole=images is None)
            found = self.audit(weights_of(msg, "server", names), weights_of(reply, "client", names), images)
            line |= asdict(found)
            withheld = LEAKS if found.leaks else None
        except PrivlabError as error:
            withheld = f"it cannot be audited: {error}"
        line |= {"withheld": withheld, "seconds": time.perf_counter() - trained, "seconds_round": trained - started}
        told = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in line.items()]
        LOG.info("privlab audit: %s", ", ".join(told))
        write_line(self.folder / f"node-{ctxt.node_id}.jsonl", line)
        if withheld is None:
            return reply
        return refusal(msg, f"privlab withheld the update: {withheld}")
