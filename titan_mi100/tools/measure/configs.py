"""The configs of the measured training steps. Imports no torch."""

from typing import Any

from titan_mi100.config import settings


def config_of(row: dict[str, Any], ranks: int) -> settings.Config:
    """The config of one measured training step.

    Args:
        row: model, layout, batch, ga, seq, checkpointing, dtype, attention, see tasks.steps.
    """
    parallelism = {
        "fsdp2": settings.ParallelismConfig(zero_stage=3),
        "ddp": settings.ParallelismConfig(zero_stage=0),
        "pp": settings.ParallelismConfig(pipeline_parallel_degree=ranks),
        "one card": settings.ParallelismConfig(),
    }
    return settings.Config(
        model=settings.ModelConfig(flavor=row["model"], attention_backend=row["attention"]),
        training=settings.TrainingConfig(
            seq_len=row["seq"],
            local_batch_size=row["batch"],
            gradient_accumulation_steps=row["ga"],
            mixed_precision_param=row["dtype"],
        ),
        parallelism=parallelism[row["layout"]],
        activation_checkpoint=settings.ActivationCheckpointConfig(mode=row["checkpointing"]),
    )
