"""The GPU check: what anybody with a new card can measure in fifteen minutes, offline, with one command each.

    bash scripts/gpu_check/first.sh     # at most 10 minutes, what matters most first
    bash scripts/gpu_check/second.sh    # 4 minutes more

Are our kernels right on this card, how fast are they beside the libraries' kernels, how fast does the trainer train,
and what holds it back? `sections.py` lists the sections with their time limits, a module for each kind of measurement:

    environment   versions, the doctor, rates of copies and matrix products
    kernels       values of our kernels against fp64, and their speed beside other implementations
    attention     the same of each tile of the attention kernels
    optimizer     the same of the optimizer's kernel
    steps         training steps of published shapes with random weights; host waits, largest kernels
    plain_loop    losses equal to those of a plain loop around transformers, and that loop's speed
    commands      train, SIGKILL, resume, export, generate, as a user types them
    sanitizer     compute-sanitizer over one launch of each kernel

Each measurement is printed and added to the certificate when it ends. `run.py` starts them in a process of their own,
which is replaced if it crashes or exceeds a limit: a failure never hides the other measurements. To add a kernel, add
an entry to `kernels.KERNELS`.
"""
