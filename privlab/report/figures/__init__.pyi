from .draw import check_ending as check_ending
from .draw import write_figure as write_figure
from .draw import write_figures as write_figures
from .labels import place_labels as place_labels
from .style import MARKERS as MARKERS
from .style import PALETTE as PALETTE
from .style import Scale as Scale
