"""A replica in a process of its own: `python -m tests.kv_pool.replica`, a JSON of what to do on its standard input.

Two in one process share vLLM's connector and its sockets. It prints what each call gave.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.kv_pool.mooncake.store import LOG

BLOCK = 16  # tokens of a block of KV cache, in which a pool's values come
ROOT = Path(__file__).parents[2]


def run(model: str, calls: list[dict], pool: Path | None = None, simulated: bool = False, **engine) -> list[dict]:
    """What each call gave.

    Args:
        calls: {"weights": folder} takes other weights, as a weight sync does, and resets the prefix cache but no
            pool: `reset`, whether vLLM did. {"prompts", "parameters", "salt"} generates: `tokens` and `logprobs` per
            prompt, and `loaded`, tokens from the pool.
        pool: its folder.
        simulated: with vllm-ascend and its connector on the simulated NPU, else with vLLM's on a CPU.
    """
    with tempfile.TemporaryDirectory() as sockets:
        folders = [ROOT / "tests" / "kv_pool", ROOT, *([ROOT / "tests" / "ascend"] if simulated else [])]
        environment = os.environ | {"VLLM_RPC_BASE_PATH": sockets, "PYTHONHASHSEED": "0"}
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, folders)), "ASCEND_ENABLE_USE_FABRIC_MEM": "1"}
        if pool:
            pool.mkdir(exist_ok=True)
            settings, protocol = Path(sockets, "mooncake.json"), "ascend" if simulated else "tcp"
            settings.write_text(json.dumps({"protocol": protocol, "master_server_address": str(pool)}))
            environment["MOONCAKE_CONFIG_PATH"] = str(settings)
            name = "AscendStoreConnector" if simulated else "MooncakeStoreConnector"
            engine["kv_transfer_config"] = {"kv_connector": name, "kv_role": "kv_both"}
        asked = {"model": model, "calls": calls, "pool": pool and str(pool)}
        asked = json.dumps({**asked, "simulated": simulated, "engine": engine})
        command = [sys.executable, "-m", "tests.kv_pool.replica"]
        done = subprocess.run(command, input=asked, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def _serve(model: str, calls: list[dict], pool: str | None, simulated: bool, engine: dict) -> list[dict]:
    if simulated:
        import simulator

        simulator.install()
        engine |= {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 128, "gpu_memory_utilization": 0.5}
    import tests.sam.engine.tiny_engine  # noqa: F401, the variables it sets
    from sam.vllm import plugin

    plugin.register()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8, dtype="float32", enforce_eager=True,
        block_size=BLOCK, additional_config={"speculation": {"policy": "always"}}, **engine,
    )  # fmt: skip
    found = []
    for call in calls:
        if "weights" in call:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": call["weights"]})
            found.append({"reset": llm.reset_prefix_cache()})
            continue
        salt = {"cache_salt": call["salt"]} if call.get("salt") else {}
        common = {"temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
        before = _loaded(pool)
        outputs = llm.generate(
            [{"prompt_token_ids": prompt, **salt} for prompt in call["prompts"]],
            [SamplingParams(**common, **parameters) for parameters in call["parameters"]],
            use_tqdm=False,
        )
        _settle(pool)
        given = [output.outputs[0] for output in outputs]
        logprobs = [[s[t].logprob for s, t in zip(one.logprobs, one.token_ids, strict=True)] for one in given]
        tokens = [list(one.token_ids) for one in given]
        found.append({"tokens": tokens, "logprobs": logprobs, "loaded": _loaded(pool) - before})
    return found


def _loaded(pool: str | None) -> int:
    """Tokens read from the pool so far, by all its engines."""
    log = Path(pool, LOG) if pool else None
    return BLOCK * log.read_text().count("get ") if log and log.exists() else 0


def _settle(pool: str | None) -> None:
    """Values are put by a thread: wait until it has nothing left."""
    if pool:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        get_kv_transfer_group().connector_worker.kv_send_thread.request_queue.join()


if __name__ == "__main__":
    answer = _serve(**json.load(sys.stdin))
    print("\n" + json.dumps(answer), flush=True)
    os._exit(0)  # the connector's sockets would keep the process
