"""OpenVINO GenAI's continuous batching pipeline. options: "prefix_caching"."""

from __future__ import annotations

from visit import Job, visit


class OpenVino:
    distribution = "openvino-genai"

    def __init__(self, job: Job) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 4  # GB
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = job.sizes["batch"]
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = bool(job.options["prefix_caching"])
        properties = {"INFERENCE_NUM_THREADS": job.cores}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(job.model, scheduler, "CPU", properties)

    def prepare(self, sequences: int, shared: int) -> None:
        pass

    def generate(self, prompts: list[list[int]], tokens: int, shared: int = 0) -> list[list[int]]:
        import numpy as np
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos, config.do_sample = True, False
        inputs = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        results = self._pipeline.generate(inputs, [config] * len(inputs))
        return [list(result.m_generation_ids[0]) for result in results]


if __name__ == "__main__":
    visit(OpenVino)
