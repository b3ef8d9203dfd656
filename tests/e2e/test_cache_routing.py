"""Two real instances behind one gateway that routes by what they cache."""

from __future__ import annotations

from pathlib import Path

from support.live_server import TEXT, LiveServer, wait_until

FLAGS = ("--threads", "1", "--instances", "2", "--num-kv-blocks", "400", "--routing", "cache-aware")


def cached_tokens(server: LiveServer, prompt: str) -> int:
    with server.client() as client:
        reply = client.post(TEXT, json={"prompt": prompt, "max_tokens": 2, "temperature": 0})
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_requests_go_where_their_prefix_is(live_model: Path) -> None:
    """Whatever instance computed a prompt first, all later ones that continue it find it: also after a death."""
    with LiveServer(live_model, *FLAGS) as server:
        wait_until(lambda: "(2 of 2)" in server.log, "both instances are ready")
        prompts = [f"{number} " + "the quick brown fox jumps over the lazy dog " * 4 for number in range(4)]
        for prompt in prompts:
            assert cached_tokens(server, prompt) == 0
        for turn in range(3):
            for prompt in prompts:
                assert cached_tokens(server, f"{prompt} and turn {turn}") > 100
        server.kill_instance()
        wait_until(lambda: server.log.count("is ready") == 3, "it is there again")
        for prompt in prompts:
            cached_tokens(server, prompt)  # computed again where it was lost
        for prompt in prompts:
            assert cached_tokens(server, f"{prompt} once more") > 100
        assert "Traceback" not in server.log
