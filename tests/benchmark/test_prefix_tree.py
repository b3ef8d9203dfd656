"""benchmarks/prefix_tree.py runs and prints what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "benchmarks/prefix_tree.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_last_line_is_one_json_object(tmp_path: Path) -> None:
    plot = tmp_path / "chunks.png"
    done = run("--json", "--tokens", "65536", "--chunk", "1024", "--rescans", "8", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert {"last_over_first", "ms_per_chunk", "rescan_over_incremental", "admission_ms"} <= result.keys()
    assert (result["tokens"], result["chunk"], result["chunks"], result["rescanned_chunks"]) == (65536, 1024, 64, 8)
    assert result["ms_per_chunk"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_impossible_sizes_are_refused() -> None:
    done = run("--tokens", "100", "--chunk", "2048")
    assert done.returncode == 2
    assert "at least three chunks" in done.stderr
    assert "Traceback" not in done.stderr
