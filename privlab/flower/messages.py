"""What a message of Flower holds: the round, the weights, and where their record lies."""

import logging
from collections.abc import Collection
from pathlib import Path

import torch
from flwr.app import Error, Message, MessageType
from flwr.common.constant import ErrorCode
from torch import Tensor

from privlab.base import PrivlabError
from privlab.release.capture import capture_next, numbered

LOG = logging.getLogger("flwr")
"""Flower's own logger, so that lines stand among Flower's."""


def is_training(message: Message) -> bool:
    """Return whether a message asks for a round of training: "train", or "train." and the name of a function."""
    return message.metadata.message_type.partition(".")[0] == MessageType.TRAIN


def round_of(message: Message) -> int | None:
    """Return the round as the strategies of Flower state it, `server-round` of a ConfigRecord; None if none states it.

    Args:
        message: what the server sent.
    """
    for record in message.content.config_records.values():
        if isinstance(found := record.get("server-round"), int):
            return found
    return None


def weights_of(message: Message, sender: str, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return the weights in a message by parameter name, as copies.

    Args:
        message: a message with content.
        sender: who sent it, for the error.
        names: those that are wanted, of which the ones that are there are returned; None for all.

    Raises:
        PrivlabError: if it has no ArrayRecord or several, or one without names.
    """
    records = list(message.content.array_records.values())
    if len(records) != 1 or not records[0]:
        raise PrivlabError(
            f"An update is read from one ArrayRecord. Found {len(records)} in what the {sender} sends"
            f"{' (empty)' if len(records) == 1 else ''}: send ArrayRecord(model.state_dict())."
        )
    if all(name.isdecimal() for name in records[0]):
        raise PrivlabError(
            f"The weights that the {sender} sends must have the names of their parameters. Found numbers, as a list of "
            "arrays gives them: send ArrayRecord(model.state_dict())."
        )
    found = {name: array for name, array in records[0].items() if names is None or name in names}
    return {name: torch.from_numpy(array.numpy()) for name, array in found.items()}


def record(before: Message, after: Message, folder: Path, round_: int | None, node: int) -> tuple[Path, Path] | None:
    """Record an update in `folder/round-R/node-N`, as `privlab audit update` reads it, and return the two files.

    Where there is an earlier record, of another federation, the folder is `node-N-2`, and so on. What cannot be
    recorded is logged in one line, and disturbs no training: None is returned.

    Args:
        before: what the server sent.
        after: what the client returns.
        folder: the folder of all records.
        round_: the number of the round; of a message that states none, the message's id replaces it.
        node: Flower's number of the client.
    """
    place = folder / (f"message-{before.metadata.message_id}" if round_ is None else f"round-{round_}") / f"node-{node}"
    try:
        return capture_next(weights_of(before, "server"), weights_of(after, "client"), numbered(place))
    except PrivlabError as error:
        LOG.warning("privlab: round %s, node %s: no update recorded. %s", round_, node, error)
        return None


def refusal(message: Message, reason: str) -> Message:
    """Return the reply that replaces an update: an error, as Flower's own mods send it.

    Args:
        message: what the server sent.
        reason: one line, which the server reads.
    """
    return Message(Error(code=ErrorCode.MOD_FAILED_PRECONDITION, reason=reason), reply_to=message)
