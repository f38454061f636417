"""A rollout without engines: replicas that run what the policy places there, driven by arbitrary bytes."""

from collections import Counter

from sam.routing import ContextPolicy, RoutingSettings

BLOCK = 4
LONGEST = 40


class World:
    """Checks after every event that a replica never holds more than its slots and its KV cache, and no request twice.

    Args:
        chunk_tokens, ahead: of the policy.
        sizes: KV tokens and slots of each replica.
    """

    def __init__(self, chunk_tokens: int | None, sizes: list[tuple[int, int]], ahead: int = 0):
        self.policy, self.ahead = ContextPolicy(RoutingSettings(chunk_tokens, ahead=ahead)), ahead
        self.sizes = {f"r{i}": size for i, size in enumerate(sizes)}
        self.alive, self.lengths, self.prompts, self.generated = set(), {}, {}, {}
        self.running: dict[str, tuple[str, int]] = {}  # request: replica, tokens of its chunk
        self.ended: Counter[str] = Counter()
        self.starts: list[str] = []
        for name in self.sizes:
            self.revive(name)

    def revive(self, name: str) -> None:
        if name not in self.alive:
            self.policy.add_replica(name, *self.sizes[name], BLOCK)
            self.alive.add(name)

    def kill(self, name: str) -> None:
        if name in self.alive:
            self.alive.remove(name)
            lost = [request for request, (where, _) in self.running.items() if where == name]
            self.policy.remove_replica(name)
            for request in lost:  # nothing of the chunk has come back
                del self.running[request]
                self.policy.proceed(request, 0)

    def arrive(self, group: int, length: int, prompt: int) -> None:
        name = f"{group}/{len(self.lengths)}"
        self.lengths[name], self.prompts[name], self.generated[name] = length, prompt, 0
        self.policy.arrive(name, str(group), prompt, LONGEST)

    def abort(self, name: str) -> None:
        self.running.pop(name, None)
        self.policy.abort(name)
        self.ended[name] += 1

    def end_chunk(self, name: str) -> None:
        _, tokens = self.running.pop(name)
        left = self.lengths[name] - self.generated[name]
        self.generated[name] += min(tokens, left)
        if tokens >= left:
            self.policy.finish(name, left)
            self.ended[name] += 1
        else:
            self.policy.proceed(name, tokens)

    def decide(self) -> int:
        starts = self.policy.decide()
        for request, replica, tokens in starts:
            assert request not in self.running and request not in self.ended, f"{request} started twice"
            rest = LONGEST - self.generated[request]
            assert replica in self.alive and tokens == min(self.policy.settings.chunk_tokens or rest, rest)
            self.running[request] = replica, tokens
            self.starts.append(request)
        for name in self.alive:
            held = [(self.prompts[r] + self.generated[r] + n) for r, (at, n) in self.running.items() if at == name]
            tokens, slots = self.sizes[name]
            assert len(held) <= slots + self.ahead
            assert len(held) == 1 or sum(-(-n // BLOCK) * BLOCK for n in held) <= tokens
        return len(starts)

    def drain(self) -> None:
        """Let every request end; fails if one is left waiting."""
        for name in self.sizes:
            self.revive(name)
        while self.decide() or self.running:
            for name in list(self.running):
                self.end_chunk(name)
        assert self.policy.waiting == 0
        assert self.ended == dict.fromkeys(self.lengths, 1), "a request is lost, doubled or left waiting"


def play(world: World, script: bytes) -> None:
    """Each byte is an event, so that a failure shrinks to the shortest script."""
    for byte in script:
        kind, value = byte % 8, byte // 8
        known, running = list(world.lengths), list(world.running)
        if kind in (0, 1):
            world.arrive(value % 5, 1 + value * 7 % LONGEST, 1 + value % 9)
        elif kind in (2, 3) and running:
            world.end_chunk(running[value % len(running)])
        elif kind == 4:
            world.kill(f"r{value % len(world.sizes)}")
        elif kind == 5:
            world.revive(f"r{value % len(world.sizes)}")
        elif kind == 6 and known and (name := known[value % len(known)]) not in world.ended:
            world.abort(name)
        world.decide()
