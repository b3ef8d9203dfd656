"""Hugging Face folder to OpenVINO's, with its tokenizers: to_openvino.py SOURCE TARGET fp16|int8."""

import sys

from optimum.exporters.openvino import main_export
from optimum.intel import OVWeightQuantizationConfig
from optimum.intel.openvino import OVConfig

source, target, weights = sys.argv[1:]
quantization = OVWeightQuantizationConfig(bits=8) if weights == "int8" else None
main_export(
    model_name_or_path=source,
    output=target,
    task="text-generation-with-past",
    ov_config=OVConfig(dtype=weights, quantization_config=quantization),
    convert_tokenizer=True,
)
