"""The parts that client and server share: messages, contracts, checkpoints, certificates and secrets.

The code of `split_pb2.py` is generated, from the root of the repository, by

    python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. privlab/split/protocol/split.proto

with grpcio-tools 1.74.0, which runs with protobuf 6.31.1 and later.
"""
