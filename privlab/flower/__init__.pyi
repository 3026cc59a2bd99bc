from .mods import AuditMod as AuditMod
from .mods import RecordMod as RecordMod
from .strategy import AuditingStrategy as AuditingStrategy
from .strategy import RecordingStrategy as RecordingStrategy
