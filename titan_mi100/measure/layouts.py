"""The configs of the measured training steps. Imports no torch."""

from typing import Any

from titan_mi100.config.settings import (
    ActivationCheckpointConfig,
    Config,
    ModelConfig,
    ParallelismConfig,
    TrainingConfig,
)


def config_of(row: dict[str, Any], ranks: int) -> Config:
    """The config of one measured training step.

    Args:
        row: model, layout, batch, ga, seq, checkpointing, dtype, attention, as in form.Steps.
    """
    parallelism = {
        "fsdp2": ParallelismConfig(zero_stage=3),
        "ddp": ParallelismConfig(zero_stage=0),
        "pp": ParallelismConfig(pipeline_parallel_degree=ranks),
        "one card": ParallelismConfig(),
    }
    return Config(
        model=ModelConfig(flavor=row["model"], attention_backend=row["attention"]),
        training=TrainingConfig(
            seq_len=row["seq"],
            local_batch_size=row["batch"],
            gradient_accumulation_steps=row["ga"],
            mixed_precision_param=row["dtype"],
        ),
        parallelism=parallelism[row["layout"]],
        activation_checkpoint=ActivationCheckpointConfig(mode=row["checkpointing"]),
    )
