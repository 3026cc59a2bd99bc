from .attack import execute as execute
from .attack import unfinished as unfinished
from .audit_case import Audit as Audit
from .audit_features import audit as audit
from .audit_reference import ReferenceScorer as ReferenceScorer
from .notebook import shown_progress as shown_progress
