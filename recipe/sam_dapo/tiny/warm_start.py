"""Supervised warm start of the tiny model on written solutions, some of which contain slips."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import cos, pi
from random import Random

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from recipe.sam_dapo.tiny.task import Problem, TaskSettings, draw_problem, draw_solution
from recipe.sam_dapo.tiny.tokenizer import encode_prompt, encode_response

IGNORED = -100


@dataclass(frozen=True)
class WarmStartSettings:
    """How the warm start trains."""

    steps: int = 1600
    # Of the steps, at the beginning, that see short chains only: looking numbers up is learnt there several times
    # faster than on chains of all lengths.
    short_share: float = 0.2
    short_lines: int = 6  # at most, of a short chain
    tokens_per_step: int = 2048  # of a batch, padding included; sequences of like length share one
    learning_rate: float = 3e-3  # peak, reached after warmup_steps, then a cosine down to a tenth of it
    warmup_steps: int = 50
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0
    threads: int = 2  # of the CPU; sums are grouped by thread, so results repeat exactly for a given count


@contextmanager
def deterministic(threads: int) -> Iterator[None]:
    """Deterministic kernels on a fixed number of threads; the settings found are put back afterwards."""
    threads_before = torch.get_num_threads()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads it; filling takes a tenth
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True  # torch's default
        torch.use_deterministic_algorithms(was_deterministic)
        torch.set_num_threads(threads_before)


def draw_batches(
    tokenizer: PreTrainedTokenizerFast, task: TaskSettings, excluded: set[Problem], seed: int, tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """An endless stream of batches of at most `tokens` tokens, padded on the right.

    Yields:
        Token ids and targets, int64 [sequences, longest]. targets[:, i] is the token to predict from
        position i, IGNORED where there is none: padding and the prompt are not trained on.
    """
    random = Random(seed)
    while True:
        pool = []
        while sum(map(len, (ids for ids, _ in pool))) < 32 * tokens:
            problem = draw_problem(random, task)
            if problem not in excluded:
                prompt = encode_prompt(tokenizer, problem.question)
                pool.append((prompt + encode_response(tokenizer, draw_solution(random, task, problem)), len(prompt)))
        pool.sort(key=lambda example: len(example[0]))
        batches = [[]]
        for example in pool:
            if len(example[0]) * (len(batches[-1]) + 1) > tokens:
                batches.append([])
            batches[-1].append(example)
        random.shuffle(batches)
        yield from (_pad(batch, tokenizer.pad_token_id) for batch in batches)


def _pad(batch: list[tuple[list[int], int]], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = [torch.tensor(ids) for ids, _ in batch]
    targets = [torch.tensor([IGNORED] * (prompt - 1) + ids[prompt:] + [IGNORED]) for ids, prompt in batch]
    return pad_sequence(inputs, True, padding), pad_sequence(targets, True, IGNORED)


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: TaskSettings,
    settings: WarmStartSettings,
    excluded: Iterable[Problem],
    seed: int,
) -> list[float]:
    """Trains `model` in place on freshly drawn problems, none of them among `excluded`.

    Returns:
        The mean loss per trained token of every step, in nats.
    """
    rates = {"lr": settings.learning_rate, "betas": (0.9, 0.98), "weight_decay": settings.weight_decay}
    optimizer = torch.optim.AdamW(model.parameters(), **rates, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate_factor(step, settings))
    excluded = set(excluded)
    short = replace(task, max_lines=min(settings.short_lines, task.max_lines))
    easy = draw_batches(tokenizer, short, excluded, seed, settings.tokens_per_step)
    all_lengths = draw_batches(tokenizer, task, excluded, seed + 1, settings.tokens_per_step)
    losses = []
    model.train()
    with deterministic(settings.threads):
        progress = tqdm(range(settings.steps), desc="warm start", mininterval=5.0)
        for step in progress:
            inputs, targets = next(easy if step < settings.short_share * settings.steps else all_lengths)
            # Padding stands on the right, where causal attention never looks: no mask is needed.
            logits = model(input_ids=inputs, use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_gradient_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    model.eval()
    return losses


def _learning_rate_factor(step: int, settings: WarmStartSettings) -> float:
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return 0.1 + 0.45 * (1 + cos(pi * done))
