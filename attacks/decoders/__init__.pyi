from .networks import DECODERS as DECODERS
from .networks import Decoder as Decoder
from .networks import Shape as Shape
from .training import PairTrained as PairTrained
from .training import PairTraining as PairTraining
from .training import Trained as Trained
from .training import make_release as make_release
from .training import mirrored_and_rolled as mirrored_and_rolled
