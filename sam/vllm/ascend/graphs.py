"""Plain decode stays plain on vllm-ascend 0.23: a step without drafts takes the graph of an engine without speculation.

Root cause: with a speculative_config `NPUModelRunner` (vllm_ascend/worker/model_runner_v1.py) lets every decoding
request have 1 + k tokens, and knows no other length. vLLM's dispatcher then has decode graphs of 1 + k tokens a request
only, and rounds all sizes up to multiples of it; the table through which vllm-ascend updates a graph's attention
arguments (`GraphParams`) has one entry for each number of tokens, so that graphs of both lengths cannot lie side by
side; and `using_paged_attention` never lets a step take the paged operator. Symptom: in FULL_DECODE_ONLY every step
without drafts runs eager, in FULL_AND_PIECEWISE in pieces, in FULL one request is padded to 1 + k tokens;
`pa_shape_list` is ignored.
Upstream: https://github.com/vllm-project/vllm-ascend/issues/7301 (suffix drafts with FULL_DECODE_ONLY run eager).
Can go when: vllm-ascend captures decode graphs for one token a request beside those for 1 + k.
"""

import contextlib
import copy
import logging
from collections.abc import Iterator
from types import SimpleNamespace

from sam.vllm import patches

logger = logging.getLogger(__name__)

_paged = False  # whether the step under way may take the paged operator


def install(runner) -> None:
    """Give a model runner a second set of decode graphs, for one token a request. Call it before graphs are captured.

    Without graphs, with speculation off, or in mode PIECEWISE nothing is missing, and nothing changes. With data or
    context parallelism ranks have to agree on a graph in every step, which they do on one of 1 + k tokens only: mode
    FULL is the one to take there.
    """
    mode = runner.compilation_config.cudagraph_mode
    if not runner.num_spec_tokens or not mode.has_full_cudagraphs() or hasattr(runner, "_sam_plain_decode"):
        return
    if runner.parallel_config.data_parallel_size > 1 or runner.use_cp:
        logger.warning("with data or context parallelism a step without drafts replays a graph in mode FULL only")
        return
    runner._sam_plain_decode = plain = PlainDecode(runner)
    for attribute, wrapper in {
        "_check_and_update_cudagraph_mode": plain.update_sizes,
        "_capture_cudagraphs": plain.capture,
        "_determine_batch_execution_and_padding": plain.dispatch,
        "_pad_query_start_loc_for_fia": plain.run_plain,
        "_model_forward": plain.run_plain,
    }.items():
        patches.wrap(runner, attribute, "plain_decode_graphs", wrapper)
    _let_plain_steps_page()


class PlainDecode:
    """The graphs for one token a request, and what has to be in their place while such a step runs."""

    def __init__(self, runner):
        self._runner = runner
        self._dispatcher = None  # of these graphs; None where one set serves both lengths
        self._graph_params = None  # their table of attention arguments
        self._is_plain = False  # the step under way

    def update_sizes(self, check_and_update, *arguments, **keywords):
        """Choose the sizes to capture: those of an engine without speculation stay among them."""
        compilation = self._runner.compilation_config
        if not compilation.cudagraph_mode.separate_routine():
            # FULL: a graph serves any rows that add up to its size, so sizes need not be multiples of 1 + k.
            with self._replaced(uniform_decode_query_len=1):
                return check_and_update(*arguments, **keywords)
        unrounded = copy.copy(compilation)  # before vLLM rounds the sizes up
        result = check_and_update(*arguments, **keywords)
        if compilation.cudagraph_mode.has_full_cudagraphs():
            self._dispatcher = self._make_dispatcher(unrounded)
        return result

    def _make_dispatcher(self, compilation):
        from vllm.config import CUDAGraphMode
        from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

        dispatcher = CudagraphDispatcher(self._runner.vllm_config)
        dispatcher.compilation_config, dispatcher.uniform_decode_query_len = compilation, 1
        dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY, 1)
        return dispatcher

    def capture(self, capture_cudagraphs, batch_descriptors, cudagraph_runtime_mode):
        """Capture these graphs after those of 1 + k tokens; vllm-ascend captures both again after a sleep."""
        from vllm.config import CUDAGraphMode

        capture_cudagraphs(batch_descriptors, cudagraph_runtime_mode)
        if self._dispatcher is None or cudagraph_runtime_mode != CUDAGraphMode.FULL:
            return
        ((mode, descriptors),) = self._dispatcher.get_capture_descs()
        self._graph_params = _new_graph_params(sorted({one.num_tokens for one in descriptors}))
        with self._plain():
            capture_cudagraphs(descriptors, mode)

    def dispatch(self, determine, *arguments, **keywords):
        """Find the step's graph among these if every request decodes one token."""
        computed = self._runner.input_batch.num_computed_tokens_cpu[: keywords["num_reqs"]]
        self._is_plain = (
            self._dispatcher is not None
            and keywords.get("force_uniform_decode") is None  # else a dummy step, or a capture
            and keywords["max_num_scheduled_tokens"] == 1
            and bool((computed > 0).all())
        )
        return self.run_plain(determine, *arguments, **keywords)

    def run_plain(self, function, *arguments, **keywords):
        """Run a part of a step as an engine without speculation would, if the step is plain."""
        with self._plain() if self._is_plain else contextlib.nullcontext():
            return function(*arguments, **keywords)

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        global _paged
        from vllm_ascend.compilation import acl_graph

        kept, _paged = acl_graph._graph_params, True
        acl_graph._graph_params = self._graph_params
        try:
            with self._replaced(uniform_decode_query_len=1, cudagraph_dispatcher=self._dispatcher):
                yield
        finally:
            acl_graph._graph_params, _paged = kept, False

    @contextlib.contextmanager
    def _replaced(self, **values) -> Iterator[None]:
        kept = {name: getattr(self._runner, name) for name in values}
        vars(self._runner).update(values)
        try:
            yield
        finally:
            vars(self._runner).update(kept)


def _new_graph_params(sizes: list[int]):
    """As vllm_ascend.compilation.acl_graph.set_graph_params makes them, which keeps them for the whole process."""
    from vllm_ascend.compilation.acl_graph import GraphParams

    return GraphParams(
        {size: [] for size in sizes},
        {size: None for size in sizes},
        {size: [] for size in sizes},
        {size: [] for size in sizes},
    )


def _let_plain_steps_page() -> None:
    """Let `using_paged_attention` answer for a plain step as it does without speculation. Twice changes nothing."""
    from vllm_ascend.attention import attention_v1, utils
    from vllm_ascend.worker import model_runner_v1

    def as_without_speculation(original, runtime_shape, vllm_config, head_size=None):
        if _paged and vllm_config.speculative_config is not None:
            vllm_config = SimpleNamespace(speculative_config=None, compilation_config=vllm_config.compilation_config)
        return original(runtime_shape, vllm_config, head_size)

    for module in (utils, attention_v1, model_runner_v1):
        patches.wrap(module, "using_paged_attention", "page_plain_steps", as_without_speculation)
