"""The choice of a backend, the name of the kernel that runs, and what a microbatch's documents cost."""

from typing import Any

import pytest
import torch
from conftest import random_documents
from packed_rows import packed
from test_model import BACKENDS, SPECS
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from titan_mi100.attention.backends import make_backend
from titan_mi100.attention.base import NO_KERNEL, Backend, Documents, Shape
from titan_mi100.attention.running import running_kernel
from titan_mi100.attention.torch_backends import Eager, Sdpa
from titan_mi100.config.layout import Layout
from titan_mi100.config.settings import Config
from titan_mi100.data.microbatch import Microbatch, collate, for_the_model
from titan_mi100.model.loss import HeadMemory
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.parallel import distributed
from titan_mi100.parallel.base import describe_on_host, model_inputs, supervised_index
from titan_mi100.parallel.build import Computation, Placement, build_model
from titan_mi100.parallel.distributed import World
from titan_mi100.planning.workload import Workload

CPU = torch.device("cpu")


@torch.library.custom_op("titan_mi100_test::block_kernel", mutates_args=())
def block_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return q + k.sum() + v.sum()


@block_kernel.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q)


class CustomKernel(Backend):
    """As a kernel of our own would come: its operator is not named after attention."""

    name = "custom"

    def prepare(self, documents: Documents, device: torch.device) -> None:
        return None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prepared: None) -> torch.Tensor:
        return block_kernel(q.contiguous() * 1.0, k, v)


def microbatch() -> Microbatch:
    """Two rows: three documents and padding, some tokens supervised; padding alone."""
    dataset = packed(random_documents(311, [9, 5, 4], supervised_share=0.5), seq_len=20, pad_id=0)
    return collate([dataset.row(0), dataset.row(-1)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_reference_computes_its_softmax_in_fp32_or_in_fp64_where_the_inputs_are(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 20, heads, 16, generator=generator).to(dtype) for heads in (4, 2, 2))
    eager = make_backend("eager", "cpu")
    prepared = eager.prepare(Documents(1, 20, (9, 11)), CPU)
    scores = torch.einsum("bqhgd,bkhd->bhgqk", q.view(1, 20, 2, 2, 16), k) / 4
    wide = scores.to(torch.float64 if dtype == torch.float64 else torch.float32)
    weights = wide.masked_fill(~prepared[:, :, None], float("-inf")).softmax(-1).to(dtype)
    assert torch.equal(eager(q, k, v, prepared), torch.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(q.shape))
    if dtype == torch.float64:
        fused = Sdpa()
        expected = fused(q, k, v, fused.prepare(Documents(1, 20, (9, 11)), CPU))
        torch.testing.assert_close(eager(q, k, v, prepared), expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_that_runs_is_named(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(backend: Backend) -> str:
        shape = Shape(1, 16, 4, 2, 16, str(dtype).removeprefix("torch."))
        return running_kernel(backend, shape, Documents(1, 16, (9, 7)), CPU)

    fused = "_scaled_dot_product_flash_attention_for_cpu"
    in_chunks = "explicit scores of a few hundred queries at a time"
    assert [kernel(make_backend(name, "cpu")) for name in BACKENDS] == [NO_KERNEL, in_chunks, fused]
    assert kernel(CustomKernel()) == "titan_mi100_test::block_kernel"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert kernel(Sdpa()) == NO_KERNEL  # PyTorch's silent way back


def test_ends_and_supervised_columns_become_lengths_and_an_index() -> None:
    batch = microbatch()
    assert batch["document_ends"].tolist()[0][:5] == [9, 14, 18, 20, -1]
    assert batch["document_ends"].tolist()[1] == [20] + [-1] * 19
    assert Documents.from_ends(batch["document_ends"]) == Documents(2, 20, (9, 5, 4, 2, 20))
    assert Documents.one_per_row(2, 5) == Documents(2, 5, (5, 5))
    both = torch.cat([batch["supervised_columns"].flip(0), batch["supervised_columns"]])
    labels = torch.cat([batch["labels"].flip(0), batch["labels"]])
    assert supervised_index(both).tolist() == (labels.flatten() != -100).nonzero()[:, 0].tolist() != []
    assert supervised_index(batch["supervised_columns"][1:]).tolist() == [0]
    for wrong in ([[3, -1, -1, -1], [4, -1, -1, -1]], [[2, 1, 4, -1], [4, -1, -1, -1]]):
        with pytest.raises(AssertionError, match="do not fill their rows"):
            Documents.from_ends(torch.tensor(wrong))
    for shape in {tensor.shape for tensor in batch.values()}:
        assert shape == (2, 20)  # a pipeline splits all of them along dim 0


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("head", ["tied", "untied"])
def test_forward_and_backward_ask_the_device_for_no_value(name: str, head: str) -> None:
    """Under fake tensors whatever depends on a value, such as nonzero or item, raises."""
    backend = make_backend(name, "cpu")
    described = describe_on_host(
        Qwen3(SPECS[head], backend).model, model_inputs(for_the_model(microbatch(), ()), CPU), CPU
    )
    with FakeTensorMode() as mode:
        model = Qwen3(SPECS[head], backend)
        inputs = tree_map_only(torch.Tensor, mode.from_tensor, described)
        loss = model(**inputs)
        loss.sum().backward()
        assert loss.shape == (1,)
        assert all(parameter.grad is not None for parameter in model.parameters())
        with pytest.raises(DynamicOutputShapeException):
            (inputs["labels"] != 0).nonzero()


def test_the_host_reads_its_tensors_before_fsdp_moves_them(world: World) -> None:
    mesh, two = distributed.build_mesh(Layout(), CPU), Workload(Config(), 2, SPECS["tied"])  # one rank is not sharded
    sharded = build_model(two, Computation(Sdpa(), HeadMemory()), Placement(mesh, CPU))
    model = sharded.parts[0]
    distributed.fill_parameters(sharded.named_parameters(), lambda name, shape, offset, size: torch.ones(size))
    seen: list[dict[str, Any]] = []
    hooks = model._forward_pre_hooks
    (fsdp,) = [key for key, hook in hooks.items() if "FSDP" in str(getattr(hook, "__self__", hook.__qualname__))]
    plain: Any = hooks[fsdp]

    def spy(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        seen.append(kwargs)
        return plain(module, args, kwargs)

    hooks[fsdp] = spy
    sharded.forward_backward([microbatch()], 1)
    (kwargs,) = seen
    assert set(kwargs) == {"input_ids", "labels", "positions", "documents", "supervised"}
    assert kwargs["documents"] == {"attention": Documents(2, 20, (9, 5, 4, 2, 20))}


class Written(TorchDispatchMode):
    """Counts the elements of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result._is_view():
            self.elements += result.numel()
        return result


def test_short_documents_cost_no_more_memory_traffic_than_long_ones() -> None:
    """A slice per document would fill and add a whole row for each in backward. The values are the same, to the bit."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, 64, heads, 16, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    written = {}
    for length in (32, 4):
        documents = Documents(2, 64, (length,) * (128 // length))
        with Written() as counter:
            out = Sdpa()(*leaves, documents)
            gradients = torch.autograd.grad(out.square().sum(), leaves)
        written[length] = counter.elements
        alone = Documents.one_per_row(1, length)
        slices = [
            Sdpa()(*(x[row : row + 1, start : start + length] for x in leaves), alone)
            for row in range(2)
            for start in range(0, 64, length)
        ]
        expected = torch.cat(slices, dim=1).view(2, 64, 4, 16)
        assert torch.equal(out, expected)
        for ours, theirs in zip(gradients, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
            assert torch.equal(ours, theirs)
    assert written[4] <= 1.05 * written[32]


class Lengths(TorchDispatchMode):
    """Notes the lengths that attention's kernels are called for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "flash_attention" in str(func):
            self.seen.add(args[0].shape[2])
        return func(*args, **(kwargs or {}))


def test_in_16_bits_a_cpu_kernel_is_made_for_few_lengths() -> None:
    """Each length that it meets costs memory for good. What is added to a document changes none of its numbers."""
    documents = Documents(1, 300, (1, 63, 64, 65, 107))
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, 300, heads, 16, generator=generator).bfloat16().requires_grad_() for heads in (4, 2, 2)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    with Lengths() as lengths:
        out = Sdpa()(*leaves, documents)
        gradients = torch.autograd.grad(out.sum(), leaves)
    assert lengths.seen == {64, 128}
    expected = Eager()(*exact, Eager().prepare(documents, CPU))
    pairs = zip((out, *gradients), (expected, *torch.autograd.grad(expected.sum(), exact)), strict=True)
    for ours, theirs in pairs:
        assert (ours - theirs).abs().max() <= 2e-2 * theirs.abs().max()
    with torch.no_grad():  # another document's values are as good as none
        other = [torch.cat((leaf[:, :64], torch.full_like(leaf[:, 64:], 7.0)), dim=1) for leaf in leaves]
        assert torch.equal(Sdpa()(*other, documents)[:, :64], out[:, :64])
