from .admit import admit_named as admit_named
from .claims import Check as Check
