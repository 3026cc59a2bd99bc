from .tracking import log_mlflow as log_mlflow
from .tracking import log_wandb as log_wandb
