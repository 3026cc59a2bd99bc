"""Split learning between two processes: `privlab split serve` holds T, `train` and `infer` keep the rest.

The package needs the extra `split` (grpcio, protobuf).
"""

from privlab.split.client.client import Client, Lost, Traffic
from privlab.split.client.infer import infer
from privlab.split.client.learner import Learner
from privlab.split.client.train import Trainer
from privlab.split.protocol.contract import Contract, Refusal
from privlab.split.protocol.security import ClientTls, ServerTls, make_token, read_token
from privlab.split.server.server import Server, serve
from privlab.split.server.session_registry import Limits

__all__ = [
    "Client",
    "ClientTls",
    "Contract",
    "Learner",
    "Limits",
    "Lost",
    "Refusal",
    "Server",
    "ServerTls",
    "Traffic",
    "Trainer",
    "infer",
    "make_token",
    "read_token",
    "serve",
]
