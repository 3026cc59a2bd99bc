from .build import write_page as write_page
from .overview import lead_text as lead_text
