"""The offline API on a tiny random model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from kllm import LLM, SamplingParams, StructuredOutputs
from kllm.request import Delta, InvalidRequest


@pytest.fixture(scope="module")
def llm(tiny_llama_folder: Path) -> Iterator[LLM]:
    llm = LLM(str(tiny_llama_folder), kernels="invariant", threads=1, num_kv_blocks=256)
    yield llm
    llm.close()


def greedy(max_tokens: int = 12, **options: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)  # type: ignore[arg-type]


def test_texts_and_token_ids_give_the_same(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Hello there")
    (from_text,) = llm.generate("Hello there", greedy(), progress=False)
    (from_ids,) = llm.generate(ids, greedy(), progress=False)
    assert from_text.prompt == "Hello there"
    assert from_text.prompt_token_ids == from_ids.prompt_token_ids == ids
    assert from_text.outputs[0].token_ids == from_ids.outputs[0].token_ids
    assert from_text.outputs[0].finish_reason == "length"
    assert len(from_text.outputs[0].token_ids) == 12


def test_results_keep_the_order_of_prompts(llm: LLM) -> None:
    prompts = ["one", "two and more", "three", "four is the longest of them all"]
    together = llm.generate(prompts, [greedy(n + 1) for n in range(4)], progress=False)
    alone = [llm.generate(prompt, greedy(n + 1), progress=False)[0] for n, prompt in enumerate(prompts)]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


def test_n_outputs_share_the_prompt_and_differ(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=16, ignore_eos=True)
    prompt = list(range(40))
    (result,) = llm.generate(prompt, params, progress=False)
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in result.outputs}) == 3
    second = SamplingParams(seed=6, max_tokens=16, ignore_eos=True)  # choice 1 draws with seed + 1
    (again,) = llm.generate(prompt, second, progress=False)
    assert again.outputs[0].token_ids == result.outputs[1].token_ids


def test_prompt_of_n_outputs_is_computed_once(tiny_llama_folder: Path) -> None:
    llm = LLM(str(tiny_llama_folder), threads=1, num_kv_blocks=64, block_size=8)
    llm.generate(list(range(64)), SamplingParams(n=4, max_tokens=2), progress=False)
    load = llm._core.load()
    assert load.prefix_hits == 3 * 56  # all whole blocks but the one whose last token must be computed
    llm.close()


def test_stop_string_ends_the_text_and_the_request(llm: LLM) -> None:
    (free,) = llm.generate("abc", greedy(20), progress=False)
    text = free.outputs[0].text
    stop = text[len(text) // 2 :][:3]
    (stopped,) = llm.generate("abc", greedy(20, stop=(stop,)), progress=False)
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    assert len(stopped.outputs[0].token_ids) < 20


def test_one_stop_string_may_be_given_as_it_is(llm: LLM) -> None:
    assert SamplingParams(stop="User:", bad_words="word") == SamplingParams(stop=("User:",), bad_words=("word",))
    (free,) = llm.generate("abc", greedy(20), progress=False)
    stop = free.outputs[0].text[8:11]
    one, several = (llm.generate("abc", greedy(20, stop=given), progress=False)[0] for given in (stop, (stop,)))
    assert one.outputs[0] == several.outputs[0]


def test_logprobs(llm: LLM) -> None:
    params = greedy(5, logprobs=2, prompt_logprobs=1)
    (result,) = llm.generate(list(range(20)), params, progress=False)
    output = result.outputs[0]
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    assert all(entry.rank == 1 and len(entry.top) == 2 for entry in output.logprobs)
    assert math.isclose(output.cumulative_logprob or 0.0, sum(entry.logprob for entry in output.logprobs))
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert [e.token_id for e in result.prompt_logprobs[1:] if e is not None] == list(range(1, 20))


def test_structured_output(llm: LLM) -> None:
    schema = '{"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}'
    params = SamplingParams(max_tokens=60, seed=1, structured_outputs=StructuredOutputs(json=schema))
    for result in llm.generate(["x", "y", "z"], params, progress=False):
        if result.outputs[0].finish_reason == "stop":
            assert json.loads(result.outputs[0].text)["n"] <= 99


def test_chat_uses_the_template(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "Hi"}], greedy(4))
    text = llm.tokenizer.decode(answer.prompt_token_ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_on_delta_sees_every_token(llm: LLM) -> None:
    seen: dict[int, list[int]] = {0: [], 1: []}

    def on_delta(index: int, delta: Delta) -> None:
        seen[index] += delta.token_ids

    results = llm.generate(["a", "b"], greedy(6), progress=False, on_delta=on_delta)
    assert [seen[0], seen[1]] == [result.outputs[0].token_ids for result in results]


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ("", SamplingParams(), "empty"),
        (list(range(100)) * 6, SamplingParams(), "600 tokens"),
        ([1, 288], SamplingParams(), "outside the vocabulary"),
        ("x", SamplingParams(temperature=-1), "temperature"),
        ("x", SamplingParams(allowed_token_ids=(999,)), "999"),
        ("x", SamplingParams(structured_outputs=StructuredOutputs(regex="(")), "regex"),
        (list(range(256)), SamplingParams(max_tokens=5000, min_tokens=6000), "min_tokens"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(llm: LLM, prompt: object, params: SamplingParams, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        llm.generate(["fine", prompt], [greedy(), params], progress=False)  # type: ignore[list-item]
    assert llm._core.num_unfinished == 0
    llm._core.scheduler.check()
    assert len(llm.generate("fine", greedy(), progress=False)[0].outputs[0].token_ids) == 12


def test_an_exception_in_the_callback_leaves_nothing(llm: LLM) -> None:
    def broken(index: int, delta: Delta) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        llm.generate(["a", "b"], greedy(), progress=False, on_delta=broken)
    assert llm._core.num_unfinished == 0
    assert llm._core.oldest is None


def test_empty_batch(llm: LLM) -> None:
    assert llm.generate([], greedy(), progress=False) == []


@pytest.mark.parametrize(
    "options", [{"l2_memory": "1GiB"}, {"l3": "folder"}, {"kv_events_config": {"enable_kv_cache_events": True}}]
)
def test_what_needs_a_server_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="kllm serve"):
        LLM("no such model", **options)
