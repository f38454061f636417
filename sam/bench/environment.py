"""Environment variables of the engines' processes: alike for all variants, but for vLLM's plugins."""

import os
from collections.abc import Iterable
from importlib.metadata import EntryPoint, PackageNotFoundError, distributions, version

from sam.bench.settings import STOCK_V1, is_stock

# No looking for anything on a network.
OFFLINE = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
# vLLM 0.23 runs dense Qwen3 on CUDA with its second model runner, whose sampler sam.vllm does not replace.
OURS = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
# Weights in huge pages, of vLLM's CPU engine: steps that memory bounds take about 5 % less time. Stock does not ask.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
MEMORY = "VLLM_CPU_KVCACHE_SPACE"


def environment_of(variant: str) -> dict[str, str]:
    """The user's variables and those that a variant needs; what the user has set stays, but for our plugin."""
    ours = OURS | (HUGE_PAGES if vllm_version().endswith("+cpu") else {})
    own = ours if not is_stock(variant) else OURS if variant == STOCK_V1 else {}
    environment = OFFLINE | own | dict(os.environ)
    chosen = environment.pop("VLLM_PLUGINS", None)
    found = [plugin for distribution in distributions() for plugin in distribution.entry_points]
    plugins = vllm_plugins(found, is_stock(variant), None if chosen is None else chosen.split(","))
    return environment if plugins is None else environment | {"VLLM_PLUGINS": ",".join(plugins)}


def vllm_plugins(found: Iterable[EntryPoint], stock: bool, chosen: list[str] | None) -> list[str] | None:
    """Names of the plugins that vLLM is to load of those `found`, as the user has `chosen`; None for all.

    vLLM has one list for all groups, platforms too. Stock gets all but this project's; an empty list loads none.
    """
    plugins = [plugin for plugin in found if plugin.group.startswith("vllm.")]
    ours = {plugin.name for plugin in plugins if plugin.value.startswith("sam.")}
    if stock:
        return sorted(({plugin.name for plugin in plugins} if chosen is None else {*chosen}) - ours)
    return None if chosen is None else sorted({*chosen, *ours})


def vllm_version() -> str:
    """The installed vLLM's version.

    Raises:
        ValueError: there is none.
    """
    try:
        return version("vllm")
    except PackageNotFoundError as error:
        raise ValueError("vLLM is not installed: install the extra `cpu` or `cuda`") from error
