"""`python -m recipe.draft_model.measured_text --assets DIR --output DIR`: what hybrid is measured on beside sam.

- repeated.jsonl: responses of DIR/model to held-out prompts (val.parquet) at temperature 1, 8 of each and each of them
  twice in a row, so that half of the text repeats what the request itself has said. `sam.bench --text` takes it.
- deep/: the model with layers behind its own that add nothing, so that its tokens are the same at the price of a target
  of so many layers. A draft model that is made for one is right for the other, and is cheap beside the deep one.
"""

# ruff: noqa: E402
import os

# Read when torch is loaded. Threads that spin while they wait take ten times a step's CPU time on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import copy
import json
import sys
import tempfile
from pathlib import Path

from recipe.draft_model.distil import DistilSettings, sample_responses
from sam.bench.prompts import read_prompts
from sam.command import run_command
from sam.record.tokenizer import Tokenizer

MAX_TOKENS = 512  # of a text and its repetition
REPEATED, DEEP = "repeated.jsonl", "deep"


def repeated(response: list[int]) -> list[int]:
    """A response and the same again.

    Example:
        >>> repeated([5, 6])
        [5, 6, 5, 6]
    """
    return (response * 2)[:MAX_TOKENS]


def deepened(target, layers: int):
    """The target with further layers, `layers` in all, whose outputs are 0: each adds to what passes through it.

    Raises:
        ValueError: the target has more layers.
    """
    own = target.config.num_hidden_layers
    if layers < own:
        raise ValueError(f"layers={layers}: expected {own} or more, the target's")
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[0]] * layers
    deep = type(target)(config).to(target.dtype)
    deep.load_state_dict(target.state_dict(), strict=False)
    for layer in deep.model.layers[own:]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    deep.generation_config = target.generation_config
    return deep


def write(assets: Path, output: Path, settings: DistilSettings, layers: int) -> None:
    """Write repeated.jsonl and deep/ into `output`."""
    # transformers takes seconds to import: only after everything that may be wrong was looked at.
    from transformers import AutoModelForCausalLM

    from recipe.tiny.warm_start import deterministic

    target = AutoModelForCausalLM.from_pretrained(assets / "model", local_files_only=True).float()
    prompts = read_prompts(assets / "val.parquet", assets / "model", settings.prompts)
    output.mkdir(parents=True, exist_ok=True)
    deepened(target, layers).save_pretrained(output / DEEP)
    Tokenizer(assets / "model").whole.save_pretrained(output / DEEP)
    with deterministic(settings.threads), tempfile.TemporaryDirectory() as progress:
        examples = sample_responses(target, prompts, settings, Path(progress))
    with (output / REPEATED).open("w") as file:
        for prompt, response in examples:
            file.write(json.dumps({"prompt_tokens": prompt, "response_tokens": repeated(response)}) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Read the command line, write the files."""
    parser = argparse.ArgumentParser(prog="python -m recipe.draft_model.measured_text", description=__doc__)
    parser.add_argument("--assets", type=Path, required=True, help="folder with model/ and val.parquet")
    parser.add_argument("--output", type=Path, required=True, help="folder for repeated.jsonl and deep/")
    parser.add_argument("--layers", type=int, default=28, help="of the deep model (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=64, help="at most, 8 responses each (default %(default)s)")
    options = parser.parse_args(arguments)

    def command() -> str:
        for path in (options.assets / "model/config.json", options.assets / "val.parquet"):
            if not path.is_file():
                raise ValueError(f"no {path}: make model and data first, or name their folder with --assets")
        if options.prompts < 1:
            raise ValueError(f"--prompts {options.prompts}: expected 1 or more")
        write(options.assets, options.output, DistilSettings(prompts=options.prompts, samples=8), options.layers)
        return f"written to {options.output}"

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
