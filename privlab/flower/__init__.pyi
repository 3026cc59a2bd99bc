from .mods import AuditMod as AuditMod
from .mods import RecordMod as RecordMod
from .strategy import RecordingStrategy as RecordingStrategy
