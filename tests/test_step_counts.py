"""What whole models give a GPU in a microbatch: launches, bytes, waits of the host, as step_counts.py counts them."""

import json
import subprocess
import sys
from collections import Counter

import pytest
import torch
from conftest import REPO, job_environment
from step_counts import CASES, Counted, Counts, host_seconds, total

from titan_mi100.planning.plan import HOST_LAYER

pytestmark = pytest.mark.full  # a complete run of CI has it

# Launches of a layer and of a microbatch; GB of both. torch's norm is a composite of operations in 2.8, later a kernel.
EXPECTED = {
    "0.6B, plain, torch 2.8": (141, 5190, 8.96, 312.6),
    "0.6B, plain": (64, 3012, 4.45, 185.2),
    "0.6B, ours": (30, 966, 1.34, 48.6),
    "0.6B LoRA, plain, torch 2.8": (119, 4469, 8.1, 282.1),
    "0.6B LoRA, plain": (47, 2446, 4.0, 166.8),
    "0.6B LoRA, ours": (14, 447, 1.15, 37.5),
    "8B QLoRA, plain, torch 2.8": (161, 6127, 10.09, 376.9),
    "8B QLoRA, plain": (89, 3528, 7.22, 273.4),
    "8B QLoRA, ours": (28, 1037, 1.97, 72.4),
    "0.6B DPO, plain, torch 2.8": (141, 5550, 8.96, 312.6),
    "0.6B DPO, plain": (64, 3372, 4.45, 185.2),
    "0.6B DPO, ours": (30, 1326, 1.34, 48.7),
    "0.6B, ours, selective": (34, 1078, 1.70, 58.7),
    "0.6B, ours, full": (34, 1078, 1.70, 58.7),
    "0.6B, ours, 2nd": (27, 883, 1.31, 49.6),
    "0.6B LoRA, ours, 2nd": (14, 446, 1.15, 37.6),
    "qwen3.5-0.8B, plain": (5985, 37862, 105.02, 729.1),  # a group of four layers
    "qwen3.5-0.8B, ours": (186, 1283, 16.95, 119.7),
    "30B-A3B QLoRA, plain": (2415, 116228, 18.1, 882.2),
    "30B-A3B QLoRA, ours, none": (74, 3565, 7.5, 361.4),
    "30B-A3B QLoRA, ours, full": (98, 4717, 10.99, 529.0),
    "30B-A3B QLoRA of experts, plain": (2431, 117001, 19.29, 939.5),
    "30B-A3B QLoRA of experts, ours, none": (99, 4770, 8.52, 410.2),
    "30B-A3B QLoRA of experts, ours, full": (131, 6306, 12.33, 593.2),
}
# Only the loss differs: 2.8 keeps a slice of all rows in the graph, `x[:, n]`, whose gradient fills and copies.
OF_SLICES = {"DPO": 36, "": 2} if torch.__version__.startswith("2.8.") else {"": 0}

# The norm before attention and the one behind it, which adds the residual, too; the last sum is an addition. Gradients
# that meet are added by autograd: of the input of q, k and v (2), of gate and up, of the residual.
OURS = {
    "norm_kernel": 2, "turn_kernel": 1, "swiglu_kernel": 1, "add": 1 + 2 + 1 + 1,
    "norm_backward_kernel": 2, "turn_backward_kernel": 1, "swiglu_backward_kernel": 1,
}  # fmt: skip
GAINS = {"sum_kernel": 3}  # second stages of gradients: of both norms, and at once of those of queries and keys
RECOMPUTED = {"norm_kernel": 2, "turn_kernel": 1, "swiglu_kernel": 1}  # the forward's, but the last sum


@pytest.fixture(scope="module")
def table() -> dict[str, tuple[Counts, Counts]]:
    """In a process of its own, as Triton may be missing and be replaced there."""
    command = [sys.executable, str(REPO / "tests/step_counts.py"), "--json"]
    printed = subprocess.run(command, env=job_environment(), check=True, capture_output=True, text=True).stdout
    return {
        words: tuple(Counter({(what, name): n for what, name, n in counted}) for counted in both)
        for words, both in json.loads(printed).items()
    }  # type: ignore[return-value]


def launches(counted: Counts) -> dict[str, int]:
    return {name: n for (what, name), n in counted.items() if what == "launches"}


def test_launches_and_bytes(table: dict[str, tuple[Counts, Counts]]) -> None:
    found = {}
    for words, (layer, every) in table.items():
        sliced = next(n for name, n in OF_SLICES.items() if name in words)
        gigabytes = round(total(layer, "bytes") / 1e9, 2), round(total(every, "bytes") / 1e9, 1)
        found[words] = (total(layer, "launches"), total(every, "launches") - sliced, *gigabytes)
    if torch.__version__.startswith("2.8."):  # the plain delta rule has other views there
        found.pop("qwen3.5-0.8B, plain", None)
    assert found == {words: EXPECTED[words] for words in found}
    assert max(gigabytes for words, (*_, gigabytes) in found.items() if "0.6B" in words and "ours" in words) <= 60
    delta = table["qwen3.5-0.8B, ours"][1]
    assert total(delta, "launches") + delta["products", ""] <= 3000 and total(delta, "bytes") <= 120e9


def test_what_a_layer_launches(table: dict[str, tuple[Counts, Counts]]) -> None:
    """At most 16 beside casts. Weights in fp32 are cast once a step, their gradients are cast in its first microbatch
    and added in the others. LoRA's A and B are cast 64 at a time, their gradients added so: a layer has less than a
    launch of it, at most 14 in all. A base in 4 bits is restored twice for each product.
    """
    ours = {words: launches(layer) for words, (layer, _) in table.items()}
    assert ours["0.6B, ours"] == ours["0.6B DPO, ours"] == {**OURS, **GAINS, "_to_copy": 7 + 7}
    assert sum({**OURS, **GAINS}.values()) == 16 and sum(OURS.values()) == 13
    assert ours["0.6B LoRA, ours"] == {**OURS, "_foreach_copy_": 2 * 14 / 64}
    assert ours["8B QLoRA, ours"] == {**OURS, "_foreach_copy_": 2 * 14 / 64, "dequantize_kernel": 7 + 7}
    assert ours["0.6B LoRA, ours, 2nd"] == {**OURS, "_foreach_copy_": 14 / 64, "_foreach_add_": 14 / 64}
    for mode in ("selective", "full"):
        assert Counter(ours[f"0.6B, ours, {mode}"]) - Counter(ours["0.6B, ours"]) == RECOMPUTED
    first, later = (Counter(ours[words]) for words in ("0.6B, ours", "0.6B, ours, 2nd"))
    assert later - first == {"add_": 11} and first - later == {"_to_copy": 2 * 7}


def test_experts_in_4_bits_need_few_launches(table: dict[str, tuple[Counts, Counts]]) -> None:
    """A projection has a product forward and one backward, and is restored for each. Its adapters have two forward, and
    backward two and the sums of two gradients."""
    every = {words: total(counted, "launches") + counted["products", ""] for words, (_, counted) in table.items()}
    assert every["30B-A3B QLoRA, plain"] > 154_000 and every["30B-A3B QLoRA of experts, plain"] > 266_000
    assert every["30B-A3B QLoRA, ours, none"] <= 6000 and every["30B-A3B QLoRA, ours, full"] <= 12_000
    of_layer = {words: launches(layer) for words, (layer, _) in table.items()}
    for words, products, sums in (("", 6, 0), (" of experts", 3 * (3 + 3), 3 * 2)):
        ours = of_layer[f"30B-A3B QLoRA{words}, ours, none"]
        assert (ours["products_kernel"], ours.get("sums_kernel", 0)) == (products, sums)
        assert ours["dequantize_kernel"] == 4 * 2 + 3 * 2


def test_the_host_waits_for_nothing(table: dict[str, tuple[Counts, Counts]]) -> None:
    """A meta tensor's value cannot be read, and its number of nonzero values is not known: torch raises."""
    for words, (_, every) in table.items():
        assert total(every, "waits") == 0, words
        # copies from pinned memory: tokens, labels, positions, the learned ones' index; documents and the reference
        assert total(every, "copies") == (6 if "DPO" in words else 5 if "qwen3.5" in words else 4), words  # ids


def test_our_kernels_take_fewer_calls_of_the_dispatcher(table: dict[str, tuple[Counts, Counts]]) -> None:
    for case in CASES:
        calls = {form: table[f"{case}, {form}"][0]["calls", ""] for form in ("plain", "ours")}
        assert calls["ours"] <= 0.92 * calls["plain"], case


def test_the_plan_knows_the_hosts_time(table: dict[str, tuple[Counts, Counts]]) -> None:
    for case, key in (("0.6B", ""), ("0.6B LoRA", "whole"), ("8B QLoRA", "nf4")):
        for form, planned in zip(("plain", "ours"), HOST_LAYER[key], strict=True):
            near = pytest.approx(host_seconds(table[f"{case}, {form}"][0]), rel=0.06)  # torch 2.8 has fewer views
            assert planned == near, (case, form)


def test_the_counter() -> None:
    x, ids = torch.ones(4, 8, device="meta"), torch.zeros(2, dtype=torch.long, device="meta")
    with Counted() as counted:
        x.view(8, 4).t() @ x.t()[:, :1].new_empty(8, 4)  # views, memory and a product
        (x + x[:1].expand(4, 8)).mul_(2)
        x.index_put_((ids,), x[:2], accumulate=True)
        x[ids].copy_(torch.ones(2, 8))
        assert torch.ones(2).sum().item() == 2 and torch.ones(2).nonzero().shape == (2, 1)
    counts = counted.counts
    assert launches(counts) == {"add": 1, "mul_": 1, "index_put_": 10, "index": 1}
    sizes = {name: n for (what, name), n in counts.items() if what == "bytes"}
    row = 8 * 4
    assert sizes == {"add": (4 + 1 + 4) * row, "mul_": (4 + 4) * row, "index_put_": 16 + 3 * 2 * row,
                     "index": 16 + 2 * 2 * row}  # fmt: skip
    assert counts["products", ""] == 1 and counts["flops", ""] == 2 * 4 * 8 * 4
    assert {name for (what, name), n in counts.items() if what == "waits" and n} == {
        "_local_scalar_dense",
        "nonzero",
        "copy_",
    }
