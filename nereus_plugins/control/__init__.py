"""Commands to a live job from outside: `nereus transition`, `status`, `pause`, `resume`.

    nereus transition ->  Server (a thread in the job's driver)  ->  Inbox  <- pull - the driver,
       (Client)              loopback, per-job token                           at its boundary

A command is only written into the inbox; the trainer's driver pulls it at its next iteration
boundary and stays the one caller of the workers. So a command that is wrong, late or sent twice
cannot hurt the job. Framework-neutral: an adapter has a `Driver`, which pulls from the inbox, and
keeps the job's records, journal and epochs.
"""
