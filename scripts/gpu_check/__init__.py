"""The GPU check: what anybody with a new card can measure in fifteen minutes, offline, with one command each.

    bash scripts/gpu_check/first.sh     # at most 10 minutes, what matters most first
    bash scripts/gpu_check/second.sh    # 4 minutes more

Are our kernels right on this card, how fast are they beside the libraries' kernels, how fast does the trainer train,
and what holds it back? `sections.py` lists the sections with their time limits, a module for each kind of measurement:

    attention     the attention kernels: values and times of each tile
    kernels       our other kernels: values against fp64, times beside other implementations; the optimizer
    steps         training steps of published shapes (steps.toml) with random weights; host waits, largest kernels
    plain_loop    losses equal to those of a plain loop around transformers, and that loop's speed
    commands      doctor, train, SIGKILL, resume, export, generate, as a user types them; compute-sanitizer

Some tasks are the workshop's: matrix products, bandwidth, the attention of libraries. Each measurement is printed and
added to the certificate when it ends. `run.py` lets a process of its own measure (`child.py`), which is replaced if it
crashes or exceeds a limit: a failure never hides the other measurements.
To add a kernel, add an entry to `kernels.KERNELS`; to add a training, a line to steps.toml.
"""
