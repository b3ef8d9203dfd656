"""Hugging Face folder to CTranslate2's: to_ctranslate2.py SOURCE TARGET int8."""

import sys

from ctranslate2.converters import TransformersConverter

source, target, weights = sys.argv[1:]
TransformersConverter(source).convert(target, quantization=weights, force=True)
