"""A strategy of a Flower server that keeps each client's update: the honest-but-curious server."""

from collections.abc import Iterable
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from privlab.flower.messages import record


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
            config: what the clients are told besides.
            grid: the nodes of the federation.
        """
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self.sent = {message.metadata.dst_node_id: message for message in messages}
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Record the updates, then aggregate them as the strategy does."""
        replies = list(replies)
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_content():
                record(self.sent[node], reply, self.folder, server_round, node)
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the strategy.

        Args:
            server_round: the number of the round, from 1.
            arrays: the weights of the server.
            config: what the clients are told besides.
            grid: the nodes of the federation.
        """
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the metrics of the strategy."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log the strategy's summary."""
        self.strategy.summary()
