"""What the recipe tells its router: the file that verl reads, and the engines' limits."""

import asyncio

from recipe.rollout.router import ACTOR_CLASS, kv_remark, write_config
from tests.recipe.rollout.test_router import LIMITS, composed, router, server


def test_the_file_for_verl_names_the_router_and_its_settings(tmp_path):
    from verl.workers.rollout.router import _load_router_yaml, _resolve_router_class

    write_config(composed(tmp_path))
    settings = _load_router_yaml(str(tmp_path / "router.yaml"))
    assert settings["router_class"] == ACTOR_CLASS and settings["lookahead_tokens"] == 8
    _resolve_router_class(settings["router_class"])


def test_a_cache_that_leaves_slots_empty_is_said_once(tmp_path, capsys):
    small = LIMITS | {"slots": 12}

    async def measure(limits, chunk):
        made = router(tmp_path, servers=(), chunk_tokens=chunk)
        await made.add_servers({name: server(**limits) for name in ("a", "b")})
        return capsys.readouterr().out.splitlines()

    lines = asyncio.run(measure(small, None))
    assert lines == [kv_remark(small, None)]
    assert "holds 8 of its 12 requests at full length (512 tokens)" in lines[0]
    assert asyncio.run(measure(small, 64)) == asyncio.run(measure(small | {"slots": 8}, None)) == []
