"""Ranks of processes that were started without torchrun: read from srun's variables; mpirun's are refused."""

import re
from collections.abc import Mapping

from titan_mi100.errors import UserError

RUN_FOLDER = "TITAN_RUN_FOLDER"  # environment variable: the run folder that the launcher has made
ASKS_COMMITS = "TITAN_ASKS_COMMITS"  # environment variable: the launcher asks for the commits before the run folder
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MPI = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")
_REMEDY = (
    "start with torchrun, srun or one ./run_train.sh, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, "
    "MASTER_ADDR and MASTER_PORT for each process"
)


def srun_tasks(environ: Mapping[str, str]) -> int:
    """Number of processes that srun has started; 1 if it was not srun, or a launcher has set RANK.

    A batch script and the shell of salloc are one process, although they see SLURM_PROCID = 0 and SLURM_NTASKS, the
    number of the job's tasks. Only the processes of a step have the variables of a step.

    Raises:
        UserError: mpirun has started several processes.
    """
    if environ.get("RANK"):
        return 1
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    in_step = name != "SLURM_NTASKS" or "SLURM_STEP_ID" in environ or environ.get("SLURM_PROCID", "0") != "0"
    tasks = _number(environ, name) if in_step else 1
    for name in _MPI:
        _check_size(environ, name, tasks)
    return tasks


def srun_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would set, if srun has started several processes; else {}.

    Raises:
        UserError: several processes were started, but this one's rank is not known.
    """
    tasks = srun_tasks(environ)
    if not environ.get("RANK"):
        _check_size(environ, "WORLD_SIZE", tasks)
    if tasks == 1:
        return {}
    # below the ephemeral ports; different for each job and step, because they may share a node
    step = _number({"SLURM_STEP_ID": "0", **environ}, "SLURM_STEP_ID")
    port = 10_000 + (_number(environ, "SLURM_JOB_ID") + 997 * step) % 20_000
    variables = {
        "RANK": _number(environ, "SLURM_PROCID"),
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": _number(environ, "SLURM_LOCALID"),
        "LOCAL_WORLD_SIZE": _tasks_of_node(environ),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or _first_host(environ),
        "MASTER_PORT": environ.get("MASTER_PORT") or port,
    }
    return {name: str(value) for name, value in variables.items()}


def check_place(environ: Mapping[str, str]) -> None:
    """Check a launcher's variables. Raises UserError: some are missing, or they contradict each other."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1", **environ}
    variables.setdefault("LOCAL_WORLD_SIZE", variables["WORLD_SIZE"])
    _number(variables, "MASTER_PORT")
    for name, limit in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if _number(variables, name) >= _number(variables, limit):
            raise UserError(f"{name} = {variables[name]} needs a {limit} above it; {_REMEDY}")
    if "RANK" in environ and (missing := {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - environ.keys()):
        raise UserError(f"RANK is set, but not {', '.join(sorted(missing))}; {_REMEDY}")


def device_index(environ: Mapping[str, str], usable: int) -> int:
    """The index of this process's GPU among those that it can see.

    Args:
        usable: number of GPUs that it can see. A task of srun may see only its own, which is then number 0.

    Raises:
        UserError: more processes than devices.
    """
    rank, processes = int(environ.get("LOCAL_RANK", "0")), int(environ.get("LOCAL_WORLD_SIZE", "1"))
    if processes <= usable:
        return rank
    if usable == 1 and "SLURM_STEP_ID" in environ:
        return 0
    raise UserError(
        f"{processes} processes, usable GPUs: {usable}; start with --nproc_per_node {usable}, or under srun give each "
        "task a GPU of its own (--gpus-per-task=1), or let it see all of its node (--gpus-per-node, --gpu-bind=none)"
    )


def _check_size(environ: Mapping[str, str], name: str, tasks: int) -> None:
    if (size := environ.get(name) or "1") not in ("1", str(tasks)):
        raise UserError(f"{name} = {size}, but RANK is not set: each process would train a model of its own; {_REMEDY}")


def _number(environ: Mapping[str, str], name: str) -> int:
    if not re.fullmatch("[0-9]{1,10}", value := environ.get(name, ""), re.ASCII):
        raise UserError(f"{name} = {value!r} is no number; {_REMEDY}")
    return int(value)


def _tasks_of_node(environ: Mapping[str, str]) -> int:
    """Tasks on this node, e.g. of `2(x3),1`: 2 on nodes 0 to 2, 1 on node 3."""
    node = _number(environ, "SLURM_NODEID")
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        if (node := node - int(times or 1)) < 0:
            return int(count)
    raise UserError(f"SLURM_STEP_TASKS_PER_NODE = {counts!r} does not have the node of SLURM_NODEID; {_REMEDY}")


def _first_host(environ: Mapping[str, str]) -> str:
    """The first host of a node list, e.g. of `gpu[003-006,009],login1`: gpu003."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    match = re.match(r"((?:[\w.-]|\[\w[^\[\]]*\])+)(?:,|$)", nodes)
    if match is None:
        raise UserError(f"SLURM_STEP_NODELIST = {nodes!r} does not begin with the name of a host; {_REMEDY}")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[1])
