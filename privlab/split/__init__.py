"""Split learning between two processes: `privlab split serve` holds T, `train` and `infer` keep all the rest.

Needs the extra `split` (grpcio, protobuf). The code of `split_pb2.py` is generated, from the root of the repository, by

    python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. privlab/split/split.proto

with grpcio-tools 1.74.0, which runs with protobuf 6.31.1 and later.
"""

from privlab.split.client import Client, Lost, Traffic
from privlab.split.contract import Contract, Refusal
from privlab.split.infer import infer
from privlab.split.learner import Learner
from privlab.split.security import ClientTls, ServerTls, make_token, read_token
from privlab.split.server import Server, serve
from privlab.split.sessions import Limits
from privlab.split.train import Trainer

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
