"""The rehearsal of a run: its collectives are those of real gloo processes, its FLOPs are what arithmetic gives."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPO, random_documents, torchrun
from gloo.job_parity import config_of
from scaling import step_time, strong
from test_model import SPECS

from titan_mi100.config.check import check
from titan_mi100.config.layout import Layout
from titan_mi100.config.load import load_config
from titan_mi100.config.settings import Config
from titan_mi100.launch import launcher as launch
from titan_mi100.planning.cards import DEVICES, Gpu
from titan_mi100.planning.costs import recomputed_flops, train_flops
from titan_mi100.planning.device import find_card
from titan_mi100.planning.plan import make_plan
from titan_mi100.planning.scaling import bubble_share, reached
from titan_mi100.planning.workload import Workload, with_settings
from titan_mi100.shapes.families import PRESETS
from titan_mi100.shapes.qwen3_5 import FULL, Qwen3_5Spec, every_fourth
from titan_mi100.workshop import rehearse
from titan_mi100.workshop.rehearsal import saved, session
from titan_mi100.workshop.rehearsal.counter import as_rank, enough_microbatches
from titan_mi100.workshop.rehearsal.tally import _as_range
from titan_mi100.workshop.rehearsal.traffic import OPERATIONS, Transfer, Work, axis_of, by_axis

pytestmark = pytest.mark.usefixtures("no_process_group")
SEQ_LEN, RANKS = 32, 4
GPU = 64 << 30  # bytes; so many keep the head's logits for its backward
SPEC = replace(SPECS["untied"], vocab_size=312, num_hidden_layers=2)
DRAFTS = Qwen3_5Spec(
    312, 64, 96, 2, 4, 2, 2, 4, False, every_fourth(2, 2), 32, 16, 24, rope_theta=1e4, has_draft_head=True
)
TIED, DEEP = replace(SPEC, tie_word_embeddings=True), replace(SPEC, num_hidden_layers=4)
PP, TP = {"pipeline_parallel_degree": 2}, {"tensor_parallel_degree": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP2": {},
    "ZeRO-1, GA 3": {"parallelism": {"zero_stage": 1}, "accumulation": 3},
    "ZeRO-2, GA 3, tied": {"parallelism": {"zero_stage": 2}, "accumulation": 3, "spec": TIED},
    "HSDP 2x2": {"parallelism": {"data_parallel_replicate_degree": 2}, "accumulation": 2},
    "TP2 x FSDP2": {"parallelism": TP, "accumulation": 2, "checkpointing": "full"},
    "TP2 x 2 replicas, selective": {
        "parallelism": {**TP, "data_parallel_replicate_degree": 2}, "checkpointing": "selective"
    },
    "PP2 x FSDP2": {"parallelism": PP, "accumulation": 4},
    "PP2 x FSDP2, tied, 11 microbatches": {"parallelism": PP, "accumulation": 11, "spec": TIED},
    "PP2 x TP2": {"parallelism": {**PP, **TP}, "accumulation": 4},
    "PP4": {"parallelism": {"pipeline_parallel_degree": 4}, "accumulation": 8, "spec": DEEP},
    "Interleaved PP2 x DP2": {
        "parallelism": {**PP, "pipeline_parallel_schedule": "Interleaved1F1B"}, "accumulation": 4, "spec": DEEP
    },
    "GPipe PP2 x DP2": {"parallelism": {**PP, "pipeline_parallel_schedule": "GPipe"}, "accumulation": 3},
    "DDP": {"parallelism": {"zero_stage": 0}, "accumulation": 2},
    "LoRA, FSDP2": {"lora": {"rank": 4}},
    "CP2 x FSDP2": {"parallelism": {"context_parallel_degree": 2}, "accumulation": 2, "checkpointing": "full"},
    "CP4, one head of keys a rank": {"parallelism": {"context_parallel_degree": 4}, "accumulation": 2},
    "CP2 x TP2": {"parallelism": {**TP, "context_parallel_degree": 2}, "accumulation": 2},
    "CP2 x PP2": {"parallelism": {**PP, "context_parallel_degree": 2}, "accumulation": 4},
    "draft head along, FSDP2": {"draft_head": {"train": "along"}, "spec": DRAFTS, "accumulation": 2},
    "draft head along, DDP": {"draft_head": {"train": "along"}, "spec": DRAFTS, "parallelism": {"zero_stage": 0}},
    "draft head along, PP2 x TP2": {
        "draft_head": {"train": "along"}, "spec": DRAFTS, "parallelism": {**PP, **TP}, "accumulation": 4
    },
    "draft head after, PP2 x FSDP2": {
        "draft_head": {"train": "after"}, "spec": DRAFTS, "parallelism": PP, "accumulation": 11
    },
    "draft head after, TP2 x FSDP2": {"draft_head": {"train": "after"}, "spec": DRAFTS, "parallelism": TP},
}  # fmt: skip


def case_of(name: str) -> dict[str, Any]:
    """A case of tests/gloo/job_parity.py: full rows of one document, all learned."""
    layout = LAYOUTS[name]
    spec = layout.get("spec", SPEC)
    split = {"local_batch_size": 2, "accumulation": 1, **{k: v for k, v in layout.items() if k != "spec"}}
    rows = random_documents(312, [SEQ_LEN] * 2 * RANKS * split["accumulation"], supervised_share=2.0)
    return {"spec": spec, "documents": rows, "seq_len": SEQ_LEN, "split": split}


def assert_equals_real_runs(
    names: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: Iterable[int] = range(RANKS)
) -> None:
    job = folder / "job.pt"
    torch.save(cases := [case_of(name) for name in names], job)
    torchrun(str(REPO / "tests/gloo/job_traffic.py"), str(job), str(folder), processes=RANKS)
    for rank in ranks:
        real = torch.load(folder / f"rank-{rank}.pt", weights_only=False)
        for name, case, found in zip(names, cases, real, strict=True):
            if name != "PP4" and rank not in ((0, 3) if "PP" in name else (0,)):  # does as one of the others
                continue
            monkeypatch.setattr(Config, "spec", lambda _, spec=case["spec"]: spec)
            rehearsed = session.rehearse(Workload.of(config_of(case, case["split"]), RANKS), rank, 0)
            mine: Counter[Any] = Counter()
            for transfer, count in rehearsed.work.traffic.items():
                mine[transfer.operation, tuple(transfer.group), transfer.payload] += count
            assert mine == found, (name, rank, mine - found, found - mine)
            assert sum(found.values()) > 3


@pytest.mark.full
def test_its_collectives_are_those_of_a_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_equals_real_runs(["TP2 x FSDP2"], tmp_path, monkeypatch, ranks=(0,))


@pytest.mark.full
def test_its_collectives_are_those_of_real_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_equals_real_runs(list(LAYOUTS), tmp_path, monkeypatch)


MULTIPLIED = ("ZeRO-2, GA 3, tied", "HSDP 2x2", "DDP", "PP2 x FSDP2")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) for n in MULTIPLIED])
def test_many_microbatches_are_a_few_and_the_rest_multiplied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, wanted = case_of(name), 9 if name.startswith("PP") else 3
    monkeypatch.setattr(Config, "spec", lambda _: case["spec"])
    config = config_of(case, {**case["split"], "accumulation": wanted})
    multiplied = session.rehearse(Workload.of(config, RANKS), 0, 0)
    _, whole = session._second_step(Workload.of(config, RANKS), 0, wanted, 0)
    assert multiplied.work.by_microbatch  # fewer were taken
    assert (dict(multiplied.work.traffic), multiplied.work.flops) == (dict(whole.traffic), whole.flops)


@pytest.mark.parametrize("param", [pytest.param("bfloat16", marks=pytest.mark.full), "float32"])
def test_the_flops_of_all_ranks_are_what_arithmetic_gives(
    param: str, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Config, "spec", lambda _: SPEC)
    rows = 2 * 2
    tokens, pairs = rows * SEQ_LEN, rows * SEQ_LEN * (SEQ_LEN + 1) // 2
    for mode in ("none", "selective", "full") if full else ("selective",):
        split = {"local_batch_size": 2, "accumulation": 1, "checkpointing": mode, "param": param, "parallelism": TP}
        rehearsed = session.rehearse(Workload.of(config_of({"seq_len": SEQ_LEN}, split), RANKS), 0, GPU)
        expected = train_flops(SPEC, tokens, tokens - rows, pairs) + recomputed_flops(SPEC, tokens, pairs, mode)
        assert RANKS * rehearsed.work.flops == expected, mode


@pytest.mark.parametrize("draft", [pytest.param("along", marks=pytest.mark.full), "after"])
def test_so_are_those_of_a_draft_head(draft: str, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(DRAFTS, layer_types=(FULL, FULL))  # products of the delta rule are no more than near its list
    monkeypatch.setattr(Config, "spec", lambda _: spec)
    rows = 2 * 2
    tokens, pairs, product = rows * SEQ_LEN, rows * SEQ_LEN * (SEQ_LEN + 1) // 2, 2 * spec.vocab_size * spec.hidden_size
    slots = tokens - 2 * rows  # the planner takes as many as tokens have labels
    expected = -2 * rows * product + (slots * product if draft == "along" else 0)  # of which no logits are kept
    trained = [name for name in spec.parameters if draft == "along" or name.startswith("mtp.")]
    of_heads = {"q_norm": spec.num_attention_heads, "k_norm": spec.num_key_value_heads}
    for name in (name for name in trained if spec.parameters[name].role == "norm"):  # a CPU's are products
        expected += 2 * tokens * spec.parameters[name].size * of_heads.get(name.split(".")[-2], 1)
    for mode in ("none", "selective", "full") if full else ("selective",):
        split = {"local_batch_size": 2, "accumulation": 1, "checkpointing": mode, "parallelism": TP}
        config = config_of({"seq_len": SEQ_LEN}, {**split, "draft_head": {"train": draft}})
        planned = train_flops(spec, tokens, tokens - rows, pairs, draft=draft)
        planned += recomputed_flops(spec, tokens, pairs, mode, draft=draft)
        assert RANKS * session.rehearse(Workload.of(config, RANKS), 0, GPU).work.flops == planned + expected, mode


def drawn(draws: random.Random) -> Config:
    """A config of RANKS ranks that trains all weights, if it is one."""
    settings = {
        "parallelism": {
            "zero_stage": draws.choice((0, 1, 2, 3)), "data_parallel_replicate_degree": draws.choice((1, 2)),
            "tensor_parallel_degree": draws.choice((1, 2)), "pipeline_parallel_degree": draws.choice((1, 1, 2)),
            "context_parallel_degree": draws.choice((1, 2, 4)),
        },
        "training": {
            "gradient_accumulation_steps": draws.choice((1, 2)), "local_batch_size": draws.choice((1, 2)),
            "seq_len": draws.choice((256, 512)), "mixed_precision_param": draws.choice(("bfloat16", "float32")),
            "mixed_precision_reduce": draws.choice(("bfloat16", "float32")), "target_tokens_per_step": 0,
        },
        "activation_checkpoint": {"mode": draws.choice(("none", "full"))},
    }  # fmt: skip
    return with_settings(Config(), settings)


def test_the_planner_sends_on_each_axis_what_a_rehearsal_counts(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In layouts drawn at random. Of ZeRO-3 it gathers the last block and the head once more than is done; of tensor
    parallel it leaves out what is summed for the norms and the head; of context parallel the losses of tokens."""
    monkeypatch.setattr(Config, "spec", lambda _: SPEC)
    draws, seen = random.Random(0), set()
    while len(seen) < (24 if full else 1):
        config = drawn(draws)
        if not check(config, RANKS, with_files=False) and config.layout(RANKS) not in seen:
            seen.add(config.layout(RANKS))
            assert_sends_what_is_planned(config)


def assert_sends_what_is_planned(config: Config) -> None:
    layout, counted = config.layout(RANKS), Counter[str]()
    for rank in range(0, RANKS, RANKS // layout.pp):
        for one, _, _, ring in by_axis(session.rehearse(Workload.of(config, RANKS), rank, GPU).work.traffic):
            counted[one.axis.removesuffix("_shard").removesuffix("_replicate")] += ring / layout.pp
    planned = make_plan(Workload.of(config, RANKS), GPU).sent
    for axis, name, least, most in (
        ("dp", "data parallel", 1.0, 1.3 if layout.zero_stage == 3 else 1.0),
        ("tp", "tensor parallel", 0.75, 1.0), ("pp", "pipeline", 1.0, 1.0),
        ("cp", "context parallel", 0.9, 1.0),
    ):  # fmt: skip
        assert 0.99 * least * counted[axis] <= planned[name] <= 1.01 * most * counted[axis], (axis, config)


SENT = {
    "PP": PP,
    "ZeRO-3": {},
    "ZeRO-1": {"zero_stage": 1},
    "DDP": {"zero_stage": 0},
    "TP": TP,
    "PP x TP": {**PP, **TP},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name != "PP")) for name in SENT])
def test_so_it_does_with_a_draft_head(name: str, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Config, "spec", lambda _: DRAFTS)
    training = {"gradient_accumulation_steps": 3, "seq_len": 256, "target_tokens_per_step": 0}
    settings = {"training": training, "parallelism": SENT[name], "activation_checkpoint": {"mode": "full"}}
    for train in ("along", "after") if full else ("along",):
        assert_sends_what_is_planned(with_settings(Config(), {**settings, "draft_head": {"train": train}}))


def test_fsdp2_gathers_nothing_for_nothing_beside_a_draft_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Config, "spec", lambda _: DRAFTS)
    training = {"gradient_accumulation_steps": 1, "seq_len": 64, "target_tokens_per_step": 0}
    config = with_settings(Config(), {"training": training, "draft_head": {"train": "along"}})
    traffic = session.rehearse(Workload.of(config, RANKS), 0, GPU).work.traffic
    gathered = {transfer.payload: n for transfer, n in traffic.items() if transfer.operation == "all-gather"}
    assert gathered[2 * DRAFTS.layers[-1].size] == 1  # in forward: it stays there for its backward


def test_a_groups_ranks_lie_at_equal_distances() -> None:
    assert [*_as_range([1, 3, 5])] == [1, 3, 5] and [*_as_range([2, 3])] == [2, 3]


def transfer(operation: str, group: range, payload: int = 1000) -> Transfer:
    return Transfer("dp_shard", operation, group, payload)


def test_a_ring_sends_what_it_must() -> None:
    pair, four = range(2), range(0, 32, 8)
    sent = {name: [transfer(name, group).ring_bytes for group in (pair, four)] for name in OPERATIONS}
    assert sent == {
        "all-gather": [500, 750], "reduce-scatter": [500, 750], "all-reduce": [1000, 1500], "broadcast": [500, 750],
        "send": [1000, 1000], "receive": [0, 0], "barrier": [0, 0], "all-to-all": [500, 750],
    }  # fmt: skip


def test_the_slowest_link_of_a_ring_decides() -> None:
    gpu = Gpu("mine", {}, 32, link_gbs=100, per_node=8, node_gbs=10)
    groups = {
        "tp": range(8, 16),
        "one of each node": range(3, 512, 8),
        "all": range(512),
        "two of a node": range(0, 64, 4),
    }
    links = {name: transfer("send", group).link(8) for name, group in groups.items()}
    assert links == {name: "inside a node" if name == "tp" else "between nodes" for name in groups}
    rates = {name: reached(group, gpu) / 1e9 for name, group in groups.items()}
    # half of a link is reached; where eight groups share a node's network, each has an eighth of it
    assert rates == pytest.approx({"tp": 50, "one of each node": 5, "all": 40, "two of a node": 10})


def test_a_group_lies_along_an_axis() -> None:
    layout = Layout(dp_shard=4, dp_replicate=2, tp=8, pp=3)
    groups = {"tp": range(8, 16), "dp_shard": range(5, 32, 8), "dp_replicate": range(3, 64, 32)}
    groups |= {"pp": range(0, 192, 64), "world": range(192)}
    assert all(axis_of(group, layout, "all-gather") == name for name, group in groups.items())
    assert axis_of(range(0, 129, 128), layout, "send") == "pp"  # both ends of a pipeline
    assert axis_of(range(4), Layout(dp_shard=4), "all-gather") == "dp_shard"
    shared = Layout(dp_shard=2, cp=2, tp=2)
    assert axis_of(range(0, 8, 2), shared, "all-gather") == "dp_shard"
    assert axis_of(range(1, 5, 2), shared, "all-to-all") == axis_of(range(4, 8, 2), shared, "all-reduce") == "cp"


def test_a_step_waits_for_what_nothing_hides() -> None:
    gpu = Gpu("mine", {"bfloat16": 10}, 32, link_gbs=2, per_node=8, node_gbs=1)
    inside, outside = range(8), range(0, 64, 8)
    gather = Transfer("dp_shard", "all-gather", outside, 8_000_000_000)  # 14 s: 7 GB sent at 0.5 GB/s
    reduce = Transfer("dp_shard", "reduce-scatter", outside, 8_000_000_000)
    tensor = Transfer("tp", "all-gather", inside, 8_000_000_000)  # 7 s: at 1 GB/s
    seconds = {}
    for name, microbatches, count, in_each, tflop in (
        ("hidden", 1, 2, 0, 300),
        ("not behind half as much", 1, 2, 0, 100),
        ("spread", 4, 5, 1, 300),
        ("late", 4, 2, 0, 300),
    ):
        work = Work(tflop * 1e12, {gather: count, tensor: 1}, {gather: in_each} if in_each else {})
        found = step_time(work, gpu, "bfloat16", microbatches, 0.0, efficiency=0.5)
        assert found.computing == tflop / 5 and found.sending["dp_shard"] == pytest.approx(14 * count)
        assert found.exposed["tp"] == pytest.approx(7)
        seconds[name] = found.exposed["dp"]
        assert found.seconds == pytest.approx(found.computing + 7 + seconds[name])
    # "spread": 4 x 14 s behind 60; the fifth behind one of four forwards, 15 s. "late": 28 s behind 15
    assert seconds == pytest.approx({"hidden": 0, "not behind half as much": 8, "spread": 0, "late": 13})
    work = Work(300e12, {reduce: 1}, {})
    found = step_time(work, gpu, "bfloat16", 8, bubble_share("1F1B", 4, 8), efficiency=0.5)
    assert found.bubble == pytest.approx(60 * 3 / 8)  # so long as three more microbatches


SMALL = ("--rehearse", "16", "--device", "mi250x", "--model.flavor", "debug", "--training.seq_len", "64")
SMALL += ("--training.target_tokens_per_step", "0", "--parallelism.tensor_parallel_degree", "2")


@pytest.mark.full
def test_the_command_prints_tables_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rehearse.main([*SMALL, "--json", "--ranks", "0,3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 3] and found["fits"]
    (first, second), (row,) = (
        (rank["memory"] for rank in found["ranks"]),
        [row for row in found["ranks"][0]["collectives"] if (row["axis"], row["operation"]) == ("tp", "all-reduce")],
    )
    assert first["peak"] == sum(first["categories"].values()) >= second["peak"] > 0
    assert row["ranks"] == 2 and row["link"] == "inside a node" and row["ring_bytes"] == row["payload"]
    monkeypatch.setitem(DEVICES, "mine", Gpu("mine", {"bfloat16": 71}, memory_gib=0.5, link_gbs=16, per_node=1))
    assert rehearse.main([*SMALL[:2], "--device", "mine", *SMALL[4:]]) == 6
    said = capsys.readouterr()
    assert "tensor parallel spans several nodes" in said.out
    assert "what helps most: " in said.err and "does not fit: 0." in said.out
    assert re.search(r"^dp_shard +reduce-scatter +8 +5 +1.8 MB +1.6 MB  between nodes$", said.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--parallelism.tensor_parallel_degree", "16"], "does not divide num_attention_heads = 4"),
        (["--parallelism.data_parallel_shard_degree", "3"], "does not fill the 16 started processes; use -1"),
        (["--parallelism.data_parallel_shard_degree", "3"], "or start with --rehearse 6"),
        (["--rehearse", "0"], "argument --rehearse: '0' must be a whole number from 1 to"),
        (["--parallelism.pipeline_parallel_degree", "4"], "1F1B\" over 4 ranks needs at least 4 microbatches"),
        (["--compile.enable"], "--compile.enable false"),
        (["--parallelism.zero_stage", "0", "--parallelism.powersgd_rank", "1"], "set parallelism.powersgd_rank to 0"),
        (["--ranks", "16"], "--ranks 16 does not exist; the ranks are 0 to 15"),
        (["--device", "mi999"], "--device mi999 is not known"),
        (["--search"], "--search does not go with --rehearse N"),
    ],
)  # fmt: skip
def test_a_layout_that_cannot_work_is_refused_with_the_remedy(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    replaced = {"--device", "--parallelism.tensor_parallel_degree"} & {*given, *given[:1]}
    arguments = [*SMALL]
    for name in replaced | ({"--parallelism.tensor_parallel_degree"} if "zero_stage" in given[0] else set()):
        place = arguments.index(name)
        del arguments[place : place + 2]
    assert rehearse.main([*arguments, *given]) == 2
    assert said in capsys.readouterr().err


def test_it_lists_what_a_layer_saves_in_the_form_of_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert rehearse.main([*SMALL, "--saved"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert re.match(r"# attention: [\d,]+ bytes per token in bf16; by its list in shapes/ [\d,]+$", heading)
    assert 'Saved("input_layernorm", self.hidden_size, PROJECT, FP32),' in lines
    assert lines.count('Saved("mlp", self.intermediate_size, OUTPUT),') == 3
    names = {name: getattr(saved, name) for name in ("Saved", "PROJECT", "MIX", "OUTPUT", "FP32")}
    pasted = eval(f"[{''.join(lines)}]", {**names, "self": PRESETS["debug"]})
    assert rehearse.main([*SMALL, "--saved", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"attention": [tensor._asdict() for tensor in pasted]}


def test_a_lean_update_is_rehearsed_on_a_few_rows(capsys: pytest.CaptureFixture[str]) -> None:
    lean = ["--optimizer.state", "8bit", "--optimizer.master", "bf16_sr", "--memory.offload", "optimizer"]
    assert rehearse.main([*SMALL, *lean, "--json"]) == 0  # fake tensors have no values to read
    assert json.loads(capsys.readouterr().out)["ranks"][0]["memory"]["host"] > 0


def test_the_launcher_hands_over(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.main([*SMALL, "--ranks", "16"])
    assert ended.value.code == 2 and "--ranks 16 does not exist; the ranks are 0 to 15" in capfd.readouterr().err
    assert launch.main(["--rehearse", "--help"]) == 0 and "--rehearse N" in capfd.readouterr().out


TABLE = re.findall(
    r"^\| `(qwen3_\w+[\d.]*\w*)` \| (\d+) \| [^|]* \| ([\d.]+) GiB \|$",
    (REPO / "train_configs" / "README.md").read_text().split("peak per GCD, rehearsed")[1],
    re.MULTILINE,
)


@pytest.mark.full
@pytest.mark.parametrize(("name", "ranks", "peak"), [row for row in TABLE if "_pp" not in row[0]])
def test_a_shipped_configs_peak_is_what_the_table_says(name: str, ranks: str, peak: str) -> None:
    """Counted of two and three layers, as each more adds as much; a pipeline's would take minutes."""
    path = str(REPO / "train_configs" / f"{name}.toml")
    config = load_config(["--job.config_file", path], int(ranks), with_files=False)
    spec, found = config.spec(), []
    for layers in (2, 3):
        enough = enough_microbatches(config.layout(int(ranks)), config.batch(int(ranks)), "1F1B")
        smaller = replace(spec, num_hidden_layers=layers)
        with as_rank(Workload(config, int(ranks), smaller), 0, enough, GPU) as fake:
            found.append(fake.count_step().peak)
    whole = found[1] + (spec.num_hidden_layers - 3) * (found[1] - found[0])
    assert whole / 2**30 == pytest.approx(float(peak), rel=0.02)


def test_all_configs_for_pretraining_are_in_the_table() -> None:
    named = {path.stem for path in (REPO / "train_configs").glob("*node*.toml")}
    assert {name for name, _, _ in TABLE} == named and len(named) == 6


def test_the_page_has_the_published_strong_scaling_as_the_bench_computes_it() -> None:
    lines, page = list(strong()), (REPO / "docs" / "MEMORY.md").read_text()
    assert len(lines) == 3 and all(f"\n{line}\n" in page for line in lines)
    # by hand: with 1F1B m of m + 15 turns are work; 8 pipelines of 115 microbatches, or one of all 920
    assert "| 115 (920 rows a step) |" in lines[1] and 115 / 130 / (920 / 935) >= 0.899 > 114 / 129 / (912 / 927)


@pytest.mark.parametrize(
    ("given", "name"),
    [("4090", "RTX 4090"), ("RTX 4090", "RTX 4090"), ("radeon rx 7900 xtx", "RX 7900 XTX"), ("MI100", "MI100")],
)
def test_a_card_is_found_by_the_name_it_is_sold_by(given: str, name: str) -> None:
    assert find_card(given, 0, "mi100")[0].name == name


def test_no_two_cards_have_the_same_name() -> None:
    assert all(find_card(key, 0, "mi100")[0] is gpu for key, gpu in DEVICES.items())
