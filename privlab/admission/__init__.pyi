from .attacks_metrics import admit_any as admit_any
from .attacks_metrics import admit_attack as admit_attack
from .attacks_metrics import admit_metric as admit_metric
from .claims import Check as Check
