"""`RecordUpdate` for the Trainer of Hugging Face's transformers; the extra `callbacks` brings it."""

from pathlib import Path

from torch import nn

from privlab.base import PrivlabError
from privlab.callbacks.rounds import RoundRecorder

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise PrivlabError("privlab.callbacks.transformers needs it: pip install 'privlab[callbacks]'.") from error


class RecordUpdate(TrainerCallback):
    """Record the weights of a ViT before and after each training, as files that `privlab audit update` reads.

        trainer = Trainer(model, arguments, train_dataset=images, callbacks=[RecordUpdate(model, "updates")])

    Args:
        model: the model that is trained: a ViT of transformers with its classifier, or one that wraps a timm ViT.
        folder: path of the folder; a training writes `round-N/before.safetensors` and `after.safetensors` there.

    Raises:
        PrivlabError: if it is not a ViT, or nothing was trained.
    """

    def __init__(self, model: nn.Module, folder: str | Path) -> None:
        self.recorder = RoundRecorder(model, folder)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Copy the weights.

        Args:
            args: the arguments of the Trainer; not read.
            state: the state of the Trainer: only its first process records.
            control: the control of the Trainer; left as it is.
            kwargs: model, optimiser and data of the Trainer; not read.
        """
        if state.is_world_process_zero:
            self.recorder.begin()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Write the update.

        Args:
            args: the arguments of the Trainer; not read.
            state: the state of the Trainer: only its first process records.
            control: the control of the Trainer; left as it is.
            kwargs: model, optimiser and data of the Trainer; not read.
        """
        if state.is_world_process_zero:
            self.recorder.end()
