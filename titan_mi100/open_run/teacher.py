"""A teacher's pass: its log probabilities of a student's rows, written into its folder. No step is taken."""

from functools import partial
from pathlib import Path

from titan_mi100.config.settings import Config
from titan_mi100.data.answer_store import SAMPLED, LogprobStore
from titan_mi100.data.prepare import cache_folder
from titan_mi100.errors import UserError
from titan_mi100.files import child
from titan_mi100.log import log
from titan_mi100.open_run.logprob_pass import LogprobPass
from titan_mi100.open_run.model import choose_backend
from titan_mi100.open_run.run import Supervision
from titan_mi100.open_run.start import choose_stages, read_inputs
from titan_mi100.optim.optimizer import build_optimizer
from titan_mi100.parallel import distributed
from titan_mi100.parallel.build import Computation, Placement, build_model
from titan_mi100.parallel.distributed import World, raise_together
from titan_mi100.run.forecast import Forecast
from titan_mi100.watch.heartbeat import VALIDATION
from titan_mi100.weights.load import load_weights


def write_teacher(
    config: Config, world: World, folder: Path, supervision: Supervision | None = None
) -> tuple[str, str]:
    """Write the teacher's folder, or what it lacks. A collective.

    Args:
        config: of the pass, as titan-mi100 teach writes it: the teacher's weights are frozen.
        supervision: None: not watched, and never told to stop.

    Returns:
        As Outcome has them, the last message and what to do next.

    Raises:
        Preempted: told to stop; the parts that are complete are kept.
        UserError: on all ranks; the folder is that of another teacher or of other rows, or cannot be written.
    """
    supervision = supervision or Supervision()
    inputs = read_inputs(config, world, folder, None, None, None, supervision.heartbeat)
    config, n_vocab = inputs.config, inputs.data.facts.n_vocab
    is_of_samples = config.objective.name == "policy"
    k = 1 if is_of_samples else config.objective.top_k
    if k > n_vocab:
        raise UserError(f"--top_k {k}: the tokenizer has {n_vocab:,} ids; the usual is 32")
    attention, head = choose_backend(inputs)
    stages = choose_stages(inputs, Forecast(inputs, world, folder).plan.card)
    mesh = distributed.build_mesh(inputs.layout, world.device)
    computation, placement = Computation(attention.make(), head), Placement(mesh, inputs.world.device)
    model = build_model(inputs, computation, placement, stages.get("stages", ()))
    # of adapters that change nothing; it takes no step
    trained, seed = model.trained_parameters(), config.training.seed
    optimizer = build_optimizer(trained, config.optimizer, seed, model.weights_device)
    load_weights(model, optimizer, inputs, None)
    child.end()  # no more files from elsewhere are read
    reading = LogprobPass(inputs, distributed.data_parallel_rank(mesh, inputs.layout))
    about = reading.about(k, attention.name, SAMPLED * is_of_samples)
    with raise_together():
        store = LogprobStore(folder, about, "name another folder with --out, or delete this one")
    beat = partial(supervision.heartbeat.begin, VALIDATION, "teacher")
    reading.fill(model, store, supervision.wants_to_stop, beat, cache_folder(config.data))
    with raise_together():
        if world.rank == 0 and not is_of_samples:
            store.warn_of_mass()
    settings = f'name = "{config.objective.name}"' + ', advantage = "teacher"' * is_of_samples
    log.info(f'teacher: {folder} is complete; learn from it: [objective] {settings}, teacher = "{folder}"')
    return "", "the folder is complete"
