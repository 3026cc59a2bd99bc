from .networks import DECODERS as DECODERS
from .networks import Decoder as Decoder
from .networks import Shape as Shape
from .training import DecoderSpec as DecoderSpec
from .training import decoder_for as decoder_for
from .training import decoder_key as decoder_key
from .training import make_release as make_release
from .training import train_decoder as train_decoder
