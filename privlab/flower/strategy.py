"""Strategies of a Flower server: one keeps each client's update, one audits it and leaves out those that leak."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from privlab.base import PrivlabError
from privlab.flower.messages import LOG, record, refusal
from privlab.grids import specify
from privlab.report.run import LEAKS
from privlab.runs import audit_gradients
from privlab.threat import Client


class RecordingStrategy(Strategy):
    """Record the update of each client, and leave everything else to another strategy.

        result = RecordingStrategy(FedAvg(), "updates").start(grid, arrays, num_rounds=3)

    The files are those of `RecordMod`: what the server sent to a node, and what the node replied. A node that replies
    with an error has none.

    Args:
        strategy: the strategy of the federation, such as FedAvg.
        folder: path of the folder, on the server's machine.
    """

    def __init__(self, strategy: Strategy, folder: str | Path) -> None:
        self.strategy, self.folder = strategy, Path(folder)
        self.sent: dict[int, Message] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the strategy, and keep them until the replies come.

        Args:
            server_round: the number of the round, from 1.
            arrays: the weights of the server.
            config: what else the clients get.
            grid: the nodes of the federation.
        """
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self.sent = {message.metadata.dst_node_id: message for message in messages}
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Record the updates, then aggregate them as the strategy does."""
        received = [self._received(server_round, reply) if reply.has_content() else reply for reply in replies]
        return self.strategy.aggregate_train(server_round, received)

    def _received(self, server_round: int, reply: Message) -> Message:
        """Record an update, and return what is aggregated in its place."""
        node = reply.metadata.src_node_id
        record(self.sent[node], reply, self.folder, server_round, node)
        return reply

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the strategy.

        Args:
            server_round: the number of the round, from 1.
            arrays: the weights of the server.
            config: what else the clients get.
            grid: the nodes of the federation.
        """
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the metrics of the strategy."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log the strategy's summary."""
        self.strategy.summary()


class AuditingStrategy(RecordingStrategy):
    """Audit the update of each client before it is aggregated, and leave out those that reveal an image.

        strategy = AuditingStrategy(FedAvg(), "updates", "timm:vit_tiny_patch16_224", client=Client(lr=0.01))

    No client can leave this audit out. It runs what `privlab audit update` runs on the recorded files, and writes to
    `updates/round-R/node-N/audit`. An update from which a private image was reconstructed, or which cannot be audited,
    is replaced by an error, as a client's mod sends it; FedAvg logs it and aggregates the others. Each audit is one
    line in Flower's log. The server has seen the update all the same: what is to stay with the client needs `AuditMod`.

    Args:
        strategy: the strategy of the federation, such as FedAvg.
        folder: path of the folder, on the server's machine. It will hold the images that were reconstructed.
        model: the name of the federation's model, as `--model` of `privlab audit update` takes it.
        client: how the clients train: an optimiser, a preset, or its settings.
        refuse: whether updates that leak are left out, or only logged.
        options: img_size, normalisation, attack and others, as `privlab.grids.specify` takes them.
    """

    def __init__(
        self,
        strategy: Strategy,
        folder: str | Path,
        model: str,
        *,
        client: Client | str = "sgd",
        refuse: bool = True,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(strategy, folder)
        self.spec, self.refuse = specify(model, "a", client=client, **options), refuse

    def _received(self, server_round: int, reply: Message) -> Message:
        node = reply.metadata.src_node_id
        files = record(self.sent[node], reply, self.folder, server_round, node)
        said, passes = "it cannot be recorded", False
        if files is not None:
            try:
                leaks = audit_gradients(files, self.spec, out=files[0].parent / "audit").leaks
                said, passes = f"leaks: {LEAKS[leaks]}", not leaks
            except PrivlabError as error:
                said = f"it cannot be audited: {error}"
        kept = passes or not self.refuse
        LOG.info("privlab audit: round %s, node %s, %s", server_round, node, said if kept else f"left out, {said}")
        return reply if kept else refusal(self.sent[node], f"privlab left the update out: {said}")
