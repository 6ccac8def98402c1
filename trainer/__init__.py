"""The trainer: decides which groups are trained, trains them, and sends the weights to engines.

Folders, each of which imports only folders that are listed after it:

    reproduction   `steplog replay step`: rebuilds a batch and trains it again
    offline        training on a fixed range of the log
    decisions      verdicts on groups, the choice of a batch, and the thread that writes Decisions
    incarnation    one start of the trainer in a run: its ledger, its marks, its fenced producer
    progress       terminal view, log lines, trackers
    checkpoints    sharded checkpoints, written in the background
    model          loading, sharding and running a transformers model
    weights        sending a version to every engine
    data           groups to samples, batches and packs
    algorithm      advantages, losses, aggregation, alarms

The modules beside them put these together: `service` starts a process, `loop` is the training loop of
rank 0, `saving` says when it saves, `training` trains one Decision on every rank, `learner` makes one
optimizer step, and `learner_state` names what the next one depends on.
"""
