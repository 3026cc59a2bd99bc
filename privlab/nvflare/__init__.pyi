from .filters import AuditFilter as AuditFilter
from .filters import RecordFilter as RecordFilter
