"""The commands, and the one way to the workshop around the trainer, whose folder may be missing. Imports no torch."""

from importlib import import_module
from typing import Any

from titan_mi100.errors import UserError

COMMANDS = {  # word or words: module, or module:function where it is not `main`, and what it does
    "train": ("launch.launcher", "check the config, prepare the data, start the processes and supervise them"),
    "teach": ("tools.teach", "write what a teacher thinks of a run's rows, to distill it"),
    "doctor": ("tools.doctor", "check this machine: what is wrong with it, and what to do about it"),
    "coming-from": ("workshop.coming_from", "say what an option of another trainer is here"),
    "configs": ("config.bundled", "list the bundled configs, or print one"),
    "config new": ("tools.new_config", "write a config that fits the cards: five questions, or a YAML of others"),
    "inspect": ("tools.inspect_data", "show what will train, token by token"),
    "plan": ("tools.plan", "predict whether a run fits its GPUs, and find the fastest layout"),
    "sweep": ("workshop.sweep.command", "measure layouts, batch sizes and checkpointing on your cards: one table"),
    "prepare": ("tools.prepare_corpus", "tokenise a corpus for pretraining into shards"),
    "profile": ("workshop.summarise_trace", "summarise a trace that a run has written"),
    "outcome": ("watch.outcome", "how a run stands or ended, and what follows, for batch scripts"),
    "report": ("workshop.report", "one page about a run"),
    "score": ("tools.score", "give sampled answers their scores, and keep the right ones"),
    "generate": ("tools.generate", "let a model answer prompts"),
    "rounds": ("tools.rounds", "sample, score and train again and again: learn from own answers"),
    "sample": ("tools.sample", "write k sampled answers to each prompt, to score them and learn from them"),
    "evaluate exact-match": ("tools.exact_match", "exact match of generated answers, in GSM8K's format"),
    "evaluate acceptance": ("tools.acceptance", "how many drafts of the draft head (mtp.*) hold, as a server has it"),
    "evaluate harness": ("workshop.harness", "any task of the lm-evaluation-harness (extra eval)"),
    "convert hf-to-dcp": ("tools.convert:hf_to_dcp", "Hugging Face folder to DCP folder"),
    "convert dcp-to-hf": ("tools.convert:dcp_to_hf", "DCP folder, such as a checkpoint, to Hugging Face folder"),
    "convert dcp-to-torch": ("tools.convert:dcp_to_torch", "DCP folder to a file of torch.save"),
    "convert torch-to-dcp": ("tools.convert:torch_to_dcp", "file of torch.save to DCP folder"),
    "convert merge-lora": ("tools.convert:merge_lora", "merge an adapter into its base"),
    "convert inspect-dcp": ("tools.inspect_dcp", "list what a checkpoint holds"),
}
WORKSHOP = {  # a word with an option, or what a command asks for: module:function
    "advice": "workshop.other_trainers:advise",
    "meaning": "workshop.other_trainers:meaning",
    "names": "workshop.other_trainers:names",
    "config new --from": "workshop.from_yaml:carry",
    "inspect --html": "workshop.pages.data_page:write_page",
    "plan --rehearse": "workshop.rehearse:main",
    "rounds --server": "workshop.answer_server:ServedWeights",
    "sample --server": "workshop.answer_server:Server",
    "teach --ids": "workshop.vllm_answers:write_ids",
    "teach --from_vllm": "workshop.vllm_answers:read_answers",
}


def door(words: str) -> Any:
    """Import the function of a command, or of a command with an option. Args: words: as in the tables above.

    Raises:
        UserError: it is the workshop's, and its folder is missing.
    """
    module, _, function = (WORKSHOP.get(words) or COMMANDS[words][0]).partition(":")
    try:
        return getattr(import_module(f"titan_mi100.{module}"), function or "main")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("titan_mi100.workshop"):
            raise
        raise UserError(f"{words} needs titan_mi100/workshop, which is missing; install the whole package") from None
