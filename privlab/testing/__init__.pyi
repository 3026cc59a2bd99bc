from .attacks_metrics import check_any as check_any
from .attacks_metrics import check_attack as check_attack
from .attacks_metrics import check_metric as check_metric
from .claims import Check as Check
from .defenses import check_defense as check_defense
from .defenses import small_victim as small_victim
