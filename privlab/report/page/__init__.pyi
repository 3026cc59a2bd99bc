from .build import write_page as write_page
from .data import case_names as case_names
from .verdict import lead_text as lead_text
