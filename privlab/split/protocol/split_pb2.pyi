from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Request(_message.Message):
    __slots__ = ("saved", "open", "weights", "forward", "backward", "infer", "save")
    SAVED_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    INFER_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    saved: int
    open: Open
    weights: bytes
    forward: Tensors
    backward: Tensors
    infer: bytes
    save: Save
    def __init__(self, saved: _Optional[int] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., weights: _Optional[bytes] = ..., forward: _Optional[_Union[Tensors, _Mapping]] = ..., backward: _Optional[_Union[Tensors, _Mapping]] = ..., infer: _Optional[bytes] = ..., save: _Optional[_Union[Save, _Mapping]] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("durable", "opened", "outputs", "gradient", "inferred", "saved")
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    INFERRED_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    durable: int
    opened: Opened
    outputs: Tensors
    gradient: Tensors
    inferred: bytes
    saved: Saved
    def __init__(self, durable: _Optional[int] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., outputs: _Optional[_Union[Tensors, _Mapping]] = ..., gradient: _Optional[_Union[Tensors, _Mapping]] = ..., inferred: _Optional[bytes] = ..., saved: _Optional[_Union[Saved, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("version", "session", "steps", "contract")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    version: int
    session: str
    steps: _containers.RepeatedScalarFieldContainer[int]
    contract: Contract
    def __init__(self, version: _Optional[int] = ..., session: _Optional[str] = ..., steps: _Optional[_Iterable[int]] = ..., contract: _Optional[_Union[Contract, _Mapping]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("session", "step", "weights_sha256", "checkpoint_every")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_EVERY_FIELD_NUMBER: _ClassVar[int]
    session: str
    step: int
    weights_sha256: str
    checkpoint_every: int
    def __init__(self, session: _Optional[str] = ..., step: _Optional[int] = ..., weights_sha256: _Optional[str] = ..., checkpoint_every: _Optional[int] = ...) -> None: ...

class Contract(_message.Message):
    __slots__ = ("model", "width", "max_tokens", "max_batch", "dtype", "optimizer", "lr", "momentum", "weight_decay", "own_weights", "cut_layer")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    LR_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    OWN_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    CUT_LAYER_FIELD_NUMBER: _ClassVar[int]
    model: str
    width: int
    max_tokens: int
    max_batch: int
    dtype: str
    optimizer: str
    lr: float
    momentum: float
    weight_decay: float
    own_weights: bool
    cut_layer: int
    def __init__(self, model: _Optional[str] = ..., width: _Optional[int] = ..., max_tokens: _Optional[int] = ..., max_batch: _Optional[int] = ..., dtype: _Optional[str] = ..., optimizer: _Optional[str] = ..., lr: _Optional[float] = ..., momentum: _Optional[float] = ..., weight_decay: _Optional[float] = ..., own_weights: bool = ..., cut_layer: _Optional[int] = ...) -> None: ...

class Tensors(_message.Message):
    __slots__ = ("step", "data")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    step: int
    data: bytes
    def __init__(self, step: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Save(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Saved(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
