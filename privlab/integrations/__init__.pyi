from .every_eval_ever import evaluation_records as evaluation_records
from .tracking import log_mlflow as log_mlflow
from .tracking import log_wandb as log_wandb
