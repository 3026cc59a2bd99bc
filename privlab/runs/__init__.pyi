from .attack import execute as execute
from .attack import unfinished as unfinished
from .audit_recording import audit_features as audit_features
from .audit_release import audit_gradients as audit_gradients
from .notebook import shown_progress as shown_progress
