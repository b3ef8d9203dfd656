"""LLM: the offline Python API. The same engine core as the server's, driven by a plain loop in this process."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kllm.config import EngineConfig
from kllm.engine.loading import load_engine
from kllm.hub import resolve
from kllm.messages import Submit
from kllm.request import CompletionOutput, Delta, InvalidRequest, Request, RequestOutput, SamplingParams
from kllm.tokenization.bad_words import bad_word_ids
from kllm.tokenization.chat_template import ChatTemplate
from kllm.tokenization.detokenizer import Detokenizer
from kllm.tokenization.tokenizer import load_tokenizer

Prompt = str | Sequence[int]
OnDelta = Callable[[int, Delta], None]


class LLM:
    """A model in this process.

    model: alias, folder, .gguf file or hub id; options are the fields of kllm.config.EngineConfig.
    Raises ModelSourceError, WeightError or ValueError when the model cannot be loaded. close() frees the thread.
    """

    def __init__(self, model: str, **options: Any) -> None:
        options.setdefault("max_num_batched_tokens", 2048)  # nobody waits between steps: larger ones are cheaper
        config = EngineConfig(model=model, **options)
        if config.lower_tiers:
            raise ValueError("l2_memory and l3 need a server (kllm serve): here nothing runs between two calls")
        if config.publishes_events:
            raise ValueError("kv_events_config needs a server (kllm serve)")
        source = resolve(model)
        self.tokenizer = load_tokenizer(source)
        self._engine = load_engine(config, source, self.tokenizer)
        self._core = self._engine.core
        self.max_model_len = self._engine.max_model_len
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        on_delta: OnDelta | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids), as one batch, in order. params: one for all or one each.

        progress: a bar on standard error. on_delta(prompt index, delta) is called as output arrives.
        Raises InvalidRequest for the first prompt or parameter that is wrong, before anything runs."""
        batch = _as_batch(prompts)
        each = [params or SamplingParams()] * len(batch) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(batch):
            raise InvalidRequest(f"{len(batch)} prompts but {len(each)} sampling parameters", "params")
        jobs = [_Job(self._request(prompt, p), p, prompt, self) for prompt, p in zip(batch, each, strict=True)]
        self._run(jobs, progress, on_delta)
        return [job.result() for job in jobs]

    def chat(
        self,
        messages: list[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        **template_options: Any,
    ) -> RequestOutput:
        """Answer a conversation: [{"role": "user", "content": "…"}, …], through the model's chat template."""
        template = ChatTemplate.of(self.tokenizer)
        ids = self.tokenizer.encode(template.render(messages, **template_options), add_special_tokens=False)
        return self.generate([ids], params, progress=progress)[0]

    def close(self) -> None:
        self._core.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InvalidRequest("a prompt is empty", "prompts")
        if len(ids) >= self.max_model_len:
            raise InvalidRequest(
                f"a prompt has {len(ids)} tokens, the model's length is {self.max_model_len}", "prompts"
            )
        if not all(0 <= token < self._engine.vocab_size for token in ids):
            raise InvalidRequest("a prompt has token ids outside the vocabulary", "prompts")
        if params.bad_words:
            ids_of_words = bad_word_ids(self.tokenizer, params.bad_words)
            params = msgspec.structs.replace(params, bad_words_token_ids=params.bad_words_token_ids + ids_of_words)
        params.validate(self._engine.vocab_size)
        self._num_requests += 1
        return Request(request_id=f"offline-{self._num_requests}", prompt_token_ids=ids, params=params)

    def _run(self, jobs: list[_Job], progress: bool, on_delta: OnDelta | None) -> None:
        streams: dict[str, tuple[int, _Choice]] = {}
        with _progress_bar(enabled=progress) as bar:
            task = bar.add_task("Generating", total=sum(len(job.choices) for job in jobs))

            def take(delta: Delta) -> None:
                index, choice = streams[delta.request_id]
                if on_delta is not None:
                    on_delta(index, delta)
                if choice.push(delta):
                    if delta.finish_reason is None:
                        self._core.abort([delta.request_id])  # a stop string: the engine does not know
                    del streams[delta.request_id]
                    bar.advance(task)

            try:
                for index, job in enumerate(jobs):
                    for choice in job.choices:
                        streams[choice.request.request_id] = (index, choice)
                        self._submit(choice.request, take)
                while streams:
                    for delta in self._core.step():
                        if delta.request_id in streams:
                            take(delta)
            finally:
                self._core.abort(list(streams))
                while self._core.oldest is not None:
                    self._core.step()

    def _submit(self, request: Request, take: Callable[[Delta], None]) -> None:
        grammar = None
        if request.params.structured_outputs is not None:
            grammar = self._engine.compiler.compile(request.params.structured_outputs)
        delta = self._core.add(Submit(request=request))
        if delta is None and grammar is not None:
            delta = self._core.set_grammar(request.request_id, grammar)
        if delta is not None:
            take(delta)


class _Choice:
    """One of a job's n outputs, growing."""

    def __init__(self, request: Request, index: int, llm: LLM) -> None:
        self.request = request
        self.output = CompletionOutput(index=index, text="", token_ids=[])
        self.first: Delta | None = None
        self._detokenizer = Detokenizer(llm.tokenizer, request.params, request.prompt_token_ids)

    def push(self, delta: Delta) -> bool:
        """Take a delta; True if the output is complete. Raises RuntimeError or InvalidRequest for an error delta."""
        if delta.finish_reason == "error":
            raise InvalidRequest(delta.error or "") if delta.invalid else RuntimeError(delta.error)
        if self.first is None:
            self.first = delta
        text = self._detokenizer.push(
            delta.token_ids, delta.finish_reason is not None, stop_token=delta.finish_reason == "stop"
        )
        out = self.output
        out.text += text.text
        out.token_ids += delta.token_ids[: text.num_tokens_kept]
        for entry in (delta.logprobs or [])[: text.num_tokens_kept]:
            out.logprobs = [*(out.logprobs or []), entry]
            out.cumulative_logprob = (out.cumulative_logprob or 0.0) + entry.logprob
        out.finish_reason, out.stop_reason = delta.finish_reason, delta.stop_reason
        if text.stop is not None:
            out.finish_reason, out.stop_reason = "stop", text.stop
        return out.finish_reason is not None


class _Job:
    """One prompt and its n outputs. The later ones follow the first, so the prompt is computed once."""

    def __init__(self, request: Request, params: SamplingParams, prompt: Prompt, llm: LLM) -> None:
        self.request = request
        self.prompt = prompt if isinstance(prompt, str) else None
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        self.choices = [_Choice(request.choice(i, seed), i, llm) for i in range(params.n)]

    def result(self) -> RequestOutput:
        first = self.choices[0].first
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[choice.output for choice in self.choices],
            prompt_logprobs=first.prompt_logprobs if first is not None else None,
            num_cached_tokens=first.num_cached_tokens if first is not None else 0,
        )


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _progress_bar(*, enabled: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not enabled,
    )
